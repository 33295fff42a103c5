"""What is assumed where nobody says anything: usual, told, and such that the ranks can share it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.plan.economy import assume_saving
from shardway.plan.huggingface import find_named
from shardway.plan.planner import assume_batch, assume_seq_len, assume_tokens
from shardway.plan.shapes import Architecture


def named(name: str) -> Architecture:
    shape = find_named(name)
    assert isinstance(shape, Architecture)
    return shape


@pytest.mark.parametrize(
    ("name", "length"), [("llama3-8b", 4096), ("gpt2", 1024), ("bert-large", 512), ("vit-l16", 197)]
)
def test_sequences_are_no_longer_than_the_positions(name: str, length: int) -> None:
    found = assume_seq_len(named(name))
    assert found.value == length
    assert f"{length:,}" in found.note


@pytest.mark.parametrize(
    ("name", "tokens"), [("gpt3-125m", 0.5e6), ("gpt3-2.7b", 1e6), ("gpt3-13b", 2e6), ("gpt3-175b", 3.2e6)]
)
def test_batches_are_those_of_gpt3(name: str, tokens: float) -> None:
    """Brown et al., arXiv:2005.14165, table 2.1, within what one node of eight can share evenly."""
    assert assume_batch(named(name), 2048, 8).value * 2048 == pytest.approx(tokens, rel=0.25)


@given(ranks=st.integers(1, 5000), seq_len=st.sampled_from([512, 2048, 4096, 131072]))
def test_ranks_share_an_assumed_batch_evenly(ranks: int, seq_len: int) -> None:
    batch = assume_batch(named("llama3-8b"), seq_len, ranks).value
    assert batch >= 1
    assert batch % ranks == 0 or ranks % batch == 0
    if batch >= ranks:
        share = batch // ranks
        odd = share // (share & -share)
        assert odd in (1, 3)
        assert abs(math.log2(batch * seq_len / 2e6)) <= 1 or share == 1


def test_tokens_follow_the_parameters_that_a_token_meets() -> None:
    model = named("deepseek-v3")
    assert assume_tokens(model).value == 20 * model.active_parameters < 20 * model.parameters


def test_more_nodes_save_faster_up_to_what_the_file_system_takes() -> None:
    seconds = [assume_saving(96 * 10**9, nodes, None)[0].save_seconds for nodes in (1, 10, 50, 500)]
    assert seconds[0] == pytest.approx(96)  # 1 GB/s
    assert seconds[0] > seconds[1] > seconds[2] == seconds[3]
    faults, slot, _ = assume_saving(96 * 10**9, 1, 3600)
    assert slot is not None
    assert slot.training_seconds == pytest.approx(3600 - 180 - 96 - (60 + 96))
    assert faults.restart_seconds == pytest.approx(180 + 120 + 96)
