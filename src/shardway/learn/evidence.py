"""What the folder of a lesson shows: its runs with their recorded facts, and its job scripts.

Invariants:
- Nothing is changed, and a run may be writing meanwhile.
- A run counts if its records agree: its id, its events from the first step on, and a newest checkpoint that is this
  run's, of the ranks that its events name, with every checksum right. Any other is listed with the reason.
- A run directory that is a copy of another one does not count a second time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardway.checkpoint.catalog import verify_checkpoint
from shardway.checkpoint.file_format import is_shard
from shardway.errors import JobError, ShardwayError
from shardway.rundir.attempts import Attempt, Ending
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event, drop_undone
from shardway.rundir.file_io import list_names
from shardway.rundir.names import find_run_id
from shardway.watch.facts import measured, number, whole

RUNS = "runs"
"""The folder of runs in that of a lesson, which `shardway train` uses by itself."""

_SCRIPT = "# Written by Shardway "
_LARGEST_BYTES = 1 << 20
"""Of a file that is looked into; scripts and answers are far smaller."""


@dataclass(frozen=True)
class LessonRun:
    """A run that counts: its directory, its resolved values, every event as written, and its newest checkpoint."""

    directory: RunDir
    name: str
    values: Mapping[str, Any]
    events: tuple[Event, ...]
    shard_bytes: tuple[int, ...]
    """Sizes of the files that each rank wrote of the newest checkpoint; empty without a checkpoint."""

    def get(self, key: str) -> Any:
        """The resolved value of `section.key`; None where the run has none."""
        section, _, name = key.partition(".")
        return (self.values.get(section) or {}).get(name)

    @cached_property
    def starts(self) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event["event"] == "started")

    @property
    def world(self) -> int:
        """Ranks of the last start."""
        return whole(self.starts[-1], "world") or 0

    @property
    def is_gpt(self) -> bool:
        """Whether it trained the model of a run file, and not that of a script."""
        return self.get("model.kind") == "transformer"

    @cached_property
    def steps(self) -> dict[int, Event]:
        """The steps that count, by number."""
        return {event["step"]: event for event in drop_undone(iter(self.events)) if event["event"] == "step"}

    @property
    def losses(self) -> dict[int, float]:
        return {step: measured(event, "loss") for step, event in self.steps.items()}

    @property
    def is_finished(self) -> bool:
        return self.events[-1]["event"] == "finished"

    @property
    def attempts(self) -> list[Attempt]:
        return self.directory.attempts()

    @property
    def endings(self) -> list[Ending]:
        """How each attempt of a job ended, in their order."""
        return [result.state for attempt in self.attempts if (result := attempt.read_result()) is not None]

    def list_resumed(self) -> list[tuple[Event, Event | None]]:
        """Each start that goes on from a checkpoint, with the end of the start before; None where that was killed."""
        found, ending = list[tuple[Event, Event | None]](), None
        for event in self.events:
            if event["event"] == "started":
                if (whole(event, "step") or 0) > 0:
                    found.append((event, ending))
                ending = None
            elif event["event"] in ("finished", "stopped", "failed"):
                ending = event
        return found

    def list_traces(self) -> list[Path]:
        """Traces of the profiler."""
        folder = self.directory.trace_path(0, 0, 0).parent
        return [folder / name for name in list_names(folder) if name.endswith(".json.gz")] if folder.is_dir() else []

    def find_median_s(self) -> float | None:
        """The median seconds of a step, without the first tenth, in which memory and caches settle; None without."""
        from statistics import median

        seconds = [value for event in self.steps.values() if (value := number(event, "seconds"))]
        return median(seconds[len(seconds) // 10 + 1 :]) if len(seconds) > 2 else None


@dataclass(frozen=True)
class JobScript:
    """A job script that a dry run printed into a file of the lesson."""

    path: Path
    text: str

    def find_setting(self, name: str) -> str:
        """The value of a shell variable that the script sets; empty without."""
        found = re.search(rf"^(?:\S+=\S+ )*{name}=(\S+)", self.text, re.MULTILINE)
        return found[1] if found else ""


@dataclass(frozen=True)
class LessonEvidence:
    """What a lesson's folder shows; `rejected`: why a run does not count, by its name."""

    folder: Path
    runs: tuple[LessonRun, ...]
    rejected: Mapping[str, str]
    scripts: tuple[JobScript, ...]

    @property
    def gpts(self) -> list[LessonRun]:
        """Finished runs of the lesson's model that saved what they learned."""
        return [run for run in self.runs if run.is_gpt and run.is_finished and run.shard_bytes]

    @property
    def own_loops(self) -> list[LessonRun]:
        """Finished runs of scripts."""
        return [run for run in self.runs if not run.is_gpt and run.is_finished]


def gather(folder: Path) -> LessonEvidence:
    """Read the folder of a lesson; what cannot be read is among the rejected."""
    runs, rejected, seen = list[LessonRun](), dict[str, str](), dict[str, str]()
    for name in sorted(_names(folder / RUNS)):
        directory = RunDir(folder / RUNS / name)
        if not directory.path.is_dir() or not directory.exists():
            continue
        shown = f"{RUNS}/{name}"
        try:
            run = read_run(directory, shown)
        except ShardwayError as error:
            rejected[shown] = str(error).partition("\n")[0]
            continue
        run_id = find_run_id(directory.path)
        if run_id in seen:
            rejected[shown] = f"it is a copy of {seen[run_id]}: both have the run id {run_id}"
            continue
        seen[run_id] = shown
        runs.append(run)
    return LessonEvidence(folder, tuple(runs), rejected, tuple(_read_scripts(folder)))


def _names(folder: Path) -> list[str]:
    return list_names(folder) if folder.is_dir() else []


def _read_scripts(folder: Path) -> Iterable[JobScript]:
    for name in sorted(_names(folder)):
        path = folder / name
        if name.endswith(".sh") and path.is_file() and path.stat().st_size < _LARGEST_BYTES:
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.startswith("#!") and _SCRIPT in text:
                yield JobScript(path, text)


def read_run(directory: RunDir, name: str) -> LessonRun:
    """A run whose records agree. Raises JobError with what is missing or does not agree."""
    if not find_run_id(directory.path):
        raise JobError("it has no run id, which every start writes")
    values = directory.read_resolved()
    events = tuple(directory.all_events())
    if not values or not events:
        raise JobError("it has no events" if values else "it has no resolved run")
    if events[0]["event"] != "started":
        raise JobError("its events do not begin with a start")
    steps = [event for event in drop_undone(iter(events)) if event["event"] == "step"]
    numbers = [whole(event, "step") for event in steps]
    if not steps:
        raise JobError("it has done no step")
    if numbers != list(range(1, len(steps) + 1)):
        raise JobError("its events lack steps")
    if not all(math.isfinite(measured(event, "loss")) for event in steps):
        raise JobError("its loss is not a number")
    shards = tuple[int, ...]()
    if saved := [step for step in directory.checkpoint_steps() if step <= len(steps)]:
        manifest = verify_checkpoint(directory, saved[-1])
        worlds = {whole(event, "world") for event in events if event["event"] == "started"}
        if manifest.world not in worlds:
            raise JobError(f"its checkpoint is of {manifest.world} ranks, and its events are not")
        shards = tuple(checksum.bytes for file, checksum in manifest.files.items() if is_shard(file))
    run = LessonRun(directory, name, values, events, shards)
    has_ended = any(event["event"] in ("saved", "finished") for event in events)
    if has_ended and not (shards or (run.get("train.profile") and run.list_traces())):
        raise JobError("it has no checkpoint of the steps in its events")
    return run
