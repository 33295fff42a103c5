"""Stop signals: ranks agree on a stop between steps; a watchdog thread acts where the main thread cannot.

Python runs a signal's handler in the main thread, and only once that returns from a library. The watchdog reads from a
pipe what the interpreter writes there at once (`signal.set_wakeup_fd`).

Invariants:
- A signal only sets a flag, so that no step is cut in half. Only a second Ctrl-C ends the process at once (schedulers
  and launchers repeat their signals with the same meaning), and only a wait marked as breakable is broken off. Earlier
  handlers are restored.
- The watchdog does nothing without a stop request. Slow work (a file system that hangs) is done in other threads, so
  that the watchdog always sees the clock.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C; what schedulers send before they kill; what a job script may ask a scheduler to send early (two); what comes
when a terminal or a connection is gone."""

_OF_OTHERS = (signal.SIGUSR1, signal.SIGHUP)
"""Stop signals that are left to their present handlers: a script's own use of one, `nohup` that ignores one."""

BREAK = signal.SIGUSR2
"""The signal by which a thread of this process breaks off a wait of the main thread: it ends a system call."""


class BrokenOff(BaseException):
    """A wait that was broken off; not an Exception, since waiting code may catch those and try again."""


class SignalWatch:
    """While entered, remembers that a stop signal came; Ctrl-C after it raises KeyboardInterrupt.

    A watch entered within another takes over the signal that the outer one received. The main thread sets `breakable`
    around a wait that `break_off` may end. `killed`: the second Ctrl-C came, even if its KeyboardInterrupt was caught.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = signals
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}
        self._breaks = False
        self.breakable = False
        self.killed = False

    @property
    def received(self) -> str | None:
        """Name of the signal that asked for a stop, such as "SIGTERM"."""
        return self._received.name if self._received else None

    @property
    def is_listening(self) -> bool:
        """Whether signals come here: entered, in the main thread."""
        return bool(self._before)

    def holds(self, number: int) -> bool:
        """Whether this watch handles the signal, and no other handler in this process."""
        return number in self._before

    def break_off(self) -> None:
        """From any thread: raise BrokenOff in the main thread where its wait is `breakable`."""
        main = threading.main_thread().ident
        if self.is_listening and main is not None:
            self._breaks = True
            signal.pthread_kill(main, BREAK)

    def __enter__(self) -> SignalWatch:
        # Python delivers signals to the main thread alone; a run in another thread goes without.
        if threading.current_thread() is threading.main_thread():
            outer = _find_watch()
            self._before = {number: signal.signal(number, self._note) for number in list_free(self._signals)}
            self._received = outer._received if outer is not None else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if getattr(signal.getsignal(number), "__self__", None) is self:  # and no other one was set since
                signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._breaks and number == BREAK:
            self._breaks = False
            if self.breakable:
                self.breakable = False
                raise BrokenOff
            return
        if self._received is not None and number == signal.SIGINT:
            self.killed = True
            raise KeyboardInterrupt("a second Ctrl-C")
        self._received = signal.Signals(number)


def list_free(signals: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Those of these signals that may mean a stop in this process."""

    def is_free(number: signal.Signals) -> bool:
        handler = signal.getsignal(number)
        unknown = handler is signal.SIG_DFL
        shielded = handler is signal.SIG_IGN and number == signal.SIGUSR1 and _is_shielded()
        free = (unknown or shielded) and not _is_caught(number)
        return free or isinstance(getattr(handler, "__self__", None), SignalWatch)

    return [number for number in signals if number not in _OF_OTHERS or is_free(number)]


def _is_shielded() -> bool:
    """Whether a job script made torchrun ignore a signal that its ranks take for a stop."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "SHARDWAY_ATTEMPT_DIR" in os.environ


def _is_caught(number: int) -> bool:
    """Whether a handler is set outside Python: by the fault handler, or a library (proc(5), SigCgt)."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def find_received() -> str | None:
    """The stop signal received by the watch that is entered in this process; None for none."""
    watch = _find_watch()
    return watch.received if watch is not None else None


def _find_watch() -> SignalWatch | None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, SignalWatch) else None


# --- the watchdog thread

TICK_S = 0.25
PATIENCE_S = 5.0
"""How long the main thread may wait for data after a stop request; and how long it may take to notice a signal before
other processes are notified of it."""
LEAVE_S = 3.0
"""How long the main thread may take to end after a second Ctrl-C."""

Act = Callable[[], None]


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Duties:
    """What to call if: the stop took longer than `timeout_s`; a second Ctrl-C did not end the process; a signal came
    while the main thread is in a library. Each is called once, the first two in a thread that may end the process."""

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
        """Record a stop signal; a Ctrl-C after another one means an immediate end."""
        if self.signalled is not None and number == signal.SIGINT and self.killed is None:
            self.killed = now
        self.asked = now if self.asked is None else self.asked
        self.signalled = now if self.signalled is None else self.signalled

    def find_due(self, now: float, timeout_s: float, *, heard: bool) -> list[str]:
        """What to do now, each once: "killed", "late", "deaf". `heard`: the main thread has handled the signal."""
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
    """Works while entered in the main thread, where its `signals` are watched; elsewhere it does nothing."""

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
        """A stop was requested or agreed on: from the first call on it may take `timeout_s`."""
        if self._times.asked is None:
            self._times.asked = time.monotonic()

    def begin_wait(self, look: Callable[[], bool]) -> None:
        """The main thread waits for data; `look` (called in another thread) returns whether a stop is requested."""
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
        """Whether this is the signal that broke off a wait, and not a stop request from outside."""
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
        """Look until this wait is over, or a stop ends it."""
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
