"""Weights of other tools and runs: sources of tensors, and how they match a model (names, shapes, formats, settings).

Invariants:
- An open source describes all its tensors. All that is wrong with its files is one UserError. Only headers are read
  until a region is asked for. Its kind is found from its content, never from the ending of a name.
- torch.save: files are opened by `torch.load` with `weights_only`, memory-mapped. A file that holds anything but
  tensors and plain data is refused, and none of its code runs.
- torch.distributed.checkpoint: `.metadata` is a pickle. A restricted unpickler makes records of the few classes it
  needs and refuses every other name. Tensors are read by `torch.load` with `weights_only`.
- Another run: what is read is compared with its checksums.
- A setting is compared only if both sides state it. A difference is a problem, since the same weights would compute
  something else.
- All mismatches are listed in one UserError before any number is read, except those of an output layer that may be the
  embedding. Names are those that an export writes, or the model's own.

torch's FileSystemWriter stores for each box of a tensor the file, the first byte and the length of what torch.save has
written (torch/distributed/checkpoint/metadata.py, filesystem.py).
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardway.checkpoint.catalog import VALUE, FoundCheckpoint, find_checkpoint
from shardway.checkpoint.file_format import MANIFEST
from shardway.checkpoint.reader import TensorReader
from shardway.checkpoint.state import dtype_name, find_dtype
from shardway.errors import Problem, UserError, check_no_problems, list_some
from shardway.hfconfig import CONFIG, read_config
from shardway.models.contract import canonical_name
from shardway.models.huggingface.model import HuggingFaceModel
from shardway.models.huggingface.own import names_of_transformer, to_transformer_shape
from shardway.models.huggingface.weights import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    SPARE,
    SPARE_IF_TIED,
    Fit,
    Names,
    ReadsRegions,
    Shape,
    TensorRegion,
    WeightFiles,
    are_equal,
    find_fit,
    find_misfit,
    find_weights,
    keep_names,
    load_weights,
    read_weight_file,
)
from shardway.models.transformer import Transformer, TransformerShape
from shardway.rundir.directory import RunDir
from shardway.rundir.names import step_of_checkpoint

# --- what every source is


@dataclass(frozen=True)
class Described:
    """A tensor of a source: its whole shape, and its dtype in torch's words ("float32")."""

    shape: Shape
    dtype: str


@dataclass(frozen=True)
class ForeignSource:
    """Tensors that another tool or run has written: where they are, what they are, and a reader of their regions, whose
    files stay open until it is closed. `config` is the source's config.json, None if it has none."""

    path: Path
    kind: str
    tensors: Mapping[str, Described]
    open: Callable[[], AbstractContextManager[ReadsRegions]]
    config: Mapping[str, Any] | None = None

    @property
    def folder(self) -> Path:
        return self.path

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: each.shape for name, each in self.tensors.items()}


class WholeTensors:
    """Reads regions of tensors that can only be read whole. The last tensor is kept, since its regions come
    together."""

    def __init__(self, read_whole: Callable[[str], torch.Tensor]) -> None:
        self._read_whole = read_whole
        self._name: str | None = None
        self._tensor = torch.empty(0)

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        if name != self._name:
            self._tensor = torch.empty(0)  # let go of the last one first
            self._tensor, self._name = self._read_whole(name), name
        return self._tensor[region.slices] if region.shape else self._tensor


def source_error(path: Path, what: str, remedy: str) -> UserError:
    """Something wrong with a source."""
    return UserError(f"{path} {what}.\n  Nothing was written. To do: {remedy}.")


# --- safetensors: a folder or one file

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool"}
)
"""safetensors' dtype names -> torch's; others stay as they are, and are not formats of weights."""


def hub_source(path: Path, files: WeightFiles) -> ForeignSource:
    """The tensors of safetensors files at `path`. Raises UserError if the config.json beside them cannot be read."""
    dtypes = {name: _DTYPES.get(dtype, dtype) for name, dtype in files.dtypes.items()}
    tensors = {name: Described(shape, dtypes[name]) for name, shape in files.shapes.items()}
    config = read_config(files.folder) if (files.folder / CONFIG).is_file() else None
    return ForeignSource(path, "safetensors", tensors, files.open, config)


# --- torch.save: one file


def open_torch_file(path: Path) -> ForeignSource:
    """Map a file into memory. Its tensors are named by the keys that lead to them: `{"model": {"a": ...}}` has
    "model.a". Raises UserError if it is damaged or holds more than tensors and plain data."""
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
    found = dict(_flatten(content, ""))
    tensors = {name: Described(tuple(each.shape), dtype_name(each.dtype)) for name, each in found.items()}
    return ForeignSource(path, "a file of torch.save", tensors, lambda: nullcontext(WholeTensors(found.__getitem__)))


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

_OF_METADATA = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
)
_RECORDS = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
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


def open_distributed(folder: Path) -> ForeignSource:
    """Read the metadata. Raises UserError for names that are not allowed, or for files that are missing or short."""
    found = _read_metadata(folder / METADATA)
    try:
        # A value that is not a tensor has no offset.
        places = {(i.fqn, _sizes(getattr(i, "offset", None) or ())): info for i, info in found.storage_data.items()}
        rows = {name: row for name, row in found.state_dict_metadata.items() if hasattr(row, "chunks")}
        boxes = {name: [_read_place(name, chunk, places) for chunk in row.chunks] for name, row in rows.items()}
        tensors = {name: _describe(row) for name, row in rows.items()}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise _damaged(folder, f"{METADATA}: {error!r}") from None
    needed: dict[str, int] = {}
    for box in (box for each in boxes.values() for box in each):
        needed[box.file] = max(needed.get(box.file, 0), box.at + box.length)
    problems = []
    for name, length in sorted(needed.items()):
        try:
            size = (folder / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
        else:
            problems += [f"{name} has {size} bytes of at least {length}"] if size < length else []
    if problems:
        raise _damaged(folder, "; ".join(problems))
    for name, described in tensors.items():
        # Boxes lie within their tensor and have as many elements as it (torch's own check of a save).
        whole = TensorRegion((0,) * len(described.shape), described.shape)
        regions = [box.region for box in boxes[name]]
        inside = all(len(each.shape) == len(whole.shape) and whole.meet(each) == each for each in regions)
        if not inside or sum(math.prod(each.shape) for each in regions) != math.prod(whole.shape):
            raise _damaged(folder, f"{METADATA}: the parts of {name} are not the whole of it")

    def read_whole(name: str) -> torch.Tensor:
        tensor = torch.empty(tensors[name].shape, dtype=find_dtype(tensors[name].dtype))
        for box in boxes[name]:
            tensor[box.region.slices].copy_(_read_box(folder, name, box))
        return tensor

    return ForeignSource(
        folder, "a checkpoint of torch.distributed", tensors, lambda: nullcontext(WholeTensors(read_whole))
    )


def _read_box(folder: Path, name: str, box: _Box) -> torch.Tensor:
    try:
        with open(folder / box.file, "rb") as file:
            file.seek(box.at)
            part = torch.load(io.BytesIO(file.read(box.length)), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive fails in many ways
        raise _damaged(folder, f"{box.file}, where {name} is: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(part, torch.Tensor) or tuple(part.shape) != box.region.shape:
        raise _damaged(folder, f"{box.file}, where {name} is: it holds something else")
    return part.detach()


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


def _sizes(value: Any) -> Shape:
    sizes = tuple(int(each) for each in value)
    if any(size < 0 for size in sizes):
        raise ValueError(f"{sizes} is no shape")
    return sizes


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
        # A new stand-in class each time, so that a pickle can change only its own.
        if (module, name) in _RECORDS or (module, name) == ("builtins", "getattr"):
            return type("_Record", (_StandIn,), {})  # with getattr some Pythons write a member of an enumeration
        if (module, name) == ("torch", "Size"):
            return type("_Sizes", (tuple,), {})
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
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


@dataclass(frozen=True, kw_only=True)
class OwnSource(ForeignSource):
    """One checkpoint in Shardway's form, with its optimizer and random state."""

    found: FoundCheckpoint

    @property
    def resolved(self) -> dict[str, Any]:
        """The resolved run that it is part of; empty for a checkpoint outside its run."""
        return RunDir(self.path.resolve().parent.parent).read_resolved()


def open_own(found: FoundCheckpoint) -> OwnSource:
    """A checkpoint. Raises Damaged."""
    reader = TensorReader(found.folder)
    tensors = {name: Described(each.shape, each.dtype) for name, each in reader.entries.items() if each.dtype != VALUE}
    return OwnSource(
        found.folder, "a Shardway checkpoint", tensors, lambda: nullcontext(WholeTensors(reader.read)), found=found
    )


# --- settings that shapes do not show

_OF_CONFIG = (
    *("model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window", "clip_qkv"),
    *("tie_word_embeddings", "num_experts_per_tok", "norm_topk_prob", "no_rope_layers", "layer_types"),
)
"""Keys of a config.json that shapes do not show."""


def _is_tied(model: nn.Module) -> bool:
    """Whether the output layer of a language model is its embedding."""
    if isinstance(model, HuggingFaceModel):
        return bool(model.config.tie_word_embeddings)
    return isinstance(model, Transformer) and model.shape.tied


def _list_setting_problems(source: ForeignSource, model: nn.Module) -> list[Problem]:
    """Settings in which a source's config.json and the model differ. Raises UserError for a family that Shardway's
    transformer does not compute."""
    config, found = source.config, []
    if config is not None and isinstance(model, HuggingFaceModel):
        own = model.config.to_dict()
        for key in _OF_CONFIG:
            decided_by_values = key == "tie_word_embeddings" and config.get(key)
            if config.get(key) is not None and key in own and not decided_by_values:
                remedy = "name the folder of these weights as model.hf"
                found.append((f"config.json: {key}", own[key], config[key], remedy))
    elif config is not None and isinstance(model, Transformer):
        there = _settings_of(to_transformer_shape(config))
        for key, here in _settings_of(model.shape).items():
            if key in there:
                found.append((f"model.{key}", here, there[key], f"set model.{key} = {there[key]}"))
    return [
        Problem(where, f"{here!r} in this run, {there!r} where the weights come from", remedy=remedy)
        for where, here, there, remedy in found
        if not _alike(here, there)
    ]


def _settings_of(shape: TransformerShape) -> dict[str, Any]:
    """Keys of [model] that no shape of a weight shows."""
    settings = {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "activation": shape.activation,
        "positions": shape.positions,
        "tied": shape.tied,
    }
    if shape.mixture is not None:
        settings |= {"experts_per_token": shape.mixture.per_token, "router_normalise": shape.mixture.normalise}
    return settings


def _alike(one: Any, other: Any) -> bool:
    """Whether two values mean the same; of two tables, the keys that both have are compared."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_alike(one[key], other[key]) for key in one.keys() & other.keys())
    return bool(one == other)


# --- names, prefixes, shapes and formats

LISTED = 40  # how many names of one kind a message lists
_WEIGHT_FORMATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Renaming:
    """A reader that takes other names."""

    reader: ReadsRegions
    names: Mapping[str, str]

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        return self.reader.read(self.names[name], region)


@dataclass(frozen=True)
class Match:
    """A source that fits a model: `fit` has its parameters, `buffers` names those that the source has, `initial` those
    that it lacks. `prefix` stood before all names; `unused` counts the tensors of other parts."""

    view: ForeignSource
    fit: Fit
    buffers: tuple[str, ...]
    initial: tuple[str, ...]
    prefix: str
    unused: Mapping[str, int]

    def fill(self, model: nn.Module) -> None:
        """Load the values into a model in any sharding, converted to its formats. Raises UserError, Damaged."""
        load_weights(model, self.fit)
        with self.view.open() as reader, torch.no_grad():
            for name, buffer in model.named_buffers():
                if (short := canonical_name(name)) in self.buffers:
                    whole = TensorRegion((0,) * buffer.dim(), tuple(buffer.shape))
                    buffer.copy_(reader.read(short, whole))

    def count_conversions(self, model: nn.Module) -> dict[str, int]:
        """Tensors of the source whose format is not the model's: "bfloat16 to float32" -> how many."""
        described = self.view.tensors
        pairs = Counter(
            (described[piece.name].dtype, str(parameter.dtype).removeprefix("torch."))
            for name, parameter in model.named_parameters()
            for piece in self.fit.arrangements[canonical_name(name)]
        )
        return {f"{before} to {after}": count for (before, after), count in sorted(pairs.items()) if before != after}


def match_source(source: ForeignSource, model: nn.Module, prefix: str | None = None) -> Match:
    """Match every tensor of a whole model (the meta device is enough) with a source. `prefix`: what stands before its
    names in the source; None finds it. Raises UserError that lists all mismatches."""
    parameters = {canonical_name(name): tuple(each.shape) for name, each in model.named_parameters()}
    saved = {canonical_name(name): tuple(each.shape) for name, each in model.state_dict().items()}
    buffers = {name: shape for name, shape in saved.items() if name not in parameters}
    ways: list[Names] = [keep_names]  # in which a source may name the parameters
    if isinstance(model, HuggingFaceModel):
        ways.insert(0, FAMILIES[model.config.model_type])
    elif isinstance(model, Transformer):
        with suppress(UserError):  # no family has this shape, so there is no other name for its weights
            ways.append(names_of_transformer(model.shape))
    named = {
        way: {piece.name for name, shape in parameters.items() for arranged in way(name, shape) for piece in arranged}
        for way in ways
    }
    if prefix is None:
        prefix = _find_prefix(source, buffers.keys() | set().union(*named.values()))
    view = _look_under(source, prefix)
    ways.sort(key=lambda way: -len(named[way] & view.tensors.keys()))
    fit = find_fit(model, view, lambda name, shape: [each for way in ways for each in way(name, shape)])
    check_no_problems(
        f"{source.path} ({source.kind}) as the weights of this run",
        [*_list_misfits(fit, view, model, buffers, own=ways[0] is keep_names), *_list_setting_problems(source, model)],
    )
    if _is_tied(model) and {HEAD, EMBEDDING} <= view.shapes.keys() and not are_equal(view, HEAD, EMBEDDING):
        raise UserError(
            f"{source.path} has an output layer ({HEAD}) of its own, and the model of this run uses its embedding for "
            "it.\n  Nothing was written. To do: set model.tied = false."
        )
    unused = Counter(name.split(".")[0] for name in source.tensors if not canonical_name(name).startswith(prefix))
    known = tuple(name for name in buffers if name in view.tensors)
    return Match(view, fit, known, tuple(name for name in buffers if name not in view.tensors), prefix, dict(unused))


def _look_under(source: ForeignSource, prefix: str) -> ForeignSource:
    """The tensors of a source whose names begin with `prefix`, by the rest of the name."""
    described = source.tensors
    known = {canonical_name(name): name for name in described}
    names = {name.removeprefix(prefix): own for name, own in known.items() if name.startswith(prefix)}

    @contextmanager
    def open_renamed() -> Iterator[Renaming]:
        with source.open() as reader:
            yield Renaming(reader, names)

    return ForeignSource(source.path, source.kind, {n: described[own] for n, own in names.items()}, open_renamed)


def _find_prefix(source: ForeignSource, expected: set[str]) -> str:
    """The prefix of most names that the model has. Raises UserError if it is ambiguous."""
    if isinstance(source, OwnSource):
        return "model."
    counts: Counter[str] = Counter()
    for name in map(canonical_name, source.tensors):
        parts = name.split(".")
        counts.update(
            "".join(f"{part}." for part in parts[:at]) for at in range(len(parts)) if ".".join(parts[at:]) in expected
        )
    most = max(counts.values(), default=0)
    best = sorted((prefix for prefix, count in counts.items() if count == most), key=lambda each: (len(each), each))
    if len(best) > 1 and best[0]:
        raise UserError(
            f"{source.path} holds the weights {len(best)} times, under {list_some(best, 4)}.\n"
            f"  Nothing was written. To do: choose with --prefix, such as --prefix {best[0]}"
        )
    return best[0] if best else ""


def _list_misfits(
    fit: Fit, view: ForeignSource, model: nn.Module, buffers: Mapping[str, Shape], *, own: bool
) -> Iterator[Problem]:
    """All that is missing, left over, of another shape or not in a format of weights; `own`: the source names tensors
    as the model does."""
    described = view.tensors
    misfit = find_misfit(fit, (*SPARE, *(SPARE_IF_TIED if _is_tied(model) else ()), *buffers))
    missing = [*misfit.missing, *(name for name in buffers if own and name not in described)]
    shapes = {piece.name: list(piece.whole) for piece in misfit.misshaped}
    shapes |= {n: list(shape) for n, shape in buffers.items() if n in described and described[n].shape != shape}
    misshaped = [f"{n} {list(described[n].shape)} where the model has {shape}" for n, shape in shapes.items()]
    dtypes = {name: described[name].dtype for name in fit.pieces if name in described}
    formats = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in _WEIGHT_FORMATS]
    lacks_head = "lm_head.weight" in misfit.missing or "head.weight" in misfit.missing
    untie = " (or set model.tied = true, where its output layer is its embedding)" if lacks_head else ""
    for where, what, names in (
        ("missing", "not there", missing),
        ("left over", "there, and the model has no such tensor", misfit.left_over),
        ("shape", "of another shape", misshaped),
        ("format", f"in no format of weights ({', '.join(_WEIGHT_FORMATS)})", formats),
    ):
        remedy = "set the keys of [model] to those of the model whose weights these are"
        text = f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {what}: {list_some(names, LISTED)}"
        if names:
            yield Problem(where, text, remedy=remedy + (untie if where == "missing" else ""))


def has_own_head(source: ForeignSource) -> bool:
    """Whether a source holds an output layer, under the library's names, that differs from its embedding."""
    for name in source.tensors:
        prefix = canonical_name(name).removesuffix(HEAD)
        if prefix + HEAD == canonical_name(name):
            view = _look_under(source, prefix)
            return isinstance(source, OwnSource) or (EMBEDDING in view.shapes and not are_equal(view, HEAD, EMBEDDING))
    return False


# --- the kind of a source

_KNOWN = (
    "a folder or a file of safetensors, a folder of torch.distributed.checkpoint (.metadata and *.distcp), a file of "
    "torch.save, a run directory of Shardway or one of its checkpoints"
)


def open_source(path: Path, step: int | None = None) -> ForeignSource:
    """The source at a path; `step` chooses among the checkpoints of a run. Raises UserError if it is no source, or is
    damaged; Damaged for a checkpoint of Shardway's."""
    if path.is_dir() and (
        (path / MANIFEST).is_file() or step_of_checkpoint(path) is not None or RunDir(path).checkpoint_steps()
    ):
        return open_own(find_checkpoint(path, step))
    if step is not None:
        raise UserError(f"--step {step}: {path} is no run directory of Shardway.\n  To do: leave out --step.")
    if path.is_dir():
        if (path / METADATA).is_file():
            return open_distributed(path)
        if (files := find_weights(path)) is not None:
            return hub_source(path, files)
        raise source_error(path, "holds no weights that can be imported", f"name {_KNOWN}")
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise source_error(path, f"cannot be read: {error.strerror}", f"name {_KNOWN}") from None
    if head.startswith(b"PK\x03\x04"):  # a zip file
        return open_torch_file(path)
    if head[8:] == b"{":  # after eight bytes with the length of the header
        return hub_source(path, read_weight_file(path))
    if head.startswith(b"\x80"):
        raise source_error(
            path,
            "is a bare pickle, as torch wrote before release 1.6; reading it could run code, so nothing of it was read",
            "load it where you trust it, and save it again with torch.save",
        )
    raise source_error(path, "is no file of weights that can be imported", f"name {_KNOWN}")
