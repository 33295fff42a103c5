"""A run that a script has opened: closed at its end, and shown in the lines of `shardway train`.

Invariants:
- A failure to show something never ends or changes the run.
- A run is closed once, with the error that ended its script if there was one.

A line is written by its event, in the thread that records it. So it stands whole between the script's own output (a bar
of tqdm makes room for it), and in the cell of a notebook that trains. It goes to stderr, since a script's stdout is its
own; in a notebook, whose stdout is not parsed, it goes to stdout.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Container
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, TextIO, TypeVar

from shardway.errors import JobError
from shardway.ranks.stop import find_shell, restore_hook, script_hook
from shardway.rundir.attempts import VARIABLE as ATTEMPT
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.train.session import Session
from shardway.watch.plain import PlainLines
from shardway.watch.progress import read_validations
from shardway.watch.words import list_last_lines

# --- the lines of shardway train, on rank 0

LONGEST_ON_TERMINAL_S, LONGEST_IN_FILE_S = 60.0, 600.0
"""The most seconds between two step lines of a long run."""


class ScriptDisplay:
    """Takes the events that rank 0 records, and writes their lines."""

    def __init__(self, directory: RunDir, said: Container[str]) -> None:
        """`said`: reasons that were shown in full already."""
        self._lines: PlainLines | None = None
        self._directory, self._said = directory, said

    def show(self, event: Event) -> None:
        """An event that was recorded now."""
        if event["event"] == "fault" or event.get("reason") in self._said:
            return  # the error is shown when it ends the script
        with contextlib.suppress(Exception):
            if self._lines is None:
                self._lines = self._make_lines()
            self._write(self._lines.lines(event))

    def end(self) -> None:
        """At the end of the script's run: show where the run is, and how to continue it."""
        with contextlib.suppress(Exception):
            status = self._directory.read_status()
            state, reason = str(status.get("state", "")), str(status.get("reason", ""))
            lines = list_last_lines(
                str(self._directory.path),
                state,
                reason,
                report=f"shardway report {self._directory.path}",
                nothing_done=state == "finished" and self._lines is None,
                status=status,
                by_hand=ATTEMPT not in os.environ,
            )
            self._write(lines)

    def _make_lines(self) -> PlainLines:
        validations = []
        with contextlib.suppress(JobError, OSError):
            validations = read_validations(self._directory)
        stream = _find_stream()
        longest_s = LONGEST_ON_TERMINAL_S if stream is not None and stream.isatty() else LONGEST_IN_FILE_S
        return PlainLines(validations=validations, longest_s=longest_s)

    def _write(self, lines: list[str]) -> None:
        stream = _find_stream()
        if stream is None or not lines:
            return
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with bars.external_write_mode(file=stream) if bars is not None else contextlib.nullcontext():
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()


def _find_stream() -> TextIO | None:
    """The stream that users read, looked up each time, since a notebook or a test may set another."""
    return sys.stdout if find_shell() is not None else sys.stderr


def open_display(session: Session) -> ScriptDisplay | None:
    """The display of this rank's script; None if `run.display` is "off", on other ranks, and if an agent of Shardway
    shows the run."""
    is_shown = session.resolved.values.run.display != "off" and session.ranks.placement.launcher != "shardway"
    if not is_shown or not session.ranks.is_first:
        return None
    display = ScriptDisplay(session.directory, session.noted)
    session.recorder.show = display.show
    return display


# --- the end of a run

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
        """Leave the run, with the error that ends it if there is one; a second call does nothing."""
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
    """Close a run that an earlier cell of a notebook has left open."""
    opened = getattr(find_shell(), _OPENED, None)
    if isinstance(opened, OpenedRun) and opened.is_open:
        logging.getLogger("shardway").warning("the run that was still open is closed; this one begins.")
        opened.close()
