"""Every legal layout of a question: degrees, micro-batch, recompute, schedule, sharding.

Invariant: a layout is listed once, in an order that does not depend on chance, and only where every degree divides what
it must. This module must not price anything.

What is legal follows Narayanan et al., arXiv:2104.04473, section 5.1 (tensor parallel inside the fast link), and
Korthikanti et al., arXiv:2205.05198; recompute goes from nothing to everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardway.plan.case import Case, Degrees, Recompute, Schedule, divisors
from shardway.plan.machine import Machine

LONGEST_PART = 4096
"""A sequence is split only where each part still has so many tokens."""
MOST_MICRO_BATCH = 64
MOST_STAGES_PER_RANK = 8


@dataclass(frozen=True)
class Question:
    """What is fixed: the case's model, batch, precision, optimizer and engine, the machine, and how many ranks.

    `ladder`: recompute modes from least to most; `fixed` names what the person set and the search must keep.
    """

    case: Case
    machine: Machine
    world: int
    fixed: frozenset[str] = frozenset()

    @property
    def ladder(self) -> tuple[Recompute, ...]:
        """Modes of recompute that the engine has, from the fastest to the smallest."""
        if "recompute" in self.fixed:
            return (self.case.recompute,)
        between: Recompute = self.case.engine.between if self.case.flash else "selective"
        return ("none", between, "full") if between != "none" else ("none", "full")


def list_degrees(question: Question) -> Iterator[Degrees]:
    """Every split of the ranks over the axes."""
    case, world = question.case, question.world
    layers = sum(run.count for run in case.model.runs)
    for tp in _tensor_degrees(question):
        for pp in _choices(question, "pp", [size for size in divisors(world // tp) if size <= layers]):
            for cp in _choices(question, "cp", _context_degrees(case, world // (tp * pp))):
                if world % (tp * pp * cp) == 0 and case.seq_len % cp == 0:
                    yield from _data_degrees(question, tp, pp, cp)


def _choices(question: Question, name: str, sizes: list[int]) -> list[int]:
    """The sizes, or the one that the person set."""
    return [getattr(question.case.degrees, name)] if name in question.fixed else sizes


def _tensor_degrees(question: Question) -> list[int]:
    """Degrees inside the fast link that divide the heads and the ranks."""
    heads = question.case.model.runs[0].layer.attention.heads
    sizes = [size for size in divisors(heads) if size <= question.machine.domain and question.world % size == 0]
    inside = [size for size in sizes if question.machine.per_node % size == 0 or size == question.machine.domain]
    return _choices(question, "tp", inside)


def _context_degrees(case: Case, ranks: int) -> list[int]:
    return [size for size in divisors(ranks) if size == 1 or case.seq_len // size >= LONGEST_PART]


def _data_degrees(question: Question, tp: int, pp: int, cp: int) -> Iterator[Degrees]:
    """What is left is data parallel: shared by all, or by each node (or by as few as hold it) and copied."""
    case = question.case
    data = question.world // (tp * pp * cp)
    if case.global_batch % data:
        return
    for shard in _shard_degrees(question, data, tp * cp):
        for ep in _expert_degrees(question, shard * cp * tp):
            yield Degrees(dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=ep)


def _shard_degrees(question: Question, data: int, inner: int) -> list[int]:
    """All ranks share, or those of a node (hybrid sharding, arXiv:2304.11277, section 3.2.2), or nobody does."""
    near = max(1, question.machine.domain // inner)
    sizes = {data, 1, *([near] if data % near == 0 else [])}
    return _choices(question, "dp_shard", sorted(sizes, reverse=True))


def _expert_degrees(question: Question, ranks: int) -> list[int]:
    counts = {run.layer.experts.count for run in question.case.model.runs if run.layer.experts}
    sizes = [size for size in divisors(min(counts)) if ranks % size == 0] if counts else [1]
    return _choices(question, "ep", sizes)


def list_cases(question: Question, degrees: Degrees) -> Iterator[Case]:
    """Every way to run these degrees, recompute from least to most for each."""
    for schedule in list_schedules(question, degrees):
        for size in list_micro_batches(question, degrees):
            for zero, reshard in list_sharding(question, degrees):
                yield replace(
                    question.case,
                    degrees=degrees,
                    micro_batch=size,
                    zero=zero,
                    reshard=reshard,
                    sequence=degrees.tp > 1,
                    schedule=schedule[0],
                    stages_per_rank=schedule[1],
                    recompute=question.ladder[0],
                )


def list_micro_batches(question: Question, degrees: Degrees) -> list[int]:
    """Powers of two that divide a data rank's share."""
    share = question.case.global_batch // degrees.data
    if "micro_batch" in question.fixed:
        return [question.case.micro_batch] if share % question.case.micro_batch == 0 else []
    sizes = [2**power for power in range(MOST_MICRO_BATCH.bit_length())]
    return [size for size in sizes if share % size == 0]


def list_schedules(question: Question, degrees: Degrees) -> list[tuple[Schedule, int]]:
    """Plain and interleaved pipelines; others only where the person asks for them."""
    case = question.case
    if degrees.pp == 1:
        return [("1f1b", 1)]
    if "schedule" in question.fixed:
        return [(case.schedule, case.stages_per_rank)]
    interleave: Schedule = "interleaved"
    held = case.model.depth // degrees.pp
    interleaved = [size for size in divisors(max(1, held)) if 1 < size <= MOST_STAGES_PER_RANK]
    if held > 1 and not interleaved:
        interleaved = [min(held, MOST_STAGES_PER_RANK)]
    return [("1f1b", 1), *((interleave, size) for size in interleaved)]


def list_sharding(question: Question, degrees: Degrees) -> list[tuple[int, bool]]:
    """Stages of ZeRO with whether weights are freed after use."""
    if degrees.shards == 1:
        return [(0, True)]
    if "zero" in question.fixed:
        return [(question.case.zero, question.case.reshard)]
    if question.case.engine.shards_weights:
        return [(3, False)] if degrees.pp > 1 else [(3, True), (3, False)]
    return [(1, True)]
