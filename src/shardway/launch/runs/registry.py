"""Which runs this person has submitted, and where they are, so that they are found again from any folder.

One line of JSON a run in $XDG_STATE_HOME/shardway/submitted-runs (default ~/.local/state), appended in one write; a
line with `"gone": true` takes back those before it. It points to run directories alone; what became of a run stands
there.

Invariant: a line that is torn or foreign is passed over, and a registry that cannot be written stops nobody. This
module must not ask hosts or schedulers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shardway.places import find_own_folder


@dataclass(frozen=True)
class Known:
    """A run that was submitted: its directory on `host` ("": this machine), and the site."""

    run: str
    host: str = ""
    site: str = ""


def registry_path() -> Path | None:
    """The file of the registry; None for an account without a home, which has none."""
    folder = find_own_folder("STATE")
    return folder / "submitted-runs" if folder else None


def remember(known: Known, path: Path | None = None) -> bool:
    """Add a run; one that is there already is not added again. Gives whether it is new."""
    if known in read_known(path):
        return False
    _append(asdict(known), path)
    return True


def forget(known: Known, path: Path | None = None) -> None:
    """Take a run back of which nothing is left."""
    _append({**asdict(known), "gone": True}, path)


def _append(table: Mapping[str, object], path: Path | None) -> None:
    target = path or registry_path()
    if target is None:
        return
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "a", encoding="utf-8") as file:
            file.write(json.dumps(table) + "\n")


def read_known(path: Path | None = None) -> list[Known]:
    """The runs that are known, oldest first, each once."""
    source = path or registry_path()
    try:
        lines = source.read_text(encoding="utf-8").splitlines() if source else []
    except (OSError, UnicodeDecodeError):
        return []
    found: dict[Known, None] = {}
    for known, gone in filter(None, map(_parse, lines)):
        if gone:
            found.pop(known, None)
        else:
            found[known] = None
    return list(found)


def _parse(line: str) -> tuple[Known, bool] | None:
    """A line, and whether it takes its run back."""
    try:
        table = json.loads(line)
        known = Known(str(table["run"]), str(table.get("host", "")), str(table.get("site", "")))
        return known, bool(table.get("gone", False))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
