"""A signal is remembered, Ctrl-C after it ends the process, and handlers are put back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from shardway.ranks.stop import STOP_SIGNALS, SignalWatch


@pytest.fixture(autouse=True)
def no_nohup() -> Iterator[None]:
    """As where nothing is ignored: pytest itself may be under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_remembered(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with SignalWatch() as watch:
        assert watch.received is None
        os.kill(os.getpid(), number)
        assert watch.received == number.name
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


@pytest.mark.parametrize("first", STOP_SIGNALS)
def test_ctrl_c_after_it_ends_at_once(first: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with pytest.raises(KeyboardInterrupt, match="a second Ctrl-C"), SignalWatch() as watch:
        os.kill(os.getpid(), first)
        assert watch.received == first.name
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


@pytest.mark.parametrize("first", STOP_SIGNALS)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR2])
def test_what_schedulers_repeat_means_the_same(first: signal.Signals, second: signal.Signals) -> None:
    with SignalWatch() as watch:
        for number in (first, second, second):
            os.kill(os.getpid(), number)
        assert watch.received in (first.name, second.name)


def test_a_run_in_another_thread_goes_without() -> None:
    """Python lets the main thread alone set handlers."""
    seen: list[str | None] = []

    def enter() -> None:
        with SignalWatch() as watch:
            seen.append(watch.received)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]


def test_a_watch_can_be_entered_within_another() -> None:
    with SignalWatch() as outer:
        with SignalWatch() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (inner.received, outer.received) == ("SIGTERM", None)
        os.kill(os.getpid(), signal.SIGINT)
        assert outer.received == "SIGINT"
