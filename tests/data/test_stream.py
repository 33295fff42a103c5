"""Iterable datasets: each sample once over all ranks, the same after a resume, with a worker or without."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from shardway.data.loader import (
    HeldOutStream,
    LoaderOptions,
    Share,
    StreamLoader,
    count_samples,
    digest_first,
    validation_stream,
)
from shardway.data.order import Skips
from shardway.errors import UserError


class Numbers(IterableDataset[Any]):
    """0 to 9, each with what it draws."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(10):
            yield number, random.random(), float(np.random.random()), float(torch.rand(()))


class Shuffled(Numbers):
    """In another order each epoch, as the seed and the epoch say."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples = list(super().__iter__())
        random.shuffle(samples)
        return iter(samples)


def read(dataset: Any, world: int, position: int, steps: int, size: int = 4, **options: Any) -> list[list[Any]]:
    """What all ranks get in each step, in their order."""
    streams = [StreamLoader(dataset, 1, Share(size, rank, world), **options).batches(position) for rank in range(world)]
    return [
        [tuple(part[row].item() for part in batch.data) for batch in step for row in range(len(batch.data[0]))]
        for step in itertools.islice(zip(*streams, strict=True), steps)
    ]


@pytest.mark.parametrize("dataset", [Numbers(), Shuffled()])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stream_is_the_same_on_any_world_and_from_any_position(dataset: Any, world: int) -> None:
    through = read(dataset, 1, 0, 6)
    assert sorted(sample[0] for step in through[:5] for sample in step) == sorted([*range(10)] * 2)
    assert read(dataset, world, 0, 6) == through
    assert read(dataset, world, 12, 3) == through[3:]


def test_a_stream_leaves_the_random_numbers_of_the_run_alone() -> None:
    stream = StreamLoader(Numbers(), 1, Share(4)).batches(0)
    first = next(stream)
    state = torch.get_rng_state(), random.getstate()
    torch.rand(2), random.random()
    second = next(stream)
    assert [first.data[0].tolist(), second.data[0].tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [part.tolist() for part in second.data] == [
        list(part) for part in zip(*read(Numbers(), 1, 4, 1)[0], strict=True)
    ]
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    next(stream)
    assert torch.equal(torch.get_rng_state(), state[0])


def test_positions_of_a_stream_are_skipped() -> None:
    batches = list(itertools.islice(StreamLoader(Numbers(), 1, Share(3)).batches(0, Skips([(2, 6)])), 2))
    assert [batch.data[0].tolist() for batch in batches] == [[0, 1, 6], [7, 8, 9]]
    assert [(batch.position, batch.next_position) for batch in batches] == [(0, 7), (7, 10)]


def test_a_worker_reads_a_stream_alike() -> None:
    options = LoaderOptions(workers=2, prefetch=2)
    stream = StreamLoader(Numbers(), 1, Share(4, 1, 2), options).batches(8)
    found = [[part.tolist() for part in batch.data] for batch in itertools.islice(stream, 2)]
    stream.close()  # type: ignore[attr-defined]
    alone = StreamLoader(Numbers(), 1, Share(4, 1, 2)).batches(8)
    assert found == [[part.tolist() for part in batch.data] for batch in itertools.islice(alone, 2)]


def test_a_stream_of_a_rank_of_its_own_is_taken_whole() -> None:
    loader = StreamLoader(Numbers(), 1, Share(4, 1, 2), own_share=True)
    assert [b.data[0].tolist() for b in itertools.islice(loader.batches(0), 2)] == [[0, 1], [2, 3]]
    assert [b.data[0].tolist() for b in itertools.islice(loader.batches(8), 2)] == [[4, 5], [6, 7]]


def test_a_stream_that_cannot_begin_again_is_told() -> None:
    stream = StreamLoader((number for number in range(6)), 1, Share(4)).batches(0)
    assert next(stream).data.tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError) as failure:
        next(stream)
    assert str(failure.value) == (
        "generator ended after 6 samples and gives none when it is begun again, and the run needs more.\n"
        "  To do: let its __iter__ begin anew each time it is called (a class, not a generator), or ask for fewer "
        "steps."
    )
    with pytest.raises(UserError, match="list_iterator gives no samples"):
        next(StreamLoader(iter([]), 1, Share(4)).batches(0))


class Sized(Numbers):
    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("most", "count"), [(None, 10), (7, 7), (99, 10)])
def test_validation_takes_each_sample_of_a_stream_once(world: int, most: int | None, count: int) -> None:
    held_out = HeldOutStream(Numbers())
    found = count_samples(held_out, most)
    streams = [list(validation_stream(held_out, found, Share(4, rank, world))) for rank in range(world)]
    assert found == count
    assert len({len(stream) for stream in streams}) == 1
    seen = [
        int(batch.data[0][row])
        for step in zip(*streams, strict=True)
        for batch in step
        for row in range(batch.ids.size)
    ]
    assert seen == list(range(count))
    assert all(len(batch.data[0]) == max(1, batch.ids.size) for stream in streams for batch in stream)


class BeginsAnew(IterableDataset[Any]):
    """Its own iterator, which begins anew each time it is asked for."""

    def __iter__(self) -> Iterator[Any]:
        self.given = 0
        return self

    def __next__(self) -> Any:
        if self.given == 10:
            raise StopIteration
        self.given += 1
        return (self.given - 1,)


class Bare:
    """An iterator without `__iter__`, which Python's `for` takes as well."""

    def __init__(self) -> None:
        self.inner = iter(range(10))

    def __next__(self) -> Any:
        return (next(self.inner),)


class GivesBare(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return Bare()


@pytest.mark.parametrize("dataset", [BeginsAnew(), GivesBare()])
def test_validation_goes_on_with_the_iterator_that_it_has(dataset: Any) -> None:
    held_out = HeldOutStream(dataset)
    assert count_samples(held_out, 99) == 10
    batches = validation_stream(held_out, 10, Share(4))
    assert [batch.data[0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_length_that_is_not_what_comes_is_told() -> None:
    with pytest.raises(UserError, match="Sized was to give 12 samples for validation and ended after 10"):
        list(validation_stream(Sized(), count_samples(Sized(), None), Share(4)))


class OfRank(IterableDataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.rand(3) + self.rank)


def test_the_first_sample_tells_whether_ranks_get_their_own() -> None:
    assert digest_first(OfRank(0), 1) == digest_first(OfRank(0), 1) != digest_first(OfRank(1), 1)
    generator = (number for number in range(3))
    assert digest_first(generator, 1) == ""
    assert list(generator) == [0, 1, 2]
