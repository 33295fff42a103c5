"""The runs of `shardway scale`: which there are to be, which are there, and the others started here or submitted.

Invariants:
- A run directory belongs to one size and repeat. What is there is read, a job that waits or runs is waited for, and
  only what is missing is started: the same command may be left at any time and given again.
- Everything that can be found out is checked before the first run starts. What was made with other settings is refused,
  never mixed in.
- Runs on this machine come one after another, since they would slow each other.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardway.cli.options import report
from shardway.errors import JobError, Problem, UserError, check_no_problems
from shardway.resolve.request import KEYS_VARIABLE, ResolveRequest, resolve_request
from shardway.rundir.directory import RunDir
from shardway.runfile.capture import WITHOUT_EXTRAS
from shardway.units import render_plural
from shardway.watch.scaling.runs import StepWork, check_kind, work_of_keys

if TYPE_CHECKING:
    from shardway.launch.hosts.base import Host
    from shardway.launch.runs.job_status import JobStatus
    from shardway.launch.submission.prepare import Prepared, SubmitRequest
    from shardway.resolve.request import Resolution

POLL_S, POLL_ELSEWHERE_S = 2.0, 15.0
"""How often jobs are looked at, here and by ssh."""

# --- what there is to be


@dataclass(frozen=True)
class StudyRequest:
    """What `shardway scale` was asked for. `unit`: "ranks" of this machine, or "nodes" of jobs."""

    run_request: ResolveRequest
    sizes: tuple[int, ...]
    unit: str
    weak: bool
    steps: int
    repeats: int
    command: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "weak" if self.weak else "strong"

    def count(self, size: int) -> str:
        """ "2 ranks"."""
        return render_plural(size, self.unit.removesuffix("s"))


@dataclass(frozen=True)
class PlannedRun:
    """One run: of a size, a repeat (from 1), in its directory, with the keys over the user's, and its command."""

    size: int
    repeat: int
    path: Path
    keys: tuple[str, ...]
    command: tuple[str, ...] = ()

    @property
    def where(self) -> tuple[str, ...]:
        """The keys that let a script write there."""
        root, name = json.dumps(str(self.path.absolute().parent)), json.dumps(self.path.name)
        return (f"run.root={root}", f"run.name={name}")


def plan_runs(asked: StudyRequest, folder: Path) -> list[PlannedRun]:
    """The runs, by rising size. Raises UserError where the global batch cannot grow with the ranks."""
    batch = _find_batch(asked) if asked.weak else 0
    planned = []
    for size in asked.sizes:
        keys: tuple[str, ...] = (*WITHOUT_EXTRAS, f"train.steps={asked.steps} steps")
        if not asked.command:  # one of thousands of steps does not fit, and rates that rise keep the loss finite
            keys = (*keys, f"optim.warmup={asked.steps} steps")
        if batch:
            keys = (*keys, f"train.global_batch={_grow(batch, size, asked)}")
        if asked.unit == "nodes":
            keys = (*keys, f"site.nodes={size}")
        elif "run.threads" not in {word.partition("=")[0].strip() for word in asked.run_request.overrides}:
            keys = (*keys, f"run.threads={_share_cores(asked)}")  # else one rank alone would have all cores
        command = tuple(_fill_in(word, size, asked) for word in asked.command)
        for repeat in range(1, asked.repeats + 1):
            name = f"{asked.kind}-{size}{asked.unit}-{repeat}"
            planned.append(PlannedRun(size, repeat, folder / name, keys, command))
    return planned


def _find_batch(asked: StudyRequest) -> int:
    """The global batch of the smallest size; 0 where a script owns it."""
    from shardway.runfile.load import load_run

    request = asked.run_request
    loaded = load_run(request.run_file, request.overrides)
    if asked.command and "train.global_batch" not in {word.partition("=")[0].strip() for word in request.overrides}:
        return 0
    ramp = loaded.values.train.batch
    if not ramp.is_constant:
        origin = loaded.origins["train.global_batch"]
        what = f"{ramp}, and weak scaling needs one size, which grows with the ranks"
        remedy = "set train.global_batch=N for the smallest number of ranks"
        check_no_problems("the study", [Problem("train.global_batch", what, origin, remedy=remedy)])
    return ramp.largest


def _grow(batch: int, size: int, asked: StudyRequest) -> int:
    whole, rest = divmod(batch * size, asked.sizes[0])
    if rest:
        raise UserError(
            f"train.global_batch = {batch} on {asked.count(asked.sizes[0])} is no whole number of samples on "
            f"{asked.count(size)}, with the same work a rank.\n"
            f"  To do: set a train.global_batch that {asked.sizes[0]} divides, or choose multiples of {asked.sizes[0]}."
        )
    return whole


def _share_cores(asked: StudyRequest) -> int:
    """Threads that a rank has in every run: those of the largest."""
    return max(1, len(os.sched_getaffinity(0)) // asked.sizes[-1])


_PLACE = re.compile(r"\{(?:(\d+)\*)?(ranks|nodes)\}")


def _fill_in(word: str, size: int, asked: StudyRequest) -> str:
    """A word of the command with `{ranks}`, `{64*ranks}` (or nodes) filled in."""

    def fill(match: re.Match[str]) -> str:
        if match[2] != asked.unit:
            raise UserError(
                f"{match[0]} stands in the command, and the study counts {asked.unit}.\n"
                f"  To do: write {{{asked.unit}}} or {{64*{asked.unit}}}."
            )
        return str(int(match[1] or 1) * size)

    return _PLACE.sub(fill, word)


# --- whether what is there was made by the same request

_OF_PLACE = ("run", "site", "track", "notify")
"""Sections that say where a run is and what surrounds it, and not what its steps do."""


def _list_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Keys of resolved values that differ, as "train.steps 40 -> 60"; one that is open now fits all."""
    for section in now.keys() & before.keys():
        if section in _OF_PLACE or not isinstance(now[section], Mapping):
            continue
        for name in now[section].keys() & before[section].keys():
            old, new = before[section][name], now[section][name]
            if old != new and "auto" not in (old, new) and (section, name) != ("model", "hf"):
                yield f"{section}.{name} {old} -> {new}"


def _refuse_changed(folder: Path, changed: Mapping[Path, Sequence[str]]) -> None:
    if not changed:
        return
    lines = [f"{folder} has runs of this study that were made with other settings:"]
    lines += [f"    {path.name}: {', '.join(sorted(changes))}" for path, changes in changed.items()]
    lines += ["  To do: name another folder (--dir), or remove these runs: then they are made again."]
    raise UserError("\n".join(lines))


# --- on this machine, one after another


@dataclass
class RunsHere:
    """The runs of a study as processes of this machine: of `shardway train`, or torchrun for a script."""

    asked: StudyRequest
    folder: Path
    planned: list[PlannedRun]

    def check(self) -> None:
        """Raise UserError for what is wrong with any of them, before one is started."""
        if self.asked.command:
            self._check_script()
            return
        found = [self._resolve(run) for run in self.planned if run.repeat == 1]
        self._check_kind(found)
        by_size = {run.size: each for run, each in zip((r for r in self.planned if r.repeat == 1), found, strict=True)}
        changed = {}
        for run in self.planned:
            if self.is_done(run):
                now = by_size[run.size].resolved.values.model_dump(mode="json")
                if changes := [*_list_changes(RunDir(run.path).read_resolved(), now)]:
                    changed[run.path] = changes
        _refuse_changed(self.folder, changed)

    def _resolve(self, run: PlannedRun) -> Resolution:
        request = self.asked.run_request
        overrides = (*request.overrides, *run.keys)
        return resolve_request(replace(request, overrides=overrides, directory=run.path), run.size, run.size)

    def _check_kind(self, found: Sequence[Resolution]) -> None:
        works = []
        for size, each in zip(self.asked.sizes, found, strict=True):
            values = each.resolved.values
            works.append(work_of_keys(values.model_dump(mode="json"), size, values.train.batch.largest, None))
        check_kind([self.asked.count(size) for size in self.asked.sizes], _without_tokens(works), weak=self.asked.weak)

    def _check_script(self) -> None:
        script = next((word for word in _read_script(self.asked.command) if word.endswith(".py")), "")
        if script and not Path(script).is_file():
            raise UserError(f"there is no script {script}.\n  To do: check the path after `--`.")
        changed = {}
        for run in self.planned:
            if self.is_done(run):
                events = RunDir(run.path).all_events(0, ("started",))
                before = [str(word) for word in next(events, {}).get("command") or []]
                words = [str(word) for word in _read_script(run.command) if word != "-m"]
                if before[1:] != words[1:]:
                    changed[run.path] = [f"command {' '.join(before)} -> {' '.join(words)}"]
        _refuse_changed(self.folder, changed)

    def is_done(self, run: PlannedRun) -> bool:
        """Whether a run is there and finished."""
        return RunDir(run.path).read_status().get("state") == "finished"

    def describe(self, run: PlannedRun) -> str:
        """In a word."""
        return "there" if self.is_done(run) else "missing"

    def carry_out(self, *, wait: bool, agreed: bool) -> list[str]:
        """Run what is missing; nothing is left open, so the list of runs under way is empty."""
        for run in self.planned:
            if self.is_done(run):
                continue
            directory = RunDir(run.path)
            if directory.exists():  # it was broken off: its steps are not mixed with those of another start
                directory.writer_lock().await_free(report)
                directory.set_aside()
            of = f", repeat {run.repeat} of {self.asked.repeats}" if self.asked.repeats > 1 else ""
            report(f"{self.asked.count(run.size)}{of}: {run.path}")
            began = time.monotonic()
            self._start(run)
            report(f"{self.asked.count(run.size)}{of}: finished after {time.monotonic() - began:.0f} s")
        return []

    def _start(self, run: PlannedRun) -> None:
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if run.command:
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.size}"]
            words += _read_script(run.command)
            keys = [*self.asked.run_request.overrides, *run.keys, *run.where]
            environ[KEYS_VARIABLE] = json.dumps(keys)
            environ["OMP_NUM_THREADS"] = str(_share_cores(self.asked))
        else:
            file = self.asked.run_request.run_file
            words = [sys.executable, "-m", "shardway", "train", *([str(file)] if file else [])]
            words += [*self.asked.run_request.overrides, *run.keys]
            words += ["--nproc", str(run.size), "--dir", str(run.path), "--json"]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
            with _left_in_order(process):
                code = process.wait()
            status = RunDir(run.path).read_status()
            if status.get("state") == "stopped":
                raise JobError(
                    f"the run on {self.asked.count(run.size)} was stopped: {status.get('reason', '')}.\n"
                    f"  To do: give the same command again; it makes this run anew and keeps {_count_done(self)}."
                )
            if code or not self.is_done(run):
                output.seek(0)
                tail = _read_end(output.read().decode(errors="replace"))
                said = "".join(f"\n    {line}" for line in tail)
                without = "" if code else ", and recorded no finished run"
                raise JobError(
                    f"the run on {self.asked.count(run.size)} ended with exit code {code}{without}:{said}\n"
                    f"  To do: mend it, then give the same command again, which keeps {_count_done(self)}."
                )

    def list_read(self) -> Iterator[tuple[PlannedRun, RunDir]]:
        """The finished runs."""
        yield from ((run, RunDir(run.path)) for run in self.planned if self.is_done(run))


_OF_TORCHRUN = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/", re.M)


def _read_end(text: str) -> list[str]:
    """The last lines of what a run printed, without the pages in which torchrun reports that a rank has failed."""
    before = _OF_TORCHRUN.split(text)[0]
    return (before if before.strip() else text).splitlines()[-12:]


@contextmanager
def _left_in_order(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for a process that got the same Ctrl-C; it saves and leaves. A second one ends it. A SIGTERM, which may have
    reached this process alone, is passed on."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    try:
        yield
    except BaseException:
        try:
            process.wait()
        except BaseException:
            process.kill()
            raise
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _count_done(runs: RunsHere) -> str:
    return render_plural(sum(runs.is_done(run) for run in runs.planned), "finished run")


def _without_tokens(works: Sequence[StepWork]) -> list[StepWork]:
    """Before the data is open tokens are not known; samples stand for them."""
    return [replace(work, tokens=work.samples) for work in works]


def _read_script(command: Sequence[str]) -> list[str]:
    """The words that torchrun starts on each rank. Raises UserError for what is no Python program."""
    first, *rest = command
    if first.endswith(".py"):
        return list(command)
    if re.fullmatch(r"(.*/)?python[\d.]*", first) and rest and (rest[0].endswith(".py") or rest[0] == "-m"):
        return rest
    raise UserError(
        f"-- {' '.join(command)}: this is no Python program that ranks of this machine can run.\n"
        "  allowed: python SCRIPT.py ..., python -m MODULE ..., SCRIPT.py ...\n"
        "  To do: write it so, with a loop of `run.steps` (docs/own-loop.md), or scale a run file."
    )


# --- as jobs


@dataclass
class RunsAsJobs:
    """The runs of a study as submissions, each of which may wait, run and end by itself."""

    asked: StudyRequest
    folder: Path
    planned: list[PlannedRun]
    host: Host
    site: str
    standings: dict[Path, list[JobStatus]] = field(default_factory=dict)

    def check(self) -> None:
        """Look at what is there, and prepare what is missing. Raises UserError before anything is submitted."""
        self.look()
        changed = {}
        for run in self.planned:
            if self.standings[run.path] and (changes := self._list_changes(run)):
                changed[run.path] = changes
        _refuse_changed(self.folder, changed)
        found: list[Prepared] = []
        for run in self.planned:
            if run.repeat == 1 and not self.standings[run.path]:
                found.append(self._prepare(run))
        known = [each.resolved for each in found if each.resolved is not None]
        if len(known) == len(self.asked.sizes):
            works = [
                work_of_keys(
                    each.values.model_dump(mode="json"), each.circumstances.ranks, each.values.train.batch.largest, None
                )
                for each in known
            ]
            labels = [self.asked.count(size) for size in self.asked.sizes]
            check_kind(labels, _without_tokens(works), weak=self.asked.weak)

    def _request(self, run: PlannedRun) -> SubmitRequest:
        from shardway.launch.submission.prepare import SubmitRequest
        from shardway.runfile.load import load_run

        request, keys = self.asked.run_request, run.keys
        if run.command:
            given = [word for word in request.overrides if not word.startswith("site.")]
            inner = [*given, *(key for key in keys if not key.startswith("site.")), *run.where]
            environment = dict(load_run(request.run_file, request.overrides).values.site.environment)
            environment[KEYS_VARIABLE] = json.dumps(inner)
            table = ", ".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in environment.items())
            keys = (*(key for key in keys if key.startswith("site.")), f"site.environment={{{table}}}")
        overrides = (*request.overrides, *keys)
        return SubmitRequest(replace(request, overrides=overrides, directory=run.path), self.site, run.command)

    def _prepare(self, run: PlannedRun) -> Prepared:
        from shardway.launch.submission.prepare import prepare

        return prepare(self._request(run), self.host, look=True)

    def _list_changes(self, run: PlannedRun) -> list[str]:
        from shardway.launch.submission.prepare import render_order
        from shardway.runfile.load import load_run

        attempt, request = RunDir(run.path).attempt(1), self._request(run)
        paths = [PurePosixPath(attempt.order_path), PurePosixPath(attempt.run_file)]
        texts = self.host.read_files(paths)
        changes: list[str] = []
        with suppress(ValueError):
            before, now = json.loads(texts.get(paths[0], "{}")), json.loads(render_order(request))
            if before.get("command", now["command"]) != now["command"]:
                changes.append(f"command {' '.join(before['command'])} -> {' '.join(now['command'])}")
            if run.command and before.get("overrides", now["overrides"]) != now["overrides"]:
                changes.append(f"keys {' '.join(before['overrides'])} -> {' '.join(now['overrides'])}")
        if not run.command and paths[1] in texts:
            values = load_run(request.run_request.run_file, request.run_request.overrides).values
            with tempfile.TemporaryDirectory() as scratch:
                copy = Path(scratch) / attempt.run_file.name
                copy.write_text(texts[paths[1]], encoding="utf-8")
                kept = load_run(copy).values.model_dump(mode="json")
            changes += _list_changes(kept, values.model_dump(mode="json"))
        return changes

    def look(self) -> None:
        """What each run has come to, in a few exchanges with its host."""
        from shardway.launch.runs.job_status import read_ledgers, read_standings

        ledgers = read_ledgers(self.host, [run.path for run in self.planned])
        found = read_standings(self.host, ledgers)
        self.standings = {run.path: standings for run, standings in zip(self.planned, found, strict=True)}

    def is_done(self, run: PlannedRun) -> bool:
        """Whether its last attempt is finished."""
        return self._word(run) == "finished"

    def _word(self, run: PlannedRun) -> str:
        standings = self.standings[run.path]
        return standings[-1].word if standings and not standings[-1].entry.is_unsent else "missing"

    def describe(self, run: PlannedRun) -> str:
        """In a word or two."""
        word = self._word(run)
        job = self.standings[run.path][-1].entry.job if word != "missing" else ""
        return f"{'there' if word == 'finished' else word}{f' (job {job})' if job else ''}"

    def _is_active(self, run: PlannedRun) -> bool:
        return any(standing.is_active for standing in self.standings[run.path])

    @property
    def _in_turn(self) -> bool:
        """Whether the runs would share one machine."""
        from shardway.launch.schedulers.base import find_scheduler

        entry = next((s[-1].entry for s in self.standings.values() if s and s[-1].entry.submission), None)
        if entry is None or entry.submission is None:
            return False
        return find_scheduler(entry.submission.scheduler).this_machine

    def carry_out(self, *, wait: bool, agreed: bool) -> list[str]:
        """Submit what is missing, and wait for it; the runs that are not finished, with their state. Raises UserError
        where all of them may cost more than their budget and the person has not `agreed`, JobError where some have
        failed."""
        from shardway.launch.submission.budget import check_budget, estimate_cost
        from shardway.launch.submission.submit import Submitter, submit_run

        missing = [self._prepare(run) for run in self.planned if self._word(run) == "missing"]
        check_budget([estimate_cost(each) for each in missing], agreed=agreed)
        submitter = Submitter(self.host, tell=report)
        try:
            for run in self.planned:
                if self._word(run) == "missing":
                    sent = submit_run(self._request(run), self.host, submitter, agreed=True)
                    report(f"{self._label(run)}: job {sent.job}, {sent.reference}")
                    self.look()
                    if self._in_turn and wait:
                        self._wait([run])
            if wait:
                self._wait(self.planned)
        except KeyboardInterrupt:
            report("left; jobs go on, and the same command goes on with the study")
            raise
        failed = [run for run in self.planned if not self.is_done(run) and not self._is_active(run)]
        failed = [run for run in failed if self._word(run) != "missing"]
        if failed:
            lines = [f"{render_plural(len(failed), 'run')} of {len(self.planned)} did not finish:"]
            lines += [f"    {run.path}: {self._explain(run)}" for run in failed]
            lines += [
                "  To do: see `shardway logs RUN`; `shardway resume RUN` goes on with it, or remove its directory;"
            ]
            lines += ["  then give the same command again. What is finished is kept."]
            raise JobError("\n".join(lines))
        return [f"{run.path}: {self._word(run)}" for run in self.planned if not self.is_done(run)]

    def _label(self, run: PlannedRun) -> str:
        of = f", repeat {run.repeat} of {self.asked.repeats}" if self.asked.repeats > 1 else ""
        return f"{self.asked.count(run.size)}{of}"

    def _explain(self, run: PlannedRun) -> str:
        result = self.standings[run.path][-1].result
        return f"{result.state}: {result.reason.splitlines()[0]}" if result and result.reason else self._word(run)

    def _wait(self, runs: Sequence[PlannedRun]) -> None:
        """Until none of these waits or runs; each change of a state is a line."""
        known: dict[Path, str] = {}
        while True:
            self.look()
            for run in runs:
                word = self._word(run)
                if known.get(run.path, word if word == "finished" else "") != word:
                    report(f"{self._label(run)}: {word}")
                known[run.path] = word
            if not any(self._is_active(run) for run in runs):
                return
            time.sleep(POLL_ELSEWHERE_S if self.host.name else POLL_S)

    def list_read(self) -> Iterator[tuple[PlannedRun, RunDir]]:
        """The finished runs; of another host, copies of what a study reads (not the samples of its hardware), which are
        there until the next one is asked for."""
        for run in self.planned:
            if not self.is_done(run):
                continue
            if not self.host.name:
                yield run, RunDir(run.path)
                continue
            with tempfile.TemporaryDirectory() as scratch:
                yield run, self._copy(RunDir(run.path), RunDir(Path(scratch) / run.path.name))

    def _copy(self, there: RunDir, here: RunDir) -> RunDir:
        last = self.standings[there.path][-1].entry.attempt
        wanted = [there.resolved_path, there.status_path, there.request_path, there.events_path(0)]
        wanted += [last.order_path, *last.record_paths]
        texts = self.host.read_files([PurePosixPath(path) for path in wanted])
        for path, text in texts.items():
            target = here.path / Path(path).relative_to(there.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return here
