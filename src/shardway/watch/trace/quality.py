"""Whether a capture can be trusted: what it lacks, and what in it is not the work that was to be measured.

Invariants: this is judged before any advice; a "fatal" fault withholds breakdown-based advice altogether, and what a
"problem" makes false (idle time under a graph replay, causes under a skewed clock) leads to none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from shardway.hardware.catalogue import Accelerator
from shardway.watch.trace import intervals
from shardway.watch.trace.columns import ANNOTATION, KERNEL, OP, OTHER, OVERHEAD, PROFILER, PYTHON, RUNTIME
from shardway.watch.trace.timeline import Timeline, find_named

PROFILE_AGAIN = (
    "profile again: a `schedule` with wait=1, warmup=2, active=5, `record_shapes=True`, CPU and CUDA activities"
)


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
_CLOCK_US = 100.0


def judge_capture(timeline: Timeline, part: Accelerator | None, gpu: str) -> list[CaptureFault]:
    """The faults of a capture, the worst first. `gpu`: the device's name as the trace has it."""
    found = [
        *_judge_file(timeline),
        *_judge_kind(timeline),
        *_judge_device(timeline, part, gpu),
        *_judge_graphs(timeline),
        *_judge_steps(timeline),
        *_judge_profiler(timeline),
    ]
    return sort_faults(found)


def sort_faults(faults: Iterable[CaptureFault]) -> list[CaptureFault]:
    """The worst first."""
    order = ("fatal", "problem", "note")
    return sorted(faults, key=lambda fault: order.index(fault.severity))


def _judge_file(timeline: Timeline) -> list[CaptureFault]:
    trace, faults, found = timeline.trace, timeline.trace.faults, []
    if faults.truncated:
        what = f"the file is not complete: {faults.truncated}. What stands before is analysed"
        do = "copy the file again, and let the profiler end before the job does"
        found.append(CaptureFault("truncated", what, do, "problem"))
    if faults.malformed:
        what = f"{faults.malformed:,} malformed events are left out, the first: {faults.sample}"
        do = "if they are many, profile again; a file that was edited or merged has such events"
        found.append(CaptureFault("malformed-event", what, do, "problem"))
    if timeline.overlong:
        what = (
            f"{timeline.overlong} device events cover many others of their own stream and are left out:"
            f" {timeline.overlong_sample}"
        )
        found.append(CaptureFault("impossible-event", what, "profile again if there are more of them", "problem"))
    if faults.unpaired and len(trace.start):
        what = f"{faults.unpaired:,} begin and end events are not read: torch's profiler writes none"
        found.append(CaptureFault("unpaired-events", what, "name a trace of torch's profiler", "note"))
    if not len(trace.start):
        do = "export in `on_trace_ready`, or after `prof.stop()`; with a `schedule`, call `prof.step()` after each step"
        what = "the trace holds no event with a duration"
        if faults.unpaired:
            what = f"{what}: it has pairs of begin and end events, as other tools than torch's profiler write them"
            do = "name a trace of torch's profiler"
        found.append(CaptureFault("no-events", what, do, "fatal"))
    elif set(np.unique(trace.category)) <= {OTHER, PROFILER}:
        what = (
            "no event has a category of torch's profiler: this is another tool's trace, and its events are not judged"
        )
        found.append(CaptureFault("not-torch", what, "name a trace that torch's profiler wrote", "fatal"))
    return found


def _judge_kind(timeline: Timeline) -> list[CaptureFault]:
    """Whether there is device work, and whose."""
    trace, found = timeline.trace, []
    if timeline.step_processes > 1 or _counts_several_ranks(timeline):
        count = max(timeline.step_processes, len(np.unique(trace.process[trace.of(OP)])))
        what = (
            f"{count} processes are in one file: the traces of several ranks were merged, and their events cannot be"
            " separated"
        )
        do = "give the file of each rank: `shardway trace RANK0.json RANK1.json ...`"
        found.append(CaptureFault("merged-ranks", what, do, "fatal"))
    launches = timeline.named(_KERNEL_LAUNCH, RUNTIME)
    if not timeline.on_device and len(trace.start):
        if len(launches):
            what = (
                f"{len(launches):,} kernels were launched and none was recorded: the profiler could not read the"
                " device's activity"
            )
            do = (
                "let it: CUPTI must be found and permitted (NVreg_RestrictProfilingToAdminUsers=0), and no other"
                " profiler attached"
            )
            found.append(CaptureFault("no-kernels", what, do, "problem"))
        elif _device_names(timeline):
            what = f"no device event, although the machine has {_device_names(timeline)[0]}: only the CPU was recorded"
            do = "add `ProfilerActivity.CUDA` to the profiler's activities"
            found.append(CaptureFault("no-kernels", what, do, "problem"))
        elif len(trace.of(OP)):
            what = "no device event: the breakdown is that of operators on the CPU"
            found.append(CaptureFault("no-kernels", what, "if a GPU was used, add `ProfilerActivity.CUDA`", "note"))
    if timeline.on_device and not len(trace.of(OP)):
        what = (
            "kernels without operators: only the device was recorded, so shapes, operators and causes of idle time"
            " are missing"
        )
        found.append(
            CaptureFault("no-operators", what, "add `ProfilerActivity.CPU` to the profiler's activities", "note")
        )
    ops = trace.of(OP)
    if len(ops) and not (trace.dims[ops] >= 0).any():
        what = "operators have no shapes: arithmetic, alignment and shares of peaks cannot be given"
        found.append(CaptureFault("no-shapes", what, "profile with `record_shapes=True`", "note"))
    return found


def _counts_several_ranks(timeline: Timeline) -> bool:
    """Several processes that each run many operators and optimizers; data loader workers run few."""
    trace = timeline.trace
    marks = find_named(trace, re.compile(r"Optimizer\.step#|autograd::engine::evaluate_function"), ANNOTATION, OP)
    return len(np.unique(trace.process[marks])) > 1 if len(marks) else False


def _device_names(timeline: Timeline) -> list[str]:
    listed = timeline.trace.properties.get("deviceProperties") or []
    rows = listed if isinstance(listed, list) else []
    return [str(row["name"]) for row in rows if isinstance(row, dict) and row.get("name")]


def _judge_device(timeline: Timeline, part: Accelerator | None, gpu: str) -> list[CaptureFault]:
    trace, found = timeline.trace, []
    if not timeline.on_device:
        return []
    if part is None:
        what = f"the GPU is not known ({gpu or 'the trace does not name it'}): shares of peaks are n/a"
        do = "name it with `--gpu KEY` (`shardway plan --list gpus` has the keys)"
        found.append(CaptureFault("unknown-gpu", what, do, "note"))
    if len(timeline.devices) > 1:
        what = f"{len(timeline.devices)} devices are in the trace; the busiest, {timeline.device}, is analysed"
        found.append(CaptureFault("several-devices", what, "give the trace of each rank where there are ranks", "note"))
    linked = timeline.launch >= 0
    if linked.any():
        early = trace.start[timeline.launch[linked]] - trace.start[timeline.rows[linked]]
        wrong = int((early > 1.0).sum())
        if wrong > max(3, 0.01 * linked.sum()) or float(early.max()) > _CLOCK_US:
            what = (
                f"{wrong:,} of {int(linked.sum()):,} device events begin before their launch, by up to"
                f" {early.max() / 1e3:.3g} ms:"
                " the clocks of host and device disagree, so idle time has no cause"
            )
            found.append(
                CaptureFault(
                    "clock-skew", what, "profile again, with a warm-up; on AMD with ROCm 6.2 or later", "problem"
                )
            )
    if len(trace.of(RUNTIME)) and linked.mean() < 0.9:
        what = (
            f"{100 * (1 - linked.mean()):.0f} % of the device events have no launch in the trace: they belong to no"
            " operator"
        )
        found.append(CaptureFault("unlinked-kernels", what, "let the profiler warm up for a step or two", "note"))
    launches = timeline.in_window(timeline.named(_KERNEL_LAUNCH, RUNTIME))
    launches = launches[trace.correlation[launches] >= 0]
    if len(launches) > 20:
        lost = 1 - float(np.isin(launches, timeline.launch).mean())
        if lost > 0.1 and len(timeline.devices) == 1:
            what = (
                f"{100 * lost:.0f} % of the launched kernels were not recorded: the profiler lost events, so idle"
                " time is false"
            )
            found.append(CaptureFault("lost-kernels", what, "capture fewer steps", "problem"))
    return found


def _judge_graphs(timeline: Timeline) -> list[CaptureFault]:
    found = []
    replays = timeline.named(_GRAPH_LAUNCH, RUNTIME)
    if len(replays):
        recorded = np.isin(replays, timeline.launch)
        if not recorded.all():
            what = (
                f"{int((~recorded).sum())} of {len(replays)} replays of a CUDA graph have no kernel in the trace:"
                " the device worked where it seems idle"
            )
            do = "profile without graphs, or with a driver and torch that record the kernels of a graph"
            found.append(CaptureFault("graph-replay", what, do, "problem"))
        else:
            what = f"{len(replays)} replays of a CUDA graph: their kernels belong to no operator, so shapes are missing"
            found.append(
                CaptureFault(
                    "graph-replay", what, "profile a step without graphs for what belongs to operators", "note"
                )
            )
    captures = timeline.named(_GRAPH_CAPTURE, RUNTIME)
    if len(captures):
        what = "a CUDA graph was captured within the trace: its operators ran on the host alone, so idle time is false"
        found.append(
            CaptureFault("graph-capture", what, "profile after the capture: let the warm-up be longer", "problem")
        )
    return found


def _judge_steps(timeline: Timeline) -> list[CaptureFault]:
    found = []
    if timeline.empty_steps:
        what = (
            f"{timeline.empty_steps} of {len(timeline.kept)} steps hold no work at all: averages over steps mean"
            " nothing"
        )
        do = "profile again with fewer steps and a warm-up; look whether events were lost"
        severity: Literal["fatal", "problem"] = "fatal" if 2 * timeline.empty_steps >= len(timeline.kept) else "problem"
        found.append(CaptureFault("empty-steps", what, do, severity))
    if timeline.zero_steps:
        what = f"{timeline.zero_steps} steps have no length and are left out"
        found.append(CaptureFault("zero-steps", what, "call `prof.step()` once after each step, no more", "problem"))
    numbers = [step.number for step in timeline.steps if step.number is not None]
    if (
        numbers
        and len(numbers) > 1
        and numbers != list(range(numbers[0], numbers[0] + len(numbers)))
        and not timeline.zero_steps
    ):
        what = f"steps are missing or repeated: {', '.join(map(str, numbers[:8]))}"
        found.append(CaptureFault("missing-steps", what, "profile consecutive steps", "problem"))
    if len(timeline.trace.start):
        if not timeline.marks:
            what = "no step is marked: the capture counts as one step"
            found.append(CaptureFault("no-steps", what, "call `prof.step()` after each step of the loop", "note"))
        elif len(timeline.steps) < 3:
            what = f"{len(timeline.steps)} step{'s' * (len(timeline.steps) != 1)}: none at the edge could be left out"
            found.append(CaptureFault("few-steps", what, "capture five steps or more", "note"))
    lengths = [step.ms for step in timeline.kept]
    if len(lengths) >= 3 and max(lengths) > 2 * float(np.median(lengths)):
        what = f"steps differ: median {np.median(lengths):.1f} ms, longest {max(lengths):.1f} ms"
        do = "look whether warm-up, compiling, validation or a save is among them"
        found.append(CaptureFault("uneven-steps", what, do, "note"))
    return found


def _judge_profiler(timeline: Timeline) -> list[CaptureFault]:
    trace, found = timeline.trace, []
    if not len(trace.start):
        return []
    share = (
        intervals.measure(intervals.clip(timeline.times(trace.of(OVERHEAD)), *timeline.window))
        / 1e3
        / timeline.window_ms
    )
    if share > 0.05:
        what = f"the profiler itself took {100 * share:.0f} % of the steps"
        found.append(
            CaptureFault(
                "profiler-overhead", what, "let it warm up, without stacks, and capture fewer steps", "problem"
            )
        )
    python = len(trace.of(PYTHON))
    if python > len(trace.of(OP, RUNTIME, KERNEL)):
        what = f"{python:,} events are Python's stacks: they slow the host, so host-bound time is too high"
        found.append(CaptureFault("stacks", what, "profile with `with_stack=False` for times", "note"))
    compiling = timeline.in_window(timeline.named(_COMPILING, ANNOTATION, OP, PYTHON))
    if len(compiling):
        spent = intervals.measure(timeline.times(compiling)) / 1e3
        if spent > 0.02 * timeline.window_ms:
            what = f"{spent:.0f} ms of the kept steps are torch.compile at work"
            found.append(
                CaptureFault(
                    "compiling",
                    what,
                    "let the warm-up be longer, or look why it compiles again (TORCH_LOGS=recompiles)",
                    "problem",
                )
            )
    return found
