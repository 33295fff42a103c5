from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from shardway.models.contract import match_modules
from shardway.models.image_models import MLP, MLPShape

SHAPE = MLPShape(inputs=12, hidden=(8, 6), classes=3)


def build(shape: MLPShape, seed: int = 0) -> MLP:
    model = MLP(shape)
    model.init_weights(seed)
    return model


def samples(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(1))


def test_it_computes_what_the_layers_written_out_compute():
    model, x = build(SHAPE), samples()
    first, second = model.blocks.values()
    hidden = torch.relu(torch.relu(x.flatten(1) @ first.weight.T) @ second.weight.T)
    assert torch.allclose(model(x), hidden @ model.head.weight.T, atol=1e-6)


@pytest.mark.parametrize("hidden", [(), (7,), (8, 6)])
def test_sizes_and_plan_follow_from_the_shape(hidden):
    shape = MLPShape(12, hidden, 3)
    model = build(shape)
    assert model(samples()).shape == (5, 3)
    assert len(match_modules(model, model.plan().blocks)) == len(hidden)


def test_a_model_from_meta_has_the_bits_of_one_from_the_cpu():
    with torch.device("meta"):
        model = MLP(SHAPE)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.detach().fill_(torch.nan)
    model.init_weights(5)
    expected = build(SHAPE, seed=5).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_initial_weights_keep_the_scale_of_a_sample():
    shape = MLPShape(400, (500, 500), 300)
    weights = build(shape).state_dict()
    assert weights["blocks.0.weight"].std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert weights["blocks.1.weight"].std().item() == pytest.approx(math.sqrt(2 / 500), rel=0.02)
    assert weights["head.weight"].std().item() == pytest.approx(math.sqrt(1 / 500), rel=0.02)
    logits = build(shape)(torch.randn(64, 400, generator=torch.Generator().manual_seed(0)))
    assert logits.square().mean().item() == pytest.approx(1.0, rel=0.2)


def test_names_in_a_checkpoint_are_stable():
    names = ["blocks.0", "blocks.1", "head"]
    assert list(build(SHAPE).state_dict()) == [f"{n}.{part}" for n in names for part in ("weight", "bias")]


def test_a_tiny_batch_is_learnt_by_heart():
    model, x, y = build(SHAPE), samples(6), torch.arange(6) % 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_dropout_acts_in_training_only():
    model = build(MLPShape(12, (64,), 3, dropout=0.5))
    assert not torch.equal(model(samples()), model(samples()))
    assert torch.equal(model.eval()(samples()), build(MLPShape(12, (64,), 3))(samples()))
