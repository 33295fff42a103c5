"""The lineage of a run: the checkpoint each start continued from, and the positions that the run skipped.

A checkpoint on a node's disk does not show whether the run still descends from it. So every entry of the lineage has a
name, checkpoints hold the name of the entry they were saved under, and a resume looks it up.

Invariants:
- The lineage: never contains a checkpoint of an overtaken writer, or one from after a step that the run later went back
  to. A lost or damaged file is a lineage without entries.
- Skipped positions: a written range stays, in its place, so that every resume skips the same samples. A file that
  cannot be read is an error, never an empty list.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardway.errors import JobError
from shardway.refusals import find_remedy
from shardway.rundir.file_io import is_there, read_fields, write_json

NAME = "line.json"
FORMAT = 1
MOST = 64  # entries that are kept: a writer overtaken longer ago has no checkpoint on any disk that would be taken

SHARED, LOCAL = "shared", "local"
"""The tiers: the run directory, on a file system that all nodes see; and the nodes' own disks."""


@dataclass(frozen=True)
class LineageBranch:
    """The run continued in that epoch from that step (0: its start) of that tier; its checkpoints then hold `name`."""

    epoch: int
    from_step: int
    tier: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:16])


@dataclass(frozen=True)
class Lineage:
    """The starts of the run, newest last."""

    entries: tuple[LineageBranch, ...] = ()

    @property
    def last(self) -> LineageBranch | None:
        return self.entries[-1] if self.entries else None

    def add(self, entry: LineageBranch) -> Lineage:
        return Lineage((*self.entries, entry)[-MOST:])

    def why_off(self, name: str, step: int) -> str:
        """Why a checkpoint of that step, saved under that entry, is not in the lineage; empty where it is."""
        names = [entry.name for entry in self.entries]
        if name not in names:
            return "the run does not come from the start that saved it"
        later = self.entries[names.index(name) + 1 :]
        before = min((entry.from_step for entry in later), default=step)
        return "" if step <= before else f"the run went on from step {before} after it was saved"

    def failed_twice(self, step: int) -> bool:
        """Whether the last two starts both continued from this step of the local tier."""
        last = [(each.tier, each.from_step) for each in self.entries[-2:]]
        return last == [(LOCAL, step)] * 2


def has_line(run: Path) -> bool:
    """Whether a run has ever saved on the nodes' own disks."""
    return is_there(run / NAME)


def read_line(run: Path) -> Lineage:
    """The lineage of a run; without entries where no file can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads((run / NAME).read_text(encoding="utf-8"))
        entries = [read_fields(LineageBranch, entry) for entry in content["entries"]]
        if content["format"] == FORMAT and None not in entries:
            return Lineage(tuple(entry for entry in entries if entry is not None))
    return Lineage()


def write_line(run: Path, line: Lineage) -> None:
    """Replace the lineage; durable once this returns. Called by the holder of the run directory. Raises JobError."""
    try:
        write_json(run / NAME, {"format": FORMAT, "entries": [asdict(entry) for entry in line.entries]})
    except OSError as error:
        raise JobError(
            f"{run / NAME} cannot be written: {error.strerror}.\n"
            f"  It says what this run comes from, so nothing was trained. To do: {find_remedy(error)}; then run the "
            "same command again."
        ) from error


# --- ranges of positions that a run skipped

LEFT_OUT_FORMAT = 1
MOST_POSITION = 10**18  # the largest position, as in `data.skip`


@dataclass(frozen=True)
class SkippedRange:
    """Positions from `start` up to but not including `end`; `samples` of them would have been trained on. The run went
    back to the checkpoint of step `back_to` after a spike from step `first` to step `last`, at `time` (Unix
    seconds)."""

    start: int
    end: int
    samples: int
    back_to: int
    first: int
    last: int
    reason: str
    time: float

    @property
    def span(self) -> list[int]:
        return [self.start, self.end]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LeftOutFile:
    """The file of skipped ranges."""

    path: Path

    def read(self) -> tuple[SkippedRange, ...]:
        """The ranges, in the order of the rollbacks; none where there is no file. Raises JobError."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["format"] != LEFT_OUT_FORMAT:
                raise ValueError(f"its format is {content['format']}, and this Shardway reads {LEFT_OUT_FORMAT}")
            return read_left_out(content["spans"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise JobError(
                f"{self.path} cannot be read: {error}.\n"
                "  It says which samples this run leaves out, so nothing was trained. To do: restore the file; or move "
                "it away, since every checkpoint from after the last time that the run went back holds what it said."
            ) from None

    def write(self, spans: Sequence[SkippedRange]) -> None:
        """Replace the file; durable once this returns. Raises JobError."""
        try:
            write_json(self.path, {"format": LEFT_OUT_FORMAT, "spans": [each.as_json() for each in spans]})
        except OSError as error:
            raise JobError(
                f"{self.path} cannot be written: {error.strerror}.\n"
                f"  The run would leave samples out and could not say so. To do: {find_remedy(error)}; then run the "
                "same command again."
            ) from error


def read_left_out(entries: Any) -> tuple[SkippedRange, ...]:
    """Ranges as stored in a file or a checkpoint. Raises ValueError for an invalid one."""
    if not isinstance(entries, list):
        raise ValueError("spans is no list")
    spans = []
    for entry in entries:
        span = read_fields(SkippedRange, entry)
        if span is None or not (
            0 <= span.start < span.end <= MOST_POSITION and 0 <= span.back_to < span.first <= span.last
        ):
            raise ValueError(f"{entry!r} is no span")
        spans.append(span)
    return tuple(spans)
