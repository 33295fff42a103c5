"""A captured step of a run under the roofline of the device that ran it: from traces, the run's settings and measured
ceilings to what `roofline` judges.

Invariants:
- torch is imported only to measure ceilings. Nothing here starts a run or prints.
- Model FLOP are those of the planner for the same run file; a model without a plan has none.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardway.bench.roofline import CapturedRun, RoofCeilings, StepRoofline, Utilisation, judge_step
from shardway.errors import Problem, ShardwayError, UserError, check_no_problems
from shardway.hardware.catalogue import DTYPES, Accelerator, Dtype, find_accelerator
from shardway.plan.case import Case, ceilings_of, machine_of_site
from shardway.plan.huggingface import read_shape
from shardway.plan.time import product_rate
from shardway.resolve.planned import case_of, precision_of, shape_of_run
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import RunFile
from shardway.sites.load import load_site
from shardway.units import render_plural
from shardway.watch.trace.analysis import TraceAnalysis, analyse_ranks
from shardway.watch.trace.groups import CallWork, GroupTime, measure_groups
from shardway.watch.trace.reader import read_trace
from shardway.watch.trace.timeline import build_timeline

# --- ceilings


def list_formats(times: Sequence[GroupTime], values: RunFile | None) -> tuple[Dtype, ...]:
    """The formats of the products of a step, that of the run first."""
    found = [compute_format(values)] if values is not None else []
    found += [
        each.format for time in times for each in time.operators if each.kind in ("product", "attention", "convolution")
    ]
    known: dict[str, Dtype] = {name: name for name in DTYPES if name != "fp4"}
    return tuple(dict.fromkeys(known[name] for name in found if name in known)) or ("fp32",)


def compute_format(values: RunFile) -> str:
    """The format that a run computes its products in, by the catalogue's name."""
    name = precision_of(values.precision)
    return "fp8" if name == "mxfp8" else name


def measure_ceilings(formats: Sequence[Dtype], device: str, threads: int | None, seconds: float) -> RoofCeilings:
    """The best product of each format and a copy, on this machine. `device`: "cpu" or "cuda"; `threads` of a rank on a
    CPU, None for those that torch takes. Raises UserError where the device has no product in a format."""
    import torch

    from shardway.bench.kernels import measure_peaks

    began, before = time.monotonic(), torch.get_num_threads()
    if device == "cuda":  # the run has ended in this process
        gc.collect()
        torch.cuda.empty_cache()
    elif threads is not None:
        torch.set_num_threads(threads)
    try:
        found = measure_peaks(torch.device(device), formats, seconds)
    except RuntimeError as error:
        raise UserError(
            f"the ceilings of this device cannot be measured: {str(error).splitlines()[0]}\n"
            "  To do: name a site whose profile has them: --site NAME"
        ) from None
    finally:
        torch.set_num_threads(before)
    rates = {str(name): each.flops_per_s for name, each in found.products.items()}
    where = render_plural(threads, "thread") if device == "cpu" and threads is not None else "this device"
    return RoofCeilings(rates, found.copy.bytes_per_s, f"measured on {where} in {time.monotonic() - began:.1f} s")


def read_site_ceilings(name: str) -> RoofCeilings:
    """The ceilings in the [measured] of a site's profile, as rates. Raises UserError where it has none."""
    site = load_site(name)
    machine = machine_of_site(site)
    lacks = [each for each in ("matmul", "memory") if each not in machine.measured]
    rate = machine.accelerator.memory_bandwidth_bytes_per_s
    if lacks or not rate:
        what = (
            f"the profile {name} has no measured.{' and no measured.'.join(lacks)}"
            if lacks
            else (f"the catalogue does not state the memory's bandwidth of {machine.accelerator.name}")
        )
        remedy = "leave out --site: the ceilings are then measured here"
        check_no_problems("the command line", [Problem("--site", what, "command line", remedy=remedy)])
    factors = ceilings_of(machine)
    products = {str(dtype): product_rate(machine, factors, dtype) for dtype in machine.accelerator.peak_flops}
    return RoofCeilings(
        products, factors.memory * (rate or 0.0), f"[measured] of the site {name}", machine.accelerator.key
    )


# --- what is known of the run


UPDATE_FLOP: Mapping[str, float] = {"adamw": 14.0, "sgd": 6.0}
"""FLOP of an update for each parameter: of AdamW decay 1, first moment 3, second 4, root and bias 3, update 3."""


def count_update(properties: Mapping[str, Any], values: RunFile) -> CallWork:
    """What an update computes and moves, by the parameters that the trace states: each read and written, its gradient
    read, its state read and written. Nothing where the trace does not state them."""
    try:
        count, size = float(properties["shardway_updated"]), float(properties["shardway_updated_bytes"])
    except (KeyError, ValueError, TypeError):
        return CallWork()
    state = _state_bytes(values) * count
    return CallWork(UPDATE_FLOP.get(values.optim.name, 0.0) * count, 3 * size + 2 * state)


def _state_bytes(values: RunFile) -> float:
    from shardway.plugins import load_plugin

    kind = load_plugin("optimizers", values.optim.name)
    return float(kind.state_bytes) * (0.5 if values.optim.state_dtype == "bf16" else 1.0)


def find_utilisation(values: RunFile, part: Accelerator | None) -> Utilisation | None:
    """Model FLOP of a step on one rank, as a plan counts them; None for a model that the planner cannot lay out."""
    try:
        case = case_of(values, shape_of_run(values, read_shape(values.model.hf) if values.model.hf else None))
    except (ShardwayError, ValidationError, ValueError, TypeError):
        return None
    return _utilise(case, part, values)


def _utilise(case: Case, part: Accelerator | None, values: RunFile) -> Utilisation:
    tokens = case.tokens_per_step / case.degrees.world
    full, half = (case.model.flops_per_token(case.seq_len, causal=causal) for causal in (False, True))
    known: dict[str, Dtype] = {name: name for name in DTYPES}
    rated = part.peak(known[compute_format(values)]) if part is not None else None
    return Utilisation(full * tokens, half * tokens, tokens, rated)


# --- all of it


def judge_captures(files: Sequence[Path], run: RunDir, ceilings: RoofCeilings | None, seconds: float) -> StepRoofline:
    """The step that traces of a run show, of the rank that works most. Without `ceilings` they are measured on this
    machine in about so many seconds. Raises UserError where no trace can be relied on."""
    analyses = analyse_ranks(files)
    usable = [each for each in analyses if not any(fault.severity == "fatal" for fault in each.quality)]
    if not usable:
        fault = analyses[0].quality[0]
        raise UserError(f"{analyses[0].path}: {fault.what}\n  To do: {fault.do}")
    chosen = max(usable, key=lambda each: each.busy_ms)
    values = RunFile.model_validate(run.read_resolved())
    trace = read_trace(Path(chosen.path))
    timeline = build_timeline(trace)
    times = measure_groups(timeline)
    device = "cuda" if chosen.on_device else "cpu"
    threads = values.run.threads if isinstance(values.run.threads, int) else None
    if ceilings is None:
        ceilings = measure_ceilings(list_formats(times, values), device, threads, seconds)
    return _put_together(chosen, times, run, values, ceilings, count_update(trace.properties, values))


def _put_together(
    chosen: TraceAnalysis,
    times: Sequence[GroupTime],
    run: RunDir,
    values: RunFile,
    ceilings: RoofCeilings,
    update: CallWork,
) -> StepRoofline:
    part = find_accelerator(chosen.gpu) if chosen.gpu else None
    event = next(iter(run.all_events(0, ("profiled",))), {})
    before, inside = event.get("before_seconds"), event.get("step_seconds")
    started = next(iter(run.all_events(0, ("started",))), {})
    return StepRoofline(
        run=CapturedRun(
            name=values.run.name,
            device=chosen.gpu or "CPU",
            format=compute_format(values),
            ranks=int(started.get("world") or 1),
            micro_batch=int(values.train.micro_batch),
            compiled=values.train.compiles,
            on_device=chosen.on_device,
        ),
        rank=chosen.rank or 0,
        steps=chosen.steps,
        step_ms=chosen.step_ms,
        idle_ms=chosen.breakdown.idle_ms,
        idle_causes_ms={cause: ms for cause, ms in chosen.breakdown.idle_causes_ms.items() if ms > 0},
        groups=judge_step(times, ceilings, update),
        ceilings=ceilings,
        utilisation=find_utilisation(values, part),
        advice=chosen.advice,
        slowdown=inside / before if before and inside else None,
        faults=tuple(_list_faults(chosen, ceilings)),
    )


def _list_faults(chosen: TraceAnalysis, ceilings: RoofCeilings) -> Iterator[str]:
    """What makes the comparison doubtful: another device than the site's, a capture that cannot be relied on."""
    if ceilings.part and ceilings.part != chosen.part:
        device = chosen.gpu or "a CPU"
        yield f"the ceilings are those of {ceilings.part}, and the step ran on {device}; to do: leave out --site"
    yield from (f"{each.what}; to do: {each.do}" for each in chosen.quality if each.severity == "problem")
