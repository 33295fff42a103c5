"""A batch as a tree: joins samples field by field, counts and cuts rows, moves tensors.

Invariants:
- A cut takes the same rows of everything in a batch, or raises UserError with the path of what it cannot cut.
- Joining gives the values of `torch.utils.data.default_collate` for all that torch can join. In addition, None stays
  None, dataclasses are trees too, and what cannot be stacked is one UserError that names the field.
- Nothing here depends on ranks, batches of a run or workers.

A tree is made of mappings, lists, tuples, named tuples and dataclasses. A *row* is what a batch holds of one sample.
Tensors and arrays have their rows in dim 0. A list with as many elements as there are rows has one element per row,
unless its elements have rows themselves. Numbers, strings, None and tensors without dimensions belong to all rows.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import numbers
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import register_pytree_node
from torch.utils.data import default_collate

from shardway.errors import UserError

_SHARED = (
    *(str, bytes, numbers.Number, np.generic, enum.Enum, pathlib.PurePath, datetime.date, datetime.timedelta, range),
    *(type, torch.dtype, torch.device, torch.Size),
)
"""Kinds of leaves that belong to all rows."""

_TOP = "batch"


class PackedInputs(NamedTuple):
    """Inputs of which each row holds several documents: `tokens` and `positions`, int64 [rows, seq]; a document begins
    wherever a position is 0. A model takes them as `model(tokens, positions=positions, packed=True)`."""

    tokens: torch.Tensor
    positions: torch.Tensor

    @property
    def named(self) -> dict[str, Any]:
        """The arguments of the model beside its tokens."""
        return {"positions": self.positions, "packed": True}


class FieldList(list[Any]):
    """The fields of a sample, in order, each collated over the samples."""


class SampleList(list[Any]):
    """One element for each sample, whatever the elements are."""


class LengthGroups(SampleList):
    """Samples that are groups of documents of similar length: a pair (inputs, targets), int64 [rows, length] each, for
    every group. Shapes differ, so a pass takes one group. Targets of padding, which stands at the end of its row, are
    -100."""


class FieldTuple(tuple[Any, ...]):
    """As `FieldList`."""


class SampleTuple(tuple[Any, ...]):
    """As `SampleList`."""


_MARKS: dict[tuple[type[Any], bool], type[Any]] = {
    (list, True): SampleList,
    (list, False): FieldList,
    (tuple, True): SampleTuple,
    (tuple, False): FieldTuple,
}
"""(kind, whether it is of samples) -> the marked class."""

_LISTS: tuple[type[Any], ...] = (*_MARKS.values(), LengthGroups)
for _kind in _LISTS:  # so that torch's pytree functions see their elements
    register_pytree_node(_kind, lambda node: (list(node), type(node)), lambda parts, kind: kind(parts))


class _Rows(enum.Enum):
    """How a part of a batch relates to its rows."""

    SHARED = enum.auto()
    EACH = enum.auto()
    """It has every row once."""
    MISFIT = enum.auto()
    """Neither, so it cannot be cut."""


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with `change` applied to each tensor; other leaves stay as they are."""
    return map_leaves(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `change` applied to each leaf."""
    children = _children(tree)
    if children is None:
        return change(tree)
    return _rebuild(tree, [map_leaves(change, child) for _, child in children])


def move_batch(tree: Any, device: torch.device) -> Any:
    """The tree on a device: its tensors, and other leaves with a method `to`, such as graphs and packed sequences."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if _has_method(leaf, "to") and not isinstance(leaf, _SHARED) else leaf

    return map_leaves(move, tree)


def pin_batch(tree: Any) -> Any:
    """The tree in page-locked memory, as far as its leaves support it."""
    return map_leaves(lambda leaf: leaf.pin_memory() if _has_method(leaf, "pin_memory") else leaf, tree)


def count_rows(batch: Any, known: int | None = None) -> int:
    """The rows of a batch: the length of dim 0 of its tensors.

    `known` is how many samples the batch was made of (None: unknown). It counts, unless all tensors agree on fewer
    rows: a collate function may leave samples out. Raises UserError if the number cannot be found.
    """
    if isinstance(batch, LengthGroups):
        return len(batch) if known is None else known
    arrays = [leaf for leaf in _list_direct(batch) if _is_array(leaf) and leaf.ndim]
    lengths = {len(array) for array in arrays}
    if known is None:
        lengths = lengths or {len(leaf) for leaf in list_leaves(batch) if _is_array(leaf) and leaf.ndim}
        if len(lengths) != 1:
            found = f"dim 0 of its tensors has the lengths {sorted(lengths)}" if lengths else "it holds no tensor"
            raise UserError(f"a batch must have its samples in dim 0 of every tensor, and {found}.")
        return lengths.pop()
    if len(lengths) != 1 or known in lengths or max(lengths) > known:
        return known
    elsewhere = any(known in array.shape[1:] for array in arrays)  # [time, batch, ...]
    return known if elsewhere or _has_list_of(batch, known) else lengths.pop()


def is_pair(batch: Any, rows: int) -> bool:
    """Whether a batch is (inputs, targets) and not a list of two samples."""
    return isinstance(batch, list | tuple) and len(batch) == 2 and not _holds_samples(batch, rows, _TOP)


def cut_rows(batch: Any, rows: int, start: int, end: int) -> Any:
    """The rows `start` to `end` of a batch with `rows` rows. Raises UserError for a part that cannot be cut."""
    return _cut(batch, rows, start, end, _TOP)


def fill_empty(batch: Any) -> Any:
    """A batch without rows as one with a row of zeros, for a rank that only keeps in step with the others."""
    return map_tensors(
        lambda tensor: tensor.new_zeros((1, *tensor.shape[1:])) if tensor.ndim and not len(tensor) else tensor, batch
    )


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """The parts of a node, each with its path component; None for a leaf."""
    if isinstance(node, torch.Tensor | str | PackedSequence | torch.Size):
        return None
    return _parts(node)


def _parts(node: Any) -> list[tuple[str, Any]] | None:
    if isinstance(node, Mapping):
        return [(f'["{key}"]' if isinstance(key, str) else f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, list | tuple):
        names = getattr(node, "_fields", None)
        return [(f".{names[i]}" if names else f"[{i}]", value) for i, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{name}", getattr(node, name)) for name in _fields_of(node)]
    return None


def _fields_of(node: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]


def _rebuild(node: Any, values: Sequence[Any]) -> Any:
    """A node like this one with other parts."""
    if isinstance(node, MutableMapping):
        changed = copy.copy(node)  # keeps the type of a mapping that cannot be built from a dict
        for key, value in zip(list(node), values, strict=True):
            changed[key] = value
        return changed
    if isinstance(node, Mapping):
        return dict(zip(node, values, strict=True))
    if isinstance(node, list | tuple):
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    changed = copy.copy(node)
    for name, value in zip(_fields_of(node), values, strict=True):
        object.__setattr__(changed, name, value)  # a frozen dataclass too
    return changed


def list_leaves(tree: Any) -> Iterator[Any]:
    """Every leaf of a tree, in order."""
    children = _children(tree)
    if children is None:
        yield tree
    for _, child in children or ():
        yield from list_leaves(child)


def _has_list_of(tree: Any, length: int) -> bool:
    """Whether a tree holds a list or tuple of `length` elements."""
    here = isinstance(tree, list | tuple) and not _is_of_fields(tree) and len(tree) == length
    return here or any(_has_list_of(child, length) for _, child in _children(tree) or ())


def _list_direct(tree: Any, *, top: bool = True) -> Iterator[Any]:
    """The leaves outside all lists and tuples that may hold one element per sample."""
    children = _children(tree)
    if children is None:
        yield tree
    elif top or not isinstance(tree, list | tuple) or _is_of_fields(tree):
        for _, child in children:
            yield from _list_direct(child, top=False)


def _is_of_fields(node: list[Any] | tuple[Any, ...]) -> bool:
    return isinstance(node, FieldList | FieldTuple) or hasattr(node, "_fields")


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray)


def _has_method(leaf: Any, name: str) -> bool:
    return callable(getattr(leaf, name, None)) and not isinstance(leaf, type)


def _find_rows(node: Any, rows: int) -> _Rows:
    if isinstance(node, PackedSequence):
        return _Rows.EACH if int(node.batch_sizes[0]) == rows else _Rows.MISFIT
    if _is_array(node):
        fits = _Rows.EACH if node.ndim and len(node) == rows else _Rows.MISFIT
        return fits if node.ndim else _Rows.SHARED
    children = _children(node)
    if children is None:
        return _Rows.SHARED if node is None or isinstance(node, _SHARED) or callable(node) else _Rows.MISFIT
    if isinstance(node, list | tuple) and not _is_of_fields(node) and len(node) == rows:
        return _Rows.EACH  # of samples, or of fields that have them all: `_holds_samples` distinguishes them
    found = {_find_rows(child, rows) for _, child in children}
    return next((each for each in (_Rows.MISFIT, _Rows.EACH) if each in found), _Rows.SHARED)


def _holds_samples(node: list[Any] | tuple[Any, ...], rows: int, path: str) -> bool:
    """Whether a list has one element for each row. Raises UserError if it may also be a list of fields."""
    if _is_of_fields(node) or len(node) != rows:
        return False
    if isinstance(node, SampleList | SampleTuple):
        return True
    found = [_find_rows(child, rows) for child in node]
    if path == _TOP and (isinstance(node, tuple) or len(node) == 2):
        return _Rows.EACH not in found
    if rows == 1:
        return _Rows.MISFIT in found  # else both give the same result
    if not _may_be_either(node, rows):
        return True
    raise UserError(
        f"{path} is a {type(node).__name__} of {rows} elements which have {rows} rows each, in a batch of {rows} "
        "samples: it may hold one element for each sample, or fields of all samples, and is to be cut into "
        "micro-batches.\n"
        "  To do: let collate_fn give fields by name (a dict) and stack what belongs to samples, or set "
        "train.micro_batch to a rank's share of the batch, so that nothing is cut."
    )


def _may_be_either(node: list[Any] | tuple[Any, ...], rows: int) -> bool:
    """Whether a list of this length may hold either samples or fields."""
    if isinstance(node, SampleList | SampleTuple) or _is_of_fields(node) or len(node) != rows:
        return False
    found = [_find_rows(child, rows) for child in node]
    fields = _Rows.MISFIT not in found and _Rows.EACH in found
    return fields and any(_is_array(leaf) for leaf in list_leaves(node))


def _has_unclear_lists(batch: Any, rows: int) -> bool:
    unclear = isinstance(batch, list | tuple) and _may_be_either(batch, rows)
    return unclear or any(_has_unclear_lists(child, rows) for _, child in _children(batch) or ())


def _mark_lists(batch: Any, rows: int, smaller: Any) -> Any:
    """The batch with its unclear lists marked as samples or fields: `smaller` is the same batch with one sample
    less."""
    children, others = _children(batch), _children(smaller)
    if children is None or others is None:
        return batch
    unclear = type(batch) in (list, tuple) and _may_be_either(batch, rows)
    of_samples = unclear and len(others) == rows - 1
    if of_samples:
        return _MARKS[type(batch), True](batch)
    known = dict(others)
    parts = [_mark_lists(child, rows, known[name]) if name in known else child for name, child in children]
    return _MARKS[type(batch), False](parts) if unclear else _rebuild(batch, parts)


def _cut(node: Any, rows: int, start: int, end: int, path: str) -> Any:
    if isinstance(node, PackedSequence) and int(node.batch_sizes[0]) == rows:
        padded, lengths = pad_packed_sequence(node, batch_first=True)
        lengths, sorts = lengths[start:end], node.unsorted_indices is not None
        longest = padded[start:end, : int(lengths.max())]
        return pack_padded_sequence(longest, lengths, batch_first=True, enforce_sorted=not sorts)
    if _is_array(node) and node.ndim:
        if len(node) != rows:
            raise _misfit(node, rows, path)
        if isinstance(node, torch.Tensor) and node.is_nested:
            return torch.nested.as_nested_tensor(list(node.unbind()[start:end]), layout=node.layout)
        if isinstance(node, torch.Tensor) and node.layout is torch.sparse_coo:
            return node.index_select(0, torch.arange(start, end, device=node.device))
        if isinstance(node, torch.Tensor) and node.layout is not torch.strided:
            raise _misfit(node, rows, path)
        return node[start:end]
    if _is_array(node):
        return node
    children = _children(node)
    if children is None:
        if _find_rows(node, rows) is _Rows.SHARED:
            return node
        raise _misfit(node, rows, path)
    if isinstance(node, list | tuple) and _holds_samples(node, rows, path):
        return node[start:end]
    return _rebuild(node, [_cut(child, rows, start, end, path + name) for name, child in children])


def _misfit(node: Any, rows: int, path: str) -> UserError:
    if _is_array(node):
        what = f"has the shape {list(node.shape)}" if node.ndim else "has no dimension"
    elif isinstance(node, PackedSequence):
        what = f"is a PackedSequence of {int(node.batch_sizes[0])} sequences"
    else:
        what = f"is of the type {type(node).__name__}"
    kind = "it cannot be cut into micro-batches with the other fields"
    return UserError(
        f"{path} {what} in a batch of {rows} samples, and {kind}.\n"
        "  Allowed: tensors and arrays with the samples in dim 0, lists with one element for each sample, numbers, "
        "strings and None, which belong to all samples.\n"
        "  To do: give run.loader a collate_fn that makes such a batch, or set train.micro_batch to a rank's share of "
        "the batch, so that nothing is cut."
    )


# --- joining samples without a collate_fn

_REMEDY = (
    "  To do: give run.loader (or run.validation) a collate_fn, a function from a list of samples to a batch: "
    "collate_fn=... may pad them, for example."
)


def collate_samples(samples: Sequence[Any]) -> Any:
    """The batch of a list of samples. Raises UserError for a field that cannot be stacked."""
    return _collate(samples, "sample")


def collate_by(collate: Callable[[list[Any]], Any] | None, samples: list[Any]) -> Any:
    """The batch that a user's function makes of some samples (None: `collate_samples`).

    If a list in it may hold samples or fields, the function is called again with one sample less: only a list of
    samples gets shorter.
    """
    if collate is None or collate is collate_samples:
        return collate_samples(samples)
    batch, rows = collate(samples), len(samples)
    if rows < 2 or not _has_unclear_lists(batch, rows):
        return batch
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            smaller = collate(samples[:-1])
    except Exception:  # it accepts only this many
        return batch
    return _mark_lists(batch, rows, smaller)


def _collate(values: Sequence[Any], path: str) -> Any:
    first = values[0]
    missing = sum(value is None for value in values)
    if missing:
        return None if missing == len(values) else SampleList(values)
    if isinstance(first, str | bytes):
        return list(values)
    parts = _parts(first)
    if parts is None:
        try:
            return default_collate(list(values))
        except (RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"{_describe(values, path, error)}\n{_REMEDY}") from error
    if isinstance(first, Mapping):
        for value in values:
            different = first.keys() ^ value.keys() if isinstance(value, Mapping) else first.keys()
            if different:
                raise UserError(f"{path} has the field {min(different, key=repr)!r} in some samples only.\n{_REMEDY}")
        columns = [[value[key] for value in values] for key in first]
    elif isinstance(first, list | tuple):
        lengths = sorted({len(value) if isinstance(value, list | tuple) else -1 for value in values})
        if len(lengths) > 1:
            shown = ", ".join("no length" if length < 0 else str(length) for length in lengths)
            kind = type(first).__name__
            raise UserError(f"{path} is a {kind} of a different length in each sample: {shown}.\n{_REMEDY}")
        columns = [list(column) for column in zip(*values, strict=True)]
    else:
        columns = [[getattr(value, name) for value in values] for name in _fields_of(first)]
    joined = [_collate(column, path + name) for (name, _), column in zip(parts, columns, strict=True)]
    if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
        return FieldList(joined)
    return _rebuild(first, joined)


def _describe(values: Sequence[Any], path: str, error: Exception) -> str:
    shapes = [list(value.shape) for value in values if isinstance(value, torch.Tensor | np.ndarray)]
    if len(shapes) == len(values) and any(shape != shapes[0] for shape in shapes):
        distinct = [shape for i, shape in enumerate(shapes) if shape not in shapes[:i]]
        shown = ", ".join(map(str, distinct[:4])) + (" and others" if len(distinct) > 4 else "")
        return f"{path} has different shapes in the samples of one batch, so they cannot be stacked: {shown}."
    kinds = sorted({type(value).__name__ for value in values})
    if isinstance(error, TypeError):
        return f"{path} is of the type {', '.join(kinds)}, and values of it cannot be stacked to a batch."
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{path} ({', '.join(kinds)}) cannot be stacked to a batch: {reason}"
