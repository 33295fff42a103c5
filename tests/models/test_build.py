from __future__ import annotations

import pytest
import torch

from shardway.errors import Bug, UserError
from shardway.models.build import build_model
from shardway.models.experts import MixtureShape
from shardway.models.image_models import MLP, ConvNet, ConvNetShape, MLPShape, ViT, ViTShape
from shardway.models.transformer import EncoderDecoder, EncoderDecoderShape, LatentShape, Transformer, TransformerShape
from shardway.plugins import GROUPS
from shardway.runfile.schema import ModelSection

RESOLVED = {"kv_heads": 2, "head_dim": 32, "ffn_dim": 40, "vocab": 300}
TEXT = {"vocab": 256, "sample_shape": (128,)}
IMAGES = {"vocab": None, "sample_shape": (1, 28, 28)}
DATA = {"transformer": TEXT, "encoder_decoder": TEXT, "vit": IMAGES, "convnet": IMAGES, "mlp": IMAGES}


def section(kind: str = "transformer", **keys) -> ModelSection:
    return ModelSection(kind=kind, **{**RESOLVED, **keys})


def test_every_kind_of_the_run_file_has_a_builder():
    assert list(DATA) == list(GROUPS["models"].own)
    for kind, data in DATA.items():
        assert isinstance(build_model(section(kind), **data), torch.nn.Module)


BLOCK = {
    "norm": "layernorm",
    "norm_eps": 1e-6,
    "activation": "gelu_tanh",
    "bias": True,
    "qkv_bias": True,
    "qk_norm": True,
    "dropout": 0.25,
}
"""Other than the defaults, and of the same name in the section and in the shape."""


def test_a_transformer_takes_each_key_of_the_section():
    keys = {**BLOCK, "tied": False, "rope_theta": 500.0, "positions": "learned", "max_positions": 200}
    model = build_model(section(dim=48, layers=3, heads=6, **{**keys, "head_dim": 10}), **TEXT)
    assert isinstance(model, Transformer)
    sizes = {"dim": 48, "layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 10, "ffn_dim": 40}
    assert model.shape == TransformerShape(vocab=300, **sizes, **keys)


def test_a_transformer_takes_each_key_of_experts_and_latents():
    routing = {"router_score": "sigmoid", "router_normalise": False, "router_scale": 2.5, "capacity_factor": 1.25}
    balance = {"balance": "loss", "bias_update_rate": 0.5, "balance_weight": 0.25}
    experts = {"experts": 8, "experts_per_token": 3, "expert_dim": 16, "shared_experts": 2, "dense_layers": 1}
    widths = {"kv_rank": 24, "q_rank": 20, "rope_head_dim": 6, "value_head_dim": 12}
    model = build_model(section(kv_heads=4, **experts, **routing, **balance, **widths), **TEXT)
    assert model.shape.latent == LatentShape(**widths)
    assert model.shape.mixture == MixtureShape(
        experts=8,
        per_token=3,
        expert_dim=16,
        shared=2,
        score="sigmoid",
        normalise=False,
        scale=2.5,
        capacity_factor=1.25,
        **balance,
    )
    assert model.shape.dense_layers == 1


def test_without_experts_and_latents_their_keys_are_not_read():
    shape = build_model(section(dense_layers=9, experts_per_token=7, q_rank=3), **TEXT).shape
    assert (shape.mixture, shape.latent, shape.dense_layers) == (None, None, 0)


def test_a_vit_takes_each_key_of_the_section():
    keys = {**BLOCK, "patch": 7, "pooling": "mean", "classes": 3}
    model = build_model(section("vit", **keys), **IMAGES)
    assert isinstance(model, ViT)
    sizes = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_dim": 40}
    assert model.shape == ViTShape(image=(1, 28, 28), **sizes, **keys)


def test_an_encoder_decoder_takes_each_key_of_the_section():
    model = build_model(section("encoder_decoder", dim=24, layers=1, heads=2, dropout=0.5), **TEXT)
    assert isinstance(model, EncoderDecoder)
    assert model.shape == EncoderDecoderShape(vocab=300, dim=24, layers=1, heads=2, ffn_dim=40, dropout=0.5)


def test_a_convnet_takes_the_image_of_the_data():
    model = build_model(section("convnet", channels=[4, 8], classes=7), vocab=None, sample_shape=(3, 12, 16))
    assert isinstance(model, ConvNet)
    assert model.shape == ConvNetShape((3, 12, 16), (4, 8), 7)


def test_an_mlp_flattens_any_sample():
    model = build_model(section("mlp", hidden=[5], dropout=0.5), vocab=None, sample_shape=(2, 3, 4))
    assert isinstance(model, MLP)
    assert model.shape == MLPShape(24, (5,), 10, dropout=0.5)


@pytest.mark.parametrize(("kind", "data"), DATA.items())
def test_a_model_is_on_meta_unless_a_device_is_named(kind, data):
    assert all(p.is_meta for p in build_model(section(kind), **data).parameters())
    assert all(p.device == torch.device("cpu") for p in build_model(section(kind), device="cpu", **data).parameters())


@pytest.mark.parametrize(
    ("kind", "data", "sentence"),
    [
        ("transformer", IMAGES, "sequences of tokens, and a sample of the data is 1 x 28 x 28 numbers"),
        ("encoder_decoder", IMAGES, "sequences of tokens, and a sample of the data is 1 x 28 x 28 numbers"),
        ("vit", TEXT, "images of channels x height x width, and a sample of the data is 128 tokens"),
        ("convnet", TEXT, "images of channels x height x width, and a sample of the data is 128 tokens"),
        ("convnet", {"vocab": None, "sample_shape": (784,)}, "a sample of the data is 784 numbers"),
        ("mlp", TEXT, "arrays of numbers, and a sample of the data is 128 tokens of a vocabulary of 256"),
    ],
)
def test_data_that_do_not_fit_the_model_are_refused(kind, data, sentence):
    with pytest.raises(UserError) as caught:
        build_model(section(kind), **data)
    assert sentence in str(caught.value)


def test_a_vocabulary_smaller_than_the_data_s_is_refused():
    with pytest.raises(UserError, match=r"model\.vocab: 255 is smaller than the data's vocabulary of 256"):
        build_model(section(vocab=255), **TEXT)
    assert build_model(section(vocab=256), **TEXT).shape.vocab == 256


def test_an_image_too_small_for_the_poolings_is_refused():
    with pytest.raises(UserError, match="halve images of 3 x 28 to nothing"):
        build_model(section("convnet"), vocab=None, sample_shape=(1, 3, 28))


def test_an_unresolved_auto_is_a_bug():
    with pytest.raises(Bug, match=r"model\.ffn_dim = .auto. reached build_model unresolved"):
        build_model(section(ffn_dim="auto"), **TEXT)
