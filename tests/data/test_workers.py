from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from shardway.data.workers import ended_workers, isolation
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


RANK = """
import multiprocessing, os, sys, time
from shardway.data.workers import isolation

def work(begin):
    begin(0)
    print(os.getpid(), flush=True)
    time.sleep(300)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=work, args=(isolation(),)).start()
    time.sleep(300)
"""


@pytest.mark.slow
def test_a_worker_that_is_stopped_goes_with_its_rank_all_the_same() -> None:
    """It cannot see that the rank is gone."""
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        worker = psutil.Process(int(rank.stdout.readline()))
        try:
            worker.send_signal(signal.SIGSTOP)
            rank.kill()
            worker.wait(timeout=60)
        finally:
            rank.kill()
            if psutil.pid_exists(worker.pid):
                os.kill(worker.pid, signal.SIGKILL)


def test_a_worker_outlives_a_thread_that_has_started_it() -> None:
    told: list[object] = []
    thread = threading.Thread(target=lambda: told.append(isolation().keywords))  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert told == [{"by_main": False}]
    assert isolation().keywords == {"by_main": True}  # type: ignore[attr-defined]
