"""Weights in the format of the hub: where parameters stand in files, by family, and safetensors files read by regions,
straight into the layout of a model.

Invariants:
- The pieces of one arrangement cover a parameter once and without overlap.
- Opening a folder reads headers alone, and `read` no more than the region that is asked for. A rank reads only the part
  of each parameter that it holds, one piece at a time. All that does not fit is reported at once, before anything is
  read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from shardway.models.initialise import held_part

# --- regions of parameters and of tensors in files

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""What a tied model uses twice: under which names files hold it."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRegion:
    """A box of a tensor: where it starts and how far it reaches in each dim."""

    start: Shape
    shape: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def meet(self, other: TensorRegion) -> TensorRegion:
        """What both have in common; empty where they are apart."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        return TensorRegion(start, tuple(max(0, end - first) for first, end in zip(start, ends, strict=True)))

    def seen_from(self, origin: Shape) -> TensorRegion:
        """The same box counted from another corner."""
        return TensorRegion(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.shape)


@dataclass(frozen=True)
class WeightPiece:
    """The part `region` of a parameter is what a file's tensor `name` of shape `whole` holds from `start` on.

    A file's tensor may lack leading dims of the parameter, along which the piece is one thick: one expert of a stack.
    """

    name: str
    region: TensorRegion
    whole: Shape
    start: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.region.shape)

    def source_of(self, wanted: TensorRegion) -> TensorRegion:
        """Where in the file's tensor a part of this piece's region stands."""
        inside = wanted.seen_from(self.region.start)
        missing = len(inside.start) - len(self.whole)
        start = tuple(a + b for a, b in zip(inside.start[missing:], self.start, strict=True))
        return TensorRegion(start, inside.shape[missing:])


Arrangement = tuple[WeightPiece, ...]
"""One way in which a parameter stands in files."""

Names = Callable[[str, Shape], Sequence[Arrangement]]
"""Name and whole shape of a parameter -> the ways in which files may hold it; the first one is written."""


def keep_name(name: str, shape: Shape) -> Arrangement:
    """The parameter as it is, under `name`."""
    return part_of(name, shape, dim=0, index=0, parts=1)


def keep_names(name: str, shape: Shape) -> Sequence[Arrangement]:
    """Names that are those of the files."""
    return (keep_name(name, shape),)


def stack(names: Sequence[str], shape: Shape) -> Arrangement:
    """One tensor of `shape[1:]` for each index of the first dim."""
    origin = (0,) * (len(shape) - 1)
    return tuple(
        WeightPiece(name, TensorRegion((index, *origin), (1, *shape[1:])), shape[1:], origin)
        for index, name in enumerate(names)
    )


def part_of(name: str, shape: Shape, dim: int, index: int, parts: int) -> Arrangement:
    """The parameter is one of several that stand side by side along `dim` of a tensor."""
    whole = tuple(size * parts if d == dim else size for d, size in enumerate(shape))
    start = tuple(index * size if d == dim else 0 for d, size in enumerate(shape))
    return (WeightPiece(name, TensorRegion((0,) * len(shape), shape), whole, start),)


# --- the supported families


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls a mixture's block and an expert's matrices in its files, where each expert has its own."""

    block: str
    gate: str
    up: str
    down: str

    def __call__(self, name: str, shape: Shape) -> Sequence[Arrangement]:
        """Files of one tensor per expert, and files of the stacks that transformers computes with."""
        owner, _, leaf = name.rpartition(".")
        if not owner.endswith(".mlp.experts"):
            return keep_name(name.replace(".mlp.gate.", f".{self.block}.gate."), shape), keep_name(name, shape)
        outside = f"{owner.removesuffix('mlp.experts')}{self.block}.experts"
        each = [f"{outside}.{index}.{getattr(self, leaf)}.weight" for index in range(shape[0])]
        if leaf == "down":
            stacked = keep_name(f"{owner}.down_proj", shape)
        else:
            stacked = part_of(f"{owner}.gate_up_proj", shape, dim=1, index=("gate", "up").index(leaf), parts=2)
        return stack(each, shape), stacked


_QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")

FAMILIES: Mapping[str, Names] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "phi3", "smollm3"),
            keep_names,
        ),
        "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        "qwen2_moe": _QWEN_EXPERTS,
        "qwen3_moe": _QWEN_EXPERTS,
    }
)
"""`model_type` -> how files name the parameters."""

SPARE = ("*.rotary_emb.inv_freq",)
"""Tensors that old files hold and that follow from the config."""

SPARE_IF_TIED = (HEAD,)


# --- the tensors of a folder

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class ReadsRegions(Protocol):
    """Reads regions of tensors, on the CPU."""

    def read(self, name: str, region: TensorRegion) -> torch.Tensor: ...


class TensorFiles(Protocol):
    """Tensors in files, such as `WeightFiles`: what messages name, the whole shape of each, and how they are read."""

    @property
    def folder(self) -> Path: ...

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def open(self) -> AbstractContextManager[ReadsRegions]: ...


@dataclass(frozen=True)
class WeightFiles:
    """A folder's tensors: where each stands, its shape, and its number format in the words of safetensors ("BF16")."""

    folder: Path
    files: Mapping[str, str]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str]

    @contextmanager
    def open(self) -> Iterator[RegionReader]:
        """A reader; the files that it has used stay open until the context ends."""
        reader = RegionReader(self)
        try:
            yield reader
        finally:
            reader.handles.clear()


class RegionReader:
    """Reads regions of tensors; on CPU, in the format that the file has."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self.handles: dict[str, Any] = {}

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """A region of a tensor: a view of the file's pages in memory, of which only those of the region are read."""
        file = self._files.files[name]
        if file not in self.handles:
            self.handles[file] = _open(self._files.folder / file)
        part = self.handles[file].get_slice(name)
        tensor: torch.Tensor = part[region.slices] if region.shape else part[...]
        return tensor


def find_weights(folder: Path) -> WeightFiles | None:
    """The weights of a folder, None where there are none: a model that has a config alone. They are in the files that
    the index names; without one in the usual single file, or in all there are.

    Raises UserError for files that are missing, damaged or of another format.
    """
    index = folder / INDEX
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if index.is_file():
        try:
            placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(file) for file in placed.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{index} is no index of safetensors files: {error!r}\n  To do: fetch it again.") from error
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    if names:
        return _read_headers(folder, names)
    if next(folder.glob("*.bin"), None) is not None:
        remedy = "convert it once with transformers: from_pretrained(...), then save_pretrained(folder)"
        raise hf_error(str(folder), "has weights as .bin files", "weights as safetensors", remedy)
    return None


def read_weight_file(path: Path) -> WeightFiles:
    """The weights of one file. Raises UserError as `find_weights`."""
    return _read_headers(path.parent, [path.name])


def _read_headers(folder: Path, names: list[str]) -> WeightFiles:
    files: dict[str, str] = {}
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, str] = {}
    for file in names:
        handle = _open(folder / file)
        for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
            part = handle.get_slice(name)
            files[name], shapes[name], dtypes[name] = file, tuple(part.get_shape()), str(part.get_dtype())
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
    misshaped = tuple(
        f"{piece.name} {list(files.shapes[piece.name])} where config.json says {list(piece.whole)}"
        for piece in misfit.misshaped
    )
    remedy = "fetch the model again, or correct config.json: they are not of the same model"
    if HEAD in misfit.missing:
        remedy = (
            "set tie_word_embeddings = true in its config.json, if its output layer is its embedding; else save it "
            "again with its output layer"
        )
    problems = []
    for where, found, what in (
        ("missing", misfit.missing, "not in the files"),
        ("left over", misfit.left_over, "in the files, and the model has no such parameter"),
        ("shape", misshaped, "not of the right shape"),
    ):
        if found:  # the first few: a wrong folder has thousands
            more = [f"and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
            shown = ", ".join([*found[:_LISTED], *more])
            problems.append(Problem(where, f"{len(found)} tensors are {what}: {shown}", remedy=remedy))
    check_no_problems(f"the weights in {files.folder}", problems)
    return fit


def find_fit(model: nn.Module, files: TensorFiles, names: Names) -> Fit:
    """Where the parameters of a whole model should stand in files, whether they do or not: in the first arrangement of
    which the files have a tensor; where they have none, the first."""
    found: dict[str, Arrangement] = {}
    for name, parameter in model.named_parameters():
        ways = names(canonical_name(name), tuple(parameter.shape))
        there = (way for way in ways if any(piece.name in files.shapes for piece in way))
        found[canonical_name(name)] = next(there, ways[0])
    return Fit(files, found)


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
def load_weights(model: nn.Module, fit: Fit, name_of: Callable[[str], str] = canonical_name) -> None:
    """Fill every parameter that this rank holds, in any sharding, converted to the parameter's number format.
    `name_of` gives the name by which the fit knows a parameter; one for which it is "" is left alone."""
    with fit.files.open() as reader:
        for name, parameter in model.named_parameters():
            if not (known := name_of(name)):
                continue
            held = held_part(parameter, name)
            own = TensorRegion(held.offset, tuple(held.local.shape))
            for piece in fit.arrangements[known]:
                wanted = own.meet(piece.region)
                if not wanted.is_empty:
                    target = held.local[wanted.seen_from(held.offset).slices]
                    target.copy_(reader.read(piece.name, piece.source_of(wanted)).view(target.shape))


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
