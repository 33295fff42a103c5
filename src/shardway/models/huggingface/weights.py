"""Reads safetensors files by regions, straight into the layout of a model.

Invariants:
- Opening a folder reads headers alone, and `read` no more than the region that is asked for.
- A rank reads only the part of each parameter that it holds, one piece at a time. All that does not fit is reported at
  once, before anything is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from shardway.errors import Problem, UserError, check_no_problems
from shardway.hfconfig import hf_error, import_extra
from shardway.models.contract import canonical_name
from shardway.models.huggingface.families import HEAD
from shardway.models.huggingface.pieces import Arrangement, Names, Shape, TensorRegion, WeightPiece
from shardway.models.initialise import HeldSlice, held_part

# --- the tensors of a folder, read by slices

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class WeightFiles:
    """A folder's tensors: where each stands, its shape, and its number format in the words of safetensors ("BF16")."""

    folder: Path
    files: Mapping[str, str]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str]

    @contextmanager
    def open(self) -> Iterator[RegionReader]:
        """A reader; the files that it has used stay open until it is closed."""
        reader = RegionReader(self)
        try:
            yield reader
        finally:
            reader.close()


class RegionReader:
    """Reads regions of tensors; on CPU, in the format that the file has."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._handles: dict[str, Any] = {}

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """A region of a tensor: a view of the file's pages in memory, of which only those of the region are read."""
        part = self._handle(self._files.files[name]).get_slice(name)
        tensor: torch.Tensor = part[region.slices] if region.shape else part[...]
        return tensor

    def close(self) -> None:
        """Let go of all files."""
        self._handles.clear()

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = _open(self._files.folder / file)
        return self._handles[file]


def find_weights(folder: Path) -> WeightFiles | None:
    """The weights of a folder, None where there are none: a model that has a config alone.

    Raises UserError for files that are missing, damaged or of another format.
    """
    names = _list_files(folder)
    if names:
        return _read_headers(folder, names)
    if next(folder.glob("*.bin"), None) is not None:
        remedy = "convert it once with transformers: from_pretrained(...), then save_pretrained(folder)"
        raise hf_error(str(folder), "has weights as .bin files", "weights as safetensors", remedy)
    return None


def read_weight_file(path: Path) -> WeightFiles:
    """The weights of one file. Raises UserError as `find_weights`."""
    return _read_headers(path.parent, [path.name])


def _list_files(folder: Path) -> list[str]:
    """The files that the index names; without one the usual single file, or all there are."""
    if (folder / INDEX).is_file():
        return sorted(set(_read_index(folder / INDEX).values()))
    if (folder / SINGLE).is_file():
        return [SINGLE]
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _read_index(path: Path) -> dict[str, str]:
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in placed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no index of safetensors files: {error!r}\n  To do: fetch it again.") from error


def _read_headers(folder: Path, names: list[str]) -> WeightFiles:
    files: dict[str, str] = {}
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, str] = {}
    for file in names:
        handle = _open(folder / file)
        for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
            files[name] = file
            part = handle.get_slice(name)
            shapes[name], dtypes[name] = tuple(part.get_shape()), str(part.get_dtype())
    return WeightFiles(folder, MappingProxyType(files), MappingProxyType(shapes), MappingProxyType(dtypes))


def _open(path: Path) -> Any:
    library = import_extra("safetensors")
    try:
        return library.safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing, though the index names it.\n  To do: fetch the model again.") from None
    except (OSError, library.SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read: {error}\n"
            "  To do: fetch the model again: the file is damaged, or came in part alone."
        ) from error


# --- into the layout of a model

_LISTED = 8
_ROWS = 4096
"""How much of a matrix is compared at a time."""


class ReadsRegions(Protocol):
    """Reads regions of tensors."""

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """A region, on the CPU."""
        ...


class TensorFiles(Protocol):
    """Tensors in files, such as `WeightFiles`: where they are, the shape of each, and how they are read."""

    @property
    def folder(self) -> Path:
        """What messages name."""
        ...

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Name -> whole shape."""
        ...

    def open(self) -> AbstractContextManager[ReadsRegions]:
        """A reader."""
        ...


@dataclass(frozen=True)
class Fit:
    """How a model's parameters stand in files."""

    files: TensorFiles
    arrangements: Mapping[str, Arrangement]

    @property
    def pieces(self) -> dict[str, WeightPiece]:
        """Every piece, by the tensor of the files that holds it."""
        return {piece.name: piece for arrangement in self.arrangements.values() for piece in arrangement}


@dataclass(frozen=True)
class Misfit:
    """Tensors that files lack, those that no parameter needs, and those of another shape than the piece says."""

    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    misshaped: tuple[WeightPiece, ...]


def fit_weights(model: nn.Module, files: TensorFiles, names: Names, spare: Iterable[str] = ()) -> Fit:
    """Find every parameter of a whole model (the meta device will do) in the files.

    `spare` are patterns of tensors that files may hold and no parameter needs. Raises UserError that names all that is
    missing, left over or of another shape.
    """
    fit = find_fit(model, files, names)
    misfit = find_misfit(fit, spare)
    misshaped = [
        f"{piece.name} {list(files.shapes[piece.name])} where config.json says {list(piece.whole)}"
        for piece in misfit.misshaped
    ]
    check_no_problems(
        f"the weights in {files.folder}", _list_problems(misfit.missing, misfit.left_over, tuple(misshaped))
    )
    return fit


def find_fit(model: nn.Module, files: TensorFiles, names: Names) -> Fit:
    """Where the parameters of a whole model should stand in files, whether they do or not."""
    shapes = {canonical_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Fit(files, {name: _choose(name, shape, files, names) for name, shape in shapes.items()})


def find_misfit(fit: Fit, spare: Iterable[str] = ()) -> Misfit:
    """What does not fit. `spare`: patterns of tensors that may be left over."""
    pieces, shapes, patterns = fit.pieces, fit.files.shapes, tuple(spare)
    left = sorted(shapes.keys() - pieces.keys())
    return Misfit(
        missing=tuple(name for name in pieces if name not in shapes),
        left_over=tuple(name for name in left if not any(fnmatchcase(name, pattern) for pattern in patterns)),
        misshaped=tuple(piece for name, piece in pieces.items() if shapes.get(name, piece.whole) != piece.whole),
    )


@torch.no_grad()
def load_weights(model: nn.Module, fit: Fit) -> None:
    """Fill every parameter that this rank holds, in any sharding, converted to the parameter's number format."""
    with fit.files.open() as reader:
        for name, parameter in model.named_parameters():
            held = held_part(parameter, name)
            for piece in fit.arrangements[canonical_name(name)]:
                _fill(held, piece, reader)


def are_equal(files: TensorFiles, one: str, other: str) -> bool:
    """Whether two matrices of the files have the same values, whatever their formats; read block by block."""
    shape = files.shapes[one]
    if files.shapes[other] != shape:
        return False
    with files.open() as first, files.open() as second:
        for start in range(0, shape[0], _ROWS):
            box = TensorRegion((start, 0), (min(_ROWS, shape[0] - start), shape[1]))
            if not torch.equal(first.read(one, box).float(), second.read(other, box).float()):
                return False
    return True


def _fill(held: HeldSlice, piece: WeightPiece, reader: ReadsRegions) -> None:
    wanted = TensorRegion(held.offset, tuple(held.local.shape)).meet(piece.region)
    if wanted.is_empty:
        return
    target = held.local[wanted.seen_from(held.offset).slices]
    target.copy_(reader.read(piece.name, piece.source_of(wanted)).view(target.shape))


def _choose(name: str, shape: Shape, files: TensorFiles, names: Names) -> Arrangement:
    """The first arrangement of which the files have a tensor; where they have none, the first."""
    ways = names(name, shape)
    return next((way for way in ways if any(piece.name in files.shapes for piece in way)), ways[0])


def _list_problems(missing: Sequence[str], left_over: Sequence[str], misshaped: Sequence[str]) -> list[Problem]:
    remedy = "fetch the model again, or correct config.json: they are not of the same model"
    if HEAD in missing:
        remedy = (
            "set tie_word_embeddings = true in its config.json, if its output layer is its embedding; else save it "
            "again with its output layer"
        )
    found = {
        "missing": (missing, "not in the files"),
        "left over": (left_over, "in the files, and the model has no such parameter"),
        "shape": (misshaped, "not of the right shape"),
    }
    return [
        Problem(where, f"{len(names)} tensors are {what}: {_shorten(names)}", remedy=remedy)
        for where, (names, what) in found.items()
        if names
    ]


def _shorten(names: Sequence[str]) -> str:
    """The first few, and how many more: a wrong folder has thousands."""
    more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return ", ".join([*names[:_LISTED], *more])
