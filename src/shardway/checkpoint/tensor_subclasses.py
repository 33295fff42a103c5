"""Takes tensors of special classes apart into plain ones and puts them together again.

Invariant: only classes named here are made from a file, so a file cannot choose what is imported. The result has the
bits of the original.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.checkpoint.file_format import Special, TensorPart
from shardway.errors import Bug, SiteError

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
