"""The layout of a run directory, as one object.

Invariant: every path inside a run directory is made here. This module does not decide what is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardway.earlier_names import rename_sections
from shardway.errors import JobError, UserError
from shardway.refusals import find_remedy
from shardway.rundir.attempts import Attempt
from shardway.rundir.events import Event, EventFollower, EventWriter, drop_undone, parse_event, read_events
from shardway.rundir.file_io import (
    PathBelow,
    is_seen,
    is_there,
    list_names,
    remove_folder,
    write_json,
    write_whole,
)
from shardway.rundir.names import LEASE, LeftOutFile, list_partials, list_steps, partial_name, step_name

if TYPE_CHECKING:
    from shardway.rundir.lease import HeldLease, WriterLock

FORMAT = 1  # version of the run directory that this code writes; the newest that it reads
FOLDER_MODE = 0o750  # mode of a new run directory: facts about data, code and machine are for its owner and group

START_OVER = "start over with --fresh, which sets the run directory aside"
"""The last remedy for a run that cannot go on; its files stay on disk (`RunDir.set_aside`)."""

START_OVER_IN_SCRIPT = "start over with shardway.start(fresh=True), which sets the run directory aside"
"""As `START_OVER`, for a user's own script."""

WAITS = "waits"  # a file in the log folder of a start whose processes are warm standbys and not yet ranks

OWN_NAMES = frozenset(
    (
        *("run.toml", "resolved.toml", "ds_config.json", "events", "checkpoints", "status.json", "writer.lock"),
        *("run-id", "lease", "logs", "attempts", "report.html", "stop", "left_out.json", "line.json", "work"),
        *("cache", "trackers.json", "tensorboard", "telemetry", "profile", "traces", "notified"),
        *("evaluations", "followers", "shells", "imported.json"),
        *("wandb", "mlflow.db", "mlruns", "metrics.prom"),
    )
)
"""Names that belong to a run directory."""

_ATTEMPT = re.compile(r"\d{4,}")
_SHELL = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_EVENTS = re.compile(r"rank-(\d{5,})\.jsonl")


@dataclass(frozen=True)
class RunDir:
    """One run's directory; the object touches the disk only when a method is called. `lease` is the right to write
    here; None for readers, and for tools that work on a run at rest."""

    path: Path
    lease: HeldLease | None = field(default=None, compare=False)

    def exists(self) -> bool:
        """Whether the directory holds a run."""
        return any(map(is_there, (self.status_path, self.resolved_path, self._events_folder)))

    def check_readable(self) -> None:
        """Raise JobError where the writer cannot be determined: an unreadable directory is not an empty one."""
        for folder in (self.path / LEASE, self.attempts_folder, *(attempt.path for attempt in self.attempts())):
            list_names(folder)

    def check_no_strangers(self) -> None:
        """Raise UserError where the folder holds foreign files and no run."""
        strangers = [] if self.exists() else sorted(set(list_names(self.path)) - OWN_NAMES)
        if strangers:
            shown = ", ".join(strangers[:3]) + (", ..." if len(strangers) > 3 else "")
            raise UserError(
                f"{self.path} is no run directory and holds other files ({shown}).\n"
                "  Nothing in it was changed. To do: name a new or an empty folder with --dir."
            )

    def create(self, *, empty: bool = False) -> None:
        """Make the directory (parents too) and, unless `empty`, the folders in it. A new one is for its owner and group
        alone. Raises UserError where the file system refuses."""
        try:
            self.path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            for folder in () if empty else (self._events_folder, self.checkpoints):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            if os.path.islink(self.path) and not os.path.exists(self.path):
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
        """The lock that a writer must hold; `attempt` names the attempt that it is part of."""
        from shardway.rundir.lease import LeaseOptions, WriterLock

        return WriterLock(self.path, LeaseOptions(attempt=attempt))

    def find_writer(self, *, by_hand: bool = False) -> str | None:
        """A description of the process that trains here now (with `by_hand` only outside of jobs), or None."""
        from shardway.rundir.lease import find_holder

        return find_holder(self.path, by_hand=by_hand)

    def signal_writer(self, number: int) -> bool:
        """Send a signal to the process that trains here; returns whether it is on this machine and may be signalled."""
        from shardway.rundir.lease import signal_holder

        return signal_holder(self.path, number)

    def find_writer_host(self) -> str:
        from shardway.rundir.lease import find_holder_host

        return find_holder_host(self.path)

    def is_claimed_anew(self) -> bool:
        """Whether status.json is of before the newest claim: its holder has not begun to train. Both dates are by the
        file system's clock."""
        from shardway.rundir.lease import find_claim_time

        with contextlib.suppress(OSError):
            claimed = find_claim_time(self.path)
            return claimed is not None and self.status_path.stat().st_mtime < claimed
        return False

    def beside(self, epoch: int) -> RunDir:
        """This directory for a rank that writes in the holder's epoch."""
        from shardway.rundir.lease import FollowerLease, LeaseFiles

        return replace(self, lease=FollowerLease(LeaseFiles(self.path / LEASE), str(self.path), epoch))

    @property
    def epoch(self) -> int:
        """The epoch under which this process writes; 0 without the right to write."""
        return self.lease.epoch if self.lease is not None else 0

    def check_writer(self) -> None:
        """Cheap check. Raises Fenced where this process may no longer write, OSError where that is unknown now."""
        if self.lease is not None:
            self.lease.check()

    def confirm_writer(self) -> None:
        """Check that this process may still write here, before what must not happen twice. Raises Fenced where it may
        not, JobError where that is unknown now."""
        try:
            if self.lease is not None:
                self.lease.confirm()
        except OSError as error:
            raise JobError(
                f"whether this run still holds {self.path} cannot be seen: {error.strerror}.\n"
                "  Nothing was changed. To do: look at the file system, then run the same command again."
            ) from error

    def fence_saves(self) -> list[tuple[Path, Path]]:
        """Rename the unfinished saves of earlier writers, so that their last rename fails. A new holder calls it before
        it looks for checkpoints: complete ones are found, and none of an earlier epoch becomes complete later. Returns
        what was renamed, as (before, after), for `unfence_saves`. Raises JobError where the file system refuses."""
        if not is_there(self.checkpoints):
            return []
        fenced = []
        try:
            mark = self.checkpoints / f".step-fence.{self.epoch:06d}.partial"
            mark.mkdir(exist_ok=True)  # a network file system lists a folder anew after a change by this process
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
        """Undo `fence_saves`, for a holder that ends without writing; what cannot be renamed stays."""
        for before, after in fenced:
            with contextlib.suppress(OSError):
                after.rename(before)

    # --- request and resolved run

    resolved_path = PathBelow("resolved.toml")  # can be run again as it is
    request_path = PathBelow("run.toml")  # the user's run file as it was read; empty where there was none
    _setup_faults = PathBelow("logs/setup-faults")

    def write_request(self, run_toml: str, resolved_toml: str) -> None:
        write_whole(self.request_path, run_toml)
        write_whole(self.resolved_path, resolved_toml)

    def write_import(self, source: str, step: int) -> None:
        """Keep that the run begins with the checkpoint of this step, whose weights are from elsewhere. Raises
        OSError."""
        write_json(self.path / "imported.json", {"format": FORMAT, "source": source, "step": step})

    def read_import(self) -> str:
        """Where the weights come from that the run begins with; empty if nothing was imported, or it cannot be read."""
        with contextlib.suppress(ValueError, RecursionError, OSError, KeyError, TypeError):
            return str(json.loads((self.path / "imported.json").read_text(encoding="utf-8"))["source"])
        return ""

    def write_ds_config(self, text: str) -> None:
        write_whole(self.path / "ds_config.json", text)

    def write_setup_fault(self, rank: int, facts: dict[str, Any]) -> None:
        """Leave the cause of an early failure of this rank for the agent that started it. Raises OSError."""
        self._setup_faults.mkdir(parents=True, exist_ok=True)
        write_json(self._setup_faults / f"rank-{rank:05d}.json", {"event": "fault", **facts}, durable=False)

    def read_setup_fault(self, rank: int) -> Event | None:
        try:
            return parse_event((self._setup_faults / f"rank-{rank:05d}.json").read_bytes())
        except OSError:
            return None

    def clear_setup_faults(self) -> None:
        """Remove them; called by the coordinator before each start, and once it has read them."""
        remove_folder(self._setup_faults)

    def read_resolved(self) -> dict[str, Any]:
        """The resolved run as plain data; empty where there is none. Raises JobError where it is unreadable."""
        if not is_there(self.resolved_path):
            return {}
        try:
            resolved = tomllib.loads(self.resolved_path.read_text(encoding="utf-8"))
            for name, section in resolved.items():
                if name != "format" and not isinstance(section, dict):
                    raise ValueError(f"{name} is no section")
            return rename_sections(resolved)
        except (ValueError, RecursionError, OSError) as error:
            raise JobError(
                f"{self.resolved_path} is damaged: {error}.\n"
                f"  To do: move that one file away (it is written again from the run file), or {START_OVER}."
            ) from None

    # --- events

    def event_writer(self, rank: int) -> EventWriter:
        return EventWriter(self.events_path(rank))

    def events(self, rank: int = 0) -> list[Event]:
        """The valid events of a rank (undone steps are left out)."""
        return drop_undone(self.all_events(rank))

    def all_events(self, rank: int = 0, names: Sequence[str] = ()) -> Iterator[Event]:
        """Every event of a rank, or those of some names, as written, undone steps included."""
        return read_events(self.events_path(rank), names)

    def last_events(self, rank: int = 0, most_bytes: int = 2**18) -> list[Event]:
        """The last events of a rank that fit into so many bytes; quick however long the run was."""
        return list(read_events(self.events_path(rank), most_bytes=most_bytes))

    def follow_events(self, rank: int = 0, *, from_end: bool = False) -> EventFollower:
        """A reader of what is appended from now on (or from the start of the file)."""
        return EventFollower(self.events_path(rank), from_end=from_end)

    def ranks_with_events(self) -> list[int]:
        found = map(_EVENTS.fullmatch, list_names(self._events_folder))
        return sorted(int(match[1]) for match in found if match)

    # --- status

    def write_status(self, *, durable: bool = True, **facts: Any) -> None:
        write_json(self.status_path, {"format": FORMAT, **facts}, durable=durable)

    def read_status(self) -> dict[str, Any]:
        """status.json; empty where there is none or it is damaged, since it only repeats the events."""
        try:
            status = json.loads(self.status_path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError):
            return {}
        return status if isinstance(status, dict) else {}

    # --- trackers

    def read_tracked(self) -> dict[str, str]:
        """The id of the run in each tracker; empty where there is none or the file is damaged."""
        return {str(name): str(id) for name, id in self._read_trackers("ids").items()}

    def write_tracked(self, ids: Mapping[str, str]) -> None:
        """Keep the id of the run in each tracker. Raises OSError."""
        self._write_trackers(ids=dict(ids))

    def read_sent(self) -> dict[str, Any]:
        """How much of the run each tracker was sent after the fact; as `read_tracked`."""
        return self._read_trackers("sent")

    def write_sent(self, sent: Mapping[str, Any]) -> None:
        """Keep how much each tracker was sent. Raises OSError."""
        self._write_trackers(sent=dict(sent))

    def _read_trackers(self, part: str) -> dict[str, Any]:
        with contextlib.suppress(ValueError, RecursionError, OSError, KeyError, TypeError):
            found = json.loads((self.path / "trackers.json").read_text(encoding="utf-8"))[part]
            return found if isinstance(found, dict) else {}
        return {}

    def _write_trackers(self, **parts: Any) -> None:
        known = {part: found for part in ("ids", "sent") if (found := self._read_trackers(part))}
        write_json(self.path / "trackers.json", {"format": FORMAT, **known, **parts}, durable=False)

    # --- evaluations

    evaluations_folder = PathBelow("evaluations")

    def write_evaluation(self, step: int, kind: str, facts: Mapping[str, Any]) -> Path:
        """Keep the result of an evaluation of a checkpoint in a file of its own; returns it. Several may write at once,
        also while the run goes on. Raises OSError."""
        self.evaluations_folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = self.evaluations_folder / f"{step_name(step)}-{kind}-{stamp}-{uuid.uuid4().hex[:8]}.json"
        write_json(path, {"format": FORMAT, "step": step, "kind": kind, **facts})
        return path

    def read_evaluations(self) -> list[dict[str, Any]]:
        """The kept results, the oldest first; without those whose file is damaged."""
        found = []
        with contextlib.suppress(OSError, JobError):
            for name in list_names(self.evaluations_folder):
                with contextlib.suppress(ValueError, RecursionError, OSError):
                    content = json.loads((self.evaluations_folder / name).read_text(encoding="utf-8"))
                    found += [content] if name.endswith(".json") and isinstance(content, dict) else []

        def made(content: Mapping[str, Any]) -> float:
            return float(content["time"]) if isinstance(content.get("time"), int | float) else 0.0

        return sorted(found, key=made)

    # --- stopping

    stop_path = PathBelow("stop")

    def request_stop(self, reason: str = "") -> None:
        """Ask the run to stop after its current step, with a reason. Raises UserError where the file system refuses.
        Where there is no room for a new file, or a quota on files, a second name for an old file still works."""
        try:
            write_whole(self.stop_path, reason)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.link(self.status_path, self.stop_path)
            if not self.stop_requested():  # a folder of that name is a request too
                raise UserError(f"{self.stop_path} cannot be written: {error.strerror}.") from None

    def stop_requested(self) -> bool:
        """Whether a stop was requested, as far as the file system answers now."""
        return is_seen(self.stop_path)

    def stop_is_record(self) -> bool:
        """Whether the stop file is a second name of a record, as `request_stop` and `shardway stop` make it where there
        is no room, and not one touched by hand."""
        return self._read_stop().startswith("{")

    def stop_reason(self) -> str:
        """The reason in the stop file, in one line; empty if it was only touched, or is a record's second name."""
        return "" if self.stop_is_record() else " ".join(self._read_stop().split())

    def _read_stop(self) -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self.stop_path.read_text(encoding="utf-8")
        return ""

    def clear_stop(self) -> None:
        """Remove the request, once obeyed; a folder that is not empty stays."""
        with contextlib.suppress(OSError):
            (self.stop_path.rmdir if self.stop_path.is_dir() else self.stop_path.unlink)()

    notified = PathBelow("notified")  # marks of messages that were sent

    # --- traces of a profiler

    profile_path = PathBelow("profile")  # asks a live run for a trace of its next steps
    traces = PathBelow("traces")

    def profile_requested(self) -> bool:
        """Whether a trace was asked for, as far as the file system answers now."""
        return is_seen(self.profile_path)

    def take_profile_request(self) -> str:
        """The text of the file that asks for a trace, which is removed. Raises OSError where it cannot be."""
        text = ""
        with contextlib.suppress(UnicodeDecodeError, IsADirectoryError):
            text = self.profile_path.read_text(encoding="utf-8")
        (self.profile_path.rmdir if self.profile_path.is_dir() else self.profile_path.unlink)()
        return text

    def trace_path(self, first: int, last: int, rank: int) -> Path:
        """A free name for the trace of these steps on a rank."""
        stem = f"steps-{first}-{last}-rank-{rank}"
        path, number = self.traces / f"{stem}.json.gz", 1
        while is_there(path):
            number += 1
            path = self.traces / f"{stem}.{number}.json.gz"
        return path

    @staticmethod
    def trace_parts(path: Path) -> tuple[Path, Path]:
        """Where a trace is written before it is complete: plain, and compressed."""
        return path.with_name(f".{path.name}.plain"), path.with_name(f".{path.name}.partial")

    # --- checkpoints

    exports = PathBelow("exports")  # checkpoints as folders that `from_pretrained` reads, for servers
    checkpoints = PathBelow("checkpoints")

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def partial_checkpoint_path(self, step: int) -> Path:
        """The folder in which a step's checkpoint is written before it is complete; each epoch has its own."""
        return self.checkpoints / partial_name(step, f"epoch-{self.epoch:06d}" if self.epoch else "")

    def read_step(self) -> int:
        """Steps done, by the last event of rank 0 or by the status, which is up to a second behind."""
        with contextlib.suppress(JobError):
            for event in reversed(self.last_events()):
                if isinstance(event.get("step"), int):
                    return int(event["step"])
        step = self.read_status().get("step")
        return step if isinstance(step, int) else 0

    def change_state(self, status: dict[str, Any], state: str, reason: str) -> None:
        """Write a status that was just read, with another state and its reason."""
        kept = {name: value for name, value in status.items() if name != "format"}
        self.write_status(**{**kept, "state": state, "reason": reason})

    def describe_base(self) -> str:
        """Where the next start continues from: "the checkpoint of step 40", or the start."""
        steps = self.checkpoint_steps()
        return f"the checkpoint of step {steps[-1]}" if steps else "the start, since nothing was saved yet"

    def checkpoint_steps(self) -> list[int]:
        return list_steps(self.checkpoints)

    def aside_path(self, step: int, kind: str) -> Path:
        """A free name for a checkpoint that is "damaged" or "undone"; it is kept there and never resumed from."""
        path, number = self.checkpoints / f"{kind}-{step_name(step)}", 1
        while is_there(path):
            number += 1
            path = self.checkpoints / f"{kind}-{step_name(step)}.{number}"
        return path

    def partial_checkpoints(self) -> list[Path]:
        return list_partials(self.checkpoints)

    @property
    def left_out(self) -> LeftOutFile:
        """The data that the run skipped by itself."""
        return LeftOutFile(self.path / "left_out.json")

    # --- attempts

    attempts_folder = PathBelow("attempts")  # one folder a submission
    shells_folder = PathBelow("shells")  # a folder each interactive shell: its script, its copy of the code
    followers_folder = PathBelow("followers")  # a file each run that is submitted when this one is finished

    def has_shells(self) -> bool:
        """Whether there is a folder of an interactive shell, also where nothing was trained."""
        return any(_SHELL.fullmatch(name) for name in list_names(self.shells_folder))

    def attempt(self, number: int) -> Attempt:
        """The attempt of that number, whether it exists or not."""
        return Attempt(self.attempts_folder / f"{number:04d}")

    def attempts(self) -> list[Attempt]:
        """Attempts that were prepared or submitted, oldest first."""
        numbers = sorted(int(name) for name in list_names(self.attempts_folder) if _ATTEMPT.fullmatch(name))
        return [self.attempt(number) for number in numbers]

    # --- report and logs

    telemetry_folder = PathBelow("telemetry")  # a file a host: what its hardware does
    work = PathBelow("work")  # of a foreign program; it and its files last over attempts
    report_path = PathBelow("report.html")

    def write_report(self, html: str) -> None:
        write_whole(self.report_path, html)

    log_folder = PathBelow("logs")  # output of the ranks that this node's agent started, one folder a start

    def list_log_folders(self) -> set[Path]:
        """The folders of all starts of ranks, on all nodes."""
        return {*self.log_folder.glob("*"), *self.log_folder.glob("from-*/*")}

    def remove_log_folders(self, folders: Iterable[Path]) -> None:
        """Remove the output of those starts, and the folder of all where nothing is left in it."""
        for folder in folders:
            remove_folder(folder)
        remove_folder(self._setup_faults)
        with contextlib.suppress(OSError):
            self.log_folder.rmdir()

    def rank_output(self, rank: int) -> list[Path]:
        """Files with the output of a rank in its newest start by an agent, stdout first; empty where there was none. A
        start whose folder has a file WAITS is skipped: its processes are warm standbys."""
        places = [f"*/attempt_*/{rank}", *(f"from-{first}/*/attempt_*/{rank - first}" for first in range(rank + 1))]
        found = [path for place in places for path in self.log_folder.glob(f"{place}/std*.log")]
        found = [path for path in found if not (path.parents[2] / WAITS).exists()]
        if not found:
            return []
        newest = max(found, key=lambda path: path.stat().st_mtime).parent
        return sorted(newest.glob("std*.log"), reverse=True)

    def set_aside(self) -> Path | None:
        """Rename what an earlier run left here, for a fresh start; returns the new path, or None. Nothing is deleted:
        the old run stands beside it as `<name>.old-N`. Raises UserError for a path such as "."."""
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
        if is_link:  # the new run goes where the old one was, not to the disk of the link
            place.mkdir(FOLDER_MODE)
        with contextlib.suppress(FileNotFoundError):
            (target / "stop").unlink()
        return target

    # --- names

    status_path = PathBelow("status.json")  # as last written by the run
    _events_folder = PathBelow("events")

    def events_path(self, rank: int) -> Path:
        """The events of one rank."""
        return self._events_folder / f"rank-{rank:05d}.jsonl"
