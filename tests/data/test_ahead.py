"""A thread reads ahead: the same batches, errors in their place, and no thread is left."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from shardway.data.ahead import read_ahead
from shardway.data.loader import LoaderOptions, Share, StepLoader
from shardway.data.open import open_data
from shardway.data.order import SampleOrder
from shardway.data.sources.base import Arrays, Ids, SourceFacts
from shardway.runfile.schema import DataSection

CPU = torch.device("cpu")


def list_readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardway-reads-ahead"]


class Counted:
    """Numbers that are counted when they are read."""

    def __init__(self, fails_at: int | None = None, ends_at: int = 1000) -> None:
        self.read, self.closed, self.threads = 0, False, set[str]()
        self._fails_at, self._ends_at = fails_at, ends_at

    def numbers(self) -> Iterator[int]:
        try:
            for number in range(self._ends_at):
                self.threads.add(threading.current_thread().name)
                if number == self._fails_at:
                    raise LookupError(f"number {number} is bad")
                self.read += 1
                yield number
        finally:
            self.closed = True


def wait_for(numbers: Counted, read: int) -> None:
    deadline = time.monotonic() + 10
    while numbers.read < read and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_is_read_than_was_asked_for(ahead: int) -> None:
    numbers = Counted()
    stream = read_ahead(numbers.numbers(), ahead, CPU)
    assert (numbers.read, list_readers()) == (0, [])
    for number in range(20):
        assert next(stream) == number
        wait_for(numbers, number + 1 + ahead)
        time.sleep(0.002)
        assert numbers.read == number + 1 + ahead
    assert numbers.threads == {"shardway-reads-ahead"}
    stream.close()  # type: ignore[attr-defined]
    assert (numbers.closed, list_readers()) == (True, [])


def test_it_ends_where_the_batches_end() -> None:
    numbers = Counted(ends_at=7)
    assert list(read_ahead(numbers.numbers(), 2, CPU)) == list(range(7))
    assert (numbers.closed, list_readers()) == (True, [])


def test_an_error_comes_at_its_batch() -> None:
    numbers = Counted(fails_at=5)
    stream = read_ahead(numbers.numbers(), 3, CPU)
    assert list(itertools.islice(stream, 5)) == list(range(5))
    with pytest.raises(LookupError, match="number 5 is bad"):
        next(stream)
    assert (numbers.closed, list_readers()) == (True, [])


def test_a_read_that_hangs_does_not_keep_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardway.data.ahead._JOIN_S", 0.05)
    lets_go = threading.Event()

    def numbers() -> Iterator[int]:
        yield 0
        lets_go.wait(10)
        yield 1

    stream = read_ahead(numbers(), 2, CPU)
    assert next(stream) == 0
    began = time.monotonic()
    stream.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 2
    lets_go.set()
    for thread in list_readers():
        thread.join(10)
    assert list_readers() == []


def test_a_loader_reads_the_same_ahead() -> None:
    section = DataSection(kind="synthetic", samples=40, seq_len=4, validation_fraction=0.0)
    source, order = open_data(section, 0, "tokens", vocab=17).train, SampleOrder(40, 1)

    def read(options: LoaderOptions, position: int) -> list[tuple[int, list[int], list[list[int]]]]:
        stream = StepLoader(source, order, Share(6, 1, 2), options).batches(position)
        found = [
            (batch.position, batch.ids.tolist(), batch.data["inputs"].tolist()) for batch in itertools.islice(stream, 9)
        ]
        stream.close()  # type: ignore[attr-defined]
        return found

    plain, ahead = LoaderOptions(), LoaderOptions(ahead=CPU)
    assert read(ahead, 12) == read(plain, 12)
    assert read(ahead, 12)[4:] == read(plain, 36)[:5]
    assert list_readers() == []


class Drawing:
    """A source that draws, whose random numbers belong to the thread that trains."""

    facts = SourceFacts("drawing", "", (1,), classes=2)
    tokens_per_sample = 1
    draws = True

    def __len__(self) -> int:
        return 40

    def batch(self, ids: Ids) -> Arrays:
        raise NotImplementedError

    def batch_of(self, ids: Ids, epochs: Ids) -> Arrays:
        assert threading.current_thread() is threading.main_thread()
        return {"inputs": ids, "targets": epochs}


def test_a_source_that_draws_is_read_by_the_rank() -> None:
    stream = StepLoader(Drawing(), SampleOrder(40, 1), Share(6), LoaderOptions(ahead=CPU)).batches(0)
    assert [batch.position for batch in itertools.islice(stream, 9)] == list(range(0, 54, 6))
