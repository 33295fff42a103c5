from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardway.data.workers import ended_workers
from shardway.errors import JobError


class Answers:
    """An iterator of a DataLoader whose workers abort while they are shut down."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __next__(self) -> int:
        raise StopIteration

    def _shutdown_workers(self) -> None:
        raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Aborted.")


def test_a_worker_that_aborts_at_the_end_does_not_hide_the_error_of_the_dataset() -> None:
    with pytest.raises(LookupError, match="sample 11 is bad"), ended_workers(Answers()):
        raise LookupError("sample 11 is bad")


def test_a_worker_that_aborts_after_the_last_batch_is_no_error() -> None:
    with ended_workers(Answers()) as answers:
        assert list(answers) == []


def test_a_worker_that_dies_while_it_is_needed_is_told() -> None:
    with pytest.raises(JobError, match="a loader process died"), ended_workers(Answers()):
        raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed.")
