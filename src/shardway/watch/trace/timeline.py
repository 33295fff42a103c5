"""Where the time of a step goes: computing, communication that nothing hides, copies, and idle time with its cause.

Invariants:
- Times are measures of sets, clipped to the steps that are kept: what runs side by side counts once, computing before
  communication before copies; the four parts add up to the step.
- A step of a device begins with the first event that was launched in the host's step, so that work which the host
  queued ahead counts for the step that it belongs to.
- The cause of a gap is what the host did in it; where no launch ends the gap the cause is "unknown".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from shardway.watch.trace import intervals
from shardway.watch.trace.columns import (
    ANNOTATION,
    GPU_ANNOTATION,
    KERNEL,
    MEMCPY,
    MEMSET,
    OP,
    OVERHEAD,
    PYTHON,
    RUNTIME,
    Trace,
)
from shardway.watch.trace.kernels import COMMUNICATION

_STEP = re.compile(r"ProfilerStep#(\d+)")
OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")
_DATA = re.compile(
    r"enumerate\(DataLoader\)|dataloader_next|DataLoader.*__next__|get_next_batch|dataloader\.py\(\d+\): __next__"
)
_SYNC = re.compile(r"Synchronize|^(cuda|hip)Memcpy$|MemcpyWithStream|^(cuda|hip)Memcpy(DtoH|HtoD|2D)$")
_ALLOCATOR = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|FreeHost|MallocHost|HostFree|MallocManaged)$|^cuMem(Create|Map|Unmap|Release)"
)
_LAUNCH = re.compile(r"Launch|Memcpy|Memset|cuLaunch", re.ASCII)
CPU_COMMUNICATION = re.compile(r"^(gloo|mpi|ucc|nccl):|^c10d::|record_param_comms")

NEAR_US = 20.0
"""A wait that ends so shortly before a gap has emptied the device's queue."""

CAUSES = ("host_bound", "sync", "data_loader", "allocator", "profiler", "unknown")


@dataclass(frozen=True)
class Step:
    """One step on the device (of the host, for a trace without device events), in microseconds."""

    number: int | None
    low: float
    high: float
    host_low: float
    host_high: float
    """The step on the host, which may run ahead of the device."""

    @property
    def ms(self) -> float:
        return (self.high - self.low) / 1e3


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of a step. `idle_causes_ms` adds up to `idle_ms`."""

    compute_ms: float
    comm_exposed_ms: float
    copy_ms: float
    idle_ms: float
    comm_ms: float
    """All of communication, hidden or not."""
    idle_causes_ms: dict[str, float]

    def list_parts(self) -> dict[str, float]:
        """The four parts that add up to the step."""
        return {
            "compute_ms": round(self.compute_ms, 4),
            "comm_exposed_ms": round(self.comm_exposed_ms, 4),
            "copy_ms": round(self.copy_ms, 4),
            "idle_ms": round(self.idle_ms, 4),
        }


def average_breakdowns(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """The mean of each part."""
    return Breakdown(
        compute_ms=float(np.mean([each.compute_ms for each in breakdowns])),
        comm_exposed_ms=float(np.mean([each.comm_exposed_ms for each in breakdowns])),
        copy_ms=float(np.mean([each.copy_ms for each in breakdowns])),
        idle_ms=float(np.mean([each.idle_ms for each in breakdowns])),
        comm_ms=float(np.mean([each.comm_ms for each in breakdowns])),
        idle_causes_ms={cause: float(np.mean([each.idle_causes_ms[cause] for each in breakdowns])) for cause in CAUSES},
    )


@dataclass
class Timeline:
    """A trace with its steps, its device, and what links the events of both sides.

    `rows`: the device events that are looked at, in the order of their start. `launch` and `op`: for each of them, the
    row of the call that launched it and of the innermost operator around that call; -1 where there is none.
    """

    trace: Trace
    rows: np.ndarray
    launch: np.ndarray
    op: np.ndarray
    steps: list[Step]
    kept: list[Step]
    marks: str
    """What the steps were found by: "ProfilerStep", "Optimizer.step" or "", where the capture counts as one step."""
    devices: list[int]
    device: int | None
    overlong: int = 0
    """Device events left out because they cover many others of their own stream."""
    overlong_sample: str = ""
    step_processes: int = 1
    zero_steps: int = 0
    empty_steps: int = 0
    parents: dict[int, int] = field(default_factory=dict)

    @property
    def on_device(self) -> bool:
        return len(self.rows) > 0

    @property
    def window(self) -> tuple[float, float]:
        return self.kept[0].low, self.kept[-1].high

    @property
    def window_ms(self) -> float:
        return sum(step.ms for step in self.kept)

    @property
    def step_ms(self) -> float:
        return self.window_ms / len(self.kept)

    def per_step(self, microseconds: float) -> float:
        """Milliseconds a step, of what the kept steps have together."""
        return microseconds / 1e3 / len(self.kept)

    def named(self, pattern: re.Pattern[str], *categories: int) -> np.ndarray:
        """The rows of these categories whose name matches."""
        return find_named(self.trace, pattern, *categories)

    def in_window(self, rows: np.ndarray) -> np.ndarray:
        """Those that begin within the kept steps: of the device for its events, of the host for others."""
        low, high = self.window
        start, last = self.trace.start[rows], self.kept[-1]
        of_device = np.isin(self.trace.category[rows], (KERNEL, MEMCPY, MEMSET))
        low_of = np.where(of_device, low, self.kept[0].host_low)
        high_of = np.where(of_device, high, last.host_high)
        return np.asarray(rows[(start >= low_of) & (start < high_of)])

    def times(self, rows: np.ndarray) -> np.ndarray:
        """The union of these events."""
        return intervals.unite(self.trace.start[rows], self.trace.end[rows])

    def overlap_ms(self, times: np.ndarray) -> float:
        """How much of a set of time lies in a step, on average."""
        low, high = self.window
        return self.per_step(intervals.measure(intervals.clip(times, low, high)))

    @cached_property
    def is_communication(self) -> np.ndarray:
        """For each row of `rows`."""
        hits = np.array([bool(COMMUNICATION.search(name)) for name in self.trace.names], dtype=bool)
        return (self.trace.category[self.rows] == KERNEL) & hits[self.trace.name[self.rows]]

    @cached_property
    def is_optimizer(self) -> np.ndarray:
        """For each row of `rows`: whether an optimizer's step launched it."""
        spans = self.times(self.named(OPTIMIZER_STEP, ANNOTATION))
        launched = np.where(self.launch >= 0, self.trace.start[self.launch], -1.0)
        return np.asarray(intervals.measure_within(spans, launched, launched + 0.01) > 0.005)

    @cached_property
    def is_copy(self) -> np.ndarray:
        return np.isin(self.trace.category[self.rows], (MEMCPY, MEMSET))

    @cached_property
    def is_pageable(self) -> np.ndarray:
        """For each row of `rows`: whether it copies to or from pageable memory of the host."""
        names = np.array(["Pageable" in name for name in self.trace.names], dtype=bool)
        return np.asarray((self.trace.category[self.rows] == MEMCPY) & names[self.trace.name[self.rows]])

    @cached_property
    def own_work(self) -> np.ndarray:
        """Computing and copies, without communication."""
        return self.times(self.rows[~self.is_communication]) if self.on_device else self.compute

    @cached_property
    def compute(self) -> np.ndarray:
        if self.on_device:
            return self.times(self.rows[~self.is_communication & ~self.is_copy])
        ops = self.times(self.host_ops)
        return intervals.remove(ops, self.data_loading)

    @cached_property
    def host_ops(self) -> np.ndarray:
        """Operators of a trace without a device, but for those of collectives."""
        wrong = self.named(CPU_COMMUNICATION, OP)
        return np.setdiff1d(self.trace.of(OP), wrong)

    @cached_property
    def communication(self) -> np.ndarray:
        if self.on_device:
            return self.times(self.rows[self.is_communication])
        return self.times(self.named(CPU_COMMUNICATION, ANNOTATION, OP))

    @cached_property
    def copies(self) -> np.ndarray:
        return self.times(self.rows[self.is_copy])

    @cached_property
    def busy(self) -> np.ndarray:
        return intervals.join(self.compute, self.communication, self.copies)

    @cached_property
    def idle(self) -> np.ndarray:
        return intervals.invert(self.busy, *self.window)

    @cached_property
    def data_loading(self) -> np.ndarray:
        rows = self.named(_DATA, ANNOTATION, OP)
        return self.times(rows if len(rows) else self.named(_DATA, PYTHON))

    @cached_property
    def sync_rows(self) -> np.ndarray:
        """Calls in which the host waited for the device: those that say so, and copies of pageable memory."""
        rows = self.named(_SYNC, RUNTIME)
        if not self.on_device:
            return rows
        return np.union1d(rows, self.launch[self.is_pageable & (self.launch >= 0)])

    @cached_property
    def allocator_rows(self) -> np.ndarray:
        return self.named(_ALLOCATOR, RUNTIME)

    @cached_property
    def gaps(self) -> list[tuple[float, float, str]]:
        """Each gap of the device in the kept steps: start, end and main cause."""
        start, end, shares = self._attribute
        causes = (
            np.array(CAUSES)[np.argmax(np.column_stack([shares[each] for each in CAUSES]), axis=1)]
            if len(start)
            else []
        )
        return list(zip(start.tolist(), end.tolist(), [str(each) for each in causes], strict=True))

    @cached_property
    def _attribute(self) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Starts and ends of the gaps, and how much of each has which cause."""
        start, end = self.idle[:, 0], self.idle[:, 1]
        length = end - start
        data = intervals.measure_within(self.data_loading, start, end)
        taken = self.data_loading
        shares = {"data_loader": data}
        for cause, rows in (("allocator", self.allocator_rows), ("profiler", self.trace.of(OVERHEAD))):
            times = intervals.remove(self.times(rows), taken)
            shares[cause] = intervals.measure_within(times, start, end)
            taken = intervals.join(taken, times)
        rest = np.maximum(length - sum(shares.values()), 0.0)
        if not self.on_device:
            return start, end, shares | {"host_bound": rest, "sync": 0 * rest, "unknown": 0 * rest}
        waits = self.trace.start[self.sync_rows], self.trace.end[self.sync_rows]
        order = np.argsort(waits[1], kind="stable")
        wait_start, wait_end = waits[0][order], waits[1][order]
        at = np.searchsorted(wait_end, start - NEAR_US)
        after_wait = np.zeros(len(start), dtype=bool)
        some = at < len(wait_end)
        after_wait[some] = (wait_start[at[some]] <= start[some]) & (wait_end[at[some]] <= end[some] + NEAR_US)
        following = np.searchsorted(self.trace.start[self.rows], end - 0.5)
        launched = np.full(len(start), np.nan)
        some = following < len(self.rows)
        call = self.launch[following[some]]
        launched[some] = np.where(call >= 0, self.trace.start[call], np.nan)
        is_late = np.nan_to_num(launched, nan=-np.inf) >= start
        zero = np.zeros(len(start))
        return (
            start,
            end,
            shares
            | {
                "sync": np.where(after_wait, rest, zero),
                "host_bound": np.where(~after_wait & is_late, rest, zero),
                "unknown": np.where(~after_wait & ~is_late, rest, zero),
            },
        )

    def break_down(self) -> Breakdown:
        """An average step of those kept."""
        exposed = intervals.remove(self.communication, self.compute)
        copies = intervals.remove(self.copies, intervals.join(self.compute, self.communication))
        shares = self._attribute[2]
        return Breakdown(
            self.overlap_ms(self.compute),
            self.overlap_ms(exposed),
            self.overlap_ms(copies),
            self.overlap_ms(self.idle),
            self.overlap_ms(self.communication),
            {cause: self.per_step(float(shares[cause].sum())) for cause in CAUSES},
        )

    def measure_capture(self) -> dict[str, float]:
        """The capture from its first device event to its last, in milliseconds: all marked steps, or the whole file
        where there are fewer than two. What was queued before the first step or after the last belongs to neither."""
        whole = self.marks != "ProfilerStep" or len(self.steps) < 2
        low, high = (-np.inf, np.inf) if whole else (self.steps[0].low, self.steps[-1].high)
        busy, compute = intervals.clip(self.busy, low, high), intervals.clip(self.compute, low, high)
        span = float(busy[-1, 1] - busy[0, 0]) if len(busy) else 0.0
        busy_us = intervals.measure(busy)
        found = {
            "span_ms": span,
            "busy_ms": busy_us,
            "compute_ms": intervals.measure(compute),
            "idle_ms": span - busy_us,
        }
        return {name: value / 1e3 for name, value in found.items()}

    def find_place(self, row: int) -> str:
        """The Python function around an event of the host, as "file.py(12): name"; "" where no stacks were recorded."""
        trace = self.trace
        at, thread = trace.start[row], trace.thread[row]
        around = (trace.category == PYTHON) & (trace.thread == thread) & (trace.start <= at) & (trace.end >= at)
        for each in np.flatnonzero(around)[::-1]:
            name = trace.names[trace.name[each]]
            if ".py(" in name and not re.match(r"(?:.*/)?torch/|<", name):
                return name
        return ""


def find_named(trace: Trace, pattern: re.Pattern[str], *categories: int) -> np.ndarray:
    """The rows of these categories whose name matches."""
    hits = np.array([bool(pattern.search(name)) for name in trace.names], dtype=bool)
    if not len(hits):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(hits[trace.name] & np.isin(trace.category, categories))


# --- links


def find_parents(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """For each of these rows, the place in `rows` of the innermost one around it on its thread; -1 if there is none.
    `rows` in the order of their start."""
    parents = np.full(len(rows), -1, dtype=np.int64)
    if not len(rows):
        return parents
    lane = trace.process[rows].astype(np.int64) << 32 | trace.thread[rows]
    start, end = trace.start[rows], trace.end[rows]
    for each in np.unique(lane):
        places = np.flatnonzero(lane == each)
        places = places[np.lexsort((-end[places], start[places]))]
        open_places: list[int] = []
        open_ends: list[float] = []
        starts, ends = start[places].tolist(), end[places].tolist()
        for place, begins, finishes in zip(places.tolist(), starts, ends, strict=True):
            while open_ends and open_ends[-1] < finishes - 1e-3:
                open_ends.pop()
                open_places.pop()
            while open_ends and open_ends[-1] <= begins and open_ends[-1] < finishes:
                open_ends.pop()
                open_places.pop()
            if open_places:
                parents[place] = open_places[-1]
            open_places.append(place)
            open_ends.append(finishes)
    return parents


def find_around(trace: Trace, rows: np.ndarray, parents: np.ndarray, calls: np.ndarray) -> np.ndarray:
    """The row, of `rows`, of the innermost event around each call on its thread; -1 if there is none."""
    found = np.full(len(calls), -1, dtype=np.int64)
    lane = trace.process[rows].astype(np.int64) << 32 | trace.thread[rows]
    call_lane = trace.process[calls].astype(np.int64) << 32 | trace.thread[calls]
    for each in np.unique(call_lane):
        places = np.flatnonzero(lane == each)
        if not len(places):
            continue
        mine = np.flatnonzero(call_lane == each)
        at = trace.start[calls[mine]]
        last = np.searchsorted(trace.start[rows[places]], at, side="right") - 1
        place = np.where(last >= 0, places[last], -1)
        while True:
            outside = (place >= 0) & (trace.end[rows[place]] <= at)
            if not outside.any():
                break
            place = np.where(outside, parents[place], place)
        found[mine] = np.where(place >= 0, rows[place], -1)
    return found


def _match(keys: np.ndarray, table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each key the value at its first place in the table; -1 for keys below 0 or absent."""
    if not len(table):
        return np.full(len(keys), -1, dtype=np.int64)
    order = np.argsort(table, kind="stable")
    at = np.minimum(np.searchsorted(table, keys, sorter=order), len(table) - 1)
    hit = (table[order[at]] == keys) & (keys >= 0)
    return np.where(hit, values[order[at]], -1)


def _link(trace: Trace, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The launching call and the operator of each device event."""
    calls, ops = trace.of(RUNTIME), trace.of(OP)
    by_correlation = bool((trace.correlation[rows] >= 0).any())
    if by_correlation:
        launch = _match(trace.correlation[rows], trace.correlation[calls], calls)
    else:  # releases of ROCm before 6 and some other writers have one number for both
        launches = calls[np.isin(calls, find_named(trace, _LAUNCH, RUNTIME))]
        launch = _match(trace.external[rows], trace.external[launches], launches)
    op = np.full(len(rows), -1, dtype=np.int64)
    if by_correlation:
        op = _match(trace.external[rows], trace.external[ops], ops)
        through = _match(np.where(launch >= 0, trace.external[launch], -1), trace.external[ops], ops)
        op = np.where(op >= 0, op, through)
    missing = np.flatnonzero((op < 0) & (launch >= 0))
    if len(missing) and len(ops):
        op[missing] = find_around(trace, ops, find_parents(trace, ops), launch[missing])
    return launch, op


# --- device, steps


def build_timeline(trace: Trace) -> Timeline:
    """Choose the device, link its events, find the steps. A capture without steps counts as one."""
    rows = trace.of(KERNEL, MEMCPY, MEMSET)
    device_of = np.where(trace.device[rows] >= 0, trace.device[rows], 10_000 + trace.process[rows])
    devices = np.unique(device_of).tolist()
    device = None
    if devices:
        totals = [float(trace.duration[rows[device_of == each]].sum()) for each in devices]
        device = int(devices[int(np.argmax(totals))])
        rows = rows[device_of == device]
    rows, overlong = _drop_overlong(trace, rows)
    launch, op = _link(trace, rows)
    timeline = Timeline(
        trace, rows, launch, op, [], [], "", devices, device if device is None or device < 10_000 else 0
    )
    timeline.overlong = len(overlong)
    if len(overlong):
        first = int(overlong[0])
        timeline.overlong_sample = f"{trace.names[trace.name[first]][:60]}, {trace.duration[first] / 1e3:,.1f} ms"
    _find_steps(timeline)
    return timeline


_MANY_COVERED = 16


def _drop_overlong(trace: Trace, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A stream does one thing at a time (and begins the next early): an event that covers many later ones is none."""
    wrong = []
    for stream in np.unique(trace.stream[rows]):
        mine = rows[trace.stream[rows] == stream]
        if stream < 0 or len(mine) < _MANY_COVERED:
            continue
        covered = np.searchsorted(trace.start[mine], trace.end[mine], side="left") - np.arange(len(mine)) - 1
        suspects = mine[covered >= _MANY_COVERED]
        if len(suspects) <= max(1, len(mine) // 100):  # not where a stream's number stands for several
            wrong.append(suspects)
    bad = np.concatenate(wrong) if wrong else np.empty(0, dtype=np.int64)
    return np.setdiff1d(rows, bad), bad


def _find_steps(timeline: Timeline) -> None:
    """Fill in the steps: those of `prof.step()`, else from one optimizer step to the next, else the whole capture."""
    trace = timeline.trace
    marks, numbers, edges = _find_marks(timeline)
    whole = marks == "ProfilerStep"
    steps = []
    if marks:
        placed = _place_on_device(timeline, edges, whole=whole) if timeline.on_device else edges
        spans = list(zip(numbers, pairwise(placed), pairwise(edges), strict=False))
        steps = [Step(number, *on_device, *on_host) for number, on_device, on_host in spans if _is_long(*on_device)]
        timeline.zero_steps = len(spans) - len(steps)
    if not steps:
        low, high = _span(trace, timeline.rows)
        high = max(high, low + 1e-3)
        host = trace.of(OP, RUNTIME) if not marks else ()
        steps, marks = [Step(None, low, high, min([low, *trace.start[host][:1]]), high)], ""
    timeline.steps, timeline.marks = steps, marks
    timeline.kept = steps[1:-1] if marks == "ProfilerStep" and len(steps) >= 3 else steps
    _count_empty(timeline)


def _is_long(low: float, high: float) -> bool:
    return high - low > 1.0


def _find_marks(timeline: Timeline) -> tuple[str, list[int | None], list[float]]:
    """What marks the steps, their numbers, and the edges between them on the host, one more than there are steps."""
    trace = timeline.trace
    marks = find_named(trace, _STEP, ANNOTATION)
    if len(marks):
        timeline.step_processes = len(np.unique(trace.process[marks]))
        marks = marks[trace.process[marks] == trace.process[marks[0]]]
        numbers = [int(found[1]) for row in marks if (found := _STEP.search(trace.names[trace.name[row]]))]
        return "ProfilerStep", list(numbers), [*trace.start[marks].tolist(), float(trace.end[marks].max())]
    marks = find_named(trace, OPTIMIZER_STEP, ANNOTATION)
    if len(marks) >= 2:
        return "Optimizer.step", [None] * (len(marks) - 1), trace.end[marks].tolist()
    return "", [], []


def _count_empty(timeline: Timeline) -> None:
    """Steps without work."""
    trace = timeline.trace
    starts = np.array([step.low for step in timeline.kept])
    ends = np.array([step.high for step in timeline.kept])
    if timeline.on_device:
        timeline.empty_steps = int((intervals.measure_within(timeline.busy, starts, ends) <= 0).sum())
    elif len(trace.of(OP)):
        timeline.empty_steps = int((intervals.measure_within(timeline.times(trace.of(OP)), starts, ends) <= 0).sum())


def _span(trace: Trace, rows: np.ndarray) -> tuple[float, float]:
    """From the first to the last event that counts."""
    some = trace.of(KERNEL, MEMCPY, MEMSET, OP, RUNTIME)
    some = some if len(some) else np.arange(len(trace.start))
    if not len(some):
        return 0.0, 0.0
    if len(rows):
        some = rows
    return float(trace.start[some].min()), float(trace.end[some].max())


def _place_on_device(timeline: Timeline, edges: list[float], *, whole: bool) -> list[float]:
    """Edges of the host's steps as times of the device: the start of the first event launched after each. The host's
    own where a step launched nothing or no event is linked."""
    trace, rows = timeline.trace, timeline.rows
    linked = timeline.launch >= 0
    marks = find_named(trace, _STEP, GPU_ANNOTATION)
    if not linked.any():
        if whole and len(marks) == len(edges) - 1:
            return [*trace.start[marks].tolist(), float(trace.end[rows].max())]
        return edges
    launched = trace.start[timeline.launch[linked]]
    order = np.argsort(launched, kind="stable")
    launched, started = launched[order], trace.start[rows[linked]][order]
    earliest = np.minimum.accumulate(started[::-1])[::-1]  # of those launched from here on
    at = np.searchsorted(launched, edges)
    last = float(max(edges[-1], trace.end[rows].max()))
    placed = [float(earliest[each]) if each < len(earliest) else last for each in at]
    counts = np.diff(at)
    if whole:
        placed[-1] = max(edges[-1], float(trace.end[rows[linked]][order][: at[-1]].max(initial=edges[-1])))
        if len(edges) == 2:
            placed[0] = min(edges[0], placed[0])
    if (counts <= 0).any() or any(high <= low for low, high in pairwise(placed)):
        return [*edges[:-1], placed[-1]] if whole else edges
    return placed
