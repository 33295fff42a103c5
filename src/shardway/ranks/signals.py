"""Turns signals into a wish to stop, which the ranks then agree on between steps.

Invariant: a signal only sets a flag, so that no step is cut in half; only a second Ctrl-C ends the process at once
(schedulers and launchers repeat theirs, and mean the same), and only a wait that says it can be broken off is.
Handlers that were there before are put back. This module must not stop anything itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C; what schedulers send before they kill; what a job script may ask a scheduler to send early (two); what comes
when a terminal or a connection is gone."""

_OF_OTHERS = (signal.SIGUSR1, signal.SIGHUP)
"""Stop signals that are left to who has them: a script that has a use of its own for one, `nohup` that ignores one."""

BREAK = signal.SIGUSR2
"""What a thread of this process sends to the main thread to break off a wait: a system call ends with a signal."""


class BrokenOff(BaseException):
    """A wait that was broken off; no Exception, since whoever waits may catch those and try again."""


class SignalWatch:
    """While entered, remembers that a stop signal came; Ctrl-C after it raises KeyboardInterrupt.

    One that is entered within another knows what that one has received. `breakable` is for the main thread to set
    around a wait that `break_off` may end. `killed`: the second Ctrl-C came, whoever has caught the KeyboardInterrupt.
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
        """Whether this signal comes here, and not to somebody else in this process."""
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
            if getattr(signal.getsignal(number), "__self__", None) is self:  # and nobody has set another one since
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
    """Whether a job script has let torchrun ignore what its ranks shall take for a stop."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "SHARDWAY_ATTEMPT_DIR" in os.environ


def _is_caught(number: int) -> bool:
    """Whether a handler is set that Python does not know of: by the fault handler, or a library (proc(5), SigCgt)."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def find_received() -> str | None:
    """The stop signal that the watch which is entered in this process has received; None for none."""
    watch = _find_watch()
    return watch.received if watch is not None else None


def _find_watch() -> SignalWatch | None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, SignalWatch) else None
