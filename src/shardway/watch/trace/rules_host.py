"""Findings about time in which nothing computes: the data loader, the allocator, copies, waits of the host, launches,
and communication that nothing hides.

Invariant: idle time counts only where the device was idle, and communication only where nothing computed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from shardway.watch.advice.findings import Advice
from shardway.watch.trace import intervals
from shardway.watch.trace.columns import ANNOTATION, KERNEL, OP
from shardway.watch.trace.evidence import TraceEvidence
from shardway.watch.trace.timeline import NEAR_US, OPTIMIZER_STEP

# --- idle time


def find_data_loader(seen: TraceEvidence) -> Iterator[Advice]:
    """The step waits for its batch."""
    ms = seen.breakdown.idle_causes_ms["data_loader"]
    if not seen.is_worth(ms) or not seen.trusts_idle:
        return
    timeline = seen.timeline
    waits = intervals.clip(timeline.data_loading, *timeline.window)
    longest = float((waits[:, 1] - waits[:, 0]).max()) / 1e3 if len(waits) else 0.0
    yield seen.advise(
        "data-loader",
        f"{'the device is idle' if timeline.on_device else 'nothing computes'} for {ms:.2f} ms of a step of"
        f" {seen.step_ms:.2f} ms"
        f" while the loop is in the data loader's `__next__` ({len(waits) / len(timeline.kept):.3g} a step, the"
        f" longest {longest:.2f} ms)",
        "more workers, with batches ready ahead: `DataLoader(num_workers=8, prefetch_factor=4,"
        " persistent_workers=True)`, or"
        ' `data.workers = "auto"`; prepare once what each epoch decodes again',
        "trace again: `data_loader` under idle falls to nearly 0",
        ms,
    )


def find_allocator(seen: TraceEvidence) -> Iterator[Advice]:
    """Device memory is allocated and freed within steps."""
    timeline = seen.timeline
    rows = timeline.in_window(timeline.allocator_rows)
    if not timeline.on_device or not len(rows) or not seen.trusts_idle:
        return
    ms = seen.breakdown.idle_causes_ms["allocator"]
    if not seen.is_worth(ms):
        return
    calls = Counter(timeline.trace.names[timeline.trace.name[row]] for row in rows)
    yield seen.advise(
        "allocator",
        f"{', '.join(f'{count / len(timeline.kept):.3g} {name}' for name, count in calls.most_common(3))} in a step:"
        " the device is idle"
        f" for {ms:.2f} ms meanwhile",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and leave memory free (a smaller micro-batch): near"
        " its limit the"
        " caching allocator frees and allocates again in each step",
        "trace again: no cudaMalloc or cudaFree within steps",
        ms,
    )


def _pageable(seen: TraceEvidence) -> np.ndarray:
    """Places in `rows` of copies to or from pageable memory of the host that are not single numbers."""
    timeline, trace = seen.timeline, seen.timeline.trace
    big = (trace.bytes[timeline.rows] >= 4096) | (trace.duration[timeline.rows] >= 10.0)
    low, high = timeline.window
    start = trace.start[timeline.rows]
    return np.flatnonzero(timeline.is_pageable & big & (start >= low) & (start < high))


def find_pageable_copies(seen: TraceEvidence) -> Iterator[Advice]:
    """Copies of pageable memory, which neither overlap nor return before they end."""
    timeline, trace = seen.timeline, seen.timeline.trace
    places = _pageable(seen)
    if not len(places):
        return
    rows, calls = timeline.rows[places], timeline.launch[places]
    exposed = intervals.remove(timeline.times(rows), intervals.join(timeline.compute, timeline.communication))
    calls = calls[calls >= 0]
    waits = intervals.unite(trace.start[calls], trace.end[calls] + NEAR_US)
    idle = (
        sum(end - start for start, end, cause in timeline.gaps if cause == "sync" and _is_in(waits, start))
        if len(waits)
        else 0.0
    )
    during = (
        intervals.measure(intervals.intersect(intervals.clip(waits, *timeline.window), timeline.idle))
        if len(waits)
        else 0.0
    )
    ms = timeline.overlap_ms(exposed) + (timeline.per_step(max(idle, during)) if seen.trusts_idle else 0.0)
    if not seen.is_worth(ms):
        return
    row = int(rows[np.argmax(trace.duration[rows])])
    size, spent = trace.bytes[row], trace.duration[row]
    speed = f", {size / 1e6:.1f} MB at {size / spent / 1e3:.1f} GB/s" if size > 0 and spent > 0 else ""
    yield seen.advise(
        "pageable-copy",
        f"{len(rows) / len(timeline.kept):.3g} copies of pageable memory a step, such as {trace.names[trace.name[row]]}"
        f" ({spent / 1e3:.2f} ms{speed}); nothing else runs for {ms:.2f} ms of a step",
        "`DataLoader(pin_memory=True)` and `.to(device, non_blocking=True)`; tensors made on the host: make them on"
        " the device",
        "trace again: the copies read Pinned, beside kernels",
        ms,
    )


def _is_in(times: np.ndarray, at: float) -> bool:
    place = int(np.searchsorted(times[:, 0], at, side="right")) - 1
    return place >= 0 and at < times[place, 1]


_ASKING = re.compile(
    r"^aten::(item|_local_scalar_dense|nonzero|is_nonzero|equal|masked_select|unique\w*|_unique2|repeat_interleave)$"
)


def _askers(seen: TraceEvidence) -> Counter[str]:
    """Operators within steps that need a value of the device, without those within others, in optimizers or loaders."""
    timeline, trace = seen.timeline, seen.timeline.trace
    rows = timeline.in_window(timeline.named(_ASKING, OP))
    rows = rows[[trace.names[trace.name[row]] != "aten::_local_scalar_dense" for row in rows]] if len(rows) else rows
    hidden = intervals.join(timeline.data_loading, timeline.times(timeline.named(OPTIMIZER_STEP, ANNOTATION)))
    return Counter(
        trace.names[trace.name[row]] for row in rows if not (len(hidden) and _is_in(hidden, float(trace.start[row])))
    )


def _place_of(seen: TraceEvidence, names: Iterable[str]) -> str:
    timeline, wanted = seen.timeline, "|".join(map(re.escape, names))
    pattern = re.compile(rf"^({wanted})$" if wanted else "(?!)")
    rows = timeline.in_window(timeline.named(pattern, OP))
    place = timeline.find_place(int(rows[0])) if len(rows) else ""
    return f" ({place})" if place else ""


def find_host_syncs(seen: TraceEvidence) -> Iterator[Advice]:
    """The host waits for the device, which then waits for the host."""
    timeline, trace = seen.timeline, seen.timeline.trace
    asked = _askers(seen)
    per_step = {name: count / len(timeline.kept) for name, count in asked.items()}
    words = ", ".join(f"{count:.3g} {name}" for name, count in sorted(per_step.items(), key=lambda each: -each[1])[:3])
    do = (
        "keep values on the device (log every N steps; `torch.where` for `nonzero` and masks;"
        " `.to(non_blocking=True)`);"
        ' find the lines with `torch.cuda.set_sync_debug_mode("warn")`'
    )
    check = "trace again: no synchronising call within steps, and `sync` under idle falls"
    if not timeline.on_device:
        often = {name: count for name, count in per_step.items() if count >= 1}
        if often:
            rows = timeline.in_window(timeline.named(_ASKING, OP))
            ms = timeline.overlap_ms(timeline.times(rows))
            what = (
                f"{words} in a step{_place_of(seen, often)}: free on a CPU, on a GPU each waits for all that is queued"
            )
            yield seen.advise("host-sync", what, do, check, ms)
        return
    if not seen.trusts_idle:
        return
    waits = timeline.launch[_pageable(seen)]
    waits = intervals.unite(trace.start[waits[waits >= 0]], trace.end[waits[waits >= 0]] + NEAR_US)
    gaps = [each for each in timeline.gaps if each[2] == "sync" and not (len(waits) and _is_in(waits, each[0]))]
    ms = timeline.per_step(sum(end - start for start, end, _ in gaps))
    if not seen.is_worth(ms) or not gaps:
        return
    calls = Counter(trace.names[trace.name[row]] for row in timeline.in_window(timeline.sync_rows))
    called = ", ".join(f"{count / len(timeline.kept):.3g} {name}" for name, count in calls.most_common(3))
    longest = max(gaps, key=lambda gap: gap[1] - gap[0])
    yield seen.advise(
        "host-sync",
        f"{called or 'waits of the host'} in a step{f', from {words}' if words else ''}{_place_of(seen, per_step)}:"
        " after them the device is"
        f" idle for {ms:.2f} ms of a step, longest {(longest[1] - longest[0]) / 1e3:.2f} ms at"
        f" {longest[0] / 1e3:.2f} ms",
        do,
        check,
        ms,
    )


def find_launch_bound(seen: TraceEvidence) -> Iterator[Advice]:
    """The host launches more slowly than the device computes."""
    timeline, trace = seen.timeline, seen.timeline.trace
    if not timeline.on_device or not seen.trusts_idle:
        return
    ms = seen.breakdown.idle_causes_ms["host_bound"]
    kernels = timeline.in_window(timeline.rows[trace.category[timeline.rows] == KERNEL])
    if not seen.is_worth(ms) or len(kernels) < (1 if timeline.marks else 20):  # too few show no steady state
        return
    durations = trace.duration[kernels]
    count, median = len(kernels) / len(timeline.kept), float(np.median(durations))
    small = float((durations < 10).mean())
    gaps = [end - start for start, end, cause in timeline.gaps if cause == "host_bound"]
    start, end, _ = max(
        (each for each in timeline.gaps if each[2] == "host_bound"), key=lambda gap: gap[1] - gap[0], default=(0, 0, "")
    )
    evidence = (
        f"the device waits for a launch {len(gaps) / len(timeline.kept):.3g} times a step, {ms:.2f} ms of"
        f" {seen.step_ms:.2f} ms;"
        f" {count:.3g} kernels a step, median {median:.1f} us, {100 * small:.0f} % below 10 us;"
        f" longest gap {(end - start) / 1e3:.2f} ms at {start / 1e3:.2f} ms"
    )
    few = len(gaps) <= 5 * len(timeline.kept)
    if few and small < 0.5:
        do = (
            "look what the loop does in that gap (logging, metrics, the next batch, a save) and move it off the"
            " training thread"
        )
    else:
        do = (
            'fewer, larger launches: `torch.compile` (`train.compile`), CUDA graphs (`mode="reduce-overhead"`),'
            " a larger micro-batch"
        )
    yield seen.advise("launch-bound", evidence, do, "trace again: `host_bound` under idle falls, as does the step", ms)


# --- communication


def find_exposed_communication(seen: TraceEvidence) -> Iterator[Advice]:
    """Communication that no computing hides."""
    timeline, trace, ms = seen.timeline, seen.timeline.trace, seen.breakdown.comm_exposed_ms
    if not seen.is_worth(ms):
        return
    hidden = 100 * (1 - ms / max(seen.breakdown.comm_ms, 1e-9))
    rows = timeline.in_window(timeline.rows[timeline.is_communication])
    worst = ""
    if len(rows):
        row = int(rows[np.argmax(trace.duration[rows])])
        worst = (
            f"; longest {trace.names[trace.name[row]][:60]}, {trace.duration[row] / 1e3:.2f} ms at"
            f" {trace.start[row] / 1e3:.2f} ms"
        )
    yield seen.advise(
        "exposed-communication",
        f"communication takes {seen.breakdown.comm_ms:.2f} ms of a step, {hidden:.0f} % of it behind computing:"
        f" {ms:.2f} ms are exposed{worst}",
        "overlap it: DDP with its buckets (`bucket_cap_mb`, no `find_unused_parameters`), FSDP with prefetch; send"
        " less often (more"
        " micro-batches a step, `no_sync`), or in bf16; if a rank is late this is waiting: give the traces of all"
        " ranks",
        "trace again: exposed communication falls while all of it stays",
        ms,
    )
