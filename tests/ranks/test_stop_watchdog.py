"""What a second thread does about a stop while the main thread cannot."""

from __future__ import annotations

import ctypes
import operator
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from shardway.ranks import stop
from shardway.ranks.stop import (
    LEAVE_S,
    NOTICE_S,
    BrokenOff,
    SignalWatch,
    StopTimes,
    StopWatchdog,
    find_stop_signal,
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "TICK_S", 0.01)
    monkeypatch.setattr(stop, "NOTICE_S", 0.05)
    monkeypatch.setattr(stop, "LEAVE_S", 0.05)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


# --- when what is due


def test_nothing_is_due_where_nobody_asked() -> None:
    assert StopTimes().find_due(1e9, 1.0, noticed=False) == []


def test_a_stop_is_late_once() -> None:
    times = StopTimes(asked=100.0)
    assert times.find_due(159.9, 60.0, noticed=True) == []
    assert times.find_due(160.0, 60.0, noticed=True) == ["late"]
    assert times.find_due(170.0, 60.0, noticed=True) == []


def test_the_clock_runs_from_the_first_wish() -> None:
    times = StopTimes(asked=100.0)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
        times.record(number, 150.0)
    assert (times.asked, times.signalled, times.killed) == (100.0, 150.0, None)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_leaves_the_main_thread_a_moment(first: signal.Signals) -> None:
    times = StopTimes()
    times.record(first, 10.0)
    assert times.killed is None
    times.record(signal.SIGINT, 11.0)
    assert times.find_due(11.0 + LEAVE_S - 0.1, 60.0, noticed=True) == []
    assert times.find_due(11.0 + LEAVE_S, 60.0, noticed=True) == ["killed"]


def test_a_signal_that_the_main_thread_does_not_hear_is_passed_on() -> None:
    times = StopTimes()
    times.record(signal.SIGTERM, 10.0)
    assert times.find_due(10.0 + NOTICE_S, 60.0, noticed=True) == []
    assert times.find_due(10.0 + NOTICE_S, 60.0, noticed=False) == ["unnoticed"]


# --- the thread


class Called:
    """A watchdog that records what it called."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.acts: list[str] = []
        add = self.acts.append
        self.of = partial(
            StopWatchdog,
            timeout_s=timeout_s,
            on_late=lambda: add("late"),
            on_killed=lambda: add("killed"),
            on_unnoticed=lambda: add("unnoticed"),
        )

    def wait(self) -> list[str]:
        until = time.monotonic() + 60
        while not self.acts and time.monotonic() < until:
            time.sleep(0.01)
        return self.acts


@pytest.fixture
def watch() -> Iterator[SignalWatch]:
    with SignalWatch() as entered:
        yield entered


def test_a_stop_that_takes_too_long(quick: None, watch: SignalWatch) -> None:
    called = Called(timeout_s=0.05)
    with called.of(watch):
        time.sleep(0.1)
        assert called.acts == []
        send(signal.SIGTERM)
        assert called.wait() == ["late"]


def test_a_stop_that_was_agreed_counts_as_well(quick: None, watch: SignalWatch) -> None:
    called = Called(timeout_s=0.05)
    with called.of(watch) as out:
        out.ask()
        assert called.wait() == ["late"]


def test_a_second_ctrl_c_that_somebody_caught(quick: None, watch: SignalWatch) -> None:
    called = Called()
    with called.of(watch):
        send(signal.SIGTERM)
        time.sleep(0.05)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert called.wait() == ["killed"]


class Library:
    """Holds a thread, without Python's lock and deaf to signals, until another one calls it too."""

    def __init__(self) -> None:
        self._c, self._barrier = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        self._c.pthread_barrier_init(self._barrier, None, 2)
        self.meet = partial(self._c.pthread_barrier_wait, self._barrier)
        self.terminate = partial(self._c.kill, os.getpid(), int(signal.SIGTERM))


def test_a_signal_that_comes_while_the_main_thread_is_in_a_library(quick: None, watch: SignalWatch) -> None:
    library, acts = Library(), list[str]()

    def tell() -> None:
        acts.append("unnoticed")
        library.meet()

    guard = threading.Timer(60.0, library.meet)  # should nobody tell
    guard.start()
    with StopWatchdog(watch, on_unnoticed=tell):
        list(map(operator.call, (library.terminate, library.meet)))  # no line of Python in between: none hears of it
        guard.cancel()
        assert acts == ["unnoticed"]
    guard.join()
    assert watch.received == "SIGTERM"


def test_a_wait_is_broken_off_once_a_stop_is_asked_for(quick: None, watch: SignalWatch) -> None:
    asked = threading.Event()
    with StopWatchdog(watch) as out:
        started = time.monotonic()
        out.begin_wait(asked.is_set)
        with pytest.raises(BrokenOff):
            watch.breakable = True
            threading.Timer(0.1, asked.set).start()
            time.sleep(60)
        out.end_wait()
        assert time.monotonic() - started < 50
        assert watch.received is None, "the thread's own signal is no wish of anybody's"


def test_a_wait_that_must_not_end_goes_on(quick: None, watch: SignalWatch) -> None:
    with StopWatchdog(watch) as out:
        out.begin_wait(lambda: True)
        time.sleep(0.3)
        out.end_wait()
    assert watch.received is None


def test_in_another_thread_it_does_nothing() -> None:
    def enter() -> None:
        with SignalWatch() as watch, StopWatchdog(watch, 0.0) as out:
            out.ask()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_watch_knows_what_the_one_around_it_has_received() -> None:
    assert find_stop_signal() is None
    with SignalWatch():
        send(signal.SIGUSR2)
        assert find_stop_signal() == "SIGUSR2"
        with SignalWatch() as inner:
            assert inner.received == "SIGUSR2"
    assert find_stop_signal() is None
