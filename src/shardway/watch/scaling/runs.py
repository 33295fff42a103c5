"""Runs of a scaling study as they were recorded: step times, the work of a step, what it took, and on what.

Invariants:
- A step lasts from the end of the step before it to its own end, so waiting for data and what a script does between
  steps count; after a save, a validation or a captured step, and for the first step of a start, only the step itself.
- The word weak, or strong, is given only where the work of a rank, or of a step, is the same in all runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardway.errors import ShardwayError, UserError
from shardway.rundir.directory import RunDir
from shardway.units import UNKNOWN, render_plural
from shardway.watch.report.content import ReportContent, gather
from shardway.watch.report.event_log import EventLog
from shardway.watch.scaling.fits import find_warm_up
from shardway.watch.words import render_total

FEWEST_STEPS = 8
"""Steps after the warm-up that a run needs."""

_APART = frozenset(
    ("started", "rolled_back", "restarted", "saved", "save_failed", "validation", "sampled", "profiled", "tuned")
)
"""Events that take time of rank 0 between two steps which is no part of a step."""


@dataclass(frozen=True)
class StepWork:
    """What a step computes. `samples`, `tokens`: of all ranks; None where not recorded. `keys`: what must be alike in
    every run of a study, by name; `rank_keys`: what must be alike too where the work of a rank is to be."""

    world: int
    samples: int | None
    tokens: int | None
    keys: Mapping[str, str] = field(default_factory=dict)
    rank_keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ScaleRun:
    """One run that was read. `size`: ranks or nodes, as the study counts. `times`: seconds of the steps after the
    `dropped` first ones. `outside_share`: of the time of these, outside of the step (data, script);
    `exposed_share`: of a captured step, communication that nothing hides. `rank_hours`: ranks times wall time.
    `planned_s`: the plan of a step. Hours and energy are of the whole run, None where not sampled."""

    path: str
    size: int
    work: StepWork
    times: tuple[float, ...]
    dropped: int
    counts_tokens: bool
    outside_share: float | None
    exposed_share: float | None
    gpus: int
    gpu_hours: float | None
    rank_hours: float
    energy_kwh: float | None
    planned_s: float | None
    jobs: tuple[str, ...]
    nodes: int
    started: float
    machine: Mapping[str, str]
    launcher: str


# --- steps


@dataclass(frozen=True)
class _StepTimes:
    """Seconds of each step from the end of the one before, and those of the step itself."""

    whole: list[float]
    inside: list[float]


def list_steps(log: EventLog) -> _StepTimes:
    """The steps of the last start that hold, in order; captured ones are left out."""
    import numpy as np

    captured = [
        (int(event["first"]) - 1, int(event["last"]))  # a step of warm-up comes before
        for event in log.others
        if event["event"] == "profiled" and isinstance(event.get("first"), int) and isinstance(event.get("last"), int)
    ]
    numbers, times, took = log.numbers, log.times, log.column("seconds")
    valid = log.find_valid() & np.isfinite(took) & (took > 0)
    apart = log.list_parts(*_APART)
    found = _StepTimes([], [])
    for place in np.flatnonzero(valid):
        number, inside = numbers[place], float(took[place])
        if any(first <= number <= last for first, last in captured):
            continue
        follows = place > 0 and numbers[place - 1] == number - 1 and apart[place - 1] == apart[place]
        between = float(times[place] - times[place - 1]) if follows else 0.0
        found.whole.append(max(inside, between))
        found.inside.append(inside)
    return found


# --- one run


def read_scale_run(run: RunDir, size: int | None = None, warm_up: int | None = None, unit: str = "ranks") -> ScaleRun:
    """A run as a point of a study. `size`: its nodes or ranks, by `unit`, where the caller knows them. `warm_up`: first
    steps that are left out, None for as many as the times show. Raises JobError, UserError where nothing can be read or
    too few steps are left."""
    content = gather(run)
    start, steps = content.progress.start, list_steps(content.log)
    if start is None or not steps.whole:
        raise UserError(
            f"{run.path} has recorded no step.\n"
            "  To do: name runs of `shardway train`, or of a script whose loop is `run.steps` (docs/own-loop.md)."
        )
    count = len(steps.whole)
    dropped = min(find_warm_up(steps.whole), max(0, count - FEWEST_STEPS)) if warm_up is None else min(warm_up, count)
    whole, inside = steps.whole[dropped:], steps.inside[dropped:]
    if len(whole) < FEWEST_STEPS:
        how = "as the times show" if warm_up is None else "--warmup"
        raise UserError(
            f"{run.path} has {render_plural(len(whole), 'step')} after {dropped} of warm-up ({how}).\n"
            f"  allowed: {FEWEST_STEPS} or more\n"
            "  To do: run more steps (--steps), or leave out fewer (--warmup)."
        )
    world = start.world or 1
    nodes = _count_nodes(content)
    known_size = size if size is not None else nodes if unit == "nodes" else world
    return ScaleRun(
        path=str(run.path),
        size=known_size,
        work=_read_work(content, world),
        times=tuple(whole),
        dropped=dropped,
        counts_tokens=start.counts_tokens,
        outside_share=1 - math.fsum(inside) / math.fsum(whole),
        exposed_share=_find_exposed(content),
        gpus=len(content.gpus),
        gpu_hours=content.gpu_hours,
        rank_hours=world * content.wall_s / 3600,
        energy_kwh=content.energy_kwh,
        planned_s=content.predicted.seconds if content.predicted else None,
        jobs=tuple(job.job for job in content.jobs if job.job),
        nodes=nodes,
        started=content.progress.attempts[0].start.time,
        machine={"device": start.device, "torch": start.torch, "python": start.python, **start.machine},
        launcher=start.launcher,
    )


def _count_nodes(content: ReportContent) -> int:
    settings = {**content.settings.defaults.get("site", {}), **content.settings.chosen.get("site", {})}
    asked = settings.get("nodes")
    return max(len(content.nodes), asked if isinstance(asked, int) else 1)


def _find_exposed(content: ReportContent) -> float | None:
    """The share of a captured step in which the rank that works most only communicates; None without a trace that can
    be relied on."""
    names = [name for event in content.log.others if event["event"] == "profiled" for name in event.get("files", [])]
    files = [path for name in names if (path := content.run.path / str(name)).is_file()]
    if not files:
        return None
    from shardway.watch.trace.analysis import analyse_ranks

    try:
        analyses = analyse_ranks(files)
    except ShardwayError:
        return None
    usable = [each for each in analyses if not any(fault.severity == "fatal" for fault in each.quality)]
    if not usable:
        return None
    most = max(usable, key=lambda each: each.busy_ms)
    return most.breakdown.comm_exposed_ms / most.step_ms if most.step_ms > 0 else None


# --- the work of a step

_SHARED = ("data.seq_len", "precision.compute", "recompute.mode")
_OF_RANKS = ("model.vocab", "model.capacity")  # what a layout may pad


def work_of_keys(values: Mapping[str, Any], world: int, samples: int | None, tokens: int | None) -> StepWork:
    """The work of a run from its resolved keys, by section; a script that owns its model has no section [model]."""
    flat = {
        f"{section}.{name}": value
        for section, table in values.items()
        if isinstance(table, Mapping)
        for name, value in table.items()
    }
    own = "model" not in values
    keys = {key: str(value) for key, value in flat.items() if key.startswith("model.") and key not in _OF_RANKS}
    keys |= {key: str(flat[key]) for key in _SHARED if key in flat and not (own and key.startswith("data."))}
    micro = flat.get("train.micro_batch")
    rank_keys = {"train.micro_batch": str(micro)} if isinstance(micro, int) else {}
    return StepWork(world, samples, tokens, keys, rank_keys)


def _read_work(content: ReportContent, world: int) -> StepWork:
    start = content.progress.start
    values: dict[str, dict[str, Any]] = {}
    for part in (content.settings.defaults, content.settings.chosen):
        for section, table in part.items():
            values.setdefault(section, {}).update(table)
    found = work_of_keys(
        values, world, start.samples_per_step if start else None, start.tokens_per_step if start else None
    )
    parameters = {"parameters": f"{start.parameters:,}"} if start and start.parameters else {}
    changed = any(event["event"] == "batch_changed" for event in content.log.others)
    varies = {"samples of a step": "vary within the run"} if changed else {}
    return StepWork(world, found.samples, found.tokens, {**parameters, **varies, **found.keys}, found.rank_keys)


@dataclass(frozen=True)
class _Difference:
    """A quantity that is not alike: its value in each run."""

    name: str
    values: tuple[str, ...]


def list_differences(works: Sequence[StepWork], *, weak: bool) -> list[_Difference]:
    """What of the work is not alike, though the kind of scaling requires it: of a rank (weak) or of a step."""
    rows: list[_Difference] = []
    per = [each.world if weak else 1 for each in works]
    of = "a rank and step" if weak else "a step, all ranks"
    for name in ("samples", "tokens"):
        counts: list[int | None] = [getattr(each, name) for each in works]
        if name == "tokens" and counts == [each.samples for each in works]:
            continue  # a sample is one thing
        shares = [None if count is None else count / each for count, each in zip(counts, per, strict=True)]
        if None in shares or len({round(share or 0.0, 6) for share in shares}) > 1:
            shown = tuple(UNKNOWN if share is None else f"{share:,.6g}" for share in shares)
            rows.append(_Difference(f"{name} {of}", shown))
    tables = [{**each.keys, **(each.rank_keys if weak else {})} for each in works]
    for key in dict.fromkeys(key for table in tables for key in table):
        found = tuple(table.get(key, UNKNOWN) for table in tables)
        if len(set(found)) > 1:
            rows.append(_Difference(key, found))
    return rows


def check_kind(labels: Sequence[str], works: Sequence[StepWork], *, weak: bool) -> None:
    """Raise UserError where the runs, by their `labels`, are not what the word weak (or strong) means."""
    rows = list_differences(works, weak=weak)
    if not rows:
        return
    word, other = ("weak", "strong") if weak else ("strong", "weak")
    what = "the work of a rank" if weak else "the work of a step"
    lines = [f"this is not {word} scaling: {what} is not the same in all runs."]
    for row in rows:
        pairs = dict.fromkeys(zip(labels, row.values, strict=True))
        shown = ", ".join(f"{value} on {label}" for label, value in pairs)
        lines.append(f"    {row.name}: {shown}")
    means = (
        "the same samples and tokens a rank and step, micro-batch, sequence length and model in all runs, so that the "
        "global batch grows with the ranks"
        if weak
        else "the same global batch, sequence length and model in all runs, so that a rank has less to do on more ranks"
    )
    lines.append(f"  allowed: {means}")
    remedy = "make these alike, or compare the runs without the word: `shardway compare RUN RUN`"
    if not list_differences(works, weak=not weak):
        remedy = f"these runs are {other} scaling: --{other}"
    lines.append(f"  To do: {remedy}.")
    raise UserError("\n".join(lines))


def describe_work(run: ScaleRun, *, weak: bool) -> str:
    """The work that stays the same, in words."""
    size, unit = (run.work.tokens, "tokens") if run.counts_tokens else (run.work.samples, "samples")
    share = None if size is None else size / (run.work.world if weak else 1)
    return f"{render_total(share)} {unit} a step{' and rank' if weak else ''}"


def render_day(at: float) -> str:
    """A date in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at)) if at > 0 else UNKNOWN
