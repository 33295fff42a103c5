"""Losses as sums: what is ignored, what is counted, and what a user's mean stands for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from shardway.train.loss import IGNORED, LossSum, as_sum, class_cross_entropy, token_cross_entropy


@given(st.lists(st.lists(st.sampled_from([IGNORED, 0, 1, 2, 3]), min_size=3, max_size=3), min_size=1, max_size=5))
def test_tokens_that_are_ignored_add_nothing(rows: list[list[int]]) -> None:
    targets = torch.tensor(rows)
    logits = torch.randn(len(rows), 3, 4, generator=torch.Generator().manual_seed(1))
    loss = token_cross_entropy(logits, targets)
    counted = [(r, c) for r in range(len(rows)) for c in range(3) if rows[r][c] != IGNORED]
    by_hand = sum(-math.log(torch.softmax(logits[r, c].double(), -1)[rows[r][c]].item()) for r, c in counted)
    assert int(loss.count) == len(counted)
    assert loss.total.item() == pytest.approx(by_hand, abs=1e-5)


def test_narrow_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(64, 16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets = torch.zeros(64, 16, dtype=torch.long)
    loss = token_cross_entropy(logits, targets)
    assert loss.total.dtype == torch.float32
    exact = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.total.item() == pytest.approx(exact.item(), rel=1e-5)


def test_right_answers_are_counted() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    loss = class_cross_entropy(logits, torch.tensor([0, 1, 1]))
    assert loss.count == 3
    assert loss.correct is not None
    assert loss.correct.item() == 2


def test_a_class_that_is_ignored_adds_nothing() -> None:
    logits, targets = torch.randn(5, 4, generator=torch.Generator().manual_seed(2)), torch.tensor([0, -100, 3, 1, -100])
    found, kept = class_cross_entropy(logits, targets), class_cross_entropy(logits[[0, 2, 3]], targets[[0, 2, 3]])
    assert found.count == kept.count == 3
    assert found.total.item() == pytest.approx(kept.total.item())
    assert found.correct is not None
    assert found.correct == kept.correct
    nothing = class_cross_entropy(logits, torch.full((5,), -100))
    assert (float(nothing.total), int(nothing.count)) == (0.0, 0)


def test_a_mean_stands_for_its_samples() -> None:
    assert as_sum(torch.tensor(0.5), 6) == LossSum(torch.tensor(3.0), 6)
    kept = LossSum(torch.tensor(1.0), 2)
    assert as_sum(kept, 6) is kept


def test_the_mean_of_no_sample_is_nothing() -> None:
    empty = as_sum(torch.zeros(0).mean(), 0)
    assert empty.total.item() == 0.0
    assert empty.count == 0
