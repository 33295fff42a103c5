"""What a script that owns its loop shows of its run: the lines of `shardway train`, on rank 0.

A line is written by the event that it tells of, in the thread that records it: so it stands whole between what the
script itself prints (a bar of tqdm makes room for it), and in the cell of a notebook that trains. It goes to stderr,
since a script's stdout is its own; in a notebook, whose stdout nobody parses, there.

Invariant: what cannot be shown never ends or changes the run. This module must not know models or data.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Container
from typing import TextIO

from shardway.errors import JobError
from shardway.ranks.notebook import find_shell
from shardway.rundir.attempts import VARIABLE as ATTEMPT
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.train.session import Session
from shardway.watch.plain import PlainLines
from shardway.watch.progress import read_validations
from shardway.watch.words import list_last_lines

LONGEST_ON_TERMINAL_S, LONGEST_IN_FILE_S = 60.0, 600.0
"""How far apart the step lines of a long run are at most."""


class ScriptDisplay:
    """Takes the events that rank 0 records, and writes the lines that they are worth."""

    def __init__(self, directory: RunDir, said: Container[str]) -> None:
        """`said`: reasons that were said in full already."""
        self._lines: PlainLines | None = None
        self._directory, self._said = directory, said

    def show(self, event: Event) -> None:
        """An event that was recorded now."""
        if event["event"] == "fault" or event.get("reason") in self._said:
            return  # the error itself is told when it ends the script
        with contextlib.suppress(Exception):
            if self._lines is None:
                self._lines = self._make_lines()
            self._write(self._lines.lines(event))

    def end(self) -> None:
        """The script is done with its run: where it is, and how it goes on."""
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
    """Where people read: looked up each time, since a notebook or a test may set another."""
    return sys.stdout if find_shell() is not None else sys.stderr


def open_display(session: Session) -> ScriptDisplay | None:
    """The display of this rank's script; None where `run.display` is "off", on other ranks, and where an agent of ours
    shows the run."""
    is_shown = session.resolved.values.run.display != "off" and session.ranks.placement.launcher != "shardway"
    if not is_shown or not session.ranks.is_first:
        return None
    display = ScriptDisplay(session.directory, session.noted)
    session.recorder.show = display.show
    return display
