"""The plan of a model that is known by its units, as a table and as facts.

Invariant: the same words and the same keys as for a transformer, wherever both have them. This module must not compute
a figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardway.plan.render.facts import FORMAT, run_facts, stage_facts
from shardway.plan.render.text import headline, line, list_breakdowns, list_notes, list_run
from shardway.plan.render.words import count, duration, gib, percent
from shardway.plan.units.answer import UnitAnswer
from shardway.plan.units.estimate import UnitCase, UnitEstimate

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
    """Everything of an answer; units stand in the names of the keys."""
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
