"""What a checkpoint holds of a run: model, optimizer, random state, counters, and the objects of a user's script.

Invariants:
- Names are those of the unwrapped model, and values are whole tensors or DTensors, so another world size or sharding
  can read them.
- A script's own objects: what was saved can be read whatever the object looks like today. What is the same on all ranks
  is saved from rank 0; what ranks hold as shards is saved and read as shards.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shardway.checkpoint.file_format import TensorTable
from shardway.checkpoint.structure import Parts, Unstorable, find_dtype, put_state_together, take_state_apart
from shardway.errors import UserError

_PACKED_BYTES = 2**15
"""Room for numpy's and Python's states: 2 x 624 numbers of at most ten digits and their commas."""

Tensors = dict[str, Any]
"""Nested dict of tensors, as `torch.distributed.checkpoint` takes it."""


class CheckpointState:
    """What a checkpoint holds of a run and restores: tensors in Shardway's form, files in that of another library.

    Every method is called on all ranks together. A state without tensors, or without files, leaves out their methods.
    """

    def collect(self) -> Tensors:
        """The tensors of this rank."""
        return {}

    def prepare(self, table: TensorTable) -> None:
        """Get ready for a checkpoint with this table; called before `template`."""

    def template(self, table: TensorTable) -> Tensors:
        """The tensors that a checkpoint with this table is read into."""
        return {}

    def install(self, tensors: Tensors) -> None:
        """Install loaded tensors."""

    def count_file_bytes(self) -> int:
        """About how large the files of all ranks become, in bytes."""
        return 0

    def write_files(self, folder: Path) -> None:
        """Write files into the folder of an unfinished checkpoint, and make them durable."""

    def read_files(self, folder: Path, world: int) -> None:
        """Read what `write_files` of `world` ranks has written. Raises JobError if it does not fit."""


@dataclass(frozen=True)
class Trained(CheckpointState):
    """The parts of a run that have tensors; the optimizer is None if only the model counts. It has no files.

    `further` are models beside the first, by name: each is saved as a part of its own ("model-NAME"). `others` are
    optimizers beside the first, saved as "optimizer-NAME". An optimizer may cover several models.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    further: Mapping[str, nn.Module] = field(default_factory=lambda: MappingProxyType({}))
    others: Mapping[str, torch.optim.Optimizer] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def models(self) -> dict[str, nn.Module]:
        """Every model by the name of its part."""
        return {MODEL: self.model, **{f"{MODEL}-{name}": model for name, model in self.further.items()}}

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Every optimizer by the name of its part."""
        first = {OPTIMIZER: self.optimizer} if self.optimizer is not None else {}
        return {**first, **{f"{OPTIMIZER}-{name}": optimizer for name, optimizer in self.others.items()}}

    def collect(self) -> Tensors:
        """The tensors of models and optimizers. Raises UserError if an optimizer keeps anything else."""
        tensors: Tensors = {part: get_model_state_dict(model) for part, model in self.models.items()}
        for part, optimizer in self.optimizers.items():
            # Settings of parameter groups are none of its tensors, and how many groups there are depends on the layout.
            if not optimizer.state:
                tensors[part] = {"state": {}}
                continue
            if not all(_is_plain(value) for state in optimizer.state.values() for value in state.values()):
                parts = _take_optimizer_apart(part, optimizer)
                tensors |= {part: {"values": dict(parts.tensors)}, structure_name(part): parts.text}
                continue
            state = get_optimizer_state_dict(self._around(optimizer), optimizer)
            tensors[part] = {"state": self._named(state["state"])}
        return tensors

    def template(self, table: TensorTable) -> Tensors:
        """The same as `collect`, with states also for parameters that have not been updated yet."""
        tensors: Tensors = {part: get_model_state_dict(model) for part, model in self.models.items()}
        for part, optimizer in self.optimizers.items():
            if structure_name(part) in table.values:
                room = make_room(table, f"{part}.values.")
                tensors |= {part: {"values": room} if room else {}, structure_name(part): ""}
                continue
            if needs_closure(optimizer):
                _check_same_kind(part, optimizer, "another optimizer", table)
                tensors[part] = {"state": {}}
                continue
            with all_trainable(optimizer), hooks_silenced(optimizer):
                state = get_optimizer_state_dict(self._around(optimizer), optimizer)
            tensors[part] = {"state": self._named(state["state"])}
        return tensors

    def install(self, tensors: Tensors) -> None:
        """Load tensors into models and optimizers; the settings of an optimizer's groups stay as they are.

        If there are only weights, the optimizer starts anew: its states were made up for the template.
        """
        for part, model in self.models.items():
            if part in tensors:
                set_model_state_dict(model, tensors[part])
        # Not strict: a parameter that no batch has used yet has no state.
        options = StateDictOptions(strict=False)
        for part, optimizer in self.optimizers.items():
            if part not in tensors:
                optimizer.state.clear()
                continue
            if text := tensors.get(structure_name(part)):
                _install_structure(part, optimizer, text, tensors[part].get("values", {}))
                continue
            if not tensors[part]["state"] and needs_closure(optimizer):
                optimizer.state.clear()
                continue
            around = self._around(optimizer)
            with all_trainable(optimizer), hooks_silenced(optimizer), settings_kept(optimizer):
                today = get_optimizer_state_dict(around, optimizer)
                loaded = {"state": self._unnamed(tensors[part]["state"]), "param_groups": today["param_groups"]}
                set_optimizer_state_dict(around, optimizer, loaded, options=options)

    def _around(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """One module that holds all models, for torch's functions that take one."""
        if not self.further:
            return self.model
        around = nn.Module()
        for number, model in enumerate(self.models.values()):
            around.add_module(f"m{number}", model)
        return around

    def _named(self, states: Any) -> dict[str, Any]:
        """States by the names of parameters, from their names in `_around`."""
        if not self.further:
            return dict(states)
        prefixes = {f"m{number}": _prefix(part) for number, part in enumerate(self.models)}
        cut = ((name.partition("."), state) for name, state in states.items())
        return {f"{prefixes[first]}{rest}": state for (first, _, rest), state in cut}

    def _unnamed(self, states: Mapping[str, Any]) -> dict[str, Any]:
        if not self.further:
            return dict(states)
        numbers = {_prefix(part): f"m{number}" for number, part in enumerate(self.models)}
        cut = ((name.rpartition(":"), state) for name, state in states.items())
        return {f"{numbers[f'{model}{colon}']}.{rest}": state for (model, colon, rest), state in cut}


MODEL, OPTIMIZER = "model", "optimizer"
"""The prefixes of names of tensors of the first model and the first optimizer."""


def _prefix(part: str) -> str:
    """What stands before the names of a model's parameters in the state of an optimizer: "D:" of "model-D"."""
    return "" if part == MODEL else f"{part.removeprefix(f'{MODEL}-')}:"


def is_model(part: str) -> bool:
    """Whether a part of a state is that of a model."""
    return part == MODEL or part.startswith(f"{MODEL}-")


def is_optimizer(part: str) -> bool:
    """Whether a part of a state is that of an optimizer."""
    return part == OPTIMIZER or part.startswith(f"{OPTIMIZER}-")


def list_parameters(tensors: Tensors) -> list[str]:
    """The names of all models' tensors in a state, as the state of an optimizer has them."""
    models = filter(is_model, tensors)
    return [f"{_prefix(part)}{name}" for part in models for name in tensors[part]]


def make_room(
    table: TensorTable, begin: str, today: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Empty tensors for the entries of a table whose names begin with `begin`, by the rest of their names; sharded if
    that of `today` with the same shape is."""
    room: dict[str, torch.Tensor] = {}
    for name, row in table.tensors.items():
        if name.startswith(begin):
            own = today.get(rest := name.removeprefix(begin))
            if isinstance(own, DTensor) and tuple(own.shape) == tuple(row.shape):
                room[rest] = torch.empty_like(own)
            else:
                room[rest] = torch.empty(row.shape, dtype=find_dtype(row.dtype))
    return room


def structure_name(part: str) -> str:
    """The name of the value that states how this part is built."""
    return f"structure.{part}"


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer evaluates the loss itself, such as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _take_optimizer_apart(part: str, optimizer: torch.optim.Optimizer) -> Parts:
    """The state of an optimizer that does not fit torch's own form. Raises UserError."""
    try:
        parts = take_state_apart({"of": type(optimizer).__name__, "state": optimizer.state_dict()["state"]})
        found = "lists of shards" if any(isinstance(each, DTensor) for each in parts.tensors.values()) else ""
    except Unstorable as error:
        found = f"a {error.kind}"
    if found:
        raise UserError(
            f"the state of {part} ({type(optimizer).__name__}) holds {found}, which a checkpoint cannot hold.\n"
            "  To do: use an optimizer whose state is tensors, numbers and strings"
            f"{', or parallel.dp_shard = 1' if 'shards' in found else ''}."
        )
    return parts


def _is_plain(value: Any) -> bool:
    """Whether an optimizer's state fits torch's own form: tensors and single values by parameter."""
    return isinstance(value, torch.Tensor) or type(value) in (type(None), bool, int, float, str)


def _check_same_kind(part: str, optimizer: torch.optim.Optimizer, saved: str, table: TensorTable | None = None) -> None:
    name = type(optimizer).__name__
    if table is not None and not any(each.startswith(f"{part}.state.") for each in table.tensors):
        return
    if saved != name:
        raise UserError(
            f"the checkpoint holds the state of {saved} as {part}, and today it is {name}.\n"
            "  Nothing was changed. To do: use the optimizer that the run was saved with."
        )


def _install_structure(
    part: str, optimizer: torch.optim.Optimizer, text: str, values: Mapping[str, torch.Tensor]
) -> None:
    saved = put_state_together(text, lambda name, device: values[name])
    _check_same_kind(part, optimizer, saved["of"])
    groups = optimizer.state_dict()["param_groups"]
    with settings_kept(optimizer):
        optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


@contextlib.contextmanager
def all_trainable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In this context every parameter of the optimizer may have a state: one that is frozen now may have been
    trained."""
    frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextlib.contextmanager
def hooks_silenced(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In this context a step of the optimizer calls no hook of a script: torch takes one to make its states."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    for name in hooks:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, before in hooks.items():
            setattr(optimizer, name, before)


class Together(CheckpointState):
    """Several states as one; their names do not overlap. What is frozen is kept, whatever becomes of it later."""

    def __init__(self, states: Sequence[CheckpointState]) -> None:
        self._states = states
        self._frozen: Tensors | None = None

    def freeze(self) -> None:
        """Keep the current values."""
        self._frozen = None
        self._frozen = tree_map_only(torch.Tensor, torch.clone, self.collect())

    def collect(self) -> Tensors:
        """The tensors of all, or those at `freeze`."""
        if self._frozen is not None:
            return self._frozen
        return {name: value for state in self._states for name, value in state.collect().items()}

    def prepare(self, table: TensorTable) -> None:
        """Get all ready, in their order."""
        for state in self._states:
            state.prepare(table)

    def template(self, table: TensorTable) -> Tensors:
        """The templates of all."""
        return {name: value for state in self._states for name, value in state.template(table).items()}

    def install(self, tensors: Tensors) -> None:
        """Install each part, in their order."""
        for state in self._states:
            state.install(tensors)

    def count_file_bytes(self) -> int:
        """The sum of all."""
        return sum(state.count_file_bytes() for state in self._states)

    def write_files(self, folder: Path) -> None:
        """The files of all."""
        for state in self._states:
            state.write_files(folder)

    def read_files(self, folder: Path, world: int) -> None:
        """The files of all."""
        for state in self._states:
            state.read_files(folder, world)


@contextlib.contextmanager
def settings_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In this context a load leaves the settings of parameter groups as they are.

    The groups also stay the same dicts: a script may hold one of them, and torch makes new ones.
    """
    groups = list(optimizer.param_groups)
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    yield
    for group, setting, loaded in zip(groups, settings, list(optimizer.param_groups), strict=True):
        content = {**loaded, **setting}
        group.clear()
        group.update(content)
    optimizer.param_groups[:] = groups


def count_bytes(tensors: Tensors) -> int:
    """Bytes of the tensors as they are saved: each whole and once, however many ranks hold parts or copies."""
    total = 0
    for value in tensors.values():
        if isinstance(value, dict):
            total += count_bytes(value)
        elif isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
    return total


def random_state() -> Tensors:
    """The generators of this rank: torch (CPU and the current device), numpy, Python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy_state = [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)]
    state: Tensors = {
        "torch": torch.get_rng_state(),
        "others": _pack({"numpy": numpy_state, "python": random.getstate()}),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Tensors) -> None:
    """Restore the generators of this rank."""
    torch.set_rng_state(state["torch"])
    others = json.loads(bytes(state["others"].tolist()))
    kind, keys, position, has_gauss, gauss = others["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = others["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int, rank: int) -> None:
    """Seed every generator of this rank; ranks differ, so that their dropout masks do."""
    mixed = (seed * 1_000_003 + rank) % 2**63
    torch.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def _pack(value: Any) -> torch.Tensor:
    """JSON as bytes of a fixed length, since a template must have the shape of what is read."""
    return torch.tensor(list(json.dumps(value).encode().ljust(_PACKED_BYTES)), dtype=torch.uint8)


# --- a script's own objects

KEPT = "kept"
"""The prefix of names of tensors of kept objects."""


class KeptObjects(CheckpointState):
    """The objects that a script keeps, by name; `leads`: whether this rank's copies are saved.

    What a checkpoint holds of an object that is not here yet waits in `waiting`.
    """

    def __init__(self, device: torch.device, *, leads: bool) -> None:
        self.objects: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}
        self.missing: list[str] = []
        """Objects of which the last loaded checkpoint holds nothing."""
        self._device, self._leads = device, leads
        self._saved: dict[str, str] = {}

    def add(self, name: str, thing: Any) -> None:
        """Keep an object from now on; it loads its waiting state. Raises UserError if its state cannot be stored."""
        check_storable(name, thing)
        self.objects[name] = thing
        if name in self.waiting:
            _load(name, thing, self.waiting.pop(name))

    def collect(self) -> Tensors:
        """The current states; of ranks that do not lead, only their shards."""
        kept: Tensors = {}
        texts: dict[str, str] = {}
        # What no object has taken yet (the script makes it later in the run) is saved as it was.
        for name, state in [*((name, each.state_dict()) for name, each in self.objects.items()), *self.waiting.items()]:
            try:
                parts = _take_apart(name, state)
            except UserError as error:  # it could be stored when it was given: a save must not fail for it
                if self._leads:
                    logging.getLogger("shardway").warning(f"{name} is not in this checkpoint: {error}")
                continue
            own = {key: tensor for key, tensor in parts.tensors.items() if self._leads or isinstance(tensor, DTensor)}
            kept |= {name: own} if own else {}
            texts[structure_name(f"{KEPT}.{name}")] = parts.text
        return {**({KEPT: kept} if kept else {}), **(texts if self._leads else {})}

    def template(self, table: TensorTable) -> Tensors:
        """Targets for all that was saved: shards if today's object has shards of that shape, else whole tensors."""
        begin = structure_name(f"{KEPT}.")
        texts = {name: json.loads(text) for name, text in table.values.items() if name.startswith(begin)}
        self._saved = {name.removeprefix(begin): text for name, text in texts.items()}
        template = {name: found for name in self._saved if (found := self._find_room(name, table))}
        return {KEPT: template} if template else {}

    def install(self, tensors: Tensors) -> None:
        """Let each object load its state. Raises UserError if one refuses it."""
        kept = tensors.get(KEPT, {})
        self.missing = [name for name in self.objects if name not in self._saved]
        for name, text in self._saved.items():
            state = put_state_together(text, partial(self._find, kept.get(name, {})))
            if name in self.objects:
                _load(name, self.objects[name], state)
            else:
                self.waiting[name] = state
        self._saved = {}

    def _find_room(self, name: str, table: TensorTable) -> dict[str, torch.Tensor]:
        today = _take_apart(name, self.objects[name].state_dict()).tensors if name in self.objects else {}
        return make_room(table, f"{KEPT}.{name}.", today)

    def _find(self, loaded: Mapping[str, torch.Tensor], key: str, device: str) -> torch.Tensor:
        """A tensor that was read; a whole one goes to the kind of device that it was on, if this rank has one."""
        tensor = loaded[key]
        if isinstance(tensor, DTensor) or device == "cpu" or self._device.type != device:
            return tensor
        return tensor.to(self._device)


def check_storable(name: str, thing: Any) -> None:
    """Raise UserError if a checkpoint cannot hold the state of an object."""
    if isinstance(thing, type):
        raise UserError(
            f"run.keep({name!r}, ...) was given the class {thing.__name__}.\n  To do: give it an object of it."
        )
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(thing, method, None)):
            raise UserError(
                f"run.keep({name!r}, ...) was given a {type(thing).__name__}, which has no {method}(), so it cannot be "
                "saved and resumed.\n"
                "  To do: give it state_dict() and load_state_dict(state), or keep what inside it has both."
            )
    _take_apart(name, thing.state_dict())


def _take_apart(name: str, state: Any) -> Any:
    try:
        return take_state_apart(state)
    except Unstorable as error:
        where = f"{name}.state_dict()" + (f" at {error.path}" if error.path else "")
        raise UserError(
            f"{where} is a {error.kind}, which a checkpoint cannot hold.\n"
            "  It may consist of dicts, lists and tuples of tensors, numbers, strings and None. To do: let "
            "state_dict() return these, and load_state_dict() make the rest of them."
        ) from None


def _load(name: str, thing: Any, state: Any) -> None:
    try:
        thing.load_state_dict(state)
    except Exception as error:
        raise UserError(
            f"{name} ({type(thing).__name__}) does not take the state that the checkpoint holds of it: "
            f"{type(error).__name__}: {error}\n"
            "  Nothing was changed in the run directory. To do: make it as it was when the run was saved, or keep it "
            "under another name, where it begins anew."
        ) from error
