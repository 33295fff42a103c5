"""What a script keeps in its run, by name: equal on all ranks, and complete after an error or not.

Invariants:
- Names are unique and the same in each process of the run, so that a checkpoint finds its objects. Objects that the run
  finds by itself (a scheduler of one of the script's optimizers, an average of one of its models) are held as well. If
  two of a kind make a name ambiguous, the run ends with an error before it trains.
- Only what every rank keeps under the same name takes part, so no rank waits for another.
- What is saved is complete. In a notebook an interrupt waits until it is (`ranks.stop`), and the run continues in
  the next cell.

Each rank's running statistics come from its own samples, and so do the averages of them. A checkpoint has one copy of
what is kept, so without this a rank would resume with the statistics of another.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from shardway.checkpoint.state import MODEL, OPTIMIZER, KeptObjects, Trained
from shardway.errors import UserError, list_some
from shardway.models.contract import canonical_name, held_by_rank
from shardway.parallel.apply import ParallelModel
from shardway.parallel.axes.replicate import average_buffers
from shardway.parallel.mesh import Mesh
from shardway.parallel.precision import Precision
from shardway.ranks.start import Ranks
from shardway.ranks.stop import Interrupts
from shardway.runfile.schema import RunFile
from shardway.train.engines.base import Engine
from shardway.train.step import StepContext

_NAME = re.compile(r"[A-Za-z0-9_-]+")


_MARK = "_shardway_run"
"""Attribute of a module that the run holds, and so of its copies."""


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
    precision: Precision | None = None
    """The precision it is computed in; None: that of the run."""

    @property
    def prefix(self) -> str:
        """The prefix of its parameters' names when several models are named together."""
        return "" if self.part == MODEL else f"{self.part.removeprefix(f'{MODEL}-')}:"

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters by name, each once."""
        module = self.parallel.module
        return ((f"{self.prefix}{canonical_name(name)}", each) for name, each in module.named_parameters())


@dataclass(frozen=True, eq=False)
class HeldOptimizer:
    """An optimizer that `run.optimizer` has made of a model, and the prefix of its states in a checkpoint."""

    name: str
    part: str
    optimizer: torch.optim.Optimizer
    model: HeldModel

    def parameters(self) -> list[nn.Parameter]:
        """All parameters that it updates."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


@dataclass
class Holdings:
    """All that one script holds, in the order in which it was made."""

    kept: KeptObjects
    models: list[HeldModel] = field(default_factory=list)
    optimizers: list[HeldOptimizer] = field(default_factory=list)
    schedulers: dict[str, Any] = field(default_factory=dict)
    _mark: _RunMark = field(default_factory=lambda: _RunMark())

    # --- what the script hands over

    def add_model(self, parallel: ParallelModel, name: str | None, precision: Precision | None = None) -> HeldModel:
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
        held = next((each for each in self.optimizers if each.optimizer is optimizer), None)
        if held is None:
            raise UserError(
                f"run.scheduler was given an optimizer ({type(optimizer).__name__}) that run.optimizer has not made.\n"
                "  To do: make it with run.optimizer(...) first."
            )
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(scheduler, method, None)):
                raise UserError(
                    f"run.scheduler made a {type(scheduler).__name__}, which has no {method}(), so it cannot be saved "
                    "and resumed.\n  To do: give it state_dict() and load_state_dict(state)."
                )
        default = f"{held.name}-{type(scheduler).__name__}"
        taken = [each for each in self.schedulers if each == default or each.startswith(f"{default}-")]
        called = name or (f"{default}-{len(taken) + 1}" if taken else default)
        _check_name(called, self.schedulers, "run.scheduler(name=...)")
        self.schedulers[called] = scheduler
        return called

    def keep(self, name: str, thing: Any) -> None:
        """Keep any other object with a state."""
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

    def find_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> HeldOptimizer:
        """The optimizer of a model in `run.step`. Raises UserError if there is none or it is ambiguous."""
        if optimizer is not None:
            found = next((each for each in self.optimizers if each.optimizer is optimizer), None)
            if found is None:
                raise UserError(
                    f"run.step was given an optimizer ({type(optimizer).__name__}) that run.optimizer has not made.\n"
                    "  To do: make it with run.optimizer(...) before run.steps."
                )
            return found
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

    def around(self, held: HeldOptimizer) -> tuple[ParallelModel, tuple[ParallelModel, ...], tuple[ParallelModel, ...]]:
        """The model of an optimizer, further models that it updates, and those that it does not update."""
        own = {id(each) for each in held.parameters()}
        updated = [each for each in self.models if own & {id(p) for _, p in each.parameters()}]
        first = held.model if held.model in updated or not updated else updated[0]
        further = tuple(each.parallel for each in updated if each is not first)
        beside = tuple(each.parallel for each in self.models if each is not first and each not in updated)
        return first.parallel, further, beside

    def trained(self) -> Trained:
        """Models and optimizers as a state that a checkpoint holds."""
        first, *further = self.models
        one, *others = self.optimizers
        return Trained(
            first.parallel.module,
            one.optimizer,
            {each.part.removeprefix(f"{MODEL}-"): each.parallel.module for each in further},
            {each.part.removeprefix(f"{OPTIMIZER}-"): each.optimizer for each in others},
        )

    # --- what is found

    def adopt(self, *, late: bool = False) -> None:
        """Hold the schedulers and averages that the script has made without the run. Raises UserError."""
        try:
            self._adopt(late=late)
        except UserError:  # perhaps for something that nothing refers to any more
            gc.collect()
            self._adopt(late=late)

    def _adopt(self, *, late: bool) -> None:
        living = _instances(LRScheduler, AveragedModel)
        schedulers = [each for each in living if isinstance(each, LRScheduler)]
        for held in self.optimizers:
            known = {id(each) for each in self.schedulers.values()}
            found = _roots([each for each in schedulers if _belongs(each, held.optimizer)])
            self._adopt_schedulers(held, [each for each in found if id(each) not in known])
        known = {id(each) for each in self.kept.objects.values()}
        averages = [each for each in living if isinstance(each, AveragedModel) and id(each) not in known]
        for model in self.models:
            alike = [each for each in averages if self._is_average_of(each, model, late=late)]
            averages = [each for each in averages if each not in alike]
            self._adopt_averages(model, alike)

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

    def _adopt_schedulers(self, held: HeldOptimizer, found: Sequence[Any]) -> None:
        kinds = [type(each).__name__ for each in found]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise UserError(
                f"the script has made {kinds.count(twice[0])} schedulers of the class {twice[0]} for one optimizer, "
                "and which is which after a resume is not known.\n"
                f'  To do: make them with run.scheduler({twice[0]}, optimizer, ..., name="..."), so that each is saved '
                "and resumed under its name; or let go of those that are not used."
            )
        for each in found:
            name = f"{held.name}-{type(each).__name__}"
            if name not in self.schedulers:
                self.schedulers[name] = each
                continue
            raise UserError(
                f"the script has made a second scheduler of the class {type(each).__name__} beside the one that the "
                "run holds, and which is which after a resume is not known.\n"
                f'  To do: make both with run.scheduler({type(each).__name__}, optimizer, ..., name="...").'
            )

    def _adopt_averages(self, model: HeldModel, found: Sequence[Any]) -> None:
        name = f"average-{model.name}"
        if not found:
            return
        if len(found) > 1 or name in self.kept.objects:
            raise UserError(
                f"the script averages {model.name} more than once (AveragedModel), and which average is which after a "
                'resume is not known.\n  To do: hand each to run.keep("a name", average).'
            )
        self.keep(name, found[0])


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
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{caller} was given the name {name!r}; a name consists of letters, digits, _ and -.\n"
            "  To do: choose such a name, the same at each start of the run."
        )
    if name in taken:
        raise UserError(
            f"{caller} was given the name {name!r} twice.\n"
            "  To do: give each a name of its own: it is what a resumed run finds it by."
        )


def _instances(*kinds: type[Any]) -> list[Any]:
    """All living objects of some classes. Called twice in a run: a look at every object takes 50 ms."""
    classes = {each for kind in kinds for each in _with_subclasses(kind)}
    return [each for each in gc.get_objects() if type(each) in classes]


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _belongs(scheduler: Any, optimizer: torch.optim.Optimizer) -> bool:
    return getattr(scheduler, "optimizer", None) is optimizer


def _roots(schedulers: Sequence[Any]) -> list[Any]:
    """The schedulers that are not part of another, in the order in which torch lists them."""
    inner = {id(each) for scheduler in schedulers for each in _parts_of(scheduler)}
    return [each for each in schedulers if id(each) not in inner]


def _parts_of(scheduler: Any) -> Iterator[Any]:
    for value in vars(scheduler).values():
        yield from value if isinstance(value, list | tuple) else (value,)


# --- buffers of kept modules, equal on all ranks


def average_kept_buffers(objects: Mapping[str, object], ranks: Ranks, mesh: Mesh) -> None:
    """Set floating-point buffers of kept modules to their mean over the ranks, as for the run's models; called on all
    ranks together."""
    if ranks.world == 1:
        return
    modules = {name: each for name, each in objects.items() if isinstance(each, nn.Module) and _has_statistics(each)}
    here = {(name, tuple((key, tuple(each.shape)) for key, each in m.named_buffers())) for name, m in modules.items()}
    for name, _ in sorted(set.intersection(*ranks.gather(here))):
        average_buffers(modules[name], mesh)


def _has_statistics(module: nn.Module) -> bool:
    buffers = list(module.buffers())
    return any(each.is_floating_point() for each in buffers) and not any(isinstance(each, DTensor) for each in buffers)


# --- whether what a run holds is complete


class Intact:
    """Whether the model is between two updates; the loop enters it around its pieces of work."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._interrupts, self._broken = ranks, Interrupts(), False

    def held(self, *, apply: bool = True) -> AbstractContextManager[None]:
        """In this context an interrupt waits, except for slow work that is repeated after an interrupt."""
        return self._interrupts.held() if apply else contextlib.nullcontext()

    @contextlib.contextmanager
    def update(self, engine: Engine, moment: StepContext) -> Iterator[None]:
        """One update: until it begins, an error leaves the model as it was."""
        with self._interrupts.held():
            try:
                yield
            except BaseException:
                self._broken = moment.update.begun or not engine.can_void
                raise

    def is_broken(self) -> bool:
        """Whether an update was broken off on any rank; called on all of them."""
        return any(self._ranks.gather(self._broken))

    def describe(self, step: int) -> str:
        """Why nothing is saved."""
        return f"the update of step {step + 1} was broken off, and nothing of it is saved"


def refuse_broken(saved: int) -> UserError:
    """The error if a loop continues after an update that was broken off; `saved`: the step of the last checkpoint."""
    where = f"step {saved}, which is saved" if saved else "the start, since nothing is saved yet"
    return UserError(
        "an error has ended the last update in its midst, so the model is neither before nor after it.\n"
        f"  To do: call shardway.start and make model and optimizer anew: the run goes on from {where}."
    )
