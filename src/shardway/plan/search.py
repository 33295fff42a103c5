"""The search: every legal layout, the best of them, what would make a run fit, and the curve over nodes.

Invariants:
- Every figure follows from the case and the machine alone and states its convention. Nothing here chooses between
  cases.
- A layout is listed once, in a deterministic order, and only if every degree divides what it must.
- Of two layouts the one with the shorter step wins; within `NEAR` of each other the simpler one. A layout is offered
  only if its memory fits.
- A change is listed only if the search found a layout that fits with it, and that layout is shown with it. Two things
  are changed at once only if no single change helps; then everything that is set is left open.
- The curve keeps the global batch (strong scaling), so that every point trains the same model.

Legality follows Narayanan et al., arXiv:2104.04473, section 5.1 (tensor parallel inside the fast link), and
Korthikanti et al., arXiv:2205.05198; recompute goes from nothing to everything.

Sources: model and hardware FLOPs utilisation: Chowdhery et al., arXiv:2204.02311, appendix B, and Korthikanti et al.,
arXiv:2205.05198, section 6.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType

from shardway.errors import Problem, UserError, render_problems
from shardway.plan.case import Case, Degrees, Precision, Recompute, Schedule, divisors, fills_schedule
from shardway.plan.machine import Ceilings, Machine, ceilings_of
from shardway.plan.memory import (
    BetweenSteps,
    Overheads,
    StageMemory,
    estimate_between_steps,
    estimate_memory,
    estimate_peak,
    load_overheads,
    peak_stage,
)
from shardway.plan.time import StepTime, estimate_step, every_second
from shardway.units import Span

# --- the cost of a case on a machine: memory by stage, time by item, throughput, utilisation


@dataclass(frozen=True)
class Estimate:
    """A case on a machine; `memory` has one entry per pipeline rank."""

    case: Case
    machine: Machine
    memory: tuple[StageMemory, ...]
    time: StepTime

    @cached_property
    def peak(self) -> StageMemory:
        return peak_stage(self.memory)

    @property
    def usable_bytes(self) -> float:
        """The part of a device's memory that a plan may use."""
        return self.machine.memory_bytes * self.peak.overheads.usable

    @cached_property
    def between_steps(self) -> BetweenSteps:
        """What the fullest rank holds between steps."""
        return estimate_between_steps(self.case, self.peak)

    @property
    def memory_low(self) -> float:
        """Lower end of the interval that holds four of five measured peaks, as nvidia-smi shows them."""
        return self.peak.device * self.peak.overheads.low

    @property
    def memory_high(self) -> float:
        """The upper end of that interval."""
        return self.peak.device * self.peak.overheads.high

    @property
    def may_not_fit(self) -> bool:
        """Whether measured peaks reach beyond the device's memory."""
        return self.memory_high > self.machine.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether every rank's device, and every node's host, holds what it needs."""
        return holds(self.machine, self.peak, self.case.degrees.world)

    @property
    def tokens_per_second(self) -> float:
        return self.case.tokens_per_step / self.time.seconds

    def flops_per_second(self, *, causal: bool) -> float:
        """Model FLOP/s of one accelerator; `causal` counts the half of the scores that the mask leaves."""
        per_token = self.case.model.flops_per_token(self.case.seq_len, causal=causal)
        return per_token * self.tokens_per_second / self.case.degrees.world

    @property
    def peak_flops(self) -> float:
        """The rated FLOP/s by which utilisation is measured: that of the products' own format."""
        return self.machine.peak(self.case.precision)

    def mfu(self, *, causal: bool) -> float:
        """Model FLOPs utilisation, 0 to 1."""
        return self.flops_per_second(causal=causal) / self.peak_flops

    def hfu(self, *, causal: bool) -> float:
        """Hardware FLOPs utilisation: includes what is computed again."""
        return self.mfu(causal=causal) * (1 + self._computed_again(causal))

    def _computed_again(self, causal: bool) -> float:
        """FLOPs that recompute adds, as a fraction of the model's."""
        case, model = self.case, self.case.model
        forward = model.forward_flops_per_token(case.seq_len, causal=causal)
        again = 0.0
        for run in model.runs:
            core = run.layer.core_flops_per_token(model.side_seq(run.side, case.seq_len), causal)
            again += run.count * (core if case.recompute == "selective" and not case.flash else 0.0)
            if case.recompute == "operators":
                again += run.count * every_second(run.layer) * run.layer.matmul_flops_per_token
        return (forward - model.head.flops_per_token if case.recompute == "full" else again) / (3 * forward)


def holds(machine: Machine, peak: StageMemory, ranks: int) -> bool:
    """Whether a machine has the memory that the fullest of `ranks` ranks needs; a host of unknown size always does."""
    on_host = (
        machine.host_bytes is None
        or machine.bytes_of_node(peak.host, ranks) <= machine.host_bytes * peak.overheads.usable
    )
    return on_host and peak.device <= machine.memory_bytes * peak.overheads.usable


def estimate(
    case: Case, machine: Machine, ceilings: Ceilings | None = None, overheads: Overheads | None = None
) -> Estimate:
    """Price a case. Without `ceilings` and `overheads` the shipped ones are used. Raises UserError."""
    memory = estimate_memory(case, overheads or load_overheads())
    return Estimate(case, machine, memory, estimate_step(case, machine, ceilings or ceilings_of(machine)))


# --- legal layouts

AXES = tuple(each.name for each in fields(Degrees) if each.name != "etp")
SETTINGS = ("micro_batch", "recompute", "schedule", "zero")
"""What a request may fix: axes, and settings that do not change which ranks work together."""

LEAST_PART_TOKENS = 4096
"""The least tokens of each part of a split sequence."""
MOST_MICRO_BATCH = 64
MOST_STAGES_PER_RANK = 8


@dataclass(frozen=True)
class PlanRequest:
    """What is fixed: the case's model, batch, precision, optimizer and engine, the machine, and how many ranks.

    `fixed` names what the user set and the search must keep. All formats in `precisions` are tried; if it is empty, the
    case's format is kept. Offload is tried only if it is not fixed and nothing fits without it.
    """

    case: Case
    machine: Machine
    world: int
    fixed: frozenset[str] = frozenset()
    precisions: tuple[Precision, ...] = ()
    as_run: Callable[[Case], Case | None] = lambda case: case
    """The case as its engine runs it; None for a layout that the engine refuses."""
    length: Span | None = None
    """Of the whole run; None: not known."""
    assumed: tuple[str, ...] = ()
    """What was assumed for the request."""

    @property
    def nodes(self) -> int:
        return -(-self.world // self.machine.per_node)

    @property
    def formats(self) -> tuple[Precision, ...]:
        """Formats of products to try."""
        return self.precisions or (self.case.precision,)

    @property
    def ladder(self) -> tuple[Recompute, ...]:
        """Modes of recompute that the engine has, from the fastest to the one with least memory."""
        if "recompute" in self.fixed:
            return (self.case.recompute,)
        between: Recompute = self.case.engine.between if self.case.flash else "selective"
        return ("none", between, "full") if between != "none" else ("none", "full")


def list_degrees(request: PlanRequest) -> Iterator[Degrees]:
    """Every split of the ranks over the axes.

    Tensor degrees stay inside the fast link. What the other axes leave is data parallel: sharded over all ranks, over
    those of a node (hybrid sharding, arXiv:2304.11277, section 3.2.2; or the fewest that fit) and copied, or copied.
    """
    case, world, machine = request.case, request.world, request.machine

    def choices(name: str, sizes: list[int]) -> list[int]:
        return [getattr(case.degrees, name)] if name in request.fixed else sizes

    heads = case.model.runs[0].layer.attention.heads
    counts = {run.layer.experts.count for run in case.model.runs if run.layer.experts}
    copies = case.degrees.dp_replicate if "dp_replicate" in request.fixed else 0
    inside = [size for size in divisors(heads) if size <= machine.domain and world % size == 0]
    for tp in choices("tp", [size for size in inside if machine.per_node % size == 0 or size == machine.domain]):
        etp = tp if counts and case.engine.splits_experts else 1
        for pp in choices("pp", [size for size in divisors(world // tp) if size <= case.model.depth]):
            parts = divisors(world // (tp * pp))
            for cp in choices("cp", [size for size in parts if size == 1 or case.seq_len // size >= LEAST_PART_TOKENS]):
                data = world // (tp * pp * cp)
                if world % (tp * pp * cp) or case.seq_len % cp or case.global_batch % data:
                    continue
                sizes = {max(1, data // copies)} if copies else {data, 1, max(1, machine.domain // (tp * cp))}
                for shard in choices("dp_shard", sorted(sizes, reverse=True)):
                    if data % shard or copies not in (0, data // shard):
                        continue
                    ranks = shard * cp * tp // etp
                    for ep in choices("ep", divisors(min(counts, default=1))):
                        if ranks % ep == 0:
                            yield Degrees(
                                dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp
                            )


def list_ways(request: PlanRequest, degrees: Degrees) -> Iterator[tuple[Case, ...]]:
    """Every format, schedule and sharding, without recompute; offload as in the request. Each way is cases with
    increasing micro-batches (powers of two that divide a data rank's share), and so increasing memory."""
    case, share = request.case, request.case.global_batch // degrees.data
    sizes = [case.micro_batch]
    if "micro_batch" not in request.fixed:
        sizes = [2**power for power in range(MOST_MICRO_BATCH.bit_length())]
    sizes = [size for size in sizes if share % size == 0]
    sequence = case.sequence if "sequence" in request.fixed else degrees.tp > 1
    for precision in request.formats if sizes else ():
        base = replace(
            case,
            degrees=degrees,
            micro_batch=sizes[0],
            precision=precision,
            sequence=sequence,
            stages_per_rank=1,
            recompute=request.ladder[0],
        )
        for schedule, stages_per_rank in _list_schedules(request, degrees):
            for zero, reshard in _list_sharding(request, degrees):
                way = replace(base, schedule=schedule, stages_per_rank=stages_per_rank, zero=zero, reshard=reshard)
                cases = (way, *(replace(way, micro_batch=size) for size in sizes[1:]))
                run = map(request.as_run, filter(fills_schedule, cases))
                taken = tuple(each for each in run if each is not None)
                if taken:
                    yield taken


STAGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"interleaved": (2, MOST_STAGES_PER_RANK), "zero_bubble": (2, MOST_STAGES_PER_RANK), "zbv": (2, 2)}
)
"""Schedules that require several stages on each rank, and how many they take."""


def _list_schedules(request: PlanRequest, degrees: Degrees) -> list[tuple[Schedule, int]]:
    """Plain and interleaved pipelines; other schedules only if the user asks for them, with any number of stages that
    the schedule takes unless that is set too."""
    case = request.case
    if degrees.pp == 1:
        return [("1f1b", 1)]
    held = case.model.depth // degrees.pp
    # Stages above 1 that evenly split the layers of a rank, or one number if none does.
    several = [size for size in divisors(max(1, held)) if 1 < size <= MOST_STAGES_PER_RANK]
    several = several or ([min(held, MOST_STAGES_PER_RANK)] if held > 1 else [])
    if "schedule" not in request.fixed:
        return [("1f1b", 1), *(("interleaved", size) for size in several)]
    if case.schedule not in STAGES or case.stages_per_rank > 1:
        return [(case.schedule, case.stages_per_rank)] if case.stages_per_rank <= held else []
    least, most = STAGES[case.schedule]
    return [(case.schedule, size) for size in several if least <= size <= most]


def _list_sharding(request: PlanRequest, degrees: Degrees) -> list[tuple[int, bool]]:
    """Stages of ZeRO, each with whether weights are freed after use."""
    if degrees.shards == 1:
        return [(0, True)]
    if "zero" in request.fixed:
        return [(request.case.zero, request.case.reshard)]
    if request.case.engine.shards_weights:
        return [(3, False)] if degrees.pp > 1 else [(3, True), (3, False)]
    return [(1, True)]


# --- the best layouts

NEAR = 0.02
"""Layouts whose steps differ by less count as equal, given the precision of the estimate."""


@dataclass(frozen=True)
class Candidate:
    """The best way to run some degrees, and its loss against the best of all."""

    estimate: Estimate
    reason: str = ""


@dataclass(frozen=True)
class SearchResult:
    """Layouts that fit, best first, one per set of degrees; the number of layouts priced; the nearest miss."""

    candidates: tuple[Candidate, ...]
    looked_at: int
    nearest: Estimate | None
    """The layout with least memory, if nothing fits."""

    @property
    def best(self) -> Estimate | None:
        return self.candidates[0].estimate if self.candidates else None


def search(request: PlanRequest, most: int = 10) -> SearchResult:
    """Price every legal layout and return the `most` best; states are on the host only if nothing else fits."""
    found = _search(request, most)
    if found.candidates or request.case.offload or "offload" in request.fixed:
        return found
    offloaded = _search(replace(request, case=replace(request.case, offload=True)), most)
    looked_at = found.looked_at + offloaded.looked_at
    return replace(offloaded if offloaded.candidates else found, looked_at=looked_at)


def _search(request: PlanRequest, most: int) -> SearchResult:
    pricer = _Pricer(request.machine)
    fitting: list[_Priced] = []
    nearest: _Priced | None = None
    for degrees in list_degrees(request):
        found, smallest = pricer.best_of(request, degrees)
        if found is not None:
            fitting.append(found)
        elif smallest is not None and (nearest is None or smallest.peak.device < nearest.peak.device):
            nearest = smallest
    ordered = [Candidate(estimate(each.case, request.machine)) for each in _order(fitting)[:most]]
    explained = tuple(replace(each, reason=explain_loss(ordered[0].estimate, each.estimate)) for each in ordered)
    missed = estimate(nearest.case, request.machine) if nearest is not None and not explained else None
    return SearchResult(explained, pricer.looked_at, missed)


@dataclass(frozen=True)
class _Priced:
    """A case whose memory is known, and its time if that was computed."""

    case: Case
    peak: StageMemory
    seconds: float = math.inf


class _Pricer:
    """Prices cases of one machine, memory first: a case that does not fit is not timed."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.looked_at = machine, 0
        self.ceilings, self.overheads = ceilings_of(machine), load_overheads()

    def best_of(self, request: PlanRequest, degrees: Degrees) -> tuple[_Priced | None, _Priced | None]:
        """The fastest way to run some degrees that fits, and the one with least memory if none does."""
        best: _Priced | None = None
        smallest: _Priced | None = None
        for cases in list_ways(request, degrees):
            for found, fits in self._walk(cases, request.ladder):
                if fits:
                    timed = replace(found, seconds=estimate_step(found.case, self.machine, self.ceilings).seconds)
                    best = timed if best is None or timed.seconds < best.seconds else best
                elif smallest is None or found.peak.device < smallest.peak.device:
                    smallest = found
        return best, smallest

    def _walk(self, cases: Sequence[Case], ladder: Sequence[Recompute]) -> Iterator[tuple[_Priced, bool]]:
        """Each micro-batch with as little recompute as fits, up to the first that does not fit with full recompute.

        A mode that was too large for a micro-batch is not tried for a larger one.
        """
        modes = list(ladder)
        for case in cases:
            while True:
                self.looked_at += 1
                tried = case if modes[0] == case.recompute else replace(case, recompute=modes[0])
                found = _Priced(tried, estimate_peak(tried, self.overheads))
                fits = holds(self.machine, found.peak, tried.degrees.world)
                if fits or len(modes) == 1:
                    break
                modes.pop(0)
            yield found, fits
            if not fits:
                return


def _order(priced: Sequence[_Priced]) -> list[_Priced]:
    """Fastest first, but among those as fast as the fastest the simplest first."""
    ordered = sorted(priced, key=lambda each: each.seconds)
    if not ordered:
        return []
    equal = [each for each in ordered if each.seconds <= ordered[0].seconds * (1 + NEAR)]
    first = min(equal, key=lambda each: (count_axes(each.case.degrees), each.case.recompute != "none"))
    return [first, *(each for each in ordered if each is not first)]


def count_axes(degrees: Degrees) -> int:
    """Axes that split something: fewer are simpler."""
    return sum(getattr(degrees, each.name) > 1 for each in fields(degrees))


def explain_loss(best: Estimate, other: Estimate) -> str:
    """The items on which a layout spends more time: "bubble +11 %, tensor messages +4 %"; "" for the best."""
    if other is best:
        return ""
    spent, total = best.time.items, best.time.seconds
    lost = sorted((((seconds - spent.get(name, 0.0)) / total, name) for name, seconds in other.time.items.items()))
    worst = [f"{name} +{share:.0%}" for share, name in lost[:-3:-1] if share >= 0.01]
    more = count_axes(other.case.degrees) > count_axes(best.case.degrees)
    return ", ".join(worst) or ("as fast, with more axes" if more else "as fast")


# --- changes that make a run fit

MOST_NODES_TO_FIT = 4096
SHORTEST = 1024
"""Shorter sequences than this are not proposed."""


@dataclass(frozen=True)
class Change:
    """What to do, and the best layout with it."""

    what: str
    estimate: Estimate


def list_changes(request: PlanRequest) -> tuple[Change, ...]:
    """All changes that help, smallest first: settings, layout, host memory, nodes; then those that alter training."""
    here = replace(request, fixed=request.fixed | {"offload"})
    found = []
    for changed, what, names in _list_tries(here):
        best = search(changed, most=1).best
        if best is not None:
            found.append(Change(what or _describe(best, names), best))
    more = _more_nodes(here)
    settable = here.fixed & {*SETTINGS, *AXES}
    if found or more or not settable:
        return tuple([*found, more] if more else found)
    freed = replace(here, fixed=here.fixed - settable)
    best = search(freed, most=1).best
    if best is not None:
        words = _describe(best, ("micro_batch", "recompute"))
        return (Change(f"all that is set left open: {best.case.degrees.render()}, {words}", best),)
    more = _more_nodes(freed)
    return (replace(more, what=f"{more.what}, and all that is set left open"),) if more else ()


def _list_tries(request: PlanRequest) -> Iterator[tuple[PlanRequest, str, tuple[str, ...]]]:
    """Questions that differ in one thing: what it is; or else the fields of a case whose new values describe it."""
    fixed, case = request.fixed, request.case
    for name in SETTINGS:
        if name in fixed:
            yield replace(request, fixed=fixed - {name}), "", (name,)
    if fixed & set(AXES):
        yield replace(request, fixed=fixed - set(AXES)), "", ("degrees",)
    if not case.offload:
        yield _changed(request, offload=True), "optimizer states in the host's memory (--offload)", ()
    if case.optimizer == "adamw":
        yield _changed(request, optimizer="adamw8bit"), "AdamW with moments in eight bits (adamw8bit)", ()
    half = case.seq_len // 2
    if half >= SHORTEST and half % case.degrees.cp == 0 and not case.model.patch_features:
        what = f"sequences of {half:,} tokens, twice as many in a batch"
        yield _changed(request, seq_len=half, global_batch=2 * case.global_batch), what, ()


def _changed(request: PlanRequest, **values: object) -> PlanRequest:
    return replace(request, case=replace(request.case, **values))  # type: ignore[arg-type]


def _describe(best: Estimate, names: tuple[str, ...]) -> str:
    case = best.case
    words = {
        "micro_batch": f"a micro-batch of {case.micro_batch}",
        "recompute": f"recompute {case.recompute}",
        "zero": "weights sharded too" if case.zero == 3 else f"states shared by stage {case.zero} of ZeRO",
        "schedule": f"schedule {case.schedule} with {case.stages_per_rank} stages a rank",
        "degrees": f"the layout {case.degrees.render()}",
    }
    return ", ".join(words[name] for name in names)


def _more_nodes(request: PlanRequest) -> Change | None:
    """The fewest nodes, doubled each time, on which something fits. Axes that copy or shard states follow."""
    part = request.world % request.machine.per_node > 0
    nodes = request.nodes if part else 2 * request.nodes
    while nodes <= MOST_NODES_TO_FIT:
        best = search(on_nodes(request, nodes), most=1).best
        if best is not None:
            return Change(f"{nodes:,} {'node' if nodes == 1 else 'nodes'} ({best.case.degrees.world:,} ranks)", best)
        nodes *= 2
    return None


def on_nodes(request: PlanRequest, nodes: int) -> PlanRequest:
    """The same request for `nodes` whole nodes; dp_replicate and dp_shard are kept if the ranks are the same."""
    world = nodes * request.machine.per_node
    loose = request.fixed if world == request.world else request.fixed - {"dp_replicate", "dp_shard"}
    return replace(request, world=world, fixed=loose)


# --- the curve over nodes

MOST_NODES = 131072
POINTS_BEYOND = 2
"""Doublings of nodes beyond the requested number."""


@dataclass(frozen=True)
class ScalingPoint:
    """A number of nodes with its best layout; if there is none, `why_not` has the reason."""

    nodes: int
    best: Estimate | None
    why_not: str = ""

    @property
    def device_seconds_per_token(self) -> float:
        """The cost of a token in seconds of one accelerator; 0 if nothing runs."""
        return self.best.case.degrees.world / self.best.tokens_per_second if self.best else 0.0


def scaling_curve(request: PlanRequest, nodes: Sequence[int]) -> tuple[ScalingPoint, ...]:
    """One point per number of nodes."""
    return tuple(_point(on_nodes(request, count), count) for count in nodes)


def default_nodes(request: PlanRequest) -> tuple[int, ...]:
    """Powers of two up to two doublings beyond the requested number, and that number."""
    powers = {2**power for power in range((request.nodes - 1).bit_length() + POINTS_BEYOND + 1)}
    return tuple(sorted({each for each in powers if each <= 4 * request.nodes} | {request.nodes}))


def parse_nodes(text: str) -> tuple[int, ...]:
    """Numbers of nodes from a text such as "1,2,8". Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_NODES for part in parts):
        allowed = f'"nodes", or numbers from 1 to {MOST_NODES:,} such as 1,2,8'
        raise UserError(render_problems("the plan", [Problem("--curve", f'"{text}" is no curve', allowed=allowed)]))
    return tuple(sorted({int(part) for part in parts}))


def efficiency(points: Sequence[ScalingPoint], point: ScalingPoint) -> float:
    """The cost of a token at the cheapest point over that at this one, 0 to 1; 0 if nothing runs."""
    costs = [each.device_seconds_per_token for each in points if each.best]
    return min(costs) / point.device_seconds_per_token if point.best else 0.0


def _point(there: PlanRequest, nodes: int) -> ScalingPoint:
    found = search(there, most=1)
    if found.best is not None:
        return ScalingPoint(nodes, found.best)
    if found.nearest is not None:
        peak, usable = found.nearest.peak.device / 2**30, found.nearest.usable_bytes / 2**30
        return ScalingPoint(nodes, None, f"needs {peak:,.0f} GiB of {usable:,.0f}")
    degrees = there.case.degrees
    taken = math.prod(getattr(degrees, name) for name in ("cp", "tp", "pp") if name in there.fixed)
    why = f"{there.case.global_batch:,} sequences do not split over {there.world // taken:,} ranks"
    if there.world % taken:
        why = f"the degrees that are set need a multiple of {taken:,} ranks, not {there.world:,}"
    return ScalingPoint(nodes, None, why)
