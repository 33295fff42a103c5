"""Converts any state dict to a string and plain tensors, and back.

Invariants:
- Only classes named here are made from a file, so a file cannot choose what is imported. The result has the bits of the
  original.
- The result has the types and the bits of the original. Nothing is a pickle, and the shapes of today are not needed to
  read what was saved.

The string is JSON. Each value is a list that begins with its kind. A tensor appears by name or, if it is `inline`, with
its numbers.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.checkpoint.file_format import Special, TensorPart
from shardway.errors import Bug, SiteError

# --- Takes tensors of special classes apart into plain ones and puts them together again

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
    return Special(kind, [_pack(each) for each in context], parts), plain


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
    made: torch.Tensor = getattr(module, special.kind).__tensor_unflatten__(inner, list(map(_unpack, special.context)))
    return made


def _pack(value: Any) -> Any:
    return _DTYPE + dtype_name(value) if isinstance(value, torch.dtype) else value


def _unpack(value: Any) -> Any:
    is_dtype = isinstance(value, str) and value.startswith(_DTYPE)
    return find_dtype(value.removeprefix(_DTYPE)) if is_dtype else value


# --- Converts any state dict to a string and tensors, and back: nested dicts, lists, tuples, numbers, strings and
# None

MOST_INLINE = 4096
"""The most elements of a tensor in JSON; settings of an optimizer are single numbers."""


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
    return _encode(value, "", _keep_inline)


def read_inline(encoded: Any) -> Any:
    """The value that `inline` encoded."""

    def find(name: str, device: str) -> torch.Tensor:
        raise ValueError(f"the tensor {name} is not in the text")

    return _decode(encoded, find)


def _keep_inline(path: str, tensor: torch.Tensor) -> list[Any]:
    if (
        isinstance(tensor, DTensor)
        or tensor.numel() > MOST_INLINE
        or tensor.is_complex()
        or tensor.layout != torch.strided
    ):
        raise Unstorable(path, f"tensor of shape {tuple(tensor.shape)}")
    numbers = [_number(each) for each in tensor.detach().flatten().tolist()]
    return ["numbers", dtype_name(tensor.dtype), list(tensor.shape), numbers, tensor.device.type]


def _encode(value: Any, path: str, keep: Callable[[str, torch.Tensor], list[Any]]) -> Any:
    if isinstance(value, torch.Tensor):
        return keep(path, value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return ["array", keep(path, torch.from_numpy(np.ascontiguousarray(value)))]
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return ["scalar", value.dtype.str, _number(value.item())]
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return ["value", value]
    if kind is float:
        return ["value", _number(value)] if math.isfinite(value) else ["float", _number(value)]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind is complex:
        return ["complex", _number(value.real), _number(value.imag)]
    if kind is torch.dtype:
        return ["dtype", dtype_name(value)]
    if kind in (torch.device, torch.Size):
        return ["device", str(value)] if kind is torch.device else ["size", list(value)]
    if kind in _MAPPINGS:
        items = [[_encode_key(key, path), _encode(each, _join(path, key), keep)] for key, each in value.items()]
        return [_MAPPINGS[kind], items]
    if kind in _SEQUENCES:
        ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
        return [_SEQUENCES[kind], [_encode(each, _join(path, at), keep) for at, each in enumerate(ordered)]]
    raise Unstorable(path, kind.__name__)


_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MADE: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def _encode_key(key: Any, path: str) -> Any:
    def refuse(where: str, tensor: torch.Tensor) -> list[Any]:
        raise Unstorable(where, "tensor as a key")

    return _encode(key, _join(path, key), refuse)


def _decode(node: Any, find: Callable[[str, str], torch.Tensor]) -> Any:
    kind, *rest = node
    if kind == "tensor":
        return find(*rest)
    if kind == "numbers":
        dtype, shape, numbers, device = rest
        tensor = torch.tensor([_float(each) for each in numbers], dtype=find_dtype(dtype)).reshape(shape)
        return tensor if device == "cpu" or not torch.cuda.is_available() else tensor.to(device)
    if kind == "array":
        return _decode(rest[0], find).cpu().numpy()
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
    if kind in ("dict", "ordered", "counter"):
        return _MADE[kind]([(_decode(key, find), _decode(each, find)) for key, each in rest[0]])
    return _MADE[kind]([_decode(each, find) for each in rest[0]])


def _number(value: Any) -> Any:
    """A number as JSON that keeps its bits."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _float(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
