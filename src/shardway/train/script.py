"""A run that a script has opened: closed at the end of a `with`, by `run.close()`, or when the script ends.

Invariant: a run is closed once, with the error that ended its script where there was one. This module must not know
what a run is, nor end a process (that is `ranks.leave`).
"""

from __future__ import annotations

import atexit
import logging
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, TypeVar

from shardway.ranks.notebook import find_shell
from shardway.ranks.shutdown import restore_hook, script_hook

T = TypeVar("T")

_OPENED = "_shardway_opened"
"""Attribute of a notebook's shell: the run that was opened last."""


class OpenedRun(Generic[T]):
    """What a context manager gives, entered at once; `close` leaves it."""

    def __init__(self, context: AbstractContextManager[T]) -> None:
        self._context: AbstractContextManager[T] | None = context
        self._is_open = False
        self.run = context.__enter__()
        self._is_open = True
        script_hook().closes.append(self.close)
        if (shell := find_shell()) is not None:
            setattr(shell, _OPENED, self)
        # Before threads are joined and pools are closed: a last save needs them.
        getattr(threading, "_register_atexit", atexit.register)(self.close)

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called."""
        return self._is_open

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> bool:
        """Leave the run, with the error that ends it where there is one; a second call does nothing."""
        if not self._is_open or self._context is None:
            return False
        self._is_open = False
        closes = script_hook().closes
        if self.close in closes:
            closes.remove(self.close)
        context, self._context = self._context, None
        del self.run  # what is registered for the end of the process must not keep a model until then
        handled = bool(context.__exit__(kind, error, trace))
        if error is None:
            restore_hook()
        return handled


def close_earlier() -> None:
    """Close the run that an earlier cell of a notebook has opened and not closed: its cell runs again, or another."""
    opened = getattr(find_shell(), _OPENED, None)
    if isinstance(opened, OpenedRun) and opened.is_open:
        logging.getLogger("shardway").warning("the run that was still open is closed; this one begins.")
        opened.close()
