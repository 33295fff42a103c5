"""Formats of weights and inputs: bf16 numbers, channels-last memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pool import ranks
from shardway.parallel.axes.collectives import split_parameter
from shardway.parallel.precision import apply_formats
from small_stack import build_stack


def image_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def seen_inputs(module: nn.Module) -> list[torch.Tensor]:
    """The first input of each call of a module."""
    seen: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    return seen


def test_bf16_weights_round_once_and_batch_norms_keep_fp32() -> None:
    model, plain = image_model(), image_model()
    model.register_buffer("table", torch.zeros(2))
    apply_formats(model, torch.bfloat16)
    formats = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert formats.keys() == dict(plain.named_parameters()).keys()
    assert {name for name, dtype in formats.items() if dtype == torch.float32} == {"1.weight", "1.bias"}
    assert torch.equal(model[0].weight, plain[0].weight.bfloat16())
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@ranks(2)
def test_split_weights_are_cast_too(rank: int, device: str) -> None:
    """Such as another axis has made; one that two modules share stays one."""
    grid = init_device_mesh("cpu", (2,))
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 2))
    split_parameter(model, "0.weight", grid, [0])
    model[1].weight = model[0].weight
    expected = model[0].weight.to_local().bfloat16()
    apply_formats(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model[1].weight is model[0].weight
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.to_local().dtype == torch.bfloat16
    assert device == "meta" or torch.equal(model[0].weight.to_local(), expected)


def test_inputs_are_cast_and_whole_numbers_are_not() -> None:
    model = image_model()
    apply_formats(model, torch.bfloat16)
    seen = seen_inputs(model[0])
    loss = model(torch.randn(2, 3, 8, 8)).float().square().mean()
    loss.backward()
    assert seen[0].dtype == torch.bfloat16
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16, torch.float32}
    stack = build_stack()
    apply_formats(stack, torch.bfloat16)
    assert stack(torch.ones(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


def test_channels_last_changes_memory_and_no_value() -> None:
    model, plain = image_model(), image_model()
    images = torch.randn(2, 3, 8, 8)
    apply_formats(model, torch.float32, channels_last=True)
    seen = seen_inputs(model[0])
    torch.testing.assert_close(model(images), plain(images), rtol=1e-5, atol=1e-5)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(seen[0], images)


def test_a_model_on_meta_keeps_its_memory_order_when_it_is_materialised() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3))
    apply_formats(model, torch.bfloat16, channels_last=True)
    model.to_empty(device="cpu")
    assert model[0].weight.dtype == torch.bfloat16
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_inputs_by_keyword_and_in_trees_are_brought_too() -> None:
    class Net(nn.Module):
        def forward(self, pair: dict[str, torch.Tensor], *, mask: torch.Tensor) -> tuple[torch.dtype, ...]:
            return (*(tensor.dtype for tensor in pair.values()), mask.dtype)

    net = Net()
    apply_formats(net, torch.bfloat16)
    found = net({"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.int64)}, mask=torch.zeros(1))
    assert found == (torch.bfloat16, torch.int64, torch.bfloat16)


def test_no_format_is_no_change() -> None:
    model = image_model()
    apply_formats(model, torch.float32)
    assert not model._forward_pre_hooks
