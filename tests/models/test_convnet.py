from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardway.errors import UserError
from shardway.models.contract import match_modules
from shardway.models.image_models import ConvNet, ConvNetShape

SHAPE = ConvNetShape(image=(1, 28, 28), channels=(16, 32), classes=10)
SHAPES = [SHAPE, ConvNetShape((3, 9, 13), (4,), 5), ConvNetShape((2, 8, 8), (3, 4, 5), 2)]


def build(shape: ConvNetShape, seed: int = 0) -> ConvNet:
    model = ConvNet(shape)
    model.init_weights(seed)
    return model


def images(shape: ConvNetShape, count: int = 4) -> torch.Tensor:
    return torch.randn(count, *shape.image, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_follow_from_the_shape(shape):
    model = build(shape)
    assert model(images(shape)).shape == (4, shape.classes)
    assert [name for name, _ in match_modules(model, model.plan().blocks)] == [
        f"blocks.{index}" for index in range(len(shape.channels))
    ]


def test_it_computes_what_the_layers_written_out_compute():
    model, x = build(SHAPE), images(SHAPE)
    y = x
    for block in model.blocks.values():
        y = F.conv2d(y, block.conv.weight, padding=2)
        mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), unbiased=False, keepdim=True)
        y = F.max_pool2d(F.relu((y - mean) / torch.sqrt(var + 1e-5)), 2)
    expected = y.flatten(1) @ model.head.weight.T
    assert torch.allclose(model(x), expected, atol=1e-4)


def test_a_model_from_meta_has_the_bits_of_one_from_the_cpu_buffers_too():
    with torch.device("meta"):
        model = ConvNet(SHAPE)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().fill_(77)
    model.init_weights(5)
    expected = build(SHAPE, seed=5).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.blocks["0"].norm.running_var, torch.ones(16))


def test_weights_spread_as_torch_s_own_default():
    torch.manual_seed(0)
    ours, torchs = build(SHAPE).blocks["1"].conv.weight, nn.Conv2d(16, 32, 5).weight
    assert ours.std().item() == pytest.approx(torchs.std().item(), rel=0.03)


def test_names_in_a_checkpoint_are_stable():
    assert [name for name, _ in build(SHAPE).named_parameters()] == [
        "blocks.0.conv.weight",
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
        "blocks.1.conv.weight",
        "blocks.1.norm.weight",
        "blocks.1.norm.bias",
        "head.weight",
        "head.bias",
    ]


def test_every_parameter_has_a_gradient_and_a_batch_is_learnt():
    model, x, y = build(SHAPE), images(SHAPE, 16), torch.arange(16) % 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(15):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.norm() > 1e-6 for p in model.parameters())
        optimizer.step()
    assert loss.item() < 0.3


def test_an_image_that_the_poolings_use_up_is_refused():
    with pytest.raises(UserError, match="its 3 blocks halve images of 7 x 28 to nothing"):
        ConvNetShape((1, 7, 28), (1, 2, 3), 10)
    assert ConvNetShape((1, 8, 28), (1, 2, 3), 10).features == 3 * 1 * 3
