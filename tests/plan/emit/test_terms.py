"""What the writers work out before they write: sizes of a model, flavors, layers that a format takes, refusals."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest
from emit_cases import GOLDEN_CASES, LLAMA_8B, LLAMA_405B, MIXTURE, PREDICTION
from hypothesis import given
from hypothesis import strategies as st

from shardway.plan.case import Case, Degrees, layers_of_stages
from shardway.plan.export.common import (
    describe_irregular,
    emit,
    gather,
    head_lines,
    name_schedule,
    read_sizes,
    render_layout,
    render_pattern,
    schedule_of,
    write,
)
from shardway.plan.export.torchtitan import Flavor, find_flavor, fp4_parts
from shardway.plan.shapes import Architecture, LayerRun

WHOLE = {"stage", "overlap_comm", "stage3_param_persistence_threshold", "stage3_max_reuse_distance"}
"""Of ZeRO 3 as such."""
DENSE = GOLDEN_CASES["fsdp-8b-64"]


def told(library: str, **changes: object) -> str:
    """All that is told of the dense plan with other settings."""
    return " ".join(emit(library, replace(DENSE, **changes), PREDICTION).notes)


# --- models


def test_a_flavor_is_one_of_the_same_sizes() -> None:
    assert find_flavor(LLAMA_8B) == Flavor("llama3", "8B", "llama3_8b")
    assert find_flavor(LLAMA_405B) == Flavor("llama3", "405B", "llama3_405b")
    assert find_flavor(MIXTURE) == Flavor("deepseek_v3", "16B", "deepseek_v3_16b")
    assert find_flavor(replace(LLAMA_8B, vocab=32000)) is None


def test_sizes_of_a_mixture_are_those_of_each_kind_of_layer() -> None:
    sizes = read_sizes(MIXTURE)
    assert (sizes.count, sizes.ffn, sizes.mixed) == (27, 10944, (False, *[True] * 26))
    assert list(describe_irregular(MIXTURE)) == []


def test_layers_that_differ_are_told() -> None:
    first, *_ = LLAMA_8B.layers
    wider = replace(first, ffn=2 * first.ffn, attention=replace(first.attention, bias=True))
    model = replace(LLAMA_8B, runs=(LayerRun(first, 2), LayerRun(wider, 2)))
    assert [line.split(";")[0] for line in describe_irregular(model)] == [
        "Layers differ in attention",
        "Layers differ in the feed-forward layer",
    ]


def test_a_model_that_torchtitan_lacks_has_no_file_of_python() -> None:
    emitted = emit("torchtitan", replace(DENSE, model=replace(LLAMA_8B, name="ours", vocab=32000)), PREDICTION)
    assert [file.name for file in emitted.files] == ["torchtitan.toml"]
    assert "has none of ours: add one called" in emitted.notes[0]


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_pattern_is_the_flags_that_it_was_made_of(flags: list[bool]) -> None:
    assert eval(render_pattern(flags)) == [int(flag) for flag in flags]


@pytest.mark.parametrize(
    ("model", "tp", "taken", "odd"),
    [
        (LLAMA_8B, 1, ["attention", "feed_forward"], []),
        (LLAMA_8B, 8, ["attention", "feed_forward"], []),
        (LLAMA_8B, 16, ["feed_forward"], ["attention"]),
        (MIXTURE, 1, ["shared_experts"], ["attention", "feed_forward"]),
    ],
)
def test_fp4_takes_widths_of_whole_blocks(model: Architecture, tp: int, taken: list[str], odd: list[str]) -> None:
    """16 tensor ranks have half a head of keys each; 10,944 features are 85.5 blocks."""
    case = Case(model=model, seq_len=4096, global_batch=1, degrees=Degrees(tp=tp), precision="fp4")
    assert fp4_parts(case) == (taken, odd)


# --- pipelines

STAGED = replace(GOLDEN_CASES["moe-ep8"], degrees=Degrees(dp_shard=16, pp=4, ep=8), stages_per_rank=1)


def test_a_layout_has_the_layers_of_each_stage() -> None:
    assert layers_of_stages(STAGED) == (6, 7, 7, 7)
    assert render_layout(STAGED) == "Etttttt|ttttttt|ttttttt|tttttttL"


@pytest.mark.parametrize(
    ("schedule", "stages", "found"),
    [("1f1b", 1, "1f1b"), ("1f1b", 3, "interleaved"), ("interleaved", 1, "1f1b"), ("zbv", 2, "zbv")],
)
def test_stages_of_a_rank_make_a_schedule_interleaved(schedule: str, stages: int, found: str) -> None:
    case = replace(STAGED, schedule=schedule, stages_per_rank=stages)
    assert schedule_of(case) == found
    assert name_schedule(case) == f"{schedule} with {'one stage' if stages == 1 else f'{stages} stages'} a rank"


# --- the head


def test_the_head_is_wrapped_and_says_each_sentence_once() -> None:
    sentences = gather(["first " * 30, "second", "second"])
    head = head_lines(DENSE, ["predicted"], {"dp": 32}, sentences)
    lines = write("a.toml", head, "").text.rstrip("\n").splitlines()
    assert lines[:3] == [
        "# predicted",
        "# llama-3.1-8b: degrees dp 32 = 32 ranks, but the plan has 64: what is missing is listed below.",
        "# Still to do, or different from the plan:",
    ]
    assert lines[3].startswith("# - first first")
    assert lines[4].startswith("#   first")
    assert lines[-1] == "# - second"
    assert max(map(len, lines)) <= 120


# --- torchtitan, Accelerate


@pytest.mark.parametrize(
    ("recompute", "mode"),
    [("none", "none"), ("selective", "none"), ("products", "selective"), ("operators", "selective"), ("full", "full")],
)
def test_recompute_in_torchtitan(recompute: str, mode: str) -> None:
    text = emit("torchtitan", replace(DENSE, recompute=recompute), PREDICTION).files[0].text
    assert tomllib.loads(text)["activation_checkpoint"]["mode"] == mode


@pytest.mark.parametrize(("zero", "started"), [(0, 32), (3, 64)])
def test_accelerate_starts_the_ranks_that_it_can_count(zero: int, started: int) -> None:
    """Of a pipeline, where plain copies would each train the whole model on a batch of their own."""
    case = replace(DENSE, degrees=Degrees(dp_shard=32, pp=2), zero=zero)
    assert f"\nnum_processes: {started}\n" in emit("accelerate", case, PREDICTION).files[0].text


# --- DeepSpeed


@pytest.mark.parametrize(
    ("degrees", "there"),
    [
        (Degrees(dp_shard=2), set()),
        (Degrees(dp_shard=2, tp=2), {"tensor_parallel"}),
        (Degrees(dp_shard=2, cp=2), {"data_parallel_size", "sequence_parallel_size"}),
        (Degrees(dp_shard=2, tp=2, cp=2), {"tensor_parallel"}),
        (Degrees(dp_shard=2, pp=2), set()),
        (Degrees(dp_shard=2, tp=2, cp=2, pp=2), set()),
    ],
)
def test_axes_that_deepspeed_takes_together(degrees: Degrees, there: set[str]) -> None:
    """And the batch of a step, where it counts the data ranks right."""
    said = json.loads(emit("deepspeed", replace(DENSE, degrees=degrees), PREDICTION).files[0].text)
    axes = {"tensor_parallel", "expert_parallel", "data_parallel_size", "sequence_parallel_size"}
    assert said.keys() & axes == there
    assert ("train_batch_size" in said) == ("tensor_parallel" not in there)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"zero": 1, "offload": True}, {"stage", "overlap_comm", "offload_optimizer"}),
        ({"zero": 0, "offload": True}, {"stage"}),
        ({"optimizer": "muon"}, {*WHOLE, "reduce_scatter"}),
        ({"reshard": False}, {*WHOLE, "stage3_max_live_parameters"}),
        ({"offload": True}, {*WHOLE, "offload_optimizer", "offload_param"}),
    ],
)
def test_zero_in_deepspeed(changes: dict[str, object], found: set[str]) -> None:
    said = json.loads(emit("deepspeed", replace(DENSE, **changes), PREDICTION).files[0].text)
    assert said["zero_optimization"].keys() == found


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"zero": 1, "degrees": Degrees(dp_shard=32, tp=2)}, True),
        ({"zero": 1, "degrees": Degrees(dp_shard=32, pp=2)}, True),
        ({"zero": 0, "degrees": Degrees(dp_shard=32, pp=2)}, True),
        ({"zero": 1}, False),
        ({"zero": 1, "degrees": Degrees(dp_shard=32, tp=2), "offload": True}, False),
        ({"zero": 1, "degrees": Degrees(dp_shard=32, tp=2), "precision": "fp16"}, False),
        ({"zero": 2, "degrees": Degrees(dp_shard=32, tp=2)}, False),
    ],
)
def test_muon_in_deepspeed(changes: dict[str, object], refused: bool) -> None:
    assert ("DeepSpeed refuses Muon" in told("deepspeed", optimizer="muon", **changes)) == refused


@pytest.mark.parametrize(("cp", "refused"), [(2, False), (4, False), (16, False), (32, False), (64, True)])
def test_heads_in_deepspeed(cp: int, refused: bool) -> None:
    """32 heads, 8 of keys and values: these are copied where there are more ranks."""
    assert (f"over cp {cp}" in told("deepspeed", degrees=Degrees(dp_shard=2, cp=cp))) == refused


def test_offload_of_a_plan_that_shares_weights_takes_them_along() -> None:
    assert "keeps weights and gradients in CPU memory too" in told("torchtitan", offload=True, zero=2)
    assert "keeps weights and gradients in CPU memory too" not in told("torchtitan", offload=True)
    assert "offloads optimizer states alone" in told("megatron", offload=True)
