"""The sections of a report about what a model gives: its evaluations, and how it continued prompts in training.

Invariant: a text is shown as it was recorded, escaped, and as long as `MOST_CHARACTERS`; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardway.drawing import render_table
from shardway.rundir.events import Event
from shardway.watch.facts import Evaluation, read_sampled
from shardway.watch.words import one_line, render_extent, render_number

MOST_CHARACTERS = 600
MOST_STEPS = 12
"""The last steps with samples that are shown; events have them all."""


def render_evaluations(evaluations: Sequence[Evaluation]) -> str:
    """A table of all results, one a number."""
    rows = [
        (
            str(each.step),
            one_line(each.kind),
            ", ".join(filter(None, (one_line(each.data), render_extent(each)))),
            one_line(name),
            render_number(value, ".6g"),
            render_number(each.errors[name], ".2g") if name in each.errors else "",
        )
        for each in evaluations
        for name, value in each.results.items()
    ]
    if not rows:
        return ""
    columns = ("step", "kind", "data", "metric", "value", "standard error")
    return f"<h2>Evaluations</h2>{render_table('', columns, rows, plain=True)}"


def render_samples(events: Sequence[Event]) -> str:
    """A table of the last samples, those of undone steps as well, as curves show them."""
    found = [read_sampled(event) for event in events if event["event"] == "sampled"]
    rows = [
        (str(each.step), _shorten(prompt), _shorten(made))
        for each in found[-MOST_STEPS:]
        for prompt, made in each.samples
    ]
    if not rows:
        return ""
    more = len(found) - MOST_STEPS
    note = (
        f'<p class="soft">{escape(f"The last {MOST_STEPS} of {len(found)} steps with samples.")}</p>'
        if more > 0
        else ""
    )
    return f"<h2>Samples</h2>{render_table('', ('step', 'prompt', 'continuation'), rows, plain=True)}{note}"


def _shorten(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."
