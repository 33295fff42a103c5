"""The planner: from the user's options to a request, the search over every legal layout, and what the answer rests on.

Invariants:
- Each assumption has a sentence with its value, its reason, and how to override it. None and empty mean "not given".
  All problems of the options are reported at once, in the words of the command line.
- A layout is listed once, in a deterministic order, and only if every degree divides what it must.
- Of two layouts the one with the shorter step wins; within `NEAR` of each other the simpler one. A layout is offered
  only if its memory fits.
- A change is listed only if the search found a layout that fits with it, and that layout is shown with it. Two things
  are changed at once only if no single change helps; then everything that is set is left open.
- The curve keeps the global batch (strong scaling), so that every point trains the same model.

Sources: legality: Narayanan et al., arXiv:2104.04473, section 5.1 (tensor parallel inside the fast link), and
Korthikanti et al., arXiv:2205.05198; model and hardware FLOPs utilisation: Chowdhery et al., arXiv:2204.02311, appendix
B, and Korthikanti et al., section 6.3; batches: Brown et al., arXiv:2005.14165, table 2.1; tokens for a model's size:
Hoffmann et al., arXiv:2203.15556, section 3; images: Dosovitskiy et al., arXiv:2010.11929, table 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import cast, get_args

from shardway.batch_ramp import BatchRamp
from shardway.errors import Problem, UserError, check_no_problems, render_problems, render_reason
from shardway.plan.case import (
    AttentionKernel,
    Case,
    Degrees,
    Machine,
    Precision,
    Recompute,
    Schedule,
    attention_of,
    ceilings_of,
    divisors,
    fills_schedule,
    find_engine,
    machine_of_part,
    machine_of_site,
)
from shardway.plan.economy import JobTerms, Price, RunEstimate, list_warnings, price_run
from shardway.plan.memory import (
    BetweenSteps,
    StageMemory,
    checkpoint_bytes,
    estimate_between_steps,
    estimate_memory,
    estimate_peak,
    load_overheads,
    peak_stage,
)
from shardway.plan.shapes import Architecture
from shardway.plan.time import StepTime, estimate_step, every_second
from shardway.plugins import list_names
from shardway.sites.load import list_sites, load_site
from shardway.sites.schema import SiteProfile
from shardway.units import Scale, Span, render_count

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
    def usable_bytes(self) -> float:  # the part of a device's memory that a plan may use
        return self.machine.memory_bytes * self.peak.overheads.usable

    @cached_property
    def between_steps(self) -> BetweenSteps:  # what the fullest rank holds between steps
        return estimate_between_steps(self.case, self.peak)

    @property
    def memory_low(self) -> float:
        """Lower end of the interval that holds four of five measured peaks, as nvidia-smi shows them."""
        return self.peak.device * self.peak.overheads.low

    @property
    def memory_high(self) -> float:  # the upper end of that interval
        return self.peak.device * self.peak.overheads.high

    @property
    def may_not_fit(self) -> bool:  # whether measured peaks reach beyond the device's memory
        return self.memory_high > self.machine.memory_bytes

    @property
    def fits(self) -> bool:  # whether every rank's device, and every node's host, holds what it needs
        return holds(self.machine, self.peak, self.case.degrees.world)

    @property
    def tokens_per_second(self) -> float:
        return self.case.tokens_per_step / self.time.seconds

    @property
    def peak_flops(self) -> float:
        """The rated FLOP/s by which utilisation is measured: that of the products' own format."""
        return self.machine.peak(self.case.precision)

    def mfu(self, *, causal: bool) -> float:
        """Model FLOPs utilisation, 0 to 1; `causal` counts the half of the scores that the mask leaves."""
        per_token = self.case.model.flops_per_token(self.case.seq_len, causal=causal)
        return per_token * self.tokens_per_second / self.case.degrees.world / self.peak_flops

    def hfu(self, *, causal: bool) -> float:
        case, model = self.case, self.case.model
        forward = model.forward_flops_per_token(case.seq_len, causal=causal)
        again = 0.0
        for run in model.runs:
            core = run.layer.core_flops_per_token(model.side_seq(run.side, case.seq_len), causal)
            again += run.count * (core if case.recompute == "selective" and not case.flash else 0.0)
            if case.recompute == "operators":
                again += run.count * every_second(run.layer) * run.layer.matmul_flops_per_token
        if case.recompute == "full":
            again = forward - model.head.flops_per_token
        return self.mfu(causal=causal) * (1 + again / model.flops_per_token(case.seq_len, causal=causal))


def holds(machine: Machine, peak: StageMemory, ranks: int) -> bool:
    """Whether a machine has the memory that the fullest of `ranks` ranks needs; a host of unknown size always does."""
    on_host = (
        machine.host_bytes is None
        or machine.bytes_of_node(peak.host, ranks) <= machine.host_bytes * peak.overheads.usable
    )
    return on_host and peak.device <= machine.memory_bytes * peak.overheads.usable


def estimate(case: Case, machine: Machine) -> Estimate:
    """Price a case. Raises UserError if the machine has no rate for the precision."""
    memory = estimate_memory(case, load_overheads())
    return Estimate(case, machine, memory, estimate_step(case, machine, ceilings_of(machine)))


# --- legal layouts

AXES = tuple(each.name for each in fields(Degrees) if each.name != "etp")
SETTINGS = ("micro_batch", "recompute", "schedule", "zero")
"""What a request may fix: axes, and settings that do not change which ranks work together."""

LEAST_PART_TOKENS = 4096  # the least tokens of each part of a split sequence
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
    length: Span | None = None  # of the whole run; None: not known
    assumed: tuple[str, ...] = ()  # what was assumed for the request

    @property
    def nodes(self) -> int:
        return -(-self.world // self.machine.per_node)

    @property
    def formats(self) -> tuple[Precision, ...]:  # formats of products to try
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
    # Stages of ZeRO, each with whether weights are freed after use
    sharding = [(3, False)] if degrees.pp > 1 else [(3, True), (3, False)]
    sharding = sharding if case.engine.shards_weights else [(1, True)]
    sharding = [(case.zero, case.reshard)] if "zero" in request.fixed else sharding
    sharding = sharding if degrees.shards > 1 else [(0, True)]
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
            for zero, reshard in sharding:
                way = replace(base, schedule=schedule, stages_per_rank=stages_per_rank, zero=zero, reshard=reshard)
                cases = (way, *(replace(way, micro_batch=size) for size in sizes[1:]))
                run = map(request.as_run, filter(fills_schedule, cases))
                taken = tuple(each for each in run if each is not None)
                if taken:
                    yield taken


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
    if case.schedule not in ("interleaved", "zero_bubble", "zbv") or case.stages_per_rank > 1:
        return [(case.schedule, case.stages_per_rank)] if case.stages_per_rank <= held else []
    return [(case.schedule, size) for size in several if size == 2 or case.schedule != "zbv"]


# --- the best layouts

NEAR = 0.02  # layouts whose steps differ by less count as equal, given the precision of the estimate


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
    nearest: Estimate | None  # the layout with least memory, if nothing fits

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


@dataclass(frozen=True)
class _Priced:
    """A case whose memory is known, and its time if that was computed."""

    case: Case
    peak: StageMemory
    seconds: float = math.inf


def _search(request: PlanRequest, most: int) -> SearchResult:
    """Memory is priced first: a case that does not fit is not timed."""
    machine, ceilings, overheads = request.machine, ceilings_of(request.machine), load_overheads()
    fitting: list[_Priced] = []
    nearest: _Priced | None = None
    looked_at = 0
    for degrees in list_degrees(request):
        best: _Priced | None = None
        smallest: _Priced | None = None
        for cases in list_ways(request, degrees):
            # Each micro-batch with as little recompute as fits, up to the first that does not fit with full recompute.
            # a mode that was too large for a micro-batch is not tried for a larger one.
            modes = list(request.ladder)
            for case in cases:
                while True:
                    looked_at += 1
                    tried = case if modes[0] == case.recompute else replace(case, recompute=modes[0])
                    found = _Priced(tried, estimate_peak(tried, overheads))
                    fits = holds(machine, found.peak, tried.degrees.world)
                    if fits or len(modes) == 1:
                        break
                    modes.pop(0)
                if not fits:
                    if smallest is None or found.peak.device < smallest.peak.device:
                        smallest = found
                    break
                seconds = estimate_step(tried, machine, ceilings).seconds
                if best is None or seconds < best.seconds:
                    best = replace(found, seconds=seconds)
        if best is not None:
            fitting.append(best)
        elif smallest is not None and (nearest is None or smallest.peak.device < nearest.peak.device):
            nearest = smallest
    if not fitting:
        return SearchResult((), looked_at, estimate(nearest.case, machine) if nearest is not None else None)
    # Fastest first, but among those as fast as the fastest the simplest first.
    fitting.sort(key=lambda each: each.seconds)
    equal = [each for each in fitting if each.seconds <= fitting[0].seconds * (1 + NEAR)]
    first = min(equal, key=lambda each: (count_axes(each.case.degrees), each.case.recompute != "none"))
    ordered = [first, *(each for each in fitting if each is not first)]
    estimates = [estimate(each.case, machine) for each in ordered[:most]]
    return SearchResult(
        tuple(Candidate(each, _explain_loss(estimates[0], each)) for each in estimates), looked_at, None
    )


def count_axes(degrees: Degrees) -> int:
    """Axes that split something: fewer are simpler."""
    return sum(getattr(degrees, each.name) > 1 for each in fields(degrees))


def _explain_loss(best: Estimate, other: Estimate) -> str:
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
SHORTEST = 1024  # shorter sequences than this are not proposed


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
        what = "optimizer states in the host's memory (--offload)"
        yield replace(request, case=replace(case, offload=True)), what, ()
    if case.optimizer == "adamw":
        what = "AdamW with moments in eight bits (adamw8bit)"
        yield replace(request, case=replace(case, optimizer="adamw8bit")), what, ()
    half = case.seq_len // 2
    if half >= SHORTEST and half % case.degrees.cp == 0 and not case.model.patch_features:
        what = f"sequences of {half:,} tokens, twice as many in a batch"
        yield replace(request, case=replace(case, seq_len=half, global_batch=2 * case.global_batch)), what, ()


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
POINTS_BEYOND = 2  # doublings of nodes beyond the requested number


@dataclass(frozen=True)
class ScalingPoint:
    """A number of nodes with its best layout; if there is none, `why_not` has the reason."""

    nodes: int
    best: Estimate | None
    why_not: str = ""

    @property
    def device_seconds_per_token(self) -> float:  # the cost of a token in seconds of one accelerator; 0 if nothing runs
        return self.best.case.degrees.world / self.best.tokens_per_second if self.best else 0.0


def scaling_curve(request: PlanRequest, nodes: Sequence[int]) -> tuple[ScalingPoint, ...]:
    """One point per number of nodes."""
    points = []
    for count in nodes:
        there = on_nodes(request, count)
        found, why = search(there, most=1), ""
        if found.nearest is not None:
            peak, usable = found.nearest.peak.device / 2**30, found.nearest.usable_bytes / 2**30
            why = f"needs {peak:,.0f} GiB of {usable:,.0f}"
        elif found.best is None:
            degrees = there.case.degrees
            taken = math.prod(getattr(degrees, name) for name in ("cp", "tp", "pp") if name in there.fixed)
            why = f"{there.case.global_batch:,} sequences do not split over {there.world // taken:,} ranks"
            if there.world % taken:
                why = f"the degrees that are set need a multiple of {taken:,} ranks, not {there.world:,}"
        points.append(ScalingPoint(count, found.best, why))
    return tuple(points)


def default_nodes(request: PlanRequest) -> tuple[int, ...]:
    """Powers of two up to two doublings beyond the requested number, and that number."""
    powers = {2**power for power in range((request.nodes - 1).bit_length() + POINTS_BEYOND + 1)}
    return tuple(sorted({each for each in powers if each <= 4 * request.nodes} | {request.nodes}))


def parse_nodes(text: str) -> tuple[int, ...]:
    """Numbers of nodes from a text such as "1,2,8". Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_NODES for part in parts):
        allowed = f'"nodes", or numbers from 1 to {MOST_NODES:,} such as 1,2,8'
        raise refuse("--curve", f'"{text}" is no curve', allowed)
    return tuple(sorted({int(part) for part in parts}))


def efficiency(points: Sequence[ScalingPoint], point: ScalingPoint) -> float:
    """The cost of a token at the cheapest point over that at this one, 0 to 1; 0 if nothing runs."""
    costs = [each.device_seconds_per_token for each in points if each.best]
    return min(costs) / point.device_seconds_per_token if point.best else 0.0


# --- what is assumed if the user does not say it: sequence, batch, length

USUAL_SEQ = 4096
USUAL_SAMPLES = 4096
BATCH_TOKENS = ((1e9, 0.5e6), (5e9, 1e6), (20e9, 2e6))
"""(Parameters, tokens): up to so many parameters a batch of so many tokens is usual."""
LARGE_BATCH_TOKENS = 3.2e6
TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True)
class Assumed:
    """A value that was not given, and the sentence that reports it."""

    value: int
    note: str


def assume_seq_len(model: Architecture) -> Assumed:
    """The sequence length of a text model; for an image model its number of patches."""
    if model.patch_features:
        length = model.longest or 197
        return Assumed(length, f"{length:,} patches an image, as many as the model has positions for")
    return assume_seq_len_of(model.longest)


def assume_seq_len_of(longest: int) -> Assumed:
    """The sequence length of a text model with so many positions, 0 for any number."""
    length = min(USUAL_SEQ, longest or USUAL_SEQ)
    reason = "all that the model has positions for" if length < USUAL_SEQ else "usual for pre-training"
    return Assumed(length, f"sequences of {length:,} tokens, {reason} (--seq-len)")


def assume_batch(model: Architecture, seq_len: int, ranks: int) -> Assumed:
    """A usual batch in sequences, a multiple of the ranks if it is large enough; of images at least the ranks."""
    if model.patch_features:
        return assume_samples(ranks, "images")
    return assume_sequences(model.active_parameters, seq_len, ranks)


def assume_samples(ranks: int, noun: str = "samples") -> Assumed:
    """A usual batch of samples that are no text, which no ranks share."""
    if ranks > USUAL_SAMPLES:
        return _assume_one_each(ranks, noun)
    batch = _split_over(USUAL_SAMPLES, ranks)
    return Assumed(batch, f"a global batch of {batch:,} {noun}, about {USUAL_SAMPLES:,} (--global-batch)")


def assume_sequences(active: int, seq_len: int, ranks: int, *, shared: bool = True) -> Assumed:
    """A usual batch in sequences for a model with so many parameters that a token meets; `shared`: several ranks may
    work on one sequence."""
    sizes = (tokens for parameters, tokens in BATCH_TOKENS if active <= parameters)
    tokens = next(sizes, LARGE_BATCH_TOKENS)
    if not shared and ranks > tokens / seq_len:
        return _assume_one_each(ranks, "sequences")
    batch = _split_over(tokens / seq_len, ranks)
    note = f"a global batch of {batch:,} sequences, near the {tokens / 1e6:g} M tokens that GPT-3 had at this size"
    return Assumed(batch, f"{note} (--global-batch)")


def _assume_one_each(ranks: int, noun: str) -> Assumed:
    return Assumed(ranks, f"a global batch of {ranks:,} {noun}, the least for so many ranks (--global-batch)")


def _split_over(batch: float, ranks: int) -> int:
    """The number near `batch` that gives each rank a power of two, or three times one, so that micro-batches divide it.

    With more ranks than that: their largest divisor that is at most `batch`.
    """
    if batch >= ranks:
        shares = [number << power for power in range(int(batch / ranks).bit_length() + 1) for number in (1, 3)]
        return ranks * min(shares, key=lambda share: abs(math.log(share * ranks / batch)))
    return max(size for size in divisors(ranks) if size <= max(1.0, batch))


def assume_tokens(model: Architecture) -> Assumed:
    """The least tokens that a model of this size should see."""
    return assume_tokens_of(model.active_parameters)


def assume_tokens_of(active: int) -> Assumed:
    """The least tokens for so many parameters that a token meets."""
    tokens = TOKENS_PER_PARAMETER * active
    note = f"{render_count(tokens)} tokens, {TOKENS_PER_PARAMETER} for each parameter that a token meets"
    return Assumed(tokens, f"{note} (Hoffmann et al.; --tokens)")


# --- the options of a plan

MOST_RANKS = 2**20
MOST_STEPS = 10**12  # of a run; a larger number is taken for a typing error


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan. `layout` has the degrees that are set, by axis."""

    nodes: int | None = None
    gpus: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    length: Span | None = None
    precisions: tuple[str, ...] = ()
    optimizer: str = ""
    engine: str = ""
    layout: Mapping[str, int] = field(default_factory=dict)
    micro_batch: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    zero: int | None = None
    attention: str | None = None
    compiled: bool = False
    offload: bool | None = None


# --- the words of the command line


def refuse(where: str, what: str, allowed: str) -> UserError:
    """The error for one word of the command line."""
    problem = Problem(where, what, allowed=allowed)
    return UserError(render_problems("the plan", [problem]), [problem])


def parse_layout(text: str) -> dict[str, int]:
    """Degrees from a text such as "tp=8,pp=4" or "tp 8 x pp 4". Raises UserError that names every invalid part."""
    found: dict[str, int] = {}
    problems = []
    for part in filter(None, (each.strip() for each in text.replace(" x ", ",").split(","))):
        name, _, size = part.replace("=", " ").partition(" ")
        if name in found:
            what = f'"{text}" has two degrees of {name}'
            problems.append(Problem("--layout", what, allowed="one degree of each axis", remedy="leave one out"))
        elif name in AXES and size.strip().isdecimal() and int(size) >= 1:
            found[name] = int(size)
        else:
            allowed = f"an axis ({', '.join(AXES)}) with its degree, such as tp=8,pp=4"
            problems.append(Problem("--layout", f'"{part}" is no degree', allowed=allowed))
    check_no_problems("the plan", problems)
    return found


def parse_length(tokens: str | None, steps: int | None) -> Span | None:
    """The length of a run; None if no option gives one. Raises UserError."""
    if tokens is not None and steps is not None:
        raise refuse("--steps", "a length in steps and one in tokens are said both", "one of --tokens and --steps")
    if steps is not None:
        if not 1 <= steps <= MOST_STEPS:
            raise refuse("--steps", f"{steps} is no length", f"1 to {MOST_STEPS:,}")
        return Span(float(steps), "steps")
    if tokens is None:
        return None
    scales = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number, scale = (tokens[:-1], scales[tokens[-1]]) if tokens[-1:] in scales else (tokens, 1.0)
    try:
        value = float(number.replace("_", "")) * scale
    except ValueError:
        value = math.nan
    if not 1 <= value <= 1e18:
        raise refuse("--tokens", f'"{tokens}" is no number of tokens', "1 to 1e18, such as 100e9, 300B or 15T")
    return Span(value, "tokens")


MOST_PRICE = 1e9  # of one accelerator for an hour, in any currency


def parse_price(text: str | None) -> Price | None:
    """A price in a string such as "2.5 EUR". Raises UserError."""
    if text is None:
        return None
    digits = text.strip().rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz€$£¥ ")
    currency = text.strip()[len(digits) :].strip()
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MOST_PRICE or not currency:
        allowed = 'a number up to 1e9 and a currency, such as "2.5 EUR"'
        raise refuse("--price", f'"{text}" is no price', allowed)
    return Price(per_gpu_hour=value, currency=currency)


def find_machine(on: str | None, gpu: str | None) -> tuple[Machine, SiteProfile | None]:
    """The machine, and the profile of its site if there is one."""
    if on and gpu:
        raise refuse("--gpu", f"a site ({on}) and a GPU ({gpu}) are said both", "one of --on and --gpu")
    if gpu:
        return machine_of_part(gpu), None
    if on:
        site = load_site(on)
        return machine_of_site(site), site
    raise refuse(
        "--on",
        "nothing says which machine the plan is for",
        f"--on SITE ({', '.join(list_sites())}, or the path of a profile), or --gpu KEY such as h100-sxm5-80gb",
    )


def describe_stray_key(word: str) -> Problem:
    """The problem of a key of a run file that follows no run file."""
    remedy = "name the run file first, or use the options of `shardway plan --help`"
    return Problem(word, "sets a key of a run file, and none is named", remedy=remedy)


_KEYS = {
    "seq_len": ("--seq-len", "data.seq_len"),
    "global_batch": ("--global-batch", "train.global_batch"),
    "precisions": ("--precision", "precision.compute"),
    "optimizer": ("--optimizer", "optim.name"),
    "engine": ("--engine", "train.engine"),
    "layout": ("--layout", "parallel.tp and its like"),
    "micro_batch": ("--micro-batch", "train.micro_batch"),
    "recompute": ("--recompute", "recompute.mode"),
    "schedule": ("--schedule", "parallel.pp_schedule"),
    "zero": ("--zero", "parallel.dp_shard"),
    "attention": ("--attention", "train.compile and the device"),
    "compiled": ("--compiled", "train.compile"),
    "offload": ("--offload", "parallel.cpu_offload"),
}
"""Field of `PlanOptions` -> its option, and the key of a run file that sets the same."""


def find_doubles(options: PlanOptions) -> list[Problem]:
    """Options that the run file sets."""
    return [
        Problem(option, "is said by the run file", remedy=f"set {key} there, or give {key}=... behind the run file")
        for name, (option, key) in _KEYS.items()
        if getattr(options, name) != getattr(PlanOptions(), name)
    ]


# --- from options to a request


def request_of(options: PlanOptions, model: Architecture, machine: Machine) -> PlanRequest:
    """The request of these options. Raises UserError with all problems."""
    too_long = find_excess(options, model.longest, "an image" if model.patch_features else "a sequence")
    check_no_problems("the plan", [*find_problems(options, machine), *too_long])
    ranks, assumed = count_ranks(options, machine), [*machine.assumed, *assume_nodes(options)]
    seq = assume_seq_len(model)
    seq_len = options.seq_len or seq.value
    # The batch is split over the ranks that no other axis takes.
    taken = math.prod(size for name, size in options.layout.items() if name in ("cp", "tp", "pp"))
    batch = assume_batch(model, seq_len, ranks // taken * (options.micro_batch or 1) if ranks % taken == 0 else ranks)
    assumed += [] if options.seq_len else [seq.note]
    length, later = options.length, list[str]()
    if length is None and not model.patch_features:
        tokens = assume_tokens(model)
        length = Span(float(tokens.value), "tokens")
        later = [tokens.note]
    engine, degrees = find_engine(options.engine or "shardway"), Degrees(**options.layout)
    ours = engine.name == "shardway"
    usual = "bf16" if machine.accelerator.peak("bf16") else "fp16"
    words = {
        "precision": options.precisions[0] if options.precisions else usual,
        "optimizer": options.optimizer or "adamw",
        "recompute": options.recompute or "none",
        "attention": options.attention or attention_of(engine, machine.accelerator),
        "schedule": options.schedule or "1f1b",
    }
    case = Case(
        model=model,
        seq_len=seq_len,
        global_batch=options.global_batch or batch.value,
        micro_batch=options.micro_batch or 1,
        # The search has not chosen yet which ranks experts are split over.
        degrees=degrees if degrees.ep == 1 or "dp_shard" in options.layout else replace(degrees, dp_shard=degrees.ep),
        engine=engine,
        zero=options.zero or 0,
        compiled=options.compiled,
        fused_loss=ours and options.compiled and not model.patch_features,
        fuses_whole=ours,
        replayed=ours,
        offload=bool(options.offload),
        **words,  # type: ignore[arg-type]
    )
    fixed = {name for name in (*SETTINGS, "offload") if getattr(options, name) is not None} | {*options.layout}
    formats = cast(tuple[Precision, ...], options.precisions)
    request = PlanRequest(case, machine, ranks, frozenset(fixed), formats, length=length)
    if not options.global_batch:
        batch = _find_shareable(request, batch)
        request = replace(request, case=replace(case, global_batch=batch.value))
        assumed.append(batch.note)
    return replace(request, assumed=(*assumed, *later))


def _find_shareable(request: PlanRequest, usual: Assumed) -> Assumed:
    """The usual batch, or the least above it of which some layout gives each rank a part; the usual one if none."""
    unit = request.case.degrees.data * request.case.micro_batch
    more = divisors(request.world * request.case.micro_batch)
    for size in (usual.value, *(each for each in more if each > usual.value and each % unit == 0)):
        tried = replace(request, case=replace(request.case, global_batch=size))
        if any(next(list_ways(tried, degrees), None) for degrees in list_degrees(tried)):
            least = f"a global batch of {size:,} sequences, the least that {request.world:,} ranks can share"
            return usual if size == usual.value else Assumed(size, f"{least} (--global-batch)")
    return usual


def find_excess(options: PlanOptions, longest: int, sample: str) -> Iterator[Problem]:
    """The problem of samples that are longer than a table of learned positions."""
    if options.seq_len and longest and options.seq_len > longest:
        what = f"{options.seq_len:,} is more than the {longest:,} positions that the model has learned vectors for"
        remedy = "for a model with more: change that key in a config.json and name it"
        yield Problem("--seq-len", what, allowed=f"{sample} of at most {longest:,}", remedy=remedy)


def count_ranks(options: PlanOptions, machine: Machine) -> int:
    """The ranks of a plan."""
    return options.gpus or (options.nodes or 1) * machine.per_node


def assume_nodes(options: PlanOptions) -> list[str]:
    """What is assumed if no number of nodes or accelerators is given."""
    return [] if options.gpus or options.nodes else ["one node (--nodes)"]


def find_problems(options: PlanOptions, machine: Machine) -> Iterator[Problem]:
    """Problems of the options on a machine."""
    for name in ("nodes", "gpus", "seq_len", "global_batch", "micro_batch"):
        size = getattr(options, name)
        if size is not None and not 1 <= size <= MOST_RANKS:
            yield Problem(f"--{name.replace('_', '-')}", f"{size:,} is no size", allowed=f"1 to {MOST_RANKS:,}")
    choices: Mapping[str, tuple[Sequence[str | None], Sequence[str]]] = {
        "--precision": (options.precisions, get_args(Precision)),
        "--optimizer": ([options.optimizer or None], list_names("optimizers") if options.optimizer else ()),
        "--recompute": ([options.recompute], get_args(Recompute)),
        "--schedule": ([options.schedule], get_args(Schedule)),
        "--attention": ([options.attention], get_args(AttentionKernel)),
    }
    for where, (words, known) in choices.items():
        for word in words:
            if word is not None and word not in known:
                yield Problem(where, f'"{word}" is not known', allowed=", ".join(known))
    if options.zero is not None and options.zero not in (0, 1, 2, 3):
        yield Problem("--zero", f"{options.zero} is no stage of ZeRO", allowed="0, 1, 2, 3")
    if options.nodes and options.gpus:
        what = f"{options.gpus} GPUs and {options.nodes} nodes are said both"
        yield Problem("--gpus", what, allowed="one of --nodes and --gpus")
    ranks = count_ranks(options, machine)
    taken = math.prod(size for name, size in options.layout.items() if name != "ep")
    if ranks >= 1 and taken >= 1 and ranks % taken:
        layout = " x ".join(f"{name} {size}" for name, size in options.layout.items())
        what, allowed = f"{layout} does not divide {ranks:,} ranks", "degrees whose product divides the ranks"
        yield Problem("--layout", what, allowed=allowed, remedy="change one of them")


# --- the result


@dataclass(frozen=True)
class PlanResult:
    """A plan. `shown` is the layout to use or, if nothing fits, the one that needs least memory."""

    request: PlanRequest
    terms: JobTerms
    found: SearchResult
    shown: Estimate
    run: RunEstimate | None  # the whole run, if its length is known and the layout fits
    changes: tuple[Change, ...]  # what to change if nothing fits, or nothing without the host's memory
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:  # whether some layout fits on every device
        return bool(self.found.candidates)


def make_plan(request: PlanRequest, terms: JobTerms | None = None) -> PlanResult:
    """Search, and price the whole run of the best layout. Raises UserError if no layout is legal."""
    terms = terms or JobTerms()
    found = search(request)
    shown = found.best or found.nearest
    if shown is None:
        world, case = request.world, request.case
        what = f"no layout of {world:,} ranks is legal for a global batch of {case.global_batch:,} sequences"
        remedy = "choose a global batch that the ranks (or a divisor of them) divide, or set fewer degrees"
        if case.degrees.pp > 1 and not case.engine.short_pipelines:
            remedy += "; a pipeline of 1f1b wants as many micro-batches as ranks, gpipe takes any number"
        raise UserError(render_problems("the plan", [Problem("--global-batch", what, remedy=remedy)]))
    on_host = shown.case.offload and not request.case.offload
    changes = list_changes(request) if on_host or not found.best else ()
    changes = tuple(change for change in changes if change.estimate.case != shown.case)
    warnings, assumed, run, case = list_warnings(terms, request.nodes), request.assumed, None, shown.case
    if found.best and request.length:
        scale, step = Scale(BatchRamp.of(case.global_batch), case.seq_len, 1), shown.time.seconds
        saved = checkpoint_bytes(case.model.trained_parameters, case.kept_weight_bytes, case.optimizer)
        try:
            run, note = price_run(request.length, scale, step, saved, request.world, shown.machine, terms)
            assumed = (*assumed, note)
        except UserError as error:
            warnings = (*warnings, f"the whole run cannot be planned: {render_reason(str(error))}")
    return PlanResult(request, terms, found, shown, run, changes, assumed, warnings)


def curve_around(of: PlanResult) -> tuple[ScalingPoint, ...]:
    """The scaling curve around an result."""
    return scaling_curve(of.request, default_nodes(of.request))
