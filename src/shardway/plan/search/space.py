"""Every legal layout of a question: degrees, micro-batch, recompute, schedule, sharding.

Invariant: a layout is listed once, in an order that does not depend on chance, and only where every degree divides what
it must. This module must not price anything.

What is legal follows Narayanan et al., arXiv:2104.04473, section 5.1 (tensor parallel inside the fast link), and
Korthikanti et al., arXiv:2205.05198; recompute goes from nothing to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from shardway.plan.case import Case, Degrees, Precision, Recompute, Schedule, divisors
from shardway.plan.machine import Machine
from shardway.plan.stages import fills_schedule

AXES = tuple(each.name for each in fields(Degrees) if each.name != "etp")
SETTINGS = ("micro_batch", "recompute", "schedule", "zero")
"""What a question may fix: axes, and what does not change which ranks work together."""

LONGEST_PART = 4096
"""A sequence is split only where each part still has so many tokens."""
MOST_MICRO_BATCH = 64
MOST_STAGES_PER_RANK = 8


@dataclass(frozen=True)
class Question:
    """What is fixed: the case's model, batch, precision, optimizer and engine, the machine, and how many ranks.

    `fixed` names what the person set and the search must keep. Formats that are listed in `precisions` are all tried;
    without any that of the case is kept. Offload is tried only where it is not fixed and nothing fits without.
    """

    case: Case
    machine: Machine
    world: int
    fixed: frozenset[str] = frozenset()
    precisions: tuple[Precision, ...] = ()
    as_run: Callable[[Case], Case | None] = lambda case: case
    """The case as its engine runs it; None for a layout that it refuses."""

    @property
    def nodes(self) -> int:
        """Nodes that the ranks are on."""
        return -(-self.world // self.machine.per_node)

    @property
    def formats(self) -> tuple[Precision, ...]:
        """Formats of products to try."""
        return self.precisions or (self.case.precision,)

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
    mixed = any(run.layer.experts for run in case.model.runs)
    etp = tp if mixed and case.engine.splits_experts else 1
    for shard in _shard_degrees(question, data, tp * cp):
        for ep in _expert_degrees(question, shard * cp * tp // etp):
            yield Degrees(dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp)


def _shard_degrees(question: Question, data: int, inner: int) -> list[int]:
    """All ranks share, or those of a node (hybrid sharding, arXiv:2304.11277, section 3.2.2), or nobody does."""
    near = max(1, question.machine.domain // inner)
    copies = question.case.degrees.dp_replicate if "dp_replicate" in question.fixed else 0
    sizes = {max(1, data // copies)} if copies else {data, 1, near}
    chosen = _choices(question, "dp_shard", sorted(sizes, reverse=True))
    return [size for size in chosen if data % size == 0 and copies in (0, data // size)]


def _expert_degrees(question: Question, ranks: int) -> list[int]:
    counts = {run.layer.experts.count for run in question.case.model.runs if run.layer.experts}
    sizes = [size for size in divisors(min(counts)) if ranks % size == 0] if counts else [1]
    return [size for size in _choices(question, "ep", sizes) if ranks % size == 0]


@dataclass(frozen=True)
class DegreeCandidates:
    """A way to run some degrees: cases with ever larger micro-batches, which need ever more memory."""

    cases: tuple[Case, ...]


def list_ways(question: Question, degrees: Degrees) -> Iterator[DegreeCandidates]:
    """Every format, schedule and sharding, without recompute; offload as in the question."""
    sizes = list_micro_batches(question, degrees)
    sequence = question.case.sequence if "sequence" in question.fixed else degrees.tp > 1
    for precision in question.formats if sizes else ():
        base = replace(
            question.case,
            degrees=degrees,
            micro_batch=sizes[0],
            precision=precision,
            sequence=sequence,
            stages_per_rank=1,
            recompute=question.ladder[0],
        )
        for schedule, stages_per_rank in list_schedules(question, degrees):
            for zero, reshard in list_sharding(question, degrees):
                way = replace(base, schedule=schedule, stages_per_rank=stages_per_rank, zero=zero, reshard=reshard)
                cases = (way, *(replace(way, micro_batch=size) for size in sizes[1:]))
                run = map(question.as_run, filter(fills_schedule, cases))
                taken = tuple(each for each in run if each is not None)
                if taken:
                    yield DegreeCandidates(taken)


def list_micro_batches(question: Question, degrees: Degrees) -> list[int]:
    """Powers of two that divide a data rank's share."""
    share = question.case.global_batch // degrees.data
    if "micro_batch" in question.fixed:
        return [question.case.micro_batch] if share % question.case.micro_batch == 0 else []
    sizes = [2**power for power in range(MOST_MICRO_BATCH.bit_length())]
    return [size for size in sizes if share % size == 0]


def list_schedules(question: Question, degrees: Degrees) -> list[tuple[Schedule, int]]:
    """Plain and interleaved pipelines; others only where the person asks for them, with any number of stages that the
    schedule takes unless that is set too."""
    case = question.case
    if degrees.pp == 1:
        return [("1f1b", 1)]
    held = case.model.depth // degrees.pp
    if "schedule" not in question.fixed:
        return [("1f1b", 1), *(("interleaved", size) for size in _stages_per_rank(held))]
    if case.schedule not in STAGES or case.stages_per_rank > 1:
        return [(case.schedule, case.stages_per_rank)] if case.stages_per_rank <= held else []
    least, most = STAGES[case.schedule]
    return [(case.schedule, size) for size in _stages_per_rank(held) if least <= size <= most]


STAGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"interleaved": (2, MOST_STAGES_PER_RANK), "zero_bubble": (2, MOST_STAGES_PER_RANK), "zbv": (2, 2)}
)
"""Schedules that want several stages on each rank, and how many they take."""


def _stages_per_rank(held: int) -> list[int]:
    """Numbers of stages above 1 that so many layers of a rank split into evenly, or one where none does."""
    sizes = [size for size in divisors(max(1, held)) if 1 < size <= MOST_STAGES_PER_RANK]
    return sizes or ([min(held, MOST_STAGES_PER_RANK)] if held > 1 else [])


def list_sharding(question: Question, degrees: Degrees) -> list[tuple[int, bool]]:
    """Stages of ZeRO with whether weights are freed after use."""
    if degrees.shards == 1:
        return [(0, True)]
    if "zero" in question.fixed:
        return [(question.case.zero, question.case.reshard)]
    if question.case.engine.shards_weights:
        return [(3, False)] if degrees.pp > 1 else [(3, True), (3, False)]
    return [(1, True)]
