"""The terms of a run: its queue, its price; and the whole run that follows from a step under them.

Invariant: nothing here depends on how a step was priced. This module must not render.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardway.plan.answer.assumed import SaveTime
from shardway.plan.economy import Charge, Power, Price, RunEstimate, RunRequest, estimate_run
from shardway.plan.machine import Machine
from shardway.units import Scale, Span


@dataclass(frozen=True, kw_only=True)
class JobTerms:
    """What a site and a person say about jobs: the queue with its limits (None: not known), what an hour costs."""

    queue: str = ""
    wall_seconds: float | None = None
    most_nodes: int | None = None
    cores_per_node: int | None = None
    price: Price | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """What is to be run: so long, in steps that take so many seconds on so many ranks."""

    length: Span
    scale: Scale
    step_seconds: float
    ranks: int


def price_run(work: TrainingWork, machine: Machine, terms: JobTerms, saving: SaveTime) -> RunEstimate:
    """Days, jobs, failures, hours, energy, money."""
    watts = machine.accelerator.power_w
    return estimate_run(
        RunRequest(
            step_seconds=work.step_seconds,
            length=work.length,
            gpus=work.ranks,
            gpus_per_node=machine.per_node,
            faults=saving.faults,
            scale=work.scale,
            slot=saving.slot(terms.wall_seconds) if terms.wall_seconds else None,
            power=Power(tdp_watts=watts) if watts else None,
            price=terms.price,
            charge=Charge(unit="core-hours", cores_per_node=terms.cores_per_node) if terms.cores_per_node else None,
        )
    )


def list_warnings(terms: JobTerms, nodes: int) -> tuple[str, ...]:
    """What of the terms the run does not keep to."""
    if terms.most_nodes and nodes > terms.most_nodes:
        return (
            f"the queue {terms.queue} takes {terms.most_nodes:,} nodes a job, and these are {nodes:,}: "
            "ask for fewer, or for another queue (--queue)",
        )
    return ()
