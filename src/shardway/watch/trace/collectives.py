"""Collectives of several ranks, matched with each other, and how far apart the ranks begin them.

Invariants:
- A collective is matched by its process group and its sequence number there, where the traces have both (torch 2.13
  writes `Seq` for NCCL). Else the order of a group's collectives in a step counts, and a rank that has fewer of them is
  matched only if they fit in one place: what is missing on one rank never shifts the rest.
- Sends and receives are left out: they are numbered and ordered by pairs, not by groups.
- Clocks of ranks are never compared, only lengths: a collective ends at about the same time everywhere.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardway.watch.trace.columns import ANNOTATION, Trace
from shardway.watch.trace.timeline import Timeline

_ON_CPU = re.compile(r"^(gloo|mpi|ucc|nccl|xccl):")
_POINT_TO_POINT = re.compile(r"send|recv", re.IGNORECASE)


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's part in a collective. `group`: the process group's name and ranks, "" where they are not recorded;
    `sequence`: its number in that group. `start` and `end` are microseconds as the file counts them."""

    step: int
    group: str
    sequence: int | None
    name: str
    size: str
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


def list_collectives(timeline: Timeline) -> tuple[CollectiveCall, ...]:
    """The collectives of the kept steps in the order of their start. Kernels of one number are one collective."""
    trace = timeline.trace
    if timeline.on_device:
        hits = timeline.is_communication
        rows, ops = timeline.rows[hits], timeline.op[hits]
    else:
        rows = timeline.named(_ON_CPU, ANNOTATION)
        ops = np.full(len(rows), -1)
    found: dict[object, CollectiveCall] = {}
    for place, step in enumerate(timeline.kept):
        number = step.number if step.number is not None else place
        inside = np.flatnonzero((trace.start[rows] >= step.low) & (trace.start[rows] < step.high))
        for row, op in zip(rows[inside].tolist(), ops[inside].tolist(), strict=True):
            call = _read_call(trace, row, op, number)
            if _POINT_TO_POINT.search(call.name):
                continue
            key = row if call.sequence is None else (call.group, call.sequence)
            known = found.get(key)
            found[key] = call if known is None else replace(known, end=max(known.end, call.end))
    return tuple(found.values())


def _read_call(trace: Trace, row: int, op: int, step: int) -> CollectiveCall:
    """What the event says of its collective, or the operator that launched it: kernels lack the sequence number."""
    name, size, group = re.split(r"[(<]", trace.names[trace.name[row]])[0], "", ""
    sequence = -1
    for each in (row, op):
        if each < 0:
            continue
        sequence = int(trace.sequence[each]) if sequence < 0 else sequence
        if not group and (read := _read_group(trace, each)) is not None:
            name, size, group = read
    if not size and trace.dims[row] >= 0:
        size = trace.texts[trace.dims[row]]
    start, end = float(trace.start[row]) + trace.origin_us, float(trace.end[row]) + trace.origin_us
    return CollectiveCall(step, group, sequence if group and sequence >= 0 else None, name, size, start, end)


def _read_group(trace: Trace, row: int) -> tuple[str, str, str] | None:
    """Name, size and group of a collective that has them in its `args`."""
    text = trace.texts[trace.extra[row]] if trace.extra[row] >= 0 else ""
    if not text.startswith('["'):
        return None
    try:
        read = json.loads(text)
    except ValueError:
        return None
    if len(read) != 4:
        return None
    name, group, ranks, elements = read
    return str(name), str(elements), f"{group} {ranks}".strip()


def match_collectives(ranks: Sequence[Sequence[CollectiveCall]]) -> list[dict[int, CollectiveCall]]:
    """Each collective that two ranks or more have: their calls by the rank's place in `ranks`."""
    groups: dict[str, dict[int, list[CollectiveCall]]] = defaultdict(lambda: defaultdict(list))
    for place, calls in enumerate(ranks):
        for call in calls:
            groups[call.group][place].append(call)
    matched: list[dict[int, CollectiveCall]] = []
    for members in groups.values():
        numbered = all(call.sequence is not None for calls in members.values() for call in calls)
        matched += _match_by_number(members) if numbered else _match_by_order(members)
    return [found for found in matched if len(found) > 1]


def _match_by_number(members: dict[int, list[CollectiveCall]]) -> list[dict[int, CollectiveCall]]:
    found: dict[int | None, dict[int, CollectiveCall]] = defaultdict(dict)
    for place, calls in members.items():
        for call in calls:
            found[call.sequence][place] = call
    return list(found.values())


def _match_by_order(members: dict[int, list[CollectiveCall]]) -> Iterator[dict[int, CollectiveCall]]:
    steps: dict[int, dict[int, list[CollectiveCall]]] = defaultdict(lambda: defaultdict(list))
    for place, calls in members.items():
        for call in calls:
            steps[call.step][place].append(call)
    for step in steps.values():
        longest = max(step, key=lambda place: len(step[place]))
        found = [{longest: call} for call in step[longest]]
        for place, calls in step.items():
            offset = _find_offset(calls, step[longest]) if place != longest else None
            if offset is not None:
                for each, call in zip(found[offset:], calls, strict=False):
                    each[place] = call
        yield from found


def _find_offset(calls: Sequence[CollectiveCall], among: Sequence[CollectiveCall]) -> int | None:
    """Where one rank's calls stand among those of the rank that has most; None where they fit nowhere, or in several
    places. As many calls fit by their names alone: ranks may send different amounts."""
    if len(calls) == len(among):
        return 0 if [call.name for call in calls] == [call.name for call in among] else None
    mine, theirs = [(call.name, call.size) for call in calls], [(call.name, call.size) for call in among]
    fits = [at for at in range(len(theirs) - len(mine) + 1) if theirs[at : at + len(mine)] == mine]
    return fits[0] if len(fits) == 1 else None


@dataclass(frozen=True)
class ArrivalSpread:
    """How far apart ranks begin the same collectives: milliseconds a step (of the rank that takes part in most of it),
    and the most of one; how many were matched, and how many of them by number."""

    per_step_ms: float
    most_ms: float
    matched: int
    by_number: int


def measure_arrival(ranks: Sequence[Sequence[CollectiveCall]]) -> ArrivalSpread | None:
    """None where no collective is matched."""
    matched = match_collectives(ranks)
    if not matched:
        return None
    apart_ms = []
    waits: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # rank, step
    for found in matched:
        lengths = [call.length for call in found.values()]
        apart_ms.append((max(lengths) - min(lengths)) / 1e3)
        for place, call in found.items():
            waits[place][call.step] += apart_ms[-1]
    by_number = sum(all(call.sequence is not None for call in found.values()) for found in matched)
    per_step = max(float(np.mean(list(steps.values()))) for steps in waits.values())
    return ArrivalSpread(per_step, max(apart_ms), len(matched), by_number)
