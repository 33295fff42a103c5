"""A whole run from the time of one step: days, failures, jobs in the queue, GPU-hours, energy, money, allocation.

Invariant: the parts of `WallTime` add up to the time for which nodes are held, and every amount is for that time; all
are expected values, with failures at a constant rate. Waiting in the queue holds no node and is not counted. The
estimate does not depend on how a step was priced.

Sources: the time that failures cost, and the interval between checkpoints that costs least: Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Gener. Comput. Syst. 22 (2006), 303-312,
doi:10.1016/j.future.2004.11.016, after Young, "A first order approximation to the optimum checkpoint interval", Commun.
ACM 17 (1974), 530-531, doi:10.1145/361147.361115.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from shardway.batch_ramp import BatchRamp
from shardway.errors import Problem, check_no_problems, list_some
from shardway.plan.case import Machine
from shardway.sites.schema import Queue, SiteProfile
from shardway.units import Scale, Span

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

MOST_TRIES = 1000  # a run that repeats the same work more often than this, on average, makes no progress


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The cost of failures and of checkpoints, in seconds."""

    save_seconds: float  # time for which training stands still during a save
    restart_seconds: float  # from a failure to the next step: detection, restart, load
    node_mtbf_seconds: float | None = None
    """Mean time between failures of one node; infinite if nothing fails; None: from `GPU_MTBF_SECONDS`."""
    interval_seconds: float | None = None  # training between two checkpoints; None: the interval with least cost


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The wall-time of one job in a queue, and the parts of it without training, in seconds."""

    seconds: float
    start_seconds: float  # from the start of the job to the first step of a new run
    resume_seconds: float  # additional start time if a checkpoint is loaded
    margin_seconds: float
    """Kept free at the end for the last save; counted as lost, though a job may end before its wall-time does."""

    @property
    def training_seconds(self) -> float:  # training time of a job that resumes and is continued by another
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


@dataclass(frozen=True)
class Amount:
    """An amount with its unit: 1,200 node-hours, 3,600 EUR."""

    value: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run to be estimated. Raises UserError if it would never end.

    `scale` has the tokens of a step; a length in steps needs none. What is None is not estimated. Without a `slot` one
    job, whose start takes `start_seconds`, holds the nodes to the end. No failures are assumed while a job starts.
    """

    step_seconds: float
    length: Span
    gpus: int
    gpus_per_node: int
    faults: Faults
    scale: Scale | None = None
    slot: Slot | None = None
    start_seconds: float = 0.0
    power: Power | None = None
    price: Price | None = None
    cores_per_node: int | None = None
    """What a site that charges core-hours counts; nodes are counted whole, with all their cores."""

    def __post_init__(self) -> None:
        problems, slot, mtbf, step = [], self.slot, self.mtbf_seconds, self.step_seconds
        if slot and slot.training_seconds < step:
            what = (
                f"{slot.seconds:g} s, of which start, resume and margin leave {slot.training_seconds:g} s, "
                f"are too short for a step of {step:g} s"
            )
            remedy = "choose a queue with a longer wall-time, or a smaller margin"
            problems.append(Problem("slot.seconds", what, remedy=remedy))
        unbroken = max(self.interval_steps * step + self.faults.save_seconds, self.faults.restart_seconds)
        if unbroken / mtbf > math.log1p(MOST_TRIES):
            what = f"a failure every {mtbf:g} s on {self.nodes} nodes leaves no {unbroken:g} s in which nothing fails"
            remedy = "save more often or faster, restart faster, or use fewer nodes"
            problems.append(Problem("faults", what, remedy=remedy))
        check_no_problems("the run to estimate", problems)

    @cached_property
    def steps(self) -> int:  # steps that cover the length
        return self.length.in_steps(self.scale or Scale(BatchRamp.of(1), 1, 1))

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def mtbf_seconds(self) -> float:  # mean time between failures of all nodes together: each of them stops the run
        node = self.faults.node_mtbf_seconds
        return (GPU_MTBF_SECONDS / self.gpus_per_node if node is None else node) / self.nodes

    @cached_property
    def interval_steps(self) -> int:  # steps between checkpoints, at most up to the end of the job
        chosen = self.faults.interval_seconds
        seconds = daly_interval(self.faults.save_seconds, self.mtbf_seconds) if chosen is None else chosen
        longest = self.slot.training_seconds if self.slot else math.inf
        # a quotient that is an integer up to rounding must not lose a step.
        return max(1, int(min(min(seconds, longest) / self.step_seconds + 1e-9, self.steps)))


@dataclass(frozen=True, kw_only=True)
class WallTime:
    """The parts of the time for which nodes are held, in seconds."""

    ideal_seconds: float  # the steps, each once
    save_seconds: float  # time for which training waits for checkpoints
    lost_seconds: float  # steps and saves that a failure undoes
    restart_seconds: float  # from failures to the next step, including failures during a restart
    slot_seconds: float  # start, resume and margin of the jobs

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
    def days(self) -> float:  # days of wall time, without waiting in the queue
        return self.wall.total_seconds / DAY

    @property
    def node_hours(self) -> float:  # hours for which nodes are held, of all nodes together
        return self.nodes * self.wall.total_seconds / HOUR

    @property
    def ideal_days(self) -> float:  # days without failures, without saves and in one job
        return self.wall.ideal_seconds / DAY

    @property
    def goodput(self) -> float:  # the share of the time that goes into steps that count
        return self.wall.ideal_seconds / self.wall.total_seconds


def daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """The cheapest interval between two checkpoints, in seconds (Daly 2006, eq. 37); infinite without failures."""
    if math.isinf(mtbf_seconds) or save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    share = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


def estimate_run(request: RunRequest) -> RunEstimate:
    """The estimate of a request: Daly's cost function, M e^(R/M) (e^((interval+save)/M) - 1) for each interval, taken
    apart; and the jobs that it takes.

    To get through an interval with its save, of length L, without a failure takes e^(L/M) - 1 failures before and
    M (e^(L/M) - 1) of time, L of which counts; a restart, which may fail as well, takes M (e^(R/M) - 1).
    """
    faults, mtbf, slot = request.faults, request.mtbf_seconds, request.slot
    intervals = request.steps / request.interval_steps
    length = request.interval_steps * request.step_seconds + faults.save_seconds
    tries, fails = math.expm1(length / mtbf), not math.isinf(mtbf)
    wall = WallTime(
        ideal_seconds=request.steps * request.step_seconds,
        save_seconds=intervals * faults.save_seconds,
        # Rounding may leave a negative difference.
        lost_seconds=intervals * max(0.0, mtbf * tries - length) if fails else 0.0,
        restart_seconds=intervals * tries * mtbf * math.expm1(faults.restart_seconds / mtbf) if fails else 0.0,
        slot_seconds=0.0 if slot else request.start_seconds,
    )
    slots = 1
    if slot is not None:  # the first job does not resume, the last needs no margin
        slots = max(1, math.ceil((wall.total_seconds - slot.resume_seconds) / slot.training_seconds - 1e-9))
        overhead = slots * slot.start_seconds + (slots - 1) * (slot.resume_seconds + slot.margin_seconds)
        wall = replace(wall, slot_seconds=overhead)
    hours = wall.total_seconds / HOUR
    gpu_hours, power, price, cores = request.gpus * hours, request.power, request.price, request.cores_per_node
    return RunEstimate(
        steps=request.steps,
        nodes=request.nodes,
        interval_steps=request.interval_steps,
        failures=(wall.total_seconds - wall.slot_seconds) / mtbf,
        slots=slots,
        wall=wall,
        gpu_hours=gpu_hours,
        energy_kwh=gpu_hours * power.tdp_watts / 1000 * power.node_factor * power.pue if power else None,
        cost=Amount(gpu_hours * price.per_gpu_hour, price.currency) if price else None,
        charge=Amount(request.nodes * cores * hours, "core-hours") if cores else None,
    )


# --- the terms of a site, and the run of a plan under them

WRITE_RATE = 1e9  # bytes per second that a node writes to the shared file system
MOST_WRITE_RATE = 50e9
START_SECONDS = 180.0  # seconds from the start of a job to its first step: imports, communicators, kernel compilation
NOTICE_SECONDS = 120.0  # seconds from a failure to a new start
MARGIN_SECONDS = 60.0  # seconds kept free at the end of a job beside the time of a save


@dataclass(frozen=True, kw_only=True)
class JobTerms:
    """A site's terms for jobs: the queue with its limits (None: not known), the price of an hour."""

    queue: str = ""
    wall_seconds: float | None = None
    most_nodes: int | None = None
    cores_per_node: int | None = None
    price: Price | None = None


def terms_of(site: SiteProfile | None, name: str | None, price: Price | None, nodes: int) -> JobTerms:
    """The terms of a site for a job of so many nodes, in the queue of that name; without a name in the first queue
    that takes so many nodes, or else the first. Raises UserError."""
    if site is None:
        if name:
            what, allowed = f'"{name}" is a queue of no site', "a queue of the site that --on names"
            check_no_problems("the plan", [Problem("--queue", what, allowed=allowed)])
        return JobTerms(price=price)
    queues: list[Queue] = [queue for queue in site.queues if name is None or queue.name == name]
    if name is not None and not queues:
        known = list_some([queue.name for queue in site.queues], 12) or "none: the profile names no queue"
        what = f'the site "{site.name}" has no queue "{name}"'
        check_no_problems("the plan", [Problem("--queue", what, allowed=known)])
    fitting = [queue for queue in queues if name is not None or queue.max_nodes is None or queue.max_nodes >= nodes]
    queue = next(iter([*fitting, *queues]), None)
    return JobTerms(
        queue=queue.name if queue else "",
        wall_seconds=queue.max_walltime if queue else None,
        most_nodes=queue.max_nodes if queue else None,
        cores_per_node=site.node.cores,
        price=price,
    )


def assume_saving(size: float, nodes: int, wall_seconds: float | None) -> tuple[Faults, Slot | None, str]:
    """The cost of failures and of saves of `size` bytes, a job of this wall-time, and the sentence with the reason. All
    nodes write at once while training stands still; after a failure the job restarts and loads."""
    rate = min(nodes * WRITE_RATE, MOST_WRITE_RATE)
    note = (
        f"a checkpoint of {size / 1e9:,.3g} GB takes {size / rate:,.3g} s ({WRITE_RATE / 1e9:g} GB/s a node, at most "
        f"{MOST_WRITE_RATE / 1e9:g}); a start takes {START_SECONDS:g} s, and {NOTICE_SECONDS:g} s more after a failure"
    )
    save, slot = size / rate, None
    if wall_seconds:
        margin = MARGIN_SECONDS + save
        slot = Slot(seconds=wall_seconds, start_seconds=START_SECONDS, resume_seconds=save, margin_seconds=margin)
    return Faults(save_seconds=save, restart_seconds=NOTICE_SECONDS + START_SECONDS + save), slot, note


def price_run(
    length: Span, scale: Scale, step_seconds: float, saved_bytes: float, ranks: int, machine: Machine, terms: JobTerms
) -> tuple[RunEstimate, str]:
    """Days, jobs, failures, hours, energy, money; and what is assumed about checkpoints of `saved_bytes`. Raises
    UserError if the run would never end."""
    watts = machine.accelerator.power_w
    faults, slot, note = assume_saving(saved_bytes, -(-ranks // machine.per_node), terms.wall_seconds)
    request = RunRequest(
        step_seconds=step_seconds,
        length=length,
        gpus=ranks,
        gpus_per_node=machine.per_node,
        faults=faults,
        scale=scale,
        slot=slot,
        start_seconds=START_SECONDS,
        power=Power(tdp_watts=watts) if watts else None,
        price=terms.price,
        cores_per_node=terms.cores_per_node,
    )
    return estimate_run(request), note


def list_warnings(terms: JobTerms, nodes: int) -> tuple[str, ...]:
    """Limits of the terms that the run exceeds."""
    if terms.most_nodes and nodes > terms.most_nodes:
        return (
            f"the queue {terms.queue} takes {terms.most_nodes:,} nodes a job, and these are {nodes:,}: "
            "ask for fewer, or for another queue (--queue)",
        )
    return ()
