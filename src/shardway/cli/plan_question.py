"""Turns the words and options of `shardway plan` into a question: model, machine, terms of its queue.

Invariants:
- Run files and profiles are read here; the planner behind reads none.
- An option that the run file already sets is refused.
- torch is imported for --trace alone. Its result is kept beside the run file, so that the next plan needs no torch.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardway.earlier_names import EARLIER_KEYS
from shardway.errors import Problem, SiteError, UserError, check_no_problems, list_some, render_problems
from shardway.hfconfig import CONFIG
from shardway.places import expand_home
from shardway.plan.answer import JobTerms, PlanAnswer, PlanOptions, answer, ask, count_ranks, find_problems
from shardway.plan.economy import Price
from shardway.plan.machine import Machine, machine_of_part, machine_of_site
from shardway.plan.search import AXES, SETTINGS, Question
from shardway.plan.shapes.architecture import Architecture
from shardway.plan.shapes.measured import Measured, Shape, read_measured
from shardway.plan.shapes.section import find_named
from shardway.resolve.draft import Resolved, takes_of
from shardway.resolve.planned import case_of, list_assumptions, precision_of, shape_of_run
from shardway.resolve.request import parse_words, resolve_request, site_of
from shardway.runfile.load import load_run
from shardway.sites.load import list_sites, load_site
from shardway.units import Span

if TYPE_CHECKING:
    from shardway.plan.data_parallel_estimate import UnitAnswer
    from shardway.runfile.schema import RunFile
    from shardway.sites.schema import Queue, SiteProfile


_SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def answer_plan(
    words: list[str],
    options: PlanOptions,
    *,
    on: str | None,
    gpu: str | None,
    queue: str | None,
    price: Price | None,
    trace: bool,
    module: str,
) -> PlanAnswer | UnitAnswer:
    """The plan of a model (or of a run file with keys) on a machine: a site (`on`) or an accelerator (`gpu`).

    `trace`: count the run file's model with torch; `module` ("file.py:function") makes it where the run file does not.
    Raises UserError with all problems.
    """
    name, *keys = words
    of_run = name.endswith(".toml")
    if of_run and not on and not gpu:
        on = _site_of_run(words)
    try:
        machine, site = _find_machine(on, gpu)
    except UserError as error:
        check_no_problems("the plan", [*found, *error.problems] if (found := _name_problems(name)) else [])
        raise
    if of_run:
        return _answer_run(words, options, machine, (site, queue, price), trace=trace, module=module)
    check_no_problems("the plan", [_describe_stray(key) for key in keys])
    if trace or module:
        raise _refusal("--trace", f'"{name}" is no run file', "the path of a run file (.toml) whose model is counted")
    shape = _find_shape(name, expand_home(name))
    if not isinstance(shape, Architecture):
        raise _refusal("model", f"{shape.name} is no transformer", "a transformer, or a run file with --trace")
    question = ask(options, shape, machine)
    return answer(question, _terms(site, queue, price, question.nodes))


def _name_problems(name: str) -> list[Problem]:
    """Problems of a model that is named by a word alone."""
    path = expand_home(name)
    if name.endswith(".toml") or "/" in name or path.exists():
        return []
    try:
        _find_shape(name, path)
    except UserError as error:
        return [*error.problems]
    return []


def _describe_stray(word: str) -> Problem:
    remedy = "name the run file first, or use the options of `shardway plan --help`"
    return Problem(word, "sets a key of a run file, and none is named", remedy=remedy)


def _find_shape(name: str, path: Path) -> Shape:
    """The shape of a folder or a config.json, of a hub name, or of a model known by name."""
    is_config = path.is_file() and path.name == CONFIG
    if not (is_config or path.is_dir() or "/" in name):
        return find_named(name)
    from shardway.plan.shapes.huggingface import read_shape

    return read_shape(str(path.parent) if is_config else name)


def _site_of_run(words: list[str]) -> str:
    """The site of the run file."""
    request = parse_words(words)
    loaded = load_run(request.run_file, request.overrides)
    site_of(loaded)
    return loaded.values.site.name


def parse_question_words(text: str) -> tuple[str, ...]:
    """The words of a list such as "bf16,fp8"."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def read_length(tokens: str | None, steps: int | None) -> Span | None:
    """The length of a run; None if no option gives one. Raises UserError."""
    if tokens is not None and steps is not None:
        raise _refusal("--steps", "a length in steps and one in tokens are said both", "one of --tokens and --steps")
    if steps is not None:
        if steps < 1:
            raise _refusal("--steps", f"{steps} is no length", "1 or more")
        return Span(float(steps), "steps")
    return Span(_parse_count(tokens), "tokens") if tokens is not None else None


def _parse_count(text: str) -> float:
    number, scale = (text[:-1], _SUFFIXES[text[-1]]) if text[-1:] in _SUFFIXES else (text, 1.0)
    try:
        value = float(number.replace("_", "")) * scale
    except ValueError:
        value = math.nan
    if not 1 <= value <= 1e18:
        raise _refusal("--tokens", f'"{text}" is no number of tokens', "1 to 1e18, such as 100e9, 300B or 15T")
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
        raise _refusal("--price", f'"{text}" is no price', 'a number and a currency, such as "2.5 EUR"')
    return Price(per_gpu_hour=value, currency=currency)


def _refusal(where: str, what: str, allowed: str, remedy: str = "") -> UserError:
    problem = Problem(where, what, allowed=allowed, remedy=remedy)
    return UserError(render_problems("the plan", [problem]), [problem])


# --- the machine and its queue


def _find_machine(on: str | None, gpu: str | None) -> tuple[Machine, SiteProfile | None]:
    """The machine, and the profile of its site if there is one."""
    if on and gpu:
        raise _refusal("--gpu", f"a site ({on}) and a GPU ({gpu}) are said both", "one of --on and --gpu")
    if gpu:
        return machine_of_part(gpu), None
    if on:
        site = load_site(on)
        return machine_of_site(site), site
    raise _refusal(
        "--on",
        "nothing says which machine the plan is for",
        f"--on SITE ({', '.join(list_sites())}, or the path of a profile), or --gpu KEY such as h100-sxm5-80gb",
    )


def _terms(site: SiteProfile | None, queue_name: str | None, price: Price | None, nodes: int) -> JobTerms:
    queue = _find_queue(site, queue_name, nodes) if site else None
    if queue_name and site is None:
        raise _refusal("--queue", f'"{queue_name}" is a queue of no site', "a queue of the site that --on names")
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
            raise _refusal("--queue", f'the site "{site.name}" has no queue "{name}"', known)
        return found
    fitting = (queue for queue in site.queues if queue.max_nodes is None or queue.max_nodes >= nodes)
    return next(fitting, site.queues[0] if site.queues else None)


# --- the question of a run file

KEYS = {
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

Queueing = tuple["SiteProfile | None", str | None, Price | None]
"""The site, the name of its queue, and the price of an hour."""


def _answer_run(
    words: list[str], options: PlanOptions, machine: Machine, queueing: Queueing, *, trace: bool, module: str
) -> PlanAnswer | UnitAnswer:
    """The plan of a run file on a machine. Raises UserError with all problems."""
    check_no_problems("the plan", [*find_problems(options, machine), *_find_doubles(options)])
    ranks, _ = count_ranks(options, machine)
    resolved = resolve_request(parse_words(words), ranks, min(ranks, machine.per_node), machine).resolved
    values, path = resolved.values, Path(words[0])
    shape, note, samples = (
        _trace(values, path, module) if trace or module else _find_run_shape(values, resolved.circumstances.shape, path)
    )
    assumed = [*machine.assumed, *filter(None, [note])]
    assumed += [] if options.gpus or options.nodes else ["one node (--nodes)"]
    length = options.length or _length_of(resolved, samples)
    terms = _terms(*queueing, -(-ranks // machine.per_node))
    if isinstance(shape, Measured):
        from shardway.plan.data_parallel_estimate import UnitCase, answer_units

        case = UnitCase(
            model=shape,
            global_batch=values.train.global_batch,
            micro_batch=int(values.train.micro_batch),
            dp_replicate=int(values.parallel.dp_replicate),
            dp_shard=int(values.parallel.dp_shard),
            precision=precision_of(values.precision),
            optimizer=values.optim.name,
        )
        tokens = values.data.seq_len if takes_of(values.model.kind) == "tokens" or values.model.hf else 1
        return answer_units(
            case,
            machine,
            ranks,
            terms,
            length=length,
            tokens_per_sample=tokens,
            assumed=tuple(assumed),
            laid_out=True,
        )
    settled, notes = frozenset((*AXES, *SETTINGS, "offload", "sequence")), (*assumed, *list_assumptions(values))
    return answer(Question(case_of(values, shape), machine, ranks, settled, length=length, assumed=notes), terms)


def _find_doubles(options: PlanOptions) -> list[Problem]:
    return [
        Problem(option, "is said by the run file", remedy=f"set {key} there, or give {key}=... behind the run file")
        for name, (option, key) in KEYS.items()
        if getattr(options, name) != getattr(PlanOptions(), name)
    ]


def _length_of(resolved: Resolved, samples: int | None) -> Span | None:
    """The length in steps if it is known; None if the number of steps of an epoch depends on the data."""
    if resolved.derived.total_steps:
        return Span(float(resolved.derived.total_steps), "steps")
    span = resolved.values.train.steps
    if span.unit == "epochs":
        return Span(span.amount * samples, "samples") if samples else None
    return span


# --- the shape

FoundShape = tuple[Shape, str, int | None]
"""A shape, its origin if that is not the run file, and the samples of an epoch if the data can be opened."""


def shape_path(run_file: Path) -> Path:
    """Where the traced shape of a run file is kept."""
    return run_file.with_suffix(".shape.json")


def _find_run_shape(values: RunFile, hf: Shape | None, path: Path) -> FoundShape:
    """The traced shape if there is one, else that of the run file's model section."""
    stored = shape_path(path)
    if stored.exists():
        shape = read_measured(stored)
        if not shape.source.endswith(_digest(values)):
            raise UserError(
                f"{stored} was counted for another [model] or data.seq_len than this run has.\n"
                "  To do: count it again (--trace), or remove the file."
            )
        return shape, f"the model as --trace counted it: {stored} (remove it to plan [model])", None
    if takes_of(values.model.kind) == "tokens" or values.model.hf:
        return shape_of_run(values, hf), "", None
    # An image model has the image size of the data.
    from shardway.data.open import are_there, find_sample, open_described
    from shardway.plan.shapes.section import shape_of_section

    if not are_there(values):
        return shape_of_section(values.model, find_sample(values)[0]), _without_data(values), None
    data = open_described(values)
    return shape_of_section(values.model, data.train.facts.sample_shape), "", data.facts.samples


def _digest(values: RunFile) -> str:
    """Digest of what a sample and the model are made from; by the first names of keys, so that earlier counts hold."""
    later = set() if values.model.settings else {"settings"}
    text = values.model.model_dump_json(exclude=later) + str((values.data.seq_len, values.data.shape))
    for first, today in EARLIER_KEYS.items():
        text = text.replace(f'"{today.removeprefix("model.")}":', f'"{first.removeprefix("model.")}":')
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _trace(values: RunFile, path: Path, module: str) -> FoundShape:
    """The model of the run file, counted with torch; kept for the next plan."""
    try:
        from shardway.train.param_count import count_model
    except ModuleNotFoundError as error:
        raise UserError(
            f"--trace builds the model, and {error.name} is not installed here.\n"
            "  To do: run it once where PyTorch is, and take the file of the shape along."
        ) from error
    from shardway.data.open import are_there

    counted, stored = count_model(values, module), shape_path(path)
    counted = replace(counted, source=f"{counted.source}; of {_digest(values)}")
    try:
        stored.write_text(counted.to_json(), encoding="utf-8")
    except OSError as error:
        raise SiteError(f"{stored} cannot be written: {error.strerror}.") from error
    note = f"the model as it was counted now, kept in {stored}"
    return counted, note if are_there(values) else f"{note}; {_without_data(values)}", None


def _without_data(values: RunFile) -> str:
    """A note about what is assumed for data that do not exist yet."""
    images = takes_of(values.model.kind) == "images" and not values.model.hf
    says = "samples of data.seq_len tokens"
    if images:
        says = f"images of {list(values.data.shape)} (others: data.kind=synthetic data.shape=[...])"
    return f"{says}, since {values.data.path} is not there yet"
