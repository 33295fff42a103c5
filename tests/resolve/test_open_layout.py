"""`parallel.layout = "auto"`: what is found is legal, keeps what is set, is the fastest, and says why."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planned_runs import AUTO, EIGHT_BILLION, H100, SMALL, TIGHT, price, resolve_on
from resolving import refusal_of, value_of
from test_huggingface_rules import DENSE

from shardway.errors import UserError
from shardway.layout import AXES
from shardway.plan.huggingface import find_named
from shardway.plan.planner import NEAR
from shardway.resolve import Resolved, resolve
from shardway.resolve.draft import applies
from shardway.resolve.planned import KEYS
from shardway.runfile.load import load_run, render_value

CHOSEN = [key for keys in KEYS.values() for key in keys]


def refusal_on(*words: str, **options: Any) -> str:
    with pytest.raises(UserError) as told:
        resolve_on(options.pop("machine", H100), *words, **options)
    return str(told.value)


def written_out(resolved: Resolved) -> list[str]:
    """The words that give what was chosen."""
    return [f"{key}={render_value(value_of(resolved, key))}" for key in CHOSEN if applies(key, resolved.values)]


# --- whatever is found


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model.layers": st.sampled_from([2, 6, 8]),
    "model.heads": st.sampled_from([4, 6, 8]),
    "model.head_dim": st.just(64),
    "model.kv_heads": st.sampled_from(["auto", 2]),
    "model.vocab": st.sampled_from([32768, 32769]),
    "model.tied": st.booleans(),
    "model.experts": st.sampled_from([0, 0, 4]),
    "data.seq_len": st.sampled_from([1024, 8192, 9216]),
    "train.global_batch": st.sampled_from([6, 16, 24, 60]),
    "train.micro_batch": st.sampled_from(["auto", 1, 2, 3]),
    "train.engine": st.sampled_from(["torch", "torch", "deepspeed"]),
    "optim.name": st.sampled_from(["adamw", "sgd"]),
    "recompute.mode": st.sampled_from(["none", "full"]),
    "parallel.dp_replicate": st.sampled_from(["auto", 1, 2]),
    "parallel.dp_shard": st.sampled_from([1, 2, 4]),
    "parallel.tp": st.sampled_from([1, 2, 4]),
    "parallel.pp": st.sampled_from([1, 2, 3]),
    "parallel.ep": st.sampled_from([1, 2]),
    "parallel.pp_schedule": st.sampled_from(["gpipe", "interleaved", "zbv"]),
    "parallel.pp_stages_per_rank": st.sampled_from(["auto", 1, 2]),
    "parallel.reshard_after_forward": st.sampled_from([True, False, 2]),
    "parallel.tp_sequence": st.booleans(),
    "parallel.cpu_offload": st.booleans(),
    "precision.weights": st.sampled_from(["fp32", "bf16"]),
}


INTERLEAVED_OF_THREE = {
    "model.layers": 8,
    "precision.weights": "fp32",
    "data.seq_len": 8192,
    "parallel.cpu_offload": False,
    "parallel.dp_replicate": 2,
    "parallel.pp_schedule": "interleaved",
    "parallel.reshard_after_forward": True,
    "recompute.mode": "none",
}


@given(st.fixed_dictionaries({}, optional=VALUES), st.sampled_from([1, 2, 6, 8, 12, 16]))
@example({"model.heads": 6, "parallel.dp_replicate": 1}, 2)  # the hint on ranks once asked the planner
@example(INTERLEAVED_OF_THREE, 12)  # 16 samples, which were priced as 24
@settings(max_examples=40, deadline=None)
def test_what_is_found_is_taken_where_it_is_written_out(values: dict[str, Any], ranks: int) -> None:
    words = [*SMALL, *(f"{key}={render_value(value)}" for key, value in values.items())]
    try:
        found = resolve_on(TIGHT, *words, AUTO, ranks=ranks)
    except UserError as error:
        assert "problem" in str(error).splitlines()[0]
        return
    for key, value in values.items():
        if value != "auto" and key != "parallel.pp_stages_per_rank":
            assert value_of(found, key) == value
    given_ = resolve_on(TIGHT, *words, *written_out(found), "parallel.layout=given", ranks=ranks)
    assert all(value_of(given_, key) == value_of(found, key) for key in CHOSEN)
    assert given_.derived == found.derived
    assert price(found, TIGHT).fits


SMALLEST = ("model.layers=4", "train.global_batch=16")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.dim=3072", "model.heads=24"),
        ("data.seq_len=4096",),
    ],
)
def test_no_other_layout_is_faster(words: tuple[str, ...]) -> None:
    """Against all that can be written down of four axes, each resolved and priced for itself."""
    words = (*SMALL, *SMALLEST, *words)
    found = price(resolve_on(TIGHT, *words, AUTO, ranks=4), TIGHT)
    assert found.fits
    others = []
    for degrees in itertools.product((1, 2, 4), repeat=4):
        named = dict(zip(("dp_replicate", "dp_shard", "tp", "pp"), degrees, strict=True))
        for micro, mode in itertools.product((1, 2, 4, 8), ("none", "selective", "full")):
            layout = [f"parallel.{axis}={degree}" for axis, degree in named.items()]
            try:
                other = resolve_on(
                    None, *words, *layout, f"train.micro_batch={micro}", f"recompute.mode={mode}", ranks=4
                )
            except UserError:
                continue
            others.append(price(other, TIGHT))
    fitting = [other for other in others if other.fits]
    assert len(fitting) > 5
    assert found.time.seconds <= min(other.time.seconds for other in fitting) * (1 + NEAR)


# --- what it says


def test_each_value_says_why() -> None:
    resolved = resolve_on(H100, *EIGHT_BILLION, AUTO)
    parallel, origins = resolved.values.parallel, resolved.origins
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    assert degrees["dp_shard"] > 1
    assert origins["parallel.dp_shard"].removeprefix("derived: ").startswith("the fastest of ")
    assert " ways to run that were priced; next: " in origins["parallel.dp_shard"]
    unsplit = [axis for axis, degree in degrees.items() if degree == 1]
    assert unsplit
    for axis in unsplit:
        assert origins[f"parallel.{axis}"] == "derived: not split in the fastest layout"
    assert origins["train.micro_batch"].startswith("derived: the fastest with this layout; ")
    assert origins["train.micro_batch"].endswith(" of 74.9 GiB by the plan")
    assert origins["recompute.mode"] == "derived: as little as fits"
    assert origins["parallel.layout"] == "command line"


def test_what_is_set_is_kept_and_not_told_as_derived() -> None:
    words = ("parallel.tp=2", "train.micro_batch=2", "recompute.mode=full", "parallel.reshard_after_forward=true")
    resolved = resolve_on(H100, *EIGHT_BILLION, *words, AUTO)
    for word in words:
        key, _, value = word.partition("=")
        assert (render_value(value_of(resolved, key)).strip('"'), resolved.origins[key]) == (value, "command line")


def test_groups_of_documents_get_no_pipeline_and_one_group_a_pass() -> None:
    grouped = ("data.kind=text", "data.path=docs", "data.group_tokens=16384")
    resolved = resolve_on(H100, *EIGHT_BILLION, *grouped, AUTO)
    assert resolved.values.parallel.pp == 1
    assert resolved.values.train.micro_batch == 1
    assert resolved.origins["train.micro_batch"] == "derived: a pass takes one group of data.group_tokens"
    assert resolved.origins["parallel.dp_shard"].startswith("derived: the fastest of ")


def test_an_auto_that_is_written_down_is_open() -> None:
    words = ("parallel.dp_shard=auto", "train.micro_batch=auto", "parallel.reshard_after_forward=auto")
    assert (
        resolve_on(H100, *EIGHT_BILLION, *words, AUTO).values.parallel
        == resolve_on(H100, *EIGHT_BILLION, AUTO).values.parallel
    )


def test_a_resolved_run_is_not_searched_again(tmp_path: Path) -> None:
    resolved = resolve_on(H100, *EIGHT_BILLION, AUTO)
    path = tmp_path / "resolved.toml"
    path.write_text(resolved.render(), encoding="utf-8")
    # On a machine where nothing fits: a search would say so.
    nowhere = replace(resolved.circumstances, machine=replace(H100, memory_bytes=2**20))
    assert resolve(load_run(path), nowhere).values.parallel == resolved.values.parallel


def test_a_vocabulary_that_only_the_data_know_is_not_split() -> None:
    """It could turn out to be one that the tensor axis does not divide, when all ranks have started."""
    unknown = [word for word in EIGHT_BILLION if not word.startswith(("model.vocab", "data.kind"))]
    unknown.append("data.tokenizer=words.json")
    resolved = resolve_on(H100, *unknown, AUTO)
    assert resolved.values.parallel.tp == 1
    assert any("(for a vocabulary of 32,768)" in origin for origin in resolved.origins.values())
    alone = ("parallel.dp_shard=1", "parallel.cp=1", "parallel.pp=1", AUTO)
    assert resolve_on(H100, *EIGHT_BILLION, *alone).values.parallel.tp > 1
    assert " fits. The nearest, " in refusal_on(*unknown, *alone)
    assert resolve_on(H100, *unknown, "parallel.tp=4", *alone).values.parallel.tp == 4


def test_deepspeed_shards_over_copies_alone() -> None:
    words = ("train.engine=deepspeed", "deepspeed.stage=3")
    parallel = resolve_on(H100, *EIGHT_BILLION, *words, AUTO).values.parallel
    assert (parallel.dp_replicate, parallel.dp_shard, parallel.tp, parallel.pp) == (8, 1, 1, 1)


def test_a_batch_that_the_ranks_do_not_divide_is_shared_unevenly() -> None:
    resolved = resolve_on(H100, *EIGHT_BILLION, AUTO, ranks=7)
    assert resolved.values.parallel.pp == 1
    assert resolved.derived.replicas == 7


# --- where there is nothing to find


@pytest.mark.parametrize(
    ("words", "ranks", "degrees"),
    [
        ((), 2, (2, 1, 1)),
        (("parallel.tp=2",), 4, (2, 1, 2)),
        (("parallel.dp_replicate=1",), 2, (1, 2, 1)),
        (("parallel.dp_shard=auto",), 4, (1, 4, 1)),
    ],
)
def test_without_accelerators_ranks_only_copy(words: tuple[str, ...], ranks: int, degrees: tuple[int, ...]) -> None:
    resolved = resolve_on(None, *words, AUTO, ranks=ranks)
    parallel = resolved.values.parallel
    assert (parallel.dp_replicate, parallel.dp_shard, parallel.tp) == degrees
    assert resolved.values.recompute.mode == "none"
    if not words:
        assert resolved.origins["parallel.dp_replicate"] == "derived: no accelerator is known, so ranks only copy"
        assert resolved.origins["train.micro_batch"] == "derived: 16 samples / 2 data-parallel ranks"


def test_accelerators_that_nobody_knows_are_told() -> None:
    assert refusal_of(AUTO, ranks=2, accelerators=8) == (
        "1 problem in the run\n"
        '  parallel.layout (command line): "auto": memory and rates of the 8 accelerators of this machine are not '
        "known\n"
        '      allowed: "given"\n'
        '      to do: name a site that says what they are (site.name), or set parallel.layout = "given" and the degrees'
    )


@pytest.mark.parametrize("machine", [H100, None])
def test_a_model_without_layers_is_refused_on_any_machine(machine: Any) -> None:
    assert refusal_on("model.kind=convnet", "data.kind=synthetic", AUTO, machine=machine) == (
        "1 problem in the run\n"
        '  parallel.layout (command line): "auto": model.kind: "convnet" has no layers that the planner knows how to '
        "split\n"
        '      allowed: "given"\n'
        '      to do: set parallel.layout = "given" and the degrees'
    )


def test_a_script_with_its_own_model_is_refused() -> None:
    assert "a script brings its own model" in refusal_on(AUTO, own_model=True)


def test_another_mistake_is_told_first() -> None:
    told = refusal_on("model.heads=3", AUTO)
    assert told.startswith("1 problem in the run\n  model.heads (command line): 3 does not divide")


def test_degrees_that_cannot_be_are_told_by_their_own_rule() -> None:
    told = refusal_on(*EIGHT_BILLION, "parallel.tp=3", AUTO)
    assert "parallel.layout" not in told
    assert "parallel.tp (command line): " in told


@pytest.mark.parametrize(
    ("words", "ranks", "help_"),
    [
        (("recompute.mode=none", "data.seq_len=32768", "parallel.cp=1", "parallel.tp=1"), 8, "leave the degrees open"),
        (("optim.name=sgd",), 1, "start "),
        ((), 1, "start "),
    ],
)
def test_where_nothing_fits_the_nearest_and_what_helps_are_told(words: tuple[str, ...], ranks: int, help_: str) -> None:
    told = refusal_on(*EIGHT_BILLION, *words, AUTO, ranks=ranks).splitlines()
    assert told[0] == "1 problem in the run"
    assert f'(command line): "auto": no layout of {ranks} rank' in told[1]
    assert " fits. The nearest, " in told[1]
    assert " that a plan may use" in told[1]
    assert told[2].startswith(f"      to do: {help_}")


def test_what_is_proposed_helps() -> None:
    words = (*EIGHT_BILLION, "model.layers=80", "model.dim=8192", "model.heads=64", "model.ffn_dim=28672", AUTO)
    told = refusal_on(*words)
    assert told.splitlines()[-1] == "      to do: set parallel.cpu_offload = true"
    assert price(resolve_on(H100, *words, "parallel.cpu_offload=true"), H100).fits
    told = refusal_on(*EIGHT_BILLION, AUTO, ranks=1)
    wanted = int(told.splitlines()[-1].split()[-2])
    assert wanted > 1
    assert price(resolve_on(H100, *EIGHT_BILLION, AUTO, ranks=wanted), H100).fits
    if wanted > 2:
        refusal_on(*EIGHT_BILLION, AUTO, ranks=wanted // 2)


def test_a_host_that_is_too_small_is_told() -> None:
    words = (
        "parallel.dp_shard=2",
        "parallel.cpu_offload=true",
        "parallel.pp=1",
        "parallel.tp=1",
        "train.micro_batch=1",
    )
    told = refusal_on(*SMALL, *words, AUTO, ranks=2, machine=replace(H100, host_bytes=2**20))
    assert " GiB of a node's own memory, " in told


def test_a_format_that_the_accelerator_lacks_is_told() -> None:
    old = replace(H100, accelerator=replace(H100.accelerator, peak_flops={"fp32": 1e13, "fp16": 1e14}))
    told = refusal_on(*EIGHT_BILLION, "precision.compute=float8", AUTO, machine=old)
    assert told.splitlines()[1:3] == [
        f'  precision.compute (command line): "float8" has no rate on {old.accelerator.name}',
        '      allowed: "fp32", "bf16", "fp16"',
    ]


def test_a_hugging_face_model_is_laid_out_by_its_config() -> None:
    facts = replace(DENSE, dim=4096, heads=32, layers=32, ffn_dim=14336, vocab=128256, tied=False, max_positions=8192)
    words = ("model.hf=org/name", "data.kind=synthetic", "data.seq_len=8192", "precision.compute=bf16", AUTO)
    resolved = resolve_on(H100, *words, "train.global_batch=64", hf=facts, shape=find_named("llama3-8b"))
    assert resolved.origins["parallel.dp_shard"].startswith("derived: the fastest of ")
