"""A whole run from the time of one step: days, failures, jobs in the queue, GPU-hours, energy, money, allocation.

Invariant: the parts of `WallTime` add up to the time for which nodes are held, and every amount is for that time; all
are expected values, with failures at a constant rate. Waiting in the queue holds no node and is not counted. The time
of a step, the time of a save and the price of an hour are inputs.

Sources: the time that failures cost, and the interval between checkpoints that costs least: Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Gener. Comput. Syst. 22 (2006), 303-312,
doi:10.1016/j.future.2004.11.016, after Young, "A first order approximation to the optimum checkpoint interval", Commun.
ACM 17 (1974), 530-531, doi:10.1145/361147.361115.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from shardway.errors import Problem, check_no_problems
from shardway.units import Scale, Span

Unit = Literal["GPU-hours", "node-hours", "core-hours"]
"""Units in which sites count an allocation."""

HOUR = 3600.0
DAY = 24 * HOUR

GPU_MTBF_SECONDS = 54 * DAY * 16384 / 419
"""Mean time between failures of one GPU with its share of a node: 419 unexpected interruptions in 54 days on 16,384
H100 (Llama 3, arXiv:2407.21783, section 3.3.4), 264 days for a node of eight. Kokolis et al., arXiv:2410.21680, counted
6.5 failures in 1,000 days of such a node with A100, one in 154 days."""

NODE_FACTOR = 1.22
"""Watts of a busy node at the wall over those that its GPUs are rated for: 6,848 W with 8 H100 of 700 W, the mean of 64
nodes that trained GPT-3 (MLPerf Training v4.0, Supermicro, power logs). Others there: 0.91, badly scaled, to 1.28."""

PUE = 1.2
"""Watts of a data centre over those of its nodes, as OLMo 2 (arXiv:2501.00656) assumes; a site publishes its own."""

MOST_TRIES = 1000
"""A run that repeats the same work more often than this, on average, makes no progress."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The cost of failures and of checkpoints, in seconds."""

    save_seconds: float
    """Time for which training stands still during a save."""
    restart_seconds: float
    """From a failure to the next step: detection, restart, load."""
    node_mtbf_seconds: float | None = None
    """Mean time between failures of one node; infinite if nothing fails; None: from `GPU_MTBF_SECONDS`."""
    interval_seconds: float | None = None
    """Training between two checkpoints; None: the interval with least cost."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The wall-time of one job in a queue, and the parts of it without training, in seconds."""

    seconds: float
    start_seconds: float
    """From the start of the job to the first step of a new run."""
    resume_seconds: float
    """Additional start time if a checkpoint is loaded."""
    margin_seconds: float
    """Kept free at the end for the last save; counted as lost, though a job may end before its wall-time does."""

    @property
    def training_seconds(self) -> float:
        """Training time of a job that resumes and is continued by another."""
        return self.seconds - self.start_seconds - self.resume_seconds - self.margin_seconds


@dataclass(frozen=True, kw_only=True)
class Power:
    """The rated power of a GPU, and factors for the power drawn beside it."""

    tdp_watts: float
    node_factor: float = NODE_FACTOR
    pue: float = PUE


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one GPU for an hour, with everything that belongs to it."""

    per_gpu_hour: float
    currency: str


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The unit in which a site counts; nodes are counted whole, with all their cores."""

    unit: Unit
    cores_per_node: int | None = None


@dataclass(frozen=True)
class Amount:
    """An amount with its unit: 1,200 node-hours, 3,600 EUR."""

    value: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run to be estimated. Raises UserError that names everything wrong with it.

    `scale` has the tokens of a step; a length in steps needs none. What is None is not estimated. Without a `slot` one
    job holds the nodes to the end, and its start is not counted. No failures are assumed while a job starts.
    """

    step_seconds: float
    length: Span
    gpus: int
    gpus_per_node: int
    faults: Faults
    scale: Scale | None = None
    slot: Slot | None = None
    power: Power | None = None
    price: Price | None = None
    charge: Charge | None = None

    def __post_init__(self) -> None:
        problems = [*_find_values_not_allowed(self), *_find_gaps(self)]
        check_no_problems("the run to estimate", problems or list(_find_dead_ends(self)))

    @cached_property
    def steps(self) -> int:
        """Steps that cover the length."""
        return self.length.in_steps(self.scale or Scale(1, 1, 1))

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures of all nodes together: each of them stops the run."""
        node = self.faults.node_mtbf_seconds
        return (GPU_MTBF_SECONDS / self.gpus_per_node if node is None else node) / self.nodes

    @cached_property
    def interval_steps(self) -> int:
        """Steps between checkpoints, at most up to the end of the job."""
        chosen = self.faults.interval_seconds
        seconds = daly_interval(self.faults.save_seconds, self.mtbf_seconds) if chosen is None else chosen
        longest = self.slot.training_seconds if self.slot else math.inf
        # A quotient that is an integer up to rounding must not lose a step.
        return max(1, int(min(min(seconds, longest) / self.step_seconds + 1e-9, self.steps)))


@dataclass(frozen=True, kw_only=True)
class WallTime:
    """The parts of the time for which nodes are held, in seconds."""

    ideal_seconds: float
    """The steps, each once."""
    save_seconds: float
    """Time for which training waits for checkpoints."""
    lost_seconds: float
    """Steps and saves that a failure undoes."""
    restart_seconds: float
    """From failures to the next step, including failures during a restart."""
    slot_seconds: float
    """Start, resume and margin of the jobs."""

    @property
    def total_seconds(self) -> float:
        return self.ideal_seconds + self.save_seconds + self.lost_seconds + self.restart_seconds + self.slot_seconds


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """The cost of a run; `slots` jobs follow each other, and a failure that ends its job needs one more."""

    steps: int
    nodes: int
    interval_steps: int
    failures: float
    slots: int
    wall: WallTime
    gpu_hours: float
    energy_kwh: float | None
    cost: Amount | None
    charge: Amount | None

    @property
    def days(self) -> float:
        """Days of wall time, without waiting in the queue."""
        return self.wall.total_seconds / DAY

    @property
    def node_hours(self) -> float:
        """Hours for which nodes are held, of all nodes together."""
        return self.nodes * self.wall.total_seconds / HOUR

    @property
    def ideal_days(self) -> float:
        """Days without failures, without saves and in one job."""
        return self.wall.ideal_seconds / DAY

    @property
    def goodput(self) -> float:
        """The share of the time that goes into steps that count."""
        return self.wall.ideal_seconds / self.wall.total_seconds


def daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """The cheapest interval between two checkpoints, in seconds (Daly 2006, eq. 37); infinite without failures."""
    if math.isinf(mtbf_seconds) or save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    share = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


def estimate_run(request: RunRequest) -> RunEstimate:
    """The estimate of a request."""
    slots, wall = _fill_slots(request, _estimate_work(request))
    hours = wall.total_seconds / HOUR
    gpu_hours = request.gpus * hours
    power, price, charge = request.power, request.price, request.charge
    held = {"GPU-hours": request.gpus, "node-hours": request.nodes}
    if charge and charge.cores_per_node:
        held["core-hours"] = request.nodes * charge.cores_per_node
    return RunEstimate(
        steps=request.steps,
        nodes=request.nodes,
        interval_steps=request.interval_steps,
        failures=(wall.total_seconds - wall.slot_seconds) / request.mtbf_seconds,
        slots=slots,
        wall=wall,
        gpu_hours=gpu_hours,
        energy_kwh=gpu_hours * power.tdp_watts / 1000 * power.node_factor * power.pue if power else None,
        cost=Amount(gpu_hours * price.per_gpu_hour, price.currency) if price else None,
        charge=Amount(held[charge.unit] * hours, charge.unit) if charge else None,
    )


def _estimate_work(request: RunRequest) -> WallTime:
    """The time of a run in one job: Daly's cost function, M e^(R/M) (e^((interval+save)/M) - 1) for each interval,
    taken apart.

    To get through an interval with its save, of length L, without a failure takes e^(L/M) - 1 failures before and
    M (e^(L/M) - 1) of time, L of which counts; a restart, which may fail as well, takes M (e^(R/M) - 1).
    """
    faults, mtbf = request.faults, request.mtbf_seconds
    intervals = request.steps / request.interval_steps
    length = request.interval_steps * request.step_seconds + faults.save_seconds
    tries = math.expm1(length / mtbf)
    fails = not math.isinf(mtbf)
    return WallTime(
        ideal_seconds=request.steps * request.step_seconds,
        save_seconds=intervals * faults.save_seconds,
        # Rounding may leave a negative difference.
        lost_seconds=intervals * max(0.0, mtbf * tries - length) if fails else 0.0,
        restart_seconds=intervals * tries * mtbf * math.expm1(faults.restart_seconds / mtbf) if fails else 0.0,
        slot_seconds=0.0,
    )


def _fill_slots(request: RunRequest, work: WallTime) -> tuple[int, WallTime]:
    """The number of jobs, and the time with their overhead: the first does not resume, the last needs no margin."""
    slot = request.slot
    if slot is None:
        return 1, work
    slots = max(1, math.ceil((work.total_seconds - slot.resume_seconds) / slot.training_seconds - 1e-9))
    overhead = slots * slot.start_seconds + (slots - 1) * (slot.resume_seconds + slot.margin_seconds)
    return slots, replace(work, slot_seconds=overhead)


# --- problems of a request

_BOUNDS: Mapping[str, Callable[[float], bool]] = {
    "a number above 0": lambda value: 0 < value < math.inf,
    "0 or more": lambda value: 0 <= value < math.inf,
    "1 or more": lambda value: 1 <= value < math.inf,
    "above 0, also infinite": lambda value: value > 0,
}
_VALUES: Mapping[str, str] = {
    "step_seconds": "a number above 0",
    "length.amount": "a number above 0",
    "gpus": "1 or more",
    "gpus_per_node": "1 or more",
    "scale.samples_per_step": "1 or more",
    "scale.tokens_per_sample": "1 or more",
    "scale.samples_per_epoch": "1 or more",
    "faults.save_seconds": "0 or more",
    "faults.restart_seconds": "0 or more",
    "faults.node_mtbf_seconds": "above 0, also infinite",
    "faults.interval_seconds": "a number above 0",
    "slot.seconds": "a number above 0",
    "slot.start_seconds": "0 or more",
    "slot.resume_seconds": "0 or more",
    "slot.margin_seconds": "0 or more",
    "power.tdp_watts": "a number above 0",
    "power.node_factor": "a number above 0",
    "power.pue": "1 or more",
    "price.per_gpu_hour": "0 or more",
    "charge.cores_per_node": "1 or more",
}


def _find_values_not_allowed(request: RunRequest) -> Iterator[Problem]:
    for where, allowed in _VALUES.items():
        value: Any = request
        for name in where.split("."):
            value = getattr(value, name, None)
        if value is not None and not _BOUNDS[allowed](value):
            yield Problem(where, f"{value:g} is not allowed", allowed=allowed)


def _find_gaps(request: RunRequest) -> Iterator[Problem]:
    """Values that a choice requires and the request lacks."""
    if request.length.unit != "steps" and request.scale is None:
        what = f'"{request.length}" is no number of steps, and nothing says how much a step is'
        yield Problem("length", what, remedy="give the length in steps, or the scale")
    if request.price and not request.price.currency.strip():
        yield Problem("price.currency", "is empty", remedy='name the currency of the price, such as "EUR"')
    charge = request.charge
    if charge and charge.unit not in get_args(Unit):
        yield Problem("charge.unit", f'"{charge.unit}" is not known', allowed=", ".join(get_args(Unit)))
    if charge and charge.unit == "core-hours" and charge.cores_per_node is None:
        what = "is not set, and core-hours count the cores of a node"
        yield Problem("charge.cores_per_node", what, remedy="set it to what a node is charged for")


def _find_dead_ends(request: RunRequest) -> Iterator[Problem]:
    """Runs that would never end."""
    slot, mtbf = request.slot, request.mtbf_seconds
    if slot and slot.training_seconds < request.step_seconds:
        what = (
            f"{slot.seconds:g} s, of which start, resume and margin leave {slot.training_seconds:g} s, "
            f"are too short for a step of {request.step_seconds:g} s"
        )
        yield Problem("slot.seconds", what, remedy="choose a queue with a longer wall-time, or a smaller margin")
    length = request.interval_steps * request.step_seconds + request.faults.save_seconds
    unbroken = max(length, request.faults.restart_seconds)
    if unbroken / mtbf > math.log1p(MOST_TRIES):
        what = f"a failure every {mtbf:g} s on {request.nodes} nodes leaves no {unbroken:g} s in which nothing fails"
        remedy = "save more often or faster, restart faster, or use fewer nodes"
        yield Problem("faults", what, remedy=remedy)
