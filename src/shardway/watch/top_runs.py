"""A run as `shardway top` follows it: its events, hardware and attempts, each read as far as it has grown.

Invariants:
- It reads the run directory alone: no scheduler is asked, and no other host.
- A refresh never raises. What cannot be read is in `error`, and the last known state stays.
- The first look at a long file of events reads all of it, but parses only some of its steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardway.errors import ShardwayError, legible
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.watch.advice.findings import Advice
from shardway.watch.facts import measured
from shardway.watch.live import GrowingCurve
from shardway.watch.progress import RunProgress, RunSummary, summarise_progress
from shardway.watch.top_hardware import HardwareTail, HardwareUse, count_gpus
from shardway.watch.words import PlainLines, Severity, describe, render_guarded

_ALERTS = 20  # the newest faults and warnings that are kept
_RECENT_S = 60.0  # over which the share of waiting for data is taken
_LOG_BYTES = 1 << 16
_ACTIVE = ("running", "submitted", "prepared")


@dataclass(frozen=True)
class AttemptFacts:
    """The newest attempt by its own records: `state` is "prepared", "submitted", "running" or how it ended."""

    number: int
    job: str
    state: str
    reason: str
    gpus: int | None
    nodes: str
    started: float | None
    ended: float | None

    @property
    def is_active(self) -> bool:
        return self.state in _ACTIVE


def read_attempt(attempt: Attempt) -> AttemptFacts:
    """The facts in the records of an attempt."""
    submission, started, result = attempt.read_submission(), attempt.read_started(), attempt.read_result()
    job = (submission.job if submission else "") or (started.job if started else "")
    state = str(result.state) if result else "running" if started else "submitted" if job else "prepared"
    return AttemptFacts(
        number=attempt.number,
        job=job,
        state=state,
        reason=result.reason if result else "",
        gpus=count_gpus(submission.asked) if submission else None,
        nodes=started.nodes if started else "",
        started=started.started if started else submission.submitted if submission else None,
        ended=result.ended if result else None,
    )


class WatchedRun:
    """One run, followed. Its fields are the state of the last refresh."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.run = RunDir(path)
        self.summary: RunSummary | None = None
        self.hardware: HardwareUse | None = None
        self.attempt: AttemptFacts | None = None
        self.losses = GrowingCurve()
        self.alerts: deque[tuple[Severity, str]] = deque(maxlen=_ALERTS)
        self.advice: Sequence[Advice] = ()
        self.error = ""
        self._clock = clock
        self._progress = RunProgress()
        self._events = self.run.follow_events()
        self._tail = HardwareTail(self.run.telemetry_folder)
        self._is_first = True
        self._waits: deque[tuple[float, float]] = deque()

    def refresh(self) -> None:
        """Read what is new."""
        self.error = ""
        try:
            self.run.check_format()
            events = self._events.catch_up() if self._is_first else self._events.new_events()
            for event in events:
                self._is_first = False
                self._fold(event)
            self.attempt = next((read_attempt(each) for each in reversed(self.run.attempts())), None)
            if self.run.exists():
                self.summary = summarise_progress(self.run, self._progress)
        except ShardwayError as error:
            self.error = str(error).splitlines()[0]
        except OSError as error:
            self.error = f"{self.run.path} cannot be read: {error.strerror}"
        self.hardware = self._tail.refresh()
        self.error = self.error or self._tail.error
        self._note_wait()

    def _fold(self, event: Event) -> None:
        self._progress.update(event)
        match event["event"]:
            case "step":
                self.losses.add(self._progress.step, measured(event, "loss"))
            case "started":
                self.losses.undo_after(self._progress.step)
                if not self._progress.attempts[-1].again:
                    self.alerts.clear()  # they were of the attempt before
            case "rolled_back":
                self.losses.undo_after(self._progress.step)
                self.alerts.append((Severity.WARNING, render_guarded(event)))
            case _ if (line := describe(event)) is not None and line.weight is not Severity.NEWS:
                self.alerts.append((line.weight, line.words))

    def _note_wait(self) -> None:
        account = self.summary.account if self.summary else None
        if account is None:
            return
        now = (account.wall_s, account.data_s)
        if not self._waits or now != self._waits[-1]:
            self._waits.append(now)
        while len(self._waits) > 2 and now[0] - self._waits[1][0] >= _RECENT_S:
            self._waits.popleft()

    # --- what a row shows

    @property
    def state(self) -> str:
        """In one word: that of a job that goes on, else of what the run recorded."""
        recorded = self.summary.state if self.summary else "new"
        if self.attempt is None or recorded == "running":
            return recorded
        if self.attempt.is_active or self.summary is None or recorded == "new":
            return self.attempt.state
        return recorded

    @property
    def reason(self) -> str:
        if self.summary is not None and self.summary.state == self.state and self.summary.reason:
            return self.summary.reason
        return self.attempt.reason if self.attempt else ""

    @property
    def is_active(self) -> bool:
        return self.state in _ACTIVE

    @property
    def updated(self) -> float:
        """When it last gave a sign of life (Unix seconds)."""
        of_attempt = (self.attempt.ended or self.attempt.started) if self.attempt else None
        known = (self.summary.updated if self.summary else None, of_attempt)
        return max((each for each in known if each), default=0.0)

    @property
    def began(self) -> float | None:
        started = self.summary.started if self.summary else None
        return started or (self.attempt.started if self.attempt else None)

    @property
    def gpus_asked(self) -> int | None:
        """Those that its job asked for, else its ranks on accelerators."""
        if self.attempt is not None and self.attempt.gpus is not None:
            return self.attempt.gpus
        summary = self.summary
        return summary.world if summary is not None and summary.device.startswith(("cuda", "rocm", "hip")) else None

    @property
    def data_wait(self) -> float | None:
        """The share of time in which its first rank waits for data: of the last minute where it was watched that long,
        else of all its time; None where it is not recorded."""
        account = self.summary.account if self.summary else None
        if account is None or account.wall_s <= account.start_s:
            return None
        (before_s, waited_s) = self._waits[0]
        if account.wall_s - before_s >= _RECENT_S / 6 and self.is_active:
            return max(0.0, (account.data_s - waited_s) / (account.wall_s - before_s))
        return account.data_s / (account.wall_s - account.start_s)

    @property
    def problems(self) -> int:
        """How many alerts and pieces of advice it has."""
        return len(self.alerts) + len(self.advice)

    def list_log(self, most_lines: int = 400) -> list[str]:
        """Its last events as lines, or what its newest job printed where it has none."""
        try:
            lines = PlainLines(every_s=0.0)
            shown = [line for event in self.run.last_events(most_bytes=_LOG_BYTES) for line in lines.lines(event)]
            if not shown:
                attempts = self.run.attempts()
                shown = _read_end(attempts[-1].job_log).splitlines() if attempts else []
        except ShardwayError as error:
            return str(error).splitlines()
        except OSError as error:
            return [f"the log cannot be read: {error.strerror}"]
        return [legible(line) for line in shown[-most_lines:]] or ["nothing yet"]


def render_age(seconds: float) -> str:
    """ "45s", "12m", "3h10m", "5d3h"."""
    minutes, hours, days = int(seconds / 60), int(seconds / 3600), int(seconds / 86400)
    if minutes < 1:
        return f"{max(0, int(seconds))}s"
    if hours < 1:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60:02d}m" if days < 1 else f"{days}d{hours % 24}h"


def _read_end(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
