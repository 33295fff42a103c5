"""What else there is: other layouts with why they lost, what would make it fit, what the plan rests on.

Invariant: reasons, assumptions and warnings are the answer's own sentences. This module must not judge a layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardway.plan.answer.answer import PlanAnswer
from shardway.plan.estimate import Estimate
from shardway.plan.page.blocks import TableBlock, render_list, render_section, render_table, render_text
from shardway.plan.page.scaling import describe_short
from shardway.plan.render.words import count, duration, gib, percent
from shardway.plan.time.ceilings import ceilings_of


def render_warnings(answer: PlanAnswer) -> str:
    """What a person must know first; "" where there is nothing."""
    return render_section("Warnings", render_list(answer.warnings)) if answer.warnings else ""


def render_changes(answer: PlanAnswer) -> str:
    """What to do differently where nothing fits; "" where something does."""
    if answer.fits:
        return ""
    if not answer.changes:
        return render_section("What would make it fit", render_text("No single change that was tried does."))
    rows = tuple(
        (change.what, *_figures(change.estimate), describe_short(change.estimate)) for change in answer.changes
    )
    columns = ("change", "step", "tokens/s", "memory", "layout with it")
    told = "Each change alone, the smallest first."
    table = TableBlock("What would make it fit", columns, rows, words=frozenset({4}))
    return render_section("What would make it fit", render_text(told), render_table(table))


def _figures(shown: Estimate) -> tuple[str, str, str]:
    return duration(shown.time.seconds), count(shown.tokens_per_second), gib(shown.peak.device)


def render_others(answer: PlanAnswer) -> str:
    """Runners-up with what they spend more time on."""
    candidates = answer.found.candidates
    looked_at = f"{answer.found.looked_at:,} ways were looked at"
    fixed = f"; kept as they were set: {', '.join(sorted(answer.question.fixed))}" if answer.question.fixed else ""
    if not candidates:
        return render_section("Other layouts", render_text(f"{looked_at}, and none fits{fixed}."))
    best = candidates[0].estimate
    rows = tuple(
        (
            str(number),
            *_figures(each.estimate),
            f"{each.estimate.time.seconds / best.time.seconds - 1:+.1%}" if each.reason else "",
            describe_short(each.estimate),
            each.reason or "the layout of this page",
        )
        for number, each in enumerate(candidates, 1)
    )
    columns = ("", "step", "tokens/s", "memory", "slower", "layout", "why it lost")
    table = TableBlock(
        "The best of each set of degrees", columns, rows, words=frozenset({5, 6}), chosen=frozenset({"1"})
    )
    return render_section("Other layouts", render_text(f"{looked_at}{fixed}."), render_table(table))


def render_grounds(answer: PlanAnswer) -> str:
    """What was assumed, and where rates come from."""
    assumed = render_list(answer.assumed) if answer.assumed else render_text("Nothing had to be assumed.")
    return render_section(
        "What the plan rests on", "<h3>Assumed</h3>", assumed, "<h3>Rates</h3>", render_list(_rates(answer))
    )


def _rates(answer: PlanAnswer) -> Iterator[str]:
    machine, shown = answer.question.machine, answer.shown
    bandwidth = machine.accelerator.memory_bandwidth_bytes_per_s
    memory = f", memory {bandwidth / 1e12:.3g} TB/s" if bandwidth else ""
    yield (
        f"On paper, for each accelerator: {shown.peak_flops / 1e12:,.0f} TFLOP/s {shown.case.precision}{memory}, link "
        f"{machine.link / 1e9:,.0f} GB/s, network {machine.network / 1e9:,.4g} GB/s (one direction)."
    )
    if not machine.measured:
        yield "What part of these is reached was fitted on published measurements; nothing was measured on this site."
    else:
        values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(machine.measured.items()))
        yield f"Measured on this site: {values}. Other factors were fitted on published measurements."
    ceilings = ceilings_of(machine)
    yield (
        f"Of these rates the plan takes {percent(ceilings.matmul)} for large products, {percent(ceilings.memory)} for "
        f"memory, {percent(ceilings.link)} for the link and {percent(ceilings.network)} for the network."
    )
