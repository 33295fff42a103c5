"""Everything that answers a question: the layout, what it costs, the whole run, what else there is.

Invariant: all figures come from the rooms beside this one; here they are put together. This module must not render.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardway.errors import UserError, render_reason
from shardway.plan.answer.assumed import assume_saving
from shardway.plan.answer.said import SearchQuestion, refuse
from shardway.plan.answer.terms import JobTerms, TrainingWork, list_warnings, price_run
from shardway.plan.economy import RunEstimate
from shardway.plan.estimate import Estimate
from shardway.plan.search.best import SearchResult, search
from shardway.plan.search.changes import Change, list_changes
from shardway.plan.search.curve import ScalingPoint, default_nodes, scaling_curve
from shardway.plan.search.space import Question
from shardway.units import Scale, Span


@dataclass(frozen=True)
class PlanAnswer:
    """A plan. `shown` is the layout to take, or, where nothing fits, the one that needs least memory."""

    question: Question
    terms: JobTerms
    found: SearchResult
    shown: Estimate
    run: RunEstimate | None
    """The whole run, where its length is known and the layout fits."""
    changes: tuple[Change, ...]
    """What to do differently where nothing fits, or nothing without the host's memory."""
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether there is a layout that every device can hold."""
        return bool(self.found.candidates)


def answer(asked: SearchQuestion, terms: JobTerms | None = None) -> PlanAnswer:
    """Search, and price the whole run of the best. Raises UserError where no layout is legal."""
    terms = terms or JobTerms()
    question = asked.question
    found = search(question)
    shown = found.best or found.nearest
    if shown is None:
        raise refuse(question)
    on_host = shown.case.offload and not question.case.offload
    changes = list_changes(question) if on_host or not found.best else ()
    changes = tuple(change for change in changes if change.estimate.case != shown.case)
    bare = PlanAnswer(question, terms, found, shown, None, changes, asked.assumed, list_warnings(terms, question.nodes))
    return _with_run(bare, asked.length) if found.best and asked.length else bare


def _with_run(bare: PlanAnswer, length: Span) -> PlanAnswer:
    question, case = bare.question, bare.shown.case
    saving = assume_saving(case.model.parameters, question.nodes)
    work = TrainingWork(
        length=length,
        scale=Scale(case.global_batch, case.seq_len, 1),
        step_seconds=bare.shown.time.seconds,
        ranks=case.degrees.world,
    )
    try:
        run = price_run(work, bare.shown.machine, bare.terms, saving)
    except UserError as error:
        return replace(bare, warnings=(*bare.warnings, f"the whole run cannot be told: {render_reason(str(error))}"))
    return replace(bare, run=run, assumed=(*bare.assumed, saving.told))


def answer_curve(of: PlanAnswer) -> tuple[ScalingPoint, ...]:
    """The scaling curve around an answer."""
    return scaling_curve(of.question, default_nodes(of.question))
