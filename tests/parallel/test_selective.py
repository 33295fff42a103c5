"""What selective recompute keeps: right where the backward pass is split, told where it cannot be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardway.errors import UserError
from shardway.parallel.blocks import apply_recompute, find_operators, keeping
from shardway.runfile.schema import RecomputeSection
from small_stack import build_stack, gradients, token_batch


def run(region: Any, *inputs: torch.Tensor, save: str = "matmul") -> torch.Tensor:
    """The region, with the results of matrix products kept for its backward pass."""
    operators = frozenset(find_operators([save]))
    return checkpoint(region, *inputs, use_reentrant=False, context_fn=lambda: keeping(operators))


def region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.gelu(x @ weight) @ weight)


def test_gradients_of_inputs_and_of_weights_may_be_taken_apart() -> None:
    """As the schedules of a pipeline without bubbles do: the region is computed again twice."""
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(region(x, weight).sum(), (x, weight))
    loss = run(region, x, weight).sum()
    (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
    (of_weight,) = torch.autograd.grad(loss, weight)
    assert torch.equal(of_input, expected[0])
    assert torch.equal(of_weight, expected[1])


def test_a_kept_result_that_is_changed_in_place_is_told() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)
    loss = run(lambda x: F.gelu((x @ weight).mul_(2)), x).sum()
    with pytest.raises(UserError, match=r"changes in place what aten\.mm\.default has returned"):
        loss.backward()


def test_more_calls_than_in_the_forward_pass_are_told() -> None:
    x, (forward, again) = torch.ones(2, 2), keeping(find_operators(["matmul"]))
    with forward:
        kept = x @ x
    with again:
        assert torch.equal(x @ torch.zeros(2, 2), kept)
        with pytest.raises(UserError, match=r"calls aten\.mm\.default more often"):
            x @ x


def test_what_a_region_does_besides_when_it_is_computed_again_is_in_order() -> None:
    """Weights that are gathered inside a region are gathered once more; that is no operator of the forward pass."""
    weight, passes = torch.randn(4, 4, requires_grad=True), iter((False, True))

    def gathering(x: torch.Tensor) -> torch.Tensor:
        if next(passes):
            torch.zeros(2).add(1)
        return F.gelu(x @ weight)

    x = torch.randn(3, 4)
    (expected,) = torch.autograd.grad(F.gelu(x @ weight).sum(), weight)
    (found,) = torch.autograd.grad(run(gathering, x).sum(), weight)
    assert torch.equal(found, expected)


def test_a_copy_of_a_model_keeps_its_own() -> None:
    model = build_stack(2)
    expected = gradients(copy.deepcopy(model), token_batch())
    apply_recompute(list(model.blocks), RecomputeSection(mode="selective"))
    twin: nn.Module = copy.deepcopy(model)
    found = gradients(twin, token_batch())
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
