"""Joins the samples of a user's dataset to a batch, field by field, where the user gives no `collate_fn`.

As `torch.utils.data.default_collate`, and besides: None stays None, dataclasses are trees too, and what cannot be
stacked is one UserError that names the field. Invariant: what torch's function can join has the same values here. This
module must not know ranks, batches or workers.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shardway.data.batch_tree import FieldList, SampleList, has_unclear_lists, mark_lists
from shardway.errors import UserError

_REMEDY = (
    "  To do: give run.loader (or run.validation) a collate_fn, a function from a list of samples to a batch: "
    "collate_fn=... may pad them, for example."
)


def collate_samples(samples: Sequence[Any]) -> Any:
    """The batch of a list of samples. Raises UserError for a field that cannot be stacked."""
    return _collate(samples, "sample")


def collate_by(collate: Callable[[list[Any]], Any] | None, samples: list[Any]) -> Any:
    """The batch that a user's function makes of some samples (None: `collate_samples`).

    Where a list in it may be one of samples or one of fields, the function is asked again with a sample less: that
    tells one from the other.
    """
    if collate is None or collate is collate_samples:
        return collate_samples(samples)
    batch, rows = collate(samples), len(samples)
    if rows < 2 or not has_unclear_lists(batch, rows):
        return batch
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            smaller = collate(samples[:-1])
    except Exception:  # it takes this many alone
        return batch
    return mark_lists(batch, rows, smaller)


def _collate(values: Sequence[Any], path: str) -> Any:
    first = values[0]
    missing = sum(value is None for value in values)
    if missing:
        return None if missing == len(values) else SampleList(values)
    if isinstance(first, str | bytes):
        return list(values)
    if isinstance(first, Mapping):
        return _collate_mappings(values, path)
    if isinstance(first, list | tuple):
        return _collate_sequences(values, path)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        joined = copy.copy(first)
        for field in dataclasses.fields(first):
            column = [getattr(value, field.name) for value in values]
            object.__setattr__(joined, field.name, _collate(column, f"{path}.{field.name}"))
        return joined
    try:
        return default_collate(list(values))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{_describe(values, path, error)}\n{_REMEDY}") from error


def _collate_mappings(values: Sequence[Mapping[Any, Any]], path: str) -> Any:
    first = values[0]
    for value in values:
        different = first.keys() ^ value.keys() if isinstance(value, Mapping) else first.keys()
        if different:
            raise UserError(f"{path} has the field {min(different, key=repr)!r} in some samples only.\n{_REMEDY}")
    columns = {
        key: _collate(
            [value[key] for value in values], f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]"
        )
        for key in first
    }
    if type(first) is dict or not isinstance(first, MutableMapping):
        return columns
    joined = copy.copy(first)
    for key, column in columns.items():
        joined[key] = column
    return joined


def _collate_sequences(values: Sequence[Any], path: str) -> Any:
    first = values[0]
    lengths = [len(value) if isinstance(value, list | tuple) else -1 for value in values]
    if len(set(lengths)) > 1:
        shown = ", ".join("no length" if length < 0 else str(length) for length in sorted(set(lengths)))
        raise UserError(f"{path} is a {type(first).__name__} of a different length in each sample: {shown}.\n{_REMEDY}")
    names = getattr(first, "_fields", None)
    columns = [
        _collate([value[i] for value in values], f"{path}.{names[i]}" if names else f"{path}[{i}]")
        for i in range(len(first))
    ]
    return type(first)(*columns) if names else FieldList(columns)


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
