"""What passes in bf16 that are not compiled compute by hand: outputs and gradients of the plain operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardway.models import eager
from shardway.models.transformer import Block, BlockShape, LatentShape, rotate, rotation
from shardway.parallel.blocks import apply_recompute
from shardway.runfile.schema import RecomputeSection

SHAPE = BlockShape(dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=48)
SHAPES = {
    "plain": SHAPE,
    "biases": dataclasses.replace(SHAPE, bias=True, norm="layernorm", activation="gelu"),
    "biases of queries, keys and values": dataclasses.replace(SHAPE, qkv_bias=True),
    "normalised queries and keys": dataclasses.replace(SHAPE, qk_norm=True),
    "learned positions": dataclasses.replace(SHAPE, positions="learned"),
    "latent": dataclasses.replace(
        SHAPE, latent=LatentShape(kv_rank=12, q_rank=8, rope_head_dim=4, value_head_dim=8), kv_heads=4
    ),
}


@pytest.fixture(autouse=True)
def _few_numbers_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "FEWEST", 0)


@contextmanager
def by_plain_operators() -> Iterator[None]:
    """As a compiler would see the model."""
    with mock.patch.object(eager, "torch", _Compiling()):
        yield


class _Compiling:
    class compiler:
        is_compiling = staticmethod(lambda: True)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def filled(shape: BlockShape, dtype: torch.dtype = torch.float32) -> Block:
    block, generator = Block(shape, 0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / shape.dim**0.5)
    return block.to(dtype)


def numbers(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def turns(shape: BlockShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    width = shape.head_width if shape.latent is None else shape.latent.rope_head_dim
    return rotation(torch.arange(9), width, 100.0, dtype) if shape.positions == "rope" else None


def passed(block: Block, shape: BlockShape, x: torch.Tensor, *, autocast: bool = True) -> dict[str, torch.Tensor]:
    """Output and gradients of a block, by name."""
    x = x.detach().requires_grad_()
    block.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = block(x, turns(shape, x.dtype))
    y.backward(torch.ones_like(y) / 8)
    named = {name: parameter.grad for name, parameter in block.named_parameters() if parameter.grad is not None}
    return {"output": y.detach(), "input": x.grad, **{name: grad.clone() for name, grad in named.items()}}


def off_by(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """The error of each tensor, as a part of its norm."""
    return {name: float((found[name].float() - one).norm() / one.norm()) for name, one in exact.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_as_near_to_exact_numbers_as_plain_operators(name: str) -> None:
    shape = SHAPES[name]
    block = filled(shape)
    exact = passed(filled(shape), shape, numbers().float(), autocast=False)
    with by_plain_operators():
        plain = off_by(passed(block, shape, numbers()), exact)
    found = off_by(passed(block, shape, numbers()), exact)
    assert found.keys() == plain.keys()
    assert sum(found.values()) < 1.2 * sum(plain.values())
    for part, error in found.items():
        assert error < 0.03, part


def test_by_hand_it_is_another_path_and_the_plain_one_stays_testable() -> None:
    """Or the test above would compare one path with itself."""
    used = set[str]()
    kinds = (eager._JoinedLinear, eager._SplitRotated, eager._Gated)

    def spy(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
        apply = kind.apply

        def call(*inputs: Any) -> Any:
            used.add(kind.__name__)
            return apply(*inputs)

        return call

    with mock.patch.multiple("shardway.models.eager", **{kind.__name__: mock.Mock(apply=spy(kind)) for kind in kinds}):
        passed(filled(SHAPE), SHAPE, numbers())
        assert used == {kind.__name__ for kind in kinds}
        used.clear()
        with by_plain_operators():
            passed(filled(SHAPE), SHAPE, numbers())
        passed(filled(SHAPE), SHAPE, numbers().float(), autocast=False)
        with mock.patch.object(eager, "FEWEST", numbers().numel() + 1):
            passed(filled(SHAPE), SHAPE, numbers())
        assert used == set()


def test_a_frozen_weight_has_no_gradient_and_the_others_keep_theirs() -> None:
    whole = passed(filled(SHAPE), SHAPE, numbers())
    block = filled(SHAPE)
    frozen = ("attention.wk.weight", "ffn.gate.weight")
    for name in frozen:
        block.get_parameter(name).requires_grad_(False)
    found = passed(block, SHAPE, numbers())
    assert set(whole) - set(found) == set(frozen)
    for name, tensor in found.items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("name", ["attention.wk", "ffn.up"])
def test_a_layer_with_a_hook_is_called(name: str) -> None:
    block, calls = filled(SHAPE), list[str]()
    block.get_submodule(name).register_forward_hook(lambda *_: calls.append(name))
    passed(block, SHAPE, numbers())
    assert calls == [name]


@pytest.mark.parametrize("name", ["attention.wv", "ffn.gate"])
def test_a_layer_that_is_more_than_a_product_is_called(name: str) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    block, other = filled(SHAPE), filled(SHAPE)
    block.get_submodule(name).__class__ = Doubled
    with torch.no_grad():
        other.get_parameter(f"{name}.weight").mul_(2)
    found, expected = passed(block, SHAPE, numbers()), passed(other, SHAPE, numbers())
    torch.testing.assert_close(found["output"], expected["output"], rtol=0.02, atol=0.02)


def test_weights_in_16_bits_are_not_copied() -> None:
    """Under FSDP they are gathered for a block and freed behind it; a joined copy would outlive them."""
    block, kept = filled(SHAPE, torch.bfloat16), list[torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(numbers().requires_grad_(), turns(SHAPE, torch.bfloat16))
    own = {each.untyped_storage().data_ptr() for each in block.parameters()}
    of_weights = [each for each in kept if each.dim() == 2 and 18 not in each.shape]  # 18 tokens
    assert len(of_weights) >= 7
    assert all(each.untyped_storage().data_ptr() in own for each in of_weights)


@pytest.mark.parametrize(
    "section", [RecomputeSection(mode="full"), RecomputeSection(mode="selective")], ids=["full", "selective"]
)
def test_it_is_the_same_when_it_is_computed_again(section: RecomputeSection) -> None:
    block = filled(SHAPE)
    expected = passed(block, SHAPE, numbers())
    apply_recompute([block], section)
    for name, tensor in passed(block, SHAPE, numbers()).items():
        assert torch.equal(tensor, expected[name]), name


def test_turning_back_undoes_a_rotation() -> None:
    cos, sin = rotation(torch.arange(9), 8, 100.0, torch.bfloat16)
    x = torch.randn(2, 9, 4, 8, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    turned = rotate(x, cos, sin)
    (back,) = torch.autograd.grad(turned, x, turned.detach())
    torch.testing.assert_close(back, x, rtol=0.02, atol=0.05)
