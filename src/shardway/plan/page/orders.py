"""In which order a pipeline rank works on its stages and micro-batches, for each schedule.

Invariant: each forward and each backward pass of a stage and micro-batch comes once, and the orders of all ranks
together never wait for each other. This module must not know how long anything takes.

Sources: GPipe, 1F1B and interleaved: Narayanan et al., arXiv:2104.04473, section 2.2; zero bubble and V: Qi et al.,
arXiv:2401.10241, sections 2 and 6. Rounds of an interleaved schedule are those that PyTorch makes: as many
micro-batches as there are ranks, or a few more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from shardway.layout import count_rounds, stages_of_rank
from shardway.plan.case import Case, Schedule

Kind = Literal["forward", "backward", "weight"]
"""A pass; "weight" is the part of a backward pass that only gradients of weights need, where it comes later."""

SPLIT: tuple[Schedule, ...] = ("zero_bubble", "zbv")
"""Schedules that part the backward pass."""


@dataclass(frozen=True)
class Action:
    """A pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int


def list_orders(case: Case) -> tuple[tuple[Action, ...], ...]:
    """What each pipeline rank does, first to last."""
    order = _order_there_and_back if case.schedule == "zbv" else _order_in_rounds
    return tuple(tuple(order(case, rank)) for rank in range(case.degrees.pp))


def count_held(case: Case) -> int:
    """Stages of a rank."""
    return len(stages_of_rank(0, case.degrees.pp, case.stages_per_rank, case.schedule))


def split_rounds(passes: int, ranks: int) -> tuple[int, ...]:
    """Micro-batches of each round, as equal as can be."""
    rounds = count_rounds(passes, ranks)
    base, more = divmod(passes, rounds)
    return tuple(base + (each < more) for each in range(rounds))


def _order_in_rounds(case: Case, rank: int) -> Iterator[Action]:
    """Forward passes alone at first, then a backward pass after each, then the rest of these.

    Gradients of weights wait for as many micro-batches as stages before this one do: then these get theirs sooner.
    """
    held = stages_of_rank(rank, case.degrees.pp, case.stages_per_rank, case.schedule)
    there, back = _in_rounds(case, held), _in_rounds(case, held[::-1])
    lead, later = min(len(there), _lead(case, rank)), rank if case.schedule in SPLIT else 0
    for place in range(len(there) + lead):
        if place < len(there):
            yield Action("forward", *there[place])
        if place >= lead:
            yield Action("backward", *back[place - lead])
        if case.schedule in SPLIT and place >= lead + later:
            yield Action("weight", *back[place - lead - later])
    if case.schedule in SPLIT:
        yield from (Action("weight", *each) for each in back[max(0, len(back) - later) :])


def _in_rounds(case: Case, held: Sequence[int]) -> list[tuple[int, int]]:
    """Stages with micro-batches: a round goes through one stage of a rank as a whole before it goes on to the next."""
    rounds = split_rounds(case.micro_batches, case.degrees.pp) if len(held) > 1 else (case.micro_batches,)
    edges = pairwise(accumulate(rounds, initial=0))
    return [(stage, number) for start, end in edges for stage in held for number in range(start, end)]


def _lead(case: Case, rank: int) -> int:
    """Forward passes before the first pair of a forward and a backward pass."""
    after, per_rank = case.degrees.pp - 1 - rank, case.stages_per_rank
    if case.schedule == "gpipe":
        return case.micro_batches
    if per_rank == 1:
        return after
    whole = (per_rank - 1) * max(split_rounds(case.micro_batches, case.degrees.pp))
    return whole + (1 if case.schedule in SPLIT else 2) * after


# --- the V

_Walk = tuple[tuple[Kind, int], ...]

_FORWARD: _Walk = (("forward", 0), ("forward", 1))
_BACKWARD: _Walk = (("backward", 0), ("backward", 1))
_WEIGHT: _Walk = (("weight", 0), ("weight", 1))
"""A pass of a micro-batch through the stage on the way there (0) and through the one on the way back (1)."""
_STEADY: _Walk = (_FORWARD[0], _BACKWARD[0], _WEIGHT[0], _FORWARD[1], _BACKWARD[1], _WEIGHT[1])


def _order_there_and_back(case: Case, rank: int) -> Iterator[Action]:
    held = stages_of_rank(rank, case.degrees.pp, 2, "zbv")
    done: Counter[tuple[Kind, int]] = Counter()
    for kind, way in _walk_v(case.degrees.pp, rank, case.micro_batches):
        number = done[kind, way]
        done[kind, way] += 1
        if number < case.micro_batches:
            yield Action(kind, held[way], number)


def _walk_v(ranks: int, rank: int, passes: int) -> Iterator[tuple[Kind, int]]:
    """Kinds of passes, each with its way; more of them than there are micro-batches for."""
    after = ranks - rank
    yield from _FORWARD[:1] * (2 * after - 1)
    yield from _FORWARD[::-1] * rank
    yield from _STEADY[3:] * after
    yield from _STEADY * (passes - ranks)
    # Ranks before this one wait for gradients of inputs; those of weights fill what is left.
    yield from _BACKWARD * passes
    yield from _WEIGHT * passes
