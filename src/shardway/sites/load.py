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

import contextlib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
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
    list_implausible,
    list_problems,
    list_stated,
    list_wrong_defaults,
    suggest,
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
    """One profile: its name (a path for `origin` "file") and where it comes from. `path` is None for a shipped one and
    one of another package. `shadows`: a shipped profile has the same name."""

    name: str
    origin: Origin
    path: Path | None = None
    shadows: bool = False

    @property
    def title(self) -> str:
        return f"site profile {self.path if self.origin == 'yours' else self.name}"

    def read_text(self) -> str:
        """Its text. Raises UserError where the file cannot be read."""
        if self.path is None:
            return str(load_plugin("sites", self.name))
        try:
            return self.path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
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
    return "none, since this account has no home folder" if folder is None else f"{folder}{_list_own_files()[1]}"


def _list_own_files() -> tuple[list[Path], str]:
    """The profiles in the user's own folder; in words, why there are none where it may not be looked at. It may be
    another account's (`sudo` keeps HOME), and shipped profiles do not need it."""
    folder = own_folder()
    try:
        names = sorted(os.listdir(folder)) if folder else []
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        return [], f", which cannot be read ({error.strerror})"
    return [folder / name for name in names if folder and name.endswith(_SUFFIX) and not name.startswith(".")], ""


def list_shipped() -> tuple[str, ...]:
    """Names of the profiles that come with Shardway, sorted."""
    return tuple(sorted(GROUPS["sites"].own))


def _list_ours() -> dict[str, ProfileFile]:
    shipped = {name: ProfileFile(name, "shipped") for name in list_shipped()}
    own = _list_own_files()[0]
    return shipped | {path.stem: ProfileFile(path.stem, "yours", path, path.stem in shipped) for path in own}


def list_profiles() -> tuple[ProfileFile, ...]:
    """What every name means, sorted by name: profiles of the user's own folder, and shipped ones and those of other
    packages that none shadows."""
    found = {name: ProfileFile(name, "installed") for name in list_installed("sites")} | _list_ours()
    return tuple(found[name] for name in sorted(found))


def list_sites() -> tuple[str, ...]:
    """Names of all profiles, shipped and the user's own, sorted."""
    return tuple(profile.name for profile in list_profiles())


def find_profile(name_or_path: str, beside: Path | None = None) -> ProfileFile:
    """The profile of that name, or at that path (with a "/" or ending in .toml), which is relative to `beside`. Raises
    UnknownSite for a name that no profile has."""
    if "/" in name_or_path or name_or_path.endswith(_SUFFIX):
        path = expand_place(name_or_path)
        return ProfileFile(name_or_path, "file", beside / path if beside else path)
    if found := _list_ours().get(name_or_path):
        return found
    if is_registered("sites", name_or_path):
        return ProfileFile(name_or_path, "installed")
    unread = _list_own_files()[1]
    own = f"\n  your own profiles stand in {own_folder()}{unread}" if unread else ""
    raise UnknownSite(
        f'there is no site "{name_or_path}"\n'
        f"  allowed: {', '.join(list_sites())}, or the path of a profile (with a / or ending in .toml){own}\n"
        f"  to do: {suggest(name_or_path, list_sites(), 'choose one of these')}, or write a profile for your site: "
        "`shardway sites probe`"
    )


# --- save a profile in the user's own folder


def keep_profile(name: str, text: str) -> Path:
    """Write a profile as NAME.toml and return its path. Raises UserError as `find_place` does, and where the folder
    cannot be written."""
    path = find_place(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = write_new(path, text)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"cannot write {path}: {reason}\n  to do: make the folder writable, or set XDG_CONFIG_HOME to one that is"
        ) from error
    if not is_new:
        raise _refuse(path)
    return path


def find_place(name: str) -> Path:
    """Where a new profile of that name belongs. Raises UserError for a name that is no file's or that of a shipped
    profile, and for a file that is there."""
    if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith(".toml"):
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
            "this account has no home folder for profiles\n  to do: set XDG_CONFIG_HOME to a folder that you may write"
        )
    path = folder / f"{name}.toml"
    if os.path.lexists(path):
        raise _refuse(path)
    return path


def _refuse(path: Path) -> UserError:
    return UserError(
        f"{path} is there and is not written over\n  to do: choose another name, or move the file away first"
    )


# --- a profile over the one that it extends


def merge_tables(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """The child over its parent: tables key by key, queues by their name, lists and values replaced. What a profile
    says of itself (`extends`, `replaces`) is not handed down."""
    inherited = {key: value for key, value in parent.items() if key not in ("extends", "replaces", "sources")}
    merged = _merge(inherited, {key: value for key, value in child.items() if key != "sources"})
    old: Any = parent.get("queues")
    new: Any = child.get("queues")
    if _are_tables(old) and _are_tables(new):
        # Queues of the parent, each with what the child says of it, then those that are the child's alone.
        names = [queue["name"] for queue in old]
        changes = {queue["name"]: queue for queue in new if queue.get("name") in names}
        alone = [queue for queue in new if queue.get("name") not in names]
        merged["queues"] = [*(_merge(queue, changes.get(queue["name"], {})) for queue in old), *alone]
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

DETECT = "detect"
"""The value of a key of [node] that is to be read from the machine that loads the profile."""


def load_site(name_or_path: str, machine_probe: Callable[[], LocalMachine] = probe_machine) -> SiteProfile:
    """The profile of that name, or the profile in that file (a path has a "/" or ends in ".toml").

    A name is looked for in the user's own folder first, then among the shipped profiles.
    `machine_probe` is called at most once, and only where the profile says "detect". Raises UserError for an
    unknown name, an unreadable file, broken TOML, a newer format, a profile of the user's that has the name of a
    shipped one without saying so, and for all wrong keys and values at once.
    """
    return load_profile(find_profile(name_or_path), machine_probe)


def load_profile(file: ProfileFile, machine_probe: Callable[[], LocalMachine] = probe_machine) -> SiteProfile:
    """The checked profile in a file. Raises UserError as `load_site` does."""
    return _build_profile(file.title, _fill_detected(_extend(file, file.read_text(), ()), machine_probe))


def flatten_profile(name_or_path: str) -> dict[str, Any]:
    """The table of a profile together with what it extends, without sources: what stands for it where its files are
    not seen. Raises UserError as `load_site` does for a file that cannot be read."""
    file = find_profile(name_or_path)
    table = _extend(file, file.read_text(), ())
    return {key: value for key, value in table.items() if key not in ("extends", "replaces", "sources")}


def parse_profile(title: str, text: str, machine_probe: Callable[[], LocalMachine] = probe_machine) -> SiteProfile:
    """The checked profile in a text, which `title` names in messages. Raises UserError with all that is wrong."""
    file = ProfileFile(title, "file")
    return _build_profile(file.title, _fill_detected(_extend(file, text, ()), machine_probe))


# --- the table of a file, with what it extends


def _extend(file: ProfileFile, text: str, below: Sequence[ProfileFile]) -> dict[str, Any]:
    """The table of a profile over those that it extends; `below` are the profiles that extend this one."""
    try:
        table = rename_profile(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # also for a number or a nesting that Python cannot hold
        raise UserError(f"{file.title} is not valid TOML: {error}\n  to do: correct that line") from None
    found = table.get("format")
    # A newer format is refused before its keys are called unknown; a missing one is for the schema to report.
    if isinstance(found, int) and found > FORMAT:
        raise UserError(
            f"{file.title} has format {found}, which is newer than this version of Shardway\n"
            f"  allowed: format {FORMAT}\n"
            "  to do: update Shardway, or write the profile in the format above"
        )
    _check_name(file, table)
    parent_name = table.get("extends")
    if not isinstance(parent_name, str) or not parent_name:
        return table
    if file.shadows and parent_name == file.name:
        parent = ProfileFile(file.name, "shipped")
    else:
        parent = find_profile(parent_name, file.path.parent if file.path else None)
    chain = (*below, file)
    places = [each.path.resolve() if each.path else each for each in chain]
    if (parent.path.resolve() if parent.path else parent) in places:
        names = " -> ".join([*(link.name for link in chain), parent.name])
        raise UserError(f"{file.title} extends itself: {names}\n  to do: remove one of these lines `extends`")
    inherited = _extend(parent, parent.read_text(), chain)
    _build_profile(f"{parent.title}, which {file.title} extends", _fill_detected(inherited, None))
    return merge_tables(inherited, table)


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


def _fill_detected(table: dict[str, Any], machine_probe: Callable[[], LocalMachine] | None) -> dict[str, Any]:
    """The table with each "detect" of [node] replaced by what the probe found; None for unknown, and without a
    probe."""
    node = table.get("node")
    wanted = [key for key in _DETECTORS if node.get(key) == DETECT] if isinstance(node, dict) else []
    if not wanted:
        return table
    machine = machine_probe() if machine_probe else None
    return {**table, "node": {**table["node"], **{key: machine and _DETECTORS[key](machine) for key in wanted}}}


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


def _build_profile(title: str, table: Mapping[str, Any]) -> SiteProfile:
    """The profile. Raises UserError with all problems: those of single keys, and those of keys with each other, which
    are looked for in the rest of the table where a top-level key of it is wrong."""
    profile, problems, dropped = None, list[Problem](), set[str]()
    try:
        profile = SiteProfile.model_validate(table)
    except ValidationError as error:
        problems += list_problems(error)
        dropped = {str(finding["loc"][0]) if finding["loc"] else "queues" for finding in error.errors()}
        rest = {key: value for key, value in table.items() if key not in dropped}
        if "scheduler" not in dropped:
            with contextlib.suppress(ValidationError):
                profile = SiteProfile.model_validate({"format": FORMAT, "name": "?", "title": "?", **rest})
    queues: tuple[str, ...] = ()
    if profile is not None:
        queues = tuple(queue.name for queue in profile.queues) if "queues" not in dropped else ()
        for problem in list_implausible(profile):
            path = problem.where.removeprefix('sources."')
            # A problem of a part that was left out of the check may be none.
            if not any(path == key or path.startswith((f"{key}.", f'{key}"')) for key in dropped):
                problems.append(problem)
    problems += list_wrong_defaults(table.get("defaults"), queues)
    check_no_problems(title, problems)
    return profile if profile is not None else SiteProfile.model_validate(table)
