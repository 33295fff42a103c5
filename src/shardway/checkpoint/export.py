"""Writes a model as a folder that `from_pretrained` of transformers reads: config.json, safetensors, tokenizer.

Invariant: the folder appears whole or not at all, and an existing one is never touched; no rank holds more than one
whole parameter at a time beside its own part. This module must not know models: a `Form` describes what is written.

A safetensors file is eight bytes with the length of a header (little endian), the header (JSON: of each tensor its
dtype, shape and place), and the tensors one after the other (https://github.com/huggingface/safetensors, "Format").
Written here rather than by the library, which wants all tensors of a file in memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardway.checkpoint.state import Tensors
from shardway.errors import JobError, LostContact, UserError
from shardway.hfconfig import CONFIG, TOKENIZER_FILES
from shardway.models.huggingface.files import INDEX, SINGLE
from shardway.models.huggingface.form import Form
from shardway.models.huggingface.pieces import Names, Shape, WeightPiece
from shardway.ranks.start import Ranks
from shardway.refusals import find_remedy
from shardway.rundir.atomic import fsync_folder, render_json

FILE_BYTES = 4 * 2**30
"""About how large a file may become."""

_BESIDE = ("generation_config.json", *TOKENIZER_FILES)

SAFETENSORS_FORMATS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
"""Number formats that a safetensors file knows, by torch's."""


@dataclass(frozen=True)
class _Parameter:
    """What a rank tells the others of a parameter that it holds a part of."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class _File:
    """A file to be: its pieces in order, each with the parameter that it comes from, and the rank that writes it."""

    name: str
    writer: int
    pieces: tuple[tuple[str, WeightPiece], ...]


def save_weights(
    state: Tensors, form: Form, folder: Path, ranks: Ranks, *, dtype: torch.dtype, file_bytes: int = FILE_BYTES
) -> Path:
    """Write the parameters of a model (names of the whole model -> tensors or DTensors) on all ranks together.

    Every rank calls it with what it holds; a parameter is written, in `dtype`, by the first rank that holds a part of
    it. Returns the folder. Raises UserError where it exists, JobError on every rank where it cannot be written.
    """
    partial = folder.with_name(f".{folder.name}.unfinished")
    ranks.together(lambda: begin_folder(folder, partial) if ranks.is_first else None)
    held = [_Parameter(name, tuple(tensor.shape)) for name, tensor in state.items()]
    files = _plan_files(ranks.gather(held), form.names, file_bytes // dtype.itemsize)
    writers = [_TensorFileWriter(partial / file.name, file, dtype) for file in files if file.writer == ranks.rank]
    try:
        with ranks.contact("while gathering weights"):
            ranks.together(lambda: _write_tensors(state, writers))
        ranks.together(lambda: _finish(files, form, partial, folder, dtype) if ranks.is_first else None)
    except JobError as error:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, LostContact):
            raise
        raise JobError(
            f"the model could not be written to {folder}: {error}\n  Nothing was left there. To do: "
            f"{find_remedy(str(error), 'name another folder')}; then run the same command again."
        ) from error
    return folder


def begin_folder(folder: Path, partial: Path) -> None:
    """Make the hidden neighbour that will become `folder`. Raises UserError where that exists or cannot be made."""
    if folder.exists():
        raise UserError(
            f"{folder} exists, and is not overwritten.\n  To do: name a folder that does not exist, or move it away."
        )
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.\n  To do: name another folder.") from error


def _plan_files(held: Sequence[Sequence[_Parameter]], names: Names, limit: int) -> list[_File]:
    """The files of all ranks, the same on every rank: of each rank those parameters that none before it holds, cut
    where `limit` elements are reached."""
    seen: set[str] = set()
    groups: list[tuple[int, list[tuple[str, WeightPiece]]]] = []
    for rank, parameters in enumerate(held):
        mine = [parameter for parameter in parameters if parameter.name not in seen]
        seen.update(parameter.name for parameter in mine)
        pieces = [(p.name, piece) for p in mine for piece in names(p.name, p.shape)[0]]
        groups += [(rank, group) for group in _cut(pieces, limit)]
    total = len(groups)
    file_names = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)] if total > 1 else [SINGLE]
    return [_File(name, rank, tuple(group)) for name, (rank, group) in zip(file_names, groups, strict=True)]


def _cut(pieces: Sequence[tuple[str, WeightPiece]], limit: int) -> Iterator[list[tuple[str, WeightPiece]]]:
    group: list[tuple[str, WeightPiece]] = []
    size = 0
    for owner, piece in pieces:
        if group and size + piece.elements > limit:
            yield group
            group, size = [], 0
        group.append((owner, piece))
        size += piece.elements
    if group:
        yield group


def _write_tensors(state: Tensors, writers: Sequence[_TensorFileWriter]) -> None:
    """Gather one parameter after the other and hand it to the files that it has a part in.

    A writer that fails goes on taking part: the gathering needs every rank.
    """
    failures: list[OSError] = []
    for name, tensor in state.items():
        whole = _gather(tensor)
        for writer in writers:
            if not failures:
                failures += writer.take(name, whole)
    for writer in writers:
        failures += writer.close()
    if failures:
        raise JobError(f"{failures[0].strerror or failures[0]}")


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu()


class _TensorFileWriter:
    """One file: the header at once, tensors in the order in which they come."""

    def __init__(self, path: Path, file: _File, dtype: torch.dtype) -> None:
        self._path, self._dtype = path, dtype
        self._pieces = {name: [p for owner, p in file.pieces if owner == name] for name, _ in file.pieces}
        self._header = render_header([(piece.name, dtype, piece.whole) for _, piece in file.pieces])
        self._stream: Any = None

    def take(self, name: str, whole: torch.Tensor) -> list[OSError]:
        """Append the pieces of a parameter that belong here; what the file system refused."""
        try:
            for piece in self._pieces.get(name, ()):
                self._append(whole[piece.region.slices])
        except OSError as error:
            return [error]
        return []

    def close(self) -> list[OSError]:
        """Make the file durable; what the file system refused."""
        if self._stream is None:
            return []
        try:
            with self._stream:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        except OSError as error:
            return [error]
        return []

    def _append(self, values: torch.Tensor) -> None:
        if self._stream is None:
            self._stream = open(self._path, "xb")  # noqa: SIM115 - closed by `close`, after tensors to come
            self._stream.write(self._header)
        self._stream.write(values.to(self._dtype).contiguous().view(-1).view(torch.uint8).numpy())


def render_header(tensors: Sequence[tuple[str, torch.dtype, Shape]]) -> bytes:
    """The beginning of a safetensors file whose tensors (name, format, shape) follow in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_FORMATS[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that tensors start at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def _finish(files: Sequence[_File], form: Form, partial: Path, folder: Path, dtype: torch.dtype) -> None:
    """Everything beside the tensors, then the rename that makes the folder exist."""
    try:
        if len(files) > 1:
            _write_json(partial / INDEX, _index(files, dtype))
        _write_json(partial / CONFIG, {**form.config, "dtype": str(dtype).removeprefix("torch.")})
        if form.source is not None:
            _copy_beside(form.source, partial)
        finish_folder(partial, folder)
    except OSError as error:
        raise JobError(error.strerror or str(error)) from error


def finish_folder(partial: Path, folder: Path) -> None:
    """Let the folder appear. Raises OSError."""
    fsync_folder(partial)
    os.rename(partial, folder)
    fsync_folder(folder.parent)


def _copy_beside(source: Path, target: Path) -> None:
    for path in sorted({path for pattern in _BESIDE for path in source.glob(pattern)}):
        shutil.copyfile(path, target / path.name)


def _index(files: Sequence[_File], dtype: torch.dtype) -> dict[str, Any]:
    placed = {piece.name: file.name for file in files for _, piece in file.pieces}
    total = sum(piece.elements for file in files for _, piece in file.pieces) * dtype.itemsize
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(render_json(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
