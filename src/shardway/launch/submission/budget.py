"""What a submission may cost, in GPU-hours (core-hours where a site has no GPUs), and the guard `site.budget`.

Invariants:
- What is compared with the budget is the most that the jobs can use: nodes x GPUs x wall-time x attempts of every run,
  and what earlier attempts of these runs have used. An expectation is shown beside it, and never compared.
- What is not known (how long an attempt without an end ran) is not counted, and nothing is made up for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardway.errors import UserError, list_some
from shardway.launch.runs.job_status import Ledger
from shardway.launch.submission.prepare import Prepared
from shardway.units import render_plural, render_seconds

GPU_HOURS, CORE_HOURS = "GPU-hours", "core-hours"


@dataclass(frozen=True)
class RunCost:
    """What a run may cost. `per_node`: GPUs or cores that are charged for each node; `attempts`: the most that are
    submitted from now on, `expected`: how many of them the run probably needs, None where that is not known. `used`:
    hours of its earlier attempts. `runs`: how many like it there are (tasks of an array). `limit`: site.budget, and
    `origin` where that comes from; `is_chain`: whether --max-attempts bounds it."""

    run: Path
    unit: str
    nodes: int
    per_node: int
    walltime_s: float
    attempts: int = 1
    expected: int | None = None
    used: float = 0.0
    runs: int = 1
    limit: float | None = None
    origin: str = ""
    is_chain: bool = False

    @property
    def of_attempt(self) -> float:
        """Hours of one attempt of one run that uses all of its wall-time."""
        return self.nodes * self.per_node * self.walltime_s / 3600

    @property
    def most(self) -> float:
        """Hours that everything from now on can use."""
        return self.of_attempt * self.attempts * self.runs

    @property
    def expectation(self) -> float | None:
        """Hours that are to be expected; None where that is not known."""
        return None if self.expected is None else self.of_attempt * self.expected * self.runs

    def describe(self) -> str:
        """The product, in a line: "4 nodes x 4 GPUs x 1h x 3 attempts = 48 GPU-hours"."""
        noun = {GPU_HOURS: "GPU", CORE_HOURS: "core"}[self.unit]
        factors = [
            render_plural(self.nodes, "node"),
            render_plural(self.per_node, noun),
            render_seconds(self.walltime_s),
        ]
        factors += [f"up to {render_plural(self.attempts, 'attempt')}"] if self.attempts > 1 else []
        factors += [render_plural(self.runs, "run")] if self.runs > 1 else []
        line = f"{' x '.join(factors)} = {render_hours(self.most)} {self.unit}"
        if self.expected is not None and self.expected < self.attempts:
            line += f"; about {render_hours(self.expectation or 0.0)} are to be expected ({self.expected} more)"
        return f"{line}, and {render_hours(self.used)} used so far" if self.used else line

    def as_json(self) -> dict[str, Any]:
        """Plain data, in hours of `unit`."""
        return {
            "run": str(self.run),
            "unit": self.unit,
            "nodes": self.nodes,
            "per_node": self.per_node,
            "walltime_s": self.walltime_s,
            "attempts": self.attempts,
            "runs": self.runs,
            "most": self.most,
            "expected": self.expectation,
            "used": self.used,
            "budget": self.limit,
        }


def estimate_cost(prepared: Prepared, runs: int = 1) -> RunCost:
    """What a prepared submission may cost, `runs` times."""
    request, job, shape = prepared.request, prepared.job, prepared.job.shape
    node, rules = request.profile.node, request.profile.request
    gpus, cores = shape.accelerators_per_node, shape.cores_per_node or shape.ranks_per_node
    if rules.whole_nodes:  # the site charges all of it
        gpus = node.accelerators_per_node or 0 if gpus else 0
        cores = max(cores, node.cores or 0)
    per_node, walltime_s = gpus or cores, job.terms.walltime_s
    attempts = max(1, job.chain.max_attempts - job.attempt + 1)
    used_s, used = _sum_used(prepared.ledger, shape.nodes)
    expected = _expect(prepared.ledger, used_s, walltime_s) if job.chain.until_done else 1
    budget = request.section.budget
    return RunCost(
        run=job.run,
        unit=GPU_HOURS if gpus else CORE_HOURS,
        nodes=shape.nodes,
        per_node=per_node,
        walltime_s=walltime_s,
        attempts=attempts,
        expected=None if expected is None else min(expected, attempts),
        used=used * per_node / 3600,
        runs=runs,
        limit=None if budget == "off" else float(budget),
        origin=request.loaded.origins["site.budget"],
        is_chain=job.chain.until_done,
    )


def check_budget(costs: Sequence[RunCost], *, agreed: bool = False) -> None:
    """Raise UserError where all of these runs together may use more than the smallest budget that is set for one of
    them, unless the person has `agreed` (--yes)."""
    limited = [cost for cost in costs if cost.limit is not None]
    if agreed or not limited:
        return
    first = min(limited, key=lambda cost: cost.limit or 0.0)
    limit = first.limit or 0.0
    counted = [cost for cost in costs if cost.unit == first.unit]
    total = sum(cost.most + cost.used for cost in counted)
    if total <= limit:
        return
    lines = [f"{cost.run.name}: {cost.describe()}" for cost in counted[:8]]
    lines += [f"and {len(counted) - 8} more runs"] if counted[8:] else []
    rows = "".join(f"\n    {line}" for line in lines)
    raise UserError(
        f"this may cost {render_hours(total)} {first.unit}, and {render_hours(limit)} are allowed "
        f"(site.budget, {first.origin}).{rows}\n"
        f"  Nothing was submitted. To do: {list_some(_list_remedies(counted, limit), 4)}."
    )


def _list_remedies(costs: Sequence[RunCost], limit: float) -> list[str]:
    left = limit - sum(cost.used for cost in costs)
    remedies = []
    if len(costs) == 1:
        [cost] = costs
        fits = math.floor(left / (cost.of_attempt * cost.runs)) if cost.of_attempt else 0
        if cost.is_chain and fits >= 1:
            remedies.append(f"--max-attempts {fits} fits")
        elif left > 0 and cost.of_attempt:
            fits_s = 60 * math.floor(left / (cost.of_attempt * cost.runs) * cost.walltime_s / 60)
            once = "--max-attempts 1 " if cost.is_chain else ""
            remedies += [f"{once}--walltime {render_seconds(fits_s)} fits"] if fits_s else []
    if not remedies:
        remedies.append("ask for less wall-time")
    if any(cost.nodes > 1 for cost in costs):
        remedies.append("or for fewer nodes")
    return [*remedies, "or raise site.budget", "or add --yes"]


def _sum_used(ledger: Ledger, nodes: int) -> tuple[float, float]:
    """Seconds of the attempts so far, and node-seconds; `nodes` where an attempt does not state its own."""
    seconds = node_seconds = 0.0
    for entry in ledger.entries:
        asked = entry.submission.asked.get("nodes") if entry.submission else None
        nodes = asked if isinstance(asked, int) and asked > 0 else nodes
        if entry.started is None or not entry.started.started:
            continue
        end = entry.result.ended if entry.result is not None else time.time()
        if entry.started.deadline:
            end = min(end, entry.started.deadline + 600)  # one that was killed is found out late
        took = max(0.0, end - entry.started.started)
        seconds, node_seconds = seconds + took, node_seconds + took * nodes
    return seconds, node_seconds


def _expect(ledger: Ledger, used_s: float, walltime_s: float) -> int | None:
    """How many more attempts a run needs if it goes on as it has; None before it has made a step."""
    step, total = ledger.status.get("step"), ledger.status.get("total_steps")
    if not isinstance(step, int) or not isinstance(total, int) or step <= 0 or not used_s or not walltime_s:
        return None
    return max(1, math.ceil((total - step) * used_s / step / walltime_s))


def render_hours(hours: float) -> str:
    """Hours for a person: 1600.0 -> "1,600", 0.25 -> "0.25"."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
