"""The first signal is remembered, the second ends the process, and handlers are put back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from shardway.ranks.signals import STOP_SIGNALS, SignalWatch


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_remembered(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with SignalWatch() as watch:
        assert watch.received is None
        os.kill(os.getpid(), number)
        assert watch.received == number.name
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


@pytest.mark.parametrize("first", STOP_SIGNALS)
@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_the_second_signal_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with pytest.raises(KeyboardInterrupt, match=f"a second signal, {second.name}"), SignalWatch() as watch:
        os.kill(os.getpid(), first)
        assert watch.received == first.name
        os.kill(os.getpid(), second)
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


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
