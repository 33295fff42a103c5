"""From a question in the user's terms to a plan: assumptions, terms of the queue, the layout, the whole run.

Invariants:
- Each assumption has a sentence with its value, its reason, and how to override it.
- None and empty mean "not given". All problems of the options are reported at once, in the words of the command line.
- The estimate of the whole run does not depend on how a step was priced.

Sources: batches: Brown et al., arXiv:2005.14165, table 2.1; tokens for a model's size: Hoffmann et al.,
arXiv:2203.15556, section 3; images: Dosovitskiy et al., arXiv:2010.11929, table 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from shardway.errors import Problem, UserError, check_no_problems, render_problems, render_reason
from shardway.plan.case import (
    AttentionKernel,
    Case,
    Degrees,
    Optimizer,
    Precision,
    Recompute,
    Schedule,
    divisors,
    find_engine,
)
from shardway.plan.economy import Charge, Faults, Power, Price, RunEstimate, RunRequest, Slot, estimate_run
from shardway.plan.estimate import Estimate
from shardway.plan.machine import Machine
from shardway.plan.search import (
    AXES,
    SETTINGS,
    Change,
    Question,
    ScalingPoint,
    SearchResult,
    default_nodes,
    list_changes,
    scaling_curve,
    search,
)
from shardway.plan.shapes.architecture import Architecture
from shardway.plan.time.ceilings import generation_of
from shardway.units import Scale, Span, render_count

# --- assumptions: batch, sequence, length, saving, starting

USUAL_SEQ = 4096
USUAL_IMAGES = 4096
BATCH_TOKENS = ((1e9, 0.5e6), (5e9, 1e6), (20e9, 2e6))
"""(Parameters, tokens): up to so many parameters a batch of so many tokens is usual."""
LARGE_BATCH_TOKENS = 3.2e6
TOKENS_PER_PARAMETER = 20

SAVED_BYTES = 12
"""Bytes of a parameter in a checkpoint: fp32 with two moments."""
WRITE_RATE = 1e9
"""Bytes per second that a node writes to the shared file system."""
MOST_WRITE_RATE = 50e9
START_SECONDS = 180.0
"""Seconds from the start of a job to its first step: imports, communicators, kernel compilation."""
NOTICE_SECONDS = 120.0
"""Seconds from a failure to a new start."""
MARGIN_SECONDS = 60.0
"""Seconds kept free at the end of a job beside the time of a save."""


@dataclass(frozen=True)
class Assumed:
    """A value that was not given, and the sentence that reports it."""

    value: int
    told: str


def assume_seq_len(model: Architecture) -> Assumed:
    """The sequence length of a text model; for an image model its number of patches."""
    if model.patch_features:
        length = model.positions or 197
        return Assumed(length, f"{length:,} patches an image, as many as the model has positions for")
    length = min(USUAL_SEQ, model.positions or USUAL_SEQ)
    reason = "all that the model has positions for" if length < USUAL_SEQ else "usual for pre-training"
    return Assumed(length, f"sequences of {length:,} tokens, {reason} (--seq-len)")


def assume_batch(model: Architecture, seq_len: int, ranks: int) -> Assumed:
    """A usual batch in sequences, a multiple of the ranks if it is large enough."""
    if model.patch_features:
        batch = _split_over(USUAL_IMAGES, ranks)
        return Assumed(batch, f"a global batch of {batch:,} images, about {USUAL_IMAGES:,} (--global-batch)")
    sizes = (tokens for parameters, tokens in BATCH_TOKENS if model.active_parameters <= parameters)
    tokens = next(sizes, LARGE_BATCH_TOKENS)
    batch = _split_over(tokens / seq_len, ranks)
    told = f"a global batch of {batch:,} sequences, near the {tokens / 1e6:g} M tokens that GPT-3 had at this size"
    return Assumed(batch, f"{told} (--global-batch)")


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
    tokens = TOKENS_PER_PARAMETER * model.active_parameters
    told = f"{render_count(tokens)} tokens, {TOKENS_PER_PARAMETER} for each parameter that a token meets"
    return Assumed(tokens, f"{told} (Hoffmann et al.; --tokens)")


@dataclass(frozen=True)
class SaveTime:
    """The seconds of a checkpoint, and the sentence with the reason."""

    seconds: float
    told: str

    @property
    def faults(self) -> Faults:
        """Training stands still during a save; after a failure the job restarts and loads."""
        return Faults(save_seconds=self.seconds, restart_seconds=NOTICE_SECONDS + START_SECONDS + self.seconds)

    def slot(self, wall_seconds: float) -> Slot:
        """A job of this wall-time."""
        return Slot(
            seconds=wall_seconds,
            start_seconds=START_SECONDS,
            resume_seconds=self.seconds,
            margin_seconds=MARGIN_SECONDS + self.seconds,
        )


def assume_saving(parameters: int, nodes: int) -> SaveTime:
    """The time to save weights and moments in fp32, written by all nodes at once."""
    size, rate = parameters * SAVED_BYTES, min(nodes * WRITE_RATE, MOST_WRITE_RATE)
    told = (
        f"a checkpoint of {size / 1e9:,.3g} GB takes {size / rate:,.3g} s ({WRITE_RATE / 1e9:g} GB/s a node, at most "
        f"{MOST_WRITE_RATE / 1e9:g}); a start takes {START_SECONDS:g} s, and {NOTICE_SECONDS:g} s more after a failure"
    )
    return SaveTime(size / rate, told)


# --- the options of a plan

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
    """A question for the search, the length of the run (None: unknown), and the assumptions."""

    question: Question
    length: Span | None
    assumed: tuple[str, ...]


def parse_layout(text: str) -> dict[str, int]:
    """Degrees from a text such as "tp=8,pp=4" or "tp 8 x pp 4". Raises UserError that names every invalid part."""
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
    """The question that the options ask. Raises UserError with all problems."""
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
    """Ranks that the batch is split over: those that no other axis takes."""
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
        # The search has not chosen yet which ranks experts are split over.
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
    """Volta has no kernel of FlashAttention 2; engines with kernels of their own have one for Hopper."""
    generation = generation_of(machine.accelerator.key)
    if generation == "volta":
        return "flash1"
    return "flash3" if generation in ("hopper", "blackwell") and not eager else "flash2"


def _fixed(said: PlanOptions) -> frozenset[str]:
    names = (*SETTINGS, "offload")
    return frozenset([name for name in names if getattr(said, name) is not None]) | frozenset(said.layout)


def find_problems(said: PlanOptions, machine: Machine) -> Iterator[Problem]:
    """Problems of the options on a machine."""
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
    """The error for a question without a legal layout."""
    case, world = question.case, question.world
    what = f"no layout of {world:,} ranks is legal for a global batch of {case.global_batch:,} sequences"
    remedy = "choose a global batch that the ranks (or a divisor of them) divide, or set fewer degrees"
    if case.degrees.pp > 1 and not case.engine.short_pipelines:
        remedy += "; a pipeline of 1f1b wants as many micro-batches as ranks, gpipe takes any number"
    return UserError(render_problems("the plan", [Problem("--global-batch", what, remedy=remedy)]))


# --- the queue, the price, and the whole run


@dataclass(frozen=True, kw_only=True)
class JobTerms:
    """A site's terms for jobs: the queue with its limits (None: not known), the price of an hour."""

    queue: str = ""
    wall_seconds: float | None = None
    most_nodes: int | None = None
    cores_per_node: int | None = None
    price: Price | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """The work of a run: its length, the seconds of a step, the ranks."""

    length: Span
    scale: Scale
    step_seconds: float
    ranks: int


def price_run(work: TrainingWork, machine: Machine, terms: JobTerms, saving: SaveTime) -> RunEstimate:
    """Days, jobs, failures, hours, energy, money."""
    watts = machine.accelerator.power_w
    return estimate_run(
        RunRequest(
            step_seconds=work.step_seconds,
            length=work.length,
            gpus=work.ranks,
            gpus_per_node=machine.per_node,
            faults=saving.faults,
            scale=work.scale,
            slot=saving.slot(terms.wall_seconds) if terms.wall_seconds else None,
            power=Power(tdp_watts=watts) if watts else None,
            price=terms.price,
            charge=Charge(unit="core-hours", cores_per_node=terms.cores_per_node) if terms.cores_per_node else None,
        )
    )


def list_warnings(terms: JobTerms, nodes: int) -> tuple[str, ...]:
    """Limits of the terms that the run exceeds."""
    if terms.most_nodes and nodes > terms.most_nodes:
        return (
            f"the queue {terms.queue} takes {terms.most_nodes:,} nodes a job, and these are {nodes:,}: "
            "ask for fewer, or for another queue (--queue)",
        )
    return ()


# --- the answer


@dataclass(frozen=True)
class PlanAnswer:
    """A plan. `shown` is the layout to use or, if nothing fits, the one that needs least memory."""

    question: Question
    terms: JobTerms
    found: SearchResult
    shown: Estimate
    run: RunEstimate | None
    """The whole run, if its length is known and the layout fits."""
    changes: tuple[Change, ...]
    """What to change if nothing fits, or nothing without the host's memory."""
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether some layout fits on every device."""
        return bool(self.found.candidates)


def answer(asked: SearchQuestion, terms: JobTerms | None = None) -> PlanAnswer:
    """Search, and price the whole run of the best layout. Raises UserError if no layout is legal."""
    terms = terms or JobTerms()
    question = asked.question
    found = search(question)
    shown = found.best or found.nearest
    if shown is None:
        raise refuse(question)
    on_host = shown.case.offload and not question.case.offload
    changes = list_changes(question) if on_host or not found.best else ()
    changes = tuple(change for change in changes if change.estimate.case != shown.case)
    bare = PlanAnswer(question, terms, found, shown, None, changes, asked.assumed, list_warnings(terms, question.nodes))
    return _with_run(bare, asked.length) if found.best and asked.length else bare


def _with_run(bare: PlanAnswer, length: Span) -> PlanAnswer:
    question, case = bare.question, bare.shown.case
    saving = assume_saving(case.model.parameters, question.nodes)
    work = TrainingWork(
        length=length,
        scale=Scale(case.global_batch, case.seq_len, 1),
        step_seconds=bare.shown.time.seconds,
        ranks=case.degrees.world,
    )
    try:
        run = price_run(work, bare.shown.machine, bare.terms, saving)
    except UserError as error:
        return replace(bare, warnings=(*bare.warnings, f"the whole run cannot be told: {render_reason(str(error))}"))
    return replace(bare, run=run, assumed=(*bare.assumed, saving.told))


def answer_curve(of: PlanAnswer) -> tuple[ScalingPoint, ...]:
    """The scaling curve around an answer."""
    return scaling_curve(of.question, default_nodes(of.question))
