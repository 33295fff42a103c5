"""Writes the models of a checkpoint as files that any PyTorch script reads: `model.safetensors` and `model.pt`, and
`model-NAME.safetensors` and `model-NAME.pt` for each further model of a script.

Invariant: names, shapes and formats are those of each model's own `state_dict`, whatever layout saved it, and no class
of a model is needed; the folder appears whole or not at all. One tensor is in memory at a time: `model.pt` is written
from the pages of the file beside it.

Weights that a model uses under several names are in a checkpoint under each of them, and so they are in these files.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardway.checkpoint.contents import VALUE, TensorEntry
from shardway.checkpoint.export import SAFETENSORS_FORMATS, begin_folder, finish_folder, render_header
from shardway.checkpoint.find import FoundCheckpoint
from shardway.checkpoint.shards.tensor_subclasses import dtype_name, find_dtype
from shardway.checkpoint.tensors import TensorReader
from shardway.errors import JobError, UserError
from shardway.refusals import find_remedy

NO_MODEL = ("optimizer", "random", "kept", "script")
"""How the parts of a checkpoint begin that are no weights."""

_EXTRA = "_extra_state"
"""What `nn.Module.get_extra_state` gives stands under this name in a `state_dict`."""


@dataclass(frozen=True)
class Written:
    """The files of one export, and why a file that belongs there is not among them ("" where none is missing)."""

    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def write_state_dicts(found: FoundCheckpoint, folder: Path, dtype: torch.dtype | None) -> Written:
    """Write each model of a checkpoint; `dtype` None keeps the format of each tensor, another one converts weights.

    Raises UserError where the checkpoint has no weights in Shardway's form or the folder exists, Damaged where it is
    not what was saved, JobError where it cannot be written.
    """
    reader = TensorReader(found.folder)
    models = find_models(list(reader.entries.values()))
    if not models:
        raise no_weights(found.folder)
    partial = folder.with_name(f".{folder.name}.unfinished")
    begin_folder(folder, partial)
    try:
        written = [_write_model(reader, partial, name, entries, dtype) for name, entries in models.items()]
        finish_folder(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise _not_written(folder, error.strerror or str(error)) from error
        raise
    return Written(
        tuple(file for each in written for file in each.files), tuple(why for each in written for why in each.left_out)
    )


def find_models(entries: Sequence[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """The models of a checkpoint: `model`, and `model-NAME` for each further one that a script has given a name."""
    parts: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        if not entry.part.startswith(NO_MODEL):
            parts.setdefault(entry.name.partition(".")[0], []).append(entry)
    return {name: part for name, part in parts.items() if any(entry.dtype != VALUE for entry in part)}


def no_weights(folder: Path) -> UserError:
    """What holds DeepSpeed's files alone."""
    return UserError(
        f"{folder} holds no weights in Shardway's form: what DeepSpeed trained is saved in DeepSpeed's own files.\n"
        "  To do: take the weights out with `python zero_to_fp32.py . OUTPUT` in that folder."
    )


def _not_written(folder: Path, why: str) -> JobError:
    return JobError(
        f"the weights could not be written to {folder}: {why}.\n"
        f"  Nothing was left there. To do: {find_remedy(why, 'name another folder')}; then run the same command again."
    )


def _write_model(
    reader: TensorReader, folder: Path, model: str, entries: Sequence[TensorEntry], dtype: torch.dtype | None
) -> Written:
    tensors = _lay_out(reader, [entry for entry in entries if entry.dtype != VALUE], dtype)
    unknown = [each for each in tensors if each.dtype not in SAFETENSORS_FORMATS]
    path = folder / f"{model}.safetensors"
    with open(path, "x+b") as file:
        start = 0 if unknown else file.write(render_header([(each.name, each.dtype, each.shape) for each in tensors]))
        for each in tensors:
            file.write(_bytes_of(reader.read(each.saved_as).to(each.dtype)))
        _sync(file)
        _save(_nest({**_map(file, start, tensors), **_read_values(reader, model, entries)}), folder / f"{model}.pt")
    if not unknown:
        return Written((path.name, f"{model}.pt"))
    path.unlink()
    first = f"{unknown[0].name} is {dtype_name(unknown[0].dtype)}"
    return Written((f"{model}.pt",), (f"no {path.name}, which has no name for that format: {first}",))


@dataclass(frozen=True)
class _Weight:
    """A tensor as it is written: its name in the model and in the checkpoint, its format there, its shape."""

    name: str
    saved_as: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _lay_out(reader: TensorReader, entries: Sequence[TensorEntry], dtype: torch.dtype | None) -> list[_Weight]:
    """The order in a file: wide formats first, so that every tensor begins at a multiple of its items' size."""
    weights = []
    for entry in sorted(entries, key=lambda each: reader.place(each.name)):
        saved = find_dtype(entry.dtype)
        kept = saved if dtype is None or not saved.is_floating_point else dtype
        weights.append(_Weight(entry.name.partition(".")[2], entry.name, kept, entry.shape))
    return sorted(weights, key=lambda each: -each.dtype.itemsize)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _map(file: BinaryIO, start: int, tensors: Sequence[_Weight]) -> dict[str, torch.Tensor]:
    """The tensors that were written, on the pages of the file."""
    if not any(each.bytes for each in tensors):
        return {each.name: torch.empty(each.shape, dtype=each.dtype) for each in tensors}
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch takes no memory that may not be written
    found = {}
    for each in tensors:
        count = math.prod(each.shape)
        flat = torch.frombuffer(pages, dtype=each.dtype, count=count, offset=start) if count else torch.empty(0)
        found[each.name] = flat.to(each.dtype).view(each.shape)
        start += each.bytes
    return found


def _read_values(reader: TensorReader, model: str, entries: Sequence[TensorEntry]) -> dict[str, Any]:
    """What of a `state_dict` is no tensor."""
    values = [entry.name for entry in entries if entry.dtype == VALUE]
    return {name.removeprefix(f"{model}."): json.loads(bytes(reader.read(name).tolist())) for name in values}


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A `state_dict` whose extra states are dicts again, as modules gave them."""
    state: dict[str, Any] = {}
    for name, value in flat.items():
        owner, found, inner = name.partition(f"{_EXTRA}.")
        place, path = (state, [name]) if not found else (state.setdefault(owner + _EXTRA, {}), inner.split("."))
        for each in path[:-1]:
            place = place.setdefault(each, {})
        place[path[-1]] = value
    return state


def _save(state: Mapping[str, Any], path: Path) -> None:
    with open(path, "xb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # how torch's zip writer says that a write failed
            raise OSError(f"torch.save: {error}") from error
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
