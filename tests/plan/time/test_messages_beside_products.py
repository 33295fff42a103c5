"""What libraries do with messages: beside products, in eight bits, or never; each by a count of its own.

Sizes are exact here: products take their FLOPs at a fixed rate, links their bytes at another, and nothing starts late.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plan_cases import case_of, expert_model, h100s, llama_layer, model_of
from shardway.plan.case import Case, Machine, find_engine, load_ceilings
from shardway.plan.shapes import LayerShape
from shardway.plan.time import (
    BACKWARD_SHARE,
    CONTEXT,
    GRADIENTS,
    HOST,
    MOVES,
    PRODUCTS,
    SHARDS,
    TENSOR,
    estimate_step,
)
from shardway.plan.time import (
    CONTENTION as SLOWDOWN,
)

LINK, NETWORK, CONTENTION = 100e9, 10e9, 0.25
FAST, SLOW = h100s(link=1e15, peer=1e15), h100s(link=1e6, peer=1e6)
"""Whose messages are shorter, or longer, than any product."""
NODE = h100s(link=LINK, peer=LINK, network=NETWORK)
EXACT = replace(
    load_ceilings(NODE.accelerator),
    **dict.fromkeys(("link", "network", "matmul", "matmul_low", "memory", "gates"), 1.0),
    **dict.fromkeys(("link_latency_s", "network_latency_s", "hop_s", "half_bytes", "kernel_s", "overlap"), 0.0),
    **dict.fromkeys(("matmul_ramp", "narrow_ramp"), 0.0),
    tensor_contention=CONTENTION,
)
HIDDEN, TOKENS, TP = 8192, 8192, 8
LAYER = llama_layer(HIDDEN, heads=64, kv_heads=64)
SHARING = llama_layer(HIDDEN, heads=64, kv_heads=8)  # eight heads share keys and values
STREAM = HIDDEN * TOKENS  # numbers of the residual stream
MESSAGE = STREAM * 2 * (TP - 1) / TP / LINK  # seconds in which they are gathered, or scattered, in 16 bits
FORWARD = {
    matrix.name: 2 * matrix.inputs * matrix.outputs * TOKENS / TP / NODE.peak("bf16") for matrix in LAYER.matrices
}
"""Seconds of a forward product on one rank; gradients of inputs and of weights take as long each."""
FIRST = FORWARD["q"] + FORWARD["kv"], FORWARD["ffn_up"]
SECOND = FORWARD["o"], FORWARD["ffn_down"]


def one_layer(engine: str = "megatron", layer: LayerShape = LAYER, **changes: Any) -> Case:
    """A layer and no head to speak of, by default over a tensor axis of eight."""
    values = {"tp": TP, "seq_len": TOKENS, "global_batch": 1, **changes}
    return case_of(model_of(layer, 1, vocab=8), engine, **values)


def seconds(case: Case, name: str, machine: Machine = NODE) -> float:
    return estimate_step(case, machine, EXACT).items.get(name, 0.0)


# --- how many messages, of which size


@pytest.mark.parametrize(
    ("engine", "recompute", "gathers", "scatters"),
    [
        ("megatron", "none", 6, 4),  # inputs are gathered again in the backward pass
        ("megatron", "full", 8, 6),
        ("torchtitan", "none", 4, 4),  # gathered inputs are kept
        ("torchtitan", "full", 6, 5),  # the last message of a layer is not sent again
        ("torchtitan", "operators", 6, 4),  # gathered inputs are made again, scattered sums are kept
        ("fsdp2", "full", 8, 6),
    ],
)
def test_messages_of_the_tensor_axis(engine: str, recompute: str, gathers: int, scatters: int) -> None:
    case = one_layer(engine, recompute=recompute)
    assert seconds(case, TENSOR) == pytest.approx((gathers + scatters) * MESSAGE)
    low = replace(case, precision="fp8")
    size = 0.5 if engine == "megatron" else 1.0  # of a gathered number: one byte, not two
    assert seconds(low, TENSOR) == pytest.approx((gathers * size + scatters) * MESSAGE)


def test_four_bits_are_gathered_as_such() -> None:
    assert seconds(one_layer(precision="fp4"), TENSOR) == pytest.approx((6 / 4 + 4) * MESSAGE)


# --- beside products


@pytest.mark.parametrize("engine", ["megatron", "torchtitan"])
def test_fast_messages_only_slow_the_products(engine: str) -> None:
    """But for two of torchtitan's, which carry sums of several products: queries, keys and values; gate and up."""
    case = one_layer(engine)
    alone, beside = (seconds(replace(case, async_tensor=on), TENSOR, FAST) for on in (False, True))
    shown = 0 if engine == "megatron" else 2 / 8
    assert beside == pytest.approx((shown + CONTENTION * (1 - shown)) * alone)


def test_slow_messages_hide_all_products() -> None:
    """Seven of eight parts of a product that is cut, the whole of one that is not."""
    cut = 7 / 8 * (sum(FIRST) + 2 * sum(SECOND))  # forward, and gradients of inputs of the second products
    whole = 2 * sum(FIRST)  # an input is gathered beside its gradient's product, which is scattered beside the weight's
    for engine, hidden in (("megatron", cut + whole), ("torchtitan", cut)):
        case = one_layer(engine)
        alone, beside = (seconds(replace(case, async_tensor=on), TENSOR, SLOW) for on in (False, True))
        assert alone - beside == pytest.approx((1 - CONTENTION) * hidden, rel=1e-4)


def test_nemo_overlaps_by_itself_but_in_four_bits() -> None:
    for precision, overlaps in (("bf16", True), ("fp8", True), ("fp4", False)):
        nemo, megatron = (seconds(one_layer(name, precision=precision), TENSOR) for name in ("nemo", "megatron"))
        assert (nemo < 0.9 * megatron) == overlaps
        assert nemo == pytest.approx(megatron) or overlaps


def test_without_a_split_by_sequence_nothing_overlaps() -> None:
    case = one_layer("nemo", sequence=False)
    assert seconds(case, TENSOR) == pytest.approx(4 * 2 * MESSAGE)  # all-reduces


def test_over_the_network_nothing_overlaps() -> None:
    case = one_layer(tp=TP, async_tensor=True)
    small = replace(NODE, domain=4, per_node=4)
    assert seconds(case, TENSOR, small) == seconds(replace(case, async_tensor=False), TENSOR, small)
    assert seconds(case, TENSOR) < seconds(replace(case, async_tensor=False), TENSOR)


# --- recompute and shards


def test_recompute_may_stop_before_the_last_product() -> None:
    """Three passes of products, or four, of which one is without the last."""
    for engine, skipped in (("torchtitan", FORWARD["ffn_down"]), ("megatron", 0.0)):
        none, full = (seconds(one_layer(engine, recompute=mode), PRODUCTS) for mode in ("none", "full"))
        assert full - none == pytest.approx(sum(FORWARD.values()) - skipped)


def test_recompute_of_a_mixture_runs_to_its_end() -> None:
    case = case_of(expert_model(), "torchtitan", recompute="full", micro_batch=8)
    plain = replace(case, engine=replace(case.engine, stops_recompute=False))
    assert seconds(case, PRODUCTS) == seconds(plain, PRODUCTS)


def test_shared_weights_in_eight_bits_are_half_as_long() -> None:
    """Gathered twice in 2 bytes (or 1), gradients scattered in 4."""
    wide = one_layer("torchtitan", tp=1, dp_shard=8, global_batch=8, zero=3)
    for shares, ratio in ((True, 6 / 8), (False, 1.0)):
        low = replace(wide, precision="fp8", engine=replace(wide.engine, shards_low_bits=shares))
        assert seconds(low, SHARDS) / seconds(wide, SHARDS) == pytest.approx(ratio)


# --- over the network


@pytest.mark.parametrize(("tp", "shown"), [(8, SLOWDOWN), (4, 1.0), (1, 1.0)])
def test_messages_of_one_adapter_hide_behind_all_that_is_computed(tp: int, shown: float) -> None:
    """Shards of two nodes: with one rank a node in a group NCCL needs few of the thread blocks that products use."""
    quick = replace(NODE, network=1e12)
    case = one_layer("torchtitan", tp=tp, dp_shard=16 // tp, global_batch=16 // tp, zero=3)
    elements = sum(matrix.parameters for matrix in LAYER.matrices) / tp + LAYER.norms * HIDDEN
    near = 8 // tp  # ranks of a group in a node, whose adapters it uses
    total = elements * (2 + 2 + 4) * (1 - tp / 16) / min(near * 1e12, LINK if near > 1 else 1e12)
    assert seconds(case, SHARDS, quick) == pytest.approx(shown * total, rel=0.02)


@pytest.mark.parametrize(("axis", "engine", "zero"), [("dp_shard", "megatron", 1), ("dp_replicate", "fsdp2", 0)])
def test_gradients_of_one_adapter_hide_behind_the_backward_pass(axis: str, engine: str, zero: int) -> None:
    """Two nodes, first with a rank of a group in each, then with eight, which hide nothing here (`overlap` is 0)."""
    for tp in (8, 1):
        case = one_layer(engine, tp=tp, global_batch=16 // tp, zero=zero, **{axis: 16 // tp})
        items = estimate_step(case, NODE, EXACT).items
        beside = BACKWARD_SHARE * sum(s for name, s in items.items() if name in (PRODUCTS, "attention", MOVES, TENSOR))
        hidden = replace(case, engine=replace(case.engine, overlaps_gradients=False))
        saved = seconds(hidden, GRADIENTS) - items[GRADIENTS]
        assert saved == pytest.approx(min(beside, 0.9 * seconds(hidden, GRADIENTS)) if tp == 8 else 0.0, rel=0.01)


def test_replayed_passes_never_wait_for_the_host() -> None:
    case = one_layer(layer=llama_layer(), tp=1, seq_len=64)
    slow = replace(EXACT, kernel_s=1e-5)
    assert estimate_step(case, NODE, slow).items[HOST] > 0
    assert HOST not in estimate_step(replace(case, engine=replace(case.engine, replays=True)), NODE, slow).items


# --- keys and values


INSTANT = replace(EXACT, flash2=1e12, flash3=1e12)
"""Attention takes no time and hides nothing."""


@pytest.mark.parametrize(("tp", "cp", "rate"), [(2, 4, LINK), (4, 2, LINK), (4, 4, NETWORK), (8, 2, NETWORK)])
def test_a_ring_is_as_slow_as_its_slowest_link(tp: int, cp: int, rate: float) -> None:
    """Keys and values go round forward, and backward with their gradients."""
    case = one_layer(layer=SHARING, tp=tp, cp=cp)
    part = TOKENS / cp * 2 * 8 * 128 * 2 / tp
    found = estimate_step(case, NODE, INSTANT).items[CONTEXT]
    assert found == pytest.approx(3 * (cp - 1) * part / rate)


def test_torchtitan_gathers_keys_and_sends_gradients_in_fp32() -> None:
    case = one_layer("torchtitan", SHARING, tp=1, cp=8)
    part = TOKENS / 8 * 2 * 8 * 128 * 2
    found = estimate_step(case, NODE, INSTANT).items[CONTEXT]
    assert found == pytest.approx((1 + 1 + 2) * 7 * part / LINK)
    repeated = replace(case, engine=replace(case.engine, repeats_keys=True))  # 8 heads as 64
    assert estimate_step(repeated, NODE, INSTANT).items[CONTEXT] == pytest.approx(8 * found)


def test_a_gather_of_keys_hides_less_than_a_ring() -> None:
    gathered = one_layer("torchtitan", SHARING, tp=1, cp=8)
    ring = replace(gathered, engine=replace(gathered.engine, gathers_keys=False))
    assert seconds(gathered, CONTEXT) > 1.5 * seconds(ring, CONTEXT)


# --- rotations


def test_rotations_of_our_plain_blocks_pass_five_times() -> None:
    """Forward and backward: 3 and 1 more than the 2 and 4 that fused ones are counted with."""
    case = one_layer("shardway", SHARING, tp=1)
    fused = replace(case, engine=replace(find_engine("shardway"), rotation_moves=2))
    turned = TOKENS * (64 + 8) * 128 * 2  # bytes of queries and keys
    bandwidth = NODE.accelerator.memory_bandwidth_bytes_per_s
    assert bandwidth is not None
    assert seconds(case, MOVES) - seconds(fused, MOVES) == pytest.approx(4 * turned / bandwidth)
    compiled = replace(case, compiled=True)
    assert seconds(compiled, MOVES) == seconds(replace(fused, compiled=True), MOVES)
