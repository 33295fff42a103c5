"""From which checkpoint each start went on, and which positions a run left out.

Invariants:
- A checkpoint of a writer that was overtaken, or from after the step that the run went back to later, is never on the
  line. A file that is lost or damaged is a line without entries: nothing is on it.
- A span that was written stays, and stays first: whoever goes on leaves out the same samples. A file that cannot be
  read is an error, never an empty list.

What lies on the disk of a node does not say whether the run still comes from it. So every entry has a name of its own,
checkpoints hold the name of the entry that they were saved under, and whoever wants to go on from one asks the line.
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


# --- The spans of positions that a run left out by itself, one for each time that it went back before a spike

LEFT_OUT_FORMAT = 1

MOST_POSITION = 10**18
"""The largest position, as in `data.skip`."""


@dataclass(frozen=True)
class SkippedRange:
    """Positions from `start` up to before `end`, of which `samples` would have been trained on.

    The run went back to the checkpoint of step `back_to` after a spike from step `first` to step `last`, at `time`
    (Unix seconds).
    """

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
        """As in `data.skip`."""
        return [self.start, self.end]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class LeftOutFile:
    """The file of these spans."""

    path: Path

    def read(self) -> tuple[SkippedRange, ...]:
        """Those of the run, in the order in which it went back; none where there is no file. Raises JobError."""
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
    """Spans as they stand in a file or in a checkpoint. Raises ValueError where one is none."""
    if not isinstance(entries, list):
        raise ValueError("spans is no list")
    spans = [read_fields(SkippedRange, entry) for entry in entries]
    if wrong := [entry for entry, span in zip(entries, spans, strict=True) if span is None or not _is_span(span)]:
        raise ValueError(f"{wrong[0]!r} is no span")
    return tuple(span for span in spans if span is not None)


def _is_span(span: SkippedRange) -> bool:
    return 0 <= span.start < span.end <= MOST_POSITION and 0 <= span.back_to < span.first <= span.last
