"""Which runs this person has submitted, and where they are, so that they are found again from any folder.

One line of JSON a run in $XDG_STATE_HOME/shardway/submitted-runs (default ~/.local/state), appended in one write. It
points to run directories alone; what became of a run stands there.

Invariant: a line that is torn or foreign is passed over, and a registry that cannot be written stops nobody. This
module must not ask hosts or schedulers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Known:
    """A run that was submitted: its directory on `host` ("": this machine), and the site."""

    run: str
    host: str = ""
    site: str = ""


def registry_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file of the registry."""
    base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "shardway" / "submitted-runs"


def remember(known: Known, path: Path | None = None) -> None:
    """Add a run; one that is there already is not added again."""
    target = path or registry_path()
    if known in read_known(target):
        return
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(known)) + "\n")


def read_known(path: Path | None = None) -> list[Known]:
    """The runs that are known, oldest first, each once."""
    try:
        lines = (path or registry_path()).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return list(dict.fromkeys(known for line in lines if (known := _parse(line)) is not None))


def _parse(line: str) -> Known | None:
    try:
        table = json.loads(line)
        return Known(str(table["run"]), str(table.get("host", "")), str(table.get("site", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
