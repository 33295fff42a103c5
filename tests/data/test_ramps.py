"""Batches that grow: the samples of each step are those of a walk that knows nothing but the position, on any number of
ranks, over stops and skipped spans; and every number that is computed at once is that of the walk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from shardway.batch_ramp import BatchRamp
from shardway.data.loader import Batch, LoaderOptions, Share, StepLoader, StreamLoader
from shardway.data.order import BlendOrder, SampleOrder, Skips
from shardway.runfile.schema import RunFile, read_skips
from shardway.units import Scale, Span

WORLDS = (1, 2, 3, 5, 8)
RAMPS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 13)), min_size=1, max_size=4).map(
    lambda gaps: [[sum(gap for gap, _ in gaps[:number]), size] for number, (_, size) in enumerate(gaps)]
)
SPANS = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 25)), max_size=4).map(
    lambda pairs: read_skips([[start, start + length] for start, length in pairs])
)
LEGS = st.lists(st.tuples(st.integers(1, 7), st.sampled_from(WORLDS)), min_size=1, max_size=4)


def size_of(ramp: Sequence[Sequence[int]], position: int) -> int:
    return [size for start, size in ramp if start <= position][-1]


def walk(ramp: Sequence[Sequence[int]], spans: Sequence[Sequence[int]], start: int = 0) -> Iterator[list[int]]:
    """The positions of each step, one by one: the rule as the page states it."""
    kept = (p for p in itertools.count(start) if not any(first <= p < end for first, end in spans))
    while True:
        first = next(kept)
        yield [first, *itertools.islice(kept, size_of(ramp, first) - 1)]


@dataclass
class Numbers(IterableDataset[Any]):
    """Gives its numbers in order."""

    count: int

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(number) for number in range(self.count))


def check_steps(batches: Sequence[Batch], expected: Sequence[int]) -> None:
    """What the ranks have of one step, without its ids."""
    assert {batch.position for batch in batches} == {expected[0]}
    assert {batch.next_position for batch in batches} == {expected[-1] + 1}
    assert {batch.samples for batch in batches} == {len(expected)}


# --- steps on any number of ranks, over stops


@settings(max_examples=60)
@given(ramp=RAMPS, spans=SPANS, legs=LEGS)
@example(ramp=[[0, 3], [6, 5], [7, 2]], spans=[[5, 9]], legs=[(1, 8), (2, 3), (1, 5)])
def test_a_stop_changes_nothing(ramp: list[list[int]], spans: list[list[int]], legs: list[tuple[int, int]]) -> None:
    order, source = SampleOrder(29, seed=5), TensorDataset(torch.arange(29))
    expected, position, found = walk(ramp, spans), 0, []
    for steps, world in [*legs, (40, 1)]:
        shares = [Share(BatchRamp.of(ramp), rank, world) for rank in range(world)]
        streams = [StepLoader(source, order, share).batches(position, skips=Skips(spans)) for share in shares]
        for _ in range(steps):
            batches = [next(stream) for stream in streams]
            positions = next(expected)
            check_steps(batches, positions)
            ids = np.concatenate([batch.ids for batch in batches])
            assert ids.tolist() == order.ids(np.array(positions)).tolist()
            assert [len(batch.ids) for batch in batches] == [
                len(positions) * (rank + 1) // world - len(positions) * rank // world for rank in range(world)
            ]
            position = batches[0].next_position
            found += ids.tolist()
    if not spans:
        for epoch in range(len(found) // 29):
            assert sorted(found[29 * epoch : 29 * (epoch + 1)]) == list(range(29))


@settings(max_examples=30)
@given(before=RAMPS, after=RAMPS, steps=st.integers(0, 20), spans=SPANS)
def test_a_ramp_may_change_ahead_of_the_position(
    before: list[list[int]], after: list[list[int]], steps: int, spans: list[list[int]]
) -> None:
    """The next samples come, in steps of the sizes that the new ramp has there."""
    source, order, position, found = TensorDataset(torch.arange(31)), SampleOrder(31, seed=2), 0, []
    for ramp, count in ((before, steps), (after, 9)):
        expected = walk(ramp, spans, position)
        share = Share(BatchRamp.of(ramp))
        for batch in StepLoader(source, order, share).batches(position, count, Skips(spans)):
            check_steps([batch], next(expected))
            position = batch.next_position
            found += batch.ids.tolist()
    kept = list(itertools.islice(walk([[0, 1]], spans), len(found)))
    assert found == order.ids(np.array(kept).ravel()).tolist()


@settings(max_examples=20)
@given(ramp=RAMPS, spans=SPANS, legs=LEGS)
def test_a_dataset_in_sequence_follows_the_ramp(
    ramp: list[list[int]], spans: list[list[int]], legs: list[tuple[int, int]]
) -> None:
    ramp = [[start, size + max(WORLDS)] for start, size in ramp]  # no rank without a sample
    expected, position = walk(ramp, spans), 0
    for steps, world in legs:
        shares = [Share(BatchRamp.of(ramp), rank, world) for rank in range(world)]
        streams = [StreamLoader(Numbers(40), 0, share).batches(position, Skips(spans)) for share in shares]
        for _ in range(steps):
            batches = [next(stream) for stream in streams]
            positions = next(expected)
            check_steps(batches, positions)
            values = [int(value) for batch in batches for value in batch.data]
            assert values == [each % 40 for each in positions]
            position = batches[0].next_position


@settings(max_examples=30)
@given(ramp=RAMPS, world=st.sampled_from(WORLDS), stop=st.integers(0, 12))
def test_samples_of_a_ranks_own_come_once(ramp: list[list[int]], world: int, stop: int) -> None:
    """Of a dataset that gives each rank other samples, also after a resume."""
    share, found, position = Share(BatchRamp.of(ramp), world - 1, world), [], 0
    for steps in (stop, 12):
        stream = StreamLoader(Numbers(10**6), 0, share, own_share=True).batches(position)
        for batch in itertools.islice(stream, steps):
            found += batch.ids.tolist()
            position = batch.next_position
    assert found == list(range(len(found)))


def test_a_blend_changes_its_weights_within_a_step() -> None:
    """Position by position, whatever the sizes of the steps."""
    order = BlendOrder((7, 9), (((0, 1), (10, 3)), ((0, 2),)), seed=4)
    loader = StepLoader(TensorDataset(torch.arange(16)), order, Share(BatchRamp.of([[0, 4], [8, 7]])))
    found = np.concatenate([batch.ids for batch in loader.batches(0, 6)])
    assert found.tolist() == order.ids(np.arange(8 + 4 * 7)).tolist()


def test_loader_processes_change_nothing(warm_starts: None) -> None:
    loaders = [
        StepLoader(
            TensorDataset(torch.arange(29)),
            SampleOrder(29, seed=5),
            Share(BatchRamp.of([[0, 3], [6, 5]]), 1, 2),
            LoaderOptions(workers=workers),
        )
        for workers in (0, 1)
    ]
    for here, there in zip(*(loader.batches(0, 5) for loader in loaders), strict=True):
        assert (here.ids.tolist(), here.samples) == (there.ids.tolist(), there.samples)


# --- counted at once


@given(ramp=RAMPS, end=st.integers(0, 200), start=st.integers(0, 90), steps=st.integers(0, 60))
def test_what_is_counted_at_once_is_what_a_walk_counts(ramp: list[list[int]], end: int, start: int, steps: int) -> None:
    found, firsts = BatchRamp.of(ramp), [start]
    while len(firsts) <= steps or firsts[-1] < end:
        firsts.append(firsts[-1] + size_of(ramp, firsts[-1]))
    assert found.count_steps(end, start) == next(number for number, first in enumerate(firsts) if first >= end)
    assert found.find_start(steps, start) == firsts[steps]
    assert [found.size_at(first) for first in firsts] == [size_of(ramp, first) for first in firsts]
    runs = itertools.chain.from_iterable(
        itertools.repeat(size, steps + 200 if count is None else count) for _, size, count in found.runs(start)
    )
    assert list(itertools.islice(runs, len(firsts) - 1)) == np.diff(firsts).tolist()


def test_a_long_run_is_counted_without_a_walk() -> None:
    ramp = BatchRamp.of([[0, 32], [10**15, 64]])
    assert ramp.count_steps(10**18) == 10**15 // 32 + (10**18 - 10**15) // 64
    assert ramp.find_start(10**17) == 10**15 + (10**17 - 10**15 // 32) * 64
    assert (ramp.smallest, ramp.largest, ramp.last, ramp.sizes) == (32, 64, 64, (32, 64))


@pytest.mark.parametrize(
    ("written", "pairs"),
    [(5, ((0, 5),)), ([[0, 5], [9, 5], [20, 6]], ((0, 5), (20, 6))), ([[0, 5], [0, 6], [4, 5]], ((0, 6), (4, 5)))],
)
def test_a_size_that_stays_is_no_change(written: Any, pairs: tuple[tuple[int, int], ...]) -> None:
    assert BatchRamp.of(written).pairs == pairs
    assert BatchRamp.of(BatchRamp.of(written)).pairs == pairs


@pytest.mark.parametrize(
    ("span", "from_the_beginning", "anywhere"),
    [
        ("7 steps", 7, 7),
        ("64 samples", 2, 1),
        ("100 samples", 4, 2),  # 32 + 32 + 32 + the fourth, which begins at 96
        ("164 samples", 5, 3),
        ("1312 tokens", 5, 3),
        ("2 epochs", 5, 4),
    ],
)
def test_lengths_follow_the_ramp_and_intervals_its_end(span: str, from_the_beginning: int, anywhere: int) -> None:
    scale, (amount, unit) = Scale(BatchRamp.of([[0, 32], [90, 64]]), 8, 105), span.split()
    found = Span(float(amount), unit)  # type: ignore[arg-type]
    assert (found.in_steps(scale), found.in_last_steps(scale)) == (from_the_beginning, anywhere)


# --- in a run file


def test_a_ramp_is_read_as_it_is_written() -> None:
    values = RunFile.model_validate({"train": {"global_batch": [[0, 8], [100, 16]]}})
    assert values.train.batch.pairs == ((0, 8), (100, 16))
    assert values.model_dump(mode="json")["train"]["global_batch"] == [[0, 8], [100, 16]]
    assert RunFile().train.batch == BatchRamp.of(16)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (0, "0 is too small; allowed: an integer of at least 1, or pairs"),
        (True, "true is neither an integer nor a list of pairs"),
        ("many", '"many" is neither an integer nor a list of pairs'),
        ([], "size does not begin at position 0"),
        ([[5, 3]], "size does not begin at position 0"),
        ([[0, 4], [3]], r"size \[3\] is no pair"),
        (
            [[0, 4], [9, 0], [9, 1.5]],
            r"size \[9, 0\] is to no number of samples .*; size \[9, 1.5\] does not come after",
        ),
        ([[0, 4], [-1, 2]], r"size \[-1, 2\] is from no position"),
    ],
)
def test_all_that_is_wrong_with_a_ramp_is_said(written: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RunFile.model_validate({"train": {"global_batch": written}})
