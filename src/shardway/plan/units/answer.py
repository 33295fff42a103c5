"""The plan of a model that is known by its units: copies or shards, the micro-batch, the whole run.

Invariant: of what fits the fastest step wins; copies where these are as fast as shards. This module must not render.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardway.plan.answer.assumed import assume_saving
from shardway.plan.answer.terms import JobTerms, TrainingWork, list_warnings, price_run
from shardway.plan.case import divisors
from shardway.plan.economy import RunEstimate
from shardway.plan.machine import Machine
from shardway.plan.search.best import NEAR
from shardway.plan.units.estimate import UnitCase, UnitEstimate, estimate_units
from shardway.units import Scale, Span


@dataclass(frozen=True)
class UnitQuestion:
    """What is fixed: a case (its micro-batch and shards too where `fixed` names them), machine, ranks, length."""

    case: UnitCase
    machine: Machine
    world: int
    length: Span | None = None
    fixed: frozenset[str] = frozenset()
    tokens_per_sample: int = 1

    @property
    def nodes(self) -> int:
        """Nodes that the ranks are on."""
        return -(-self.world // self.machine.per_node)


@dataclass(frozen=True)
class UnitAnswer:
    """What fits, best first; `shown` is the best, or what needs least memory where nothing fits."""

    question: UnitQuestion
    terms: JobTerms
    fitting: tuple[UnitEstimate, ...]
    shown: UnitEstimate
    run: RunEstimate | None
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]


def answer_units(question: UnitQuestion, terms: JobTerms, assumed: tuple[str, ...] = ()) -> UnitAnswer:
    """Price every micro-batch and both ways to hold the states. Raises UserError where the batch does not split."""
    priced = [estimate_units(case, question.machine) for case in _list_cases(question)]
    fitting = _order([each for each in priced if each.fits])
    shown = fitting[0] if fitting else min(priced, key=lambda each: each.peak.device)
    told = list(assumed)
    run = None
    if fitting and question.length:
        saving = assume_saving(question.case.model.parameters, question.nodes)
        work = TrainingWork(
            length=question.length,
            scale=Scale(question.case.global_batch, question.tokens_per_sample, 1),
            step_seconds=shown.time.seconds,
            ranks=question.world,
        )
        run = price_run(work, question.machine, terms, saving)
        told.append(saving.told)
    return UnitAnswer(question, terms, tuple(fitting), shown, run, tuple(told), list_warnings(terms, question.nodes))


def _order(fitting: list[UnitEstimate]) -> list[UnitEstimate]:
    """Fastest first, but copies before shards, and large passes before small, among those as fast as the fastest."""
    fastest = min((each.time.seconds for each in fitting), default=0.0)
    equal = [each for each in fitting if each.time.seconds <= fastest * (1 + NEAR)]
    others = [each for each in fitting if each.time.seconds > fastest * (1 + NEAR)]
    equal.sort(key=lambda each: (each.case.dp_shard > 1, -each.case.micro_batch))
    return [*equal, *sorted(others, key=lambda each: each.time.seconds)]


def _list_cases(question: UnitQuestion) -> Iterator[UnitCase]:
    base, world = question.case, question.world
    shards = [base.dp_shard] if "dp_shard" in question.fixed else [1, world] if world > 1 else [1]
    # Where the batch does not split over the ranks the case itself refuses, with what is allowed.
    sizes = divisors(base.global_batch // world) if base.global_batch % world == 0 else [1]
    for shard in shards:
        for size in [base.micro_batch] if "micro_batch" in question.fixed else sizes:
            yield replace(base, dp_replicate=world // shard, dp_shard=shard, micro_batch=size)
