"""The contract of a tracker (group `shardway.trackers`), and the thread of rank 0 that hands events to those of a run.

Invariants:
- A tracker never slows or ends a run: it works in a thread of its own, and what it raises is an event, shown once,
  after which it gets nothing more.
- The events decide: a tracker is handed what is recorded, in order, and goes back when the run does.
- A resumed run goes on under the id that its tracker gave at first, which the run directory keeps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from shardway.errors import UserError, render_reason
from shardway.plugins import HasSettings, load_plugin
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.watch.facts import read_sampled


class Tracker(HasSettings):
    """One name of `track.to`. Derive from it and write `start`, `log` and `finish`, which may take their time.

    One object serves one attempt of a run, on rank 0, and its methods are called one after the other in one thread.
    Its module is imported without torch, and also where the run is only checked: import a library that it needs in
    `start`. Whatever a method raises switches the tracker off for the rest of the attempt.
    """

    requires: ClassVar[str] = ""
    """The module that `start` imports, named as its package; "": none."""

    @classmethod
    def check_ready(cls, given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        """Raise UserError before the run starts, or is sent, if the tracker cannot work here; `given` are its settings.
        That what it `requires` is installed was looked at before."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given  # every setting of `settings`, as `track.settings` gives it or with its default

    @abstractmethod
    def start(self, name: str, directory: Path, configuration: Mapping[str, Any], id: str | None) -> str:
        """Begin to track a run, or go on with one; returns the id under which its next attempt goes on. `name` and
        `directory` are the run's, `configuration` the resolved run file as nested tables, and `id` what an earlier
        attempt returned, None for a new run."""

    def rewind(self, step: int) -> None:
        """What was logged of later steps does not count any more: the run goes on from `step`."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Values of a step: of its training (loss, lr ...), of a validation ("validation/loss"), or what `run.log` was
        given; `time` is in Unix seconds. Values that are not finite come too."""

    def log_text(self, step: int, texts: Mapping[str, str], time: float) -> None:
        """Texts of a step by name, such as what the model in training made of a prompt; a tracker that shows no text
        leaves this out."""

    @abstractmethod
    def finish(self, state: str) -> None:
        """The attempt ends: "finished", "stopped" (it may go on later) or "fault"."""


MOST_WAITING = 10_000  # events that may wait for a slow tracker; what comes then is left out
END_S = 15.0  # how long the end of a run waits for its trackers
_ENDS = ("finished", "stopped", "fault")
_TAKEN = frozenset(("started", "rolled_back", "step", "validation", "logged", "sampled", *_ENDS))
HARDWARE = "hardware"
"""Samples of the hardware are sent as HARDWARE/<host>/<series>."""
_NOT_TRACKED = ("event", "time", "step", "position", "samples", "ids", "losses", "skipped")


def values_of(event: Event) -> dict[str, float]:
    """The numbers of an event by the names under which trackers show them; none of an event that is not tracked."""
    facts = {name: value for name, value in event.items() if name not in _NOT_TRACKED}
    match event["event"]:
        case "step":
            facts |= {f"losses/{name}": value for name, value in event.get("losses", {}).items()}
        case "validation":
            facts = {f"validation/{name}": value for name, value in facts.items()}
        case "logged":
            facts = event["values"]
        case _:
            return {}
    return {
        name: float(value)
        for name, value in facts.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def make_trackers(names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Tracker]:
    """The trackers of some names, with their settings. Raises UserError where one is unknown, ValueError where one of
    its settings is."""
    classes = {name: load_plugin("trackers", name) for name in names}
    return {name: each(each.read_settings(settings.get(name, {}))) for name, each in classes.items()}


def check_trackers(names: Sequence[str], settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise UserError before a run starts if one of its trackers cannot work here."""
    remedy = (
        "pip install {0}, in the environment of the ranks; or leave it out of track.to and send the run later, from a "
        "machine that has it: shardway track RUN --to {0}"
    )
    for each in make_trackers(names, settings).values():
        check_tracker(each, environ, remedy)


def check_tracker(tracker: Tracker, environ: Mapping[str, str], remedy: str) -> None:
    """Raise UserError if a tracker cannot work here; `remedy`: what to do where its library, {0}, is missing."""
    if tracker.requires and find_spec(tracker.requires) is None:
        raise UserError(
            f"the tracker {tracker.requires} needs its library, which is not installed here.\n"
            f"  To do: {remedy.format(tracker.requires)}."
        )
    tracker.check_ready(tracker.given, environ)


class TrackerThread:
    """Hands the events of rank 0 to the trackers of a run, in a thread that begins with the first event."""

    def __init__(self, directory: RunDir, names: list[str], settings: Mapping[str, Any], configuration: Any) -> None:
        self._directory, self._configuration = directory, configuration
        self._trackers = make_trackers(names, settings)
        self._waiting: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self._failures: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left_out = 0

    def take(self, event: Event) -> None:
        """An event that was recorded now; returns at once."""
        if event["event"] not in _TAKEN:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shardway-trackers", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                self._fail(", ".join(list(self._trackers)), "is too slow: some values are left out")

    def take_failures(self) -> Iterator[dict[str, Any]]:
        """The facts of each failure since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._failures.get_nowait()

    def close(self) -> None:
        """Wait for what is under way, but not long. Failures that no event can tell any more are warnings."""
        if self._thread is None:
            return
        until = time.monotonic() + END_S
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=END_S)
        self._thread.join(max(0.0, until - time.monotonic()))
        # The thread removes trackers meanwhile: a copy of what is left, which is none if it is just ending.
        left = list(self._trackers)
        if left and self._thread.is_alive():
            self._fail(", ".join(left), f"is still busy after {END_S:.0f} s, and is left behind")
        self._thread = None
        for failure in self.take_failures():
            logging.getLogger("shardway").warning(f"the tracker {failure['tracker']} {failure['reason']}")

    def _work(self) -> None:
        self._hand_to_each(self._start)
        while (event := self._waiting.get()) is not None:
            self._hand_to_each(partial(hand_over, event))
            if event["event"] in _ENDS:
                self._trackers.clear()

    def _hand_to_each(self, act: Callable[[str, Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(name, tracker)
            except Exception as error:  # whatever a tracker and its library raise
                del self._trackers[name]
                self._fail(name, f"is switched off for this attempt: {type(error).__name__}: {error}")

    def _fail(self, name: str, reason: str) -> None:
        self._failures.put({"tracker": name, "reason": render_reason(reason)})

    def _start(self, name: str, tracker: Tracker) -> None:
        known = self._directory.read_tracked()
        path = self._directory.path
        id = tracker.start(path.name, path, self._configuration, known.get(name))
        if known.get(name) != id:
            self._directory.write_tracked({**known, name: id})


def hand_over(event: Event, name: str, tracker: Tracker) -> None:
    """Hand one event to a tracker that has been started."""
    if event["event"] in ("started", "rolled_back"):
        tracker.rewind(int(event["step"]))
    elif event["event"] in _ENDS:
        tracker.finish(event["event"])
    elif event["event"] == "sampled":
        sampled = read_sampled(event)
        texts = {f"sample/{number}": f"{prompt}{made}" for number, (prompt, made) in enumerate(sampled.samples)}
        tracker.log_text(sampled.step, texts, float(event.get("time", math.nan)))
    elif values := values_of(event):
        tracker.log(int(event["step"]), values, float(event.get("time", math.nan)))
