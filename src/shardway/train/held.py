"""What a script holds in its run, by name: models, optimizers, schedulers, averages, other objects, its own settings.

Invariants:
- Names are unique and the same in each process of the run, so that a checkpoint finds its objects. Objects that the run
  finds by itself (a scheduler of one of the script's optimizers, an average of one of its models) are held as well. If
  two of a kind make a name ambiguous, the run ends with an error before it trains.
- Only what every rank keeps under the same name takes part, so no rank waits for another.
- A state that cannot be saved or restored exactly is not used. What is saved is complete: in a notebook an interrupt
  waits until it is (`ranks.stop`), and the run continues in the next cell.
- After a resume, what the script has changed holds as if the run had not stopped. If today's script begins with another
  value than the saved one did (another argument), the user has changed it: today's value holds, and this is reported.
  So each value is kept twice, as JSON (`checkpoint.state`): as it was when the loop began, and as it is now.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import itertools
import json
import re
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from shardway.checkpoint.file_format import TensorTable
from shardway.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    CheckpointState,
    KeptObjects,
    Tensors,
    Trained,
    Unstorable,
    inline,
    parameters_of,
    read_inline,
)
from shardway.errors import UserError, list_some
from shardway.layout import needs_sharding
from shardway.models.contract import canonical_name, held_by_rank
from shardway.parallel.apply import ParallelModel, find_wrapper
from shardway.parallel.axes.replicate import average_buffers
from shardway.parallel.mesh import DIMS, Mesh
from shardway.parallel.precision import Precision
from shardway.ranks.start import Ranks
from shardway.runfile.schema import RunFile

_MARK = "_shardway_run"
"""Attribute of a module that the run holds, and so of its copies."""


SCALER = "grad-scaler"
"""The name of a GradScaler that is found."""


class _RunMark:
    """The run that a model belongs to. A copy of the model has the same mark."""

    def __deepcopy__(self, memo: object) -> _RunMark:
        return self

    def __reduce__(self) -> tuple[type[_RunMark], tuple[()]]:
        return _RunMark, ()


@dataclass(frozen=True, eq=False)
class HeldModel:
    """A model that `run.shard` was given; `part` is the prefix of its tensors in a checkpoint."""

    name: str
    part: str
    parallel: ParallelModel
    precision: Precision

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters, each once, by the names that they have when several models are named together."""
        prefix = "" if self.part == MODEL else f"{self.part.removeprefix(f'{MODEL}-')}:"
        named = self.parallel.module.named_parameters()
        return ((f"{prefix}{canonical_name(name)}", each) for name, each in named)


@dataclass(frozen=True, eq=False)
class HeldOptimizer:
    """An optimizer that `run.optimizer` has made of a model, and the prefix of its states in a checkpoint."""

    name: str
    part: str
    optimizer: torch.optim.Optimizer
    model: HeldModel

    def parameters(self) -> list[nn.Parameter]:
        return parameters_of(self.optimizer)


@dataclass
class Holdings:
    """All that one script holds, in the order in which it was made."""

    kept: KeptObjects
    models: list[HeldModel] = field(default_factory=list)
    optimizers: list[HeldOptimizer] = field(default_factory=list)
    schedulers: dict[str, Any] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)
    """Models of which the script has a copy that changes and that it does not keep, such as an average of its own."""
    _mark: _RunMark = field(default_factory=lambda: _RunMark())
    _copies: weakref.WeakKeyDictionary[nn.Module, float] = field(default_factory=weakref.WeakKeyDictionary)
    """Copies of models that were seen, and the sum of their weights."""

    # --- what the script hands over

    def add_model(self, parallel: ParallelModel, name: str | None, precision: Precision) -> HeldModel:
        """Add a model; the first is called "model" if it has no name."""
        called, part = _call(name, MODEL, [each.name for each in self.models], "run.shard")
        parallel.module.__dict__[_MARK] = self._mark
        self.models.append(HeldModel(called, part, parallel, precision))
        return self.models[-1]

    def add_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module, name: str | None) -> HeldOptimizer:
        """Add an optimizer of a model; the first is called "optimizer" if it has no name."""
        called, part = _call(name, OPTIMIZER, [each.name for each in self.optimizers], "run.optimizer")
        held = self.find_model(model) or (self.models[0] if self.models else None)
        if held is None:
            raise UserError("run.optimizer was called before run.shard: it updates what run.shard returns.")
        self.optimizers.append(HeldOptimizer(called, part, optimizer, held))
        return self.optimizers[-1]

    def add_scheduler(self, scheduler: Any, optimizer: torch.optim.Optimizer, name: str | None) -> str:
        """Add a scheduler of one of the optimizers; returns its name: by default that of optimizer and class."""
        held, kind = self._find_made(optimizer, "run.scheduler", "first"), type(scheduler).__name__
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(scheduler, method, None)):
                raise UserError(
                    f"run.scheduler made a {kind}, which has no {method}(), so it cannot be saved "
                    "and resumed.\n  To do: give it state_dict() and load_state_dict(state)."
                )
        default = f"{held.name}-{kind}"
        taken = [each for each in self.schedulers if each == default or each.startswith(f"{default}-")]
        called = name or (f"{default}-{len(taken) + 1}" if taken else default)
        _check_name(called, self.schedulers, "run.scheduler(name=...)")
        self.schedulers[called] = scheduler
        return called

    def keep(self, name: str, thing: Any) -> None:
        _check_name(name, self.kept.objects, "run.keep")
        self.kept.add(name, thing)

    # --- what the script may mean

    def find_model(self, model: nn.Module) -> HeldModel | None:
        """The held model for the script's module; None if it is not held."""
        return next((each for each in self.models if model in (each.parallel.call, each.parallel.module)), None)

    def find_given(self, model: nn.Module, caller: str) -> HeldModel:
        """The same. Raises UserError if it is not held."""
        held = self.find_model(model)
        if held is None:
            raise UserError(
                f"{caller} was given a {type(model).__name__} that run.shard has not returned.\n"
                "  To do: give it what run.shard has returned, or leave the model out."
            )
        return held

    def check_unwrapped(self, given: nn.Module | None = None) -> None:
        """Raise UserError if the script has put one of torch's wrappers around a model of the run: around what a call
        was `given`, or (None) by sharding a model in place before the loop."""
        if given is None:
            plain = [each for each in self.models if not needs_sharding(each.parallel.mesh.layout)]
            looked = [part for each in plain for part in each.parallel.module.modules()]
            caller, remedy = "run.steps", "do not call fully_shard; to shard the model, set parallel.dp_shard"
        else:
            looked = [given] if self.find_model(given) is None else []
            caller, remedy = "run.step", "give it what run.shard has returned"
        for model in looked:
            wrapper = find_wrapper(model)
            if wrapper:
                inner = getattr(model, "module", model)
                name = type(inner if isinstance(inner, nn.Module) else model).__name__.removeprefix("FSDP")
                raise UserError(
                    f"{caller}: the script has put torch's {wrapper} around the {name} that run.shard has returned, "
                    "which is parallel already: gradients would be averaged or sharded twice.\n"
                    f"  To do: {remedy}."
                )

    def find_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> HeldOptimizer:
        """The optimizer of a model in `run.step`. Raises UserError if there is none or it is ambiguous."""
        if optimizer is not None:
            return self._find_made(optimizer, "run.step", "before run.steps")
        if len(self.optimizers) == 1:
            return self.optimizers[0]
        held = self.find_model(model)
        own = {id(each) for _, each in held.parameters()} if held is not None else set()
        made = [each for each in self.optimizers if each.model is held]
        over = made or [each for each in self.optimizers if own & {id(p) for p in each.parameters()}]
        if len(over) == 1:
            return over[0]
        names = list_some([each.name for each in (over or self.optimizers)], 6)
        what = "several optimizers update" if over else "no optimizer of this run updates"
        raise UserError(
            f"run.step cannot tell which optimizer to use: {what} this {type(model).__name__} ({names}).\n"
            "  To do: say which: run.step(model, batch, loss_fn, optimizer)."
        )

    def _find_made(self, optimizer: torch.optim.Optimizer, caller: str, when: str) -> HeldOptimizer:
        for each in self.optimizers:
            if each.optimizer is optimizer:
                return each
        raise UserError(
            f"{caller} was given an optimizer ({type(optimizer).__name__}) that run.optimizer has not made.\n"
            f"  To do: make it with run.optimizer(...) {when}."
        )

    def around(self, held: HeldOptimizer) -> tuple[ParallelModel, tuple[ParallelModel, ...], tuple[ParallelModel, ...]]:
        """The model of an optimizer, further models that it updates, and those that it does not update."""
        own = {id(each) for each in held.parameters()}
        updated = [each for each in self.models if own & {id(p) for _, p in each.parameters()}]
        first = held.model if held.model in updated or not updated else updated[0]
        further = tuple(each.parallel for each in updated if each is not first)
        beside = tuple(each.parallel for each in self.models if each is not first and each not in updated)
        return first.parallel, further, beside

    def trained(self) -> Trained:
        first, *further = self.models
        one, *others = self.optimizers
        return Trained(
            first.parallel.module,
            one.optimizer,
            {each.part.removeprefix(f"{MODEL}-"): each.parallel.module for each in further},
            {each.part.removeprefix(f"{OPTIMIZER}-"): each.optimizer for each in others},
        )

    # --- what is found

    def adopt(self, *, late: bool = False, waiting: Sequence[str] = ()) -> None:
        """Hold the schedulers, averages and gradient scaler that the script has made without the run. Raises
        UserError; so it does for what is made while a state of it is `waiting` since the run was resumed."""
        try:
            self._adopt(late=late, waiting=waiting)
        except UserError:  # perhaps for something that nothing refers to any more
            gc.collect()
            self._adopt(late=late, waiting=waiting)

    def _adopt(self, *, late: bool, waiting: Sequence[str]) -> None:
        kinds = {kind for found in (LRScheduler, AveragedModel, GradScaler) for kind in _with_subclasses(found)}
        own_kinds = {type(each.parallel.module) for each in self.models}
        found = [each for each in gc.get_objects() if type(each) in kinds or type(each) in own_kinds]  # takes 50 ms
        living = [each for each in found if type(each) in kinds]
        for held in self.optimizers:
            own = [each for each in living if getattr(each, "optimizer", None) is held.optimizer]
            own = [each for each in own if isinstance(each, LRScheduler)]
            held_by = [value for each in own for value in vars(each).values()]
            inner = {id(part) for value in held_by for part in (value if isinstance(value, list | tuple) else [value])}
            known = inner | {id(each) for each in self.schedulers.values()}  # inner: those of a SequentialLR, say
            self._adopt_schedulers(held, [each for each in own if id(each) not in known], waiting)
        known = {id(each) for each in self.kept.objects.values()}
        averages = [each for each in living if isinstance(each, AveragedModel) and id(each) not in known]
        for model in self.models:
            alike = [each for each in averages if self._is_average_of(each, model, late=late)]
            averages = [each for each in averages if each not in alike]
            name = f"average-{model.name}"
            if len(alike) > 1 or (alike and name in self.kept.objects):
                raise UserError(
                    f"the script averages {model.name} more than once (AveragedModel), and which average is which "
                    'after a resume is not known.\n  To do: hand each to run.keep("a name", average).'
                )
            for each in alike:
                _check_not_waiting(name, self.kept.waiting if late else (), f'run.keep("{name}", average)')
                self.keep(name, each)
        if not any(isinstance(each, GradScaler) for each in self.kept.objects.values()):
            self._adopt_scaler([each for each in living if isinstance(each, GradScaler)])
        self._look_at_copies(
            [each for each in found if isinstance(each, nn.Module) and type(each) in own_kinds], living
        )

    def _look_at_copies(self, found: Sequence[nn.Module], living: Sequence[Any]) -> None:
        """Find copies of models, made by `copy.deepcopy`, that have changed since they were seen first."""
        kept = [each for each in (*self.kept.objects.values(), *living) if isinstance(each, nn.Module)]
        known = {id(part) for each in kept for part in each.modules()}
        known |= {id(part) for each in self.models for part in each.parallel.module.modules()}
        for copy in found:
            weights = [*copy.parameters()]
            if id(copy) in known or any(
                isinstance(each, DTensor) or each.is_meta or each.is_complex() for each in weights
            ):
                continue
            with contextlib.suppress(RuntimeError, NotImplementedError):  # some quantized weights have no sum
                total = float(sum(each.detach().sum(dtype=torch.float64) for each in weights))
                if self._copies.setdefault(copy, total) == total:
                    continue
                self.moving |= {each.name for each in self.models if type(each.parallel.module) is type(copy)}

    def _adopt_scaler(self, living: Sequence[GradScaler]) -> None:
        able = [each for each in living if each.is_enabled()]
        free = [each for each in able if _MARK not in vars(each)]  # of no earlier run
        free = able if not free and len(able) == 1 and vars(able[0])[_MARK] is not self._mark else free
        if len(free) > 1:
            raise UserError(
                f"the script has {len(free)} GradScalers, and which is which after a resume is not known.\n"
                '  To do: hand each to run.keep("a name", scaler).'
            )
        for each in free:
            _check_not_waiting(SCALER, self.kept.waiting, f'run.keep("{SCALER}", scaler)')
            vars(each)[_MARK] = self._mark
            self.keep(SCALER, each)

    def _is_average_of(self, average: Any, model: HeldModel, *, late: bool) -> bool:
        """Whether an average was made of a model: it has its mark, or was made of the same values before it."""
        pairs = [(canonical_name(name), each) for name, each in average.module.named_parameters()]
        pairs = [(name.removeprefix("module."), each) for name, each in pairs]
        own = [(canonical_name(name), each) for name, each in model.parallel.module.named_parameters()]
        if [(name, tuple(each.shape)) for name, each in pairs] != [(name, tuple(each.shape)) for name, each in own]:
            return False
        if mark := average.module.__dict__.get(_MARK):
            return mark is self._mark
        both = zip((each for _, each in pairs), (held_by_rank(each) for _, each in own), strict=True)
        return not late and all(one.device == other.device and torch.equal(one, other) for one, other in both)

    def _adopt_schedulers(self, held: HeldOptimizer, found: Sequence[Any], waiting: Sequence[str]) -> None:
        kinds = [type(each).__name__ for each in found]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise UserError(
                f"the script has made {kinds.count(twice[0])} schedulers of the class {twice[0]} for one optimizer, "
                "and which is which after a resume is not known.\n"
                f'  To do: make them with run.scheduler({twice[0]}, optimizer, ..., name="..."), so that each is saved '
                "and resumed under its name; or let go of those that are not used."
            )
        for kind, each in zip(kinds, found, strict=True):
            if f"{held.name}-{kind}" in self.schedulers:
                raise UserError(
                    f"the script has made a second scheduler of the class {kind} beside the one that the "
                    "run holds, and which is which after a resume is not known.\n"
                    f'  To do: make both with run.scheduler({kind}, optimizer, ..., name="...").'
                )
            _check_not_waiting(f"{held.name}-{kind}", waiting, f"run.scheduler({kind}, optimizer, ...)")
            self.schedulers[f"{held.name}-{kind}"] = each


def _check_not_waiting(name: str, waiting: Container[str], call: str) -> None:
    """Raise UserError for what the script has made and used after a resume, while its saved state waited for it: that
    state would undo what it has done since."""
    if name in waiting:
        raise UserError(
            f"{name} was made after the run was resumed, so it has begun anew, and what the checkpoint holds of it "
            f"still waits.\n  To do: make it before run.steps, or by {call}, which takes its state at once; then start "
            "again."
        )


def check_several(held: Holdings, values: RunFile) -> None:
    """Raise UserError for settings that need a single model and optimizer."""
    if len(held.models) == 1 and len(held.optimizers) == 1:
        return
    many = f"{len(held.models)} models and {len(held.optimizers)} optimizers"
    if values.parallel.pp > 1:
        raise UserError(
            f"this run has {many}, and a pipeline (parallel.pp = {values.parallel.pp}) trains one model with one "
            "optimizer.\n  To do: set parallel.pp = 1; every other layout takes several."
        )
    if values.train.engine != "torch":
        raise UserError(
            f'this run has {many}, and train.engine = "{values.train.engine}" trains one model with one optimizer.\n'
            '  To do: set train.engine = "torch".'
        )


def _call(name: str | None, kind: str, taken: Sequence[str], caller: str) -> tuple[str, str]:
    """The name of a model or optimizer, and its part of a checkpoint."""
    if name is not None:
        _check_name(name, taken, f"{caller}(name=...)")
    number = len(taken) + 1
    called = name or (kind if number == 1 else f"{kind}-{number}")
    return called, kind if number == 1 else f"{kind}-{name or number}"


def _check_name(name: object, taken: Any, caller: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(
            f"{caller} was given the name {name!r}; a name consists of letters, digits, _ and -.\n"
            "  To do: choose such a name, the same at each start of the run."
        )
    if name in taken:
        raise UserError(
            f"{caller} was given the name {name!r} twice.\n"
            "  To do: give each a name of its own: it is what a resumed run finds it by."
        )


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def average_kept_buffers(objects: Mapping[str, object], ranks: Ranks, mesh: Mesh) -> None:
    """Set floating-point buffers of kept modules to their mean over the ranks, as for the run's models; called on all
    ranks together.

    Each rank's running statistics come from its own samples. A checkpoint has one copy of what is kept, so without this
    a rank would resume with the statistics of another.
    """
    if ranks.world == 1:
        return
    modules: dict[str, nn.Module] = {}
    for name, each in objects.items():
        buffers = list(each.buffers()) if isinstance(each, nn.Module) else []
        has_statistics = any(buffer.is_floating_point() for buffer in buffers)
        if isinstance(each, nn.Module) and has_statistics and not any(isinstance(b, DTensor) for b in buffers):
            modules[name] = each
    here = {(name, tuple((key, tuple(each.shape)) for key, each in m.named_buffers())) for name, m in modules.items()}
    for name, _ in sorted(set.intersection(*ranks.gather(here))):
        average_buffers(modules[name], mesh)


def describe_unlike(kept: KeptObjects, ranks: Ranks) -> str:
    """What is kept on other ranks than the first or is not the same on all, of which the first rank's is saved; "" for
    nothing. Generators are saved of every rank, and large tensors are not compared. Called on all ranks together."""
    if ranks.world == 1:
        return ""
    given = ranks.gather(kept.digests())
    lines = []
    for name in dict.fromkeys(name for each in given for name in each):
        has = [rank for rank, each in enumerate(given) if name in each]
        if 0 not in has:
            lines.append(f"{name} is kept by run.keep on rank {has[0]} and not on rank 0, so it is not saved")
        elif len(has) < ranks.world:
            lines.append(f"{name} is kept by run.keep on {len(has)} of {ranks.world} ranks, and resumes on these alone")
        if 0 in has and len({given[rank][name] for rank in has}) > 1:
            lines.append(f"{name} is not the same on all ranks, and all resume from that of rank 0, which is saved")
    return "; ".join(lines)


# --- what a script changes between two steps besides tensors, saved and restored: settings of parameter groups
# (learning rate, weight decay, ...), groups that were added, its schedulers, what is frozen, which modules evaluate

VALUE = "script"
"""The name of the value in a checkpoint."""

Settings = dict[str, Any]
"""Name of a setting -> its value as JSON."""

Changes = dict[str, list[Any]]
"""Name of an argument -> its value when the run was saved, and today."""

_NOT_SETTINGS = frozenset(("params", "param_names"))
_DERIVED = frozenset(("base_lrs", "initial_lr", "min_lrs"))
"""Settings that schedulers derive from the learning rate: they are reported only as the learning rate."""


class ScriptState(CheckpointState):
    """The state of a script with its `holdings`, as the first rank of each pipeline stage has it. `writes_lr`: the run
    file's schedule sets the learning rate, so that none is put back."""

    def __init__(self, holdings: Holdings, mesh: Mesh, *, writes_lr: bool) -> None:
        self.holdings, self._writes_lr = holdings, writes_lr
        self._stage, self._stages = mesh.coordinate("pp"), mesh.degree("pp")
        self._leads = all(mesh.coordinate(dim) == 0 for dim in (*DIMS, "cp") if dim != "pp")
        self._begin: dict[str, dict[str, Any]] = {}
        self._floats: dict[str, float] = {}
        self._saved: dict[str, dict[str, Any]] = {"optimizers": {}, "schedulers": {}, "models": {}}
        self.changes: Changes = {}

    def begin(self) -> None:
        """Take the script's settings, before anything is restored. Raises UserError if they cannot be stored."""
        self._begin, self._floats = self._read_script(), self._read_floats()

    def _read_floats(self) -> dict[str, float]:
        """Public numbers with a point of modules, such as the rate of a dropout."""
        modules = ((each.name, *pair) for each in self.holdings.models for pair in each.parallel.module.named_modules())
        return {
            ".".join(filter(None, (name, path, key))): value
            for name, path, module in modules
            for key, value in vars(module).items()
            if type(value) is float and not key.startswith("_")
        }

    def describe_unsaved(self) -> Iterator[str]:
        """What the script changes and no checkpoint holds: numbers in modules, and copies of models."""
        now = self._read_floats()
        for name, before in self._floats.items():
            if name in now and now[name] != before and before == before:
                yield (
                    f"{name} is no longer {before:g}, as when the loop began, which no checkpoint holds: after a "
                    "resume it begins as the script makes it. To do: compute it from run.step_number, or make it a "
                    "buffer."
                )
                break
        for name in sorted(self.holdings.moving):
            yield (
                f"the script changes a copy of {name} (copy.deepcopy), which no checkpoint holds: after a resume it "
                'begins anew. To do: run.keep("a name", copy).'
            )

    def _read_script(self) -> dict[str, dict[str, Any]]:
        """Settings of groups by optimizer, states of schedulers, what is frozen and what evaluates by model."""
        held = self.holdings
        return {
            "optimizers": {
                each.name: [_read_group(group) for group in each.optimizer.param_groups] for each in held.optimizers
            },
            "schedulers": {name: _read_scheduler(name, scheduler) for name, scheduler in held.schedulers.items()},
            "models": {
                each.name: {
                    "frozen": [name for name, parameter in each.parameters() if not parameter.requires_grad],
                    "evaluating": [
                        name for name, module in each.parallel.module.named_modules() if not module.training
                    ],
                }
                for each in held.models
            },
        }

    def collect(self) -> Tensors:
        """One value, of the rank that leads."""
        if not self._leads:
            return {}
        held, begin, now = self.holdings, self._begin, self._read_script()
        names = {id(each): name for model in held.models for name, each in model.parameters()}
        optimizers = {}
        for each in held.optimizers:
            begun = begin["optimizers"].get(each.name, [])  # none of what was made after a loop that has ended
            added = [[names.get(id(p)) for p in group["params"]] for group in each.optimizer.param_groups[len(begun) :]]
            kind, settings = type(each.optimizer).__name__, now["optimizers"][each.name]
            optimizers[each.name] = {"begin": begun, "now": settings, "parameters": added, "kind": kind}
        schedulers = {name: self._saved["schedulers"][name] for name in self.unknown}
        for name, state in now["schedulers"].items():
            kind = type(held.schedulers[name]).__name__
            schedulers[name] = {"begin": begin["schedulers"].get(name), "now": state, "kind": kind}
        models = {
            name: {kind: [begin["models"].get(name, {}).get(kind, []), found] for kind, found in kinds.items()}
            for name, kinds in now["models"].items()
        }
        content = {"optimizers": optimizers, "schedulers": schedulers, "models": models}
        return {_value_of(self._stage): json.dumps(content)}

    def describe_unlike(self, ranks: Ranks) -> str:
        """What of a script is not the same on all ranks of a pipeline stage, which a resume takes from the first of
        them; "" for nothing. Called on all ranks together. Raises UserError for learning rates: the weights of ranks
        would drift apart."""
        if ranks.world == 1:
            return ""
        script, optimizers = self._read_script(), self.holdings.optimizers
        parts = {f"the settings of {name}": each for name, each in script["optimizers"].items()}
        parts |= {f"the state of {name}": each for name, each in script["schedulers"].items()}
        parts |= {f"what is frozen in {name}": each["frozen"] for name, each in script["models"].items()}
        parts |= {f"train() and eval() in {name}": each["evaluating"] for name, each in script["models"].items()}
        digests = {name: hashlib.blake2b(json.dumps(each).encode()).hexdigest() for name, each in parts.items()}
        rates = {each.name: [_read_rate(group) for group in each.optimizer.param_groups] for each in optimizers}
        given = ranks.gather((self._stage, rates, digests))
        unlike: list[str] = []
        for rank, (stage, other_rates, other_digests) in enumerate(given):
            first = next(number for number, each in enumerate(given) if each[0] == stage)
            _, first_rates, first_digests = given[first]
            if other_rates != first_rates:
                raise UserError(
                    f"the learning rate is not the same on all ranks: {_render_rates(first_rates)} on rank {first} and "
                    f"{_render_rates(other_rates)} on rank {rank}, so the weights of ranks drift apart.\n"
                    '  Nothing of it is saved. To do: make schedulers, step them and set group["lr"] on every rank; '
                    "then start again, which goes on from the last checkpoint."
                )
            names = first_digests.keys() | other_digests.keys()
            unlike += sorted(name for name in names if first_digests.get(name) != other_digests.get(name))
        listed = ", ".join(dict.fromkeys(unlike))
        return f"{listed}: not the same on all ranks, and all resume from the first rank's" if unlike else ""

    def prepare(self, table: TensorTable) -> None:
        """Make groups that the run has added, and freeze what it has frozen. Raises UserError if a group cannot be made
        again."""
        self.changes = {}
        names = itertools.takewhile(lambda name: name in table.values, map(_value_of, itertools.count()))
        stages = [json.loads(json.loads(table.values[name])) for name in names]
        self._saved = {"optimizers": {}, "schedulers": {}, "models": {}}
        if len(stages) == self._stages:
            self._saved |= stages[self._stage]
        elif stages:  # of another number of stages: each has the flags of its part of a model
            models = {
                name: {
                    kind: [[each for stage in stages for each in stage["models"][name][kind][at]] for at in (0, 1)]
                    for kind in ("frozen", "evaluating")
                }
                for name in stages[0]["models"]
            }
            self._saved |= {**stages[0], "models": models}
        for model in self.holdings.models:
            if (saved := self._saved["models"].get(model.name)) is not None:
                self._put_back_flags(model, saved)
        parameters = {name: each for model in self.holdings.models for name, each in model.parameters()}
        for held in self.holdings.optimizers:
            if (saved := self._saved["optimizers"].get(held.name)) is not None:
                _add_groups(held, saved, parameters)

    def install(self, tensors: Tensors) -> None:
        for held in self.holdings.optimizers:
            if (saved := self._saved["optimizers"].get(held.name)) is not None:
                self._put_back_groups(held, saved)
        for name, scheduler in self.holdings.schedulers.items():
            if (saved := self._saved["schedulers"].get(name)) is not None:
                self._put_back_scheduler(name, scheduler, saved)

    @property
    def unknown(self) -> list[str]:
        """Schedulers in the last loaded checkpoint that today's script has not made."""
        return [name for name in self._saved["schedulers"] if name not in self.holdings.schedulers]

    def list_notes(
        self, checkpoint: str, waiting: Iterable[str], missing: Iterable[str], finished: str
    ) -> Iterator[str]:
        """How the script differs from its checkpoint; `finished`: why it has ended the run, if it has."""
        for name, (before, today) in self.changes.items():
            yield f"{name} was {before} when {checkpoint} was saved and is {today} now: it goes on with {today}."
        for name in (*self.unknown, *waiting):
            yield f"{checkpoint} holds the state of {name}, which the script has not made: it waits to be made."
        for name in missing:
            yield f"{checkpoint} holds no state of {name}: it begins as the script has made it."
        if finished:
            yield f"this run is finished ({finished}): nothing is left to do."

    def take_waiting(self, name: str, scheduler: Any) -> None:
        """A scheduler that was made after the run was resumed takes what was saved of it."""
        if (saved := self._saved["schedulers"].get(name)) is not None:
            scheduler.load_state_dict(read_inline(saved["now"]))

    # --- parts

    def _put_back_flags(self, model: HeldModel, saved: Mapping[str, Any]) -> None:
        begun = self._begin["models"][model.name]
        parameters, modules = dict(model.parameters()), dict(model.parallel.module.named_modules())
        before, now = (set(names) & parameters.keys() for names in saved["frozen"])
        if set(begun["frozen"]) == before:
            for name in before ^ now:
                parameters[name].requires_grad_(name not in now)
        before, now = (set(names) & modules.keys() for names in saved["evaluating"])
        if set(begun["evaluating"]) == before:
            for name in before ^ now:
                modules[name].training = name not in now

    def _put_back_groups(self, held: HeldOptimizer, saved: Mapping[str, Any]) -> None:
        begun: list[Settings] = self._begin["optimizers"][held.name]
        if len(saved["begin"]) != len(begun):
            self.changes[f"{held.name}.param_groups"] = [len(saved["begin"]), len(begun)]
            return
        kind, changes = type(held.optimizer), Changes()
        for number, (group, now) in enumerate(zip(held.optimizer.param_groups, saved["now"], strict=False)):
            if number >= len(begun):
                _set(group, now)
                continue
            place = f"{held.name}.param_groups[{number}]" if len(begun) > 1 else held.name
            merged = _merge_settings(place, saved["begin"][number], now, begun[number], changes)
            if self._writes_lr:
                merged.pop("lr", None)
            _set(group, merged)
        if self._note_kind(held.name, saved, kind):  # with it come defaults that the script has not set
            changes = {name: both for name, both in changes.items() if _is_set(kind, name.rpartition(".")[2], both[1])}
        self.changes |= changes

    def _note_kind(self, name: str, saved: Mapping[str, Any], kind: type[Any]) -> bool:
        """Whether it was of another class when it was saved, which is a change; earlier checkpoints hold no class."""
        if (before := saved.get("kind", kind.__name__)) == kind.__name__:
            return False
        self.changes[name] = [before, kind.__name__]
        return True

    def _put_back_scheduler(self, name: str, scheduler: Any, saved: Mapping[str, Any]) -> None:
        before, now, today = saved["begin"], saved["now"], self._begin["schedulers"].get(name)
        changes = Changes()
        merged = now if before is None or today is None else _merge(name, before, now, today, changes)
        if not self._note_kind(name, saved, type(scheduler)):  # whose arguments are others
            self.changes |= changes
        try:
            scheduler.load_state_dict(read_inline(merged))
        except Exception as error:
            raise UserError(
                f"the scheduler {name} does not take the state that the checkpoint holds of it: "
                f"{type(error).__name__}: {error}\n"
                "  Nothing was changed in the run directory. To do: make it as it was when the run was saved."
            ) from error


def _read_rate(group: Mapping[str, Any]) -> float:
    rate = group.get("lr")  # an optimizer of a script's own may have none
    return float(rate) if isinstance(rate, int | float | torch.Tensor) else 0.0


def _render_rates(rates: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{rate:g}" for each in rates.values() for rate in each)


def _value_of(stage: int) -> str:
    return VALUE if stage == 0 else f"{VALUE}-{stage}"


def _as_json(value: Any) -> Any:
    """A value as it is after a round trip through JSON. Raises Unstorable."""
    return json.loads(json.dumps(inline(value)))


def _read_scheduler(name: str, scheduler: Any) -> Any:
    """The state of a scheduler as JSON. Raises UserError where it cannot be stored."""
    try:
        return _as_json(scheduler.state_dict())
    except Unstorable as error:
        where = f" at {error.path}" if error.path else ""
        raise UserError(
            f"the state_dict() of the scheduler {name}{where} is a {error.kind}, which a checkpoint cannot hold.\n"
            "  To do: let its state_dict() return numbers, strings, lists and dicts alone."
        ) from None


def _read_group(group: Mapping[str, Any]) -> Settings:
    """The settings of a group. What cannot be stored (a function) is left to the script."""
    settings: Settings = {}
    for name, value in group.items():
        if name not in _NOT_SETTINGS:
            with contextlib.suppress(Unstorable):
                settings[name] = _as_json(value)
    return settings


def _set(group: dict[str, Any], settings: Settings) -> None:
    """Put settings into a group; what has its value already stays the object that it is."""
    current = _read_group(group)
    for name, encoded in settings.items():
        if current.get(name) == encoded:
            continue
        value, held = read_inline(encoded), group.get(name)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
            held.detach().copy_(value)
        else:
            group[name] = value


def _merge(place: str, before: Any, now: Any, today: Any, changes: Changes) -> Any:
    """The value that holds: the saved final value, if today's script begins as the saved one did.

    All are values as JSON; each element of dicts and lists is merged for itself.
    """
    if before == today:
        return now
    kinds = {before[0], now[0], today[0]}
    if len(kinds) == 1 and before[0] in ("dict", "ordered"):
        olds, news, todays = ({json.dumps(key): each for key, each in node[1]} for node in (before, now, today))
        merged = {**todays, **news}
        for key in olds.keys() & news.keys() & todays.keys():
            merged[key] = _merge(f"{place}.{json.loads(key)[-1]}", olds[key], news[key], todays[key], changes)
        return [now[0], [[json.loads(key), each] for key, each in merged.items()]]
    if len(kinds) == 1 and before[0] in ("list", "tuple") and len(before[1]) == len(now[1]) == len(today[1]):
        triples = zip(before[1], now[1], today[1], strict=True)
        return [now[0], [_merge(f"{place}[{at}]", *each, changes) for at, each in enumerate(triples)]]
    name = place.rpartition(".")[2]
    if not name.startswith("_") and name.partition("[")[0] not in _DERIVED:
        values = read_inline(before), read_inline(today)
        changes[place] = [each if isinstance(each, bool | int | float | str | None) else repr(each) for each in values]
    return today


def _merge_settings(place: str, before: Settings, now: Settings, today: Settings, changes: Changes) -> Settings:
    merged = {**today, **now}
    for name in before.keys() & today.keys() & now.keys():
        merged[name] = _merge(f"{place}.{name}", before[name], now[name], today[name], changes)
    for name in today.keys() - before.keys():
        if today[name] != now.get(name, today[name]):
            merged[name] = today[name]
    if "lr" in merged and before.get("lr") != today.get("lr") and "initial_lr" in before.keys() & today.keys():
        # Under a scheduler whose base was changed: the rate at the same place in its schedule.
        base, current, new = (
            float(read_inline(each)) for each in (before["initial_lr"], now["lr"], today["initial_lr"])
        )
        merged["lr"] = inline(new * (current / base)) if base else merged["lr"]
    return merged


def _is_set(kind: type[Any], name: str, value: Any) -> bool:
    """Whether an optimizer of this class has a value of a setting that is none of its defaults."""
    argument = inspect.signature(kind).parameters.get(name.partition("[")[0])
    return argument is not None and argument.default != value


def _add_groups(held: HeldOptimizer, saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    """Make the groups again that the run has added to an optimizer. Raises UserError."""
    optimizer, begun = held.optimizer, len(saved["begin"])
    missing = range(len(optimizer.param_groups), len(saved["now"]))
    if len(optimizer.param_groups) < begun:
        return  # reported as a change of the script's groups
    taken = {id(each) for each in held.parameters()}
    for number in missing:
        names = saved["parameters"][number - begun]
        lost = [name or "one of no model" for name in names if name not in parameters]
        double = [name for name in names if name in parameters and id(parameters[name]) in taken]
        if lost or double:
            why = f"has no {list_some(lost, 6)}" if lost else f"has {list_some(double, 6)} in another group"
            raise UserError(
                f"the run has added a parameter group to {held.name} (group {number}), and the script of today {why}.\n"
                "  Nothing was changed. To do: make models and groups as they were when the run was saved."
            )
        optimizer.add_param_group({"params": [parameters[name] for name in names]})
