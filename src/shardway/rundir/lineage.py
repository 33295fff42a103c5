"""The line of descent of a run: from which checkpoint each of its starts, and each going back, went on.

What lies on the disk of a node does not say whether the run still comes from it. So every entry has a name of its own,
checkpoints hold the name of the entry that they were saved under, and whoever wants to go on from one asks the line.

Invariant: a checkpoint of a writer that was overtaken, or from after the step that the run went back to later, is never
on the line. A file that is lost or damaged is a line without entries: nothing is on it. This module must not read
checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardway.errors import JobError
from shardway.refusals import find_remedy
from shardway.rundir.atomic import write_json
from shardway.rundir.fields import read_fields
from shardway.rundir.look import is_there

NAME = "line.json"
FORMAT = 1
MOST = 64
"""Entries that are kept: whoever was overtaken longer ago has nothing on any disk that would be taken."""

SHARED, LOCAL = "shared", "local"
"""The tiers: the run directory, on a file system that all nodes see; and the disks of the nodes."""

TWICE = 2


@dataclass(frozen=True)
class LineageBranch:
    """The run went on in that epoch from that step (0: its beginning) of that tier; `name` is in what it saves then."""

    epoch: int
    from_step: int
    tier: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:16])


@dataclass(frozen=True)
class Lineage:
    """Where the run went on from, the newest last."""

    entries: tuple[LineageBranch, ...] = ()

    @property
    def last(self) -> LineageBranch | None:
        """Where it went on from last."""
        return self.entries[-1] if self.entries else None

    def add(self, entry: LineageBranch) -> Lineage:
        """The line with one entry more, and no more than `MOST`."""
        return Lineage((*self.entries, entry)[-MOST:])

    def why_off(self, name: str, step: int) -> str:
        """Why a checkpoint of that step, saved under the entry of that name, is not on the line; empty where it is."""
        names = [entry.name for entry in self.entries]
        if name not in names:
            return "the run does not come from the start that saved it"
        later = self.entries[names.index(name) + 1 :]
        before = min((entry.from_step for entry in later), default=step)
        return "" if step <= before else f"the run went on from step {before} after it was saved"

    def failed_twice(self, step: int) -> bool:
        """Whether the last two starts both went on from this step of the local tier."""
        last = self.entries[-TWICE:]
        return len(last) == TWICE and all((each.tier, each.from_step) == (LOCAL, step) for each in last)


def has_line(run: Path) -> bool:
    """Whether a run has ever saved on the disks of nodes."""
    return is_there(run / NAME)


def read_line(run: Path) -> Lineage:
    """The line of a run; without entries where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads((run / NAME).read_text(encoding="utf-8"))
        entries = [read_fields(LineageBranch, entry) for entry in content["entries"]]
        if content["format"] == FORMAT and None not in entries:
            return Lineage(tuple(entry for entry in entries if entry is not None))
    return Lineage()


def write_line(run: Path, line: Lineage) -> None:
    """Replace the line; durable once this returns. Called by whoever holds the run directory. Raises JobError."""
    try:
        write_json(run / NAME, {"format": FORMAT, "entries": [asdict(entry) for entry in line.entries]})
    except OSError as error:
        raise JobError(
            f"{run / NAME} cannot be written: {error.strerror}.\n"
            f"  It says what this run comes from, so nothing was trained. To do: {find_remedy(error)}; then run the "
            "same command again."
        ) from error
