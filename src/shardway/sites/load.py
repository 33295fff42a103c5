"""Finds a site profile and reads it: shipped, of the user, of another package, or at a path; a profile may extend
another.

Invariants:
- A name means one file. A user's file with the name of a shipped profile is found first, and marked by `shadows`.
- An existing file is never overwritten, and a new one appears complete.
- A value of the child replaces the parent's, and the parent's source for it, so no source covers a value that it never
  stated.
- A loaded profile has no "detect": such values were read from this machine.
- All problems of a profile are one `UserError`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from shardway.earlier_names import rename_profile
from shardway.errors import Problem, UserError, check_no_problems
from shardway.hardware.catalogue import find_accelerator
from shardway.hardware.probe import LocalMachine, probe_machine
from shardway.places import expand_place, find_own_folder
from shardway.plugins import GROUPS, is_registered, list_installed, load_plugin
from shardway.rundir.file_io import write_new
from shardway.sites.problems import (
    find_covering,
    find_nearest,
    list_implausible,
    list_problems,
    list_stated,
    list_wrong_defaults,
)
from shardway.sites.schema import CPU, FORMAT, SiteProfile

# --- Where site profiles are: shipped with Shardway, in the user's own folder, in another package (entry points of
# the group `shardway.sites`), or at a path; and how one is saved there

Origin = Literal["shipped", "yours", "installed", "file"]

_SUFFIX = ".toml"


class UnknownSite(UserError):
    """No profile has this name."""


@dataclass(frozen=True)
class ProfileFile:
    """One profile: its name (a path for `origin` "file") and where it comes from.

    `path` is None for a shipped one and one of another package. `shadows`: a shipped profile has the same name.
    """

    name: str
    origin: Origin
    path: Path | None = None
    shadows: bool = False

    @property
    def title(self) -> str:
        """What to call it in messages."""
        return f"site profile {self.path if self.origin == 'yours' else self.name}"

    def read_text(self) -> str:
        """Its text. Raises UserError where the file cannot be read."""
        if self.path is None:
            return str(load_plugin("sites", self.name))
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError for a name that no file can have
            not_text = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            reason = error.strerror if isinstance(error, OSError) else not_text
            raise UserError(
                f"cannot read the {self.title}: {reason}\n"
                f"  allowed: a readable TOML file, or one of {', '.join(list_sites())}\n"
                "  to do: correct the path"
            ) from error


def own_folder() -> Path | None:
    """$XDG_CONFIG_HOME/shardway/sites, or that below ~/.config; None for an account without a home."""
    folder = find_own_folder("CONFIG")
    return folder / "sites" if folder else None


def describe_own_folder() -> str:
    """The folder in words, with the reason where nothing in it can be read."""
    folder = own_folder()
    if folder is None:
        return "none, since this account has no home folder"
    return f"{folder}{_list_own_files()[1]}"


def list_shipped() -> tuple[str, ...]:
    """Names of the profiles that come with Shardway, sorted."""
    return tuple(sorted(GROUPS["sites"].own))


def list_profiles() -> tuple[ProfileFile, ...]:
    """What every name means, sorted by name: profiles of the user's own folder, and shipped ones and those of other
    packages that none shadows."""
    found = {**{name: ProfileFile(name, "installed") for name in list_installed("sites")}, **_list_ours()}
    return tuple(found[name] for name in sorted(found))


def _list_ours() -> dict[str, ProfileFile]:
    shipped = {name: ProfileFile(name, "shipped") for name in list_shipped()}
    return {**shipped, **{path.stem: _own(path, shipped) for path in _list_own_files()[0]}}


def list_sites() -> tuple[str, ...]:
    """Names of all profiles, shipped and the user's own, sorted."""
    return tuple(profile.name for profile in list_profiles())


def find_profile(name_or_path: str, beside: Path | None = None) -> ProfileFile:
    """The profile of that name, or at that path (with a "/" or ending in .toml), which is relative to `beside`.

    Raises UnknownSite for a name that no profile has.
    """
    if "/" in name_or_path or name_or_path.endswith(_SUFFIX):
        path = expand_place(name_or_path)
        return ProfileFile(name_or_path, "file", beside / path if beside else path)
    if found := _list_ours().get(name_or_path):
        return found
    if is_registered("sites", name_or_path):
        return ProfileFile(name_or_path, "installed")
    raise UnknownSite(_render_unknown_site(name_or_path))


def find_parent(name_or_path: str, child: ProfileFile) -> ProfileFile:
    """The profile that `child` extends; its own name means the shipped one. Raises UserError."""
    if child.origin == "yours" and child.shadows and name_or_path == child.name:
        return ProfileFile(child.name, "shipped")
    return find_profile(name_or_path, child.path.parent if child.path else None)


def _list_own_files() -> tuple[list[Path], str]:
    """The profiles in the user's own folder; in words, why there are none where it may not be looked at.

    It may be another account's (`sudo` keeps HOME), and shipped profiles do not need it.
    """
    folder = own_folder()
    if folder is None:
        return [], ""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return [], ""
    except OSError as error:
        return [], f", which cannot be read ({error.strerror})"
    return [folder / name for name in names if name.endswith(_SUFFIX) and not name.startswith(".")], ""


def _own(path: Path, shipped: Iterable[str]) -> ProfileFile:
    return ProfileFile(path.stem, "yours", path, shadows=path.stem in shipped)


def _render_unknown_site(name: str) -> str:
    nearest = find_nearest(name, list_sites())
    hint = f'write "{nearest}"' if nearest else "choose one of these"
    unread = _list_own_files()[1]
    own = f"\n  your own profiles stand in {own_folder()}{unread}" if unread else ""
    return (
        f'there is no site "{name}"\n'
        f"  allowed: {', '.join(list_sites())}, or the path of a profile (with a / or ending in .toml){own}\n"
        f"  to do: {hint}, or write a profile for your site: `shardway sites probe`"
    )


# --- save a profile in the user's own folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def keep_profile(name: str, text: str) -> Path:
    """Write a profile as NAME.toml and return its path.

    Raises UserError for a name that is no file's or that of a shipped profile, for a file that is there, and where the
    folder cannot be written.
    """
    path = find_place(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = write_new(path, text)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"cannot write {path}: {reason}\n  to do: write the profile elsewhere: without --write"
        ) from error
    if not is_new:
        raise _refuse(path)
    return path


def find_place(name: str) -> Path:
    """Where a new profile of that name belongs. Raises UserError as `keep_profile` does, before any work is done."""
    if not _NAME.fullmatch(name) or name.endswith(".toml"):
        raise UserError(
            f'"{name}" is no name of a site\n'
            "  allowed: letters, digits, - _ and ., without .toml\n"
            "  to do: choose another"
        )
    if name in list_shipped():
        raise UserError(
            f'"{name}" is the name of a shipped profile\n'
            f'  to do: choose another name, or write a profile by hand that says extends = "{name}"'
        )
    folder = own_folder()
    if folder is None:
        raise UserError(
            "this account has no home folder for profiles\n  to do: set XDG_CONFIG_HOME, or leave out --write"
        )
    path = folder / f"{name}.toml"
    if os.path.lexists(path):
        raise _refuse(path)
    return path


def _refuse(path: Path) -> UserError:
    return UserError(
        f"{path} is there and is not written over\n  to do: choose another name, or move the file away first"
    )


# --- From a site's name, or the path of a user's TOML file, to a checked `SiteProfile`; a profile may extend
# another

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
