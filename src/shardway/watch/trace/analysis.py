"""A trace from the file to what is known of it; several ranks side by side; two traces against each other.

Invariants: the capture is judged before any advice is given; the values of `as_json` are stable names, and additions
keep them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardway.errors import UserError, list_some
from shardway.hardware.catalogue import Accelerator, find_accelerator, load_accelerators
from shardway.watch.advice.findings import Advice
from shardway.watch.trace.collectives import CollectiveCall, list_collectives, measure_arrival
from shardway.watch.trace.columns import Trace
from shardway.watch.trace.operators import Operator, list_operators
from shardway.watch.trace.quality import CaptureFault, judge_capture, sort_faults
from shardway.watch.trace.reader import read_trace
from shardway.watch.trace.rules import advise_on_trace
from shardway.watch.trace.rules_training import describe_optimizer, measure_recompute
from shardway.watch.trace.timeline import Breakdown, Timeline, average_breakdowns, build_timeline

MOST_OPERATORS = 40  # of a report in JSON


@dataclass(frozen=True)
class TraceAnalysis:
    """What is known of one trace; times are those of an average step of those kept."""

    path: str
    rank: int | None
    gpu: str
    part: str | None
    steps: int
    steps_seen: int
    marks: str
    step_ms: float
    step_ms_each: tuple[float, ...]
    breakdown: Breakdown
    capture: dict[str, float]
    operators: tuple[Operator, ...]
    kernels: float
    optimizer: dict[str, Any] | None
    attention: tuple[str, ...]
    recompute_ms: float | None
    matrix_units: float | None
    """The share of the time of products that was computed on matrix units."""
    quality: tuple[CaptureFault, ...]
    advice: tuple[Advice, ...]
    collectives: tuple[CollectiveCall, ...] = ()
    busy_ms: float = 0.0
    """Computing and copies, without communication: what a rank itself needs for a step."""

    @property
    def name(self) -> str:
        """What it is called among others."""
        return Path(self.path).name if self.rank is None else f"rank {self.rank}"

    @property
    def on_device(self) -> bool:
        return self.kernels > 0

    def as_json(self) -> dict[str, Any]:
        return {
            "file": self.path,
            "rank": self.rank,
            "gpu": self.gpu or None,
            "accelerator": self.part,
            "steps": self.steps,
            "steps_seen": self.steps_seen,
            "step_marks": self.marks or None,
            "step_ms": round(self.step_ms, 4),
            "step_ms_each": [round(each, 4) for each in self.step_ms_each],
            "breakdown": self.breakdown.list_parts(),
            "comm_ms": round(self.breakdown.comm_ms, 4),
            "idle_causes_ms": {cause: round(ms, 4) for cause, ms in self.breakdown.idle_causes_ms.items()},
            "capture": {name: round(ms, 4) for name, ms in self.capture.items()},
            "quality": [fault.as_json() for fault in self.quality],
            "advice": [advice.as_json() for advice in self.advice],
            "operators": [_operator_as_json(each) for each in self.operators[:MOST_OPERATORS]],
            "kernels_per_step": round(self.kernels, 2),
            "optimizer": self.optimizer,
            "attention": list(self.attention),
            "recompute_ms": None if self.recompute_ms is None else round(self.recompute_ms, 4),
            "tensor_core_share": None if self.matrix_units is None else round(self.matrix_units, 4),
        }


def _operator_as_json(operator: Operator) -> dict[str, Any]:
    def short(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    return {
        "name": operator.name,
        "kind": operator.kind,
        "shapes": operator.render_shapes(),
        "dtype": operator.dtype or None,
        "calls": short(operator.calls),
        "ms": short(operator.ms),
        "tflops": short(operator.tflops),
        "tb_per_s": short(operator.tbps),
        "flop_share": short(operator.flop_share),
        "byte_share": short(operator.byte_share),
        "tensor_cores": short(operator.matrix_units),
        "kernel": operator.top_kernel or None,
    }


def analyse_trace(path: Path, gpu: str | None = None) -> TraceAnalysis:
    """One trace. `gpu`: a key of the catalogue where the trace does not name its device. Raises UserError where the
    file is no trace or the key is not known."""
    chosen = _find_key(gpu)
    trace = read_trace(path)
    timeline = build_timeline(trace)
    name, processors = _find_device(trace, timeline)
    part = chosen or (find_accelerator(name) if name else None)
    faults = judge_capture(timeline, part, name)
    breakdown = timeline.break_down()
    operators = list_operators(timeline, part)
    processors = processors or (part.multiprocessors if part else None)
    advice = advise_on_trace(timeline, breakdown, operators, part, processors, faults)
    return TraceAnalysis(
        path=str(path),
        rank=_find_rank(trace),
        gpu=name,
        part=part.key if part else None,
        steps=len(timeline.kept),
        steps_seen=len(timeline.steps),
        marks=timeline.marks,
        step_ms=timeline.step_ms,
        step_ms_each=tuple(step.ms for step in timeline.kept),
        breakdown=breakdown,
        capture=timeline.measure_capture(),
        operators=tuple(operators),
        kernels=len(timeline.in_window(timeline.rows)) / len(timeline.kept),
        optimizer=describe_optimizer(timeline),
        attention=_list_attention(operators),
        recompute_ms=measure_recompute(timeline),
        matrix_units=_share_of_matrix_units(operators),
        quality=tuple(faults),
        advice=tuple(advice),
        collectives=list_collectives(timeline),
        busy_ms=timeline.overlap_ms(timeline.own_work),
    )


def _find_key(gpu: str | None) -> Accelerator | None:
    """A part by its key in the catalogue, or by the driver's name for it."""
    if gpu is None:
        return None
    known = load_accelerators()
    part = known.get(gpu.lower()) or find_accelerator(gpu)
    if part is not None:
        return part
    near = [key for key in known if gpu.lower() in key] or difflib.get_close_matches(gpu.lower(), list(known), n=3)
    remedy = f"did you mean {', '.join(near)}?" if near else "name one, or leave it out."
    raise UserError(f'there is no GPU "{gpu}" (--gpu).\n  Allowed: {", ".join(known)}.\n  To do: {remedy}')


def _find_device(trace: Trace, timeline: Timeline) -> tuple[str, int | None]:
    """The device's name as the trace has it, and its multiprocessors."""
    listed = trace.properties.get("deviceProperties")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    mine = next((row for row in rows if row.get("id") == timeline.device), rows[0] if rows else {})
    count = mine.get("numSms")
    return str(mine.get("name") or ""), count if isinstance(count, int) and count > 0 else None


def _find_rank(trace: Trace) -> int | None:
    told = trace.properties.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    if isinstance(rank, int):
        return rank
    named = re.search(r"rank[_-]?(\d+)", Path(trace.path).name)
    return int(named[1]) if named else None


_ATTENTION_BACKENDS = {
    "math": re.compile(r"_scaled_dot_product_attention_math"),
    "flash": re.compile(r"flash_?attention|flash_fwd", re.IGNORECASE),
    "cudnn": re.compile(r"cudnn_?attention", re.IGNORECASE),
    "efficient": re.compile(r"efficient_?attention", re.IGNORECASE),
}
_ATTENTION_CALL = re.compile(r"^aten::scaled_dot_product_attention$|^autograd::")
"""What calls a backend, whichever it is."""


def _list_attention(operators: Sequence[Operator]) -> tuple[str, ...]:
    """The backends of `scaled_dot_product_attention` that ran, and other attention by its operator."""
    found = []
    for each in operators:
        names = f"{each.name} {each.top_kernel}"
        backend = next((word for word, pattern in _ATTENTION_BACKENDS.items() if pattern.search(names)), None)
        if backend is None and each.kind == "attention" and not _ATTENTION_CALL.search(each.name):
            backend = each.name
        if backend is not None:
            found.append(backend)
    return tuple(dict.fromkeys(found))


def _share_of_matrix_units(operators: Sequence[Operator]) -> float | None:
    known = [
        each
        for each in operators
        if each.kind in ("product", "attention", "convolution") and each.matrix_units is not None
    ]
    spent = sum(each.ms for each in known)
    return sum(each.ms * (each.matrix_units or 0.0) for each in known) / spent if spent > 0 else None


# --- several ranks


def analyse_ranks(paths: Sequence[Path], gpu: str | None = None) -> list[TraceAnalysis]:
    """Each trace, read side by side where there are cores, in the order of their ranks (of the files where none is
    known). Raises UserError as `analyse_trace`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(paths) > 1 and cores > 1 and sum(path.stat().st_size for path in paths if path.exists()) > 16 << 20:
        with ProcessPoolExecutor(min(cores, len(paths))) as pool:
            found = list(pool.map(analyse_trace, paths, [gpu] * len(paths)))
    else:
        found = [analyse_trace(path, gpu) for path in paths]
    if all(each.rank is not None for each in found):
        found.sort(key=lambda each: each.rank or 0)
    return found


def judge_ranks(ranks: Sequence[TraceAnalysis]) -> list[Advice]:
    """Stragglers: a rank whose own work takes longer than that of the others, and what they lose by waiting."""
    good = _list_usable(ranks)
    if len(good) < 2 or _find_repeated(good):
        return []
    busy = np.array([each.busy_ms for each in good])
    slow = int(np.argmax(busy))
    median = float(np.median(busy)) if len(good) > 2 else float(busy.min())
    late_ms, step_ms = float(busy[slow]) - median, float(np.mean([each.step_ms for each in good]))
    if late_ms < 0.03 * step_ms or late_ms <= 0:
        return []
    spread = measure_arrival([each.collectives for each in good])
    waits = (
        f"; matched collectives begin up to {spread.most_ms:.2f} ms apart, {spread.per_step_ms:.2f} ms a step"
        if spread
        else ""
    )
    return [
        Advice(
            "straggler",
            f"{good[slow].name} works {busy[slow]:.2f} ms of a step of {step_ms:.2f} ms, the median of {len(good)}"
            f" is {median:.2f} ms{waits}",
            "balance what the ranks get (lengths of sequences, layers of a stage, experts); if it is always the same"
            " device, look at its clocks, temperature and neighbours (`shardway report`, `shardway doctor --deep`), and"
            " leave the node out",
            "trace again on all ranks: their own work is alike",
            round(late_ms, 4),
            round(100 * late_ms / step_ms, 2),
            "problem" if late_ms >= 0.1 * step_ms else "hint",
        )
    ]


def _list_usable(ranks: Sequence[TraceAnalysis]) -> list[TraceAnalysis]:
    """Those without a fatal fault."""
    return [each for each in ranks if not any(fault.severity == "fatal" for fault in each.quality)]


def _find_repeated(ranks: Sequence[TraceAnalysis]) -> list[int]:
    """The ranks that several traces are of."""
    known = [each.rank for each in ranks if each.rank is not None]
    return sorted({rank for rank in known if known.count(rank) > 1})


def _gather_faults(ranks: Sequence[TraceAnalysis]) -> list[CaptureFault]:
    """The faults of all traces, one of a kind, with the traces that have it. While others can be relied on, a trace
    with a fatal fault is left out and that is a problem."""
    found, left_out = [], bool(_list_usable(ranks))
    if repeated := _find_repeated(ranks):
        found.append(
            CaptureFault(
                "repeated-rank",
                f"several traces are of rank {', '.join(map(str, repeated))}: captures of one rank are not compared as"
                " ranks",
                "name one capture of each rank; compare two captures with `--against`",
                "problem",
            )
        )
    kinds: dict[tuple[str, str], list[tuple[TraceAnalysis, CaptureFault]]] = {}
    for each in ranks:
        for fault in each.quality:
            kinds.setdefault((fault.rule, fault.severity), []).append((each, fault))
    for having in kinds.values():
        first, fault = having[0]
        others = [each.name for each, _ in having[1:]]
        also = f" (also {list_some(others, 8)})" if others else ""
        fault = replace(fault, what=f"{first.name}: {fault.what}{also}")
        if fault.severity == "fatal" and left_out:
            fault = replace(fault, what=f"{fault.what}; it is left out", severity="problem")
        found.append(fault)
    return sort_faults(found)


def merge_ranks(ranks: Sequence[TraceAnalysis]) -> dict[str, Any]:
    """The JSON of one or several traces: of several, faults of all, means of those without a fatal one, and advice for
    the slowest."""
    if len(ranks) == 1:
        return ranks[0].as_json()
    usable = _list_usable(ranks) or list(ranks)
    slowest = max(usable, key=lambda each: each.busy_ms)
    advice = sorted([*judge_ranks(usable), *slowest.advice], key=lambda each: -(each.ceiling_ms or 0.0))
    spread = None if _find_repeated(usable) else measure_arrival([each.collectives for each in usable])
    found = replace(
        slowest,
        step_ms=float(np.mean([each.step_ms for each in usable])),
        breakdown=average_breakdowns([each.breakdown for each in usable]),
        quality=tuple(_gather_faults(ranks)),
        advice=tuple(advice),
    ).as_json()
    found["ranks"] = [
        {
            "file": each.path,
            "rank": each.rank,
            "steps": each.steps,
            "step_ms": round(each.step_ms, 4),
            "busy_ms": round(each.busy_ms, 4),
            "breakdown": each.breakdown.list_parts(),
        }
        for each in usable
    ]
    found["arrival_spread_ms"] = (
        None
        if spread is None
        else {
            "per_step": round(spread.per_step_ms, 4),
            "most": round(spread.most_ms, 4),
            "matched": spread.matched,
            "matched_by_number": spread.by_number,
        }
    )
    return found


# --- two traces


def compare_traces(one: TraceAnalysis, other: TraceAnalysis) -> dict[str, Any]:
    """What changed from `other`, which came before, to `one`: parts of a step, and the operators that changed most."""

    def times(analysis: TraceAnalysis) -> dict[str, float]:
        found: dict[str, float] = {}
        for each in analysis.operators:
            key = f"{each.name} {each.render_shapes()}".strip()
            found[key] = found.get(key, 0.0) + each.ms
        return found

    now, before = times(one), times(other)
    changes = sorted(
        ((key, before.get(key, 0.0), now.get(key, 0.0)) for key in {*now, *before}),
        key=lambda each: -abs(each[2] - each[1]),
    )
    was_parts, parts = other.breakdown.list_parts(), one.breakdown.list_parts()
    return {
        "file": other.path,
        "step_ms": {"before": round(other.step_ms, 4), "now": round(one.step_ms, 4)},
        "speedup": round(other.step_ms / one.step_ms, 4) if one.step_ms > 0 else None,
        "breakdown": {name: {"before": was_parts[name], "now": parts[name]} for name in parts},
        "kernels_per_step": {"before": round(other.kernels, 2), "now": round(one.kernels, 2)},
        "operators": [
            {"name": key, "before_ms": round(was, 4), "now_ms": round(is_, 4)}
            for key, was, is_ in changes[:20]
            if was != is_
        ],
    }
