"""The rule of a layout that is left to the planner.

Invariant: it derives open keys or refuses; it never changes what the user set. No files are read, and the planner is
loaded only if a layout is left to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardway.errors import UserError, render_reason
from shardway.layout import AXES
from shardway.resolve.draft import Draft, Rule
from shardway.resolve.rules.numbers import count_of

if TYPE_CHECKING:
    from shardway.plan.machine import Machine
    from shardway.plan.shapes.architecture import Architecture
    from shardway.resolve.planned_layout import Missed, OpenLayout

LAYOUT = "parallel.layout"
GIVEN = 'set parallel.layout = "given" and the degrees'


def bind_layout_rule(rules: Sequence[Rule]) -> Rule:
    """The rule, for the list of rules that a layout has to pass after it."""

    def an_open_layout_is_the_fastest_that_fits(draft: Draft) -> None:
        # If a run is refused for another reason, that is reported first: its layout could not be priced.
        if draft.get(LAYOUT) == "given" or draft.problems:
            return
        shape = _find_shape(draft)
        if shape is not None:
            _settle(draft, rules, shape)

    return an_open_layout_is_the_fastest_that_fits


def _settle(draft: Draft, rules: Sequence[Rule], shape: Architecture) -> None:
    machine, found = draft.circumstances.machine, draft.circumstances.accelerators
    if machine is not None:
        _search(draft, rules, shape, machine)
    elif found and draft.get("run.device") != "cpu":
        what = f'"auto": memory and rates of the {found} accelerators of this machine are not known'
        draft.refuse(LAYOUT, what, '"given"', f"name a site that says what they are (site.name), or {GIVEN}")
    else:
        _only_copy(draft)


def _find_shape(draft: Draft) -> Architecture | None:
    """The model in numbers; a model that the planner does not support is refused, on any machine."""
    from shardway.resolve.planned_case import shape_of_run

    facts = draft.circumstances
    try:
        if not facts.own_model:
            return shape_of_run(draft.values, facts.shape)
        reason = "a script brings its own model, whose layers the planner does not know"
    except UserError as error:
        reason = render_reason(str(error)).partition(": ")[2]
    draft.refuse(LAYOUT, f'"auto": {reason}', '"given"', GIVEN)
    return None


def _only_copy(draft: Draft) -> None:
    """The layout of the same file on a machine without accelerators."""
    ranks, axis = draft.circumstances.ranks, "dp_replicate" if draft.is_open("parallel.dp_replicate") else "dp_shard"
    others = [draft.get(f"parallel.{name}") for name in AXES if name != axis]
    if draft.is_open(f"parallel.{axis}") and "auto" not in others and ranks % math.prod(others) == 0:
        reason = "no accelerator is known, so ranks only " + ("copy" if axis == "dp_replicate" else "share states")
        draft.derive(f"parallel.{axis}", ranks // math.prod(others), reason)


def _search(draft: Draft, rules: Sequence[Rule], shape: Architecture, machine: Machine) -> None:
    from shardway.resolve.planned_case import precision_of
    from shardway.resolve.planned_layout import KEYS, Missed, OpenLayout, choose_layout

    wish = OpenLayout(draft=draft, rules=rules, shape=shape, machine=machine)
    if not any(draft.is_open(key) for keys in KEYS.values() for key in keys):
        return
    try:
        machine.peak(precision_of(draft.values.precision))
    except UserError:
        what = f'"{draft.get("precision.compute")}" has no rate on {machine.accelerator.name}'
        draft.refuse("precision.compute", what, '"fp32", "bf16", "fp16"')
        return
    chosen = choose_layout(wish)
    if isinstance(chosen, Missed):
        _report_missed(wish, chosen)
        return
    for dotted, value in chosen.values.items():
        draft.derive(dotted, value, chosen.reasons[dotted])


def _report_missed(wish: OpenLayout, missed: Missed) -> None:
    from shardway.resolve.planned_layout import TrialDraft, describe_need, list_values

    draft, ranks = wish.draft, wish.draft.circumstances.ranks
    nearest = missed.nearest
    if nearest is not None:
        draft.refuse(
            LAYOUT,
            f'"auto": no layout of {count_of(ranks, "rank")} fits. The nearest, {nearest.case.degrees.render()}, needs '
            f"{describe_need(nearest)}",
            "",
            missed.help or "train a smaller model, shorter sequences, or on far more ranks",
        )
        # The rules that follow must not report on a layout that was not asked for.
        for dotted, value in missed.values.items():
            draft.derive(dotted, value, "nothing fits")
    elif TrialDraft(draft, ranks, {"train.micro_batch": 1}, list_values(draft)).passes(wish.rules):
        what = f'"auto": no layout of {count_of(ranks, "rank")} is legal with what is set'
        draft.refuse(LAYOUT, what, "", f"leave more degrees open, or {GIVEN}")
