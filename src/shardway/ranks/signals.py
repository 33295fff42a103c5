"""Turns signals into a wish to stop, which the ranks then agree on between steps.

Invariant: a signal only sets a flag, so that no step is cut in half; only a second Ctrl-C ends the process at once
(schedulers and launchers repeat theirs, and mean the same), and only a wait that says it can be broken off is.
Handlers that were there before are put back. This module must not stop anything itself.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""Ctrl-C; what schedulers send before they kill; what a job script may ask a scheduler to send early."""

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
            self._before = {number: signal.signal(number, self._note) for number in self._signals}
            self._received = outer._received if outer is not None else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
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


def find_received() -> str | None:
    """The stop signal that the watch which is entered in this process has received; None for none."""
    watch = _find_watch()
    return watch.received if watch is not None else None


def _find_watch() -> SignalWatch | None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, SignalWatch) else None
