from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.models.experts import Experts, MixtureOfExperts, MixtureShape, run_each, run_grouped

SHAPE = MixtureShape(experts=5, per_token=2, expert_dim=4, shared=2)
DIM = 6


def build(shape: MixtureShape = SHAPE) -> MixtureOfExperts:
    module = MixtureOfExperts(DIM, shape)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module.double()


def batch(rows: int = 3, seq: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, seq, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return down @ (F.silu(gate @ x) * (up @ x))


def naive(module: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Token by token in the order of each sequence, expert by expert; an expert that is full takes no more."""
    shape, choice, experts = module.shape, module.router(x), module.experts
    even = x.shape[1] * shape.per_token / shape.experts
    limit = math.ceil(shape.capacity_factor * even) if shape.capacity_factor else math.inf
    output = []
    for b in range(x.shape[0]):
        taken = [0] * shape.experts
        for t in range(x.shape[1]):
            y = torch.zeros(DIM, dtype=torch.float64)
            for weight, e in zip(choice.weights[b, t], choice.experts[b, t].tolist(), strict=True):
                if taken[e] < limit:
                    y = y + weight * swiglu(x[b, t], experts.gate[e], experts.up[e], experts.down[e])
                taken[e] += 1
            if module.shared is not None:
                y = y + swiglu(x[b, t], module.shared.gate, module.shared.up, module.shared.down)
            output.append(y)
    return torch.stack(output).view_as(x)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("per_token", [1, 2, 5])
@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.0])
def test_a_mixture_is_a_loop_over_tokens_and_experts(shared, per_token, capacity):
    shape = dataclasses.replace(SHAPE, shared=shared, per_token=per_token, capacity_factor=capacity, normalise=False)
    module, x = build(shape), batch().requires_grad_()
    outputs = (module(x), naive(module, x))
    assert torch.allclose(*outputs, atol=1e-12)
    inputs = [x, *module.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(y.sin().sum(), inputs) for y in outputs), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_a_capacity_drops_tokens():
    kept, dropping = build(), build(dataclasses.replace(SHAPE, capacity_factor=0.5))
    x = batch()
    changed = (kept(x) - dropping(x)).abs().amax(-1) > 1e-9
    assert changed.any()
    assert not changed[:, 0].any()  # the first token of a sequence always finds room


@pytest.mark.parametrize("capacity", [0.0, 0.5])
def test_a_token_changes_nothing_before_it_and_nothing_in_another_sequence(capacity):
    module, x = build(dataclasses.replace(SHAPE, capacity_factor=capacity)), batch()
    changed = x.clone()
    changed[1, 4] = batch(seed=9)[1, 4]
    difference = (module(x) - module(changed)).abs().amax(-1) > 1e-12
    assert not difference[[0, 2]].any()
    assert not difference[1, :4].any()
    assert difference[1, 4]


def test_gradients_are_those_of_finite_differences():
    module, x = build().eval(), batch(1, 4).requires_grad_()
    names = [name for name, _ in module.named_parameters()]

    def call(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *module.parameters()), fast_mode=True)


def test_experts_that_nobody_chose_have_a_gradient_of_zero():
    module, x = build(), batch(1, 1)
    module(x).sum().backward()
    idle = sorted(set(range(5)) - set(module.router(x).experts.flatten().tolist()))
    assert len(idle) == 3
    for weight in module.experts.parameters():
        assert weight.grad[idle].abs().max() == 0
        assert weight.grad.abs().max() > 0


def test_experts_without_any_token_have_a_gradient():
    experts = Experts(3, DIM, 4)
    output = experts(torch.zeros(0, DIM, requires_grad=True), torch.zeros(3, dtype=torch.int64))
    assert output.shape == (0, DIM)
    output.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in experts.parameters())


def test_hidden_features_add_up():
    """What a rank computes that holds half of the hidden features of every expert is its part of the sum."""
    module, x = build(), batch()
    total = torch.zeros_like(x)
    for half in (0, 1):
        part = copy.deepcopy(module)
        for owner, dims in ((part.experts, (1, 1, 2)), (part.shared, (0, 0, 1))):
            for name, dim in zip(("gate", "up", "down"), dims, strict=True):
                setattr(owner, name, torch.nn.Parameter(getattr(owner, name).chunk(2, dim)[half]))
        total += part(x)
    assert torch.allclose(total, module(x), atol=1e-12)


def test_experts_see_their_own_tokens_in_order():
    module, seen = build(), []
    module.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    x = batch()
    module(x)
    tokens, counts = seen[0]
    choice = module.router(x)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [int((choice.experts == e).sum()) for e in range(5)]
    expected = [x.flatten(0, 1)[(choice.experts == e).any(-1).flatten()] for e in range(5)]
    assert torch.equal(tokens, torch.cat(expected))


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 6), min_size=3, max_size=3), seed=st.integers(0, 99))
def test_the_grouped_kernel_computes_what_the_loop_does(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(counts), 8), (3, 16, 8), (3, 16, 8), (3, 8, 16)]
    tokens, *weights = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    upstream = torch.randn(shapes[0], generator=generator)
    outputs = [run(tokens, torch.tensor(counts), weights) for run in (run_each, run_grouped)]
    assert torch.allclose(*outputs, atol=1e-5)
    grads = [torch.autograd.grad(output, [tokens, *weights], upstream) for output in outputs]
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_mixture_under_autocast_computes_in_bf16():
    module, x = build().float(), batch().float()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x)
    assert output.dtype == torch.bfloat16
    assert torch.allclose(output.float(), module(x), atol=0.05)
