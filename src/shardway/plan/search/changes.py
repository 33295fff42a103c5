"""What to do differently so that a run fits which does not: each change alone, the smallest first.

Invariant: a change is listed only where the search found a layout that fits with it, and that layout is shown with it.
Two things are changed at once only where no single one helps: everything that is set is left open then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardway.plan.estimate import Estimate
from shardway.plan.search.best import search
from shardway.plan.search.space import AXES, SETTINGS, Question

MOST_NODES = 4096
SHORTEST = 1024
"""Tokens of a sequence, below which a shorter one is no help to anybody."""


@dataclass(frozen=True)
class Change:
    """What to do, and the best layout with it."""

    what: str
    estimate: Estimate


@dataclass(frozen=True)
class _Try:
    """A question that differs in one thing; `what` says in which, where the layout that is found does not."""

    question: Question
    what: str = ""
    told: tuple[str, ...] = ()
    """Fields of a case whose new values say what the change is."""


def list_changes(question: Question) -> tuple[Change, ...]:
    """All changes that help, the smallest first: settings, layout, host memory, nodes; then what alters training."""
    here = replace(question, fixed=question.fixed | {"offload"})
    found = []
    for each in _list_tries(here):
        best = search(each.question, most=1).best
        if best is not None:
            found.append(Change(each.what or _describe(best, each.told), best))
    more = _more_nodes(here)
    if found or more or not fixed_settings(here):
        return tuple([*found, more] if more else found)
    freed = replace(here, fixed=here.fixed - fixed_settings(here))
    best = search(freed, most=1).best
    if best is not None:
        return (Change(f"all that is set left open: {best.case.degrees.render()}, {_describe(best, _ALL)}", best),)
    more = _more_nodes(freed)
    return (replace(more, what=f"{more.what}, and all that is set left open"),) if more else ()


_ALL = ("micro_batch", "recompute")


def fixed_settings(question: Question) -> frozenset[str]:
    """What a person set that the search could choose."""
    return question.fixed & {*SETTINGS, *AXES}


def _list_tries(question: Question) -> Iterator[_Try]:
    fixed = question.fixed
    for name in SETTINGS:
        if name in fixed:
            yield _Try(replace(question, fixed=fixed - {name}), told=(name,))
    if fixed & set(AXES):
        yield _Try(replace(question, fixed=fixed - set(AXES)), told=("degrees",))
    if not question.case.offload:
        yield _Try(_changed(question, offload=True), "optimizer states in the host's memory (--offload)")
    if question.case.optimizer == "adamw":
        yield _Try(_changed(question, optimizer="adamw8bit"), "AdamW with moments in eight bits (adamw8bit)")
    half = question.case.seq_len // 2
    if half >= SHORTEST and half % question.case.degrees.cp == 0 and not question.case.model.patch_features:
        what = f"sequences of {half:,} tokens, twice as many in a batch"
        yield _Try(_changed(question, seq_len=half, global_batch=2 * question.case.global_batch), what)


def _changed(question: Question, **values: object) -> Question:
    return replace(question, case=replace(question.case, **values))  # type: ignore[arg-type]


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


def _more_nodes(question: Question) -> Change | None:
    """The fewest nodes, doubled each time, on which something fits. Axes that copy or shard states follow."""
    part = question.world % question.machine.per_node > 0
    nodes = question.nodes if part else 2 * question.nodes
    while nodes <= MOST_NODES:
        best = search(on_nodes(question, nodes), most=1).best
        if best is not None:
            return Change(f"{nodes:,} {'node' if nodes == 1 else 'nodes'} ({best.case.degrees.world:,} ranks)", best)
        nodes *= 2
    return None


def on_nodes(question: Question, nodes: int) -> Question:
    """The same question for so many whole nodes; dp_replicate and dp_shard are kept where the ranks are the same."""
    world = nodes * question.machine.per_node
    loose = question.fixed if world == question.world else question.fixed - {"dp_replicate", "dp_shard"}
    return replace(question, world=world, fixed=loose)
