"""Carries out a submission: the last looks, the snapshot, the attempt's folder, the scheduler, the registry.

Invariant: what is refused leaves nothing behind, and a submission that was interrupted goes on where it was. This
module must not print nor build scripts.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shardway.errors import ShardwayError
from shardway.launch.hosts.base import Host
from shardway.launch.job import Job
from shardway.launch.runs.busy import check_free_for_job
from shardway.launch.runs.find import render_known
from shardway.launch.runs.registry import Known, forget, remember
from shardway.launch.snapshot import SnapshotPlan, take_snapshot
from shardway.launch.submission.prepare import Prepared, SubmitRequest, prepare
from shardway.launch.submission.submit import Fill, Submitted, Submitter
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir


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
