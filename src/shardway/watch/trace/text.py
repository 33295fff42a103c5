"""An analysis of traces as text.

Invariants: the quality of the capture comes first; lines are plain ASCII; what is not known reads "n/a".
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from shardway.units import render_plural
from shardway.watch.trace.analysis import TraceAnalysis, merge_ranks

_PARTS = {
    "compute_ms": "computing",
    "comm_exposed_ms": "communication, exposed",
    "copy_ms": "copies",
    "idle_ms": "idle",
}
_CAUSES = {
    "host_bound": "waiting for a launch",
    "sync": "after the host waited for the device",
    "data_loader": "in the data loader",
    "allocator": "allocating",
    "profiler": "the profiler's own",
    "unknown": "no cause found",
}
_CAUSES_ON_CPU = {**_CAUSES, "host_bound": "between operators (Python)"}


def render_analysis(
    ranks: Sequence[TraceAnalysis],
    comparison: dict[str, Any] | None = None,
    *,
    operators: int = 10,
    width: int = 120,
) -> str:
    """One or several traces, and what changed against another one, in lines of `width` characters where that can be."""
    facts = merge_ranks(ranks)
    lines = [*_render_head(facts, ranks), *_render_quality(facts, width)]
    if facts["step_ms"] > 0 and not (any(fault["severity"] == "fatal" for fault in facts["quality"])):
        lines += [*_render_breakdown(facts), *_render_ranks(facts), *_render_facts(facts)]
        lines += [*_render_operators(facts, operators, width), *_render_advice(facts, width)]
    if comparison is not None:
        lines += _render_comparison(comparison)
    return "\n".join(lines)


def _render_head(facts: dict[str, Any], ranks: Sequence[TraceAnalysis]) -> list[str]:
    title = facts["file"] if len(ranks) == 1 else f"{len(ranks)} traces, the slowest {facts['file']}"
    part = f" ({facts['accelerator']})" if facts["accelerator"] else ""
    dropped = facts["steps_seen"] - facts["steps"]
    steps = render_plural(facts["steps"], "step") if facts["step_marks"] else "the capture as one step"
    left = f", {dropped} at the edges left out" if dropped else ""
    return [
        title,
        f"  device      {facts['gpu'] or 'n/a'}{part}",
        f"  steps       {steps}{left}, {facts['step_ms']:.2f} ms on average",
    ]


def _wrap(text: str, width: int, indent: int, first: str = "") -> list[str]:
    """A paragraph whose lines begin below each other; `first` stands before it."""
    begin = first.ljust(indent)
    room = max(width, indent + 30)
    return textwrap.wrap(
        text,
        room,
        initial_indent=begin,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _render_quality(facts: dict[str, Any], width: int) -> list[str]:
    if not facts["quality"]:
        return ["", "Capture: nothing is wrong with it"]
    lines = ["", "Capture"]
    for fault in facts["quality"]:
        lines += _wrap(f"{fault['rule']}: {fault['what']}", width, 10, f"  {fault['severity']}")
        lines += _wrap(f"to do: {fault['do']}", width, 10)
    return lines


def _render_breakdown(facts: dict[str, Any]) -> list[str]:
    step = facts["step_ms"]
    lines = ["", "A step, ms"]
    for name, word in _PARTS.items():
        ms = facts["breakdown"][name]
        lines.append(f"  {word:38}{ms:10.2f}  {100 * ms / step:5.1f} %")
    causes = _CAUSES if facts["kernels_per_step"] else _CAUSES_ON_CPU
    for cause, ms in sorted(facts["idle_causes_ms"].items(), key=lambda each: -each[1]):
        if ms >= 0.005 * step:
            lines.append(f"    {causes[cause]:36}{ms:10.2f}  {100 * ms / step:5.1f} %")
    return lines


def _render_ranks(facts: dict[str, Any]) -> list[str]:
    if "ranks" not in facts:
        return []
    lines = ["", "Ranks, ms of a step            step   own work    exposed       idle"]
    for each in facts["ranks"]:
        name = f"rank {each['rank']}" if each["rank"] is not None else each["file"][-24:]
        parts = each["breakdown"]
        lines.append(
            f"  {name:24}{each['step_ms']:9.2f}{each['busy_ms']:11.2f}"
            f"{parts['comm_exposed_ms']:11.2f}{parts['idle_ms']:11.2f}"
        )
    spread = facts.get("arrival_spread_ms")
    if spread:
        lines.append(
            f"  collectives begin {spread['per_step']:.2f} ms a step apart, one of them {spread['most']:.2f} ms"
            f" ({spread['matched']:,} matched, {_how_matched(spread)})"
        )
    return lines


def _how_matched(spread: dict[str, Any]) -> str:
    if spread["matched_by_number"] == spread["matched"]:
        return "by group and number"
    return (
        f"{spread['matched_by_number']:,} by group and number, others by order"
        if spread["matched_by_number"]
        else "by order"
    )


def _render_facts(facts: dict[str, Any]) -> list[str]:
    lines = [""]
    if facts["kernels_per_step"]:
        lines.append(f"  kernels     {facts['kernels_per_step']:.0f} a step")
    share = facts["tensor_core_share"]
    if facts["kernels_per_step"]:
        lines.append(
            f"  products    {'n/a' if share is None else f'{100 * share:.0f} %'} of their time on tensor cores"
        )
    if facts["optimizer"]:
        lines.append(f"  optimizer   {facts['optimizer']['kind']}, {facts['optimizer']['ms']:.2f} ms")
    if facts["attention"]:
        lines.append(f"  attention   {', '.join(facts['attention'][:4])}")
    if facts["recompute_ms"]:
        lines.append(
            f"  recompute   {facts['recompute_ms']:.2f} ms, {100 * facts['recompute_ms'] / facts['step_ms']:.0f} %"
        )
    return lines if len(lines) > 1 else []


def _render_operators(facts: dict[str, Any], most: int, width: int) -> list[str]:
    if not facts["operators"] or not most:
        return []
    wide = min(48, max(width - 56, 16))
    lines = ["", f"{'Operators':{wide + 2}}       ms    calls  TFLOP/s  of peak     TB/s  of peak"]
    for each in facts["operators"][:most]:
        name = f"{each['name']} {each['shapes']} {each['dtype'] or ''}".strip()
        lines.append(
            f"  {name[:wide]:{wide}}{each['ms']:9.2f}{each['calls']:9.4g}"
            f"{_number(each['tflops']):>9}{_percent(each['flop_share']):>9}"
            f"{_number(each['tb_per_s']):>9}{_percent(each['byte_share']):>9}"
        )
    return lines


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.0f} %"


def _render_advice(facts: dict[str, Any], width: int) -> list[str]:
    if not facts["advice"]:
        return ["", "Advice: none: no rule finds a cost of 3 % of a step"]
    lines = ["", "Advice (each at most so much of a step; they overlap, do not add them up)"]
    for place, each in enumerate(facts["advice"], 1):
        most = (
            f", at most {each['ceiling_ms']:.2f} ms ({each['ceiling_percent']:.0f} %)"
            if each["ceiling_ms"] is not None
            else ""
        )
        lines += _wrap(f"{each['rule']}{most}", width, 5, f"  {place}.")
        for text in (each["evidence"], f"do: {each['do']}", f"check: {each['check']}"):
            lines += _wrap(text, width, 5)
    return lines


def _render_comparison(comparison: dict[str, Any]) -> list[str]:
    step = comparison["step_ms"]
    speed = comparison["speedup"]
    verdict = (
        "n/a" if speed is None else f"{speed:.3f} times as fast" if abs(speed - 1) >= 0.01 else "as fast as before"
    )
    lines = ["", f"Against {comparison['file']}: {verdict}", f"  {'ms of a step':38}    before       now    change"]
    rows = {"step": step, **{_PARTS[name]: value for name, value in comparison["breakdown"].items()}}
    lines += [
        f"  {word:38}{each['before']:10.2f}{each['now']:10.2f}{each['now'] - each['before']:+10.2f}"
        for word, each in rows.items()
    ]
    lines += [
        f"  {each['name'][:38]:38}{each['before_ms']:10.2f}{each['now_ms']:10.2f}"
        f"{each['now_ms'] - each['before_ms']:+10.2f}"
        for each in comparison["operators"][:10]
    ]
    return lines
