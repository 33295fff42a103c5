"""The formulas of a step's bytes, held against what the papers say of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exact_traffic import WORLD, Message, StepWork, estimate_sent_bytes, estimate_traffic
from exact_weights import transformer_weights
from shardway.errors import Bug
from shardway.layout import layout_of
from shardway.runfile.schema import ModelSection, ParallelSection

MODEL = ModelSection(dim=64, layers=4, heads=8, kv_heads=4, head_dim=8, ffn_dim=128, vocab=256, tied=False, experts=0)
WORK = StepWork(MODEL, seq_len=128, rows=2, blocks=(4,))
ELEMENTS = sum(weight.elements for weight in transformer_weights(MODEL))
BLOCKS = sum(weight.elements for weight in transformer_weights(MODEL) if weight.block is not None)
STREAM = 2 * 128 * 64 * 4


def section(**keys: object) -> ParallelSection:
    return ParallelSection(**{"dp_replicate": 1, **keys})  # type: ignore[arg-type]


def sent_over(dim: str, parallel: ParallelSection, work: StepWork = WORK, what: str = "") -> float:
    """Bytes on the wire over one dim, of the messages whose name starts with `what`."""
    ranks = layout_of(parallel).degree(dim)
    messages = [each for each in estimate_traffic(work, parallel) if each.dim == dim and each.what.startswith(what)]
    return sum(estimate_sent_bytes(each, ranks) for each in messages)


def test_one_rank_sends_nothing() -> None:
    assert estimate_traffic(WORK, section()) == ()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero(ranks: int) -> None:
    """Replicas move 2 times the parameters, shards that are kept as much, shards that are freed 3 times (ZeRO,
    section 7.2): what is outside the blocks is not freed."""
    share = (ranks - 1) / ranks * 4
    assert sent_over("dp_replicate", section(dp_replicate=ranks)) == pytest.approx(2 * share * ELEMENTS)
    kept = section(dp_shard=ranks, reshard_after_forward=False)
    assert sent_over("dp_shard_cp", kept) == pytest.approx(2 * share * ELEMENTS)
    assert sent_over("dp_shard_cp", section(dp_shard=ranks)) == pytest.approx(share * (2 * ELEMENTS + BLOCKS))


@pytest.mark.parametrize("ranks", [2, 4])
def test_splitting_the_sequence_moves_as_much(ranks: int) -> None:
    """Two all-reduces a layer forwards and two backwards, or as many pairs of a gather and a scatter (Korthikanti et
    al., section 4.2.2), and one of each at the two ends."""
    ways = [section(tp=ranks, tp_sequence=sequence) for sequence in (True, False)]
    expected = (4 * 4 + 2) * 2 * (ranks - 1) / ranks * STREAM
    assert [sent_over("tp", each, what="activations") for each in ways] == pytest.approx([expected] * 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_brings_the_keys_and_values_of_all_others(ranks: int) -> None:
    """As an all-gather does; gradients take one step more in the ring than in a scatter of their sum."""
    ring, gather = (section(cp=ranks, cp_method=method) for method in ("ring", "gather"))
    assert sent_over("cp", ring, what="keys") == pytest.approx(sent_over("cp", gather, what="keys"))
    home = sent_over("cp", gather, what="gradients")
    assert sent_over("cp", ring, what="gradients") == pytest.approx(home * ranks / (ranks - 1))


def test_experts_send_each_choice_there_and_back() -> None:
    """Twice forwards and twice backwards, top-k rows of the stream (GShard, section 3.2)."""
    model = MODEL.model_copy(update={"experts": 8, "experts_per_token": 3, "expert_dim": 16, "dense_layers": 1})
    work = StepWork(model, seq_len=128, rows=2, blocks=(4,))
    tokens = [m for m in estimate_traffic(work, section(dp_shard=4, ep=4)) if m.what == "tokens"]
    assert [each.payload_bytes for each in tokens] == [3 * 4 * 3 * STREAM]


@given(
    st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("interleaved", 3)]),
    st.sampled_from([1, 2]),
    st.integers(2, 4),
)
def test_whatever_a_stage_sends_another_receives(schedule: tuple[str, int], tp: int, ranks: int) -> None:
    name, per_rank = schedule
    parallel = section(pp=ranks, tp=tp, pp_schedule=name, pp_stages_per_rank=per_rank)
    blocks = [1] * (ranks * per_rank)
    model = MODEL.model_copy(update={"layers": len(blocks)})
    work = StepWork(model, seq_len=128, rows=2, blocks=tuple(blocks), micro_batches=4, per_pass=4)
    messages = [each for rank in range(ranks * tp) for each in estimate_traffic(work, parallel, rank)]
    boundaries = ranks * per_rank - 1 - (name == "zbv")
    for what in ("activations", "gradients of activations"):
        sent, received = (total(messages, kind, what) for kind in ("send", "receive"))
        assert sent == received == boundaries * 4 * STREAM


def total(messages: list[Message], kind: str, what: str) -> int:
    return sum(each.payload_bytes for each in messages if (each.kind, each.dim, each.what) == (kind, "pp", what))


@pytest.mark.parametrize("degrees", [{"dp_replicate": 2}, {"tp": 2, "dp_shard": 2}, {"cp": 2}])
def test_a_step_has_one_vector_of_all_ranks(degrees: dict[str, int]) -> None:
    messages = [each for each in estimate_traffic(WORK, section(**degrees)) if each.dim == WORLD]
    assert [(each.kind, each.payload_bytes) for each in messages] == [("all_reduce", 104)]


def test_resharding_to_fewer_ranks_has_no_formula() -> None:
    with pytest.raises(Bug, match="reshard_after_forward = 2"):
        estimate_traffic(WORK, section(dp_shard=4, reshard_after_forward=2))
