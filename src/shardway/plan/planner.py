"""From the user's options to a plan: assumptions, terms of the queue, the layout, the whole run.

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
from typing import cast, get_args

from shardway.errors import Problem, UserError, check_no_problems, list_some, render_problems, render_reason
from shardway.plan.case import (
    AttentionKernel,
    Case,
    Degrees,
    Precision,
    Recompute,
    Schedule,
    divisors,
    find_engine,
)
from shardway.plan.economy import Charge, Faults, Power, Price, RunEstimate, RunRequest, Slot, estimate_run
from shardway.plan.machine import Machine, generation_of, machine_of_part, machine_of_site
from shardway.plan.search import (
    AXES,
    SETTINGS,
    Change,
    Estimate,
    PlanRequest,
    ScalingPoint,
    SearchResult,
    default_nodes,
    list_changes,
    scaling_curve,
    search,
)
from shardway.plan.shapes.architecture import Architecture
from shardway.plugins import list_names
from shardway.sites.load import list_sites, load_site
from shardway.sites.schema import Queue, SiteProfile
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
    note: str


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
    note = f"a global batch of {batch:,} sequences, near the {tokens / 1e6:g} M tokens that GPT-3 had at this size"
    return Assumed(batch, f"{note} (--global-batch)")


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
    note = f"{render_count(tokens)} tokens, {TOKENS_PER_PARAMETER} for each parameter that a token meets"
    return Assumed(tokens, f"{note} (Hoffmann et al.; --tokens)")


@dataclass(frozen=True)
class SaveTime:
    """The seconds of a checkpoint, and the sentence with the reason."""

    seconds: float
    note: str

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
    note = (
        f"a checkpoint of {size / 1e9:,.3g} GB takes {size / rate:,.3g} s ({WRITE_RATE / 1e9:g} GB/s a node, at most "
        f"{MOST_WRITE_RATE / 1e9:g}); a start takes {START_SECONDS:g} s, and {NOTICE_SECONDS:g} s more after a failure"
    )
    return SaveTime(size / rate, note)


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
        if name in AXES and size.strip().isdecimal() and int(size) >= 1:
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
        if steps < 1:
            raise refuse("--steps", f"{steps} is no length", "1 or more")
        return Span(float(steps), "steps")
    return Span(_parse_count(tokens), "tokens") if tokens is not None else None


def _parse_count(text: str) -> float:
    suffixes = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number, scale = (text[:-1], suffixes[text[-1]]) if text[-1:] in suffixes else (text, 1.0)
    try:
        value = float(number.replace("_", "")) * scale
    except ValueError:
        value = math.nan
    if not 1 <= value <= 1e18:
        raise refuse("--tokens", f'"{text}" is no number of tokens', "1 to 1e18, such as 100e9, 300B or 15T")
    return value


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
    if not 0 <= value < math.inf or not currency:
        raise refuse("--price", f'"{text}" is no price', 'a number and a currency, such as "2.5 EUR"')
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
    check_no_problems("the plan", list(find_problems(options, machine)))
    ranks, assumed = count_ranks(options, machine), [*machine.assumed, *assume_nodes(options)]
    seq = assume_seq_len(model)
    seq_len = options.seq_len or seq.value
    # The batch is split over the ranks that no other axis takes.
    taken = math.prod(size for name, size in options.layout.items() if name in ("cp", "tp", "pp"))
    batch = assume_batch(model, seq_len, ranks // taken * (options.micro_batch or 1) if ranks % taken == 0 else ranks)
    assumed += [] if options.seq_len else [seq.note]
    assumed += [] if options.global_batch else [batch.note]
    length = options.length
    if length is None and not model.patch_features:
        tokens = assume_tokens(model)
        length = Span(float(tokens.value), "tokens")
        assumed.append(tokens.note)
    engine, degrees = find_engine(options.engine or "shardway"), Degrees(**options.layout)
    generation = generation_of(machine.accelerator.key)
    # Volta has no kernel of FlashAttention 2; engines with kernels of their own have one for Hopper.
    newest = "flash3" if generation in ("hopper", "blackwell") and not engine.eager else "flash2"
    usual = "bf16" if machine.accelerator.peak("bf16") else "fp16"
    words = {
        "precision": options.precisions[0] if options.precisions else usual,
        "optimizer": options.optimizer or "adamw",
        "recompute": options.recompute or "none",
        "attention": options.attention or ("flash1" if generation == "volta" else newest),
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
        offload=bool(options.offload),
        **words,  # type: ignore[arg-type]
    )
    fixed = {name for name in (*SETTINGS, "offload") if getattr(options, name) is not None} | {*options.layout}
    formats = cast(tuple[Precision, ...], options.precisions)
    return PlanRequest(case, machine, ranks, frozenset(fixed), formats, length=length, assumed=tuple(assumed))


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


# --- the queue, the price, and the whole run


@dataclass(frozen=True, kw_only=True)
class JobTerms:
    """A site's terms for jobs: the queue with its limits (None: not known), the price of an hour."""

    queue: str = ""
    wall_seconds: float | None = None
    most_nodes: int | None = None
    cores_per_node: int | None = None
    price: Price | None = None


def terms_of(site: SiteProfile | None, name: str | None, price: Price | None, nodes: int) -> JobTerms:
    """The terms of a site for a job of so many nodes, in the queue of that name or a suitable one. Raises UserError."""
    queue = _find_queue(site, name, nodes) if site else None
    if name and site is None:
        raise refuse("--queue", f'"{name}" is a queue of no site', "a queue of the site that --on names")
    return JobTerms(
        queue=queue.name if queue else "",
        wall_seconds=queue.max_walltime if queue else None,
        most_nodes=queue.max_nodes if queue else None,
        cores_per_node=site.node.cores if site else None,
        price=price,
    )


def _find_queue(site: SiteProfile, name: str | None, nodes: int) -> Queue | None:
    """The queue of that name; else the first that takes so many nodes; else the first."""
    if name is not None:
        found = next((queue for queue in site.queues if queue.name == name), None)
        if found is None:
            known = list_some([queue.name for queue in site.queues], 12) or "none: the profile names no queue"
            raise refuse("--queue", f'the site "{site.name}" has no queue "{name}"', known)
        return found
    fitting = (queue for queue in site.queues if queue.max_nodes is None or queue.max_nodes >= nodes)
    return next(fitting, site.queues[0] if site.queues else None)


def price_run(
    length: Span, scale: Scale, step_seconds: float, parameters: int, ranks: int, machine: Machine, terms: JobTerms
) -> tuple[RunEstimate, str]:
    """Days, jobs, failures, hours, energy, money; and what is assumed about checkpoints."""
    watts, cores = machine.accelerator.power_w, terms.cores_per_node
    saving = assume_saving(parameters, -(-ranks // machine.per_node))
    request = RunRequest(
        step_seconds=step_seconds,
        length=length,
        gpus=ranks,
        gpus_per_node=machine.per_node,
        faults=saving.faults,
        scale=scale,
        slot=saving.slot(terms.wall_seconds) if terms.wall_seconds else None,
        power=Power(tdp_watts=watts) if watts else None,
        price=terms.price,
        charge=Charge(unit="core-hours", cores_per_node=cores) if cores else None,
    )
    return estimate_run(request), saving.note


def list_warnings(terms: JobTerms, nodes: int) -> tuple[str, ...]:
    """Limits of the terms that the run exceeds."""
    if terms.most_nodes and nodes > terms.most_nodes:
        return (
            f"the queue {terms.queue} takes {terms.most_nodes:,} nodes a job, and these are {nodes:,}: "
            "ask for fewer, or for another queue (--queue)",
        )
    return ()


# --- the result


@dataclass(frozen=True)
class PlanResult:
    """A plan. `shown` is the layout to use or, if nothing fits, the one that needs least memory."""

    request: PlanRequest
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
        scale, parameters = Scale(case.global_batch, case.seq_len, 1), case.model.parameters
        step = shown.time.seconds
        try:
            run, note = price_run(request.length, scale, step, parameters, request.world, shown.machine, terms)
            assumed = (*assumed, note)
        except UserError as error:
            warnings = (*warnings, f"the whole run cannot be planned: {render_reason(str(error))}")
    return PlanResult(request, terms, found, shown, run, changes, assumed, warnings)


def curve_around(of: PlanResult) -> tuple[ScalingPoint, ...]:
    """The scaling curve around an result."""
    return scaling_curve(of.request, default_nodes(of.request))
