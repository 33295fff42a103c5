"""The table of a checkpoint: of each tensor its format, its shape and which file has which part of it, from which byte.

Invariant: what is no tensor stands in the table itself, as JSON; nothing is a pickle. This module must not import
torch, so that a login node can show what a checkpoint holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardway.checkpoint.checksum import FileChecksum, find_damage, seal_bytes
from shardway.checkpoint.manifest import Damaged, Manifest
from shardway.rundir.atomic import render_json
from shardway.rundir.look import check_answers

NAME = "tensors.json"

Shape = tuple[int, ...]


def shard_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.bin"


def is_shard(name: str) -> bool:
    """Whether a file of a checkpoint is that of a rank."""
    return re.fullmatch(r"rank-\d{5,}\.bin", name) is not None


@dataclass(frozen=True)
class TensorPart:
    """A plain tensor that a tensor of a special class is made of: the attribute, its format and shape."""

    attribute: str
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Special:
    """A tensor of a class of its own: the class, what it needs besides its parts (JSON), and these in their order."""

    kind: str
    context: Any
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where it begins in the tensor and its size, and the file and byte where its numbers begin.

    The numbers are in C order, little endian.
    """

    file: str
    at: int
    offsets: Shape
    sizes: Shape
    special: Special | None = None


@dataclass(frozen=True)
class TensorRow:
    """One tensor, whole."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class TensorTable:
    """By name: tensors, and values that are none, each as JSON of its own (so that one that is not finite survives)."""

    tensors: Mapping[str, TensorRow]
    values: Mapping[str, str]


def write_table(path: Path, table: TensorTable) -> FileChecksum:
    """Write a table; the seal of its file. The caller makes it durable."""
    files = sorted({chunk.file for row in table.tensors.values() for chunk in row.chunks})
    numbers = {name: number for number, name in enumerate(files)}
    rows = {
        name: {"dtype": row.dtype, "shape": row.shape, "chunks": [_pack(chunk, numbers) for chunk in row.chunks]}
        for name, row in sorted(table.tensors.items())
    }
    text = render_json({"files": files, "tensors": rows, "values": dict(table.values)})
    data = text.encode()
    path.write_bytes(data)
    return seal_bytes(data)


def read_table(folder: Path, manifest: Manifest) -> TensorTable:
    """The table of a checkpoint, compared with its seal. Raises Damaged."""
    seal = manifest.files.get(NAME)
    if seal is None:
        raise Damaged(folder, [f"its manifest knows no {NAME}"])
    if damage := find_damage(folder, NAME, seal):
        raise Damaged(folder, [damage])
    try:
        content = json.loads((folder / NAME).read_bytes())
        files = content["files"]
        rows = {name: _read_row(row, files) for name, row in content["tensors"].items()}
        return TensorTable(rows, {name: str(value) for name, value in content["values"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LookupError) as error:
        check_answers(folder / NAME, error)
        raise Damaged(folder, [f"{NAME} cannot be read ({error})"]) from None


def _pack(chunk: Chunk, numbers: Mapping[str, int]) -> list[Any]:
    """As a short list: large models have millions of chunks."""
    packed: list[Any] = [numbers[chunk.file], chunk.at, chunk.offsets, chunk.sizes]
    if (special := chunk.special) is not None:
        parts = [[part.attribute, part.dtype, part.shape] for part in special.parts]
        packed.append({"kind": special.kind, "context": special.context, "parts": parts})
    return packed


def _read_row(row: Mapping[str, Any], files: list[str]) -> TensorRow:
    chunks = tuple(_unpack(chunk, files) for chunk in row["chunks"])
    return TensorRow(str(row["dtype"]), tuple(row["shape"]), chunks)


def _unpack(packed: list[Any], files: list[str]) -> Chunk:
    number, at, offsets, sizes, *rest = packed
    special = None
    if rest:
        parts = tuple(TensorPart(attribute, dtype, tuple(shape)) for attribute, dtype, shape in rest[0]["parts"])
        special = Special(rest[0]["kind"], rest[0]["context"], parts)
    return Chunk(files[number], int(at), tuple(offsets), tuple(sizes), special)
