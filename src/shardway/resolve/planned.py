"""What the planner says of a run file: its case, the fastest layout that fits, the fastest micro-batch.

Invariants:
- Every key that memory or time depend on is in the case, or `list_assumptions` has a sentence on what replaces it.
- The original draft is never changed; rules judge a trial draft as they would a run file with these values. What the
  user set is kept, and no layout is priced that a rule would refuse. A micro-batch is at most a rank's share.
- No files are read and the machine is not looked at: both come with the circumstances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from shardway.errors import Problem, UserError, render_problems
from shardway.layout import AXES, stages_of_schedule
from shardway.plan.case import (
    Case,
    Degrees,
    EngineTraits,
    Machine,
    Precision,
    Recompute,
    Schedule,
    divisors,
    find_engine,
)
from shardway.plan.planner import NEAR, SETTINGS, Estimate, PlanRequest, SearchResult, estimate, search
from shardway.plan.shapes import Architecture, Shape, shape_of_section
from shardway.resolve.draft import Draft, Rule, Settled, ceil_div, has_effect, put_value, takes_of
from shardway.runfile.schema import ParallelSection, PrecisionSection, RecomputeSection, RunFile, all_keys

# --- the case of a run file

ASSUMED_VOCAB = 32768
"""Vocabulary to assume before the data is opened: that of Llama 2's tokenizer, padded to a power of two."""

BETWEEN: Recompute = "products"
"""What the planner calls `recompute.mode = "selective"`: results of products and of attention are kept."""

_PRECISIONS: Mapping[str, Precision] = MappingProxyType({"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"})


def shape_of_run(values: RunFile, hf: Shape | None = None, sample: tuple[int, ...] | None = None) -> Architecture:
    """The shape of the model that a run trains, its [model] resolved.

    `hf`: the shape from the config.json of model.hf (`plan.huggingface.read_shape`). `sample`: the image's
    (channels, height, width) if the data is open; otherwise only synthetic data has one. Raises UserError for a model
    that the planner cannot lay out.
    """
    model = values.model
    if model.hf:
        return _laid_out(hf, "model.hf", model.hf)
    if takes_of(model.kind) == "tokens":
        sample = (values.data.seq_len,)
    elif sample is None:
        if values.data.kind != "synthetic":
            what = f"{values.data.kind} data say the size of their images only once they are open"
            raise _refusal("data.kind", what, '"synthetic", with data.shape')
        sample = tuple(values.data.shape)
    if model.vocab == "auto":
        model = model.model_copy(update={"vocab": ASSUMED_VOCAB})
    return _laid_out(shape_of_section(model, sample), "model.kind", model.kind)


def _laid_out(shape: Shape | None, where: str, name: str) -> Architecture:
    if isinstance(shape, Architecture):
        return shape
    raise _refusal(where, f'"{name}" has no layers that the planner knows how to split', "a transformer that it knows")


def _refusal(where: str, what: str, allowed: str) -> UserError:
    return UserError(render_problems("the plan", [Problem(where, what, allowed=allowed)]))


def case_of(values: RunFile, shape: Architecture, micro_batch: int | None = None) -> Case:
    """The case of a resolved run; `micro_batch` overrides `train.micro_batch` if it is given.

    Shares that do not divide are rounded up: the others wait for the rank with most samples. Raises UserError if the
    planner cannot hold a degree.
    """
    degrees, micro = degrees_of(values, shape), micro_batch or int(values.train.micro_batch)
    accumulation = -(-values.train.global_batch // (degrees.data * micro))
    return fixed_case_of(
        values,
        shape,
        degrees=degrees,
        micro_batch=micro,
        global_batch=accumulation * micro * degrees.data,
        zero=zero_of(values, degrees),
        schedule=values.parallel.pp_schedule if degrees.pp > 1 else "1f1b",
        stages_per_rank=int(values.parallel.pp_stages_per_rank) if degrees.pp > 1 else 1,
    )


def fixed_case_of(values: RunFile, shape: Architecture, **laid_out: object) -> Case:
    """The case of a run, with degrees and layout from `laid_out`."""
    degrees, parallel = laid_out["degrees"], values.parallel
    reshards = parallel.pp == 1 if parallel.reshard_after_forward == "auto" else bool(parallel.reshard_after_forward)
    settings = {
        "degrees": degrees,
        "model": shape,
        "seq_len": shape.positions if shape.patch_features else values.data.seq_len,
        "precision": precision_of(values.precision),
        "optimizer": values.optim.name,
        "engine": engine_of(values),
        "reshard": reshards,
        "sequence": parallel.tp_sequence,
        "recompute": recompute_of(values.recompute),
        "dropout": values.model.dropout > 0,
        "compiled": values.train.compile in ("blocks", "model"),
        "offload": offloads(values),
    }
    return Case(**{**settings, **laid_out})  # type: ignore[arg-type]


def degrees_of(values: RunFile, shape: Architecture) -> Degrees:
    """The resolved degrees as the planner counts them: DeepSpeed shards over the ranks of dp_replicate, and the tensor
    axis also splits experts."""
    parallel = values.parallel
    sizes = {axis: int(getattr(parallel, axis)) for axis in AXES}
    if values.train.engine == "deepspeed":
        sizes |= {"dp_replicate": 1, "dp_shard": sizes["dp_replicate"] * sizes["dp_shard"]}
    return split_experts(Degrees(**sizes, ep=parallel.ep), shape)


def split_experts(degrees: Degrees, shape: Architecture) -> Degrees:
    """The same degrees with each expert split over the tensor axis, if there are experts."""
    mixed = any(run.layer.experts for run in shape.runs)
    return replace(degrees, etp=degrees.tp if mixed else 1)


def zero_of(values: RunFile, degrees: Degrees) -> int:
    """What the ranks of dp_shard x cp share: everything, or deepspeed.stage."""
    if values.train.engine == "deepspeed":
        return values.deepspeed.stage
    return 3 if degrees.shards > 1 else 0


def engine_of(values: RunFile) -> EngineTraits:
    """The engine that trains, with the format of its weights."""
    engine = find_engine("deepspeed" if values.train.engine == "deepspeed" else "shardway")
    narrow = values.precision.weights == "bf16"
    return replace(engine, weight_bytes=2, gradient_bytes=2) if narrow else engine


def precision_of(section: PrecisionSection) -> Precision:
    """The format of matrix products; fp32 if the device has still to decide."""
    if section.compute == "float8":
        return "mxfp8" if section.float8_recipe == "mxfp8" else "fp8"
    compute = _PRECISIONS.get(section.compute, "fp32")
    return "tf32" if compute == "fp32" and section.tf32 is True else compute


def recompute_of(section: RecomputeSection) -> Recompute:
    """The planner's mode that keeps no less: if some blocks are exempt from recompute, all count as kept."""
    if section.mode == "none" or (section.every > 1 and section.mode != "budget"):
        return "none"
    if section.mode == "full" or (section.mode == "selective" and not section.save_ops):
        return "full"
    return BETWEEN


def offloads(values: RunFile) -> bool:
    """Whether optimizer states lie in the host's memory or on its disk."""
    if values.train.engine == "deepspeed":
        return values.deepspeed.offload_optimizer != "none"
    return values.parallel.cpu_offload


def machine_for(machine: Machine, ranks: int) -> Machine:
    """The nodes as this many ranks use them: with fewer ranks than accelerators, each has a larger share of the
    host."""
    return replace(machine, per_node=min(machine.per_node, ranks))


def list_assumptions(values: RunFile) -> tuple[str, ...]:
    """Assumptions of the planner about a run, in sentences."""
    return tuple(_find_assumptions(values, values.parallel))


def _describe_batch(values: RunFile) -> Iterator[str]:
    """The assumption for shares that do not divide."""
    batch, sizes = values.train.global_batch, (values.train.micro_batch, values.parallel.dp_replicate)
    if "auto" in (*sizes, values.parallel.dp_shard):
        return
    whole = math.prod(int(size) for size in (*sizes, values.parallel.dp_shard))
    if batch % whole:
        full = -(-batch // whole) * whole
        yield f"a global batch of {full:,}: {batch:,} samples do not fill it, and a step takes as long"


def _find_assumptions(values: RunFile, parallel: ParallelSection) -> Iterator[str]:
    recompute = values.recompute
    if values.model.vocab == "auto" and takes_of(values.model.kind) == "tokens" and not values.model.hf:
        yield f"a vocabulary of {ASSUMED_VOCAB:,}, since only the data say it"
    yield from _describe_batch(values)
    if recompute.mode in ("selective", "full") and recompute.every > 1:
        yield "all blocks keep what they compute, since recompute.every leaves some out"
    if recompute.mode == "budget":
        yield "results of products and of attention are what the compiler keeps within recompute.budget"
    narrows = has_effect("optim.state_dtype", "optim.name", values.optim.name)
    if "bf16" in (values.precision.weights, values.optim.state_dtype) and narrows:
        yield "moments are kept in fp32"
    if parallel.pp > 1 and parallel.pp_split:
        yield "stages have equal numbers of layers, whatever parallel.pp_split says"


# --- descriptions


def format_gib(count_bytes: float) -> str:
    """Bytes for a person: "71.2 GiB"."""
    return f"{count_bytes / 2**30:,.1f} GiB"


def describe_need(missed: Estimate) -> str:
    """The missing memory: "81.2 GiB of an accelerator, 6.3 GiB more than the 74.9 GiB that a plan may use"."""
    peak, machine = missed.peak, missed.machine
    need, usable, where = peak.device, missed.usable_bytes, "an accelerator"
    if need <= usable and machine.host_bytes is not None:
        need = machine.bytes_of_node(peak.host, missed.case.degrees.world)
        usable = machine.host_bytes * peak.overheads.usable
        where = "a node's own memory"
    more = format_gib(need - usable)
    return f"{format_gib(need)} of {where}, {more} more than the {format_gib(usable)} that a plan may use"


def describe_memory(estimate: Estimate) -> str:
    """The memory of the fullest device: "31.2 of 71.2 GiB by the plan"."""
    return f"{estimate.peak.device / 2**30:,.1f} of {format_gib(estimate.usable_bytes)} by the plan"


# --- trial drafts


def list_values(draft: Draft) -> dict[str, Any]:
    """Every key of a draft with its value."""
    return {dotted: draft.get(dotted) for dotted in all_keys()}


class TrialDraft(Draft):
    """A draft in which `tried` overrides the values `own`; these are passed in, so that a search with thousands of
    trials lists them once."""

    def __init__(self, draft: Draft, ranks: int, tried: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.circumstances = replace(draft.circumstances, ranks=ranks)
        self.problems = []
        self._draft, self._tried, self._table = draft, set(tried), {**own, **tried}

    @property
    def values(self) -> RunFile:
        """All values as they stand now."""
        values = self._draft.values
        for dotted in sorted(self._tried):
            values = put_value(values, dotted, self._table[dotted])
        return values

    def get(self, dotted: str) -> Any:
        """The value that is tried, or that of the draft."""
        return self._table[dotted]

    def is_set(self, dotted: str) -> bool:
        """Whether a value is tried, or set in the draft."""
        return dotted in self._tried or self._draft.is_set(dotted)

    def derive(self, dotted: str, value: Any, reason: str) -> None:
        """Try the value that a rule settles."""
        self._tried.add(dotted)
        self._table[dotted] = value

    def origin(self, dotted: str) -> str:
        """The origin in the draft."""
        return self._draft.origin(dotted)

    def on_ranks(self, ranks: int) -> TrialDraft:
        """A copy of this draft for another number of ranks."""
        return TrialDraft(self._draft, ranks, {name: self._table[name] for name in self._tried}, self._table)

    def passes(self, rules: Sequence[Callable[[Draft], None]]) -> bool:
        """Whether no rule refuses anything; stops at the first that does."""
        for rule in rules:
            rule(self)
            if self.problems:
                return False
        return True


# --- the micro-batch

LARGEST = 4096
"""The largest size that is tried: a device is busy long before."""


def fastest_micro_batch(values: RunFile, share: int, machine: Machine, hf: Shape | None) -> Settled | None:
    """The fastest of the sizes that cut a rank's share evenly and of powers of two; of equal ones that with least
    memory. None for a model or a format that the planner cannot price."""
    try:
        shape = shape_of_run(values, hf)
        cases = [case_of(values, shape, size) for size in list_sizes(share)]
        priced = [estimate(case, machine) for case in cases]
    except UserError:
        return None
    fitting = [each for each in priced if each.fits]
    if not fitting:
        return Settled(1, f"even one sample does not fit by the plan: it needs {describe_need(priced[0])}")
    quickest = min(each.time.seconds for each in fitting)
    near = [each for each in fitting if each.time.seconds <= quickest * (1 + NEAR)]
    best = min(near, key=lambda each: each.peak.device)
    told = f"the fastest of {len(fitting)} sizes that fit {machine.accelerator.name}; {describe_memory(best)}"
    return Settled(best.case.micro_batch, told)


def list_sizes(share: int) -> list[int]:
    """Sizes to try, smallest first."""
    most = min(share, LARGEST)
    even = {size for size in divisors(share) if size <= most} if share <= LARGEST**2 else set()
    return sorted(even | {2**power for power in range(most.bit_length())})


# --- the layout

MODES: Mapping[str, str] = MappingProxyType({"none": "none", BETWEEN: "selective", "full": "full"})
"""The planner's modes of recompute -> the words of a run file."""

_AXIS_NAMES = (*AXES, "ep")
KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{axis: (f"parallel.{axis}",) for axis in _AXIS_NAMES},
        "micro_batch": ("train.micro_batch",),
        "recompute": ("recompute.mode",),
        "schedule": ("parallel.pp_schedule", "parallel.pp_stages_per_rank"),
        "zero": ("parallel.reshard_after_forward",),
    }
)
"""Settings that a search may have to keep -> their keys of a run file."""

MOST_TIMES = 64
"""The largest multiple of the ranks that is proposed."""


@dataclass(frozen=True)
class Chosen:
    """Values of the open keys, and the reasons."""

    values: Mapping[str, Any]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Missed:
    """No layout fits: the one with least memory, if any is legal, its keys, and the smallest known change that
    helps."""

    nearest: Estimate | None
    values: Mapping[str, Any]
    help: str


@dataclass(frozen=True, kw_only=True)
class OpenLayout:
    """A run whose layout is open: its draft, the rules that the layout has to pass, the model, the machine."""

    draft: Draft
    rules: Sequence[Rule]
    shape: Architecture
    machine: Machine

    @property
    def on_deepspeed(self) -> bool:
        """Whether ZeRO shards, over the ranks of dp_replicate alone."""
        return bool(self.draft.get("train.engine") == "deepspeed")

    def is_open(self, name: str, loose: frozenset[str] = frozenset()) -> bool:
        """Whether a search may choose the setting called `name` in `KEYS`."""
        return name in loose or all(self.draft.is_open(key) for key in KEYS[name])


def choose_layout(wish: OpenLayout) -> Chosen | Missed:
    """Search on all ranks of the run."""
    ranks = wish.draft.circumstances.ranks
    found = _search(wish, ranks)
    if found is not None and found.best is not None:
        return Chosen(*_describe_choice(wish, found, found.best))
    nearest = found.nearest if found else None
    if nearest is None:
        return Missed(None, {}, "")
    return Missed(nearest, _list_open(wish, nearest.case), _find_help(wish))


def _search(wish: OpenLayout, ranks: int, loose: frozenset[str] = frozenset(), **changes: Any) -> SearchResult | None:
    """The result of a search; None if no layout is legal.

    If the ranks do not divide the batch, it is also tried rounded up: a step takes as long as its largest share.
    """
    batch, unit = wish.draft.get("train.global_batch"), ranks
    if not wish.is_open("micro_batch", loose):
        unit *= wish.draft.get("train.micro_batch")
    sizes = dict.fromkeys((batch, ceil_div(batch, unit) * unit))
    tried = [_find(wish, ranks, loose, {**changes, "global_batch": size}) for size in sizes]
    legal = [found for found in tried if found is not None and found.looked_at]
    return min(legal, key=_seconds_of, default=None)


def _find(wish: OpenLayout, ranks: int, loose: frozenset[str], changes: Mapping[str, Any]) -> SearchResult | None:
    try:
        question = _ask(wish, ranks, loose, changes)
    except UserError:  # the degrees that are set contradict each other or this batch
        return None
    return search(question, most=2)


def _seconds_of(found: SearchResult) -> float:
    return found.best.time.seconds if found.best else math.inf


def _ask(wish: OpenLayout, ranks: int, loose: frozenset[str], changes: Mapping[str, Any]) -> PlanRequest:
    """The question; its case carries what is fixed. Raises UserError if that is impossible."""
    draft, deepspeed = wish.draft, wish.on_deepspeed
    fixed = {name for name in KEYS if not wish.is_open(name, loose)}
    fixed |= {"offload", *(() if draft.get("parallel.tp_sequence") else ("sequence",))}
    schedule, stages = _schedule_of(draft)
    laid_out: dict[str, Any] = {
        "degrees": Degrees(dp_shard=ranks) if deepspeed else _carry_degrees(draft, fixed),
        "micro_batch": draft.get("train.micro_batch") if "micro_batch" in fixed else 1,
        "zero": draft.get("deepspeed.stage") if deepspeed else 3 if "zero" in fixed else 0,
        "schedule": schedule,
        "stages_per_rank": stages if "schedule" in fixed else 1,
        "recompute": recompute_of(draft.values.recompute) if "recompute" in fixed else "none",
    }
    fixed |= {*_AXIS_NAMES, "zero"} if deepspeed else set()
    case = fixed_case_of(draft.values, wish.shape, **{**laid_out, **changes})
    return PlanRequest(
        case, machine_for(wish.machine, ranks), ranks, frozenset(fixed), as_run=_adapt(wish, loose, case)
    )


def _carry_degrees(draft: Draft, fixed: set[str]) -> Degrees:
    """The degrees that are set; the ranks that experts are split over are not known yet."""
    sizes = {axis: draft.get(f"parallel.{axis}") for axis in _AXIS_NAMES if axis in fixed}
    if "ep" in fixed and "dp_shard" not in fixed:
        sizes["dp_shard"] = sizes["ep"]
    return Degrees(**sizes)


def _schedule_of(draft: Draft) -> tuple[Schedule, int]:
    """The schedule and the stages per rank, derived from the one of the two that is set."""
    schedule, stages = draft.get("parallel.pp_schedule"), draft.get("parallel.pp_stages_per_rank")
    if stages == "auto":
        return schedule, stages_of_schedule(schedule)[0]
    if draft.is_open("parallel.pp_schedule") and stages > 1:
        return "interleaved", stages
    return schedule, stages


def _adapt(wish: OpenLayout, loose: frozenset[str], asked: Case) -> Callable[[Case], Case | None]:
    """A function: a layout as the run's engine runs it; None if a rule refuses it or it is not what the user set."""
    draft, own = wish.draft, list_values(wish.draft)
    kept = {key: draft.get(key) for name, keys in KEYS.items() for key in keys if not draft.is_open(key)}
    kept = {key: value for key, value in kept.items() if not any(key in KEYS[name] for name in loose)}
    # A vocabulary that is not known yet may be one that the tensor axis cannot split.
    whole = draft.get("model.vocab") == "auto" and "parallel.tp" not in kept

    def as_run(case: Case) -> Case | None:
        tried = {**values_of(wish, case), **_changed(asked, draft, case)}
        if any(kept[key] != value for key, value in tried.items() if key in kept) or (whole and case.degrees.tp > 1):
            return None
        if not TrialDraft(draft, case.degrees.world, tried, own).passes(wish.rules):
            return None
        return replace(case, degrees=split_experts(case.degrees, case.model))

    return as_run


def _changed(asked: Case, draft: Draft, case: Case) -> dict[str, Any]:
    """Keys beside the layout that a question changes in order to help."""
    offload = {"parallel.cpu_offload": True} if case.offload and not draft.get("parallel.cpu_offload") else {}
    return {"optim.name": case.optimizer, **(offload if draft.get("train.engine") == "torch" else {})}


def values_of(wish: OpenLayout, case: Case) -> dict[str, Any]:
    """The keys of a run file for a case, only those that have an effect in its layout."""
    degrees = case.degrees
    values: dict[str, Any] = {f"parallel.{axis}": getattr(degrees, axis) for axis in _AXIS_NAMES}
    if wish.on_deepspeed:
        values |= {"parallel.dp_replicate": degrees.data, "parallel.dp_shard": 1}
    elif degrees.shards > 1 and wish.is_open("zero"):
        values["parallel.reshard_after_forward"] = case.reshard
    values |= {"train.micro_batch": case.micro_batch}
    if wish.is_open("recompute"):
        values["recompute.mode"] = MODES[case.recompute]
    if degrees.pp > 1:
        values |= {"parallel.pp_schedule": case.schedule, "parallel.pp_stages_per_rank": case.stages_per_rank}
    return values


def _describe_choice(wish: OpenLayout, found: SearchResult, best: Estimate) -> tuple[dict[str, Any], dict[str, str]]:
    """The open keys with their values, and with the reasons."""
    values = _list_open(wish, best.case)
    told = f"the fastest of {found.looked_at:,} ways to run that were priced"
    if len(found.candidates) > 1:
        other = found.candidates[1]
        told += f"; next: {other.estimate.case.degrees.render()}: {other.reason}"
    if wish.draft.get("model.vocab") == "auto":
        told += f" (for a vocabulary of {ASSUMED_VOCAB:,})"
    reasons = {
        "train.micro_batch": f"the fastest with this layout; {describe_memory(best)}",
        "recompute.mode": "as little as fits",
        "parallel.reshard_after_forward": "the fastest with this layout",
        "parallel.pp_stages_per_rank": "the fastest with this layout",
    }
    reasons |= dict.fromkeys(_list_unsplit(values), "not split in the fastest layout")
    return values, {key: reasons.get(key, told) for key in values}


def _list_open(wish: OpenLayout, case: Case) -> dict[str, Any]:
    return {key: value for key, value in values_of(wish, case).items() if wish.draft.is_open(key)}


def _list_unsplit(values: Mapping[str, Any]) -> list[str]:
    """Keys of axes of one rank, except that of copies if all axes are such."""
    ones = [f"parallel.{axis}" for axis in _AXIS_NAMES if values.get(f"parallel.{axis}") == 1]
    return ones[len(ones) == len(_AXIS_NAMES) :]


def _find_help(wish: OpenLayout) -> str:
    """The first of the changes below with which something fits; "" if none does."""
    for what, attempt in _list_attempts(wish):
        found = attempt()
        if found is not None and found.best is not None:
            return what
    return ""


def _list_attempts(wish: OpenLayout) -> Iterator[tuple[str, Callable[[], SearchResult | None]]]:
    """Changes to try, the smallest first."""
    ranks = wish.draft.circumstances.ranks
    for name in SETTINGS:
        if not wish.is_open(name):
            keys = " and ".join(key for key in KEYS[name] if not wish.draft.is_open(key))
            yield f"leave {keys} open", lambda name=name: _search(wish, ranks, frozenset({name}))  # type: ignore[misc]
    degrees = frozenset(axis for axis in _AXIS_NAMES if not wish.is_open(axis))
    if degrees:
        yield f"leave the degrees open ({', '.join(sorted(degrees))})", lambda: _search(wish, ranks, degrees)
    if not wish.on_deepspeed and not wish.draft.get("parallel.cpu_offload"):
        yield "set parallel.cpu_offload = true", lambda: _search(wish, ranks, offload=True)
    if not wish.on_deepspeed and wish.draft.get("optim.name") == "adamw":
        yield 'set optim.name = "adamw8bit"', lambda: _search(wish, ranks, optimizer="adamw8bit")
    shared, times = frozenset({"dp_replicate", "dp_shard"}), 2
    while times <= MOST_TIMES:
        more = times * ranks
        yield f"start {more:,} ranks", lambda more=more: _search(wish, more, shared)  # type: ignore[misc]
        times *= 2
