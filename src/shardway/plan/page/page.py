"""A plan as one HTML file: facts, memory, the step, the pipeline, scaling, alternatives, grounds.

Invariant: the page is complete by itself: it fetches nothing, runs no script, and reads as well in the dark and on
paper. This module must not write the file.
"""

from __future__ import annotations

from shardway.plan.answer.answer import PlanAnswer
from shardway.plan.page.blocks import render_document
from shardway.plan.page.facts import render_headline, render_run, title_of
from shardway.plan.page.memory import render_memory
from shardway.plan.page.others import render_changes, render_grounds, render_others, render_warnings
from shardway.plan.page.scaling import render_scaling
from shardway.plan.page.schedule import render_schedule
from shardway.plan.page.step import render_step
from shardway.plan.search.curve import ScalingPoint


def render_page(answer: PlanAnswer, curve: tuple[ScalingPoint, ...]) -> str:
    """The page of an answer with the scaling curve around it (which may be empty)."""
    shown = answer.shown
    sections = [
        render_headline(answer),
        render_warnings(answer),
        render_changes(answer),
        render_memory(shown),
        render_step(shown),
        render_schedule(shown),
        render_run(answer),
        render_scaling(curve, answer.question.nodes),
        render_others(answer),
        render_grounds(answer),
        "<footer>Made by shardway plan. Estimates, not measurements: docs/plan.md says how good they are.</footer>",
    ]
    return render_document(f"{title_of(answer)} - Shardway plan", "\n".join(part for part in sections if part))
