"""Ends a run: gracefully through its stop file, or at once through the scheduler.

Gracefully: the stop file is written, so that the ranks finish their step, save and exit; waiting jobs are removed from
the queue. If the file system takes no stop file, ranks get a signal, which they obey alike. Killing a job in the middle
of a collective loses the work since the last checkpoint and, on some machines, takes nodes out of service until an
administrator resets them.

Invariant: only jobs that belong to this run are cancelled. The user is not asked here.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from shardway.errors import SiteError, UserError
from shardway.launch.hosts.base import Host
from shardway.launch.runs.job_status import JobStatus, Ledger, LedgerEntry, read_ledger, read_standing
from shardway.launch.schedulers.base import JobPhase, find_scheduler, is_job_id
from shardway.rundir.attempts import Ending, Result, render_result

POLLS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses between two looks while waiting; the last one stays. Sites dislike being asked often."""

ASKED = "stopped by `shardway stop`"
ASKED_AT_ONCE = "ended by `shardway stop --now`"
"""The text of stop files of this module."""


def is_of_its_time(words: str) -> bool:
    """Whether a stop file was meant only for the processes of its time: one of this module, of a warned job script or
    of an agent. One that the user wrote need not be."""
    return words in (ASKED, ASKED_AT_ONCE) or words.startswith(("deadline", "preempted", "signal "))


@dataclass(frozen=True)
class StopReport:
    """What a stop did: which attempts were asked, and which jobs left the queue or were killed. `writer`: the process
    that trains by hand ("process 4711 on host n1"), which can be asked and not killed; empty for none. `unwritten`: why
    the stop file could not be written, so that a signal was sent; empty if it was written."""

    asked: tuple[LedgerEntry, ...] = ()
    cancelled: tuple[LedgerEntry, ...] = ()
    writer: str = ""
    unwritten: str = ""

    def list_lines(self, *, now: bool = False, kills: bool = False) -> list[str]:
        """What was done, a sentence each. `now`: jobs were cancelled; `kills`: some of them ran."""
        asks, takes = "asked to stop after its current step", "killed" if kills else "taken out of the queue"
        lines = [f"{what}: {_name_jobs(jobs)}" for what, jobs in ((asks, self.asked), (takes, self.cancelled)) if jobs]
        if self.writer:
            lines.append(f"{'no job, so not killed (Ctrl-C twice ends it)' if now else asks}: {self.writer}")
        if self.unwritten:
            lines.append(f"asked by a signal: {self.unwritten}")
        return lines


def _name_jobs(entries: Sequence[LedgerEntry]) -> str:
    return ", ".join(f"job {entry.job} (attempt {entry.number})" for entry in entries)


@dataclass(frozen=True)
class Stopper:
    """Stops one run on its host; `pause` waits between two looks."""

    host: Host
    pause: Callable[[float], None] = time.sleep

    def ask(self, ledger: Ledger) -> StopReport:
        """Write the stop file of a run, which a training by hand on this machine obeys too, and remove its waiting jobs
        from the queue. Raises SiteError if that is refused."""
        running, waiting = self._find_active(ledger)
        writer, unwritten = self._find_writer(ledger), ""
        if running or waiting or writer:
            try:
                self._write_stop(ledger, ASKED)
            except UserError as error:
                if not self._warn(ledger, running, writer):
                    raise
                unwritten = str(error).splitlines()[0]
        self._cancel(waiting)
        self._note(ledger, waiting, "taken out of the queue by `shardway stop`")
        return StopReport(running, waiting, writer, unwritten)

    def find_running(self, ledger: Ledger) -> tuple[LedgerEntry, ...]:
        """The attempts whose jobs run, so that there are ranks to lose."""
        return self._find_active(ledger)[0]

    def cancel(self, ledger: Ledger) -> StopReport:
        """Kill every job of the run that waits or runs. Raises SiteError where the scheduler refuses."""
        active = tuple(standing.entry for standing in read_standing(self.host, ledger) if standing.is_active)
        writer = self._find_writer(ledger)
        # The scheduler of a job that runs may not report a cancellation. Ranks that obey a signal can then read its
        # sender meanwhile, which is unknown later.
        named = not writer and any(entry.started is not None and _is_forgotten(entry) for entry in active)
        if named:
            with suppress(UserError):  # a full file system: the job ends all the same
                self._write_stop(ledger, ASKED_AT_ONCE)
        try:
            self._cancel(tuple(reversed(active)))  # successors first, else they would start
        finally:
            if named:
                self.host.run(("rm", "-f", str(ledger.run.stop_path)))
        self._note(ledger, active, "killed by `shardway stop --now`")
        return StopReport(cancelled=active, writer=writer)

    def stop_many(self, runs: Sequence[tuple[Ledger, Sequence[JobStatus]]], *, now: bool = False) -> StopReport:
        """Stop several runs, whose statuses were read: jobs that wait leave the queue first, all at once, so that none
        begins in the place of one that ends. Raises SiteError where the scheduler refuses."""
        waiting, running = list[LedgerEntry](), list[LedgerEntry]()
        for ledger, statuses in runs:
            for status in statuses:
                if status.is_active:
                    waits = status.record is not None and status.record.phase is JobPhase.QUEUED
                    (waiting if waits else running).append(status.entry)
            if not now and any(status.is_active for status in statuses):
                self._write_stop(ledger, ASKED)
        self._cancel(waiting)
        killed = tuple(reversed(running)) if now else ()
        self._cancel(killed)
        for ledger, _ in runs:
            own = [entry for entry in waiting if entry.attempt.run_path == ledger.run.path]
            self._note(ledger, own, "taken out of the queue by `shardway stop`")
            own = [entry for entry in killed if entry.attempt.run_path == ledger.run.path]
            self._note(ledger, own, "killed by `shardway stop --now`")
        return StopReport(tuple(running), tuple(waiting))

    def wait(self, ledger: Ledger, timeout_s: float) -> list[JobStatus]:
        """The attempts once none of them is active and no process trains by hand here, or when the time is over."""
        end, polls = time.monotonic() + timeout_s, iter(POLLS_S)
        while True:
            standings = read_standing(self.host, read_ledger(self.host, ledger.run.path))
            active = any(standing.is_active for standing in standings) or self._find_writer(ledger)
            if not active or time.monotonic() > end:
                return standings
            self.pause(next(polls, POLLS_S[-1]))

    def _find_active(self, ledger: Ledger) -> tuple[tuple[LedgerEntry, ...], tuple[LedgerEntry, ...]]:
        running, waiting = list[LedgerEntry](), list[LedgerEntry]()
        for standing in read_standing(self.host, ledger):
            if standing.is_active:
                waits = standing.record is not None and standing.record.phase is JobPhase.QUEUED
                (waiting if waits else running).append(standing.entry)
        return tuple(running), tuple(waiting)

    def _find_writer(self, ledger: Ledger) -> str:
        """The process that trains the run by hand, as far as its directory is visible from this machine; empty for
        none."""
        return ("" if self.host.name else ledger.run.find_writer(by_hand=True)) or ""

    def _write_stop(self, ledger: Ledger, words: str) -> None:
        """Raises UserError where that is refused. A full file system takes a second name of a record (`RunDir`)."""
        path = ledger.run.stop_path
        try:
            self.host.write_files({PurePosixPath(path): f"{words}\n"})
        except UserError as error:
            records = [ledger.run.status_path, *(entry.attempt.submission_path for entry in reversed(ledger.entries))]
            links = [("ln", str(record), str(path)) for record in records]
            if any(done.ok for done in self.host.run_many([("test", "-e", str(path)), *links])):
                return
            raise UserError(
                f"{str(error).splitlines()[0]}\n"
                "  The run was not asked to stop. To do: make room there, or ask its owner, and say it again; "
                "`shardway stop --now` kills its jobs; a run without a job stops by Ctrl-C where it was started."
            ) from None

    def _warn(self, ledger: Ledger, running: Sequence[LedgerEntry], writer: str) -> bool:
        """Ask the ranks of a training by a signal, which other programs may not survive. Returns whether all were
        asked."""
        if ledger.status.get("state") != "running":
            return False
        commands: list[Sequence[str]] = []
        for entry in running:
            _check_job_ids([entry.job])
            commands += find_scheduler(entry.submission.scheduler if entry.submission else "").warn([entry.job])
        if not all(done.ok for done in self.host.run_many(commands)):
            return False
        return ledger.run.signal_writer(signal.SIGTERM) if writer else bool(commands)

    def _note(self, ledger: Ledger, entries: Sequence[LedgerEntry], reason: str) -> None:
        """Record the end of attempts that neither their jobs nor the scheduler can report any more."""
        paths = {PurePosixPath(entry.attempt.result_path): entry for entry in entries if _is_forgotten(entry)}
        written = self.host.read_files(list(paths))
        step, now = ledger.status.get("step"), time.time()
        for path, entry in paths.items():
            if path not in written:
                step_now = step if isinstance(step, int) and entry.started else 0
                result = Result(Ending.STOPPED, reason, step_now, job=entry.job, by="shardway stop", ended=now)
                with suppress(UserError):  # a full file system: they have ended all the same
                    self.host.write_files({path: render_result(result)})

    def _cancel(self, entries: Sequence[LedgerEntry]) -> None:
        for scheduler in dict.fromkeys(entry.submission.scheduler for entry in entries if entry.submission):
            jobs = [entry.job for entry in entries if entry.submission and entry.submission.scheduler == scheduler]
            _check_job_ids(jobs)
            known = find_scheduler(scheduler)
            for done in self.host.run_many(known.cancel(jobs)):
                if not done.ok and not re.search(known.gone, done.err):
                    raise SiteError(
                        f"{done.words[0]} could not end {', '.join(jobs)}: {(done.err or done.out).strip()}\n"
                        "  To do: try again, or end them with the scheduler's own command."
                    )


def _is_forgotten(entry: LedgerEntry) -> bool:
    """Whether the scheduler of a job does not report that it was cancelled."""
    return entry.submission is not None and find_scheduler(entry.submission.scheduler).forgets


def _check_job_ids(jobs: Sequence[str]) -> None:
    """Raise SiteError for what no scheduler calls a job, before a command is given it."""
    strange = [job for job in jobs if not is_job_id(job)]
    if strange:
        raise SiteError(
            f"{strange[0]!a} is no id of a job, so no job was ended: submission.json of the attempt is damaged.\n"
            "  To do: find the job with the scheduler's own command, and end it there."
        )
