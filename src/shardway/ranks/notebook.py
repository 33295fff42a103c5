"""Python that a person uses cell by cell: IPython's shell, in a terminal or behind a notebook.

There an error or an interrupt ends a cell and not the process, and what was made before lives on.

Invariant: in a script nothing here does anything. This module must not import IPython.
"""

from __future__ import annotations

import builtins
import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any


def find_shell() -> Any:
    """IPython's shell that runs this cell; None in a script."""
    return getattr(builtins, "get_ipython", lambda: None)()


class Interrupts:
    """In a notebook: an interrupt that comes within a piece of work is raised at its end, so that no update, save or
    count is cut in half; a second one at once."""

    def __init__(self) -> None:
        self._applies = find_shell() is not None
        self._within, self._came = False, False

    def held(self) -> AbstractContextManager[None]:
        """While entered, in the main thread, the first interrupt waits."""
        applies = self._applies and not self._within and threading.current_thread() is threading.main_thread()
        return self._hold() if applies else contextlib.nullcontext()

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._note)
        self._within, self._came = True, False
        try:
            yield
        finally:
            self._within = False
            signal.signal(signal.SIGINT, before)
        if self._came and callable(before):
            before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
