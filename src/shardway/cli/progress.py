"""Shows a run while it trains: a live view on a terminal, plain lines elsewhere.

Invariant: it reads the run directory like any other reader, so it shows what was written, by any launcher. It reads
twice a second, so that the run is not slowed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.live import Live

from shardway.errors import JobError
from shardway.ranks.outputs import leave_outputs
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.watch.facts import ValidatedEvent
from shardway.watch.live import LiveView
from shardway.watch.plain import PlainLines
from shardway.watch.progress import read_validations

REFRESH_S = 0.5


class Display:
    """While entered, a thread shows the events that rank 0 appends."""

    def __init__(self, run: RunDir, *, to_stderr: bool, plain: bool) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._plain = plain or not self._console.is_terminal
        self._run = run
        self._validations: list[ValidatedEvent] = []
        with contextlib.suppress(JobError, OSError):  # reported by the process that writes there
            self._validations = read_validations(run)
        self._events = run.follow_events(from_end=True)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="display", daemon=True)

    def __enter__(self) -> Display:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        leave_outputs()
        self._thread.join()

    def _show(self) -> None:
        if self._plain:
            self._show_lines()
        else:
            self._show_live()

    def _show_lines(self) -> None:
        lines = PlainLines(validations=self._validations)
        for events in self._new_events():
            for line in (line for event in events if event["event"] != "fault" for line in lines.lines(event)):
                self._console.print(line, markup=False)

    def _show_live(self) -> None:
        view = LiveView(self._run.path.name, str(self._run.path), validations=self._validations)
        with Live(view.render(), console=self._console, auto_refresh=False) as live:
            for events in self._new_events():
                for event in events:
                    _take(view, event)
                live.update(view.render(), refresh=True)

    def _new_events(self) -> Iterator[list[Event]]:
        """New events, polled until the end. If the files cannot be read now, the events come later: the writing process
        reports an unreachable file system."""
        ended = False
        while not ended:
            ended = self._done.wait(REFRESH_S)
            with contextlib.suppress(JobError):
                yield self._events.new_events()


def _take(view: LiveView, event: Event) -> None:
    if event["event"] != "fault":  # the error itself is printed when the view has ended
        view.update(event)
