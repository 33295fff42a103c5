"""Which runs the user has submitted, and which of them a word means.

Invariants:
- A torn or foreign line is skipped, and a registry that cannot be written stops no verb.
- A word that could mean several runs is refused, with all of them named.

One line of JSON per run in $XDG_STATE_HOME/shardway/submitted-runs (default ~/.local/state), appended in one write; a
line with `"gone": true` revokes those before it. It has only the places of run directories; the state of a run is in
its directory.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shardway.errors import JobError, UserError
from shardway.places import find_own_folder
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import is_there, list_names


@dataclass(frozen=True)
class Known:
    """A run that was submitted: its directory on `host` ("": this machine), and the site."""

    run: str
    host: str = ""
    site: str = ""


def render_known(known: Known) -> str:
    """As people name it: the directory, with its host before it where that is another one."""
    return f"{known.host}:{known.run}" if known.host else known.run


# --- the registry of submitted runs


def registry_path() -> Path | None:
    """The file of the registry; None for an account without a home, which has none."""
    folder = find_own_folder("STATE")
    return folder / "submitted-runs" if folder else None


def remember(known: Known) -> bool:
    """Add a run; one that is there already is not added again. Gives whether it is new."""
    if known in read_known():
        return False
    _append(asdict(known))
    return True


def forget(known: Known) -> None:
    """Revoke a run of which nothing is left."""
    _append({**asdict(known), "gone": True})


def _append(table: Mapping[str, object]) -> None:
    if target := registry_path():
        with contextlib.suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "a", encoding="utf-8") as file:
                file.write(json.dumps(table) + "\n")


def read_known() -> list[Known]:
    """The runs that are known, oldest first, each once."""
    source = registry_path()
    try:
        lines = source.read_text(encoding="utf-8").splitlines() if source else []
    except (OSError, UnicodeDecodeError):
        return []
    found: dict[Known, None] = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            table = json.loads(line)
            known = Known(str(table["run"]), str(table.get("host", "")), str(table.get("site", "")))
            if table.get("gone", False):
                found.pop(known, None)
            else:
                found[known] = None
    return list(found)


# --- the run that a word means


def find_known(word: str) -> Known:
    """The run that is meant. Raises UserError for none and for several."""
    if remote := re.fullmatch(r"(?P<host>[^/:]+):(?P<run>[/~].*)", word):
        return Known(remote["run"], remote["host"])
    if is_run(Path(word)):
        return Known(word)
    named = [known for known in read_known() if word in (Path(known.run).name, known.run) and _may_be_there(known)]
    if len(named) == 1:
        return named[0]
    if named:
        listed = "\n".join(f"    {render_known(known)}" for known in named)
        raise UserError(f'"{word}" is the name of {len(named)} runs; name one of them by its directory:\n{listed}')
    raise UserError(
        f"there is no run {word}.\n"
        "  Allowed: a run directory, HOST:DIRECTORY, or the name of a run that you submitted; `shardway status` lists "
        "them."
    )


def find_all(folder: Path) -> list[Known]:
    """The runs in a folder here, then those that were submitted from anywhere, each once."""
    here = list_runs(folder)
    places = {("", str(path.absolute())) for path in here}
    others = [known for known in read_known() if (known.host, known.run) not in places and _may_be_there(known)]
    return [*(Known(str(path)) for path in here), *others]


def list_runs(folder: Path) -> list[Path]:
    """The runs in a folder here, by name; none where there is no folder. Raises JobError where it does not answer."""
    return sorted(folder / name for name in list_names(folder) if _may_be_run(folder / name))


def is_run(path: Path) -> bool:
    """Whether a folder here is a run that was trained or submitted. Raises JobError where it does not answer."""
    return RunDir(path).exists() or is_there(RunDir(path).attempts_folder)


def _may_be_there(known: Known) -> bool:
    """Whether a known run is on another host, or still here."""
    return known.host != "" or _may_be_run(Path(known.run))


def _may_be_run(path: Path) -> bool:
    """`is_run` if a file system may be unreachable: reading that run later reports it, and the others are found."""
    try:
        return is_run(path)
    except JobError:
        return True
