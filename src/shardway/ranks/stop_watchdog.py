"""A thread that sees to a stop while the main thread cannot: it is in a library, or waits for data.

Python runs a signal's handler in the main thread, and only once that comes back from a library. This thread reads from
a pipe what the interpreter writes there at once (`signal.set_wakeup_fd`).

Invariant: without a wish to stop nothing happens. What takes time (a file system that hangs) is done in threads of its
own, so that this one always sees the clock. This module must not touch files nor end the process: it calls who does.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from shardway.ranks.signals import BREAK, SignalWatch

TICK_S = 0.25
PATIENCE_S = 5.0
"""How long the main thread may wait for data once a stop was asked for; and how long it may take to hear a signal
before others are told of it."""
LEAVE_S = 3.0
"""How long the main thread may take to leave after a second Ctrl-C."""

Act = Callable[[], None]


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Duties:
    """What is done when: the stop took longer than `timeout_s`; a second Ctrl-C did not end the process; a signal came
    and the main thread is in a library. Each is called once, the first two in a thread that may end the process."""

    timeout_s: float = float("inf")
    on_late: Act = _nothing
    on_killed: Act = _nothing
    on_deaf: Act = _nothing


@dataclass
class Times:
    """When things happened, in monotonic seconds; None: not yet. Pure but for its own memory."""

    asked: float | None = None
    signalled: float | None = None
    killed: float | None = None
    waits: float | None = None
    done: set[str] = field(default_factory=set)

    def hear(self, number: int, now: float) -> None:
        """A stop signal came; a Ctrl-C after another one means at once."""
        if self.signalled is not None and number == signal.SIGINT and self.killed is None:
            self.killed = now
        self.asked = now if self.asked is None else self.asked
        self.signalled = now if self.signalled is None else self.signalled

    def find_due(self, now: float, timeout_s: float, *, heard: bool) -> list[str]:
        """What is to be done now, each once: "killed", "late", "deaf". `heard`: the main thread knows of the signal."""
        due = []
        if _past(self.killed, LEAVE_S, now):
            due.append("killed")
        if _past(self.asked, timeout_s, now):
            due.append("late")
        if not heard and _past(self.signalled, PATIENCE_S, now):
            due.append("deaf")
        new = [name for name in due if name not in self.done]
        self.done.update(new)
        return new


def _past(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds


class StopWatchdog:
    """While entered in the main thread, where its `signals` are watched; elsewhere it does nothing."""

    def __init__(self, signals: SignalWatch, duties: Duties) -> None:
        self._signals, self._duties = signals, duties
        self._times = Times()
        self._look: Callable[[], bool] | None = None
        self._looks = self._own = 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._pipe: tuple[int, int] = (-1, -1)
        self._before = -1

    def ask(self) -> None:
        """A stop was asked for, or is agreed: from the first call on it may take `timeout_s`."""
        if self._times.asked is None:
            self._times.asked = time.monotonic()

    def begin_wait(self, look: Callable[[], bool]) -> None:
        """The main thread waits for data; `look` (called in another thread) says whether a stop is asked for."""
        self._look = look
        self._times.waits = time.monotonic()

    def end_wait(self) -> None:
        """The data came."""
        self._times.waits = None

    def __enter__(self) -> StopWatchdog:
        if self._signals.is_listening:
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._done.set()
        signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        self._thread = None
        for descriptor in self._pipe:
            os.close(descriptor)

    def _run(self) -> None:
        acts = {"killed": self._duties.on_killed, "late": self._duties.on_late, "deaf": self._duties.on_deaf}
        while not self._done.is_set():
            for number in self._hear():
                if self._signals.holds(number) and not self._is_own(number):
                    self._times.hear(number, time.monotonic())
            now, heard = time.monotonic(), self._signals.received is not None
            for name in self._times.find_due(now, self._duties.timeout_s, heard=heard):
                threading.Thread(target=acts[name], name=name, daemon=True).start()
            self._see_to_wait(now)

    def _hear(self) -> bytes:
        ready, _, _ = select.select([self._pipe[0]], [], [], TICK_S)
        return os.read(self._pipe[0], 256) if ready else b""

    def _is_own(self, number: int) -> bool:
        """Whether this is what broke off a wait, and not a wish of somebody's."""
        if number != BREAK or not self._own:
            return False
        self._own -= 1
        return True

    def _see_to_wait(self, now: float) -> None:
        waits = self._times.waits
        if waits is None or now - waits < PATIENCE_S or self._looks:
            return
        self._looks = 1
        threading.Thread(target=self._look_while, args=(waits,), name="look", daemon=True).start()

    def _look_while(self, waits: float) -> None:
        """Until this wait is over, or a stop ends it."""
        try:
            while self._times.waits == waits and not self._done.is_set():
                if self._look is not None and self._look():
                    self.ask()
                    if self._times.waits == waits:
                        self._own += 1
                        self._signals.break_off()
                    return
                self._done.wait(1.0)
        finally:
            self._looks = 0
