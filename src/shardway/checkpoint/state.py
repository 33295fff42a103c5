"""What a checkpoint holds of a run: model, optimizer, random state, and the objects of a user's script.

Any state dict becomes a string (JSON in which each value is a list that begins with its kind) and plain tensors, which
appear in it by name or, if `inline`, with their numbers.

Invariants:
- Only classes named here are made from a file, so a file cannot choose what is imported. The result has the types and
  the bits of the original. Nothing is a pickle, and the shapes of today are not needed to read what was saved.
- Names are those of the unwrapped model, and values are whole tensors or DTensors, so another world size or sharding
  can read them.
- A script's own objects: what was saved can be read whatever the object looks like today. What is the same on all ranks
  is saved from rank 0; what ranks hold as shards is saved and read as shards.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import inspect
import json
import logging
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from shardway.checkpoint.file_format import Special, TensorPart, TensorTable
from shardway.errors import Bug, SiteError, UserError
from shardway.models.contract import canonical_name, find_base
from shardway.untouched import is_untouched

# --- tensors of special classes

_MODULES: Mapping[str, str] = MappingProxyType({"OptimState8bit": "torchao.optim.subclass_8bit"})
"""Class -> the module that has it."""

_DTYPE = "dtype:"


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str) -> torch.dtype:
    """The dtype of this name. Raises ValueError where torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return found


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous plain tensor on the host, as they lie there: of one that is marked as conjugate or
    negative (`is_conj`, `is_neg`) not its values. One of a single element may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def is_known(tensor: torch.Tensor) -> bool:
    """Whether it is of a class that `take_apart` takes apart."""
    return type(tensor).__name__ in _MODULES


def take_apart(tensor: torch.Tensor) -> tuple[Special | None, list[torch.Tensor]]:
    """The plain tensors of a tensor, and what puts them together; None for a plain one."""
    if not is_traceable_wrapper_subclass(tensor):
        return None, [tensor]
    kind = type(tensor).__name__
    if kind not in _MODULES:
        raise Bug(f"a checkpoint cannot hold a {kind}")
    names, context = tensor.__tensor_flatten__()
    plain = [getattr(tensor, name) for name in names]
    pairs = zip(names, plain, strict=True)
    parts = tuple(TensorPart(name, dtype_name(part.dtype), tuple(part.shape)) for name, part in pairs)
    packed = [_DTYPE + dtype_name(each) if isinstance(each, torch.dtype) else each for each in context]
    return Special(kind, packed, parts), plain


def put_together(special: Special, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that was taken apart. Raises ValueError for an unknown class, SiteError if a library is missing."""
    if special.kind not in _MODULES:
        raise ValueError(f"a tensor is a {special.kind}, which this Shardway does not know")
    try:
        module = importlib.import_module(_MODULES[special.kind])
    except ImportError as error:
        raise SiteError(
            f"the checkpoint holds a {special.kind}, whose library cannot be imported: {error}\n"
            "  To do: install torchao, as where it was saved."
        ) from None
    inner = {part.attribute: tensor for part, tensor in zip(special.parts, parts, strict=True)}
    context = [
        find_dtype(each.removeprefix(_DTYPE)) if isinstance(each, str) and each.startswith(_DTYPE) else each
        for each in special.context
    ]
    made: torch.Tensor = getattr(module, special.kind).__tensor_unflatten__(inner, context)
    return made


# --- any state dict as a string and tensors: nested dicts, lists, tuples, numbers, strings and None

MOST_INLINE = 4096  # the most elements of a tensor in JSON; settings of an optimizer are single numbers


class Unstorable(ValueError):
    """A value that a checkpoint cannot hold: its place in the state, and its type."""

    def __init__(self, path: str, kind: str) -> None:
        self.path, self.kind = path, kind
        super().__init__(f"{path or 'it'} is a {kind}")


@dataclass(frozen=True)
class Parts:
    """A state taken apart: its structure, and its tensors by name. DTensors stay DTensors."""

    text: str
    tensors: Mapping[str, torch.Tensor]


def take_state_apart(state: Any) -> Parts:
    """The parts of a state. Raises Unstorable."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(path: str, tensor: torch.Tensor) -> list[Any]:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise Unstorable(path, f"tensor of the layout {tensor.layout}" + (" on the meta device" * tensor.is_meta))
        name, number = path or "tensor", 1
        while name in tensors:
            number += 1
            name = f"{path}#{number}"
        tensors[name] = tensor.detach()
        return ["tensor", name, tensor.device.type]

    return Parts(json.dumps(_encode(state, "", keep)), tensors)


def put_state_together(text: str, find: Callable[[str, str], torch.Tensor]) -> Any:
    """The state of a JSON string; `find` gives a tensor by its name and the type of its device."""
    return _decode(json.loads(text), find)


def inline(value: Any) -> Any:
    """A value without large tensors as plain JSON, so that equal values are equal JSON. Raises Unstorable."""

    def keep(path: str, tensor: torch.Tensor) -> list[Any]:
        large = isinstance(tensor, DTensor) or tensor.numel() > MOST_INLINE
        if large or tensor.is_complex() or tensor.layout != torch.strided:
            raise Unstorable(path, f"tensor of shape {tuple(tensor.shape)}")
        numbers = [_number(each) for each in tensor.detach().flatten().tolist()]
        return ["numbers", dtype_name(tensor.dtype), list(tensor.shape), numbers, tensor.device.type]

    return _encode(value, "", keep)


def read_inline(encoded: Any) -> Any:
    """The value that `inline` encoded."""

    def find(name: str, device: str) -> torch.Tensor:
        raise ValueError(f"the tensor {name} is not in the text")

    return _decode(encoded, find)


def _encode(value: Any, path: str, keep: Callable[[str, torch.Tensor], list[Any]]) -> Any:
    if isinstance(value, torch.Tensor):
        return keep(path, value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize > 8:
        raise Unstorable(path, f"number of {8 * value.dtype.itemsize} bits ({value.dtype})")
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        native = np.asarray(value, value.dtype.newbyteorder("="), order="C")
        order = [] if value.dtype.isnative else [value.dtype.str]
        return ["array", keep(path, torch.from_numpy(native)), *order]
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return ["scalar", value.dtype.str, _number(value.item())]
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return ["value", value]
    if kind is float:
        return ["value" if math.isfinite(value) else "float", _number(value)]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind is complex:
        return ["complex", _number(value.real), _number(value.imag)]
    if kind is torch.dtype:
        return ["dtype", dtype_name(value)]
    if kind in (torch.device, torch.Size):
        return ["device", str(value)] if kind is torch.device else ["size", list(value)]
    if kind in _MAPPINGS:
        places = ((key, each, _join(path, key)) for key, each in value.items())
        return [_MAPPINGS[kind], [[_encode(k, at, _refuse_key), _encode(each, at, keep)] for k, each, at in places]]
    if kind in _SEQUENCES:
        ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
        most = [value.maxlen] if kind is deque and value.maxlen is not None else []
        return [_SEQUENCES[kind], [_encode(each, _join(path, at), keep) for at, each in enumerate(ordered)], *most]
    raise Unstorable(path, kind.__name__)


_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_SEQUENCE_OF = {name: kind for kind, name in _SEQUENCES.items()}


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _refuse_key(path: str, tensor: torch.Tensor) -> list[Any]:
    raise Unstorable(path, "tensor as a key")


def _decode(node: Any, find: Callable[[str, str], torch.Tensor]) -> Any:
    kind, *rest = node
    if kind == "tensor":
        return find(*rest)
    if kind == "numbers":
        dtype, shape, numbers, device = rest
        tensor = torch.tensor([_float(each) for each in numbers], dtype=find_dtype(dtype)).reshape(shape)
        return tensor if device == "cpu" or not torch.cuda.is_available() else tensor.to(device)
    if kind == "array":
        array = _decode(rest[0], find).cpu().numpy()
        return array.astype(rest[1]) if len(rest) > 1 else array  # of another order of bytes
    if kind == "scalar":
        return np.dtype(rest[0]).type(_float(rest[1]))
    if kind in ("value", "float"):
        return rest[0] if kind == "value" else _float(rest[0])
    if kind == "bytes":
        return base64.b64decode(rest[0])
    if kind == "complex":
        return complex(_float(rest[0]), _float(rest[1]))
    if kind == "dtype":
        return find_dtype(rest[0])
    if kind in ("device", "size"):
        return torch.device(rest[0]) if kind == "device" else torch.Size(rest[0])
    if kind in _MAPPINGS.values():
        items = [(_decode(key, find), _decode(each, find)) for key, each in rest[0]]
        return Counter(dict(items)) if kind == "counter" else OrderedDict(items) if kind == "ordered" else dict(items)
    values = [_decode(each, find) for each in rest[0]]
    return deque(values, *rest[1:]) if kind == "deque" else _SEQUENCE_OF[kind](values)


def _number(value: Any) -> Any:
    """A number as JSON that keeps its bits."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _float(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


# --- models and optimizers

_PACKED_BYTES = 2**15  # room for numpy's and Python's states: 2 x 624 numbers of at most ten digits and their commas
Tensors = dict[str, Any]  # nested dict of tensors, as `torch.distributed.checkpoint` takes it


class CheckpointState:
    """What a checkpoint holds of a run and restores: tensors in Shardway's form, files in that of another library.
    Every method is called on all ranks together. A state without tensors, or without files, leaves out their
    methods."""

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
    """The parts of a run that have tensors; the optimizer is None if only the model counts. It has no files. Of a model
    with frozen weights that come again from elsewhere (`find_base`), what is trained is saved. `further`
    are models beside the first, by name: each is saved as a part of its own ("model-NAME"). `others` are optimizers
    beside the first, saved as "optimizer-NAME". An optimizer may cover several models."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    further: Mapping[str, nn.Module] = field(default_factory=lambda: MappingProxyType({}))
    others: Mapping[str, torch.optim.Optimizer] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def models(self) -> dict[str, nn.Module]:
        return {MODEL: self.model, **{f"{MODEL}-{name}": model for name, model in self.further.items()}}

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        first = {OPTIMIZER: self.optimizer} if self.optimizer is not None else {}
        return {**first, **{f"{OPTIMIZER}-{name}": optimizer for name, optimizer in self.others.items()}}

    def collect(self) -> Tensors:
        """The tensors of models and optimizers. Raises UserError if an optimizer keeps anything else."""
        tensors: Tensors = {part: _collect_model(model) for part, model in self.models.items()}
        for part, optimizer in self.optimizers.items():
            # Settings of parameter groups are none of its tensors, and how many groups there are depends on the layout.
            values = [value for state in optimizer.state.values() for value in state.values()]
            if not optimizer.state:
                tensors[part] = {"state": {}}
            elif all(isinstance(each, torch.Tensor) or type(each) in _PLAIN for each in values):
                tensors[part] = {"state": self._state_of(optimizer)}
            else:  # it does not fit torch's own form: tensors and single values by parameter
                parts = _take_optimizer_apart(part, optimizer)
                tensors |= {part: {"values": dict(parts.tensors)}, structure_name(part): parts.text}
            if further := _further_entries(optimizer):
                parts = _take_apart(f"what {type(optimizer).__name__} adds to it: {part}", further)
                tensors[part] |= {"further": dict(parts.tensors)} if parts.tensors else {}
                tensors[structure_name(f"{part}.further")] = parts.text
        return tensors

    def template(self, table: TensorTable) -> Tensors:
        """The same as `collect`, with states also for parameters that have not been updated yet."""
        tensors: Tensors = {part: _collect_model(model) for part, model in self.models.items()}
        for part, optimizer in self.optimizers.items():
            if structure_name(part) in table.values:
                room = make_room(table, f"{part}.values.")
                tensors |= {part: {"values": room} if room else {}, structure_name(part): ""}
            elif needs_closure(optimizer):
                if any(name.startswith(f"{part}.state.") for name in table.tensors):
                    raise _other_kind(part, optimizer, "another optimizer")
                tensors[part] = {"state": {}}
            elif is_foreign(optimizer) and not _has_special(table, f"{part}.state."):
                tensors[part] = {"state": self._room_by_name(table, f"{part}.state.")}
            else:
                with all_trainable(optimizer), hooks_silenced(optimizer):
                    tensors[part] = {"state": self._state_of(optimizer)}
            if structure_name(f"{part}.further") in table.values:
                room = make_room(table, f"{part}.further.")
                tensors[part] |= {"further": room} if room else {}
                tensors[structure_name(f"{part}.further")] = ""
        return tensors

    def install(self, tensors: Tensors) -> None:
        """Load tensors into models and optimizers; the settings of an optimizer's groups stay as they are. If there are
        only weights, the optimizer starts anew: its states were made up for the template."""
        for part, model in self.models.items():
            if part in tensors:
                options = StateDictOptions(strict=not find_base(model))
                set_model_state_dict(model, tensors[part], options=options)
        # Not strict: a parameter that no batch has used yet has no state.
        options = StateDictOptions(strict=False)
        for part, optimizer in self.optimizers.items():
            further: dict[str, Any] = {}
            by_number: dict[int, Any] | None = None
            if text := tensors.get(structure_name(f"{part}.further")):
                further = _put_together(text, tensors[part].get("further", {}))
            if text := tensors.get(structure_name(part)) if part in tensors else None:
                saved = _put_together(text, tensors[part].get("values", {}))
                if saved["of"] != type(optimizer).__name__:
                    raise _other_kind(part, optimizer, saved["of"])
                by_number = saved["state"]
            elif part not in tensors or (not tensors[part]["state"] and needs_closure(optimizer)):
                optimizer.state.clear()
                continue
            elif is_foreign(optimizer):
                by_number = self._by_number(optimizer, tensors[part]["state"])
            if by_number is not None:
                groups = optimizer.state_dict()["param_groups"]
                with settings_kept(optimizer):
                    optimizer.load_state_dict({**further, "state": by_number, "param_groups": groups})
            else:
                around = self._around(optimizer)
                with (
                    all_trainable(optimizer),
                    hooks_silenced(optimizer),
                    settings_kept(optimizer),
                    _loading(optimizer, further),
                ):
                    groups = get_optimizer_state_dict(around, optimizer)["param_groups"]
                    state = self._rename(tensors[part]["state"], own=False)
                    set_optimizer_state_dict(
                        around, optimizer, {"state": state, "param_groups": groups}, options=options
                    )

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self._rename(get_optimizer_state_dict(self._around(optimizer), optimizer)["state"], own=True)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of all models, by their names in the states of optimizers."""
        return {
            _prefix(part) + canonical_name(name): parameter
            for part, model in self.models.items()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def _room_by_name(self, table: TensorTable, begin: str) -> dict[str, dict[str, Any]]:
        """Room for the states that were saved of today's parameters, by parameter; `begin` is how their names begin."""
        known, room = self._named_parameters(), make_room(table, begin)
        single = {name.removeprefix(begin): None for name in table.values if name.startswith(begin)}
        states: dict[str, dict[str, Any]] = {}
        for entry, value in {**room, **single}.items():
            owner = max((name for name in known if entry.startswith(f"{name}.")), key=len, default="")
            if owner:
                states.setdefault(owner, {})[entry.removeprefix(f"{owner}.")] = value
        return states

    def _by_number(self, optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> dict[int, Any]:
        """States by the number of their parameter, as the optimizer has them, from those by name."""
        known, numbers = self._named_parameters(), {id(p): number for number, p in enumerate(parameters_of(optimizer))}
        return {numbers[id(known[name])]: state for name, state in states.items()}

    def _around(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """One module that holds all models, for torch's functions that take one."""
        if not self.further:
            return self.model
        around = nn.Module()
        for number, model in enumerate(self.models.values()):
            around.add_module(f"m{number}", model)
        return around

    def _rename(self, states: Any, *, own: bool) -> dict[str, Any]:
        """States by the names of parameters if `own`, from their names in `_around`; or back."""
        if not self.further:
            return dict(states)
        pairs = [(f"m{number}.", _prefix(part)) for number, part in enumerate(self.models)]
        begins = dict(pairs) if own else {prefix: short for short, prefix in pairs}
        renamed = {}
        for name, state in states.items():
            colon = name.rfind(":") + 1
            begin = f"{name.partition('.')[0]}." if own else name[:colon]
            renamed[begins[begin] + name[len(begin) :]] = state
        return renamed


def _collect_model(model: nn.Module) -> Tensors:
    return get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=bool(find_base(model))))


_PLAIN = (type(None), bool, int, float, str)
MODEL, OPTIMIZER = "model", "optimizer"  # the prefixes of names of tensors of the first model and the first optimizer


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


_KNOWN_HOMES = ("torch.", "shardway.", "torchao.", "deepspeed.", "bitsandbytes.", "apex.", "transformer_engine.")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, in the order of their numbers in its state_dict()."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_foreign(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class is a script's own, so that its `step` may do more than update parameters: it is not called to
    find out which states there are. Of shards they are found so all the same, since each has a layout."""
    home = str(type(optimizer).step.__module__)
    whole = not any(isinstance(parameter, DTensor) for parameter in parameters_of(optimizer))
    return whole and not home.startswith(_KNOWN_HOMES)


def _has_special(table: TensorTable, begin: str) -> bool:
    """Whether a tensor of that beginning is of a special class, which needs a target of that class."""
    return any(
        chunk.special is not None
        for name, row in table.tensors.items()
        if name.startswith(begin)
        for chunk in row.chunks
    )


def _further_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a class of a script adds to the state_dict() of torch's optimizers."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    given = optimizer.state_dict()
    return {key: value for key, value in given.items() if key not in ("state", "param_groups")}


@contextlib.contextmanager
def _loading(optimizer: torch.optim.Optimizer, further: Mapping[str, Any]) -> Iterator[None]:
    """In this context torch's functions load these entries too, whatever the argument of the class is called."""
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        yield
        return

    def load(state_dict: dict[str, Any]) -> None:
        type(optimizer).load_state_dict(optimizer, {**further, **state_dict})

    optimizer.load_state_dict = load  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.__dict__["load_state_dict"]


def _put_together(text: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    return put_state_together(text, lambda name, device: tensors[name])


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


def _other_kind(part: str, optimizer: torch.optim.Optimizer, saved: str) -> UserError:
    return UserError(
        f"the checkpoint holds the state of {saved} as {part}, and today it is {type(optimizer).__name__}.\n"
        "  Nothing was changed. To do: use the optimizer that the run was saved with."
    )


@contextlib.contextmanager
def all_trainable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In this context every parameter of the optimizer may have a state: one that is frozen now may have been
    trained."""
    # One of integers (quantized weights) never has a state, and torch refuses that it asks for a gradient.
    frozen = [p for p in parameters_of(optimizer) if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
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
    """Several states as one, in their order; their names do not overlap. What is frozen is kept, whatever becomes of it
    later."""

    def __init__(self, states: Sequence[CheckpointState]) -> None:
        self._states = states
        self._frozen: Tensors | None = None

    def freeze(self) -> None:
        self._frozen = None
        self._frozen = tree_map_only(torch.Tensor, torch.clone, self.collect())

    def collect(self) -> Tensors:
        if self._frozen is not None:
            return self._frozen
        return {name: value for state in self._states for name, value in state.collect().items()}

    def prepare(self, table: TensorTable) -> None:
        for state in self._states:
            state.prepare(table)

    def template(self, table: TensorTable) -> Tensors:
        return {name: value for state in self._states for name, value in state.template(table).items()}

    def install(self, tensors: Tensors) -> None:
        for state in self._states:
            state.install(tensors)

    def count_file_bytes(self) -> int:
        return sum(state.count_file_bytes() for state in self._states)

    def write_files(self, folder: Path) -> None:
        for state in self._states:
            state.write_files(folder)

    def read_files(self, folder: Path, world: int) -> None:
        for state in self._states:
            state.read_files(folder, world)


@contextlib.contextmanager
def settings_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In this context a load leaves the settings of parameter groups as they are. The groups also stay the same dicts:
    a script may hold one of them, and torch makes new ones."""
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
    found = (each for each in tree_leaves(tensors) if isinstance(each, torch.Tensor))
    return sum(each.numel() * each.element_size() for each in found)


def random_state() -> Tensors:
    """The generators of this rank: torch (CPU and the current device), numpy, Python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy_state = [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)]
    # JSON as bytes of a fixed length, since a template must have the shape of what is read.
    others = json.dumps({"numpy": numpy_state, "python": random.getstate()}).encode().ljust(_PACKED_BYTES)
    state: Tensors = {"torch": torch.get_rng_state(), "others": torch.tensor(list(others), dtype=torch.uint8)}
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


_seeded = set[int]()
"""Seeds that torch's generator was given here, by this process."""


def seed_all(seed: int, rank: int) -> None:
    """Seed every generator of this rank; ranks differ, so that their dropout masks do."""
    _seed_torch(seed, rank)
    np.random.seed(_mix(seed, rank) % 2**32)
    random.seed(_mix(seed, rank))


def seed_untouched(seed: int, rank: int) -> None:
    """The same for the generators that a script has not seeded: torch's if its seed is one that torch has drawn (of 64
    bits, where scripts name a smaller one), NumPy's and Python's if nothing has seeded them or drawn from them."""
    if torch.initial_seed() >= 2**32 or torch.initial_seed() in _seeded:
        _seed_torch(seed, rank)
    state = np.random.get_state()
    if isinstance(state, tuple) and (int(state[1][0]), state[2]) == _NUMPY_AT_IMPORT:
        np.random.seed(_mix(seed, rank) % 2**32)
    if is_untouched():
        random.seed(_mix(seed, rank))


_NUMPY_AT_IMPORT = 2**31, 623
"""The first word and the position of NumPy's generator as entropy of the system has made it; a seed gives another
position (numpy/random/_mt19937.pyx)."""


def _mix(seed: int, rank: int) -> int:
    return (seed * 1_000_003 + rank) % 2**63


def _seed_torch(seed: int, rank: int) -> None:
    torch.manual_seed(_mix(seed, rank))
    _seeded.add(_mix(seed, rank))


# --- a script's own objects

KEPT = "kept"  # the prefix of names of tensors of kept objects


@dataclass(frozen=True)
class KeptGenerator:
    """A generator of random numbers that a script owns: torch's, numpy's or Python's. Ranks may draw from it
    differently, so each saves its own."""

    generator: Any

    @staticmethod
    def of(thing: Any) -> Any:
        """The thing itself, if it is no generator."""
        kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
        return KeptGenerator(thing) if isinstance(thing, kinds) and not isinstance(thing, _FROM_SYSTEM) else thing

    def state_dict(self) -> dict[str, Any]:
        """Its state as numbers, strings and bytes alone, by its kind."""
        own = self.generator
        if isinstance(own, torch.Generator):
            return {"torch": bytes(own.get_state().numpy())}
        if isinstance(own, np.random.Generator):
            return {"numpy": _pack(own.bit_generator.state)}
        if isinstance(own, np.random.RandomState):
            return {"legacy": _pack(own.get_state(legacy=False))}
        return {"python": own.getstate()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises ValueError for one of another kind."""
        own, (kind, value) = self.generator, next(iter(state.items()))
        if kind != (today := next(iter(self.state_dict()))):
            raise ValueError(f"it was a generator of {kind} and is one of {today}")
        if isinstance(own, torch.Generator):
            own.set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        elif isinstance(own, np.random.Generator):
            own.bit_generator.state = _unpack(value)
        elif isinstance(own, np.random.RandomState):
            own.set_state(_unpack(value))
        else:
            own.setstate(value)


def _pack(state: Any) -> Any:
    """Nested dicts with arrays as (dtype, bytes)."""
    if isinstance(state, dict):
        return {name: _pack(value) for name, value in state.items()}
    return (state.dtype.str, state.tobytes()) if isinstance(state, np.ndarray) else state


def _unpack(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _unpack(value) for name, value in state.items()}
    return np.frombuffer(state[1], state[0]).copy() if isinstance(state, tuple) else state


_FROM_SYSTEM = (random.SystemRandom,)
"""Generators without a state."""

_OF_RANK = "@"
"""Stands between the name of a kept generator and a further rank; no name has it."""


class KeptObjects(CheckpointState):
    """The objects that a script keeps, by name. Rank 0's copies are saved, and every rank's generators. What a
    checkpoint holds of an object that is not here yet waits in `waiting`."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.objects: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}
        self.missing: list[str] = []  # objects of which the last loaded checkpoint holds nothing
        self._device, self._rank, self._leads = device, rank, rank == 0
        self._saved: dict[str, str] = {}
        self._of_ranks: dict[str, dict[int, str]] = {}
        self._own: set[str] = set()  # what was loaded as this rank's alone

    def add(self, name: str, thing: Any) -> None:
        """Keep an object from now on; it loads its waiting state. Raises UserError if its state cannot be stored."""
        if isinstance(thing, type):
            raise UserError(
                f"run.keep({name!r}, ...) was given the class {thing.__name__}.\n  To do: give it an object of it."
            )
        thing = KeptGenerator.of(thing)
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise UserError(
                    f"run.keep({name!r}, ...) was given a {type(thing).__name__}, which has no {method}(), so it "
                    "cannot be saved and resumed.\n"
                    "  To do: give it state_dict() and load_state_dict(state), or keep what inside it has both."
                )
        if isinstance(thing, nn.Module) and callable(getattr(thing, "persistent", None)):
            # Metrics of torchmetrics leave their states out of state_dict() otherwise.
            thing.persistent(mode=True)  # type: ignore[operator]
        _take_apart(name, thing.state_dict())
        self.objects[name] = thing
        if name in self.waiting:
            _load(name, thing, self.waiting.pop(name))

    def digests(self) -> dict[str, str]:
        """A digest of each object's state by name, without shards and large tensors; "" for a generator."""
        found = {}
        for name, each in self.objects.items():
            with contextlib.suppress(UserError):  # reported by a save
                parts = _take_apart(name, each.state_dict())
                small = {
                    key: tensor.cpu().tolist()
                    for key, tensor in parts.tensors.items()
                    if not isinstance(tensor, DTensor) and tensor.numel() <= MOST_INLINE
                }
                digest = hashlib.blake2b(repr((parts.text, small)).encode()).hexdigest()
                found[name] = "" if isinstance(each, KeptGenerator) else digest
        return found

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
            if self._leads:
                texts[structure_name(f"{KEPT}.{name}")] = parts.text
            elif isinstance(self.objects.get(name), KeptGenerator) or name in self._own:
                texts[structure_name(f"{KEPT}.{name}{_OF_RANK}{self._rank}")] = parts.text
        return {**({KEPT: kept} if kept else {}), **texts}

    def template(self, table: TensorTable) -> Tensors:
        """Targets for all that was saved: shards if today's object has shards of that shape, else whole tensors."""
        begin, template = structure_name(f"{KEPT}."), {}
        self._saved = {
            name.removeprefix(begin): json.loads(text) for name, text in table.values.items() if name.startswith(begin)
        }
        self._of_ranks = {}
        for name in [each for each in self._saved if _OF_RANK in each]:
            called, _, rank = name.partition(_OF_RANK)
            self._of_ranks.setdefault(called, {})[int(rank)] = self._saved.pop(name)
        for name in self._saved:
            today = _take_apart(name, self.objects[name].state_dict()).tensors if name in self.objects else {}
            if room := make_room(table, f"{KEPT}.{name}.", today):
                template[name] = room
        return {KEPT: template} if template else {}

    def install(self, tensors: Tensors) -> None:
        """Let each object load its state. Raises UserError if one refuses it."""
        kept = tensors.get(KEPT, {})
        self.missing = [name for name in self.objects if name not in self._saved]
        self._own = {name for name, others in self._of_ranks.items() if self._rank in others}
        for name, first in self._saved.items():
            others = self._of_ranks.get(name, {})
            if not self._leads and self._rank not in others and set(others.values()) - {first}:
                self.missing.append(f"{name} (a generator) of rank {self._rank}")
                continue
            text = first if self._leads else others.get(self._rank, first)
            state = put_state_together(text, partial(self._find, kept.get(name, {})))
            if name in self.objects:
                _load(name, self.objects[name], state)
            else:
                self.waiting[name] = state
        self._saved = {}

    def _find(self, loaded: Mapping[str, torch.Tensor], key: str, device: str) -> torch.Tensor:
        """A tensor that was read; a whole one goes to the kind of device that it was on, if this rank has one."""
        tensor = loaded[key]
        if isinstance(tensor, DTensor) or device == "cpu" or self._device.type != device:
            return tensor
        return tensor.to(self._device)


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
