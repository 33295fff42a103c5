"""What the planner says to the question of a row: memory, time, and whether it fits.

Invariant: what a row leaves open is chosen as the planner would choose it: the fastest that fits. This module must not
look at a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rows import Question

from shardway.plan.case import Case, Ceilings, Machine, load_ceilings
from shardway.plan.memory import Overheads, StageMemory, estimate_memory, load_overheads, peak_stage
from shardway.plan.time import StepTime, estimate_step

MICRO_BATCHES = (1, 2, 4, 8, 16)
STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 7, 8)

KNOWN_TO_RUN = 1.05
"""What was published did run: of what a row leaves open, choices may need so much of a device's memory."""

Factors = Callable[[Machine], Ceilings]
"""The efficiency factors of a machine."""


@dataclass(frozen=True)
class Answer:
    """The case that was priced, its peak memory, its time, and whether the device holds it."""

    case: Case
    memory: StageMemory
    time: StepTime
    fits: bool


def shipped_factors(machine: Machine) -> Ceilings:
    """Those that come with the package."""
    return load_ceilings(machine.accelerator)


def answer(question: Question, factors: Factors = shipped_factors) -> Answer:
    """The fastest of the cases that a question allows and that fit, or the fastest of all where none fits."""
    ceilings, overheads = factors(question.machine), load_overheads()
    answers = [_price(case, question.machine, ceilings, overheads) for case in list_cases(question)]
    limit = question.machine.memory_bytes * KNOWN_TO_RUN
    return min(answers, key=lambda each: (each.memory.device > limit, each.time.seconds))


def _price(case: Case, machine: Machine, ceilings: Ceilings, overheads: Overheads) -> Answer:
    memory = peak_stage(estimate_memory(case, overheads))
    fits = memory.device <= machine.memory_bytes * overheads.usable
    return Answer(case, memory, estimate_step(case, machine, ceilings), fits)


def list_cases(question: Question) -> list[Case]:
    """Every case that a question allows."""
    cases = [question.case]
    for name, vary in (("micro_batch", _vary_batch), ("stages_per_rank", _vary_stages), ("recompute", _vary_recompute)):
        if name in question.open:
            cases = [varied for case in cases for varied in vary(case)] or cases
    return cases


def _vary_batch(case: Case) -> Iterator[Case]:
    for size in MICRO_BATCHES:
        if case.global_batch % (case.degrees.data * size) == 0:
            yield replace(case, micro_batch=size)


def _vary_stages(case: Case) -> Iterator[Case]:
    """A pipeline whose interleaving is not told: known to be plain where the micro-batch is told."""
    for count in STAGES_PER_RANK:
        if case.degrees.pp * count <= len(case.model.layers):
            yield replace(case, stages_per_rank=count, schedule="interleaved" if count > 1 else "1f1b")


def _vary_recompute(case: Case) -> Iterator[Case]:
    yield case
    between = case.engine.between if case.flash else "selective"
    if between != "none":
        yield replace(case, recompute=between)
    yield replace(case, recompute="full")
