"""What a person says of a run that is to be planned, in their own terms; the rest is assumed.

Invariant: None and empty mean "not said". All that cannot be is told at once, in the words of the command line. This
module must not read files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from shardway.errors import Problem, UserError, check_no_problems, render_problems
from shardway.plan.answer.assumed import assume_batch, assume_seq_len, assume_tokens
from shardway.plan.case import AttentionKernel, Case, Degrees, Optimizer, Precision, Recompute, Schedule
from shardway.plan.engines import find_engine
from shardway.plan.machine import Machine
from shardway.plan.search.space import AXES, SETTINGS, Question
from shardway.plan.shapes.architecture import Architecture
from shardway.plan.time.ceilings import generation_of
from shardway.units import Span

MOST_RANKS = 2**20


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


@dataclass(frozen=True)
class SearchQuestion:
    """A question for the search, how long the run shall be (None: nobody can say), and what was assumed."""

    question: Question
    length: Span | None
    assumed: tuple[str, ...]


def parse_layout(text: str) -> dict[str, int]:
    """Degrees in a text such as "tp=8,pp=4" or "tp 8 x pp 4". Raises UserError that names every part that is none."""
    found: dict[str, int] = {}
    problems = []
    for part in filter(None, (each.strip() for each in text.replace(" x ", ",").split(","))):
        name, _, size = part.replace("=", " ").partition(" ")
        if name in AXES and size.strip().isdecimal() and int(size) >= 1:
            found[name] = int(size)
        else:
            allowed = f"an axis ({', '.join(AXES)}) with its degree, such as tp=8,pp=4"
            problems.append(Problem("--layout", f'"{part}" is no degree', allowed=allowed))
    check_no_problems("the plan", problems)
    return found


def ask(said: PlanOptions, model: Architecture, machine: Machine) -> SearchQuestion:
    """The question in what was said. Raises UserError with all that cannot be."""
    check_no_problems("the plan", list(find_problems(said, machine)))
    ranks = said.gpus or (said.nodes or 1) * machine.per_node
    told = list(machine.assumed)
    if not said.gpus and not said.nodes:
        told.append("one node (--nodes)")
    seq = assume_seq_len(model)
    batch = assume_batch(model, said.seq_len or seq.value, _sharers(said, ranks))
    told += [] if said.seq_len else [seq.told]
    told += [] if said.global_batch else [batch.told]
    length = said.length
    if length is None and not model.patch_features:
        tokens = assume_tokens(model)
        length = Span(float(tokens.value), "tokens")
        told.append(tokens.told)
    case = _case(said, model, machine, said.seq_len or seq.value, said.global_batch or batch.value)
    return SearchQuestion(
        Question(case, machine, ranks, _fixed(said), cast(tuple[Precision, ...], said.precisions)), length, tuple(told)
    )


def _sharers(said: PlanOptions, ranks: int) -> int:
    """Ranks that a batch is to be split over: those that no other axis takes."""
    taken = math.prod(size for name, size in said.layout.items() if name in ("cp", "tp", "pp"))
    return ranks // taken * (said.micro_batch or 1) if ranks % taken == 0 else ranks


def _case(said: PlanOptions, model: Architecture, machine: Machine, seq_len: int, global_batch: int) -> Case:
    engine = find_engine(said.engine or "shardway")
    degrees = Degrees(**said.layout)
    words = {
        "precision": said.precisions[0] if said.precisions else _usual_precision(machine),
        "optimizer": said.optimizer or "adamw",
        "recompute": said.recompute or "none",
        "attention": said.attention or _usual_attention(machine, eager=engine.eager),
        "schedule": said.schedule or "1f1b",
    }
    return Case(
        model=model,
        seq_len=seq_len,
        global_batch=global_batch,
        micro_batch=said.micro_batch or 1,
        # Experts split over ranks that the search has not found yet.
        degrees=degrees if degrees.ep == 1 or "dp_shard" in said.layout else replace(degrees, dp_shard=degrees.ep),
        engine=engine,
        zero=said.zero or 0,
        compiled=said.compiled,
        offload=bool(said.offload),
        **words,  # type: ignore[arg-type]
    )


def _usual_precision(machine: Machine) -> Precision:
    return "bf16" if machine.accelerator.peak("bf16") else "fp16"


def _usual_attention(machine: Machine, *, eager: bool) -> AttentionKernel:
    """Volta has no kernel of the second version; engines with kernels of their own have those for Hopper."""
    generation = generation_of(machine.accelerator.key)
    if generation == "volta":
        return "flash1"
    return "flash3" if generation in ("hopper", "blackwell") and not eager else "flash2"


def _fixed(said: PlanOptions) -> frozenset[str]:
    names = (*SETTINGS, "offload")
    return frozenset([name for name in names if getattr(said, name) is not None]) | frozenset(said.layout)


def find_problems(said: PlanOptions, machine: Machine) -> Iterator[Problem]:
    """What of the options cannot be on a machine."""
    sizes = {
        "--nodes": said.nodes,
        "--gpus": said.gpus,
        "--seq-len": said.seq_len,
        "--global-batch": said.global_batch,
        "--micro-batch": said.micro_batch,
    }
    for where, size in sizes.items():
        if size is not None and not 1 <= size <= MOST_RANKS:
            yield Problem(where, f"{size:,} is no size", allowed=f"1 to {MOST_RANKS:,}")
    yield from _find_word_problems(said)
    if said.nodes and said.gpus:
        what = f"{said.gpus} GPUs and {said.nodes} nodes are said both"
        yield Problem("--gpus", what, allowed="one of --nodes and --gpus")
    yield from _find_layout_problems(said, said.gpus or (said.nodes or 1) * machine.per_node)


def _find_word_problems(said: PlanOptions) -> Iterator[Problem]:
    choices: Mapping[str, tuple[Sequence[str | None], Any]] = {
        "--precision": (said.precisions, Precision),
        "--optimizer": ([said.optimizer or None], Optimizer),
        "--recompute": ([said.recompute], Recompute),
        "--schedule": ([said.schedule], Schedule),
        "--attention": ([said.attention], AttentionKernel),
    }
    for where, (words, known) in choices.items():
        for word in words:
            if word is not None and word not in get_args(known):
                yield Problem(where, f'"{word}" is not known', allowed=", ".join(get_args(known)))
    if said.zero is not None and said.zero not in (0, 1, 2, 3):
        yield Problem("--zero", f"{said.zero} is no stage of ZeRO", allowed="0, 1, 2, 3")


def _find_layout_problems(said: PlanOptions, ranks: int) -> Iterator[Problem]:
    taken = math.prod(size for name, size in said.layout.items() if name != "ep")
    if ranks >= 1 and taken >= 1 and ranks % taken:
        what = f"{' x '.join(f'{name} {size}' for name, size in said.layout.items())} does not divide {ranks:,} ranks"
        yield Problem("--layout", what, allowed="degrees whose product divides the ranks", remedy="change one of them")


def refuse(question: Question) -> UserError:
    """Why a question has no legal layout at all."""
    case, world = question.case, question.world
    what = f"no layout of {world:,} ranks is legal for a global batch of {case.global_batch:,} sequences"
    remedy = "choose a global batch that the ranks (or a divisor of them) divide, or set fewer degrees"
    if case.degrees.pp > 1 and not case.engine.short_pipelines:
        remedy += "; a pipeline of 1f1b wants as many micro-batches as ranks, gpipe takes any number"
    return UserError(render_problems("the plan", [Problem("--global-batch", what, remedy=remedy)]))
