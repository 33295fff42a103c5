"""Weights of other tools as sources of tensors: safetensors, torch.save, torch.distributed.checkpoint, another run.

Invariants:
- An open source describes all its tensors. All that is wrong with its files is one UserError.
- Only headers are read until a region is asked for.
- torch.save: files are opened by `torch.load` with `weights_only`, memory-mapped. A file that holds anything but
  tensors and plain data is refused, and none of its code runs.
- torch.distributed.checkpoint: `.metadata` is a pickle. A restricted unpickler makes records of the few classes it
  needs and refuses every other name. Tensors are read by `torch.load` with `weights_only`.
- Another run: what is read is compared with its checksums.

torch's FileSystemWriter stores for each box of a tensor the file, the first byte and the length of what torch.save has
written (torch/distributed/checkpoint/metadata.py, filesystem.py).
"""

from __future__ import annotations

import io
import math
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from shardway.checkpoint.catalog import VALUE, FoundCheckpoint
from shardway.checkpoint.reader import TensorReader
from shardway.checkpoint.structure import dtype_name, find_dtype
from shardway.errors import UserError
from shardway.hfconfig import CONFIG, read_config
from shardway.models.huggingface.weights import Shape, TensorRegion, WeightFiles
from shardway.rundir.directory import RunDir

# --- what every source is


@dataclass(frozen=True)
class Described:
    """A tensor of a source: its whole shape, and its dtype in torch's words ("float32")."""

    shape: Shape
    dtype: str


class SourceReader(Protocol):
    """Reads tensors of a source."""

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """A region of a tensor, on the CPU, in the format of the source. Raises UserError, Damaged."""
        ...


class ForeignSource(Protocol):
    """Tensors that another tool or run has written."""

    @property
    def kind(self) -> str:
        """A short name of the kind."""
        ...

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Every tensor by name."""
        ...

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Its config.json, None if it has none."""
        ...

    def open(self) -> AbstractContextManager[SourceReader]:
        """A reader; files stay open until it is closed."""
        ...


class WholeTensors:
    """Reads regions of tensors that can only be read whole. The last tensor is kept, since its regions come
    together."""

    def __init__(self, source: ReadsWhole) -> None:
        self._source = source
        self._name: str | None = None
        self._tensor = torch.empty(0)

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """A view of a region."""
        if name != self._name:
            self._tensor = torch.empty(0)  # let go of the last one first
            self._tensor, self._name = self._source.read_whole(name), name
        return self._tensor[region.slices] if region.shape else self._tensor


class ReadsWhole(ABC):
    """A source without a config.json that reads a tensor whole."""

    @abstractmethod
    def read_whole(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU."""

    @property
    def config(self) -> Mapping[str, Any] | None:
        """None."""
        return None

    @contextmanager
    def open(self) -> Iterator[WholeTensors]:
        """Reads regions."""
        yield WholeTensors(self)


def source_error(path: Path, what: str, remedy: str) -> UserError:
    """Something wrong with a source."""
    return UserError(f"{path} {what}.\n  Nothing was written. To do: {remedy}.")


# --- safetensors: a folder or one file

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool"}
)
"""safetensors' dtype names -> torch's; others stay as they are, and are not formats of weights."""


@dataclass(frozen=True)
class HubSource:
    """The tensors of safetensors files at `path`."""

    path: Path
    files: WeightFiles

    @property
    def kind(self) -> str:
        """What it is."""
        return "safetensors"

    @property
    def tensors(self) -> Mapping[str, Described]:
        """By name."""
        dtypes = self.files.dtypes
        return {name: Described(shape, _DTYPES.get(dtypes[name], dtypes[name])) for name, shape in self._shapes}

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The config.json of its folder. Raises UserError if it cannot be read."""
        folder = self.files.folder
        return read_config(folder) if (folder / CONFIG).is_file() else None

    def open(self) -> AbstractContextManager[SourceReader]:
        """Reads regions."""
        return self.files.open()

    @property
    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return list(self.files.shapes.items())


# --- torch.save: one file


@dataclass(frozen=True)
class TorchFile(ReadsWhole):
    """The tensors of a file, by the keys that lead to them: `{"model": {"a": ...}}` has "model.a"."""

    path: Path
    found: Mapping[str, torch.Tensor]

    @property
    def kind(self) -> str:
        """What it is."""
        return "a file of torch.save"

    @property
    def tensors(self) -> Mapping[str, Described]:
        """By name."""
        return {name: Described(tuple(each.shape), dtype_name(each.dtype)) for name, each in self.found.items()}

    def read_whole(self, name: str) -> torch.Tensor:
        """A view of the memory-mapped file."""
        return self.found[name]


def open_torch_file(path: Path) -> TorchFile:
    """Map a file into memory. Raises UserError if it is damaged or holds more than tensors and plain data."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({named[1]})" if named else ""
        raise source_error(
            path,
            f"holds more than tensors and plain data{what}; reading it could run code, so nothing of it was read",
            "if you trust its source, load it where it was made and save its weights alone: "
            "torch.save(model.state_dict(), FILE), or safetensors",
        ) from None
    except Exception as error:  # a damaged archive fails in many ways
        raise source_error(
            path,
            f"cannot be read as a file of torch.save: {' '.join(str(error).split())[:300]}",
            "fetch or copy it again: it is damaged, or came in part alone",
        ) from None
    return TorchFile(path, dict(_flatten(content, "")))


def _flatten(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain tensors within dicts and lists."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta and type(value) in (torch.Tensor, torch.nn.Parameter):
            yield name, value.detach()
        return
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in inner:
        yield from _flatten(each, f"{name}.{key}" if name else str(key))


# --- torch.distributed.checkpoint: .metadata and files

METADATA = ".metadata"

_RECORDS = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
        ),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)
"""The classes and functions that torch's metadata name; a record stands in for each of them."""


@dataclass(frozen=True)
class _Box:
    """A part of a tensor, and where torch.save has written it."""

    region: TensorRegion
    file: str
    at: int
    length: int


@dataclass(frozen=True)
class DistributedSource(ReadsWhole):
    """The tensors of a folder, with the boxes that each consists of."""

    path: Path
    tensors: Mapping[str, Described]
    boxes: Mapping[str, Sequence[_Box]]

    @property
    def kind(self) -> str:
        """What it is."""
        return "a checkpoint of torch.distributed"

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor, assembled from its boxes. Raises UserError if a file is damaged."""
        described = self.tensors[name]
        whole = torch.empty(described.shape, dtype=find_dtype(described.dtype))
        for box in self.boxes[name]:
            part = self._read_box(name, box)
            whole[box.region.slices].copy_(part)
        return whole

    def _read_box(self, name: str, box: _Box) -> torch.Tensor:
        try:
            with open(self.path / box.file, "rb") as file:
                file.seek(box.at)
                part = torch.load(io.BytesIO(file.read(box.length)), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive fails in many ways
            raise _damaged(self.path, f"{box.file}, where {name} is: {' '.join(str(error).split())[:200]}") from None
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != box.region.shape:
            raise _damaged(self.path, f"{box.file}, where {name} is: it holds something else")
        return part.detach()


def open_distributed(folder: Path) -> DistributedSource:
    """Read the metadata. Raises UserError for names that are not allowed, or for files that are missing or short."""
    found = _read_metadata(folder / METADATA)
    try:
        places = {(index.fqn, _offset(index)): info for index, info in found.storage_data.items()}
        rows = {name: row for name, row in found.state_dict_metadata.items() if hasattr(row, "chunks")}
        boxes = {name: [_read_place(name, chunk, places) for chunk in row.chunks] for name, row in rows.items()}
        tensors = {name: _describe(row) for name, row in rows.items()}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise _damaged(folder, f"{METADATA}: {error!r}") from None
    _check_files(folder, [box for each in boxes.values() for box in each])
    for name, described in tensors.items():
        if not _is_covered(described.shape, boxes[name]):
            raise _damaged(folder, f"{METADATA}: the parts of {name} are not the whole of it")
    return DistributedSource(folder, tensors, boxes)


def _read_place(name: str, chunk: Any, places: Mapping[Any, Any]) -> _Box:
    region = TensorRegion(_sizes(chunk.offsets), _sizes(chunk.sizes))
    info = places[name, region.start]
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is compressed")
    file = str(info.relative_path)
    if Path(file).name != file:
        raise ValueError(f"{name} is said to be in another folder, {file}")
    return _Box(region, file, int(info.offset), int(info.length))


def _describe(row: Any) -> Described:
    dtype = row.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no number format")
    return Described(_sizes(row.size), dtype_name(dtype))


def _offset(index: Any) -> Shape:
    """Where a box begins; () for what is not a tensor."""
    return _sizes(getattr(index, "offset", None) or ())


def _sizes(value: Any) -> Shape:
    sizes = tuple(int(each) for each in value)
    if any(size < 0 for size in sizes):
        raise ValueError(f"{sizes} is no shape")
    return sizes


def _is_covered(shape: Shape, boxes: Sequence[_Box]) -> bool:
    """Whether boxes lie within a tensor and have as many elements as it (torch's own check of a save)."""
    whole = TensorRegion((0,) * len(shape), shape)
    inside = all(len(box.region.shape) == len(shape) and whole.meet(box.region) == box.region for box in boxes)
    return inside and sum(math.prod(box.region.shape) for box in boxes) == math.prod(shape)


def _check_files(folder: Path, boxes: Sequence[_Box]) -> None:
    needed: dict[str, int] = {}
    for box in boxes:
        needed[box.file] = max(needed.get(box.file, 0), box.at + box.length)
    problems = []
    for name, length in sorted(needed.items()):
        try:
            size = (folder / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if size < length:
            problems.append(f"{name} has {size} bytes of at least {length}")
    if problems:
        raise _damaged(folder, "; ".join(problems))


def _damaged(folder: Path, what: str) -> Exception:
    return source_error(folder, f"is damaged ({what})", "fetch or copy it again")


# --- the restricted unpickler


class _StandIn:
    """Stands in for an object of the metadata: holds its arguments and state, and runs nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and all(isinstance(name, str) for name in state):
            self.__dict__.update(state)
        else:
            self.state = state


class _Refused(Exception):
    """The pickle names something that is not allowed."""


class _Unpickler(pickle.Unpickler):
    """Finds the names of `_RECORDS`, sizes and number formats, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        """A new stand-in class each time, so that a pickle can change only its own."""
        if (module, name) in _RECORDS:
            return type("_Record", (_StandIn,), {})
        if (module, name) == ("torch", "Size"):
            return type("_Sizes", (tuple,), {})
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):  # how some Pythons write a member of an enumeration
            return type("_Record", (_StandIn,), {})
        raise _Refused(f"{module}.{name}")


def _read_metadata(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _Unpickler(file).load()
    except _Refused as refused:
        raise source_error(
            path.parent,
            f"has a {METADATA} that names {refused}, which no checkpoint of torch.distributed needs; reading it could "
            "run code, so nothing of it was run",
            "do not use this checkpoint, or ask its authors for safetensors",
        ) from None
    except Exception as error:  # a damaged pickle fails in many ways
        raise _damaged(path.parent, f"{METADATA}: {error!r}") from None


# --- a checkpoint of another run


@dataclass(frozen=True)
class OwnSource(ReadsWhole):
    """One checkpoint in Shardway's form."""

    found: FoundCheckpoint
    reader: TensorReader

    @property
    def kind(self) -> str:
        """What it is."""
        return "a Shardway checkpoint"

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.found.folder

    @property
    def tensors(self) -> Mapping[str, Described]:
        """By name, those of optimizer and random state too."""
        entries = self.reader.entries
        return {name: Described(each.shape, each.dtype) for name, each in entries.items() if each.dtype != VALUE}

    @property
    def resolved(self) -> dict[str, Any]:
        """The resolved run that it is part of; empty for a checkpoint outside its run."""
        return RunDir(self.path.resolve().parent.parent).read_resolved()

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor. Raises Damaged."""
        return self.reader.read(name)
