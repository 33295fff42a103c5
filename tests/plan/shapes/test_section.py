"""The shape of a [model] section has the parameters of the model that is built from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardway.errors import Bug, UserError
from shardway.models.build import build_model
from shardway.models.transformer import Transformer
from shardway.plan.huggingface import read_shape
from shardway.plan.shapes import Architecture, Measured, shape_of_section
from shardway.runfile.schema import ModelSection

SIZES: dict[str, Any] = {"dim": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn_dim": 32, "vocab": 40}
LATENT = {"kv_heads": 4, "kv_rank": 8, "rope_head_dim": 2, "value_head_dim": 4}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {"tied": False},
    "gpt": {
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "bias": True,
        "positions": "learned",
        "max_positions": 24,
        "kv_heads": 4,
    },
    "qwen": {"qkv_bias": True, "qk_norm": True, "head_dim": 8},
    "mixture": {"experts": 6, "expert_dim": 8, "shared_experts": 2, "dense_layers": 1, "bias": True},
    "mixture_of_all": {"experts": 6, "expert_dim": 8},
    "latent": {**LATENT, "q_rank": 6},
    "latent_without_query_rank": {**LATENT, "bias": True},
}
IMAGES: dict[str, dict[str, Any]] = {
    "vit": {"kind": "vit", "kv_heads": 4, "norm": "layernorm", "activation": "gelu", "bias": True},
    "vit_mean": {"kind": "vit", "kv_heads": 4, "pooling": "mean"},
    "convnet": {"kind": "convnet", "channels": [8, 5]},
    "convnet_of_one": {"kind": "convnet", "channels": [8], "classes": 3},
    "mlp": {"kind": "mlp", "hidden": [20, 30]},
    "mlp_without_hidden": {"kind": "mlp", "hidden": []},
}
IMAGE = (3, 8, 12)


def section(**changes: Any) -> ModelSection:
    return ModelSection(**{**SIZES, **changes})


def count_built(model: ModelSection, sample: tuple[int, ...]) -> int:
    vocab = 40 if len(sample) == 1 else None
    return sum(p.numel() for p in build_model(model, vocab=vocab, sample_shape=sample).parameters())


@pytest.mark.parametrize("changes", [*TRANSFORMERS.values(), {"kind": "encoder_decoder"}])
def test_parameters_of_models_of_tokens(changes: dict[str, Any]) -> None:
    model = section(**changes)
    assert shape_of_section(model, (24,)).parameters == count_built(model, (24,))


@pytest.mark.parametrize("changes", IMAGES.values(), ids=IMAGES)
def test_parameters_of_models_of_images(changes: dict[str, Any]) -> None:
    model = section(**changes)
    assert shape_of_section(model, IMAGE).parameters == count_built(model, IMAGE)


@given(
    heads=st.integers(1, 6),
    groups=st.integers(1, 3),
    width=st.integers(1, 4),
    layers=st.integers(1, 4),
    ffn=st.integers(1, 40),
    flags=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_parameters_of_any_transformer(
    heads: int, groups: int, width: int, layers: int, ffn: int, flags: list[bool]
) -> None:
    bias, qkv_bias, qk_norm, tied, layernorm, gated = flags
    model = ModelSection(
        dim=12,
        heads=heads * groups,
        kv_heads=heads,
        head_dim=2 * width,
        layers=layers,
        ffn_dim=ffn,
        vocab=40,
        bias=bias,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tied=tied,
        norm="layernorm" if layernorm else "rmsnorm",
        activation="swiglu" if gated else "gelu",
    )
    assert shape_of_section(model, (24,)).parameters == count_built(model, (24,))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_training_flops_are_those_that_torch_counts(name: str) -> None:
    # Values as wide as keys (4 + 2): narrower ones are padded for the kernel, and the padding is counted.
    model = section(**{**TRANSFORMERS[name], "value_head_dim": 6} if "latent" in name else TRANSFORMERS[name])
    built, shape = build_model(model, vocab=40, sample_shape=(24,), device="cpu"), shape_of_section(model, (24,))
    assert isinstance(built, Transformer)
    assert isinstance(shape, Architecture)
    built.init_weights(0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        built(torch.arange(48).view(2, 24) % 40).sum().backward()
    assert shape.flops_per_token(24, causal=False) * 48 == counter.get_total_flops()


def test_dense_layers_come_first() -> None:
    shape = shape_of_section(section(**TRANSFORMERS["mixture"]), (24,))
    assert isinstance(shape, Architecture)
    assert [run.layer.experts is not None for run in shape.runs] == [False, True]
    assert [run.count for run in shape.runs] == [1, 2]


def test_patches_are_seen_from_both_sides() -> None:
    shape = shape_of_section(section(**IMAGES["vit"]), IMAGE)
    assert isinstance(shape, Architecture)
    assert shape.positions == 6 + 1
    assert not shape.layers[0].attention.causal


def test_a_hugging_face_model_is_its_own(tmp_path: Path) -> None:
    config = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(str(tmp_path))
    assert isinstance(shape, Architecture)
    assert (shape.hidden, shape.positions) == (16, 8)


@pytest.mark.parametrize(
    ("changes", "sample", "line"),
    [
        ({"vocab": "auto"}, (24,), 'model.vocab: "auto" follows the data, which a plan does not open'),
        ({"kind": "vit", "patch": 5}, IMAGE, "model.patch: patches of 5 x 5 do not tile images of 8 x 12"),
        ({"kind": "vit"}, (24,), 'model.kind: a "vit" learns from images, and a sample has 1 dims'),
        ({"kind": "convnet", "channels": [4] * 4}, IMAGE, "model.channels: its 4 blocks halve images of 3 x 8 x 12"),
        ({"kind": "encoder_decoder", "heads": 3}, (24,), "model.heads: 3 heads do not split model.dim = 16"),
    ],
)
def test_what_does_not_fit_is_told(changes: dict[str, Any], sample: tuple[int, ...], line: str) -> None:
    with pytest.raises(UserError) as told:
        shape_of_section(section(**changes), sample)
    assert line in str(told.value)


def test_what_is_not_resolved_is_a_bug() -> None:
    with pytest.raises(Bug, match="ffn_dim = 'auto' reached the plan unresolved"):
        shape_of_section(section(ffn_dim="auto"), (24,))


def test_perceptrons_and_convolutions_are_measured() -> None:
    for changes in (IMAGES["convnet"], IMAGES["mlp"]):
        assert isinstance(shape_of_section(section(**changes), IMAGE), Measured)


def test_an_absurd_number_of_layers_is_told_at_once() -> None:
    section = ModelSection(layers=10**15, vocab=256, ffn_dim=256, kv_heads=4, head_dim=32)
    with pytest.raises(UserError, match="1,000,000,000,000,000 is no size"):
        shape_of_section(section, (128,))
