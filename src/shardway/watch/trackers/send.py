"""A run sent to trackers after the fact, from its run directory alone.

Invariants:
- What was sent is not sent again: the run directory keeps, for each tracker, how many events of rank 0 it has had, and
  up to when it has had the samples of the hardware. What a call could not send, the next one sends.
- A tracker is handed the events as a live run would hand them; of what was undone before the first call, nothing.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardway.errors import JobError, UserError
from shardway.plain_arrays import find_arrays
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event, drop_undone
from shardway.telemetry.store import read_telemetry
from shardway.watch.trackers.base import HARDWARE, Tracker, check_tracker, hand_over, make_trackers

WINDOW_S = 60.0  # samples of the hardware are sent as their means over at least so long
MOST_WINDOWS = 500  # of a host; a longer run has longer windows

_ENDS = ("finished", "stopped", "fault")


@dataclass(frozen=True)
class SentRun:
    """What one call has sent: the id in the tracker, events with numbers, and windows of hardware samples."""

    tracker: str
    id: str
    events: int
    windows: int


def send_run(
    run: RunDir, names: Sequence[str], settings: Mapping[str, Any], environ: Mapping[str, str]
) -> Iterator[SentRun]:
    """Send what is new of a run to each tracker. Raises UserError where one cannot work here, JobError where one
    fails."""
    configuration = run.read_resolved()
    own = configuration.get("track", {}).get("settings", {})
    try:
        trackers = make_trackers(names, {**(own if isinstance(own, dict) else {}), **settings})
    except ValueError as error:
        what, _, allowed = str(error).partition("; allowed: ")
        raise UserError(f"a setting of a tracker is wrong: {what}\n  Allowed: {allowed}.") from None
    for tracker in trackers.values():
        remedy = "pip install {0}, or give this command on a machine that has it and sees the run; nothing was sent"
        check_tracker(tracker, environ, remedy)
    events = list(run.all_events())
    for name, tracker in trackers.items():
        try:
            yield _send(run, name, tracker, configuration, events)
        except (UserError, JobError):
            raise
        except Exception as error:  # whatever a tracker and its library raise
            raise JobError(
                f"the tracker {name} failed: {type(error).__name__}: {error}\n"
                "  Nothing of the run was changed. To do: run the same command again: it goes on with what is missing."
            ) from error


def _send(run: RunDir, name: str, tracker: Tracker, configuration: Any, events: list[Event]) -> SentRun:
    ids, sent = run.read_tracked(), run.read_sent()
    known: dict[str, Any] = sent[name] if isinstance(sent.get(name), dict) else {}
    had, until = int(known.get("events", 0)), float(known.get("hardware", -math.inf))
    # An earlier run of this name in the directory has had more events than there are now.
    had, until = (had, until) if had <= len(events) else (0, -math.inf)
    new = events[had:] if had else drop_undone(iter(events))
    windows = list(_windows(run, events, until))
    if not new and not windows:
        return SentRun(name, ids.get(name, ""), 0, 0)
    id = tracker.start(run.path.name, run.path, configuration, ids.get(name))
    if ids.get(name) != id:
        run.write_tracked({**ids, name: id})
    if not had:
        tracker.rewind(0)  # whatever it was handed of the run before counts no more
    handed, waiting = 0, iter(windows)
    window = next(waiting, None)
    for event in new:
        while window is not None and window[0] < float(event.get("time", math.inf)):
            tracker.log(window[1], window[2], window[0])
            window = next(waiting, None)
        if event["event"] not in _ENDS and (event["event"] != "started" or had):
            hand_over(event, name, tracker)
            handed += event["event"] in ("step", "validation", "logged")
    while window is not None:
        tracker.log(window[1], window[2], window[0])
        window = next(waiting, None)
    last = next((each["event"] for each in reversed(events) if each["event"] in (*_ENDS, "started")), "stopped")
    tracker.finish(last if last in _ENDS else "stopped")
    through = windows[-1][0] if windows else until
    mark = {"events": len(events), **({"hardware": through} if math.isfinite(through) else {})}
    run.write_sent({**run.read_sent(), name: mark})
    return SentRun(name, id, handed, len(windows))


def _windows(run: RunDir, events: Sequence[Event], after: float) -> Iterator[tuple[float, int, dict[str, float]]]:
    """Time, step and means of each window of hardware samples after a time, by time; each at the step that was the last
    one done."""
    steps = [(float(each["time"]), int(each["step"])) for each in events if each["event"] == "step" and "time" in each]
    times = [time for time, _ in steps]
    found: list[tuple[float, int, dict[str, float]]] = []
    for host in read_telemetry(run.telemetry_folder):
        if not len(host.times):
            continue
        np = find_arrays()

        first, last = float(host.times[0]), float(host.times[-1])
        length = max(WINDOW_S, (last - first) / MOST_WINDOWS)
        numbers = ((host.times - first) // length).astype(int)
        ends: dict[int, float] = {}
        places: dict[int, slice] = {}
        for number in np.unique(numbers).tolist():
            places[number] = slice(*np.searchsorted(numbers, [number, number + 1]).tolist())
            end = float(host.times[places[number]][-1])
            is_open = number == numbers[-1] and last - first < (number + 1) * length - length / 2 and number > 0
            if end > after and not is_open:
                ends[number] = end
        values: dict[int, dict[str, float]] = {number: {} for number in ends}
        for name in (name for name in host.series if not name.startswith("core/")):
            series = host.series[name]
            for number, means in values.items():
                kept = series[places[number]]
                kept = kept[np.isfinite(kept)]
                if len(kept):
                    means[f"{HARDWARE}/{host.host}/{name}"] = float(kept.mean())
        for number, end in ends.items():
            at = bisect.bisect_right(times, end)
            if values[number]:
                found.append((end, steps[at - 1][1] if at else 0, values[number]))
    yield from sorted(found, key=lambda each: each[0])
