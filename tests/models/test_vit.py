from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from shardway.errors import UserError
from shardway.models.contract import find_plan, match_modules
from shardway.models.image_models import ViT, ViTShape

SHAPE = ViTShape(image=(3, 8, 12), patch=4, classes=5, dim=16, layers=2, heads=4, kv_heads=4, ffn_dim=24)
PAPER = dataclasses.replace(SHAPE, norm="layernorm", activation="gelu", bias=True)
VARIANTS = {"class": SHAPE, "paper": PAPER, "mean": dataclasses.replace(PAPER, pooling="mean")}
every_variant = pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)


def build(shape: ViTShape, seed: int = 0) -> ViT:
    model = ViT(shape)
    model.init_weights(seed)
    return model


def images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 8, 12, generator=torch.Generator().manual_seed(1))


@every_variant
def test_logits_and_parameters(shape):
    model = build(shape)
    assert model(images()).shape == (4, 5)
    assert shape.tokens == 6 + (shape.pooling == "class")


@every_variant
def test_a_model_from_meta_has_the_bits_of_one_from_the_cpu(shape):
    with torch.device("meta"):
        model = ViT(shape)
    model.to_empty(device="cpu").init_weights(3)
    expected = build(shape, 3).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@every_variant
def test_every_parameter_has_a_gradient(shape):
    model = build(shape)
    F.cross_entropy(model(images()), torch.tensor([0, 1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        # One bias for all keys changes no softmax.
        assert parameter.grad.norm() > 1e-6 or name.endswith("wk.bias"), name


@every_variant
def test_every_patch_is_seen_and_its_place_matters(shape):
    model, whole = build(shape), images(1)
    before = model(whole)
    for row in range(2):
        for column in range(3):
            changed = whole.clone()
            changed[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
            assert (model(changed) - before).abs().max() > 1e-4
    assert (model(whole.roll(4, dims=-1)) - before).abs().max() > 1e-4


def test_a_patch_is_a_product_with_its_pixels():
    model, whole = build(VARIANTS["mean"]), images(1)
    weight, bias = model.embedding.projection.weight.flatten(1), model.embedding.projection.bias
    patch = whole[0, :, 4:8, 8:12].flatten()  # row 1, column 2: the last of 2 x 3
    expected = weight @ patch + bias + model.embedding.positions[5]
    assert torch.allclose(model.embedding(whole)[0, 5], expected, atol=1e-5)


@every_variant
def test_stages_of_a_pipeline_hand_on_what_they_are_given(shape):
    first, last = build(shape), build(shape)
    first.norm = first.head = None
    del first.blocks["1"]
    last.embedding = None
    del last.blocks["0"]
    assert torch.equal(last(first(images())), build(shape)(images()))


@every_variant
def test_the_plan_fits(shape):
    model = build(shape)
    plan = find_plan(model)
    assert [name for name, _ in match_modules(model, plan.blocks)] == ["blocks.0", "blocks.1"]
    assert "sequence" not in plan.tensor.values()
    assert {name.split(".")[-1] for name, _ in match_modules(model, plan.tensor)} >= {"wq", "wk", "wv", "wo", "up"}


def test_images_are_learnt_by_heart():
    model, labels = build(PAPER), torch.tensor([0, 1, 2, 3])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):
        loss = F.cross_entropy(model(images()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"image": (3, 8, 13)}, "patches of 4 x 4 do not tile images of 8 x 13"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, sentence):
    with pytest.raises(UserError) as caught:
        dataclasses.replace(SHAPE, **change)
    assert sentence in str(caught.value)


def test_heads_of_odd_width_need_no_rotation():
    shape = dataclasses.replace(SHAPE, dim=12, heads=4)
    assert build(shape)(images()).shape == (4, 5)
