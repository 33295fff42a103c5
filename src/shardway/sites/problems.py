"""What is wrong with a site profile, and which of its facts have a source.

Invariants:
- A fact is a key path that the profile itself states ("node.cores", "queues.gpu.max_walltime"); a source covers the
  fact it names and every fact below it, and the longest path that covers a fact is its source. Whether a source is
  right is not judged.
- Each problem has a key path and its value; schema problems also state what is allowed, in the order of the findings.
- A key that a profile leaves out is never a problem of consistency.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardway.errors import Problem
from shardway.hardware.catalogue import load_accelerators, load_links
from shardway.plugins import GROUPS, make_installed, make_own, make_plugin
from shardway.sites.schema import CPU, FactSource, SiteProfile
from shardway.units import format_bytes, render_bytes, render_seconds

# --- Which facts of a profile have a source, and which have none

GENERIC_SITES = ("dgx-slurm", "generic-pbs", "generic-slurm", "laptop")
"""Shipped profiles that describe no particular machine, so that their facts need no source."""

_NOT_FACTS = {"format", "name", "title", "extends", "replaces", "sources"}


@dataclass(frozen=True)
class SiteFact:
    """One thing that a profile states. `value` is in bytes or seconds where it is a size or a time; `source` is None
    where the profile gives none."""

    path: str
    value: Any
    source: FactSource | None

    @property
    def is_unsure(self) -> bool:
        """Whether the fact is unverified: it has no source, or one that states so."""
        return self.source is None or self.source.is_unsure

    @property
    def text(self) -> str:
        """The value for people: "480GiB", "1d", "yes"."""
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        if isinstance(self.value, list | tuple):
            return ", ".join(map(str, self.value))
        if self.path == "node.memory":
            return render_bytes(self.value)
        if self.path.endswith("_walltime") and isinstance(self.value, int | float):
            return render_seconds(self.value)
        return str(self.value).strip()

    def as_json(self) -> dict[str, Any]:
        known = {"source": self.source.source, "date": self.source.date.isoformat()} if self.source else {}
        fact = {"path": self.path, "value": self.value, "source": None, "date": None}
        return {**fact, **known, "unsure": self.is_unsure}


def list_facts(profile: SiteProfile) -> tuple[str, ...]:
    """Key paths of everything that the profile states about its site, in the profile's order."""
    return tuple(fact.path for fact in describe_facts(profile))


def describe_facts(profile: SiteProfile) -> tuple[SiteFact, ...]:
    """Everything that the profile states about its site, each with its source."""
    stated = list_stated(profile.model_dump(exclude_unset=True, exclude_none=True, exclude=_NOT_FACTS))
    covering = {path: find_covering(path, profile.sources) for path in stated}
    return tuple(
        SiteFact(path, value, profile.sources[source] if (source := covering[path]) is not None else None)
        for path, value in stated.items()
    )


def list_stray_sources(profile: SiteProfile) -> tuple[str, ...]:
    """Keys of `sources` that name no fact of the profile: a misspelt path, or a fact that was removed."""
    facts = list_facts(profile)
    return tuple(path for path in profile.sources if not any(_covers(path, fact) for fact in facts))


def list_stated(table: Mapping[str, Any]) -> dict[str, Any]:
    """Key path -> value of every fact in the table of a profile, checked or not."""
    stated = {key: value for key, value in table.items() if key not in _NOT_FACTS}
    queues = stated.get("queues")
    if isinstance(queues, list | tuple):
        tables = [queue for queue in queues if isinstance(queue, Mapping) and "name" in queue]
        stated["queues"] = {str(queue["name"]): queue for queue in tables}
    return dict(_leaves(stated))


def find_covering(fact: str, paths: Iterable[str]) -> str | None:
    """The longest of the key paths that names the fact or something above it."""
    return max((path for path in paths if _covers(path, fact)), key=len, default=None)


def _covers(path: str, fact: str) -> bool:
    return fact == path or fact.startswith(f"{path}.")


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{path}", leaf) for path, leaf in _leaves(value))
        else:
            yield key, value


# --- Problems of a profile: of its schema, of keys that contradict each other, of impossible numbers

_TABLES: dict[str, type[BaseModel]] = {
    key: kind
    for key, field in SiteProfile.model_fields.items()
    for kind in (field.annotation, *get_args(field.annotation))
    if isinstance(kind, type) and issubclass(kind, BaseModel)
}
"""Key of a profile -> the schema of the table, or of each table of the list, that stands there."""

_ALLOWED = {
    "literal_error": "{expected}",
    "string_type": "a string in quotes",
    "string_too_short": "a string that is not empty",
    "string_pattern_mismatch": "an absolute path, or one that starts with ~ or $",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "model_type": "a table",
    "mapping_type": "a table",
    "tuple_type": "a list of tables",
    "date_type": "a date such as 2026-11-01",
}
"""Type of a finding of pydantic -> what is allowed, with the finding's context filled in."""


def list_problems(error: ValidationError) -> list[Problem]:
    """Every finding of a failed validation of `SiteProfile`."""
    return [_describe(finding) for finding in error.errors(include_url=False)]


def _describe(finding: ErrorDetails) -> Problem:
    location, value, where = finding["loc"], finding["input"], ""
    for part in location:  # ("queues", 0, "name") -> "queues[1].name"
        name = f'"{part}"' if "." in str(part) else str(part)
        if part != "[key]":  # else the finding is about the name of a key, which stands before it
            where += f"[{part + 1}]" if isinstance(part, int) else f".{name}" if where else name
    table = _TABLES.get(str(location[0]), SiteProfile) if len(location) > 1 else SiteProfile
    key, known = str(location[-1]) if location else "", table.model_fields
    match finding["type"]:
        case "extra_forbidden":
            remedy = suggest(key, known, "remove it")
            return Problem(where, "is not a key of a site profile", allowed=", ".join(known), remedy=remedy)
        case "missing":
            return Problem(where, "is missing", remedy=f"add {key}: {known[key].description}")
        case "value_error":  # of our own validators; those of catalogue keys offer the nearest one
            what = str(finding["ctx"]["error"])
            if key in ("accelerator", "link"):
                keys = (CPU, *load_accelerators()) if key == "accelerator" else tuple(load_links())
                remedy = suggest(value, keys, "choose one of these, or leave it out where yours is not there")
                return Problem(where, what, allowed=", ".join(keys), remedy=remedy)
            text, _, allowed = what.partition("; allowed: ")
            return Problem(where or "profile", text, allowed=allowed)
    # pydantic's "'local', 'slurm' or 'pbs'" in our form, and its own sentence for a finding we do not know
    context = finding.get("ctx", {})
    expected = str(context.get("expected", "")).replace(" or ", ", ").replace("'", '"')
    form = _ALLOWED.get(finding["type"])
    allowed = form.format(**{**context, "expected": expected}) if form else finding["msg"]
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return Problem(where, f"{shown} is not allowed", allowed=allowed)


def suggest(word: str, words: Iterable[str], otherwise: str) -> str:
    """What to do about a wrong word: write the one that was probably meant, or `otherwise` where none is similar."""
    nearest = difflib.get_close_matches(word, list(words), n=1)
    return f'write "{nearest[0]}"' if nearest else otherwise


# --- contradictions and impossible numbers

_MOST = {"cores": 4096, "threads_per_core": 8, "accelerators_per_node": 64}
_MEMORY = (2**26, 2**47)
_WALLTIME = (30.0, 366 * 86400.0)
_MOST_NODES = 1_000_000


def list_wrong_defaults(table: Any, queues: tuple[str, ...]) -> list[Problem]:
    """Keys and values of [defaults] that the [site] section of a run file does not take. `queues` are the names of the
    profile's queues; a default queue must be one of them where there are any."""
    if not isinstance(table, Mapping) or not table:
        return []
    from shardway.runfile.load import find_problems
    from shardway.runfile.schema import SiteSection

    allowed = [key for key in SiteSection.model_fields if key != "name"]
    known, problems = {key: value for key, value in table.items() if key in allowed}, []
    for key in map(str, table):
        if key not in allowed:
            what, remedy = "is not a key of [site] in a run file", suggest(key, allowed, "remove it")
            problems.append(Problem(f"defaults.{key}", what, allowed=", ".join(allowed), remedy=remedy))
    try:
        SiteSection.model_validate(known)
    except ValidationError as error:
        findings = error.errors(include_url=False)
        for finding in findings:
            finding["loc"] = ("site", *finding["loc"])
        found = find_problems(findings, {}, "")
        return problems + [replace(each, where=f"defaults.{each.where.split('.')[1]}") for each in found]
    if queues and known.get("queue") and known["queue"] not in queues:
        what = f'"{known["queue"]}" is no queue of this profile'
        problems.append(Problem("defaults.queue", what, allowed=", ".join(queues)))
    return problems


def list_implausible(profile: SiteProfile) -> Iterator[Problem]:
    """Everything that a checked profile says and that cannot be so; empty for a good one."""
    node, start = profile.node, profile.start
    for key, most in _MOST.items():
        value = getattr(node, key)
        if value is not None and value > most:
            yield Problem(f"node.{key}", f"{value} is more than any node has", allowed=f"up to {most}")
    if node.memory is not None and not _MEMORY[0] <= node.memory <= _MEMORY[1]:
        allowed = " to ".join(map(render_bytes, _MEMORY))
        yield Problem("node.memory", f"{format_bytes(node.memory)} is no memory of a node", allowed=allowed)

    for queue in profile.queues:
        where = f"queues.{queue.name}"
        for key in ("max_walltime", "default_walltime"):
            value = getattr(queue, key)
            if value is not None and not _WALLTIME[0] <= value <= _WALLTIME[1]:
                allowed = " to ".join(map(render_seconds, _WALLTIME))
                yield Problem(f"{where}.{key}", f"{render_seconds(value)} is no wall-time", allowed=allowed)
        if queue.max_nodes is not None and queue.max_nodes > _MOST_NODES:
            yield Problem(f"{where}.max_nodes", f"{queue.max_nodes} is more than any machine has")
        for key in ("partition", "qos"):
            if getattr(queue, key) is not None:
                yield from _check_own(profile, f"queues.{key}", where=f"{where}.{key}")

    asked = profile.request.accelerators
    requests = make_plugin("schedulers", profile.scheduler).accelerator_requests
    if asked is not None and asked not in requests:
        words = ", ".join(f'"{word}"' for word in requests)
        yield Problem("request.accelerators", f'"{asked}" is no request of {profile.scheduler}', allowed=words)
    if profile.request.constraint:
        yield from _check_own(profile, "request.constraint")

    if profile.launcher is not None:
        yield from _check_own(profile, "launcher", profile.launcher)
    masks, ranks = [int(mask, 16) for mask in start.masks], node.accelerators_per_node
    if masks and ranks and len(masks) != ranks:
        what = f"{len(masks)} masks for {ranks} accelerators of a node"
        yield Problem("start.bind", what, allowed="one mask for each local rank")
    if any(first & second for at, first in enumerate(masks) for second in masks[:at]) or not all(masks):
        what = "two masks share a core, or a mask has none"
        yield Problem("start.bind", what, allowed="masks without a common bit, none of them 0")

    if profile.container is not None:
        yield from _check_own(profile, "container", profile.container)
    if profile.containers.by_scheduler:
        yield from _check_own(profile, "containers.by_scheduler")
    if "proxy" in (profile.internet.nodes, profile.internet.login) and profile.internet.proxy is None:
        what = 'is missing, while internet.nodes or internet.login is "proxy"'
        yield Problem("internet.proxy", what, remedy="add proxy: http://HOST:PORT")
    for path in list_stray_sources(profile):
        remedy = "name a key path of the profile, such as node.cores, or remove it"
        yield Problem(f'sources."{path}"', "names nothing that this profile states", remedy=remedy)


def _check_own(profile: SiteProfile, key: str, value: str = "", where: str = "") -> Iterator[Problem]:
    """A key, or a value of it, that means something to other schedulers alone (`Scheduler.own_keys`)."""
    entry = f"{key}={value}" if value else key
    if entry in make_plugin("schedulers", profile.scheduler).own_keys:
        return
    owned = [each.name for each in make_own("schedulers") if entry in each.own_keys]
    if owned or value not in ("", *GROUPS["launchers"].own, *GROUPS["containers"].own):  # or it is common to all
        owned += [each.name for each in make_installed("schedulers") if entry in each.own_keys]
    if owned:
        owners = " or ".join(f'"{name}"' for name in owned)
        what = f'"{value}" needs scheduler {owners}' if value else f"is for scheduler {owners} only"
        remedy = "remove it, or correct the scheduler"
        yield Problem(where or key, f'{what}, and here it is "{profile.scheduler}"', remedy=remedy)
