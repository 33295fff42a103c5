"""Why a plan says what it says: where the bytes, the milliseconds and the layout come from.

Invariant: the items are those of the table, each with what it is; the factors are those that were used. This module
must not compute a figure of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType

from shardway.errors import Problem, UserError, render_problems
from shardway.plan.answer.answer import PlanAnswer
from shardway.plan.case import Case
from shardway.plan.estimate import Estimate
from shardway.plan.memory.breakdown import ITEMS as MEMORY_ITEMS
from shardway.plan.memory.breakdown import StageMemory
from shardway.plan.render.text import line
from shardway.plan.render.words import describe_layout, duration, gib, percent
from shardway.plan.time.ceilings import ceilings_of
from shardway.plan.time.passes import groups_of
from shardway.plan.time.step import ITEMS as TIME_ITEMS

_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        **MEMORY_ITEMS,
        "fragmentation": "what the caching allocator holds beyond the tensors: gaps that come and go within a step",
        "context": "the driver, libraries and communicators: what nvidia-smi shows and PyTorch does not",
    }
)
_NAME = 16
_MOST_STAGES = 16


def explain(topic: str, answer: PlanAnswer) -> str:
    """A topic of the plan in full. Raises UserError with the topics that there are."""
    if topic not in TOPICS:
        problem = Problem("--explain", f'"{topic}" is not known', allowed=", ".join(TOPICS))
        raise UserError(render_problems("the plan", [problem]))
    return "\n".join(TOPICS[topic](answer)) + "\n"


def _memory(answer: PlanAnswer) -> Iterator[str]:
    shown = answer.shown
    peak, case = shown.peak, shown.case
    yield f"memory of pipeline rank {peak.rank}, the fullest of {len(shown.memory)}: {describe_layout(case)}"
    yield ""
    for name, size in peak.device_items.items():
        yield f"  {name:<{_NAME}}{gib(size):>11}   {_MEANINGS[name]}"
    yield f"  {'together':<{_NAME}}{gib(peak.device):>11}   of {gib(shown.usable_bytes)} that a plan may use"
    yield ""
    yield from _states(case)
    yield f"  micro-batches whose activations are kept at once: {peak.in_flight:g} ({case.schedule})"
    yield from _moments(shown)
    yield f"  four of five measured peaks lie between {gib(shown.memory_low)} and {gib(shown.memory_high)}"
    if len(shown.memory) > 1:
        yield ""
        yield from _stages(shown)


def _states(case: Case) -> Iterator[str]:
    engine, copied = case.engine, case.splits_copy and case.zero < 3
    copy = f", a copy of {engine.master_bytes} bytes that the optimizer updates" if copied else ""
    weights = case.value_bytes if copied else case.kept_weight_bytes
    yield (
        f"  a parameter as {engine.name} keeps it: weight {weights} bytes, gradient {case.gradient_bytes}, "
        f"{case.optimizer}{copy}"
    )
    shared = {0: "nothing", 1: "the optimizer", 2: "optimizer and gradients", 3: "weights, gradients and optimizer"}
    yield f"  shared by {case.degrees.shards} ranks: {shared[case.zero]} (ZeRO {case.zero})"


def _moments(shown: Estimate) -> Iterator[str]:
    moments = shown.moments
    staged = gib(shown.machine.bytes_of_node(moments.copied, shown.case.degrees.world))
    yield f"  at a checkpoint: {gib(moments.kept)} of tensors stay; up to {staged} of a node's memory for their copy"
    yield f"  at resume: {gib(moments.resuming)}, before a step has taken the rest"


def _stages(shown: Estimate) -> Iterator[str]:
    yield f"  {'pipeline rank':<{_NAME}}{'device':>11}{'states':>11}{'activations':>13}{'kept':>7}"
    for stage in shown.memory[:_MOST_STAGES]:
        yield _stage(stage)
    if len(shown.memory) > _MOST_STAGES:
        yield f"  and {len(shown.memory) - _MOST_STAGES} more"


def _stage(stage: StageMemory) -> str:
    sizes = f"{gib(stage.device):>11}{gib(stage.states):>11}{gib(stage.activations):>13}"
    return f"  {stage.rank:<{_NAME}}{sizes}{stage.in_flight:>7g}"


def _time(answer: PlanAnswer) -> Iterator[str]:
    shown = answer.shown
    total = shown.time.seconds
    yield f"one step of {duration(total)}, {shown.case.micro_batches} passes: {describe_layout(shown.case)}"
    yield ""
    for name, seconds in shown.time.items.items():
        yield f"  {name:<20}{duration(seconds):>10}{percent(seconds / total):>8}   {TIME_ITEMS[name]}"
    yield ""
    yield f"  four of five measured steps lie between {duration(shown.time.low)} and {duration(shown.time.high)}"
    machine = shown.machine
    memory = (machine.accelerator.memory_bandwidth_bytes_per_s or 0) / 1e12
    yield (
        f"  on paper: {shown.peak_flops / 1e12:,.0f} TFLOP/s {shown.case.precision}, memory {memory:.3g} TB/s, "
        f"link {machine.link / 1e9:,.0f} GB/s, network {machine.network / 1e9:,.4g} GB/s a GPU"
    )
    yield ""
    yield "  factors of what is reached (src/shardway/plan/time/ceilings.py says what each is)"
    for name, value in asdict(ceilings_of(machine)).items():
        origin = "measured on this site" if name in machine.measured else "fitted on published runs"
        yield f"  {name:<20}{value:>10.4g}   {origin}"


def _layout(answer: PlanAnswer) -> Iterator[str]:
    case, machine = answer.shown.case, answer.shown.machine
    yield f"{describe_layout(case)}"
    link = f"{machine.domain} of them share the fast link of {machine.link / 1e9:,.0f} GB/s"
    yield f"{case.degrees.world:,} ranks; {link}"
    yield ""
    groups = groups_of(case)
    for name, group, does in (
        ("tp", groups.tp, "splits matrices; activations travel several times in every layer"),
        ("cp", groups.cp, "splits the sequence; keys and values travel in every layer"),
        ("dp_shard", groups.shards, "shares states; weights and gradients travel"),
        ("ep", groups.experts, "splits experts; tokens travel in every layer that has them"),
        ("dp_replicate", groups.copies, "copies the model; gradients travel once a step"),
    ):
        if group.ranks > 1:
            where = "between nodes" if machine.spans_nodes(group.ranks, group.stride) else "inside the fast link"
            yield line(f"{name} {group.ranks}", f"{where}, {_step_of(group.stride)}: {does}")
    if case.degrees.pp > 1:
        yield line(f"pp {case.degrees.pp}", f"{_step_of(groups.stage_stride)}: splits the layers; {case.schedule}")
    yield ""
    yield from _candidates(answer)


def _step_of(stride: int) -> str:
    return "neighbours" if stride == 1 else f"ranks {stride} apart"


def _candidates(answer: PlanAnswer) -> Iterator[str]:
    yield f"{answer.found.looked_at:,} ways were looked at; the best of each set of degrees that fits:"
    for number, each in enumerate(answer.found.candidates, 1):
        shown = each.estimate
        lost = f"\n      loses by {each.reason}" if each.reason else ""
        costs = f"{duration(shown.time.seconds)}, {gib(shown.peak.device)}"
        yield f"  {number:>2}. {costs}: {describe_layout(shown.case)}{lost}"
    if not answer.found.candidates:
        yield "  none"
    if answer.question.fixed:
        yield f"kept as you set them: {', '.join(sorted(answer.question.fixed))}"


TOPICS: Mapping[str, Callable[[PlanAnswer], Iterator[str]]] = MappingProxyType(
    {"memory": _memory, "time": _time, "layout": _layout}
)
"""What can be explained."""
