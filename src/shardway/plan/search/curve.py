"""The same work on more and on fewer nodes: the best layout on each, and what a token costs there.

Invariant: the global batch stays what it is (strong scaling), so that every point trains the same model. This module
must not price a layout: it asks the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardway.errors import Problem, UserError, render_problems
from shardway.plan.estimate import Estimate
from shardway.plan.search.best import search
from shardway.plan.search.changes import on_nodes
from shardway.plan.search.space import Question

MOST_NODES = 131072
POINTS_BEYOND = 2
"""Times that the nodes are doubled beyond those that are asked for."""


@dataclass(frozen=True)
class ScalingPoint:
    """A number of nodes with its best layout; where there is none `why_not` says why."""

    nodes: int
    best: Estimate | None
    why_not: str = ""

    @property
    def device_seconds_per_token(self) -> float:
        """What a token costs, in seconds of one accelerator; 0 where nothing runs."""
        return self.best.case.degrees.world / self.best.tokens_per_second if self.best else 0.0


def scaling_curve(question: Question, nodes: Sequence[int]) -> tuple[ScalingPoint, ...]:
    """One point for each number of nodes."""
    return tuple(_point(question, count) for count in nodes)


def default_nodes(question: Question) -> tuple[int, ...]:
    """Powers of two up to two doublings beyond those that are asked for, which are among them."""
    powers = {2**power for power in range((question.nodes - 1).bit_length() + POINTS_BEYOND + 1)}
    return tuple(sorted({each for each in powers if each <= 4 * question.nodes} | {question.nodes}))


def parse_nodes(text: str) -> tuple[int, ...]:
    """Numbers of nodes in a text such as "1,2,8". Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_NODES for part in parts):
        allowed = f'"nodes", or numbers from 1 to {MOST_NODES:,} such as 1,2,8'
        raise UserError(render_problems("the plan", [Problem("--curve", f'"{text}" is no curve', allowed=allowed)]))
    return tuple(sorted({int(part) for part in parts}))


def efficiency(points: Sequence[ScalingPoint], point: ScalingPoint) -> float:
    """What a token costs at the cheapest point over what it costs here, 0 to 1; 0 where nothing runs."""
    costs = [each.device_seconds_per_token for each in points if each.best]
    return min(costs) / point.device_seconds_per_token if point.best else 0.0


def _point(question: Question, nodes: int) -> ScalingPoint:
    there = on_nodes(question, nodes)
    found = search(there, most=1)
    if found.best is not None:
        return ScalingPoint(nodes, found.best)
    if found.nearest is None:
        return ScalingPoint(nodes, None, _no_layout(there))
    peak, usable = found.nearest.peak.device / 2**30, found.nearest.usable_bytes / 2**30
    return ScalingPoint(nodes, None, f"needs {peak:,.0f} GiB of {usable:,.0f}")


def _no_layout(there: Question) -> str:
    """Why no layout of so many ranks is legal."""
    degrees = there.case.degrees
    taken = math.prod(getattr(degrees, name) for name in ("cp", "tp", "pp") if name in there.fixed)
    if there.world % taken:
        return f"the degrees that are set need a multiple of {taken:,} ranks, not {there.world:,}"
    return f"{there.case.global_batch:,} sequences do not split over {there.world // taken:,} ranks"
