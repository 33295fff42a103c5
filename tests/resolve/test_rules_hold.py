"""Properties of the rules of the axes: none of them breaks on values that another has refused, and what they propose
is what they take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from cases_axes import REFUSALS as AXES_REFUSALS
from cases_layout import REFUSALS as LAYOUT_REFUSALS
from cases_pipeline import REFUSALS as PIPELINE_REFUSALS
from hypothesis import example, given
from hypothesis import strategies as st
from rule_cases import Refuses

from shardway.errors import Problem, UserError
from shardway.resolve import Circumstances, Resolved, resolve
from shardway.resolve.draft import Draft
from shardway.resolve.rules import RULES, layout
from shardway.runfile.load import LoadedRunFile, load_run, render_value

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
DEGREE = st.sampled_from([1, 1, 2, 2, 3, 4, 6, 8, 64, 10**9])
HUGE = [10**9, 10**12 + 39, 10**400]
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 129, *HUGE]))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "parallel.dp_replicate": st.one_of(st.just("auto"), DEGREE),
    "parallel.dp_shard": st.one_of(st.just("auto"), DEGREE),
    **{f"parallel.{axis}": DEGREE for axis in ("cp", "tp", "pp", "ep")},
    "parallel.reshard_after_forward": st.one_of(st.sampled_from(["auto", True, False]), SIZES),
    "parallel.compress": st.sampled_from(["none", "bf16", "powersgd"]),
    "parallel.cpu_offload": st.booleans(),
    "parallel.tp_sequence": st.booleans(),
    "parallel.pp_schedule": st.sampled_from(SCHEDULES),
    "parallel.pp_stages_per_rank": st.sampled_from(["auto", 1, 2, 3, 10**9]),
    "parallel.pp_split": st.lists(st.integers(0, 5), max_size=6),
    "parallel.pp_micro_batches": st.one_of(st.just("auto"), SIZES),
    "train.compile": st.sampled_from(["off", "blocks", "model"]),
    "train.global_batch": SIZES,
    "train.micro_batch": st.one_of(st.just("auto"), SIZES),
    "model.kind": st.sampled_from(["transformer", "transformer", "encoder_decoder", "vit", "convnet", "mlp"]),
    "model.dim": SIZES,
    "model.layers": SIZES,
    "model.heads": SIZES,
    "model.head_dim": st.one_of(st.just("auto"), SIZES),
    "model.kv_heads": st.one_of(st.just("auto"), SIZES),
    "model.ffn_dim": st.one_of(st.just("auto"), SIZES),
    "model.vocab": st.one_of(st.just("auto"), SIZES),
    "model.tied": st.booleans(),
    "model.positions": st.sampled_from(["rope", "learned"]),
    "model.experts": st.sampled_from([0, 0, 2, 3, 4, 8]),
    "model.dense_layers": st.integers(0, 3),
    "model.balance": st.sampled_from(["bias", "loss", "none"]),
    "model.kv_rank": st.sampled_from([0, 0, 12]),
    "model.channels": st.lists(st.integers(1, 9), min_size=1, max_size=4),
    "model.hidden": st.lists(st.integers(1, 9), max_size=4),
    "data.kind": st.sampled_from(["text", "synthetic"]),
    "data.pack": st.sampled_from([False, False, False, True]),
    "data.group_tokens": st.sampled_from([0, 0, 0, 4096]),
    "data.seq_len": SIZES,
    "precision.compute": st.sampled_from(["fp32", "bf16", "fp16", "float8"]),
}
RUNS = st.fixed_dictionaries({}, optional=VALUES)
RANKS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 1024])

Run = dict[str, str]
"""Key -> its value as it stands on a command line."""


def text_of(values: dict[str, Any]) -> Run:
    return {dotted: render_value(value) for dotted, value in values.items()}


def load(run: Run) -> LoadedRunFile:
    return load_run(None, [f"{dotted}={text}" for dotted, text in run.items()])


@given(RUNS, RANKS)
@example(
    {"parallel.pp": 2, "parallel.pp_schedule": "zbv", "parallel.pp_stages_per_rank": 1, "parallel.pp_split": [4]}, 2
)
@example({"parallel.dp_shard": 10**12 + 39, "parallel.reshard_after_forward": 10**11}, 2)
@example({"parallel.pp": 2, "parallel.pp_schedule": "interleaved", "train.global_batch": 10**15 + 1}, 2)
@example({"parallel.pp": 10**9, "model.layers": 10**12, "parallel.pp_split": [1]}, 2)
@example({"model.dim": 10**400, "train.global_batch": 10**400, "model.experts": 4, "model.kv_rank": 12}, 2)
def test_any_run_resolves_or_is_refused_in_words(values: dict[str, Any], ranks: int) -> None:
    try:
        resolved = resolve(load(text_of(values)), Circumstances(ranks, ranks))
    except UserError as error:
        assert re.match(r"\d+ problems? in the run\n", str(error))
    else:
        assert isinstance(resolved, Resolved)


# --- what a rule proposes

RULES_OF_AXES = [rule for rule in RULES if rule.__module__ == layout.__name__]
LITERAL = r'("[^"]*"|\[[^\]]*\]|\d+|true|false)'


def problems_of(run: Run, ranks: int) -> list[tuple[str, Problem]]:
    """What the rules of the axes say of a run, each with the rule's name."""
    draft, said = Draft(load(run), Circumstances(ranks, ranks)), []
    for rule in RULES:
        rule(draft)
        said += [(rule.__name__, problem) for problem in draft.problems if rule in RULES_OF_AXES]
        draft.problems.clear()
    return said


def proposals_of(problem: Problem) -> Iterator[tuple[str, str]]:
    """The keys and values of which a person reads that they may stand there: "such as 3", "2", "set a.b = 4"."""
    values = re.findall(rf"such as {LITERAL}", problem.allowed)
    others = re.split(", or |, | or ", re.sub(rf"such as {LITERAL}", "", problem.allowed))
    values += [found[1] for part in others if (found := re.match(rf"{LITERAL}(?= |$)", part))]
    yield from ((problem.where, value) for value in values)
    yield from re.findall(rf"set ([a-z_]+\.[a-z_]+) = {LITERAL}", problem.remedy)


def check_proposals(run: Run, ranks: int) -> int:
    """With each proposal alone, its rule says no more of that key. How many proposals there were."""
    count = 0
    for rule, problem in problems_of(run, ranks):
        for dotted, value in proposals_of(problem):
            left = [(name, other.where) for name, other in problems_of({**run, dotted: value}, ranks)]
            assert (rule, problem.where) not in left, f"{dotted} = {value} does not mend\n{problem.render()}"
            count += 1
    return count


REFUSALS = [
    case
    for case in (*AXES_REFUSALS, *PIPELINE_REFUSALS, *LAYOUT_REFUSALS)
    if case.rule in {rule.__name__ for rule in RULES_OF_AXES}
]
NOTHING_TO_PROPOSE = ("every_replica_gets_a_sample", "a_micro_batch_is_a_part_of_a_rank_share")
"""Rules whose messages name bounds alone."""


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_what_a_message_proposes_is_taken(case: Refuses) -> None:
    run = dict(word.split("=", 1) for word in case.words)
    count = check_proposals(run, case.circumstances.get("ranks", 1))
    assert count >= (case.rule not in NOTHING_TO_PROPOSE)


@given(RUNS, RANKS)
def test_whatever_is_proposed_is_taken(values: dict[str, Any], ranks: int) -> None:
    check_proposals(text_of(values), ranks)
