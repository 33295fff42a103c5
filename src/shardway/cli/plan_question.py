"""What `shardway plan` is asked: the model behind a word, the machine behind --on or --gpu, the terms of its queue.

Invariant: files and profiles are read here, and nowhere behind. This module must not print.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardway.cli.plan_options import Counting
from shardway.errors import Problem, UserError, check_no_problems, list_some, render_problems
from shardway.hfconfig import CONFIG
from shardway.places import expand_home
from shardway.plan.answer.answer import PlanAnswer, answer
from shardway.plan.answer.said import PlanOptions, SearchQuestion, ask
from shardway.plan.answer.terms import JobTerms
from shardway.plan.economy import Price
from shardway.plan.machine import Machine
from shardway.plan.shapes.architecture import Architecture
from shardway.plan.shapes.measured import Shape
from shardway.plan.site import machine_of_part, machine_of_site
from shardway.plan.units.answer import UnitAnswer, answer_units
from shardway.units import Span

if TYPE_CHECKING:
    from shardway.cli.plan_run import AskedUnits
    from shardway.sites.schema import Queue, SiteProfile

_SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class MachineQuestion:
    """The machine in a person's words, the queue, and what an hour costs."""

    on: str | None
    gpu: str | None
    queue: str | None
    price: Price | None


@dataclass(frozen=True)
class _PlannedMachine:
    """The machine, and the profile of its site where there is one."""

    machine: Machine
    site: SiteProfile | None


def answer_of(
    model: list[str], where: MachineQuestion, said: PlanOptions, counting: Counting
) -> PlanAnswer | UnitAnswer:
    """The plan. Raises UserError with what cannot be."""
    where = _with_site_of_run(model, where)
    place = _check_both(model, where)
    asked = _ask(model, place.machine, said, counting)
    terms = _terms(place.site, where, asked.question.nodes)
    return (
        answer(asked, terms)
        if isinstance(asked, SearchQuestion)
        else answer_units(asked.question, terms, asked.assumed)
    )


def _check_both(model: list[str], where: MachineQuestion) -> _PlannedMachine:
    """The machine. Raises UserError with what is wrong with it and with the model's name, all at once."""
    try:
        return _find_place(where)
    except UserError as error:
        check_no_problems("the plan", [*found, *error.problems] if (found := _name_problems(model[0])) else [])
        raise


def _name_problems(name: str) -> list[Problem]:
    """What is wrong with a model that is named by a word alone."""
    path = expand_home(name)
    if name.endswith(".toml") or "/" in name or path.exists():
        return []
    try:
        _find_shape(name, path)
    except UserError as error:
        return [*error.problems]
    return []


def _with_site_of_run(model: list[str], where: MachineQuestion) -> MachineQuestion:
    """The site that a run file names, where no option says another."""
    if where.on or where.gpu or not model[0].endswith(".toml"):
        return where
    from shardway.resolve.request import parse_words, site_of
    from shardway.runfile.load import load_run

    request = parse_words(model)
    loaded = load_run(request.run_file, request.overrides)
    site_of(loaded)
    return replace(where, on=loaded.values.site.name)


def parse_words(text: str) -> tuple[str, ...]:
    """The words of a list such as "bf16,fp8"."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def read_length(tokens: str | None, steps: int | None) -> Span | None:
    """How long a run shall be; None where nobody says. Raises UserError."""
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
    """A price in a text such as "2.5 EUR". Raises UserError."""
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


def _find_place(where: MachineQuestion) -> _PlannedMachine:
    from shardway.sites.load import list_sites, load_site

    if where.on and where.gpu:
        raise _refusal("--gpu", f"a site ({where.on}) and a GPU ({where.gpu}) are said both", "one of --on and --gpu")
    if where.gpu:
        return _PlannedMachine(machine_of_part(where.gpu), None)
    if where.on:
        site = load_site(where.on)
        return _PlannedMachine(machine_of_site(site), site)
    raise _refusal(
        "--on",
        "nothing says which machine the plan is for",
        f"--on SITE ({', '.join(list_sites())}, or the path of a profile), or --gpu KEY such as h100-sxm5-80gb",
    )


def _terms(site: SiteProfile | None, where: MachineQuestion, nodes: int) -> JobTerms:
    queue = _find_queue(site, where.queue, nodes) if site else None
    if where.queue and site is None:
        raise _refusal("--queue", f'"{where.queue}" is a queue of no site', "a queue of the site that --on names")
    return JobTerms(
        queue=queue.name if queue else "",
        wall_seconds=queue.max_walltime if queue else None,
        most_nodes=queue.max_nodes if queue else None,
        cores_per_node=site.node.cores if site else None,
        price=where.price,
    )


def _find_queue(site: SiteProfile, name: str | None, nodes: int) -> Queue | None:
    """The queue of that name; otherwise the first that takes so many nodes, or the first of all."""
    if name is not None:
        found = next((queue for queue in site.queues if queue.name == name), None)
        if found is None:
            known = list_some([queue.name for queue in site.queues], 12) or "none: the profile names no queue"
            raise _refusal("--queue", f'the site "{site.name}" has no queue "{name}"', known)
        return found
    fitting = (queue for queue in site.queues if queue.max_nodes is None or queue.max_nodes >= nodes)
    return next(fitting, site.queues[0] if site.queues else None)


# --- the model


def _ask(words: list[str], machine: Machine, said: PlanOptions, counting: Counting) -> SearchQuestion | AskedUnits:
    name, *keys = words
    if name.endswith(".toml"):
        from shardway.cli.plan_run import ask_run

        return ask_run(words, machine, said, counting)
    check_no_problems("the plan", [_stray(key) for key in keys])
    if counting.trace or counting.module:
        raise _refusal("--trace", f'"{name}" is no run file', "the path of a run file (.toml) whose model is counted")
    return ask(said, _lay_out(_find_shape(name, expand_home(name))), machine)


def _stray(word: str) -> Problem:
    remedy = "name the run file first, or use the options of `shardway plan --help`"
    return Problem(word, "sets a key of a run file, and none is named", remedy=remedy)


def _find_shape(name: str, path: Path) -> Shape:
    """That of a folder or a config.json, of a hub name, or of a model known by name."""
    from shardway.plan.shapes.hf import read_shape
    from shardway.plan.shapes.named import find_named

    if path.is_file() and path.name == CONFIG:
        return read_shape(str(path.parent))
    return read_shape(name) if path.is_dir() or "/" in name else find_named(name)


def _lay_out(shape: Shape) -> Architecture:
    if isinstance(shape, Architecture):
        return shape
    raise _refusal("model", f"{shape.name} is no transformer", "a transformer, or a run file with --trace")
