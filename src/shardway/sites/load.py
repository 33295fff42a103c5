"""From a site's name, or the path of a user's TOML file, to a checked `SiteProfile`; a profile may extend another.

Invariants:
- A value of the child replaces the parent's, and the parent's source for it, so no source covers a value that it never
  stated.
- A loaded profile has no "detect": such values were read from this machine.
- All problems of a profile are one `UserError`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shardway.earlier_names import rename_profile
from shardway.errors import Problem, UserError, check_no_problems
from shardway.hardware.catalogue import find_accelerator
from shardway.hardware.probe import LocalMachine, probe_machine
from shardway.sites.evidence import find_covering, list_stated
from shardway.sites.find import ProfileFile, find_parent, find_profile, list_sites
from shardway.sites.problems import list_implausible, list_problems, list_wrong_defaults
from shardway.sites.schema import CPU, FORMAT, SiteProfile

# --- merge a profile with the one it extends

_OWN_KEYS = ("extends", "replaces")
"""What a profile says of itself, and does not hand down."""


def merge_tables(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """The child over its parent: tables key by key, queues by their name, lists and values replaced."""
    inherited = {key: value for key, value in parent.items() if key not in (*_OWN_KEYS, "sources")}
    merged = _merge(inherited, {key: value for key, value in child.items() if key != "sources"})
    if "queues" in parent and "queues" in child:
        merged["queues"] = _merge_queues(parent["queues"], child["queues"])
    sources = child.get("sources", {})
    kept = _keep_sources(parent, child)
    if kept or "sources" in child:
        merged["sources"] = {**kept, **sources} if isinstance(sources, Mapping) else sources
    return merged


def _merge(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(parent)
    for key, value in child.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _merge_queues(parent: Any, child: Any) -> Any:
    """Queues of the parent, each with what the child says of it, then those that are the child's alone."""
    if not _are_tables(parent) or not _are_tables(child):
        return child
    names = [queue["name"] for queue in parent]
    changes = {queue["name"]: queue for queue in child if queue.get("name") in names}
    merged = [_merge(queue, changes.get(queue["name"], {})) for queue in parent]
    return [*merged, *(queue for queue in child if queue.get("name") not in names)]


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _keep_sources(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """A source for each fact of the parent that still holds: one a fact, since a common one could cover others now."""
    sources = parent.get("sources", {})
    before, after = list_stated(parent), list_stated(child)
    changed = {fact for fact, value in after.items() if fact not in before or before[fact] != value}
    # A table that the child puts in the place of a value, or a value in that of a table, changes what is below it.
    lost = changed | {fact for fact in before if find_covering(fact, changed) is not None}
    covering = {fact: find_covering(fact, sources) for fact in before if fact not in lost}
    return {fact: sources[path] for fact, path in covering.items() if path is not None}


# --- load a profile by name or path

__all__ = ["DETECT", "list_sites", "load_profile", "load_site", "parse_profile"]

DETECT = "detect"
"""The value of a key of [node] that is to be read from the machine that loads the profile."""


def load_site(name_or_path: str, machine_probe: Callable[[], LocalMachine] = probe_machine) -> SiteProfile:
    """The profile of that name, or the profile in that file (a path has a "/" or ends in ".toml").

    A name is looked for in the user's own folder first (`find.own_folder`), then among the shipped profiles.
    `machine_probe` is called at most once, and only where the profile says "detect". Raises UserError for an
    unknown name, an unreadable file, broken TOML, a newer format, a profile of the user's that has the name of a
    shipped one without saying so, and for all wrong keys and values at once.
    """
    return load_profile(find_profile(name_or_path), machine_probe)


def load_profile(file: ProfileFile, machine_probe: Callable[[], LocalMachine] = probe_machine) -> SiteProfile:
    """The checked profile in a file that `find` found. Raises UserError as `load_site` does."""
    table = _read_table(file, ())
    return _build_profile(file.title, _fill_detected(table, machine_probe))


def flatten_profile(name_or_path: str) -> dict[str, Any]:
    """The table of a profile together with what it extends, without sources: what stands for it where its files are
    not seen. Raises UserError as `load_site` does for a file that cannot be read."""
    table = _read_table(find_profile(name_or_path), ())
    return {key: value for key, value in table.items() if key not in ("extends", "replaces", "sources")}


def parse_profile(title: str, text: str, machine_probe: Callable[[], LocalMachine] = probe_machine) -> SiteProfile:
    """The checked profile in a text, which `title` names in messages. Raises UserError with all that is wrong."""
    file = ProfileFile(title, "file")
    return _build_profile(file.title, _fill_detected(_extend(file, text, ()), machine_probe))


# --- the table of a file, with what it extends


def _read_table(file: ProfileFile, below: Sequence[ProfileFile]) -> dict[str, Any]:
    """The table of a profile over those that it extends; `below` are the profiles that extend this one."""
    return _extend(file, file.read_text(), below)


def _extend(file: ProfileFile, text: str, below: Sequence[ProfileFile]) -> dict[str, Any]:
    table = rename_profile(_parse_table(file.title, text))
    _check_format(file.title, table)
    _check_name(file, table)
    parent_name = table.get("extends")
    if not isinstance(parent_name, str) or not parent_name:
        return table
    parent = find_parent(parent_name, file)
    chain = (*below, file)
    if any(_is_same(parent, other) for other in chain):
        names = " -> ".join([*(link.name for link in chain), parent.name])
        raise UserError(f"{file.title} extends itself: {names}\n  to do: remove one of these lines `extends`")
    inherited = _read_table(parent, chain)
    _build_profile(f"{parent.title}, which {file.title} extends", _without_detected(inherited))
    return merge_tables(inherited, table)


def _is_same(one: ProfileFile, other: ProfileFile) -> bool:
    if one.path is None or other.path is None:
        return one == other
    return one.path.resolve() == other.path.resolve()


def _parse_table(title: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number or a nesting that Python cannot hold
        raise UserError(f"{title} is not valid TOML: {error}\n  to do: correct that line") from None


def _check_format(title: str, table: Mapping[str, Any]) -> None:
    """Refuse a newer format before its keys are called unknown; a missing one is for the schema to report."""
    found = table.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise UserError(
            f"{title} has format {found}, which is newer than this version of Shardway\n"
            f"  allowed: format {FORMAT}\n"
            "  to do: update Shardway, or write the profile in the format above"
        )


def _check_name(file: ProfileFile, table: Mapping[str, Any]) -> None:
    """A profile that is found by its name bears it, and one of the user's takes a shipped one's place only on
    purpose."""
    if file.origin not in ("yours", "installed"):
        return
    problems = []
    if isinstance(name := table.get("name"), str) and name != file.name:
        what, remedy = f'"{name}" is not the name of the file', f'write "{file.name}", or rename the file'
        problems.append(Problem("name", what, allowed=f'"{file.name}"', remedy=remedy))
    if file.shadows and table.get("extends") != file.name and table.get("replaces") is not True:
        remedy = f'rename the file, or write extends = "{file.name}" to build on the shipped one, or replaces = true'
        problems.append(Problem("name", f'a shipped profile is called "{file.name}" too', remedy=remedy))
    check_no_problems(file.title, problems)


# --- values read from this machine


def _wanted(table: Mapping[str, Any]) -> list[str]:
    node = table.get("node")
    return [key for key in _DETECTORS if node.get(key) == DETECT] if isinstance(node, dict) else []


def _fill_detected(table: dict[str, Any], machine_probe: Callable[[], LocalMachine]) -> dict[str, Any]:
    """The table with each "detect" of [node] replaced by what the probe found, None for unknown."""
    wanted = _wanted(table)
    if not wanted:
        return table
    machine = machine_probe()
    found = {key: _DETECTORS[key](machine) for key in wanted}
    return {**table, "node": {**table["node"], **found}}


def _without_detected(table: dict[str, Any]) -> dict[str, Any]:
    """The table as far as it can be checked without a look at this machine."""
    wanted = _wanted(table)
    return {**table, "node": {**table["node"], **dict.fromkeys(wanted)}} if wanted else table


def _detect_accelerator(machine: LocalMachine) -> str | None:
    """The catalogue's key; None for a part that it lacks and for a machine with different parts."""
    if not machine.accelerators:
        return CPU
    parts = [find_accelerator(device.name) for device in machine.accelerators]
    keys = {part.key if part else None for part in parts}
    return keys.pop() if len(keys) == 1 else None


_DETECTORS: Mapping[str, Callable[[LocalMachine], int | str | None]] = {
    "cores": lambda machine: machine.usable_cores,
    "memory": lambda machine: machine.memory_bytes,
    "accelerator": _detect_accelerator,
    "accelerators_per_node": lambda machine: len(machine.accelerators),
}


# --- the check


@dataclass(frozen=True)
class _ParsedProfile:
    """The profile of a table, or what is wrong with it and the profile of the rest where there is one."""

    profile: SiteProfile | None
    problems: list[Problem]
    dropped: tuple[str, ...] = ()


def _build_profile(title: str, table: Mapping[str, Any]) -> SiteProfile:
    """The profile. Raises UserError with all problems: those of single keys, and those of keys with each other."""
    attempt = _validate(table)
    problems = list(attempt.problems)
    queues: tuple[str, ...] = ()
    if attempt.profile is not None:
        queues = tuple(queue.name for queue in attempt.profile.queues)
        found = list_implausible(attempt.profile)
        problems += [problem for problem in found if not _is_about(problem.where, attempt.dropped)]
    problems += list_wrong_defaults(table.get("defaults"), () if "queues" in attempt.dropped else queues)
    check_no_problems(title, problems)
    return attempt.profile if attempt.profile is not None else SiteProfile.model_validate(table)


def _validate(table: Mapping[str, Any]) -> _ParsedProfile:
    """Validate a table; where that fails, the rest of it without the top-level keys that are wrong."""
    try:
        return _ParsedProfile(SiteProfile.model_validate(table), [])
    except ValidationError as error:
        problems = list_problems(error)
        dropped = tuple({str(finding["loc"][0]) if finding["loc"] else "queues" for finding in error.errors()})
    required = {"format": FORMAT, "name": "?", "title": "?"}
    rest = {key: value for key, value in table.items() if key not in dropped}
    if "scheduler" in dropped:
        return _ParsedProfile(None, problems, dropped)
    try:
        return _ParsedProfile(SiteProfile.model_validate({**required, **rest}), problems, dropped)
    except ValidationError:
        return _ParsedProfile(None, problems, dropped)


def _is_about(where: str, dropped: Sequence[str]) -> bool:
    """Whether a problem is about a part that was left out of the check, so that it may not be one."""
    path = where.removeprefix('sources."')
    return any(path == key or path.startswith((f"{key}.", f'{key}"')) for key in dropped)
