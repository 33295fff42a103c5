"""The shape of the model in the [model] section of a run file, or of a named model.

Invariants:
- The shape of a section has the parameters that `shardway.models` builds from it, which a test compares.
- A shape that --trace counted is used only for the model and sample that it was counted for.
- Every named model has a source, and its shape follows from the keys of its config.json like that of any other.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardway.earlier_names import EARLIER_KEYS
from shardway.errors import Bug, Problem, UserError, list_some, render_problems
from shardway.hfconfig import CONFIG
from shardway.places import expand_home
from shardway.plan.shapes.architecture import Architecture, AttentionShape, ExpertsShape, Latent, LayerRun, LayerShape
from shardway.plan.shapes.measured import Measured, Shape, convnet, perceptron, read_measured, render_image
from shardway.runfile.schema import ModelSection, RunFile


def shape_of_section(model: ModelSection, sample: tuple[int, ...]) -> Shape:
    """The shape of a resolved [model]; `sample` is (data.seq_len,) or the image's (channels, height, width).

    Raises UserError if the vocabulary is not known, or an image does not fit the model.
    """
    if model.hf:
        from shardway.plan.shapes.huggingface import read_shape

        return read_shape(model.hf)
    if model.kind not in _SHAPES:
        what = f'"{model.kind}" is a model of another package, whose layers the planner does not know'
        raise _refusal("model.kind", what, f"{', '.join(_SHAPES)}; or `shardway plan --trace`, which counts any model")
    return _SHAPES[model.kind](model, sample)


def _transformer(model: ModelSection, sample: tuple[int, ...]) -> Architecture:
    dense, norm = _block(model), _norm_parameters(model)
    plain = min(model.dense_layers, model.layers) if model.experts else model.layers
    runs = [LayerRun(dense, plain)] if plain else []
    if model.experts and plain < model.layers:
        runs.append(LayerRun(replace(dense, experts=_experts(model)), model.layers - plain))
    return Architecture(
        name="transformer",
        hidden=model.dim,
        runs=tuple(runs),
        vocab=_vocab(model),
        tied=model.tied,
        positions=_resolved(model, "max_positions") if model.positions == "learned" else 0,
        final_norm_parameters=norm,
    )


def _vit(model: ModelSection, sample: tuple[int, ...]) -> Architecture:
    channels, height, width = _image(model, sample)
    if height % model.patch or width % model.patch:
        what = f"patches of {model.patch} x {model.patch} do not tile images of {height} x {width}"
        raise _refusal("model.patch", what, "a common divisor of height and width")
    block, classified = _block(model), int(model.pooling == "class")
    return Architecture(
        name="vit",
        hidden=model.dim,
        runs=(LayerRun(replace(block, attention=replace(block.attention, causal=False)), model.layers),),
        vocab=model.classes,
        tied=False,
        positions=(height // model.patch) * (width // model.patch) + classified,
        patch_features=channels * model.patch**2,
        head_bias=True,
        final_norm_parameters=_norm_parameters(model),
        extra_parameters=classified * model.dim,
    )


def _encoder_decoder(model: ModelSection, sample: tuple[int, ...]) -> Architecture:
    """Layers of `torch.nn.Transformer`: biases everywhere; attention is causal, in the source too."""
    if model.dim % model.heads:
        what = f"{model.heads} heads do not split model.dim = {model.dim} into heads of equal width"
        raise _refusal("model.heads", what, "a divisor of model.dim")
    width = model.dim // model.heads
    own = AttentionShape(heads=model.heads, kv_heads=model.heads, head_dim=width, bias=True, output_bias=True)
    encoder = LayerShape(
        hidden=model.dim,
        attention=own,
        ffn=_resolved(model, "ffn_dim"),
        gated=False,
        ffn_bias=True,
        norm_bias=True,
    )
    decoder = replace(encoder, cross=replace(own, cross=True), norms=3)
    return Architecture(
        name="encoder_decoder",
        hidden=model.dim,
        runs=(LayerRun(encoder, model.layers, "encoder"), LayerRun(decoder, model.layers)),
        vocab=_vocab(model),
        tied=False,
        head_bias=True,
        final_norm_parameters=4 * model.dim,
    )


def _convnet(model: ModelSection, sample: tuple[int, ...]) -> Measured:
    image = _image(model, sample)
    least = 2 ** len(model.channels)
    if min(image[1:]) < least:
        what = f"its {len(model.channels)} blocks halve images of {render_image(image)} to nothing"
        raise _refusal("model.channels", what, f"images of at least {least} x {least}")
    return convnet(image, model.channels, model.classes)


_SHAPES: Mapping[str, Callable[[ModelSection, tuple[int, ...]], Shape]] = {
    "transformer": _transformer,
    "encoder_decoder": _encoder_decoder,
    "vit": _vit,
    "convnet": _convnet,
    "mlp": lambda model, sample: perceptron(math.prod(sample), model.hidden, model.classes, dropout=model.dropout > 0),
}


def _block(model: ModelSection) -> LayerShape:
    """A block of attention and a dense feed-forward layer."""
    return LayerShape(
        hidden=model.dim,
        attention=_latent_attention(model) if model.kv_rank else _attention(model),
        ffn=_resolved(model, "ffn_dim"),
        gated=model.activation == "swiglu",
        ffn_bias=model.bias,
        norm_bias=model.bias and model.norm == "layernorm",
    )


def _attention(model: ModelSection) -> AttentionShape:
    return AttentionShape(
        heads=model.heads,
        kv_heads=_resolved(model, "kv_heads"),
        head_dim=_resolved(model, "head_dim"),
        bias=model.bias or model.qkv_bias,
        output_bias=model.bias,
        qk_norm=model.qk_norm,
    )


def _latent_attention(model: ModelSection) -> AttentionShape:
    """Latent attention, which has no biases."""
    latent = Latent(
        kv_rank=model.kv_rank,
        q_rank=model.q_rank,
        rope_dim=_resolved(model, "rope_head_dim"),
        value_dim=_resolved(model, "value_head_dim"),
    )
    width = _resolved(model, "head_dim")
    return AttentionShape(heads=model.heads, kv_heads=model.heads, head_dim=width, latent=latent)


def _experts(model: ModelSection) -> ExpertsShape:
    width = _resolved(model, "expert_dim")
    return ExpertsShape(
        count=model.experts,
        per_token=model.experts_per_token,
        dim=width,
        shared_dim=model.shared_experts * width,
    )


def _norm_parameters(model: ModelSection) -> int:
    return model.dim * (2 if model.bias and model.norm == "layernorm" else 1)


def _vocab(model: ModelSection) -> int:
    if model.vocab == "auto":
        what = '"auto" follows the data, which a plan does not open'
        remedy = "set model.vocab, such as 50257 for GPT-2's tokenizer"
        raise _refusal("model.vocab", what, "the number of entries of the vocabulary", remedy)
    return model.vocab


def _image(model: ModelSection, sample: tuple[int, ...]) -> tuple[int, int, int]:
    if len(sample) != 3:
        what = f'a "{model.kind}" learns from images, and a sample has {len(sample)} dims'
        raise _refusal("model.kind", what, "data whose samples are channels x height x width")
    channels, height, width = sample
    return channels, height, width


def _resolved(model: ModelSection, key: str) -> int:
    value = getattr(model, key)
    if not isinstance(value, int):
        raise Bug(f"model.{key} = {value!r} reached the plan unresolved")
    return value


def _refusal(where: str, what: str, allowed: str, remedy: str = "") -> UserError:
    return UserError(render_problems("the model", [Problem(where, what, allowed=allowed, remedy=remedy)]))


# --- named models, from the TOML file beside this module

_MOST = 12


@dataclass(frozen=True)
class NamedModel:
    """A model with a name: the source of its sizes, and the keys of its config.json."""

    name: str
    source: str
    config: Mapping[str, Any]


@cache
def load_named() -> Mapping[str, NamedModel]:
    """Every model by its name, in the order of the file."""
    text = files(__package__).joinpath("named.toml").read_text(encoding="utf-8")
    tables = {name: table for name, table in tomllib.loads(text).items() if isinstance(table, dict)}
    return MappingProxyType(
        {
            name: NamedModel(name, table["source"], MappingProxyType(_config(name, tables)))
            for name, table in tables.items()
        }
    )


@cache
def find_named(name: str) -> Shape:
    """The shape of a named model. Raises UserError that lists similar names."""
    model = load_named().get(name.lower())
    if model is None:
        names = list(load_named())
        near = difflib.get_close_matches(name.lower(), names, n=_MOST, cutoff=0.5)
        known = f"names like it: {', '.join(near)}" if near else list_some(names, _MOST)
        problem = Problem(
            "model",
            f'"{name}" is no model that is known by name',
            allowed=f"one of {len(names)}; {known}",
            remedy="correct the name, or name a Hugging Face folder, a hub name (org/name), or a run file",
        )
        raise UserError(render_problems("the model", [problem]), [problem])
    from shardway.plan.shapes.huggingface import shape_of_config

    return shape_of_config(model.config, model.name, f"named.toml, {model.name}")


def _config(name: str, tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The keys of an entry, merged over those of the entry that it extends."""
    own = {key: value for key, value in tables[name].items() if key not in ("source", "like")}
    return {**(_config(tables[name]["like"], tables) if "like" in tables[name] else {}), **own}


# --- a model by the word that names it, and one that --trace counted


def find_shape(name: str) -> Shape:
    """The shape of a folder or a config.json, of a hub name, or of a model known by name."""
    path = expand_home(name)
    is_config = path.is_file() and path.name == CONFIG
    if not (is_config or path.is_dir() or "/" in name):
        return find_named(name)
    from shardway.plan.shapes.huggingface import read_shape

    return read_shape(str(path.parent) if is_config else name)


def name_problems(name: str) -> list[Problem]:
    """Problems of a model that is named by a word alone."""
    if name.endswith(".toml") or "/" in name or expand_home(name).exists():
        return []
    try:
        find_shape(name)
    except UserError as error:
        return [*error.problems]
    return []


def traced_path(run_file: Path) -> Path:
    """Where the traced shape of a run file is kept."""
    return run_file.with_suffix(".shape.json")


def find_traced(values: RunFile, run_file: Path) -> tuple[Measured, str] | None:
    """The traced shape of a run file, if there is one, and a note on it. Raises UserError if it is of another model."""
    stored = traced_path(run_file)
    if not stored.exists():
        return None
    shape = read_measured(stored)
    if not shape.source.endswith(digest_of(values)):
        raise UserError(
            f"{stored} was counted for another [model] or data.seq_len than this run has.\n"
            "  To do: count it again (--trace), or remove the file."
        )
    return shape, f"the model as --trace counted it: {stored} (remove it to plan [model])"


def digest_of(values: RunFile) -> str:
    """Digest of what a sample and the model are made from; by the first names of keys, so that earlier counts hold."""
    later = set() if values.model.settings else {"settings"}
    text = values.model.model_dump_json(exclude=later) + str((values.data.seq_len, values.data.shape))
    for first, today in EARLIER_KEYS.items():
        text = text.replace(f'"{today.removeprefix("model.")}":', f'"{first.removeprefix("model.")}":')
    return hashlib.sha256(text.encode()).hexdigest()[:12]
