"""What each rank of a run did: the share of its time in steps and in waiting, and which rank kept the others waiting.

A step ends for all ranks together, so step times are alike on all of them. What differs is the time outside of steps:
the rank that waits longest for its data is the one for which the others wait inside their steps.

Invariants:
- Shares are of looks at the ranks' heartbeats, one in each sample of a node; a rank that was looked at less than
  FEWEST_LOOKS times has none. Step times are those of events, which only some runs record for every rank.
- Where nothing is known, the reason is; a run of one rank has neither.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from shardway.errors import JobError
from shardway.plain_arrays import find_arrays
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.telemetry.activity import Activity
from shardway.telemetry.store import HostTelemetry
from shardway.watch.facts import number
from shardway.watch.progress import RunProgress
from shardway.watch.report.event_log import EventLog

FEWEST_LOOKS = 30
MUCH_LATER = 0.1
"""A rank kept the others waiting if its share of time outside of steps is larger than the median one by so much."""
_MOST_RANKS = 64  # whose events are read
WAITING, SCRIPT, STEPPING = (Activity.DATA,), (Activity.SCRIPT,), (Activity.STEP, Activity.REPEAT)


@dataclass(frozen=True)
class RankTime:
    """One rank. Shares of its time, 0 to 1: in steps, waiting for data, in the script's own work; the rest are saves,
    validations, start and end. `step_s`: its mean step; `median_s` and `slow_s` (95 of 100 steps were quicker) where
    its events have its steps. None where it is not known."""

    rank: int
    host: str = ""
    looks: int = 0
    step_share: float | None = None
    data_share: float | None = None
    script_share: float | None = None
    step_s: float | None = None
    median_s: float | None = None
    slow_s: float | None = None

    @property
    def outside_share(self) -> float | None:
        """The share in which the others may have to wait for it."""
        return None if self.data_share is None else self.data_share + (self.script_share or 0.0)

    @property
    def slowness(self) -> tuple[float, float]:
        """By which ranks are ordered: time outside of steps, then the median step."""
        return self.outside_share or 0.0, self.median_s or 0.0


@dataclass(frozen=True)
class RankTimes:
    """All ranks that something is known of, by number; `missing`: why there is none, "" for a run of one rank."""

    ranks: list[RankTime] = field(default_factory=list)
    missing: str = ""

    @property
    def late(self) -> RankTime | None:
        """The rank that kept the others waiting, if one did."""
        known = [(share, rank) for rank in self.ranks if (share := rank.outside_share) is not None]
        if len(known) < 2:
            return None
        share, rank = max(known, key=lambda each: each[0])
        return rank if share - self.usual_outside >= MUCH_LATER else None

    @property
    def usual_outside(self) -> float:
        """The median share of time outside of steps."""
        return median([share for rank in self.ranks if (share := rank.outside_share) is not None] or [0.0])


def find_rank_times(run: RunDir, hosts: Sequence[HostTelemetry], log: EventLog, progress: RunProgress) -> RankTimes:
    """The ranks of a run by heartbeats in its telemetry, and by events."""
    steps = [took for took in log.column("seconds").tolist() if math.isfinite(took)]
    known = _count_looks(hosts)
    paces = _read_paces(run)
    first = known.get(0)
    mean_s = fmean(steps) if steps else None
    ranks = []
    for rank in sorted(known.keys() | paces.keys()):
        looks = known.get(rank)
        median_s, slow_s = paces.get(rank, (None, None))
        if looks is None:
            ranks.append(RankTime(rank, median_s=median_s, slow_s=slow_s))
            continue
        host, counts = looks
        count = sum(counts.values())
        in_steps, waiting, script = (
            sum(counts.get(each, 0) for each in kinds) / count for kinds in (STEPPING, WAITING, SCRIPT)
        )
        # All ranks took the same steps, so their mean steps are as their times in steps.
        of_first = _share_in_steps(first[1]) if first is not None else 0.0
        step_s = mean_s * in_steps / of_first if mean_s is not None and of_first > 0 else None
        ranks.append(RankTime(rank, host, count, in_steps, waiting, script, step_s, median_s, slow_s))
    return RankTimes(ranks) if len(ranks) > 1 else RankTimes(missing=_find_reason(progress, bool(known)))


def _find_reason(progress: RunProgress, is_looked_at: bool) -> str:
    start = progress.start
    if start is None or not start.world or start.world < 2:
        return ""
    if start.launcher != "shardway":
        return (
            f"the ranks were started by {start.launcher or 'another program'}: their times are known where an agent of "
            "Shardway starts them (--nproc, --nodes, submit), or with data.record_ids"
        )
    if is_looked_at:
        return "the other ranks were looked at too rarely"
    return (
        f"there are fewer than {FEWEST_LOOKS} samples of training ranks (run.telemetry and run.hang_timeout must be "
        "on), and only rank 0 records its steps"
    )


def _count_looks(hosts: Sequence[HostTelemetry]) -> dict[int, tuple[str, dict[int, int]]]:
    """Rank -> its last host, and how often it was seen in each activity of training: starts and ends are left out."""
    np = find_arrays()

    found: dict[int, tuple[str, dict[int, int]]] = {}
    for host in sorted(hosts, key=lambda each: float(each.times[-1])):
        for name in host.series:
            if (match := re.fullmatch(r"rank/(\d+)/activity", name)) is None:
                continue
            values = host.series[name]
            numbers, counts = np.unique(values[np.isfinite(values)].astype(int), return_counts=True)
            rank = int(match[1])
            before = found.get(rank, ("", {}))[1]
            for activity, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                if activity not in _OUTSIDE_OF_TRAINING:
                    before[activity] = before.get(activity, 0) + count
            found[rank] = (host.host, before)
    return {rank: each for rank, each in found.items() if sum(each[1].values()) >= FEWEST_LOOKS}


_OUTSIDE_OF_TRAINING = (Activity.START, Activity.LOAD, Activity.END)


def _share_in_steps(counts: dict[int, int]) -> float:
    return sum(counts.get(each, 0) for each in STEPPING) / sum(counts.values())


def _seconds(event: Event) -> float | None:
    took = number(event, "seconds")
    return took if took is not None and math.isfinite(took) else None


def _read_paces(run: RunDir) -> dict[int, tuple[float, float]]:
    """Median and slow step of each rank over its last steps; none where only rank 0 records them."""
    paces: dict[int, tuple[float, float]] = {}
    with contextlib.suppress(JobError):
        ranks = run.ranks_with_events()
        for rank in ranks[:_MOST_RANKS] if len(ranks) > 1 else []:
            took = (_seconds(event) for event in run.last_events(rank) if event["event"] == "step")
            known = sorted(each for each in took if each is not None)
            if known:
                paces[rank] = median(known), known[min(len(known) - 1, len(known) * 95 // 100)]
    return paces if len(paces) > 1 else {}


def is_waiting(activities: Any) -> Any:
    """Of each sample: whether the rank waits for data."""
    np = find_arrays()

    return np.isin(activities, WAITING)
