"""Carries out a submission, or repeats one: last checks, snapshot, attempt folder, scheduler, registry.

Invariants:
- A refused submission leaves nothing behind; an interrupted one resumes where it was.
- Repeated: the run file is the one that the last attempt recorded, so a later edit is not taken by accident.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shardway.errors import ShardwayError, UserError
from shardway.launch.hosts.base import Host
from shardway.launch.job import Job
from shardway.launch.runs.find import Known, forget, remember, render_known
from shardway.launch.runs.job_status import check_free_for_job, read_ledger
from shardway.launch.snapshot import SnapshotPlan, take_snapshot
from shardway.launch.submission.prepare import Prepared, SubmitRequest, parse_order, prepare
from shardway.launch.submission.submit import Fill, Submitted, Submitter
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.runfile.load import COMMAND_LINE


@dataclass(frozen=True)
class SentSubmission:
    """A submission that the scheduler has taken. `found`: an earlier try had got through after all."""

    prepared: Prepared
    job: str
    host: str = ""
    found: bool = False
    further: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """How other verbs name the run."""
        return render_known(Known(str(self.prepared.job.run), self.host))

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        job = self.prepared.job
        return {
            "job": self.job,
            "attempt": job.attempt,
            "run": str(job.run),
            "host": self.host,
            "site": job.site,
            "scheduler": job.scheduler,
            "script": str(job.folder.job_script),
            "work": str(job.around.workdir),
            "found": self.found,
            "further": list(self.further),
        }


def send(order: SubmitRequest, host: Host, submitter: Submitter | None = None) -> SentSubmission:
    """Submit the next attempt of a run, or go on with one whose submission was interrupted.

    Raises UserError where something is wrong or refused, SiteError where the scheduler does not answer.
    """
    submitter = submitter or Submitter(host)
    prepared = prepare(order, host, look=True)
    run, ledger = prepared.job.run, prepared.ledger
    check_free_for_job(host, ledger, submitter.tell)
    known = Known(str(run), host.name, prepared.job.site)
    if ledger.last is not None and ledger.last.is_unsent:
        found = submitter.recover(prepared.job, ledger.last)
        if found is not None:
            remember(known)
            return SentSubmission(prepared, found.job, host.name, found=True)
    host.run(("rm", "-f", str(RunDir(run).stop_path)))  # obeyed by an earlier attempt; this one is wanted
    with _remembered(known, host, _snapshot_taker(host, prepared.snapshot)) as fill:
        submitted = submitter.submit(prepared.job, prepared.files, fill=fill)
    return SentSubmission(
        prepared, submitted.job, host.name, submitted.found, _send_ahead(submitter, prepared.job, submitted)
    )


@contextlib.contextmanager
def _remembered(known: Known, host: Host, fill: Fill) -> Iterator[Fill]:
    """The run is remembered as soon as there is a folder to fill, before the scheduler is asked, so that a kill does
    not lose it; one that was refused, and of which nothing is left, is forgotten."""
    new = False

    def remember_and_fill(attempt: Attempt) -> None:
        nonlocal new
        new = remember(known)
        fill(attempt)

    try:
        yield remember_and_fill
    except BaseException:
        if new and _is_gone(host, known.run):
            forget(known)
        raise


def _is_gone(host: Host, folder: str) -> bool:
    try:
        done = host.run(("test", "-e", folder))
    except ShardwayError:
        return False
    return done.code == 1 and not done.timed_out


def _send_ahead(submitter: Submitter, job: Job, first: Submitted) -> tuple[str, ...]:
    """The links of a chain whose jobs may not submit jobs: all of them now, each after the one before."""
    jobs, link, before = [], job, first.job
    while job.chain.until_done and job.chain.ahead and link.attempt < job.chain.max_attempts:
        link = link.successor()
        before = submitter.submit(link, {}, after=before).job
        jobs.append(before)
    return tuple(jobs)


def _snapshot_taker(host: Host, plan: SnapshotPlan | None) -> Fill:
    def take(attempt: Attempt) -> None:
        if plan is None:
            return
        if not host.name:
            take_snapshot(plan, attempt.code)
            return
        with tempfile.TemporaryDirectory() as scratch:
            local = Attempt(Path(scratch) / attempt.path.name)
            take_snapshot(plan, local.code)
            host.copy_tree(local.code, PurePosixPath(attempt.code))
            records = [path for path in sorted(local.path.iterdir()) if path.is_file()]
            texts = {PurePosixPath(attempt.path / path.name): path.read_bytes().decode("utf-8") for path in records}
            host.write_files(texts)

    return take


# --- the last order of a run


@contextlib.contextmanager
def read_last_order(host: Host, known: Known) -> Iterator[SubmitRequest]:
    """The last order of a run; its run file is there for as long as the context lasts. For a run that was trained by
    hand, what it was started with.

    Raises UserError where nothing says how the run was started, or its record is damaged.
    """
    run = Path(known.run)
    attempts = [entry.attempt for entry in read_ledger(host, run).entries]
    texts = host.read_files([PurePosixPath(path) for attempt in attempts for path in _records(attempt)])
    last = next((a for a in reversed(attempts) if PurePosixPath(a.order_path) in texts), None)
    if last is None:
        if host.name or not RunDir(run).resolved_path.exists():
            raise UserError(
                f"{run} was never submitted, so nothing says how.\n"
                "  To do: `shardway submit` it, or `shardway train` where it was trained by hand."
            )
        yield order_by_hand(RunDir(run))
        return
    with tempfile.TemporaryDirectory() as scratch:
        kept = texts.get(PurePosixPath(last.run_file))
        run_file = None
        if kept is not None:
            run_file = _copy(kept, Path(scratch) / last.run_file.name) if host.name else last.run_file
        order = parse_order(texts[PurePosixPath(last.order_path)], run, run_file)
        if order is None:
            raise UserError(
                f"{last.order_path} is damaged.\n  To do: submit the run with `shardway submit --dir {run}`."
            )
        yield order


def order_by_hand(run: RunDir) -> SubmitRequest:
    """What a run was started with that no job has trained yet. Raises UserError where its script is not here."""
    resolved = run.read_resolved()
    if "model" in resolved:
        return SubmitRequest(
            ResolveRequest(run.request_path, tuple(_list_overrides(run.resolved_path.read_text("utf-8"))), run.path)
        )
    command = next((event.get("command") for event in reversed([*run.all_events(0, ("started",))])), None)
    words = [str(word) for word in command] if isinstance(command, list) and command else [""]
    if not words[0].endswith(".py") or not Path(words[0]).is_file():
        raise UserError(
            f"{run.path} was trained by hand by a script ({words[0] or 'which is not recorded'}), which is not here.\n"
            f"  To do: run this where the script is, or `shardway submit --dir {run.path} -- python SCRIPT ...`."
        )
    return SubmitRequest(ResolveRequest(None, (), run.path), command=("python", *words))


def _list_overrides(resolved: str) -> Iterator[str]:
    """The keys of a resolved run that were set on the command line, as words of one."""
    section = ""
    for line in resolved.splitlines():
        entry, _, origin = line.rpartition(" # ")
        if line.startswith("["):
            section = line.strip("[] ")
        elif origin == COMMAND_LINE:
            name, _, value = entry.partition("=")
            yield f"{section}.{name.strip()}={value.strip()}"


def _copy(text: str, path: Path) -> Path:
    """A file of another machine, here."""
    path.write_text(text, encoding="utf-8")
    return path


def _records(attempt: Attempt) -> tuple[Path, Path]:
    return attempt.order_path, attempt.run_file
