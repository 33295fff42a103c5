"""The parts of training that a step repeats: the optimizer's update, and forward work that backward does again.

Invariant: what is described here is described once, for the facts of a trace and for its advice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from shardway.watch.advice.findings import Advice
from shardway.watch.trace import intervals
from shardway.watch.trace.columns import ANNOTATION, OP
from shardway.watch.trace.evidence import PROBLEM, TraceEvidence
from shardway.watch.trace.timeline import OPTIMIZER_STEP, Timeline, find_around, find_parents


def describe_optimizer(timeline: Timeline) -> dict[str, float | str] | None:
    """How the optimizer's step is implemented, its time and its kernels (operators on a CPU); None without one."""
    trace = timeline.trace
    spans = timeline.in_window(timeline.named(OPTIMIZER_STEP, ANNOTATION))
    if not len(spans):
        return None
    span = timeline.times(spans)
    ops = timeline.in_window(trace.of(OP))
    inside = ops[intervals.measure_within(span, trace.start[ops], trace.start[ops] + 0.01) > 0.005] if len(ops) else ops
    names = Counter(trace.names[trace.name[row]] for row in inside)
    count = sum(names.values())
    if any("_fused_" in name for name in names):
        kind = "fused"
    elif any("_foreach_" in name for name in names):
        kind = "foreach"
    else:
        kind = "single"
    if timeline.on_device:
        launched = np.where(timeline.launch >= 0, trace.start[timeline.launch], -1.0)
        mine = timeline.rows[intervals.measure_within(span, launched, launched + 0.01) > 0.005]
        mine = timeline.in_window(mine)
        kernels, busy = len(mine), timeline.times(mine)
        if kind == "single" and any("multi_tensor" in trace.names[trace.name[row]] for row in mine[:50]):
            kind = "foreach"
        wall = intervals.unite(
            *_bounds(trace.start[mine], trace.end[mine], span, launched[np.isin(timeline.rows, mine)])
        )
        ms, busy_ms = timeline.overlap_ms(wall), timeline.overlap_ms(busy)
    else:
        kernels, ms = count, timeline.overlap_ms(span)
        busy_ms = ms
    steps = len(timeline.kept)
    return {
        "kind": kind,
        "ms": round(ms, 4),
        "busy_ms": round(busy_ms, 4),
        "kernels": kernels / steps,
        "steps": len(spans) / steps,
    }


def _bounds(
    start: np.ndarray, end: np.ndarray, span: np.ndarray, launched: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """From the first to the last device event of each span of the host."""
    lows, highs = [], []
    for low, high in span:
        here = (launched >= low) & (launched <= high)
        if here.any():
            lows.append(start[here].min())
            highs.append(end[here].max())
    return np.array(lows), np.array(highs)


def find_unfused_optimizer(seen: TraceEvidence) -> Iterator[Advice]:
    """An optimizer that goes through its tensors one by one."""
    found = describe_optimizer(seen.timeline)
    if not found or found["kind"] == "fused":
        return
    ms, kernels, steps = float(found["ms"]), float(found["kernels"]), max(float(found["steps"]), 1e-9)
    few = kernels / steps < (50 if found["kind"] == "single" else 4)
    if few or not seen.is_worth(ms):
        return
    name = next((each for each in seen.timeline.trace.names if OPTIMIZER_STEP.search(each)), "")
    if found["kind"] == "foreach" and ms < PROBLEM * seen.step_ms:
        return
    unit = "kernels" if seen.timeline.on_device else "operators"
    yield seen.advise(
        "optimizer",
        f"{name} takes {ms:.2f} ms of a step in {kernels / steps:.0f} {unit} ({found['kind']}); a fused one reads"
        " and writes each tensor once",
        "`torch.optim.AdamW(..., fused=True)` (`optimizer.fused`); without it at least `foreach=True`",
        f"trace again: _fused_ operators in {name}, and a shorter step",
        ms,
    )


_BACKWARD_SPAN = re.compile(r"^autograd::engine::evaluate_function")
_FORWARD_ONLY = re.compile(
    r"^aten::(linear|conv[123]d|scaled_dot_product_attention|layer_norm|rms_norm|batch_norm|gelu|silu|relu|embedding|dropout|softmax|native_layer_norm)$"
)


def measure_recompute(timeline: Timeline) -> float | None:
    """Milliseconds of a step in forward operators that run again within backward; None where no operators are known."""
    trace = timeline.trace
    again = timeline.in_window(timeline.named(_FORWARD_ONLY, OP))
    spans = timeline.named(_BACKWARD_SPAN, OP)
    if not len(again) or not len(spans):
        return None if not len(timeline.trace.of(OP)) else 0.0
    around = find_around(trace, spans, find_parents(trace, spans), again)
    again = again[around >= 0]
    if not len(again):
        return 0.0
    if not timeline.on_device:
        return timeline.overlap_ms(timeline.times(again))
    call = timeline.launch
    inside = find_around(trace, again, find_parents(trace, again), np.where(call >= 0, call, 0))
    return timeline.overlap_ms(timeline.times(timeline.rows[(inside >= 0) & (call >= 0)]))


def find_recompute(seen: TraceEvidence) -> Iterator[Advice]:
    """Forward work that backward does again."""
    ms = measure_recompute(seen.timeline)
    if ms is None or ms < 0.05 * seen.step_ms:
        return
    yield seen.advise(
        "recompute",
        f"{ms:.2f} ms of a step are forward operators that run again within backward (activation checkpointing)",
        'if memory is free, recompute less: `recompute.mode = "selective"` or "off", or every second block',
        "trace again: the step is shorter; look at the peak of memory",
        ms,
    )
