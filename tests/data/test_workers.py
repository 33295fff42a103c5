from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

import psutil
import pytest

from shardway.data.workers import ended_workers, isolation
from shardway.errors import JobError

pytestmark = pytest.mark.usefixtures("warm_starts")


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


@dataclass
class Sending:
    """An iterator of a DataLoader whose connection to its worker breaks while the worker may be about to die."""

    error: Exception
    seconds: float = 300.0
    """Until the worker ends, with exit code 9."""
    _workers: list[BaseProcess] = field(init=False)

    def __post_init__(self) -> None:
        self._workers = [multiprocessing.get_context("fork").Process(target=_sleep_and_exit, args=(self.seconds,))]
        self._workers[0].start()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        raise self.error


def _sleep_and_exit(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(9)


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_that_dies_while_it_sends_is_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are closed a moment before the kernel calls it dead, and no signal has come then."""
    monkeypatch.setattr("shardway.data.workers._DYING_S", 120.0)  # a busy machine may take long to run it
    answers = Sending(error, 0.2)
    with pytest.raises(JobError) as caught, ended_workers(answers) as awaited:
        next(awaited)
    pid = answers._workers[0].pid
    assert str(caught.value).splitlines()[0] == (
        f"a loader process died: DataLoader worker (pid {pid}) exited unexpectedly with exit code 9"
    )


def test_an_error_of_a_connection_passes_where_no_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset may read from a network."""
    monkeypatch.setattr("shardway.data.workers._DYING_S", 0.05)
    with pytest.raises(ConnectionResetError), ended_workers(Sending(ConnectionResetError())) as awaited:
        next(awaited)


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
