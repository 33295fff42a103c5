"""Advice for a run that goes on, looked for again and again by a view that follows it.

Invariants:
- A look reads the last half hour of samples, status.json and the ends of the logs, and no event: those are folded when
  the view gets them. Looks take at most `MOST_SHARE` of a core: what one takes sets when the next is due.
- A look never raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shardway.rundir.directory import RunDir
from shardway.telemetry.store import read_telemetry
from shardway.watch.advice.advise import advise
from shardway.watch.advice.events import FoldedEvents
from shardway.watch.advice.findings import Advice

EVERY_S = 60.0  # between two looks
WINDOW_S = 1800.0  # of samples that are judged
MOST_SHARE = 0.005


class LiveAdvisor:
    """Judges one run at times. `folded`: its events, which a view adds as they come; `clock` gives any seconds."""

    def __init__(self, run: RunDir, folded: FoldedEvents, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._folded, self._clock = run, folded, clock
        self._due = clock() + EVERY_S

    def refresh(self) -> Sequence[Advice] | None:
        """What is advised now, most important first; None where no look is due yet."""
        if self._clock() < self._due or not self._folded.progress.attempts:
            return None
        began = time.thread_time()
        try:
            hosts = read_telemetry(self._run.telemetry_folder, time.time() - WINDOW_S)
            return advise(self._run, hosts, self._folded)
        finally:
            self._due = self._clock() + max(EVERY_S, (time.thread_time() - began) / MOST_SHARE)
