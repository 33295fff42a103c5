"""Turns signals into a wish to stop, which the ranks then agree on between steps.

Invariant: a signal only sets a flag, so that no step is cut in half; only a second Ctrl-C ends the process at once
(schedulers and launchers repeat theirs, and mean the same).
Handlers that were there before are put back. This module must not stop anything itself.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""Ctrl-C; what schedulers send before they kill; what a job script may ask a scheduler to send early."""


class SignalWatch:
    """While entered, remembers that a stop signal came; Ctrl-C after it raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    @property
    def received(self) -> str | None:
        """Name of the signal that asked for a stop, such as "SIGTERM"."""
        return self._received.name if self._received else None

    def __enter__(self) -> SignalWatch:
        # Python delivers signals to the main thread alone; a run in another thread goes without.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("a second Ctrl-C")
        self._received = signal.Signals(number)
