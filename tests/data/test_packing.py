from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.data.packing import WINDOW, Bins, fit, pack_documents


def web_like(documents: int, seed: int = 0) -> np.ndarray:
    """Ends of documents whose lengths are log-normal with a mean of about 1000 tokens, as those of web pages."""
    lengths = np.maximum(2, np.random.default_rng(seed).lognormal(6.2, 1.2, documents).astype(np.int64))
    return np.cumsum(lengths)


def pairs_of(ends: np.ndarray) -> np.ndarray:
    return np.maximum(0, np.diff(ends, prepend=0) - 1)


def rooms_of(bins: Bins) -> np.ndarray:
    """The pairs in each bin."""
    return np.add.reduceat(bins.pairs, bins.firsts[:-1]) if len(bins) else np.zeros(0, np.int64)


@pytest.mark.parametrize("room", [2048, 8192])
def test_web_like_documents_fill_bins_and_are_cut_only_where_they_must(room: int) -> None:
    ends = web_like(30_000)
    bins = pack_documents(ends, room)
    assert bins.fill(room) >= 0.999
    assert rooms_of(bins).max() <= room
    assert bins.cuts == (-(-pairs_of(ends) // room) - 1).clip(0).sum()
    assert bins.cuts > 100
    # A window is packed by itself: its bins are those of its documents alone.
    first, rest = pack_documents(ends[:WINDOW], room), pack_documents(ends[WINDOW:] - ends[WINDOW - 1], room)
    assert np.array_equal(bins.starts, np.concatenate((first.starts, rest.starts + ends[WINDOW - 1])))
    assert len(bins) == len(first) + len(rest)


def test_a_hundred_thousand_documents_take_a_fraction_of_a_second() -> None:
    ends, started = web_like(100_000), time.process_time()
    pack_documents(ends, 4096)
    assert time.process_time() - started < 1.0, "0.06 s on the machine that it was written on"


@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    room=st.integers(1, 20),
    window=st.integers(1, 25),
)
def test_every_pair_is_in_one_bin(lengths: list[int], room: int, window: int) -> None:
    ends = np.cumsum(np.array(lengths, np.int64))
    bins = pack_documents(ends, room, window)
    assert bins.firsts[0] == 0
    assert bins.firsts[-1] == len(bins.starts) == len(bins.pairs)
    assert (np.diff(bins.firsts) > 0).all(), "no bin is empty"
    pieces = zip(bins.starts, bins.pairs, strict=True)
    inputs = np.concatenate([np.zeros(0, int), *(start + np.arange(count) for start, count in pieces)])
    expected = [start + i for end, n in zip(ends, lengths, strict=True) for start in [end - n] for i in range(n - 1)]
    assert sorted(inputs.tolist()) == expected, "each token but the last of a document is an input once"
    assert (rooms_of(bins) <= room).all()
    assert bins.cuts == sum(max(0, -(-(n - 1) // room) - 1) for n in lengths)
    for start, stop in zip(bins.firsts, bins.firsts[1:], strict=False):
        assert (np.diff(bins.starts[start:stop]) > 0).all(), "in the order of the store"


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=80), spare=st.integers(0, 10))
def test_bins_are_those_of_best_fit_decreasing(sizes: list[int], spare: int) -> None:
    room = max(sizes) + spare
    found = fit(np.array(sizes), room)
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number, left in enumerate(rooms) if left >= size]
        if not fitting:
            rooms.append(room)
        best = min(fitting, key=lambda number: rooms[number], default=len(rooms) - 1)
        rooms[best] -= size
    held = np.bincount(found, weights=sizes)
    assert sorted((room - held).tolist()) == sorted(rooms)


def test_bins_are_the_same_forever() -> None:
    """A new version of the packing would change what a run goes on with."""
    ends = np.cumsum([5, 1, 9, 3, 0, 4, 12, 2, 7])
    bins = pack_documents(ends, 8, window=6)
    pieces = list(zip(bins.starts.tolist(), bins.pairs.tolist(), strict=True))
    found = [pieces[first:stop] for first, stop in zip(bins.firsts, bins.firsts[1:], strict=False)]
    assert found == [[(15, 2)], [(6, 8)], [(0, 4), (18, 3)], [(30, 3)], [(22, 8)], [(34, 1), (36, 6)]]
    assert bins.cuts == 1


def test_the_last_bins_are_like_the_others() -> None:
    """Those may be held out: long documents are not all in the first bins of a window, as best-fit has it."""
    ends = web_like(WINDOW)
    bins = pack_documents(ends, 4096)
    documents = np.diff(bins.firsts)
    half = len(bins) // 2
    assert documents[:half].mean() == pytest.approx(documents[half:].mean(), rel=0.1)


@pytest.mark.parametrize("lengths", [[], [0], [1, 1, 0, 1]])
def test_documents_without_a_pair_give_no_bin(lengths: list[int]) -> None:
    bins = pack_documents(np.cumsum(np.array(lengths, np.int64)), 8)
    assert len(bins) == 0
    assert bins.fill(8) == 0.0
