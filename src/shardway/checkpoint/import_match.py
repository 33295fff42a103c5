"""Matches the tensors of a source with those of a model (names, shapes, formats, settings); finds a source's kind.

Invariants:
- A setting is compared only if both sides state it. A difference is a problem, since the same weights would compute
  something else.
- All mismatches are listed in one UserError before any number is read, except those of an output layer that may be the
  embedding. Names are those that an export writes, or the model's own.
- The kind of a source is found from its content, never from the ending of a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardway.checkpoint.catalog import find_checkpoint
from shardway.checkpoint.file_format import MANIFEST
from shardway.checkpoint.import_sources import (
    METADATA,
    Described,
    ForeignSource,
    HubSource,
    OwnSource,
    SourceReader,
    open_distributed,
    open_torch_file,
    source_error,
)
from shardway.checkpoint.reader import TensorReader
from shardway.errors import Problem, UserError, check_no_problems, list_some
from shardway.models.contract import canonical_name
from shardway.models.huggingface.model import HuggingFaceModel
from shardway.models.huggingface.own import names_of_transformer, to_transformer_shape
from shardway.models.huggingface.weights import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    SPARE,
    SPARE_IF_TIED,
    Arrangement,
    Fit,
    Names,
    Shape,
    TensorRegion,
    WeightPiece,
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

# --- settings that shapes do not show

_OF_CONFIG = (
    *("model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window", "clip_qkv"),
    *("tie_word_embeddings", "num_experts_per_tok", "norm_topk_prob", "no_rope_layers", "layer_types"),
)
"""Keys of a config.json that shapes do not show."""


def is_tied(model: nn.Module) -> bool:
    """Whether the output layer of a language model is its embedding."""
    if isinstance(model, HuggingFaceModel):
        return bool(model.config.tie_word_embeddings)
    return isinstance(model, Transformer) and model.shape.tied


def list_setting_problems(source: ForeignSource, model: nn.Module) -> list[Problem]:
    """Settings in which a source's config.json and the model differ. Raises UserError for a family that Shardway's
    transformer does not compute."""
    config = source.config
    if config is None:
        return []
    if isinstance(model, HuggingFaceModel):
        own = model.config.to_dict()
        return [
            _differs(f"config.json: {key}", own[key], config[key], "name the folder of these weights as model.hf")
            for key in _OF_CONFIG
            if config.get(key) is not None
            and key in own
            and not _alike(own[key], config[key])
            and not (key == "tie_word_embeddings" and config[key])  # then the values decide
        ]
    if isinstance(model, Transformer):
        here, there = _settings_of(model.shape), _settings_of(to_transformer_shape(config))
        return [
            _differs(f"model.{key}", value, there[key], f"set model.{key} = {there[key]}")
            for key, value in here.items()
            if not _alike(value, there.get(key, value))
        ]
    return []


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


def _differs(where: str, here: Any, there: Any, remedy: str) -> Problem:
    return Problem(where, f"{here!r} in this run, {there!r} where the weights come from", remedy=remedy)


# --- names, prefixes, shapes and formats

LISTED = 40
"""How many names of one kind a message lists."""

_WEIGHT_FORMATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class View:
    """Tensors of a source under other names: short name -> name in the source, and its description."""

    source: ForeignSource
    names: Mapping[str, str]
    tensors: Mapping[str, Described]
    shapes: Mapping[str, Shape]

    @property
    def folder(self) -> Path:
        """The path for messages."""
        return self.source.path

    @contextmanager
    def open(self) -> Iterator[Renaming]:
        """A reader that takes the short names."""
        with self.source.open() as reader:
            yield Renaming(reader, self.names)


@dataclass(frozen=True)
class Renaming:
    """A reader that takes other names."""

    reader: SourceReader
    names: Mapping[str, str]

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """A region of a tensor."""
        return self.reader.read(self.names[name], region)


@dataclass(frozen=True)
class Match:
    """A source that fits a model: `fit` has its parameters, `buffers` names those that the source has, `initial` those
    that it lacks. `prefix` stood before all names; `unused` counts the tensors of other parts."""

    view: View
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
    """Match every tensor of a whole model (the meta device is enough) with a source.

    `prefix`: what stands before its names in the source; None finds it. Raises UserError that lists all mismatches.
    """
    parameters = {canonical_name(name): tuple(each.shape) for name, each in model.named_parameters()}
    saved = {canonical_name(name): tuple(each.shape) for name, each in model.state_dict().items()}
    buffers = {name: shape for name, shape in saved.items() if name not in parameters}
    ways = _list_names(model)
    expected = {piece.name for name, shape in parameters.items() for way in ways for piece in _all(way, name, shape)}
    found = _find_prefix(source, expected | buffers.keys()) if prefix is None else prefix
    view = _look_under(source, found)
    ordered = sorted(ways, key=lambda way: -_count(way, parameters, view))
    fit = find_fit(model, view, _joined(ordered))
    has_own_names = ordered[0] is keep_names
    check_no_problems(
        f"{source.path} ({source.kind}) as the weights of this run",
        [*_list_misfits(fit, model, buffers, own=has_own_names), *list_setting_problems(source, model)],
    )
    _check_head(view, model)
    unused = Counter(n.split(".")[0] for n in source.tensors if not _starts(n, found))
    known = tuple(name for name in buffers if name in view.names)
    return Match(view, fit, known, tuple(name for name in buffers if name not in view.names), found, dict(unused))


def _look_under(source: ForeignSource, prefix: str) -> View:
    """The tensors of a source whose names begin with `prefix`, by the rest of the name."""
    described = source.tensors
    names = {canonical_name(name).removeprefix(prefix): name for name in described if _starts(name, prefix)}
    tensors = {short: described[name] for short, name in names.items()}
    return View(source, names, tensors, {short: each.shape for short, each in tensors.items()})


def _list_names(model: nn.Module) -> list[Names]:
    """The ways in which a source may name a model's parameters."""
    if isinstance(model, HuggingFaceModel):
        return [FAMILIES[model.config.model_type], keep_names]
    if isinstance(model, Transformer):
        try:
            return [keep_names, names_of_transformer(model.shape)]
        except UserError:  # no family has this shape, so there is no other name for its weights
            return [keep_names]
    return [keep_names]


def _all(names: Names, name: str, shape: Shape) -> Iterator[WeightPiece]:
    for arrangement in names(name, shape):
        yield from arrangement


def _joined(ways: Sequence[Names]) -> Names:
    def names(name: str, shape: Shape) -> Sequence[Arrangement]:
        return [arrangement for way in ways for arrangement in way(name, shape)]

    return names


def _count(way: Names, parameters: Mapping[str, Shape], view: View) -> int:
    """How many tensors of a source have the names of `way`."""
    named = {piece.name for name, shape in parameters.items() for piece in _all(way, name, shape)}
    return len(named & view.names.keys())


def _starts(name: str, prefix: str) -> bool:
    return canonical_name(name).startswith(prefix)


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


def _list_misfits(fit: Fit, model: nn.Module, buffers: Mapping[str, Shape], *, own: bool) -> list[Problem]:
    """All that is missing, left over, of another shape or not in a format of weights."""
    described = fit.files.tensors if isinstance(fit.files, View) else {}
    spare = (*SPARE, *(SPARE_IF_TIED if is_tied(model) else ()), *buffers)
    misfit = find_misfit(fit, spare)
    missing_buffers = [name for name in buffers if own and name not in described]
    shapes = {piece.name: list(piece.whole) for piece in misfit.misshaped}
    shapes |= {n: list(shape) for n, shape in buffers.items() if n in described and described[n].shape != shape}
    formats = [
        f"{name} ({described[name].dtype})"
        for name in fit.pieces
        if name in described and described[name].dtype not in _WEIGHT_FORMATS
    ]
    untie = " (or set model.tied = true, where its output layer is its embedding)"
    lacks_head = "lm_head.weight" in misfit.missing or "head.weight" in misfit.missing
    return [
        *_problem("missing", "not there", [*misfit.missing, *missing_buffers], untie if lacks_head else ""),
        *_problem("left over", "there, and the model has no such tensor", misfit.left_over),
        *_problem(
            "shape",
            "of another shape",
            [f"{n} {list(described[n].shape)} where the model has {shape}" for n, shape in shapes.items()],
        ),
        *_problem("format", f"in no format of weights ({', '.join(_WEIGHT_FORMATS)})", formats),
    ]


def _problem(where: str, what: str, names: Sequence[str], more: str = "") -> list[Problem]:
    remedy = f"set the keys of [model] to those of the model whose weights these are{more}"
    text = f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {what}: {list_some(names, LISTED)}"
    return [Problem(where, text, remedy=remedy)] if names else []


def _check_head(view: View, model: nn.Module) -> None:
    """Raise UserError if an output layer would be left out that differs from the embedding that the model uses for
    it."""
    if not is_tied(model) or not {HEAD, EMBEDDING} <= view.shapes.keys() or are_equal(view, HEAD, EMBEDDING):
        return
    raise UserError(
        f"{view.folder} has an output layer ({HEAD}) of its own, and the model of this run uses its embedding for it.\n"
        "  Nothing was written. To do: set model.tied = false."
    )


def has_own_head(source: ForeignSource) -> bool:
    """Whether a source holds an output layer, under the library's names, that differs from its embedding."""
    for name in source.tensors:
        prefix = canonical_name(name).removesuffix(HEAD)
        if prefix + HEAD == canonical_name(name):
            view = _look_under(source, prefix)
            return isinstance(source, OwnSource) or (EMBEDDING in view.shapes and not are_equal(view, HEAD, EMBEDDING))
    return False


# --- the kind of a source

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_KNOWN = (
    "a folder or a file of safetensors, a folder of torch.distributed.checkpoint (.metadata and *.distcp), a file of "
    "torch.save, a run directory of Shardway or one of its checkpoints"
)


def open_source(path: Path, step: int | None = None) -> ForeignSource:
    """The source at a path; `step` chooses among the checkpoints of a run. Raises UserError if it is no source, or is
    damaged; Damaged for a checkpoint of Shardway's."""
    if path.is_dir() and is_own(path):
        found = find_checkpoint(path, step)
        return OwnSource(found, TensorReader(found.folder))
    if step is not None:
        raise UserError(f"--step {step}: {path} is no run directory of Shardway.\n  To do: leave out --step.")
    if path.is_dir():
        return _open_folder(path)
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise source_error(path, f"cannot be read: {error.strerror}", f"name {_KNOWN}") from None
    return _open_file(path, head)


def is_own(path: Path) -> bool:
    """Whether this is a run directory with checkpoints, or a checkpoint."""
    has_manifest = (path / MANIFEST).is_file()
    return has_manifest or step_of_checkpoint(path) is not None or bool(RunDir(path).checkpoint_steps())


def _open_folder(path: Path) -> ForeignSource:
    if (path / METADATA).is_file():
        return open_distributed(path)
    files = find_weights(path)
    if files is None:
        raise source_error(path, "holds no weights that can be imported", f"name {_KNOWN}")
    return HubSource(path, files)


def _open_file(path: Path, head: bytes) -> ForeignSource:
    if head.startswith(_ZIP):
        return open_torch_file(path)
    if head[8:9] == b"{":  # after eight bytes with the length of the header
        return HubSource(path, read_weight_file(path))
    if head.startswith(_PICKLE):
        raise source_error(
            path,
            "is a bare pickle, as torch wrote before release 1.6; reading it could run code, so nothing of it was read",
            "load it where you trust it, and save it again with torch.save",
        )
    raise source_error(path, "is no file of weights that can be imported", f"name {_KNOWN}")
