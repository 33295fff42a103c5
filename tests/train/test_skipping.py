"""Runs that leave spans of their data out: what they learn from, how they go on, what they tell."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pool import ranks
from runs import layout, lone_rank, pool_ranks, read_column, read_named, read_steps, train_tiny
from shardway.data.order import SampleOrder
from shardway.rundir.directory import RunDir
from shardway.train.loop_state import Counters, read_counters

WORDS = ("train.steps=10", "data.validation_fraction=0.0", "data.record_ids=true", "train.global_batch=8")
"""96 samples, of which ten steps take 80."""


def used_by_step(folder: Path, world: int = 1) -> list[list[int]]:
    by_rank = [read_steps(folder, rank) for rank in range(world)]
    return [[sample for event in step for sample in event["ids"]] for step in zip(*by_rank, strict=True)]


def flat(steps: list[list[int]]) -> list[int]:
    return [sample for step in steps for sample in step]


def order_of(positions: list[int]) -> list[int]:
    return SampleOrder(96, 0).ids(np.array(positions)).tolist()


@ranks(2)
def test_two_ranks_take_the_undisturbed_order_without_the_span(rank: int, tmp_path: Path) -> None:
    """A span within an epoch, one across its end: epochs begin at the positions at which they always do."""
    words = (*WORDS, *layout(1, 2), "data.skip=[[20, 31], [90, 101]]")
    train_tiny(tmp_path, pool_ranks(), *words)
    if rank == 0:
        kept = [p for p in range(120) if not (20 <= p < 31 or 90 <= p < 101)][:80]
        assert flat(used_by_step(tmp_path, 2)) == order_of(kept)
        told = [(event["step"], event["samples"]) for event in read_named(tmp_path, "data_skipped")]
        assert told == [(3, 11), (10, 11)]


def test_a_run_that_goes_on_elsewhere_in_a_span_keeps_its_bits(tmp_path: Path, quiet_threads: None) -> None:
    words = (*WORDS, "data.skip=[[14, 30]]", "model.dropout=0.2", "optim.schedule=constant", "optim.warmup=0 steps")
    train_tiny(tmp_path / "through", lone_rank(), *words)
    for steps in (1, 3, 10):
        train_tiny(tmp_path / "cut", lone_rank(), *words, f"train.steps={steps}", "checkpoint.every=100 steps")
    assert read_column(tmp_path / "cut") == read_column(tmp_path / "through")
    assert used_by_step(tmp_path / "cut") == used_by_step(tmp_path / "through")
    manifest = json.loads((RunDir(tmp_path / "cut").checkpoint_path(3) / "manifest.json").read_text())
    assert (manifest["numbers"]["samples"], manifest["numbers"]["position"]) == (24, 40)


def test_a_span_that_is_added_later_jumps_over_what_lies_ahead(tmp_path: Path, quiet_threads: None) -> None:
    words = (*WORDS, "checkpoint.every=4 steps", "optim.schedule=constant")
    train_tiny(tmp_path, lone_rank(), *words, "train.steps=4")
    train_tiny(tmp_path, lone_rank(), *words, "data.skip=[[8, 16], [40, 56]]")
    kept = [p for p in range(120) if not 40 <= p < 56][:80]
    assert flat(used_by_step(tmp_path)) == order_of(kept)
    started = read_named(tmp_path, "started")
    assert started[1]["changed"] == {"data.skip": [[], [[8, 16], [40, 56]]], "train.steps": ["4 steps", "10 steps"]}
    (late,) = read_named(tmp_path, "skip_too_late")
    assert late["spans"] == [[8, 16]]
    assert late["reason"].startswith("data.skip: [8, 16] begins before position 32, where the run goes on")
    train_tiny(tmp_path, lone_rank(), *words, "train.steps=12")
    assert flat(used_by_step(tmp_path)) == order_of([*kept, *range(96, 112)])
    assert len(read_named(tmp_path, "skip_too_late")) == 1


def test_a_checkpoint_from_before_goes_on_at_its_samples(tmp_path: Path, quiet_threads: None) -> None:
    numbers = {"step": 3, "samples": 24, "targets": 288}
    assert read_counters(numbers) == Counters(3, 24, 288, position=24)
    later = Counters(3, 24, 288, 24).after(8, 96.0, 47)
    assert later == Counters(4, 32, 384, 47)
    assert read_counters(later.as_numbers()) == later
