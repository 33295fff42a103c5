"""The roofline of a training step: each group of operators against what the device can compute and move, and what that
means.

The roof at an intensity of I FLOP a byte is min(best product in FLOP/s, I x copy bandwidth); the intensity where both
are equal is the ridge (Williams, Waterman and Patterson, Commun. ACM 52 (2009), doi:10.1145/1498765.1498785). An
operator's floor is the time that the roof allows for its FLOP and its bytes, whichever takes longer.

Invariants:
- Without torch. Times of the groups and the idle time add up to the step.
- A floor of a group is the sum over its operators, each under its own roof. What is saved at the roof is a ceiling of
  what a change brings; ceilings are never added up.
- A share above 1 is shown as it is, with a sentence on why. What the shapes do not show is "n/a", never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardway.watch.advice.findings import Advice
from shardway.watch.trace.groups import NO_WORK, CallWork, Group, GroupTime
from shardway.watch.trace.operators import Operator

TITLES: Mapping[Group, str] = {
    "attention": "attention",
    "products": "products of blocks",
    "output": "output and loss",
    "norms": "norms",
    "elementwise": "elementwise",
    "casts": "casts",
    "optimizer": "optimizer",
    "communication": "communication",
    "copies": "copies",
    "other": "other",
}

Bound = Literal["compute", "memory", "latency", "n/a"]
"""What a group is limited by: products, memory, or the start of kernels that are too short for either to explain."""

SHORT_MS = 0.01
"""An operator whose call takes less is short: starting it takes some microseconds."""

_WORTH = 0.03
"""A part of a step below this is not worth a sentence."""


# --- ceilings and floors


@dataclass(frozen=True)
class RoofCeilings:
    """What a device reaches: FLOP/s of the best product by format, and bytes per second of a copy, read and written.
    `source` states where that is from; `part` is the accelerator of the catalogue that a site has, "" if measured."""

    products: Mapping[str, float]
    bytes_per_s: float
    source: str
    part: str = ""

    def peak(self, dtype: str) -> float:
        """FLOP/s in a format; of one that was not measured that of fp32, else the best."""
        return self.products.get(dtype) or self.products.get("fp32") or max(self.products.values())

    def ridge(self, dtype: str) -> float:
        """FLOP a byte from which on products limit, not memory."""
        return self.peak(dtype) / self.bytes_per_s


def roof(intensity: float, peak: float, bytes_per_s: float) -> float:
    """FLOP/s that are possible at an intensity in FLOP a byte."""
    return min(peak, intensity * bytes_per_s)


def floor_ms(operator: Operator, ceilings: RoofCeilings) -> tuple[float, float]:
    """Milliseconds of a step that its FLOP take at the best product, and that its bytes take at the copy bandwidth."""
    computes = (operator.flop or 0.0) / ceilings.peak(operator.format)
    return 1e3 * computes, 1e3 * (operator.bytes or 0.0) / ceilings.bytes_per_s


# --- groups


@dataclass(frozen=True)
class GroupRoof:
    """A group of an average step under its roof.

    `ms`: its part of the step; `busy_ms`: the time of its operators, which is more where some ran side by side. `calls`
    are of operators that work. `flop`, `bytes`: of a step, None where no shapes show them; `unknown_ms`: the time of
    operators whose work they do not show. `peak`: FLOP/s of the formats that its FLOP are in. `slowest`: the operator
    that takes longest above its floor, with its milliseconds.
    """

    group: Group
    ms: float
    busy_ms: float
    calls: float
    flop: float | None
    bytes: float | None
    unknown_ms: float
    peak: float
    bytes_per_s_peak: float
    floor_ms: float | None
    bound: Bound
    slowest: str
    slowest_ms: float

    @property
    def title(self) -> str:
        return TITLES[self.group]

    @property
    def intensity(self) -> float | None:
        """FLOP a byte."""
        return self.flop / self.bytes if self.flop is not None and self.bytes else None

    @property
    def flops_per_s(self) -> float | None:
        """FLOP a second of its own time."""
        return self._rate(self.flop)

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes a second of its own time."""
        return self._rate(self.bytes)

    def _rate(self, amount: float | None) -> float | None:
        known_ms = self.busy_ms - self.unknown_ms
        return 1e3 * amount / known_ms if amount is not None and known_ms > 0 else None

    @property
    def roof(self) -> float | None:
        """FLOP/s that are possible at its intensity."""
        return None if self.intensity is None else roof(self.intensity, self.peak, self.bytes_per_s_peak)

    @property
    def reached(self) -> float | None:
        """The part of its roof, its floor over its time; above 1 where it is faster than what was measured."""
        known_ms = self.busy_ms - self.unknown_ms
        return self.floor_ms / known_ms if self.floor_ms and known_ms > 0 else None

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds of a step that would vanish at the roof, at most."""
        return None if self.floor_ms is None else min(self.ms, max(0.0, self.busy_ms - self.unknown_ms - self.floor_ms))


def judge_group(time: GroupTime, ceilings: RoofCeilings, update: CallWork = NO_WORK) -> GroupRoof:
    """A group under its roof. `update`: what the optimizer's update computes and moves in a step, for operators over
    lists of tensors, whose shapes are not recorded."""
    counted = [each for each in time.operators if each.bytes is not None and time.group != "communication"]
    floors = [(each, *floor_ms(each, ceilings)) for each in counted]
    flop, moved = sum(each.flop or 0.0 for each in counted), sum(each.bytes or 0.0 for each in counted)
    busy = sum(each.ms for each in time.operators)
    unknown = busy - sum(each.ms for each in counted)
    floor = sum(max(computes, moves) for _, computes, moves in floors)
    spent = sum((each.flop or 0.0) / ceilings.peak(each.format) for each in counted)
    update_ms = 0.0
    if time.group == "optimizer" and len(counted) < len(time.operators) and update.bytes:
        update_ms, unknown = 1e3 * update.bytes / ceilings.bytes_per_s, 0.0
        flop, moved, floor = flop + (update.flop or 0.0), moved + update.bytes, floor + update_ms
        spent += (update.flop or 0.0) / ceilings.peak("fp32")
    is_known = moved > 0 or flop > 0
    over = [(each.ms - max(computes, moves), each) for each, computes, moves in floors]
    if not over or update_ms:
        over = [(each.ms, each) for each in time.operators]
    _, slowest = max(over, key=lambda pair: pair[0], default=(0.0, None))
    return GroupRoof(
        group=time.group,
        ms=time.ms,
        busy_ms=busy,
        calls=sum(each.calls for each in time.operators),
        flop=flop if is_known else None,
        bytes=moved if is_known else None,
        unknown_ms=unknown,
        peak=flop / spent if spent > 0 else max(ceilings.products.values()),
        bytes_per_s_peak=ceilings.bytes_per_s,
        floor_ms=floor if is_known else None,
        bound=_find_bound(floors, update_ms) if is_known else "n/a",
        slowest=f"{slowest.name} {slowest.render_shapes()}".strip() if slowest is not None else "",
        slowest_ms=slowest.ms if slowest is not None else 0.0,
    )


def _find_bound(floors: Sequence[tuple[Operator, float, float]], update_ms: float) -> Bound:
    """What limits most of the time: that of short calls that are far above their floor, else the larger floor."""
    short = sum(
        each.ms
        for each, computes, moves in floors
        if each.calls and each.ms / each.calls < SHORT_MS and max(computes, moves) < 0.5 * each.ms
    )
    if update_ms <= 0 and short > 0.5 * sum(each.ms for each, _, _ in floors):
        return "latency"
    computing = sum(computes for _, computes, moves in floors if computes > moves)
    moving = sum(moves for _, computes, moves in floors if computes <= moves) + update_ms
    return "compute" if computing > moving else "memory"


# --- the step


@dataclass(frozen=True)
class Utilisation:
    """Model FLOP of a step on one rank, as a plan counts them: with all scores of attention, and with the half that a
    causal mask leaves; `tokens` of a step on one rank; the format's rated FLOP/s, None where no source states it."""

    flop: float
    flop_causal: float
    tokens: float
    rated: float | None = None


@dataclass(frozen=True)
class CapturedRun:
    """What the captured run is: settings that advice depends on."""

    name: str
    device: str
    format: str
    ranks: int = 1
    micro_batch: int = 1
    compiled: bool = False
    on_device: bool = False


@dataclass(frozen=True)
class StepRoofline:
    """A training step under the roofline of its device. `steps` were averaged, on rank `rank`; `idle_ms` by cause."""

    run: CapturedRun
    rank: int
    steps: int
    step_ms: float
    idle_ms: float
    idle_causes_ms: Mapping[str, float]
    groups: tuple[GroupRoof, ...]
    ceilings: RoofCeilings
    utilisation: Utilisation | None = None
    advice: tuple[Advice, ...] = ()
    slowdown: float | None = None
    """How much longer captured steps took than those before."""
    faults: tuple[str, ...] = ()
    """What is wrong with the capture, and what to do."""

    @property
    def floor_ms(self) -> float:
        """The sum of the floors of all kernels; communication has none."""
        return sum(each.floor_ms or 0.0 for each in self.groups)

    def mfu(self, peak: float, *, causal: bool) -> float | None:
        """Model FLOPs utilisation against `peak` FLOP/s, 0 to 1; None for a model without a plan."""
        if self.utilisation is None or self.step_ms <= 0:
            return None
        flop = self.utilisation.flop_causal if causal else self.utilisation.flop
        return flop / (self.step_ms / 1e3) / peak

    def share(self, ms: float) -> float:
        """Of the step."""
        return ms / self.step_ms if self.step_ms > 0 else 0.0


def judge_step(times: Sequence[GroupTime], ceilings: RoofCeilings, update: CallWork = NO_WORK) -> tuple[GroupRoof, ...]:
    """The groups under their roofs, those with most time first."""
    found = [judge_group(each, ceilings, update) for each in times]
    return tuple(sorted(found, key=lambda each: -each.ms))


# --- the verdict

_RULES: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention-math", "attention-backend", "slow-attention"),
    "products": (
        *("no-tensor-cores", "fp32-products", "alignment", "few-tiles", "slow-product", "slow-convolution"),
        "recompute",
    ),
    "output": ("vocabulary",),
    "norms": ("unfused", "slow-reduction"),
    "elementwise": ("unfused", "slow-elementwise", "slow-operator"),
    "casts": ("casts",),
    "optimizer": ("optimizer",),
    "communication": ("exposed-communication",),
    "copies": ("pageable-copy", "slow-elementwise"),
    "idle": ("data-loader", "host-sync", "launch-bound", "allocator"),
}
"""The rules of `shardway trace` whose advice is for a group."""


def find_remedy(step: StepRoofline, group: str) -> str:
    """What to change for a group: the advice that the trace gives, else the key that it depends on."""
    given = next((each.do for rule in _RULES.get(group, ()) for each in step.advice if each.rule == rule), "")
    if given:
        return given
    run = step.run
    fuse = "" if run.compiled else 'train.compile = "blocks" fuses these into fewer kernels that move less'
    narrow = 'precision.compute = "bf16" halves the bytes' if run.format in ("fp32", "tf32") and run.on_device else ""
    larger = f"a larger train.micro_batch (now {run.micro_batch}), dimensions that are multiples of 64"
    return {
        "attention": "longer sequences or a larger train.micro_batch fill the kernel; model.heads fewer and wider",
        "products": larger,
        "output": fuse or "model.vocab a multiple of 64; a larger train.micro_batch",
        "norms": fuse or narrow or larger,
        "elementwise": fuse or narrow or larger,
        "casts": fuse or 'precision.weights = "bf16" keeps no fp32 copy',
        "optimizer": 'optim.kernel = "fused"; optim.state_dtype = "bf16"; parallel.dp_shard shares the update',
        "copies": "contiguous tensors where the operator takes them: see the operator named here",
        "idle": f"a larger train.micro_batch (now {run.micro_batch}); "
        + ("train.cuda_graphs = true" if run.on_device else 'train.compile = "blocks"'),
    }.get(group, "")


def list_verdict(step: StepRoofline) -> list[str]:
    """Sentences: what share of the step is at what share of its roof, the largest group below its roof with what to
    change, the step against the sum of floors, MFU, and what the numbers leave out."""
    return [*_judge_largest(step), *_judge_whole(step), *_judge_limits(step)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _judge_largest(step: StepRoofline) -> Iterator[str]:
    for each in step.groups[:3]:
        share = step.share(each.ms)
        if share >= 0.1 and each.reached is not None:
            near = each.reached >= 0.5 or each.bound == "latency"
            side = f"{each.bound}-bound" if near else f"on the {each.bound} side of the ridge"
            yield f"{_percent(share)} of the step: {each.title}, at {_percent(each.reached)} of the roof ({side})"
    below = [each for each in step.groups if each.saved_ms is not None and step.share(each.saved_ms) >= _WORTH]
    if not below:
        yield f"no group is more than {_percent(_WORTH)} of the step above its floor"
        return
    worst = max(below, key=lambda each: each.saved_ms or 0.0)
    saved = worst.saved_ms or 0.0
    yield (
        f"most is lost in {worst.title}: at the roof at most {saved:.2f} ms ({_percent(step.share(saved))} of the "
        f"step) would be saved; first {worst.slowest}, {worst.slowest_ms:.2f} ms"
    )
    if remedy := find_remedy(step, worst.group):
        yield f"to do for {worst.title}: {remedy}"


def _judge_whole(step: StepRoofline) -> Iterator[str]:
    yield (
        f"the kernels' floors add up to {step.floor_ms:.2f} ms, {_percent(step.share(step.floor_ms))} of the step of "
        f"{step.step_ms:.2f} ms"
    )
    if step.share(step.idle_ms) >= _WORTH:
        remedy = find_remedy(step, "idle")
        words = "between operators (Python)" if not step.run.on_device else "idle"
        yield f"{_percent(step.share(step.idle_ms))} of the step is {words}; to do: {remedy}"
    found = step.utilisation
    if found is None:
        return
    peaks = [("measured", step.ceilings.peak(step.run.format))]
    peaks += [("rated", found.rated)] if found.rated else []
    for name, peak in peaks:
        full, causal = step.mfu(peak, causal=False), step.mfu(peak, causal=True)
        if full is not None and causal is not None:
            yield (
                f"MFU {full:.1%} (causal {causal:.1%}) of the {name} {render_si(peak)}FLOP/s in {step.run.format}; "
                f"{found.tokens / (step.step_ms / 1e3):,.0f} tokens/s a rank"
            )


def _judge_limits(step: StepRoofline) -> Iterator[str]:
    yield from step.faults
    above = [each for each in step.groups if each.reached is not None and each.reached > 1.0]
    if above:
        names = ", ".join(f"{each.title} {_percent(each.reached or 0.0)}" for each in above)
        yield (
            f"above the roof: {names}; the ceiling was measured lower than these run: data that stay in a cache, or a "
            "machine that was busy while it was measured"
        )
    unknown = sum(each.unknown_ms for each in step.groups if each.group not in ("communication", "other"))
    if step.share(unknown) >= _WORTH:
        yield f"{_percent(step.share(unknown))} of the step is in operators whose shapes were not recorded: n/a, not 0"
    if step.slowdown is not None and step.slowdown >= 1.1:
        yield (
            f"captured steps took {step.slowdown:.2f} times those before: the profiler, or another load of the machine,"
            " is in these numbers"
        )
    if step.run.ranks > 1 and not step.run.on_device:
        yield f"the ceilings are of one process alone, and {step.run.ranks} ranks shared this machine's memory"


def render_si(value: float | None, digits: int = 3) -> str:
    """A number with a decimal prefix, to be followed by its unit: 9.87e9 -> "9.87 G"; "n/a" for None."""
    if value is None:
        return "n/a"
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{_short(value / size, digits)} {prefix}"
    return f"{_short(value, digits)} " if value else "0 "


def _short(value: float, digits: int) -> str:
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - whole)}f}"


# --- as facts


def render_facts(step: StepRoofline) -> Mapping[str, Any]:
    """Everything as JSON: times in milliseconds of a step, rates a second, None for what is not known."""
    measured = step.ceilings.peak(step.run.format)
    found = step.utilisation
    return {
        "format": 1,
        "run": asdict(step.run),
        "rank": step.rank,
        "steps": step.steps,
        "step_ms": step.step_ms,
        "idle_ms": step.idle_ms,
        "idle_causes_ms": dict(step.idle_causes_ms),
        "ceilings": {
            "products_flop_per_s": dict(step.ceilings.products),
            "copy_bytes_per_s": step.ceilings.bytes_per_s,
            "ridge_flop_per_byte": {name: step.ceilings.ridge(name) for name in step.ceilings.products},
            "source": step.ceilings.source,
        },
        "groups": [_render_group(each, step) for each in step.groups],
        "floor_ms": step.floor_ms,
        "floor_share": step.share(step.floor_ms),
        "utilisation": found
        and {
            "model_flop": found.flop,
            "model_flop_causal": found.flop_causal,
            "tokens_per_s": found.tokens / (step.step_ms / 1e3),
            "mfu_measured": step.mfu(measured, causal=False),
            "mfu_measured_causal": step.mfu(measured, causal=True),
            "mfu_rated": step.mfu(found.rated, causal=False) if found.rated else None,
            "mfu_rated_causal": step.mfu(found.rated, causal=True) if found.rated else None,
        },
        "advice": [each.as_json() for each in step.advice],
        "verdict": list_verdict(step),
    }


def _render_group(group: GroupRoof, step: StepRoofline) -> Mapping[str, Any]:
    return {
        **asdict(group),
        "title": group.title,
        "share": step.share(group.ms),
        "intensity": group.intensity,
        "flop_per_s": group.flops_per_s,
        "bytes_per_s": group.bytes_per_s,
        "roof_flop_per_s": group.roof,
        "reached": group.reached,
        "saved_ms": group.saved_ms,
        "remedy": find_remedy(step, group.group) if group.saved_ms and step.share(group.saved_ms) >= _WORTH else None,
    }
