"""The layout of a run directory, as one object.

Invariant: every path inside a run directory is made here. This module must not decide what to write.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from shardway.earlier_names import rename_sections
from shardway.errors import JobError, UserError
from shardway.refusals import find_remedy
from shardway.rundir.attempts import Attempt
from shardway.rundir.events import (
    Event,
    EventFollower,
    EventWriter,
    drop_undone,
    parse_event,
    read_events,
    read_last_events,
)
from shardway.rundir.file_io import (
    check_sections,
    is_seen,
    is_there,
    list_names,
    remove_folder,
    write_json,
    write_whole,
)
from shardway.rundir.lease import Follower, Means, Tenure
from shardway.rundir.lineage import LeftOutFile
from shardway.rundir.lock import LockPaths, WriterLock, find_holder, find_holder_host, signal_holder
from shardway.rundir.names import list_partials, list_steps, partial_name, step_name

FORMAT = 1
"""Version of the run directory that this code writes, and the newest that it reads."""

FOLDER_MODE = 0o750
"""Of a new run directory: what a run says of data, code and machine is for its owner and group."""

START_OVER = "start over with --fresh, which sets the run directory aside"
"""The last way out of a run that cannot go on: what it has learnt stays on disk (`RunDir.set_aside`)."""

START_OVER_IN_SCRIPT = "start over with shardway.start(fresh=True), which sets the run directory aside"
"""As `START_OVER`, for a script of one's own."""

WAITS = "waits"
"""A file in the folder of what the processes of a start print, while they are spares that wait to be ranks."""

OWN_NAMES = frozenset(
    (
        *("run.toml", "resolved.toml", "ds_config.json", "events", "checkpoints", "status.json", "writer.lock"),
        *("run-id", "lease", "logs", "attempts", "report.html", "stop", "left_out.json", "line.json", "work"),
        "cache",
    )
)
"""What a run directory consists of."""

_ATTEMPT = re.compile(r"\d{4,}")
_EVENTS = re.compile(r"rank-(\d{5,})\.jsonl")


@dataclass(frozen=True)
class RunDir:
    """One run's directory; the object itself touches the disk only when a method is called.

    `tenure` is the right to write here; None for those who only read, and in tools that work on a run at rest.
    """

    path: Path
    tenure: Tenure | None = field(default=None, compare=False)

    def exists(self) -> bool:
        """Whether a run has been here."""
        return any(map(is_there, (self.status_path, self.resolved_path, self._events_folder)))

    def check_readable(self) -> None:
        """Raise JobError where it cannot be seen who is at the run: what may not be read is not empty."""
        for folder in (self._place.lease, self.attempts_folder, *(attempt.path for attempt in self.attempts())):
            list_names(folder)

    def check_no_strangers(self) -> None:
        """Raise UserError where the folder holds files of somebody else's and no run."""
        strangers = [] if self.exists() else sorted(set(list_names(self.path)) - OWN_NAMES)
        if strangers:
            shown = ", ".join(strangers[:3]) + (", ..." if len(strangers) > 3 else "")
            raise UserError(
                f"{self.path} is no run directory and holds other files ({shown}).\n"
                "  Nothing in it was changed. To do: name a new or an empty folder with --dir."
            )

    def create(self, *, empty: bool = False) -> None:
        """Make the directory (parents too) and, unless it is to be `empty`, the folders in it.

        A new one is for its owner and group alone. Raises UserError where that is refused.
        """
        try:
            self.path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            for folder in () if empty else (self._events_folder, self.checkpoints):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            if self.path.is_symlink() and not os.path.exists(self.path):
                raise UserError(
                    f"the run directory {self.path} is a link to {os.readlink(self.path)}, where there is no folder.\n"
                    "  To do: make that folder, or name another run directory with --dir."
                ) from None
            where = f" ({error.filename})" if error.filename != str(self.path) else ""
            raise UserError(
                f"the run directory {self.path} cannot be made: {error.strerror}{where}.\n"
                f"  To do: {find_remedy(error, 'choose a folder that you may write to with --dir or run.root')}."
            ) from None

    def check_format(self) -> None:
        """Raise UserError where a newer Shardway wrote this directory."""
        status = self.read_status()
        found = status.get("format", FORMAT) if status else FORMAT
        if not isinstance(found, int) or found > FORMAT:
            raise UserError(
                f"{self.path} has run directory format {found}; this Shardway reads formats up to {FORMAT}.\n"
                "  Nothing in it was changed. To do: update Shardway, or choose another directory with --dir."
            )

    # --- one writer

    def writer_lock(self, attempt: str = "") -> WriterLock:
        """The lock that whoever writes here must hold; `attempt` says what it is a part of."""
        return WriterLock(self._place, Means(attempt=attempt))

    def find_writer(self, *, by_hand: bool = False) -> str | None:
        """Who is training here now (outside of jobs of this run, if `by_hand`), or None."""
        return find_holder(self._place, by_hand=by_hand)

    def signal_writer(self, number: int) -> bool:
        """Send a signal to the process that is training here now; whether it is one of this machine, and may be."""
        return signal_holder(self._place, number)

    def find_writer_host(self) -> str:
        """The host of whoever is training here now; empty for nobody."""
        return find_holder_host(self._place)

    def beside(self, epoch: int) -> RunDir:
        """This directory for a rank beside the one that holds it in this epoch."""
        return replace(self, tenure=Follower(self._place.files, self._place.run, epoch))

    @property
    def epoch(self) -> int:
        """The epoch in which is written here; 0 for those who hold nothing."""
        return self.tenure.epoch if self.tenure is not None else 0

    def check_writer(self) -> None:
        """Cheap. Raises Fenced where this process may write here no more, OSError where that cannot be known now."""
        if self.tenure is not None:
            self.tenure.check()

    def confirm_writer(self) -> None:
        """Look whether this process may still write here; before what must not happen twice.

        Raises Fenced where it may not, JobError where that cannot be known now.
        """
        if self.tenure is None:
            return
        try:
            self.tenure.confirm()
        except OSError as error:
            raise JobError(
                f"whether this run still holds {self.path} cannot be seen: {error.strerror}.\n"
                "  Nothing was changed. To do: look at the file system, then run the same command again."
            ) from error

    def fence_saves(self) -> list[tuple[Path, Path]]:
        """Take from whoever wrote here before what it has not made a checkpoint yet: its last rename will fail.

        Called by a new holder before it looks for checkpoints: what was complete by then is found, and nothing of an
        earlier epoch becomes complete later. Returns what was renamed, as (before, after), for `unfence_saves`. Raises
        JobError where the file system refuses.
        """
        if not is_there(self.checkpoints):
            return []
        fenced = []
        try:
            mark = self.checkpoints / f".step-fence.{self.epoch:06d}.partial"
            mark.mkdir(exist_ok=True)  # a network file system lists a folder anew for whoever has changed it
            mark.rmdir()
            for partial in self.partial_checkpoints():
                after = partial.with_name(f"{partial.name}.fenced-{self.epoch:06d}.partial")
                with contextlib.suppress(FileNotFoundError):  # it has just become a checkpoint
                    partial.rename(after)
                    fenced.append((partial, after))
        except OSError as error:
            raise JobError(
                f"saves that an earlier run has begun in {self.checkpoints} cannot be ended: {error.strerror}.\n"
                "  Nothing that was saved has changed. To do: look at the file system, then run the same command again."
            ) from error
        return fenced

    @staticmethod
    def unfence_saves(fenced: Sequence[tuple[Path, Path]]) -> None:
        """Undo `fence_saves`, for a holder that goes on with nothing here; what cannot be renamed stays."""
        for before, after in fenced:
            with contextlib.suppress(OSError):
                after.rename(before)

    # --- what was asked and decided

    @property
    def resolved_path(self) -> Path:
        """The resolved run; runs again as it stands."""
        return self.path / "resolved.toml"

    @property
    def request_path(self) -> Path:
        """The user's file as it was read; empty where there was none."""
        return self.path / "run.toml"

    def write_request(self, run_toml: str, resolved_toml: str) -> None:
        """Keep the user's file as it was read, and what was made of it."""
        write_whole(self.request_path, run_toml)
        write_whole(self.resolved_path, resolved_toml)

    def write_ds_config(self, text: str) -> None:
        """Keep the settings that DeepSpeed was started with."""
        write_whole(self.path / "ds_config.json", text)

    def write_setup_fault(self, rank: int, facts: dict[str, Any]) -> None:
        """Tell the agent that started this rank what ended it before the run went on. Raises OSError."""
        self._setup_faults.mkdir(parents=True, exist_ok=True)
        write_json(self._setup_faults / f"rank-{rank:05d}.json", {"event": "fault", **facts}, durable=False)

    def read_setup_fault(self, rank: int) -> Event | None:
        """What that rank said so; None where it did not."""
        try:
            return parse_event((self._setup_faults / f"rank-{rank:05d}.json").read_bytes())
        except OSError:
            return None

    def clear_setup_faults(self) -> None:
        """Called by the agent that leads before each start, and once it has read them."""
        remove_folder(self._setup_faults)

    @property
    def _setup_faults(self) -> Path:
        return self.log_folder / "setup-faults"

    def read_resolved(self) -> dict[str, Any]:
        """The resolved run as plain data; empty where there is none. Raises JobError where it is unreadable."""
        if not is_there(self.resolved_path):
            return {}
        try:
            return rename_sections(check_sections(tomllib.loads(self.resolved_path.read_text(encoding="utf-8"))))
        except (ValueError, RecursionError, OSError) as error:
            raise JobError(
                f"{self.resolved_path} is damaged: {error}.\n"
                f"  To do: move that one file away (it is written again from the run file), or {START_OVER}."
            ) from None

    # --- events

    def event_writer(self, rank: int) -> EventWriter:
        """Opens this rank's event file for appending."""
        return EventWriter(self._events_path(rank))

    def events(self, rank: int = 0) -> list[Event]:
        """The events of a rank that still hold (steps that were undone are left out)."""
        return drop_undone(self.all_events(rank))

    def all_events(self, rank: int = 0, names: Sequence[str] = ()) -> Iterator[Event]:
        """Every event of a rank, or those of some names, as they were written, undone steps too."""
        return read_events(self._events_path(rank), names)

    def last_events(self, rank: int = 0, most_bytes: int = 2**18) -> list[Event]:
        """The last events of a rank, as many as stand in so many bytes: quick however long the run was."""
        return read_last_events(self._events_path(rank), most_bytes)

    def follow_events(self, rank: int = 0, *, from_end: bool = False) -> EventFollower:
        """A reader of what is appended from now on (or from the start of the file)."""
        return EventFollower(self._events_path(rank), from_end=from_end)

    def ranks_with_events(self) -> list[int]:
        """Ranks that have an event file."""
        found = map(_EVENTS.fullmatch, list_names(self._events_folder))
        return sorted(int(match[1]) for match in found if match)

    # --- status

    def write_status(self, *, durable: bool = True, **facts: Any) -> None:
        """Replace status.json."""
        write_json(self.status_path, {"format": FORMAT, **facts}, durable=durable)

    def read_status(self) -> dict[str, Any]:
        """status.json, or an empty dict where there is none or it is damaged: it only repeats what the events say."""
        try:
            status = json.loads(self.status_path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError):
            return {}
        return status if isinstance(status, dict) else {}

    # --- stopping

    @property
    def stop_path(self) -> Path:
        """The file that asks the run to stop."""
        return self.path / "stop"

    def request_stop(self, reason: str = "") -> None:
        """Ask the run to stop after its current step, and say why. Raises UserError where that is refused.

        A file system that has no room for a new file, or a quota of files, still takes a second name of an old one.
        """
        try:
            write_whole(self.stop_path, reason)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.link(self.status_path, self.stop_path)
            if not self.stop_requested():  # a folder of that name asks for the same
                raise UserError(f"{self.stop_path} cannot be written: {error.strerror}.") from None

    def stop_requested(self) -> bool:
        """Whether somebody asked for a stop, as far as the file system answers now."""
        return is_seen(self.stop_path)

    def stop_is_record(self) -> bool:
        """Whether the stop file is a second name of a record, as `request_stop` and `shardway stop` make it where there
        is no room: nobody has touched it by hand."""
        with contextlib.suppress(OSError), open(self.stop_path, "rb") as file:
            return file.read(1) == b"{"
        return False

    def stop_reason(self) -> str:
        """What the stop file says, in one line; empty for one that was only touched, or is a record's second name."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = self.stop_path.read_text(encoding="utf-8")
            return "" if text.startswith("{") else " ".join(text.split())
        return ""

    def clear_stop(self) -> None:
        """Take the request back (it has been obeyed); a folder that holds something stays."""
        with contextlib.suppress(OSError):
            (self.stop_path.rmdir if self.stop_path.is_dir() else self.stop_path.unlink)()

    # --- checkpoints

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step stands once it is complete."""
        return self.checkpoints / step_name(step)

    def partial_checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step is written before it is complete; each epoch has a place of its own."""
        return self.checkpoints / partial_name(step, f"epoch-{self.epoch:06d}" if self.epoch else "")

    def read_step(self) -> int:
        """How many steps are done, by the last event of rank 0, or by the status, which is up to a second behind."""
        with contextlib.suppress(JobError):
            for event in reversed(self.last_events()):
                if isinstance(event.get("step"), int):
                    return int(event["step"])
        step = self.read_status().get("step")
        return step if isinstance(step, int) else 0

    def change_state(self, status: dict[str, Any], state: str, reason: str) -> None:
        """Write a status that was read again, with another state and its reason."""
        kept = {name: value for name, value in status.items() if name != "format"}
        self.write_status(**{**kept, "state": state, "reason": reason})

    def describe_base(self) -> str:
        """What the next start goes on from: "the checkpoint of step 40", or the start."""
        steps = self.checkpoint_steps()
        return f"the checkpoint of step {steps[-1]}" if steps else "the start, since nothing was saved yet"

    def checkpoint_steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return list_steps(self.checkpoints)

    def aside_path(self, step: int, kind: str) -> Path:
        """A free name for a checkpoint that is "damaged" or "undone", where it is kept and not taken for one."""
        first = self.checkpoints / f"{kind}-{step_name(step)}"
        names = chain([first], (first.with_name(f"{first.name}.{number}") for number in count(2)))
        return next(path for path in names if not is_there(path))

    def partial_checkpoints(self) -> list[Path]:
        """Leftovers of saves that never became complete."""
        return list_partials(self.checkpoints)

    @property
    def left_out(self) -> LeftOutFile:
        """What the run left out of its data by itself."""
        return LeftOutFile(self.path / "left_out.json")

    # --- attempts

    @property
    def attempts_folder(self) -> Path:
        """Folder of attempts, one folder a submission."""
        return self.path / "attempts"

    def attempt(self, number: int) -> Attempt:
        """The attempt of that number, whether it is there or not."""
        return Attempt(self.attempts_folder / f"{number:04d}")

    def attempts(self) -> list[Attempt]:
        """Attempts that were prepared or submitted, oldest first."""
        numbers = sorted(int(name) for name in list_names(self.attempts_folder) if _ATTEMPT.fullmatch(name))
        return [self.attempt(number) for number in numbers]

    # --- pictures and logs

    @property
    def work(self) -> Path:
        """Where a program that is not Shardway's works; it lasts over attempts, and so does what is written there."""
        return self.path / "work"

    @property
    def report_path(self) -> Path:
        """The report for a browser."""
        return self.path / "report.html"

    def write_report(self, html: str) -> None:
        """Replace the report."""
        write_whole(self.report_path, html)

    @property
    def log_folder(self) -> Path:
        """Output of ranks that this machine's agent started, one folder a start."""
        return self.path / "logs"

    def list_log_folders(self) -> set[Path]:
        """The folders of all starts of ranks, on all nodes."""
        return {*self.log_folder.glob("*"), *self.log_folder.glob("from-*/*")}

    def remove_log_folders(self, folders: Iterable[Path]) -> None:
        """Remove what ranks printed in those starts, and the folder of all where nothing is left in it."""
        for folder in folders:
            remove_folder(folder)
        remove_folder(self._setup_faults)
        with contextlib.suppress(OSError):
            self.log_folder.rmdir()

    def rank_output(self, rank: int) -> list[Path]:
        """Files with what a rank printed in its newest start by an agent, stdout first; empty where none was.

        A start whose folder has a file WAITS has not begun: its processes are spares.
        """
        places = [f"*/attempt_*/{rank}", *(f"from-{first}/*/attempt_*/{rank - first}" for first in range(rank + 1))]
        found = [path for place in places for path in self.log_folder.glob(f"{place}/std*.log")]
        found = [path for path in found if not (path.parents[2] / WAITS).exists()]
        if not found:
            return []
        newest = max(found, key=lambda path: path.stat().st_mtime).parent
        return sorted(newest.glob("std*.log"), reverse=True)

    def set_aside(self) -> Path | None:
        """Move what an earlier run left here out of the way (for a fresh start); where it went, or None.

        Nothing is deleted: the old run stands beside as `<name>.old-N`. Raises UserError for a path such as ".".
        """
        if not self.exists():
            return None
        if self.path.name in ("", ".."):
            raise UserError(
                f"the run directory {self.path} has no name of its own, so the run in it cannot be moved aside.\n"
                "  To do: name it by its path with --dir."
            )
        is_link = self.path.is_symlink()
        place, number = self.path.resolve() if is_link else self.path, 1
        while is_there(target := place.with_name(f"{place.name}.old-{number}")):
            number += 1
        place.rename(target)
        if is_link:  # the new run is to be where the old one was, not on the disk of the link
            place.mkdir(FOLDER_MODE)
        with contextlib.suppress(FileNotFoundError):
            (target / "stop").unlink()
        return target

    # --- names

    @property
    def _events_folder(self) -> Path:
        return self.path / "events"

    def _events_path(self, rank: int) -> Path:
        return self._events_folder / f"rank-{rank:05d}.jsonl"

    @property
    def status_path(self) -> Path:
        """State, step and reason, as the run last wrote them."""
        return self.path / "status.json"

    @property
    def _place(self) -> LockPaths:
        return LockPaths(self.path / "writer.lock", self.path / "lease")
