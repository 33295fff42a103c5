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
from typing import Any

from shardway.errors import Problem, UserError, render_problems
from shardway.layout import AXES, stages_of_schedule
from shardway.plan.case import Case, Degrees, Machine, Precision, Recompute, attention_of, divisors, find_engine
from shardway.plan.planner import NEAR, SETTINGS, Estimate, PlanRequest, SearchResult, estimate, search
from shardway.plan.shapes import Architecture, Shape, find_adapter, shape_of_section
from shardway.resolve.draft import Draft, Rule, Settled, batch_of, ceil_div, count_of, has_effect, takes_of
from shardway.resolve.rules.formats import find_replay_obstacle
from shardway.runfile.schema import PrecisionSection, RecomputeSection, RunFile

# --- the case of a run file

ASSUMED_VOCAB = 32768
"""Vocabulary to assume before the data is opened: that of Llama 2's tokenizer, padded to a power of two."""

BETWEEN: Recompute = "products"
"""What the planner calls `recompute.mode = "selective"`: results of products and of attention are kept."""


def shape_of_run(values: RunFile, hf: Shape | None = None, sample: tuple[int, ...] | None = None) -> Architecture:
    """The shape of the model that a run trains, its [model] resolved.

    `hf`: the shape from the config.json of model.hf (`plan.huggingface.read_shape`). `sample`: the image's
    (channels, height, width) if the data is open; otherwise only synthetic data has one. Raises UserError for a model
    that the planner cannot lay out.
    """
    model, shape = values.model, hf
    if not model.hf:
        if takes_of(model.kind) == "tokens":
            sample = (values.data.seq_len,)
        elif sample is None and values.data.kind != "synthetic":
            what = f"{values.data.kind} data say the size of their images only once they are open"
            raise _refusal("data.kind", what, '"synthetic", with data.shape')
        if model.vocab == "auto":
            model = model.model_copy(update={"vocab": ASSUMED_VOCAB})
        shape = shape_of_section(model, sample or tuple(values.data.shape))
    if isinstance(shape, Architecture):
        return shape.beside(find_adapter(values.model, any(run.layer.experts for run in shape.runs)))
    where, name = ("model.hf", model.hf) if model.hf else ("model.kind", model.kind)
    what = f'"{name}" has no layers that the planner knows how to split'
    raise _refusal(where, what, "a transformer that it knows")


def _refusal(where: str, what: str, allowed: str) -> UserError:
    return UserError(render_problems("the plan", [Problem(where, what, allowed=allowed)]))


def case_of(
    values: RunFile, shape: Architecture, micro_batch: int | None = None, machine: Machine | None = None
) -> Case:
    """The case of a resolved run; `micro_batch` overrides `train.micro_batch` if it is given. The machine decides on
    the kernel of attention.

    Shares that do not divide are rounded up: the others wait for the rank with most samples. Raises UserError if the
    planner cannot hold a degree.
    """
    degrees, micro = degrees_of(values, shape), micro_batch or int(values.train.micro_batch)
    accumulation, sequences = ceil_div(values.train.batch.largest, degrees.data * micro), sequences_of(values)
    return fixed_case_of(
        values,
        shape,
        machine,
        degrees=degrees,
        micro_batch=micro * sequences,
        global_batch=accumulation * micro * sequences * degrees.data,
        zero=values.deepspeed.stage if values.train.engine == "deepspeed" else 3 if degrees.shards > 1 else 0,
        schedule=values.parallel.pp_schedule if degrees.pp > 1 else "1f1b",
        stages_per_rank=int(values.parallel.pp_stages_per_rank) if degrees.pp > 1 else 1,
    )


def sequences_of(values: RunFile) -> int:
    """The sequences of data.seq_len that a sample counts as: a group of documents has as many tokens at most."""
    return max(1, ceil_div(values.data.group_tokens, values.data.seq_len))


def fixed_case_of(values: RunFile, shape: Architecture, machine: Machine | None, **laid_out: object) -> Case:
    """The case of a run, with degrees and layout from `laid_out`."""
    parallel, engine = values.parallel, find_engine("deepspeed" if values.train.engine == "deepspeed" else "shardway")
    if values.precision.weights == "bf16":
        engine = replace(engine, weight_bytes=2, gradient_bytes=2)
    reshards = parallel.pp == 1 if parallel.reshard_after_forward == "auto" else bool(parallel.reshard_after_forward)
    compiled = values.train.compiles
    kind = values.model.kind
    settings = {
        "model": shape,
        "seq_len": shape.positions if shape.patch_features else values.data.seq_len,
        "precision": precision_of(values.precision),
        "optimizer": values.optim.name,
        "engine": engine,
        "reshard": reshards,
        "sequence": parallel.tp_sequence,
        "recompute": recompute_of(values.recompute),
        "dropout": values.model.dropout > 0,
        "compiled": compiled,
        "fused_loss": compiled and (takes_of(kind) == "tokens" or bool(values.model.hf)),
        "fuses_whole": bool(parallel.tp_loss),
        "foreign": bool(values.model.hf) or kind not in ("transformer", "vit"),
        "replayed": not find_replay_obstacle(values),
        "offload": offloads(values),
        **({} if machine is None else {"attention": attention_of(find_engine("shardway"), machine.accelerator)}),
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


def precision_of(section: PrecisionSection) -> Precision:
    """The format of matrix products; fp32 if the device has still to decide."""
    if section.compute == "float8":
        return "mxfp8" if section.float8_recipe == "mxfp8" else "fp8"
    if section.compute == "fp32" or section.compute == "auto":
        return "tf32" if section.tf32 is True else "fp32"
    return section.compute


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


def list_assumptions(values: RunFile) -> tuple[str, ...]:
    """Assumptions of the planner about a run, in sentences."""
    parallel, recompute, assumed = values.parallel, values.recompute, []
    if values.model.vocab == "auto" and takes_of(values.model.kind) == "tokens" and not values.model.hf:
        assumed.append(f"a vocabulary of {ASSUMED_VOCAB:,}, since only the data say it")
    assumed += describe_ramp(values)
    if values.data.group_tokens:
        rows, length = sequences_of(values), values.data.seq_len
        assumed.append(f"groups of {rows} x {length} tokens, the most that data.group_tokens allows")
    batch, sizes = values.train.batch.largest, (values.train.micro_batch, parallel.dp_replicate, parallel.dp_shard)
    if "auto" not in sizes and batch % (whole := math.prod(map(int, sizes))):
        full = ceil_div(batch, whole) * whole
        assumed.append(f"a global batch of {full:,}: {batch:,} samples do not fill it, and a step takes as long")
    if recompute.mode in ("selective", "full") and recompute.every > 1:
        assumed.append("all blocks keep what they compute, since recompute.every leaves some out")
    if recompute.mode == "budget":
        assumed.append("results of products and of attention are what the compiler keeps within recompute.budget")
    if values.model.adapter != "none" and any("." in word for word in values.model.lora_targets):
        assumed.append("every block has an adapter beside the layers whose names end as model.lora_targets do")
    narrows = has_effect("optim.state_dtype", "optim.name", values.optim.name)
    if "bf16" in (values.precision.weights, values.optim.state_dtype) and narrows:
        assumed.append("moments are kept in fp32")
    if parallel.pp > 1 and parallel.pp_split:
        assumed.append("stages have equal numbers of layers, whatever parallel.pp_split says")
    return tuple(assumed)


def describe_ramp(values: RunFile) -> list[str]:
    """What is assumed of a run whose batch grows; nothing for any other."""
    ramp = values.train.batch
    return [] if ramp.is_constant else [f"steps of the largest size; the run has {ramp}"]


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


# --- the micro-batch


def fastest_micro_batch(values: RunFile, share: int, machine: Machine, hf: Shape | None) -> Settled | None:
    """The fastest of the sizes that cut a rank's share evenly and of powers of two; of equal ones that with least
    memory. None for a model or a format that the planner cannot price."""
    try:
        shape = shape_of_run(values, hf)
        cases = [case_of(values, shape, size, machine) for size in list_sizes(share)]
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
    """Sizes to try, smallest first; a device is busy long before 4096."""
    most = min(share, 4096)
    even = {size for size in divisors(share) if size <= most} if share <= 4096**2 else set()
    return sorted(even | {2**power for power in range(most.bit_length())})


# --- the layout

MODES: Mapping[str, str] = {"none": "none", BETWEEN: "selective", "full": "full"}
"""The planner's modes of recompute -> the words of a run file."""

_AXIS_NAMES = (*AXES, "ep")
KEYS: Mapping[str, tuple[str, ...]] = {
    **{axis: (f"parallel.{axis}",) for axis in _AXIS_NAMES},
    "micro_batch": ("train.micro_batch",),
    "recompute": ("recompute.mode",),
    "schedule": ("parallel.pp_schedule", "parallel.pp_stages_per_rank"),
    "zero": ("parallel.reshard_after_forward",),
}
"""Settings that a search may have to keep -> their keys of a run file."""


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

    def list_open(self, case: Case) -> dict[str, Any]:
        return {key: value for key, value in values_of(self, case).items() if self.draft.is_open(key)}


def settle_layout(wish: OpenLayout) -> None:
    """Derive the open keys from a search on all ranks of the run, or refuse."""
    draft, ranks = wish.draft, wish.draft.circumstances.ranks
    if not any(draft.is_open(key) for keys in KEYS.values() for key in keys):
        return
    try:
        wish.machine.peak(precision_of(draft.values.precision))
    except UserError:
        what = f'"{draft.get("precision.compute")}" has no rate on {wish.machine.accelerator.name}'
        draft.refuse("precision.compute", what, '"fp32", "bf16", "fp16"')
        return
    found = _search(wish, ranks)
    if found is not None and found.best is not None:
        told = f"the fastest of {found.looked_at:,} ways to run that were priced"
        if len(found.candidates) > 1:
            second = found.candidates[1]
            told += f"; next: {second.estimate.case.degrees.render()}: {second.reason}"
        if draft.get("model.vocab") == "auto":
            told += f" (for a vocabulary of {ASSUMED_VOCAB:,})"
        values = wish.list_open(found.best.case)
        ones = [f"parallel.{axis}" for axis in _AXIS_NAMES if values.get(f"parallel.{axis}") == 1]
        # If no axis is split, that of copies is the one that was chosen.
        unsplit = ones[len(ones) == len(_AXIS_NAMES) :]
        reasons = {
            "train.micro_batch": f"the fastest with this layout; {describe_memory(found.best)}",
            "recompute.mode": "as little as fits",
            "parallel.reshard_after_forward": "the fastest with this layout",
            "parallel.pp_stages_per_rank": "the fastest with this layout",
            **dict.fromkeys(unsplit, "not split in the fastest layout"),
        }
        for dotted, value in values.items():
            draft.derive(dotted, value, reasons.get(dotted, told))
        return
    nearest, layout = found.nearest if found else None, "parallel.layout"
    asked = count_of(ranks, "rank")
    if nearest is not None:
        remedy = "train a smaller model, shorter sequences, or on far more ranks"
        for what, attempt in _list_attempts(wish):
            if (other := attempt()) is not None and other.best is not None:
                remedy = what
                break
        draft.refuse(
            layout,
            f'"auto": no layout of {asked} fits. The nearest, {nearest.case.degrees.render()}, needs '
            f"{describe_need(nearest)}",
            "",
            remedy,
        )
        # The rules that follow must not report on a layout that was not asked for.
        for dotted, value in wish.list_open(nearest.case).items():
            draft.derive(dotted, value, "nothing fits")
    elif draft.on_ranks(ranks, {"train.micro_batch": 1}).passes(wish.rules):
        what = f'"auto": no layout of {asked} is legal with what is set'
        draft.refuse(layout, what, "", 'leave more degrees open, or set parallel.layout = "given" and the degrees')


def _search(wish: OpenLayout, ranks: int, loose: frozenset[str] = frozenset(), **changes: Any) -> SearchResult | None:
    """The result of a search; None if no layout is legal. If the ranks do not divide the batch, it is also tried
    rounded up: a step takes as long as its largest share."""
    batch, unit, legal = batch_of(wish.draft).largest, ranks, list[SearchResult]()
    if not wish.is_open("micro_batch", loose):
        unit *= wish.draft.get("train.micro_batch")
    for size in dict.fromkeys((batch, ceil_div(batch, unit) * unit)):
        try:
            sequences = size * sequences_of(wish.draft.values)
            request = _ask(wish, ranks, loose, {**changes, "global_batch": sequences})
        except UserError:  # the degrees that are set contradict each other or this batch
            continue
        found = search(request, most=2)
        if found.looked_at:
            legal.append(found)
    return min(legal, key=lambda found: found.best.time.seconds if found.best else math.inf, default=None)


def _ask(wish: OpenLayout, ranks: int, loose: frozenset[str], changes: Mapping[str, Any]) -> PlanRequest:
    """The question; its case carries what is fixed. Raises UserError if that is impossible."""
    draft, deepspeed = wish.draft, wish.on_deepspeed
    fixed = {name for name in KEYS if not wish.is_open(name, loose)}
    fixed |= {"offload", *(() if draft.get("parallel.tp_sequence") else ("sequence",))}
    if deepspeed:
        degrees = Degrees(dp_shard=ranks)
    else:
        sizes = {axis: draft.get(f"parallel.{axis}") for axis in _AXIS_NAMES if axis in fixed}
        if "ep" in fixed and "dp_shard" not in fixed:  # the ranks that experts are split over are not known yet
            sizes["dp_shard"] = sizes["ep"]
        degrees = Degrees(**sizes)
    # Of schedule and stages per rank the one that is set decides the other.
    schedule, stages = draft.get("parallel.pp_schedule"), draft.get("parallel.pp_stages_per_rank")
    if stages == "auto":
        stages = stages_of_schedule(schedule)[0]
    elif draft.is_open("parallel.pp_schedule") and stages > 1:
        schedule = "interleaved"
    laid_out: dict[str, Any] = {
        "degrees": degrees,
        "micro_batch": draft.get("train.micro_batch") * sequences_of(draft.values) if "micro_batch" in fixed else 1,
        "zero": draft.get("deepspeed.stage") if deepspeed else 3 if "zero" in fixed else 0,
        "schedule": schedule,
        "stages_per_rank": stages if "schedule" in fixed else 1,
        "recompute": recompute_of(draft.values.recompute) if "recompute" in fixed else "none",
    }
    fixed |= {*_AXIS_NAMES, "zero"} if deepspeed else set()
    case = fixed_case_of(draft.values, wish.shape, wish.machine, **{**laid_out, **changes})
    # With fewer ranks than accelerators, each has a larger share of the host.
    machine = replace(wish.machine, per_node=min(wish.machine.per_node, ranks))
    return PlanRequest(case, machine, ranks, frozenset(fixed), as_run=_adapt(wish, loose))


def _adapt(wish: OpenLayout, loose: frozenset[str]) -> Callable[[Case], Case | None]:
    """A function: a layout as the run's engine runs it; None if a rule refuses it or it is not what the user set."""
    draft, samples = wish.draft, batch_of(wish.draft).largest
    free = {key for name in loose for key in KEYS[name]}
    set_keys = (key for keys in KEYS.values() for key in keys if not draft.is_open(key))
    kept = {key: draft.get(key) for key in set_keys if key not in free}
    # A vocabulary that is not known yet may be one that the tensor axis cannot split.
    whole = draft.get("model.vocab") == "auto" and "parallel.tp" not in kept

    def as_run(case: Case) -> Case | None:
        if case.micro_batch % sequences_of(draft.values):
            return None
        tried = values_of(wish, case) | {"optim.name": case.optimizer}
        if case.offload and not draft.get("parallel.cpu_offload") and not wish.on_deepspeed:
            tried["parallel.cpu_offload"] = True
        if any(kept[key] != value for key, value in tried.items() if key in kept) or (whole and case.degrees.tp > 1):
            return None
        if not draft.on_ranks(case.degrees.world, tried).passes(wish.rules):
            return None
        # Of a batch that was rounded up for the search: the micro-batches of the rank with most samples.
        each = case.micro_batch * case.degrees.data
        batch = ceil_div(samples * sequences_of(draft.values), each) * each
        return replace(case, degrees=split_experts(case.degrees, case.model), global_batch=batch)

    return as_run


def values_of(wish: OpenLayout, case: Case) -> dict[str, Any]:
    """The keys of a run file for a case, only those that have an effect in its layout."""
    degrees = case.degrees
    values: dict[str, Any] = {f"parallel.{axis}": getattr(degrees, axis) for axis in _AXIS_NAMES}
    if wish.on_deepspeed:
        values |= {"parallel.dp_replicate": degrees.data, "parallel.dp_shard": 1}
    elif degrees.shards > 1 and wish.is_open("zero"):
        values["parallel.reshard_after_forward"] = case.reshard
    values |= {"train.micro_batch": ceil_div(case.micro_batch, sequences_of(wish.draft.values))}
    if wish.is_open("recompute"):
        values["recompute.mode"] = MODES[case.recompute]
    if degrees.pp > 1:
        values |= {"parallel.pp_schedule": case.schedule, "parallel.pp_stages_per_rank": case.stages_per_rank}
    return values


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
    shared = frozenset({"dp_replicate", "dp_shard"})
    for times in (2, 4, 8, 16, 32, 64):
        more = times * ranks
        yield f"start {more:,} ranks", lambda more=more: _search(wish, more, shared)  # type: ignore[misc]
