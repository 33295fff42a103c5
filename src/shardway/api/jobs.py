"""Functions as jobs: `shardway.submit(train, 3e-4, nodes=2)`, `shardway.Executor`, and the future that both return.

    job = shardway.submit(train, 3e-4, site="leonardo-booster", gpus=4, walltime="2h")
    print(job.state, job.run)
    loss = job.result()

Invariants:
- A job of a function is a run as any other: its directory, snapshot, attempts and logs are those of `shardway submit`,
  and every verb works on it.
- A future is settled once, by what the ranks left or by how the job ended as `shardway status` explains it. What is
  not known yet settles nothing: a silent scheduler or host is asked again.
- Options of the job and arguments of the function are never mixed up: a name that could be both is refused.

A thread of the executor looks at the run directories often, and asks the scheduler ever more rarely; it ends with the
last open job.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import json
import logging
import os
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardway.errors import JobError, SiteError, UserError
from shardway.launch.hosts import find_host, parse_target
from shardway.launch.runs.find import Known, find_known, render_known
from shardway.rundir.attempts import Ending
from shardway.rundir.directory import RunDir

if TYPE_CHECKING:
    from shardway.launch.calls.packing import FunctionCall
    from shardway.launch.hosts.base import Host
    from shardway.launch.runs.job_status import JobStatus
    from shardway.launch.submission.prepare import SubmitRequest
    from shardway.launch.submission.submit import SentSubmission

# --- how often is looked

LOOK_S, LOOK_FAR_S = 0.2, 5.0
"""Seconds between two looks at run directories: here, and on another host."""
ASK_S, ASK_MOST_S = 10.0, 80.0
"""Seconds between two questions to the scheduler: 10, 20, 40 and then 80."""
ASK_HERE_S = 1.0
"""The same where this machine is the scheduler."""
ASK_ENDED_S = 2.0
"""The same once a job has left a result that only its scheduler can explain."""

ROOT = "runs"
"""The folder of run directories, as that of run files (run.root)."""


# --- what a job is asked for


@dataclass(frozen=True)
class JobOptions:
    """What `shardway.submit` and `shardway.Executor` take besides the function and its arguments; None for the default
    of the site or of the run.

    `site` is that of `--on`: SITE, HOST:SITE or USER@HOST:SITE. `gpus`: accelerators of a node, with a rank each;
    without it a node has `ranks_per_node` ranks, by default one. `walltime`: "2h". `name`: the run's. `root`: the
    folder of run directories. `until_done`: further jobs call the function again until one returns. `keys`: any other
    key of a run file, as {"site.qos": "x"} or ["site.qos=x"]."""

    site: str = ""
    nodes: int | None = None
    gpus: int | None = None
    ranks_per_node: int | None = None
    walltime: str | float | None = None
    memory: str | int | None = None
    queue: str | None = None
    account: str | None = None
    name: str = ""
    root: str | Path = ""
    until_done: bool = False
    max_attempts: int = 0
    keys: Mapping[str, Any] | Sequence[str] = ()

    def list_overrides(self) -> tuple[str, ...]:
        """As words of the command line. Raises UserError for options that contradict each other, and for a name that no
        folder can have."""
        from shardway.runfile.schema import RUN_NAME

        if self.name != "" and re.fullmatch(RUN_NAME, str(self.name), re.DOTALL) is None:
            raise UserError(
                f"name={str(self.name)!r}: it is not the name of a folder.\n"
                "      allowed: a string without / that is more than dots; root=... is the folder in which the run lies"
            )
        if self.max_attempts and not self.until_done:
            raise UserError("max_attempts limits how often a function is called again; it goes with until_done=True.")
        if self.gpus is not None and self.ranks_per_node not in (None, self.gpus):
            raise UserError(
                f"gpus={self.gpus} and ranks_per_node={self.ranks_per_node}: each accelerator has one rank.\n"
                "  To do: leave one of them out."
            )
        if self.gpus is not None and self.gpus < 1:
            raise UserError(f"gpus={self.gpus}: it counts accelerators of a node.\n      allowed: 1 or more, or None")
        ranks = self.gpus if self.gpus is not None else self.ranks_per_node
        given = {
            "site.nodes": self.nodes,
            "site.walltime": self.walltime,
            "site.memory": self.memory,
            "site.queue": self.queue,
            "site.account": self.account,
        }
        own = {key: json.dumps(value) for key, value in given.items() if value is not None}
        words = [f"{key}={value}" for key, value in self.keys.items()] if isinstance(self.keys, Mapping) else self.keys
        if isinstance(words, str):
            words = [words]
        others = dict(word.partition("=")[::2] for word in words)
        others = {key.strip(): value.strip() for key, value in others.items()}
        if ranks is not None or "site.ranks_per_node" not in others:
            own["site.ranks_per_node"] = str(1 if ranks is None else ranks)
        for key, option in {"run.root": "root", "run.name": "name"}.items():
            if key in others:
                raise UserError(
                    f"keys sets {key}, which is the option {option} here.\n  To do: {option}={others[key]!r}"
                )
        for key in own.keys() & others.keys():
            raise UserError(f"{key} is set twice: {own[key]}, and in keys {others[key]}.\n  To do: leave one out.")
        return tuple(f"{key}={value}" for key, value in {**own, **others}.items())


OPTIONS = tuple(JobOptions.__dataclass_fields__)


# --- a job


class FunctionJob(concurrent.futures.Future[Any]):
    """A function that a job calls. It is a `concurrent.futures.Future`: `result`, `exception`, `done`,
    `add_done_callback`, `concurrent.futures.wait` and `as_completed`, and `asyncio.wrap_future` work.

    `job_id`: the scheduler's; `run`: the run directory, on `host` ("": this machine); `reference`: how the verbs of the
    command line name it; `function`: its name; `ranks`: how many call it; `until_done`: further jobs call it again."""

    def __init__(
        self, host: str, run: Path, *, job_id: str, attempt: int, function: str, ranks: int, until_done: bool
    ) -> None:
        super().__init__()
        self.host, self.run, self.job_id, self.attempt = host, run, job_id, attempt
        self.function, self.ranks, self.until_done = function, ranks, until_done
        self._values: list[Any] = []
        self._word = ""
        self._watcher: JobWatcher | None = None

    # --- what it came to

    def results(self, timeout: float | None = None) -> list[Any]:
        """What each rank returned, as `result` gives that of rank 0. Raises what a rank raised, with the traceback of
        the job as its cause; JobError where the job ended without a value; TimeoutError after `timeout` seconds."""
        self.result(timeout)
        return list(self._values)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, or for `timeout` seconds; returns whether it has."""
        concurrent.futures.wait([self], timeout)
        return self.done()

    @property
    def state(self) -> str:
        """In one word, as `shardway status` has it: queued, running, finished, deadline, stopped, out_of_memory,
        node_failure, crashed, ... A job that has not ended is asked for at its scheduler."""
        from shardway.launch.runs.job_status import find_current

        if self._word:
            return self._word
        statuses = self._read_statuses()
        if not self.until_done:
            statuses = [each for each in statuses if each.entry.number == self.attempt]
        shown = find_current(statuses)
        if self.done():
            if shown is None or shown.entry.result is None or shown.result is None:  # its last words are still to come
                return str(Ending.FINISHED if self.exception() is None else Ending.CRASHED)
            self._word = shown.word
        return shown.word if shown is not None else "unknown"

    def logs(self, rank: int | None = None) -> str:
        """What the newest attempt has printed so far, of all ranks or of one; "" where that is nothing yet."""
        from shardway.launch.runs.job_status import read_ledger
        from shardway.launch.runs.logs import choose_attempt, only_rank, read_output

        host = find_host(self.host)
        with contextlib.suppress(UserError):
            lines = read_output(host, choose_attempt(read_ledger(host, self.run), None).attempt, None)
            chosen = lines if rank is None or self.ranks == 1 else only_rank(lines, rank)
            return "".join(f"{line}\n" for line in chosen)
        return ""

    # --- ending it

    def cancel(self) -> bool:
        """End its jobs at once, as `shardway stop --now` does; returns whether there was something to end. `result`
        then raises the JobError of a job that was stopped."""
        return self._stop(now=True)

    def stop(self) -> bool:
        """Ask it to end after its current step, which a function with `shardway.start()` obeys; what waits leaves the
        queue."""
        return self._stop(now=False)

    def _stop(self, *, now: bool) -> bool:
        from shardway.launch.runs.job_status import read_ledger
        from shardway.launch.runs.stop import Stopper

        if self.done():
            return False
        stopper = Stopper(find_host(self.host))
        ledger = read_ledger(stopper.host, self.run)
        report = stopper.cancel(ledger) if now else stopper.ask(ledger)
        if self._watcher is not None:
            self._watcher.hurry(self)
        return bool(report.asked or report.cancelled)

    # --- how it is shown

    @property
    def reference(self) -> str:
        """How the verbs of the command line name it: `shardway status REFERENCE`."""
        return render_known(Known(str(self.run), self.host))

    def __repr__(self) -> str:
        return f"<FunctionJob {self.function}, job {self.job_id or 'none yet'}, {self.reference}>"

    def _repr_html_(self) -> str:
        from shardway.api.display import render_job

        return render_job(self)

    def watch(self, interval_s: float = 2.0) -> None:
        """Show its state until it has ended: as a widget or a cell that is redrawn in a notebook, else as lines."""
        from shardway.api.display import watch

        watch(self, interval_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_job, (self.reference,)

    # --- settled by the watcher

    def _read_statuses(self) -> list[JobStatus]:
        from shardway.launch.runs.job_status import read_ledger, read_standing

        host = find_host(self.host)
        return read_standing(host, read_ledger(host, self.run))

    def _settle(self, values: Sequence[Any] = (), error: BaseException | None = None, word: str = "") -> None:
        """`word`: how it ended, where no record of it will state that."""
        if self.done():
            return
        self._word, self._values = word, list(values)
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(self._values[0])


# --- the thread that settles jobs


@dataclass
class _OpenJob:
    """A job that is looked at: `next_s`: when its scheduler is asked again, and after how long then; `ended`: it has
    left a result, or was ended from here; `seen`: how many ranks had left a record at the last look; `gone`: how often
    in a row it was found to have ended without a value."""

    job: FunctionJob
    next_s: float
    gap_s: float
    ended: bool = False
    seen: int = 0
    gone: int = 0


class JobWatcher:
    """Looks at the open jobs of one host in a thread of its own, which ends when none is left."""

    def __init__(self, host: Host, *, here: bool) -> None:
        """`here`: this machine is the scheduler."""
        self._host = host
        self._first_gap_s = ASK_HERE_S if here else ASK_S
        self._most_gap_s = ASK_HERE_S if here else ASK_MOST_S
        self._look_s = LOOK_FAR_S if host.name else LOOK_S
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._open: list[_OpenJob] = []
        self._thread: threading.Thread | None = None

    def add(self, *jobs: FunctionJob) -> None:
        """Look at further jobs."""
        next_s = time.monotonic() + self._first_gap_s
        with self._lock:
            for job in jobs:
                job._watcher = self
                self._open.append(_OpenJob(job, next_s, self._first_gap_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shardway jobs", daemon=True)
                self._thread.start()

    def hurry(self, job: FunctionJob) -> None:
        """Ask the scheduler of a job now."""
        with self._lock:
            for each in self._open:
                if each.job is job:
                    each.next_s, each.ended = 0.0, True
        self._wake.set()

    def join(self) -> None:
        """Wait for the end of the thread, which comes soon after the last job's."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._open = [each for each in self._open if not each.job.done()]
                if not self._open:
                    self._thread = None
                    return
                jobs = list(self._open)
            try:
                self._look(jobs)
            except SiteError:  # the host does not answer now
                self._wake.wait(self._look_s * 5)
            except Exception as error:  # else its callers would wait for ever
                for each in jobs:
                    each.job._settle(error=error, word="unknown")
            if all(each.job.done() for each in jobs):
                continue
            self._wake.wait(self._look_s)
            self._wake.clear()

    def _look(self, jobs: Sequence[_OpenJob]) -> None:
        """Settle what can be settled: by the records of ranks, which one listing finds, else by the scheduler."""
        found = list_records(self._host, [each.job.run for each in jobs])
        due = []
        for each in jobs:
            names = found.get(each.job.run, frozenset())
            job = each.job
            if not job.running() and any(name.endswith("/started.json") for name in names):
                job.set_running_or_notify_cancel()
            if not job.until_done and self._settle_by_records(each, job.attempt, names):
                continue
            newest = max((name.partition("/")[0] for name in names), default="")
            each.ended = each.ended or f"{newest}/result.json" in names
            if each.next_s <= time.monotonic() or (each.ended and each.gap_s > ASK_ENDED_S):
                due.append(each)
        if due:
            self._ask(due, found)

    def _settle_by_records(self, entry: _OpenJob, attempt: int, names: Iterable[str]) -> bool:
        """Settle a job whose ranks have all returned, or of which one has raised."""
        from shardway.launch.calls.packing import read_outcome

        job = entry.job
        folder = RunDir(job.run).attempt(attempt)
        begin = f"{attempt:04d}/returned/rank-"
        ranks = sorted(int(name[len(begin) : -len(".json")]) for name in names if name.startswith(begin))
        if len(ranks) == entry.seen:  # nothing new
            return False
        entry.seen = len(ranks)
        paths = {rank: PurePosixPath(folder.returned_path(rank)) for rank in ranks}
        texts = self._host.read_files(list(paths.values()))
        outcomes = [read_outcome(texts.get(path, ""), rank, job.function, job.ranks) for rank, path in paths.items()]
        failed = next((each for each in outcomes if each.error is not None), None)
        if failed is not None:
            job._settle(error=failed.error)
        elif len(outcomes) == job.ranks:
            job._settle([each.value for each in outcomes])
        return job.done()

    def _ask(self, due: Sequence[_OpenJob], found: Mapping[Path, frozenset[str]]) -> None:
        """Settle jobs of which none waits or runs any more."""
        from shardway.launch.runs.job_status import read_ledgers, read_standings

        ledgers = read_ledgers(self._host, [each.job.run for each in due])
        for each, ledger, statuses in zip(due, ledgers, read_standings(self._host, ledgers), strict=True):
            job = each.job
            each.gap_s = ASK_ENDED_S if each.ended else min(2 * each.gap_s, self._most_gap_s)
            each.gap_s = min(each.gap_s, self._most_gap_s)
            each.next_s = time.monotonic() + each.gap_s
            if not ledger.entries:
                gone = f"the run directory {job.reference} is gone, and what {job.function} returned with it."
                job._settle(error=JobError(gone), word="unknown")
                continue
            mine = statuses if job.until_done else [s for s in statuses if s.entry.number == job.attempt]
            done = [s for s in mine if s.result is not None and not s.ran_nothing]
            finished = next((s for s in done if s.result and s.result.state is Ending.FINISHED), None)
            if finished is None and any(s.is_active or s.entry.is_unsent for s in mine):
                continue
            last = finished or (done[-1] if done else mine[-1])
            names = list_records(self._host, [job.run])[job.run]  # what came since the listing
            each.seen = 0
            if self._settle_by_records(each, last.entry.number, names) or self._may_be_there(last):
                continue
            # A rank may record the end of its training before the function returns, and a file system may lag.
            each.gone, each.ended = each.gone + 1, True
            if each.gone > 1:
                job._settle(error=explain_end(job, last), word=last.word)

    def _may_be_there(self, status: JobStatus) -> bool:
        """Whether the job of an attempt still runs, by its scheduler; also where that does not answer."""
        from shardway.launch.schedulers.base import JobPhase, SchedulerSilent, find_scheduler, is_job_id

        submission, job = status.entry.submission, status.entry.job
        if submission is None or not is_job_id(job):
            return False
        scheduler = find_scheduler(submission.scheduler)
        try:
            record = scheduler.parse_records([job], self._host.run_many(scheduler.query([job]))).get(job)
        except SchedulerSilent:
            return True
        return record is not None and record.phase in (JobPhase.QUEUED, JobPhase.RUNNING)


def list_records(host: Host, runs: Sequence[Path]) -> dict[Path, frozenset[str]]:
    """Of each run the names of its records, as "0001/result.json" and "0001/returned/rank-00000.json", in one
    exchange. Raises HostUnreachable."""
    folders = {run: RunDir(run).attempts_folder for run in runs}
    if not host.name:
        patterns = ("*/started.json", "*/result.json", "*/returned/rank-*.json")
        return {
            run: frozenset(path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern))
            for run, folder in folders.items()
        }
    names = ("-name", "started.json", "-o", "-name", "result.json", "-o", "-name", "rank-*.json")
    done = host.run(("find", *map(str, folders.values()), "-mindepth", "2", "-maxdepth", "3", "(", *names, ")"))
    lines = done.out.splitlines()
    return {
        run: frozenset(line[len(str(folder)) + 1 :] for line in lines if line.startswith(f"{folder}/"))
        for run, folder in folders.items()
    }


def explain_end(job: FunctionJob, status: JobStatus) -> JobError:
    """Why there is no value, as `shardway status` explains it."""
    result, why = status.result, status.why
    reason = (result.reason if result is not None else "") or "its job ended without a word"
    sentences = [f"{job.function} returned nothing: job {status.entry.job or 'none'} is {status.word}: {reason}"]
    if why is not None and why.code != "completed" and why.sentence.rstrip(".") != reason.rstrip("."):
        sentences.append(why.sentence)
    remedies = [why.remedy] if why is not None and why.code != "completed" and why.remedy else []
    remedies.append(f"`shardway logs {shlex.quote(job.reference)}` has what it printed")
    text = " ".join(f"{sentence.rstrip('.')}." for sentence in sentences)
    return JobError(f"{text}\n  To do: {'; '.join(remedies)}.")


# --- submitting


class Executor(concurrent.futures.Executor):
    """Submits functions as jobs with the options of `shardway.submit`:

        with shardway.Executor(site="leonardo-booster", gpus=4, walltime="2h") as executor:
            jobs = [executor.submit(train, lr) for lr in (1e-3, 3e-3)]
            for job in concurrent.futures.as_completed(jobs):
                print(job.result())

    All arguments of `submit` behind the function are the function's. Leaving the block waits for all jobs. `name` is
    the beginning of the runs' names, each of which has an end of its own."""

    def __init__(self, **options: Any) -> None:
        """The fields of `JobOptions`. Raises UserError for others."""
        check_options(options)
        self.options = JobOptions(**options)
        self.options.list_overrides()
        target = parse_target(self.options.site) if self.options.site else None
        self._site = target.site if target else ""
        self._host = find_host(target.host if target else "")
        self._log = logging.getLogger("shardway")
        self._watcher: JobWatcher | None = None
        self._jobs: list[FunctionJob] = []
        self._is_shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> FunctionJob:
        """Submit a call; it returns when the scheduler has taken the job. Raises UserError where something is wrong or
        refused, SiteError where a host or its scheduler does not answer."""
        return self._submit(fn, args, kwargs, name="")

    def map_array(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], max_parallel: int | None = None
    ) -> list[FunctionJob]:
        """Submit a call for each row of arguments, as one job array where the scheduler has them; at most
        `max_parallel` run at once."""
        from shardway.launch.calls.packing import describe_function
        from shardway.launch.submission.array import ArrayRequest, submit_array
        from shardway.launch.submission.submit import Submitter

        if max_parallel is not None and max_parallel < 1:
            raise UserError(f"max_parallel={max_parallel}: no job could run.\n      allowed: 1 or more, or None")
        if not iterables:
            raise UserError(
                f"{describe_function(fn)} was given no arguments to call it with.\n"
                "  To do: name a sequence for each of its arguments: executor.map(train, [1e-3, 3e-3])"
            )
        calls = [self._pack(fn, row, {}) for row in zip(*iterables, strict=False)]
        if not calls:
            return []
        name = self._choose_name(calls[0].short)
        folder = Path(str(self._host.expand(f"{self.options.root or ROOT}/{name}")))
        requests = [self._make_request(call, folder / f"{place:03d}") for place, call in enumerate(calls)]
        submitter = Submitter(self._host, tell=self._log.warning)
        sent = submit_array(ArrayRequest(requests, folder, name, max_parallel or 0), self._host, submitter)
        return self._follow(sent, calls[0].function)

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        max_parallel: int | None = None,
    ) -> Iterator[Any]:
        """The values of `map_array` in the order of their arguments. `chunksize` and `buffersize`, of Python's own
        executors, change nothing: each call is a task."""
        end = None if timeout is None else time.monotonic() + timeout
        jobs = self.map_array(fn, *iterables, max_parallel=max_parallel)

        def values() -> Iterator[Any]:
            for job in jobs:
                yield job.result(None if end is None else max(0.0, end - time.monotonic()))

        return values()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no further calls, and wait for all jobs, or cancel those that have not begun."""
        self._is_shut = True
        if cancel_futures:
            for job in self._jobs:
                if not job.done() and not job.running():
                    job.cancel()
        if wait:
            concurrent.futures.wait(self._jobs)
            if self._watcher is not None:
                self._watcher.join()

    def _submit(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> FunctionJob:
        from shardway.launch.submission.submit import Submitter, submit_run

        call = self._pack(fn, args, kwargs)
        place = Path(self.options.root or ROOT) / (name or self._choose_name(call.short))
        submitter = Submitter(self._host, tell=self._log.warning)
        sent = submit_run(self._make_request(call, place), self._host, submitter)
        return self._follow([sent], call.function)[0]

    def _pack(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> FunctionCall:
        from shardway.launch.calls.packing import pack_call

        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")  # as Python's own executors
        return replace(pack_call(fn, args, kwargs), gpus=self.options.gpus or 0)

    def _choose_name(self, short: str) -> str:
        return f"{self.options.name or short}-{secrets.token_hex(3)}"

    def _make_request(self, call: FunctionCall, directory: Path) -> SubmitRequest:
        from shardway.launch.submission.prepare import SubmitRequest
        from shardway.resolve.request import ResolveRequest

        options = self.options
        return SubmitRequest(
            ResolveRequest(None, options.list_overrides(), directory),
            self._site,
            (call.function,),
            options.until_done,
            options.max_attempts,
            here=Path.cwd(),
            call=call,
        )

    def _follow(self, sent: Sequence[SentSubmission], function: str) -> list[FunctionJob]:
        """The futures of what the scheduler has taken; its warnings go to the log `shardway`, each once."""
        from shardway.launch.schedulers.base import find_scheduler

        for warning in dict.fromkeys(warning for each in sent for warning in each.prepared.warnings):
            self._log.warning("%s", warning)
        if self._watcher is None:
            here = find_scheduler(sent[0].prepared.job.scheduler).this_machine
            self._watcher = JobWatcher(self._host, here=here)
        made = []
        for each in sent:
            job = each.prepared.job
            future = FunctionJob(
                self._host.name,
                job.run,
                job_id=each.job,
                attempt=job.attempt,
                function=function,
                ranks=job.shape.ranks,
                until_done=job.chain.until_done,
            )
            made.append(future)
        self._jobs += made
        self._watcher.add(*made)
        return made


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError for names that are no options of a job."""
    import difflib

    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        close = [found[0] for name in unknown if (found := difflib.get_close_matches(name, OPTIONS, n=1))]
        meant = f"\n  Did you mean {', '.join(close)}?" if close else ""
        raise UserError(
            f"{', '.join(unknown)}: no option of a job.\n      allowed: {', '.join(OPTIONS)}{meant}\n"
            '  To do: set any other key with keys={"site.qos": "..."}.'
        )


def submit(fn: Callable[..., Any], /, *args: Any, **words: Any) -> FunctionJob:
    """Submit the call `fn(*args, ...)` as a job. Keywords are options of the job (`JobOptions`) by their names, and
    else arguments of the function; one that is both is refused: `shardway.Executor(...).submit(fn, ...)` keeps them
    apart. Here `name` is the whole name of the run, of which a further submission is the next attempt.

    Raises UserError where something is wrong or refused, SiteError where a host or its scheduler does not answer."""
    from shardway.launch.calls.packing import check_arguments, describe_function

    options = {name: value for name, value in words.items() if name in OPTIONS}
    kwargs = {name: value for name, value in words.items() if name not in OPTIONS}
    if callable(fn):
        parameters: Mapping[str, Any] = {}
        with contextlib.suppress(TypeError, ValueError):
            parameters = inspect.signature(fn).parameters
        both = [name for name in options if name in parameters]
        if both:
            function, named = describe_function(fn), ", ".join(f"{name}=" for name in both)
            raise UserError(
                f"{named} is an argument of {function} and an option of shardway.submit.\n"
                f"  To do: keep them apart: shardway.Executor(OPTIONS).submit({function}, ARGUMENTS)"
            )
        check_arguments(fn, args, kwargs, OPTIONS)
    name = str(options.get("name", ""))
    return Executor(**options)._submit(fn, args, kwargs, name)


def open_job(word: str | os.PathLike[str]) -> FunctionJob:
    """The job of a function again, in another process than the one that submitted it: by its run directory, its name
    or the id of its job, as for `shardway status`. Raises UserError where that is no job of a function."""
    from shardway.launch.calls.packing import parse_call
    from shardway.launch.runs.job_status import read_ledger
    from shardway.launch.schedulers.base import find_scheduler

    known = find_known(os.fspath(word))
    host = find_host(known.host)
    run = Path(known.run) if known.host else Path(known.run).absolute()
    if not known.host and run.exists() and run.stat().st_uid != os.getuid():
        raise UserError(
            f"{run} belongs to another person, and a value is a pickle, which runs their code when it is read.\n"
            "  To do: shardway.Run(...) reads what the run has recorded, without any code of theirs."
        )
    ledger = read_ledger(host, run)
    entries = [entry for entry in ledger.entries if entry.submission is not None]
    paths = {PurePosixPath(entry.attempt.call_path): entry for entry in entries}
    orders = [PurePosixPath(entry.attempt.order_path) for entry in entries]
    texts = host.read_files([*paths, *orders])
    path = next((path for path in reversed(paths) if path in texts), None)
    call = parse_call(texts[path]) if path is not None else None
    if path is None or call is None:
        raise UserError(
            f"{render_known(Known(str(run), known.host))} is a run that calls no function.\n"
            "  To do: shardway.Run(...) reads what a run holds; shardway status shows its jobs."
        )
    entry, chained = paths[path], False
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        chained = json.loads(texts.get(PurePosixPath(entry.attempt.order_path), "{}")).get("until_done") is True
    submission = entry.submission
    job = FunctionJob(
        known.host,
        run,
        job_id=entry.job,
        attempt=entry.number,
        function=call.function,
        ranks=call.ranks,
        until_done=chained,
    )
    scheduler = find_scheduler(submission.scheduler) if submission is not None else None
    JobWatcher(host, here=scheduler is not None and scheduler.this_machine).add(job)
    return job


__all__ = ["Executor", "FunctionJob", "JobOptions", "open_job", "submit"]
