"""Each optimizer against a plain reference on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_layouts import LR, everything, make_model, train, values
from torch import nn

from shardway.runfile.schema import OptimSection
from shardway.train.optim.base import decay_groups, muon_groups
from shardway.train.optim.kinds import build_optimizer
from shardway.train.optim.muon import COEFFICIENTS, adjustment, orthogonalise

Build = Callable[[Any], torch.optim.Optimizer]


def assert_like_reference(section: OptimSection, build: Build) -> None:
    """Five steps of the section's optimizer and of one of torch's on the same two groups."""
    model, reference = make_model(), make_model()
    train(model, build_optimizer(section, model, LR), range(5))
    train(reference, build(decay_groups(reference, section.weight_decay)), range(5))
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=2e-6, atol=1e-6), name


@pytest.mark.parametrize("kernel", ["auto", "fused", "foreach"])
def test_adamw(kernel: Any) -> None:
    section = OptimSection(kernel=kernel, betas=[0.8, 0.97], eps=1e-5, weight_decay=0.3)
    assert_like_reference(section, lambda groups: torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.97), eps=1e-5))


@pytest.mark.parametrize("kernel", ["auto", "foreach"])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.8, False), (0.8, True)])
def test_sgd(kernel: Any, momentum: float, nesterov: bool) -> None:
    section = OptimSection(name="sgd", kernel=kernel, momentum=momentum, nesterov=nesterov, weight_decay=0.3)
    assert_like_reference(section, lambda groups: torch.optim.SGD(groups, lr=LR, momentum=momentum, nesterov=nesterov))


def test_adafactor() -> None:
    section = OptimSection(name="adafactor", weight_decay=0.3)
    assert_like_reference(section, lambda groups: torch.optim.Adafactor(groups, lr=LR))


def test_adafactor_moves_by_the_rate_times_the_size_of_the_weights() -> None:
    """torch's cuts a rate of 0.9 to 1 / sqrt(step); here the schedule alone decides."""
    model, name = make_model(), "blocks.0.down.weight weight"
    optimizer = build_optimizer(OptimSection(name="adafactor", weight_decay=0.0), model, 0.9)
    train(model, optimizer, range(1))
    before = everything(model, optimizer)[name]
    train(model, optimizer, range(1, 2))
    moved = (everything(model, optimizer)[name] - before).square().mean().sqrt()
    allowed = 0.9 * before.square().mean().sqrt()
    assert 1 / 2**0.5 < moved / allowed < 1.00001


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest(adjust: Any) -> None:
    section = OptimSection(name="muon", muon_adjust=adjust, muon_momentum=0.9, weight_decay=0.3)
    model, reference = make_model(), make_model()
    train(model, build_optimizer(section, model, LR), range(5))
    matrices, others = muon_groups(reference, 0.3)
    flat = [matrix for matrix in matrices if matrix.dim() == 2]
    theirs = torch.optim.Muon(flat, lr=LR, weight_decay=0.3, momentum=0.9, adjust_lr_fn=adjust)
    train(reference, theirs, range(5))
    train(reference, torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95)), range(5))
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if not name.endswith("experts.weight"):
            assert torch.allclose(found, expected, rtol=2e-6, atol=1e-6), name


def test_muon_takes_each_expert_by_itself() -> None:
    """A stack of experts ends where matrices of their own would."""
    section, whole = OptimSection(name="muon"), make_model()
    train(whole, build_optimizer(section, whole, LR), range(3))
    start = make_model().blocks["0"].experts.weight.detach()  # type: ignore[union-attr]
    for expert in range(4):
        linear = nn.Linear(6, 7, bias=False)
        linear.weight.data.copy_(start[expert])
        optimizer = build_optimizer(section, nn.Sequential(nn.Sequential(linear)), LR)
        for step in range(3):
            linear.weight.grad = values(f"gradient {step} of blocks.0.experts.weight", start.shape)[expert]
            optimizer.step()
        assert torch.equal(linear.weight, whole.blocks["0"].experts.weight[expert])  # type: ignore[union-attr]


@settings(max_examples=30)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), many=st.integers(1, 3), iterations=st.integers(1, 6))
def test_orthogonalise_applies_the_quintic_to_singular_values(
    rows: int, columns: int, many: int, iterations: int
) -> None:
    generator = torch.Generator().manual_seed(rows + 10 * columns + 100 * many)
    matrices = torch.randn(many, rows, columns, generator=generator, dtype=torch.float64)
    left, singular, right = torch.linalg.svd(matrices, full_matrices=False)
    singular = singular / singular.norm(dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        singular = a * singular + b * singular**3 + c * singular**5
    expected = left @ torch.diag_embed(singular) @ right
    assert torch.allclose(orthogonalise(matrices, iterations), expected, rtol=1e-9, atol=1e-9)


def test_orthogonalise_of_nothing_is_nothing() -> None:
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 4), 5), torch.zeros(2, 3, 4))
    assert orthogonalise(torch.zeros(0, 3, 4), 5).shape == (0, 3, 4)


def test_an_adjusted_update_is_as_large_as_one_of_adamw() -> None:
    """RMS 0.2 for a matrix with orthogonal rows (arXiv:2502.16982, lemma 1: RMS sqrt(1 / max(rows, columns)))."""
    for rows, columns in ((64, 256), (256, 64)):
        matrix = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), dtype=torch.float64)).Q
        rms = matrix.square().mean().sqrt().item() * adjustment("match_rms_adamw", rows, columns)
        assert rms == pytest.approx(0.2)
    assert adjustment("original", 4, 1) == 2.0
    assert adjustment("original", 1, 4) == 1.0


def test_memory_formats_may_differ() -> None:
    """A fused kernel reads memory in order: weights in channels_last with other gradients must not reach it."""
    torch.manual_seed(0)
    gradient, ends = torch.randn(4, 3, 5, 5), []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Conv2d(3, 4, 5, bias=False)
        model.weight.data = torch.ones(4, 3, 5, 5).contiguous(memory_format=layout)
        model.weight.grad = gradient.clone()
        build_optimizer(OptimSection(), model, LR).step()
        ends.append(model.weight.detach())
    assert torch.allclose(ends[0], ends[1])


def test_a_step_returns_what_the_closure_does_and_skips_what_has_no_gradient() -> None:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(OptimSection(), model, LR)
    before = model.bias.detach().clone()

    def closure() -> float:
        loss = model.weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0
    assert torch.equal(model.bias, before)
    assert set(optimizer.state) == {model.weight}
