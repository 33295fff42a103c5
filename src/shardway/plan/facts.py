"""A plan as data: what `shardway plan --json` prints, also for a model known by its units.

Invariants:
- Units are in the names of the keys (`_bytes`, `_seconds`), shares are 0 to 1, and every number is the answer's own,
  not rounded.
- A model known by its units has the same words and keys as a transformer, where both have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from shardway.plan.answer import PlanAnswer
from shardway.plan.case import Case
from shardway.plan.data_parallel_estimate import UnitAnswer, UnitCase, UnitEstimate
from shardway.plan.economy import RunEstimate
from shardway.plan.estimate import Estimate
from shardway.plan.memory import StageMemory
from shardway.plan.search import ScalingPoint, efficiency
from shardway.plan.text import count, duration, gib, headline, line, list_breakdowns, list_notes, list_run, percent

# --- transformers

FORMAT = 1


def answer_facts(answer: PlanAnswer, curve: Sequence[ScalingPoint] = ()) -> dict[str, Any]:
    """All data of an answer."""
    question, terms = answer.question, answer.terms
    return {
        "format": FORMAT,
        "machine": machine_facts(answer),
        "plan": estimate_facts(answer.shown),
        "run": run_facts(answer.run) if answer.run else None,
        "queue": {"name": terms.queue, "wall_seconds": terms.wall_seconds, "most_nodes": terms.most_nodes},
        "others": [
            {**estimate_facts(each.estimate, brief=True), "lost": each.reason} for each in answer.found.candidates[1:]
        ],
        "looked_at": answer.found.looked_at,
        "to_fit": [{"change": each.what, **estimate_facts(each.estimate, brief=True)} for each in answer.changes],
        "kept": sorted(question.fixed),
        "curve": [_point_facts(curve, point) for point in curve],
        "assumed": list(answer.assumed),
        "warnings": list(answer.warnings),
    }


def machine_facts(answer: PlanAnswer) -> dict[str, Any]:
    """The machine of the plan."""
    machine = answer.question.machine
    return {
        "name": machine.name,
        "accelerator": machine.accelerator.key,
        "nodes": answer.question.nodes,
        "accelerators": answer.question.world,
        "accelerators_per_node": machine.per_node,
        "memory_bytes": machine.memory_bytes,
        "link_bytes_per_second": machine.link,
        "network_bytes_per_second": machine.network,
        "measured": dict(machine.measured),
    }


def estimate_facts(shown: Estimate, *, brief: bool = False) -> dict[str, Any]:
    """A layout with its costs; `brief` leaves out items and stages."""
    facts = {
        "layout": case_facts(shown.case),
        "fits": shown.fits,
        "peak_bytes": _peak_facts(shown),
        "step_seconds": shown.time.seconds,
        "step_seconds_low": shown.time.low,
        "step_seconds_high": shown.time.high,
        "tokens_per_second": shown.tokens_per_second,
        "mfu_full": shown.mfu(causal=False),
        "mfu_causal": shown.mfu(causal=True),
        "hfu_full": shown.hfu(causal=False),
        "hfu_causal": shown.hfu(causal=True),
        "peak_flops": shown.peak_flops,
    }
    if brief:
        return facts
    return {
        "model": _model_facts(shown.case),
        **facts,
        "step_items_seconds": dict(shown.time.items),
        "between_steps_bytes": asdict(shown.moments),
        "stages": [stage_facts(stage) for stage in shown.memory],
    }


def _peak_facts(shown: Estimate) -> dict[str, Any]:
    peak = shown.peak
    return {
        "pipeline_rank": peak.rank,
        "allocated": peak.allocated,
        "reserved": peak.reserved,
        "device": peak.device,
        "device_low": shown.memory_low,
        "device_high": shown.memory_high,
        "usable": shown.usable_bytes,
        "host_per_rank": peak.host,
    }


def stage_facts(stage: StageMemory) -> dict[str, Any]:
    """Memory of a pipeline rank, in bytes."""
    own = {"allocated": stage.allocated, "reserved": stage.reserved, "device": stage.device}
    return {"pipeline_rank": stage.rank, "items": dict(stage.items), "micro_batches_kept": stage.in_flight, **own}


def _model_facts(case: Case) -> dict[str, Any]:
    model = case.model
    return {
        "name": model.name,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "layers": model.depth,
        "flops_per_token_full": model.flops_per_token(case.seq_len, causal=False),
        "flops_per_token_causal": model.flops_per_token(case.seq_len, causal=True),
    }


def case_facts(case: Case) -> dict[str, Any]:
    """The settings of a layout."""
    return {
        **asdict(case.degrees),
        "global_batch": case.global_batch,
        "seq_len": case.seq_len,
        "micro_batch": case.micro_batch,
        "micro_batches": case.micro_batches,
        "precision": case.precision,
        "optimizer": case.optimizer,
        "engine": case.engine.name,
        "zero": case.zero,
        "reshard": case.reshard,
        "sequence": case.sequence,
        "recompute": case.recompute,
        "attention": case.attention,
        "compiled": case.compiled,
        "schedule": case.schedule,
        "stages_per_rank": case.stages_per_rank,
        "offload": case.offload,
    }


def run_facts(run: RunEstimate) -> dict[str, Any]:
    """The whole run."""
    return {
        "steps": run.steps,
        "days": run.days,
        "wall_seconds": {**asdict(run.wall), "total_seconds": run.wall.total_seconds},
        "jobs": run.slots,
        "failures": run.failures,
        "goodput": run.goodput,
        "save_interval_steps": run.interval_steps,
        "gpu_hours": run.gpu_hours,
        "node_hours": run.nodes * run.wall.total_seconds / 3600,
        "energy_kwh": run.energy_kwh,
        "cost": asdict(run.cost) if run.cost else None,
        "charge": asdict(run.charge) if run.charge else None,
    }


def _point_facts(curve: Sequence[ScalingPoint], point: ScalingPoint) -> dict[str, Any]:
    best = estimate_facts(point.best, brief=True) if point.best else None
    cost = {"gpu_seconds_per_token": point.device_seconds_per_token, "efficiency": efficiency(curve, point)}
    return {"nodes": point.nodes, "best": best, "why_not": point.why_not, **cost}


# --- models known by their units

MOST_OTHERS = 5


def render_units(answer: UnitAnswer) -> str:
    """The whole table, with a newline at its end."""
    question = answer.question
    parts = [
        headline(question.case.model.name, question.machine, question.world),
        "",
        *_lines(answer),
        "",
        *list_breakdowns(answer.shown),
        *_others(answer),
        *list_notes(question.machine, answer.assumed, answer.warnings),
    ]
    return "\n".join(parts) + "\n"


def _lines(answer: UnitAnswer) -> Iterator[str]:
    shown, case = answer.shown, answer.shown.case
    model, peak, low, high = case.model, shown.peak, shown.peak.overheads.low, shown.peak.overheads.high
    flops = f"{model.flops_per_sample / 1e9:,.4g} GFLOP a sample"
    yield line("model", f"{count(model.parameters)} parameters in {sum(u.count for u in model.units)} units; {flops}")
    yield line("batch", f"{case.global_batch:,} samples; {case.precision}")
    yield line("layout", _layout(case))
    interval = f"{gib(peak.device * low)} to {gib(peak.device * high)}"
    fits = "fits" if shown.fits else "does not fit"
    yield line("memory", f"{gib(peak.device)} ({interval}) of {gib(shown.usable_bytes)} usable: {fits}")
    speed = f"{count(shown.samples_per_second)} samples/s, {count(shown.samples_per_second / case.world)} a GPU"
    yield line(
        "step", f"{duration(shown.time.seconds)} ({duration(shown.time.low)} to {duration(shown.time.high)}); {speed}"
    )
    yield line("utilisation", f"MFU {percent(shown.mfu)} of {shown.peak_flops / 1e12:,.0f} TFLOP/s {case.precision}")
    if answer.run:
        yield from list_run(answer.run, answer.terms)


def _layout(case: UnitCase) -> str:
    degrees = " x ".join(
        f"{name} {size}"
        for name, size in (("dp_replicate", case.dp_replicate), ("dp_shard", case.dp_shard))
        if size > 1
    )
    passes = f" x {case.micro_batches} a step" if case.micro_batches > 1 else ""
    return f"{degrees or 'one rank'}, micro-batch {case.micro_batch}{passes}"


def _others(answer: UnitAnswer) -> Iterator[str]:
    others = answer.fitting[1 : 1 + MOST_OTHERS]
    if others:
        yield ""
        yield "other layouts"
    for each in others:
        slower = each.time.seconds / answer.shown.time.seconds - 1
        yield f"  {_layout(each.case):<48}{duration(each.time.seconds):>10} {slower:>+6.0%}"


def unit_facts(answer: UnitAnswer) -> dict[str, Any]:
    """All data of an answer; units are in the names of the keys."""
    machine, question = answer.question.machine, answer.question
    return {
        "format": FORMAT,
        "machine": {"name": machine.name, "accelerator": machine.accelerator.key, "accelerators": question.world},
        "plan": _estimate_facts(answer.shown),
        "run": run_facts(answer.run) if answer.run else None,
        "others": [_estimate_facts(each) for each in answer.fitting[1:]],
        "assumed": list(answer.assumed),
        "warnings": list(answer.warnings),
    }


def _estimate_facts(shown: UnitEstimate) -> dict[str, Any]:
    case = shown.case
    return {
        "model": {"name": case.model.name, "parameters": case.model.parameters, "source": case.model.source},
        "layout": {
            "dp_replicate": case.dp_replicate,
            "dp_shard": case.dp_shard,
            "micro_batch": case.micro_batch,
            "micro_batches": case.micro_batches,
            "global_batch": case.global_batch,
            "precision": case.precision,
            "optimizer": case.optimizer,
        },
        "fits": shown.fits,
        "stages": [stage_facts(shown.peak)],
        "step_seconds": shown.time.seconds,
        "step_seconds_low": shown.time.low,
        "step_seconds_high": shown.time.high,
        "step_items_seconds": dict(shown.time.items),
        "samples_per_second": shown.samples_per_second,
        "mfu_full": shown.mfu,
    }
