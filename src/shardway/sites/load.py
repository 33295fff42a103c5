"""From a site's name, or the path of a user's TOML file, to a checked `SiteProfile`.

Invariant: a loaded profile says "detect" nowhere: such values were read from this machine. Whatever is wrong with
a profile is one `UserError` that names every problem. This module must not know what a fact is used for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardway.errors import Problem, UserError, check_no_problems
from shardway.hardware.catalogue import find_accelerator
from shardway.hardware.probe import Machine, probe_machine
from shardway.sites.evidence import list_stray_sources
from shardway.sites.problems import find_nearest, list_problems
from shardway.sites.schema import CPU, FORMAT, SiteProfile

DETECT = "detect"
"""The value of a key of [node] that is to be read from the machine that loads the profile."""


def list_sites() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    names = (entry.name for entry in files(__package__).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_site(name_or_path: str, machine_probe: Callable[[], Machine] = probe_machine) -> SiteProfile:
    """The shipped profile of that name, or the profile in that file (a path has a "/" or ends in ".toml").

    `machine_probe` is called at most once, and only where the profile says "detect". Raises UserError for an
    unknown name, an unreadable file, broken TOML, a newer format, and for all wrong keys and values at once.
    """
    title, text = _read_profile(name_or_path)
    table = _parse_table(title, text)
    _check_format(title, table)
    return _build_profile(title, _fill_detected(table, machine_probe))


def _read_profile(name_or_path: str) -> tuple[str, str]:
    """What to call the profile in messages, and its text."""
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        return f"site profile {name_or_path}", _read_file(name_or_path)
    if name_or_path not in list_sites():
        raise UserError(_render_unknown_site(name_or_path))
    return f"site profile {name_or_path}", files(__package__).joinpath(f"{name_or_path}.toml").read_text("utf-8")


def _read_file(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"cannot read the site profile {path}: {reason}\n"
            f"  allowed: a readable TOML file, or one of {', '.join(list_sites())}\n"
            "  to do: correct the path"
        ) from error


def _render_unknown_site(name: str) -> str:
    nearest = find_nearest(name, list_sites())
    hint = f'write "{nearest}"' if nearest else "choose one of these"
    return (
        f'there is no site "{name}"\n'
        f"  allowed: {', '.join(list_sites())}, or the path of a profile (with a / or ending in .toml)\n"
        f"  to do: {hint}, or write a profile for your site"
    )


def _parse_table(title: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{title} is not valid TOML: {error}\n  to do: correct that line") from error


def _check_format(title: str, table: Mapping[str, Any]) -> None:
    """Refuse a newer format before its keys are called unknown; a missing one is for the schema to report."""
    found = table.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise UserError(
            f"{title} has format {found}, which is newer than this version of Shardway\n"
            f"  allowed: format {FORMAT}\n"
            "  to do: update Shardway, or write the profile in the format above"
        )


def _fill_detected(table: dict[str, Any], machine_probe: Callable[[], Machine]) -> dict[str, Any]:
    """The table with each "detect" of [node] replaced by what the probe found, None for unknown."""
    node = table.get("node")
    if not isinstance(node, dict):
        return table
    wanted = [key for key in _DETECTORS if node.get(key) == DETECT]
    if not wanted:
        return table
    machine = machine_probe()
    found = {key: _DETECTORS[key](machine) for key in wanted}
    return {**table, "node": {**node, **found}}


def _detect_accelerator(machine: Machine) -> str | None:
    """The catalogue's key; None for a part that it lacks and for a machine with different parts."""
    if not machine.accelerators:
        return CPU
    parts = [find_accelerator(device.name) for device in machine.accelerators]
    keys = {part.key if part else None for part in parts}
    return keys.pop() if len(keys) == 1 else None


_DETECTORS: Mapping[str, Callable[[Machine], int | str | None]] = {
    "cores": lambda machine: machine.usable_cores,
    "memory": lambda machine: machine.memory_bytes,
    "accelerator": _detect_accelerator,
    "accelerators_per_node": lambda machine: len(machine.accelerators),
}


def _build_profile(title: str, table: Mapping[str, Any]) -> SiteProfile:
    try:
        profile = SiteProfile.model_validate(table)
    except ValidationError as error:
        check_no_problems(title, list_problems(error))
        raise
    strays = [
        Problem(
            where=f'sources."{path}"',
            what="names nothing that this profile states",
            remedy="name a key path of the profile, such as node.cores, or remove it",
        )
        for path in list_stray_sources(profile)
    ]
    check_no_problems(title, strays)
    return profile
