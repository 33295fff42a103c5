"""Which layers each pipeline rank has, and how many micro-batches it keeps at once.

Invariant: stages follow one another, each has a layer at least, and sizes differ by one at most: the ends, which carry
the embedding and the head, are never the larger ones. This module must not price a layer.

Sources: Narayanan et al., arXiv:2104.04473, section 2.2 (GPipe, 1F1B, interleaved); Korthikanti et al.,
arXiv:2205.05198, section 4.2.3 (what interleaving keeps); Qi et al., arXiv:2401.10241, sections 2 and 6 (zero bubble,
V).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate

from shardway.layout import stages_of_rank
from shardway.plan.case import Case
from shardway.plan.shapes.architecture import LayerRun, Side
from shardway.plan.shapes.layer import LayerShape

Runs = tuple[LayerRun, ...]


@dataclass(frozen=True)
class StageLayers:
    """What one pipeline rank computes: layers with how many of each, and which ends of the model are with it."""

    rank: int
    layers: Runs
    first: bool
    last: bool

    @property
    def count(self) -> int:
        """Layers in all."""
        return sum(run.count for run in self.layers)


def list_stages(case: Case) -> tuple[StageLayers, ...]:
    """One entry a pipeline rank."""
    return _cut(case.model.runs, case.degrees.pp, case.stages_per_rank, case.schedule)


@lru_cache(maxsize=4096)
def _cut(runs: Runs, ranks: int, per_rank: int, schedule: str) -> tuple[StageLayers, ...]:
    sizes = split_evenly(sum(run.count for run in runs), ranks * per_rank)
    edges = list(accumulate(sizes, initial=0))
    stages = []
    for rank in range(ranks):
        held = stages_of_rank(rank, ranks, per_rank, schedule)
        parts = [_count_between(runs, edges[stage], edges[stage + 1]) for stage in held]
        stages.append(StageLayers(rank, _merge(parts), 0 in held, ranks * per_rank - 1 in held))
    return tuple(stages)


def _count_between(runs: Runs, start: int, end: int) -> Runs:
    """The layers at places from `start` to before `end`."""
    found, place = [], 0
    for run in runs:
        inside = min(end, place + run.count) - max(start, place)
        if inside > 0:
            found.append(replace(run, count=inside))
        place += run.count
    return tuple(found)


def _merge(parts: Sequence[Runs]) -> Runs:
    counts: dict[tuple[LayerShape, Side], int] = {}
    for run in (run for part in parts for run in part):
        counts[run.layer, run.side] = counts.get((run.layer, run.side), 0) + run.count
    return tuple(LayerRun(layer, count, side) for (layer, side), count in counts.items())


@cache
def split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage; what does not divide goes to stages in the middle."""
    base, more = divmod(layers, stages)
    start = (stages - more + 1) // 2
    return tuple(base + (start <= stage < start + more) for stage in range(stages))


def kept_micro_batches(case: Case, rank: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at its peak, in units of all of its layers."""
    ranks, passes = case.degrees.pp, case.micro_batches
    if ranks == 1:
        return 1.0
    if case.schedule == "gpipe":
        return float(passes)
    if case.schedule == "zbv":
        return float(min(passes, ranks))
    waiting = ranks - rank
    if case.stages_per_rank == 1:
        return float(min(passes, waiting))
    chunks = 2 * (waiting - 1) + (case.stages_per_rank - 1) * ranks + 1
    return min(float(passes), chunks / case.stages_per_rank)
