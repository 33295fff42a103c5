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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardway.errors import Problem
from shardway.hardware.catalogue import load_accelerators, load_links
from shardway.plugins import make_installed, make_own, make_plugin
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
        return _render_fact(self.path, self.value)


def list_facts(profile: SiteProfile) -> tuple[str, ...]:
    """Key paths of everything that the profile states about its site, in the profile's order."""
    return tuple(_list_values(profile))


def describe_facts(profile: SiteProfile) -> tuple[SiteFact, ...]:
    """Everything that the profile states about its site, each with its source."""
    return tuple(
        SiteFact(path, value, _find_source(path, profile.sources)) for path, value in _list_values(profile).items()
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


def _find_source(fact: str, sources: Mapping[str, FactSource]) -> FactSource | None:
    covering = find_covering(fact, sources)
    return None if covering is None else sources[covering]


def _list_values(profile: SiteProfile) -> dict[str, Any]:
    return list_stated(profile.model_dump(exclude_unset=True, exclude_none=True, exclude=_NOT_FACTS))


def _covers(path: str, fact: str) -> bool:
    return fact == path or fact.startswith(f"{path}.")


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{path}", leaf) for path, leaf in _leaves(value))
        else:
            yield key, value


def _render_fact(path: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if path == "node.memory":
        return render_bytes(value)
    if path.endswith("_walltime") and isinstance(value, int | float):
        return render_seconds(value)
    return str(value).strip()


# --- Problems of a profile: of its schema, of keys that contradict each other, of impossible numbers


def _list_tables() -> dict[str, type[BaseModel]]:
    """Key of a profile -> the schema of the table, or of each table of the list, that stands there."""
    tables: dict[str, type[BaseModel]] = {"": SiteProfile}
    for key, field in SiteProfile.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                tables[key] = kind
    return tables


_TABLES = _list_tables()

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
    where = _render_path(finding["loc"])
    match finding["type"]:
        case "extra_forbidden":
            return _unknown_key(where, finding["loc"])
        case "missing":
            return Problem(where=where, what="is missing", remedy=_describe_missing(finding["loc"]))
        case "value_error":
            return _wrong_value(where, finding)
    value = _render_value(finding["input"])
    return Problem(where=where, what=f"{value} is not allowed", allowed=_describe_allowed(finding))


def _unknown_key(where: str, location: Sequence[int | str]) -> Problem:
    allowed = list(_table_of(location).model_fields)
    nearest = find_nearest(str(location[-1]), allowed)
    remedy = f'write "{nearest}"' if nearest else "remove it"
    return Problem(where=where, what="is not a key of a site profile", allowed=", ".join(allowed), remedy=remedy)


def _wrong_value(where: str, finding: ErrorDetails) -> Problem:
    """A finding of our own validators; those of catalogue keys offer the nearest one."""
    what = str(finding["ctx"]["error"])
    catalogue = {"accelerator": (CPU, *load_accelerators()), "link": tuple(load_links())}
    keys = catalogue.get(str(finding["loc"][-1])) if finding["loc"] else None
    if keys is None:
        text, _, allowed = what.partition("; allowed: ")
        return Problem(where=where or "profile", what=text, allowed=allowed)
    nearest = find_nearest(finding["input"], keys)
    return Problem(
        where=where,
        what=what,
        allowed=", ".join(keys),
        remedy=f'write "{nearest}"' if nearest else "choose one of these, or leave it out where yours is not there",
    )


def _describe_allowed(finding: ErrorDetails) -> str:
    """What may stand in the place of a wrong value; pydantic's own sentence for a finding we do not know."""
    known = _ALLOWED.get(finding["type"])
    return known.format(**_quoted(finding.get("ctx", {}))) if known else finding["msg"]


def _quoted(context: dict[str, Any]) -> dict[str, Any]:
    """pydantic's "'local', 'slurm' or 'pbs'" in our form; everything else as it is."""
    expected = str(context.get("expected", "")).replace(" or ", ", ").replace("'", '"')
    return {**context, "expected": expected}


def _render_value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _render_path(location: Sequence[int | str]) -> str:
    """A key path; the place in a list counts from 1: ("queues", 0, "name") -> "queues[1].name"."""
    path = ""
    for part in location:
        if part == "[key]":  # the finding is about the name of a key, which stands before it
            continue
        name = f'"{part}"' if "." in str(part) else str(part)
        path += f"[{part + 1}]" if isinstance(part, int) else f".{name}" if path else name
    return path


def _table_of(location: Sequence[int | str]) -> type[BaseModel]:
    return _TABLES.get(str(location[0]), SiteProfile) if len(location) > 1 else SiteProfile


def _describe_missing(location: Sequence[int | str]) -> str:
    key = str(location[-1])
    return f"add {key}: {_table_of(location).model_fields[key].description}"


# --- contradictions and impossible numbers

_MOST = {"cores": 4096, "threads_per_core": 8, "accelerators_per_node": 64}
_MEMORY = (2**26, 2**47)
_WALLTIME = (30.0, 366 * 86400.0)
_MOST_NODES = 1_000_000


def list_implausible(profile: SiteProfile) -> list[Problem]:
    """Everything that a checked profile says and that cannot be so; empty for a good one."""
    checks = (_check_node, _check_queues, _check_request, _check_start, _check_containers, _check_internet)
    strays = (_describe_stray(path) for path in list_stray_sources(profile))
    return [*(problem for check in checks for problem in check(profile)), *strays]


def list_wrong_defaults(table: Any, queues: tuple[str, ...]) -> list[Problem]:
    """Keys and values of [defaults] that the [site] section of a run file does not take.

    `queues` are the names of the profile's queues; a default queue must be one of them where there are any.
    """
    if not isinstance(table, Mapping) or not table:
        return []
    from shardway.runfile.schema import SiteSection

    allowed = [key for key in SiteSection.model_fields if key != "name"]
    unknown = [_unknown_default(str(key), allowed) for key in table if key not in allowed]
    known = {key: value for key, value in table.items() if key in allowed}
    try:
        SiteSection.model_validate(known)
    except ValidationError as error:
        return unknown + _wrong_defaults(error)
    if queues and known.get("queue") and known["queue"] not in queues:
        what = f'"{known["queue"]}" is no queue of this profile'
        return [*unknown, Problem("defaults.queue", what, allowed=", ".join(queues))]
    return unknown


def _unknown_default(key: str, allowed: list[str]) -> Problem:
    nearest = find_nearest(key, allowed)
    remedy = f'write "{nearest}"' if nearest else "remove it"
    return Problem(f"defaults.{key}", "is not a key of [site] in a run file", allowed=", ".join(allowed), remedy=remedy)


def _wrong_defaults(error: ValidationError) -> list[Problem]:
    from shardway.runfile.load import find_problems

    findings = error.errors(include_url=False)
    for finding in findings:
        finding["loc"] = ("site", *finding["loc"])
    return [replace(found, where=f"defaults.{found.where.split('.')[1]}") for found in find_problems(findings, {}, "")]


def _describe_stray(path: str) -> Problem:
    return Problem(
        where=f'sources."{path}"',
        what="names nothing that this profile states",
        remedy="name a key path of the profile, such as node.cores, or remove it",
    )


def _check_node(profile: SiteProfile) -> Iterator[Problem]:
    node = profile.node
    for key, most in _MOST.items():
        value = getattr(node, key)
        if value is not None and value > most:
            yield Problem(f"node.{key}", f"{value} is more than any node has", allowed=f"up to {most}")
    least, most_bytes = _MEMORY
    if node.memory is not None and not least <= node.memory <= most_bytes:
        allowed = f"{render_bytes(least)} to {render_bytes(most_bytes)}"
        yield Problem("node.memory", f"{format_bytes(node.memory)} is no memory of a node", allowed=allowed)


def _check_queues(profile: SiteProfile) -> Iterator[Problem]:
    shortest, longest = _WALLTIME
    for queue in profile.queues:
        where = f"queues.{queue.name}"
        for key in ("max_walltime", "default_walltime"):
            value = getattr(queue, key)
            if value is not None and not shortest <= value <= longest:
                allowed = f"{render_seconds(shortest)} to {render_seconds(longest)}"
                yield Problem(f"{where}.{key}", f"{render_seconds(value)} is no wall-time", allowed=allowed)
        if queue.max_nodes is not None and queue.max_nodes > _MOST_NODES:
            yield Problem(f"{where}.max_nodes", f"{queue.max_nodes} is more than any machine has")
        for key in ("partition", "qos"):
            if getattr(queue, key) is not None:
                yield from _check_own(profile, f"queues.{key}", where=f"{where}.{key}")


def _check_request(profile: SiteProfile) -> Iterator[Problem]:
    asked, allowed = profile.request.accelerators, _scheduler(profile).accelerator_requests
    if asked is not None and asked not in allowed:
        words = ", ".join(f'"{word}"' for word in allowed)
        yield Problem("request.accelerators", f'"{asked}" is no request of {profile.scheduler}', allowed=words)
    if profile.request.constraint:
        yield from _check_own(profile, "request.constraint")


def _check_start(profile: SiteProfile) -> Iterator[Problem]:
    ranks = profile.node.accelerators_per_node
    if profile.launcher is not None:
        yield from _check_own(profile, "launcher", profile.launcher)
    masks = [int(mask, 16) for mask in profile.start.masks]
    if masks and ranks and len(masks) != ranks:
        what = f"{len(masks)} masks for {ranks} accelerators of a node"
        yield Problem("start.bind", what, allowed="one mask for each local rank")
    if any(first & second for at, first in enumerate(masks) for second in masks[:at]) or not all(masks):
        what = "two masks share a core, or a mask has none"
        yield Problem("start.bind", what, allowed="masks without a common bit, none of them 0")


def _check_containers(profile: SiteProfile) -> Iterator[Problem]:
    if profile.container is not None:
        yield from _check_own(profile, "container", profile.container)
    if profile.containers.by_scheduler:
        yield from _check_own(profile, "containers.by_scheduler")


def _check_internet(profile: SiteProfile) -> Iterator[Problem]:
    internet = profile.internet
    if "proxy" in (internet.nodes, internet.login) and internet.proxy is None:
        what = 'is missing, while internet.nodes or internet.login is "proxy"'
        yield Problem("internet.proxy", what, remedy="add proxy: http://HOST:PORT")


def _scheduler(profile: SiteProfile) -> Any:
    """The site's scheduler (`launch.schedulers.base.Scheduler`)."""
    return make_plugin("schedulers", profile.scheduler)


def _check_own(profile: SiteProfile, key: str, value: str = "", where: str = "") -> Iterator[Problem]:
    """A key, or a value of it, that means something to other schedulers alone (`Scheduler.own_keys`)."""
    entry = f"{key}={value}" if value else key
    if entry in _scheduler(profile).own_keys:
        return
    known = (*make_own("schedulers"), *make_installed("schedulers"))
    owners = " or ".join(f'"{each.name}"' for each in known if entry in each.own_keys)
    if owners:
        what = f'"{value}" needs scheduler {owners}' if value else f"is for scheduler {owners} only"
        remedy = "remove it, or correct the scheduler"
        yield Problem(where or key, f'{what}, and here it is "{profile.scheduler}"', remedy=remedy)


def find_nearest(word: str, words: Iterable[str]) -> str | None:
    """The word that was probably meant, or None where none is similar."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1)), None)
