from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardway.models.experts import MixtureShape, Router, count_choices

SHAPE = MixtureShape(experts=5, per_token=2, expert_dim=4)
DIM = 6


def build(shape: MixtureShape) -> Router:
    router = Router(DIM, shape).double()
    with torch.no_grad():
        router.weight.copy_(torch.randn(shape.experts, DIM, generator=torch.Generator().manual_seed(0)))
    router.reset()
    return router


def batch(rows: int = 3, seq: int = 7) -> torch.Tensor:
    return torch.randn(rows, seq, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def reference(router: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and weights [batch, seq, experts], the weights zero where an expert is not chosen, token by token."""
    shape, scores = router.shape, x @ router.weight.T
    scores = scores.softmax(-1) if shape.score == "softmax" else scores.sigmoid()
    weights = torch.zeros_like(scores)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            biased = [
                (s.item() + (0.0 if router.bias is None else router.bias[e].item())) for e, s in enumerate(scores[b, t])
            ]
            chosen = sorted(range(shape.experts), key=lambda e: -biased[e])[: shape.per_token]
            total = sum(scores[b, t, e] for e in chosen) if shape.normalise else 1.0
            for e in chosen:
                weights[b, t, e] = scores[b, t, e] / total * shape.scale
    return scores, weights


def spread(router: Router, x: torch.Tensor) -> torch.Tensor:
    choice = router(x)
    empty = torch.zeros(*x.shape[:2], router.shape.experts, dtype=torch.float64)
    return empty.scatter(-1, choice.experts, choice.weights)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_choice_is_that_of_a_loop_over_tokens(score, normalise):
    router = build(dataclasses.replace(SHAPE, score=score, normalise=normalise, scale=2.5))
    router.bias.copy_(torch.tensor([0.3, -0.3, 0.2, 0.0, -0.2]))
    _, expected = reference(router, batch())
    assert torch.allclose(spread(router, batch()), expected, atol=1e-12)
    grads = [torch.autograd.grad(y.sin().sum(), router.weight)[0] for y in (spread(router, batch()), expected)]
    assert torch.allclose(*grads, atol=1e-12)


def test_a_bias_changes_the_choice_and_not_the_weights():
    router = build(dataclasses.replace(SHAPE, normalise=False))
    router.bias[3] = 10.0
    choice = router(batch())
    assert (choice.experts == 3).any(-1).all()
    scores, _ = reference(router, batch())
    assert torch.allclose(choice.weights, scores.gather(-1, choice.experts), atol=1e-12)


def test_scores_are_float32_under_autocast():
    router = Router(DIM, SHAPE)
    torch.nn.init.normal_(router.weight)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = router(batch().float())
    wide = router(batch().float())
    assert narrow.weights.dtype == torch.float32
    assert torch.equal(narrow.weights, wide.weights)


def test_choices_are_counted_per_sequence():
    experts = torch.tensor([[[0, 2], [2, 1]], [[3, 2], [3, 0]]])
    assert count_choices(experts, 4).tolist() == [[1, 1, 2, 0], [1, 0, 1, 2]]


def test_load_counts_training_alone():
    router = build(SHAPE)
    counts = router(batch()).counts.sum(0)
    assert torch.equal(router.load, counts)
    router(batch())
    assert torch.equal(router.load, 2 * counts)
    with torch.no_grad():
        router(batch())
    router.gradient_scale = 0.0
    router(batch())
    router.gradient_scale = 1.0
    router.eval()
    router(batch())
    assert torch.equal(router.load, 2 * counts)


def test_the_bias_moves_against_the_load():
    router = build(dataclasses.replace(SHAPE, bias_update_rate=0.25))
    router(batch())
    router.adjust(torch.tensor([4, 6, 5, 5, 5]))
    assert router.bias.tolist() == [0.25, -0.25, 0.0, 0.0, 0.0]
    router.adjust(torch.zeros(5, dtype=torch.int64))
    assert router.bias.tolist() == [0.25, -0.25, 0.0, 0.0, 0.0]
    assert router.load.tolist() == [0] * 5


def test_adjusting_evens_the_load():
    router = build(dataclasses.replace(SHAPE, bias_update_rate=0.01))
    router.bias[0] = 0.5
    x = batch(8, 32)
    spans = []
    for _ in range(100):
        router(x)
        spans.append(int(router.load.max() - router.load.min()))
        router.adjust(router.load.clone())
    assert spans[0] > 100
    assert max(spans[-10:]) < 30  # of 512 choices; each step moves every bias by 0.01 to and fro


def test_recompute_does_not_change_where_the_bias_goes():
    plain, again = build(SHAPE), build(SHAPE)
    plain(batch())
    x = batch().requires_grad_()
    checkpoint(lambda y: again(y).weights.sin().sum(), x, use_reentrant=False).backward()
    assert torch.equal(again.load % plain.load.clamp(min=1), torch.zeros(5, dtype=torch.int64))
    for router in (plain, again):
        router.adjust(router.load.clone())
    assert torch.equal(plain.bias, again.bias)
    assert plain.bias.abs().max() > 0


def test_buffers_that_are_saved():
    assert list(build(SHAPE).state_dict()) == ["weight", "bias"]
    assert list(build(dataclasses.replace(SHAPE, balance="loss")).state_dict()) == ["weight"]


# --- the auxiliary loss

LOSS = dataclasses.replace(SHAPE, balance="loss", balance_weight=0.3)


def paper_loss(router: Router, x: torch.Tensor) -> torch.Tensor:
    """Equations 17 to 20 of arXiv:2412.19437 for one sequence [seq, dim]."""
    scores, weights = reference(router, x[None])
    seq, shape = len(x), router.shape
    chosen = (weights[0] > 0).sum(0)
    frequency = shape.experts / (shape.per_token * seq) * chosen
    mean_share = (scores[0] / scores[0].sum(-1, keepdim=True)).mean(0)
    return shape.balance_weight * (frequency * mean_share).sum()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_auxiliary_loss_adds_to_gradients_and_to_nothing_else(score):
    router, x = build(dataclasses.replace(LOSS, score=score)), batch()
    router.gradient_scale = 0.125
    output = spread(router, x)
    _, expected = reference(router, x)
    assert torch.allclose(output, expected, atol=1e-12)
    total = expected.sin().sum() + 0.125 * 7 * sum(paper_loss(router, row) for row in x)
    grads = [torch.autograd.grad(y, router.weight)[0] for y in (output.sin().sum(), total)]
    assert torch.allclose(*grads, atol=1e-12)


def test_the_auxiliary_loss_does_not_depend_on_how_a_batch_is_cut():
    router, x = build(LOSS), batch(4)
    whole = torch.autograd.grad(router(x).weights.sum(), router.weight)[0]
    parts = [torch.autograd.grad(router(part).weights.sum(), router.weight)[0] for part in x.split([1, 3])]
    assert torch.allclose(whole, sum(parts), atol=1e-12)


def test_the_auxiliary_loss_of_a_sequence_that_ranks_share():
    router, x = build(LOSS), batch(2, 8)
    whole = torch.autograd.grad(router(x).weights.sum(), router.weight)[0]
    counts = router(x).counts
    router.sum_over_context = lambda local: counts
    parts = [torch.autograd.grad(router(part).weights.sum(), router.weight)[0] for part in x.split([3, 5], dim=1)]
    assert torch.allclose(whole, sum(parts), atol=1e-12)


def test_an_even_load_has_the_least_auxiliary_loss():
    """At equal scores the loss of a sequence is the coefficient, and descending it evens the shares."""
    router = build(LOSS)
    with torch.no_grad():
        router.weight.zero_()
    x = batch(1, 40)
    assert paper_loss(router, x[0]).item() == pytest.approx(0.3)
    router = build(LOSS)
    before = router(x).counts.max()
    for _ in range(50):
        (gradient,) = torch.autograd.grad(router(x).weights.sum(), router.weight)
        with torch.no_grad():
            router.weight -= 0.2 * gradient
    assert router(x).counts.max() < before
