"""Identity and descent of a run: its id, the folders of its checkpoints, its folder on a node's own disk, its lineage.

A checkpoint on a node's disk does not show whether the run still descends from it. So every entry of the lineage has a
name, checkpoints hold the name of the entry they were saved under, and a resume looks it up.

Invariants:
- The run id: written once, by the holder of the run directory; it stays with the directory wherever that is copied or
  moved. A file whose checksum does not match counts as absent, since a wrong id would reject all checkpoints.
- Checkpoint folders: the name of a complete one is never that of an unfinished one.
- `LocalRun`: makes every path below the run's folder on a node's disk and touches nothing outside it. The folder is
  its owner's alone.
- The lineage: never contains a checkpoint of an overtaken writer, or one from after a step that the run later went back
  to. A lost or damaged file is a lineage without entries.
- Skipped positions: a written range stays, in its place, so that every resume skips the same samples. A file that
  cannot be read is an error, never an empty list.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import uuid
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardway.errors import JobError, UserError
from shardway.places import expand_place
from shardway.refusals import find_remedy
from shardway.rundir.file_io import is_there, list_names, read_fields, remove_folder, write_json, write_whole

# --- the id of a run

RUN_ID = "run-id"
LEASE = "lease"  # the folder in a run directory that shows its one writer
_ID = re.compile(r"[0-9a-f]{32}")


def find_run_id(run: Path) -> str:
    """The id of the run in a directory; empty where it has none yet."""
    try:
        text = (run / RUN_ID).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    name = text.partition(" ")[0]
    return name if _ID.fullmatch(name) and text == _with_checksum(name) else ""


def ensure_run_id(run: Path, known: str = "") -> str:
    """The id of the run, created if there is none; `known` is the id in its checkpoints, if any. Called while the run
    directory is held. Raises JobError where the file system refuses."""
    if found := find_run_id(run):
        return found
    chosen = known if _ID.fullmatch(known) else uuid.uuid4().hex
    try:
        write_whole(run / RUN_ID, f"{_with_checksum(chosen)}\n")
    except OSError as error:
        raise JobError(
            f"the id of the run cannot be written into {run}: {error.strerror}.\n"
            f"  Nothing was changed. To do: {find_remedy(error)}; then run the same command again."
        ) from error
    return chosen


def _with_checksum(name: str) -> str:
    return f"{name} {zlib.crc32(name.encode()):08x}"


# --- names of checkpoint folders

_STEP = re.compile(r"step-(\d{9})")
_PARTIAL = re.compile(r"\.step-.*\.partial")
_SET_ASIDE = re.compile(r"(?:damaged|undone)-step-(\d{9})(\.\d+)?")


def step_name(step: int) -> str:
    """The folder of a complete checkpoint."""
    return f"step-{step:09d}"


def partial_name(step: int, mark: str = "") -> str:
    """The folder of an incomplete checkpoint; `mark` identifies its writer."""
    return f".{step_name(step)}{mark and f'.{mark}'}.partial"


def step_of_checkpoint(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder, also of one that was set aside; None for another name."""
    match = _STEP.fullmatch(folder.name) or _SET_ASIDE.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first; none where there is no such folder. Raises JobError
    where the file system does not answer."""
    return find_steps(list_names(folder))


def find_steps(names: Iterable[str]) -> list[int]:
    """Steps of the complete checkpoints among the names in a folder, oldest first."""
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def list_partials(folder: Path) -> list[Path]:
    """Incomplete checkpoints in a folder."""
    return sorted(folder / name for name in list_names(folder) if _PARTIAL.fullmatch(name))


# --- a run's folder on a node's disk

MODE = 0o700
_NODE = re.compile(r"node-\d+")


@dataclass(frozen=True)
class LocalRun:
    """A run's files on this machine's disk, `shardway-<run id>/node-<index>/step-NNNNNNNNN`: one folder a node, since
    one machine may act as several."""

    path: Path

    def node(self, index: int) -> Path:
        return self.path / f"node-{index}"

    def nodes(self) -> list[Path]:
        """The folders of all nodes visible from here, also those of an earlier start."""
        with contextlib.suppress(OSError, JobError):
            self._check_own()
            return sorted(path for path in self.path.iterdir() if _NODE.fullmatch(path.name) and path.is_dir())
        return []

    def steps(self) -> list[int]:
        """Steps of which any node has a complete folder, oldest first."""
        return sorted({step for node in self.nodes() for step in self.steps_of(node)})

    def steps_of(self, node: Path) -> list[int]:
        """Complete steps in a node's folder; none where another node of this machine has just removed it."""
        with contextlib.suppress(JobError):
            return list_steps(node)
        return []

    def make(self, index: int) -> Path:
        """The folder of a node, for its owner alone; made if missing. Raises OSError, JobError."""
        self.path.mkdir(MODE, parents=True, exist_ok=True)
        self._check_own()
        self.node(index).mkdir(MODE, exist_ok=True)
        return self.node(index)

    def keep_only(self, steps: Collection[int], *, up_to: int) -> None:
        """Remove every checkpoint up to that step except these."""
        self._remove(step for step in self.steps() if step <= up_to and step not in steps)

    def remove_after(self, step: int) -> None:
        self._remove(later for later in self.steps() if later > step)

    def remove_partials(self, index: int) -> None:
        """Remove incomplete checkpoints in the folder of a node."""
        for partial in list_partials(self.node(index)):
            remove_folder(partial)

    def remove(self) -> None:
        remove_folder(self.path)

    def _check_own(self) -> None:
        """In a shared folder such as /tmp, another user can make this name: nothing is read or written there then."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise JobError(f"{self.path} belongs to another user")

    def _remove(self, steps: Iterable[int]) -> None:
        # Renamed first, so that a half-deleted one is never taken for a checkpoint.
        for step in steps:
            for node in self.nodes():
                doomed = node / partial_name(step, f"gone-{uuid.uuid4().hex}")
                with contextlib.suppress(OSError):  # another node of this machine was faster, or a later call retries
                    (node / step_name(step)).rename(doomed)
                remove_folder(doomed)


def find_local_run(folder: str, run_id: str) -> LocalRun:
    """This machine's folder of the run with that id, within `folder`, which may contain variables. Raises UserError
    where they are not set here."""
    place = str(expand_place(folder))
    if not os.path.isabs(place):
        raise UserError(
            f'checkpoint.local_dir = "{folder}" is "{place}" on this node ({os.uname().nodename}), which is no whole '
            "path.\n  To do: name a folder that every node has, or look which variables are set there."
        )
    return LocalRun(Path(place) / f"shardway-{run_id}")


# --- the lineage: the checkpoint that each start continued from

LINE = "line.json"
LINE_FORMAT = 1
MOST_BRANCHES = 64
"""Entries that are kept: a writer overtaken longer ago has no checkpoint on any disk that would be taken."""

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
        return Lineage((*self.entries, entry)[-MOST_BRANCHES:])

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
    return is_there(run / LINE)


def read_line(run: Path) -> Lineage:
    """The lineage of a run; without entries where no file can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads((run / LINE).read_text(encoding="utf-8"))
        entries = [read_fields(LineageBranch, entry) for entry in content["entries"]]
        if content["format"] == LINE_FORMAT and None not in entries:
            return Lineage(tuple(entry for entry in entries if entry is not None))
    return Lineage()


def write_line(run: Path, line: Lineage) -> None:
    """Replace the lineage; durable once this returns. Called by the holder of the run directory. Raises JobError."""
    try:
        write_json(run / LINE, {"format": LINE_FORMAT, "entries": [asdict(entry) for entry in line.entries]})
    except OSError as error:
        raise JobError(
            f"{run / LINE} cannot be written: {error.strerror}.\n"
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
