"""The layers of each pipeline rank, and how many micro-batches it keeps at once.

Invariant: stages are consecutive and each has at least one layer. Unless an engine cuts otherwise, sizes differ by at
most one, and the ends, which carry the embedding and the head, are never the larger ones. No layer is priced here.

Sources: cuts: `partition_balanced` of DeepSpeed before its pull request 4312 (2023), `build_model` of nanotron 0.5;
schedules: Narayanan et al., arXiv:2104.04473, section 2.2 (GPipe, 1F1B, interleaved); Korthikanti et al.,
arXiv:2205.05198, section 4.2.3 (what interleaving keeps); Qi et al., arXiv:2401.10241, sections 2 and 6 (zero bubble,
V).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate

from shardway.layout import IN_ROUNDS, count_rounds, stages_of_rank
from shardway.plan.case import Case
from shardway.plan.shapes.architecture import LayerRun, LayerShape, Side

Runs = tuple[LayerRun, ...]


@dataclass(frozen=True)
class StageLayers:
    """The layers of one pipeline rank with their counts, and which ends of the model it holds."""

    rank: int
    layers: Runs
    first: bool
    last: bool

    @property
    def count(self) -> int:
        """The number of layers."""
        return sum(run.count for run in self.layers)


def list_stages(case: Case) -> tuple[StageLayers, ...]:
    """One entry per pipeline rank."""
    return _cut(case.model.runs, case.degrees.pp, case.stages_per_rank, case.schedule, layers_of_stages(case))


def layers_of_stages(case: Case) -> tuple[int, ...]:
    """The number of layers of each stage, in order."""
    layers = case.model.depth
    if case.engine.cut == "filled":
        return fill_up(layers, case.stages)
    if case.engine.cut == "weighed" and case.stages > 1:
        head = case.model.head.flops_per_token
        return split_by_weight([layer.matmul_flops_per_token for layer in case.model.layers], head, case.stages)
    return split_evenly(layers, case.stages)


@lru_cache(maxsize=4096)
def _cut(runs: Runs, ranks: int, per_rank: int, schedule: str, sizes: tuple[int, ...]) -> tuple[StageLayers, ...]:
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
    """Layers of each stage; the remainder goes to stages in the middle."""
    base, more = divmod(layers, stages)
    start = (stages - more + 1) // 2
    return tuple(base + (start <= stage < start + more) for stage in range(stages))


def fill_up(layers: int, stages: int) -> tuple[int, ...]:
    """Each stage has as many layers as the largest must have, until too few are left for that."""
    most = -(-layers // stages)
    sizes: list[int] = []
    for after in reversed(range(stages)):
        sizes.append(min(most, layers - sum(sizes) - after))
    return tuple(sizes)


def split_by_weight(weights: Sequence[float], last: float, stages: int) -> tuple[int, ...]:
    """Layers of each stage; a stage ends with the layer that takes it beyond its share. `last`: weight of the head."""
    total, done, sizes = sum(weights) + last, 0.0, [0]
    for place, weight in enumerate(weights):
        left = len(weights) - place
        if sizes[-1] and (done > total * len(sizes) / stages or left == stages - len(sizes)) and len(sizes) < stages:
            sizes.append(0)
        sizes[-1] += 1
        done += weight
    return tuple(sizes)


def fills_schedule(case: Case) -> bool:
    """Whether the schedule takes this number of micro-batches: rounds of equal size if a rank has several stages; for
    1F1B at least as many as there are ranks, unless the engine runs fewer."""
    ranks, passes = case.degrees.pp, case.micro_batches
    if ranks == 1:
        return True
    if case.schedule in IN_ROUNDS and passes % count_rounds(passes, ranks):
        return False
    return case.schedule != "1f1b" or passes >= ranks or case.engine.short_pipelines


def kept_micro_batches(case: Case, rank: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at its peak, in units of all of its layers.

    A rank leads by some forward passes before it alternates; delayed gradients of weights keep their inputs as well.
    """
    ranks, passes, per_rank = case.degrees.pp, case.micro_batches, case.stages_per_rank
    if ranks == 1:
        return 1.0
    if case.schedule == "gpipe":
        return float(passes)
    if case.schedule == "zbv":
        return float(min(passes, ranks))
    waits = case.schedule == "zero_bubble"
    lead = ranks - 1 - rank
    if per_rank > 1:
        lead = (per_rank - 1) * -(-passes // count_rounds(passes, ranks)) + (1 if waits else 2) * lead
    return min(float(passes), (lead + 1 + (rank if waits else 0)) / per_rank)
