"""Whether a capture can be trusted: what it lacks, and what in it is not the work that was to be measured.

Invariants: this is judged before any advice; a "fatal" fault withholds breakdown-based advice altogether, and what a
"problem" makes false (idle time under a graph replay, causes under a skewed clock) leads to none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from shardway.hardware.catalogue import Accelerator
from shardway.units import render_plural
from shardway.watch.trace import intervals
from shardway.watch.trace.columns import ANNOTATION, KERNEL, OP, OTHER, OVERHEAD, PROFILER, PYTHON, RUNTIME
from shardway.watch.trace.timeline import Timeline


@dataclass(frozen=True)
class CaptureFault:
    """What is wrong with a capture. `severity`: "fatal" where no part of it can be relied on, "problem" where some
    numbers are false, "note" where some cannot be given."""

    rule: str
    what: str
    do: str
    severity: Literal["fatal", "problem", "note"]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


_GRAPH_LAUNCH = re.compile(r"GraphLaunch")
_GRAPH_CAPTURE = re.compile(r"StreamBeginCapture|StreamEndCapture|GraphInstantiate")
_KERNEL_LAUNCH = re.compile(r"LaunchKernel|LaunchCooperative")
_COMPILING = re.compile(
    r"_compile\.compile_inner|compile_fx_inner|inductor_compile|InstructionTranslator\.run|compile_file"
)
_TRAINING = re.compile(r"Optimizer\.step#|autograd::engine::evaluate_function")
_CLOCK_US = 100.0
"""More than launch and event can be apart by the rounding of two clocks."""


def judge_capture(timeline: Timeline, part: Accelerator | None, gpu: str) -> list[CaptureFault]:
    """The faults of a capture, the worst first. `gpu`: the device's name as the trace has it."""
    return sort_faults(
        [
            *_judge_file(timeline),
            *_judge_ranks(timeline),
            *_judge_activities(timeline),
            *_judge_device(timeline, part, gpu),
            *_judge_graphs(timeline),
            *_judge_steps(timeline),
            *_judge_profiler(timeline),
        ]
    )


def sort_faults(faults: Iterable[CaptureFault]) -> list[CaptureFault]:
    """The worst first."""
    order = ("fatal", "problem", "note")
    return sorted(faults, key=lambda fault: order.index(fault.severity))


def _judge_file(timeline: Timeline) -> Iterator[CaptureFault]:
    trace, faults = timeline.trace, timeline.trace.faults
    if faults.truncated:
        yield CaptureFault(
            "truncated",
            f"the file is not complete: {faults.truncated}. What stands before is analysed",
            "copy the file again, and let the profiler end before the job does",
            "problem",
        )
    if faults.malformed:
        yield CaptureFault(
            "malformed-event",
            f"{faults.malformed:,} malformed events are left out, the first: {faults.sample}",
            "if they are many, profile again; a file that was edited or merged has such events",
            "problem",
        )
    if timeline.overlong:
        yield CaptureFault(
            "impossible-event",
            f"{timeline.overlong} device events cover many others of their own stream and are left out:"
            f" {timeline.overlong_sample}",
            "profile again if there are more of them",
            "problem",
        )
    if not len(trace.start):
        yield _no_events(faults.unpaired)
        return
    if faults.unpaired:
        yield CaptureFault(
            "unpaired-events",
            f"{faults.unpaired:,} begin and end events are not read: torch's profiler writes none",
            "name a trace of torch's profiler",
            "note",
        )
    if set(np.unique(trace.category)) <= {OTHER, PROFILER}:
        yield CaptureFault(
            "not-torch",
            "no event has a category of torch's profiler: this is another tool's trace, and its events are not judged",
            "name a trace that torch's profiler wrote",
            "fatal",
        )


def _no_events(unpaired: int) -> CaptureFault:
    what = "the trace holds no event with a duration"
    if unpaired:
        return CaptureFault(
            "no-events",
            f"{what}: it has pairs of begin and end events, as other tools than torch's profiler write them",
            "name a trace of torch's profiler",
            "fatal",
        )
    return CaptureFault(
        "no-events",
        what,
        "export in `on_trace_ready`, or after `prof.stop()`; with a `schedule`, call `prof.step()` after each step",
        "fatal",
    )


def _judge_ranks(timeline: Timeline) -> Iterator[CaptureFault]:
    if timeline.step_processes > 1 or _counts_several_ranks(timeline):
        trace = timeline.trace
        count = max(timeline.step_processes, len(np.unique(trace.process[trace.of(OP)])))
        yield CaptureFault(
            "merged-ranks",
            f"{count} processes are in one file: the traces of several ranks were merged, and their events cannot be"
            " separated",
            "give the file of each rank: `shardway trace RANK0.json RANK1.json ...`",
            "fatal",
        )


def _counts_several_ranks(timeline: Timeline) -> bool:
    """Several processes that each run many operators and optimizers; data loader workers run few."""
    trace = timeline.trace
    marks = timeline.named(_TRAINING, ANNOTATION, OP)
    return len(np.unique(trace.process[marks])) > 1 if len(marks) else False


def _judge_activities(timeline: Timeline) -> Iterator[CaptureFault]:
    """Whether host and device were both recorded, and with shapes."""
    trace, ops = timeline.trace, timeline.trace.of(OP)
    if not timeline.on_device and len(trace.start):
        launches = timeline.named(_KERNEL_LAUNCH, RUNTIME)
        if len(launches):
            yield CaptureFault(
                "no-kernels",
                f"{len(launches):,} kernels were launched and none was recorded: the profiler could not read the"
                " device's activity",
                "let it: CUPTI must be found and permitted (NVreg_RestrictProfilingToAdminUsers=0), and no other"
                " profiler attached",
                "problem",
            )
        elif names := _device_names(timeline):
            yield CaptureFault(
                "no-kernels",
                f"no device event, although the machine has {names[0]}: only the CPU was recorded",
                "add `ProfilerActivity.CUDA` to the profiler's activities",
                "problem",
            )
        elif len(ops):
            yield CaptureFault(
                "no-kernels",
                "no device event: the breakdown is that of operators on the CPU",
                "if a GPU was used, add `ProfilerActivity.CUDA`",
                "note",
            )
    if timeline.on_device and not len(ops):
        yield CaptureFault(
            "no-operators",
            "kernels without operators: only the device was recorded, so shapes, operators and causes of idle time"
            " are missing",
            "add `ProfilerActivity.CPU` to the profiler's activities",
            "note",
        )
    if len(ops) and not (trace.dims[ops] >= 0).any():
        yield CaptureFault(
            "no-shapes",
            "operators have no shapes: arithmetic, alignment and shares of peaks cannot be given",
            "profile with `record_shapes=True`",
            "note",
        )


def _device_names(timeline: Timeline) -> list[str]:
    listed = timeline.trace.properties.get("deviceProperties") or []
    rows = listed if isinstance(listed, list) else []
    return [str(row["name"]) for row in rows if isinstance(row, dict) and row.get("name")]


def _judge_device(timeline: Timeline, part: Accelerator | None, gpu: str) -> Iterator[CaptureFault]:
    if not timeline.on_device:
        return
    if part is None:
        yield CaptureFault(
            "unknown-gpu",
            f"the GPU is not known ({gpu or 'the trace does not name it'}): shares of peaks are n/a",
            "name it with `--gpu KEY` (`shardway plan --list gpus` has the keys)",
            "note",
        )
    if len(timeline.devices) > 1:
        yield CaptureFault(
            "several-devices",
            f"{len(timeline.devices)} devices are in the trace; the busiest, {timeline.device}, is analysed",
            "give the trace of each rank where there are ranks",
            "note",
        )
    yield from _judge_links(timeline)


def _judge_links(timeline: Timeline) -> Iterator[CaptureFault]:
    """Whether launches and device events belong together: both recorded, and on one clock."""
    trace = timeline.trace
    linked = timeline.launch >= 0
    if linked.any():
        early = trace.start[timeline.launch[linked]] - trace.start[timeline.rows[linked]]
        wrong = int((early > 1.0).sum())
        if wrong > max(3, 0.01 * linked.sum()) or float(early.max()) > _CLOCK_US:
            yield CaptureFault(
                "clock-skew",
                f"{wrong:,} of {int(linked.sum()):,} device events begin before their launch, by up to"
                f" {early.max() / 1e3:.3g} ms: the clocks of host and device disagree, so idle time has no cause",
                "profile again, with a warm-up; on AMD with ROCm 6.2 or later",
                "problem",
            )
    if len(trace.of(RUNTIME)) and linked.mean() < 0.9:
        yield CaptureFault(
            "unlinked-kernels",
            f"{100 * (1 - linked.mean()):.0f} % of the device events have no launch in the trace: they belong to no"
            " operator",
            "let the profiler warm up for a step or two",
            "note",
        )
    launches = timeline.in_window(timeline.named(_KERNEL_LAUNCH, RUNTIME))
    launches = launches[trace.correlation[launches] >= 0]
    if len(launches) > 20 and len(timeline.devices) == 1:
        lost = 1 - float(np.isin(launches, timeline.launch).mean())
        if lost > 0.1:
            yield CaptureFault(
                "lost-kernels",
                f"{100 * lost:.0f} % of the launched kernels were not recorded: the profiler lost events, so idle"
                " time is false",
                "capture fewer steps",
                "problem",
            )


def _judge_graphs(timeline: Timeline) -> Iterator[CaptureFault]:
    replays = timeline.named(_GRAPH_LAUNCH, RUNTIME)
    unseen = int((~np.isin(replays, timeline.launch)).sum())
    if unseen:
        yield CaptureFault(
            "graph-replay",
            f"{unseen} of {len(replays)} replays of a CUDA graph have no kernel in the trace: the device worked where"
            " it seems idle",
            "profile without graphs, or with a driver and torch that record the kernels of a graph",
            "problem",
        )
    elif len(replays):
        yield CaptureFault(
            "graph-replay",
            f"{len(replays)} replays of a CUDA graph: their kernels belong to no operator, so shapes are missing",
            "profile a step without graphs for what belongs to operators",
            "note",
        )
    if len(timeline.named(_GRAPH_CAPTURE, RUNTIME)):
        yield CaptureFault(
            "graph-capture",
            "a CUDA graph was captured within the trace: its operators ran on the host alone, so idle time is false",
            "profile after the capture: let the warm-up be longer",
            "problem",
        )


def _judge_steps(timeline: Timeline) -> Iterator[CaptureFault]:
    if timeline.empty_steps:
        yield CaptureFault(
            "empty-steps",
            f"{timeline.empty_steps} of {len(timeline.kept)} steps hold no work at all: averages over steps mean"
            " nothing",
            "profile again with fewer steps and a warm-up; look whether events were lost",
            "fatal" if 2 * timeline.empty_steps >= len(timeline.kept) else "problem",
        )
    if timeline.zero_steps:
        yield CaptureFault(
            "zero-steps",
            f"{timeline.zero_steps} steps have no length and are left out",
            "call `prof.step()` once after each step, no more",
            "problem",
        )
    numbers = [step.number for step in timeline.steps if step.number is not None]
    if numbers and not timeline.zero_steps and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        yield CaptureFault(
            "missing-steps",
            f"steps are missing or repeated: {', '.join(map(str, numbers[:8]))}",
            "profile consecutive steps",
            "problem",
        )
    if len(timeline.trace.start) and not timeline.marks:
        yield CaptureFault(
            "no-steps",
            "no step is marked: the capture counts as one step",
            "call `prof.step()` after each step of the loop",
            "note",
        )
    elif len(timeline.trace.start) and len(timeline.steps) < 3:
        yield CaptureFault(
            "few-steps",
            f"{render_plural(len(timeline.steps), 'step')}: none at the edge could be left out",
            "capture five steps or more",
            "note",
        )
    lengths = [step.ms for step in timeline.kept]
    if len(lengths) >= 3 and max(lengths) > 2 * float(np.median(lengths)):
        yield CaptureFault(
            "uneven-steps",
            f"steps differ: median {np.median(lengths):.1f} ms, longest {max(lengths):.1f} ms",
            "look whether warm-up, compiling, validation or a save is among them",
            "note",
        )


def _judge_profiler(timeline: Timeline) -> Iterator[CaptureFault]:
    trace = timeline.trace
    if not len(trace.start):
        return
    own_us = intervals.measure(intervals.clip(timeline.times(trace.of(OVERHEAD)), *timeline.window))
    share = own_us / 1e3 / timeline.window_ms
    if share > 0.05:
        yield CaptureFault(
            "profiler-overhead",
            f"the profiler itself took {100 * share:.0f} % of the steps",
            "let it warm up, without stacks, and capture fewer steps",
            "problem",
        )
    python = len(trace.of(PYTHON))
    if python > len(trace.of(OP, RUNTIME, KERNEL)):
        yield CaptureFault(
            "stacks",
            f"{python:,} events are Python's stacks: they slow the host, so host-bound time is too high",
            "profile with `with_stack=False` for times",
            "note",
        )
    compiling = timeline.in_window(timeline.named(_COMPILING, ANNOTATION, OP, PYTHON))
    spent_ms = intervals.measure(timeline.times(compiling)) / 1e3
    if spent_ms > 0.02 * timeline.window_ms:
        yield CaptureFault(
            "compiling",
            f"{spent_ms:.0f} ms of the kept steps are torch.compile at work",
            "let the warm-up be longer, or look why it compiles again (TORCH_LOGS=recompiles)",
            "problem",
        )
