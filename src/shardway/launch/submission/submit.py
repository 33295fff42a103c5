"""Submits a run: checks it, claims an attempt, writes its folder, hands its script to the scheduler; or goes on with a
submission that was interrupted.

Invariants:
- A refused submission leaves nothing behind; an interrupted one resumes where it was.
- An attempt has at most one job that does any work.
- A claim is alive or dead only for a process with the same boot and process namespace; otherwise it is unknown.

A submitter writes its claim into the attempt's folder: host, process, the start of that process, and the boot and
process namespace of its number. On the same machine a later submitter checks whether the process still runs; elsewhere
(a laptop that submits by ssh, another login node) only the age of the claim counts.

The order makes a lost answer harmless. The folder of an attempt is made by `mkdir`, which succeeds only once; the job's
unique name is written there before the scheduler is called. If the answer is lost, the scheduler is asked for a job of
that name before the script is submitted again. Of two jobs the second finds the attempt claimed and does nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar

from shardway.errors import ShardwayError, SiteError, UserError
from shardway.launch.hosts.base import Host, HostUnreachable
from shardway.launch.job import Job
from shardway.launch.job_script import render_enter_script, render_job_script, render_library
from shardway.launch.runs.find import Known, forget, remember, render_known
from shardway.launch.runs.followers import (
    PlaceInRow,
    check_not_waiting,
    find_followed,
    find_place,
    is_finished,
    list_follower,
    unlist_follower,
)
from shardway.launch.runs.job_status import (
    LedgerEntry,
    check_free_for_job,
    read_again,
    read_ledger,
    render_submission,
    write_submission,
)
from shardway.launch.schedulers.base import Explanation, RequestedResources, Scheduler, SchedulerSilent, find_scheduler
from shardway.launch.snapshot import SnapshotPlan, take_snapshot
from shardway.launch.submission.budget import check_budget, estimate_cost
from shardway.launch.submission.prepare import Prepared, SubmitRequest, prepare
from shardway.refusals import ANOTHER_FOLDER, find_remedy
from shardway.rundir.attempts import Attempt, Submission
from shardway.rundir.directory import FOLDER_MODE, RunDir
from shardway.rundir.lease import Identity, is_alive, own_identity

# --- submit a run


@dataclass(frozen=True)
class SentSubmission:
    """A submission that the scheduler has taken. `found`: an earlier try had got through after all. `further`: the
    other links of a chain whose jobs may not submit jobs. `waits_for`: the run whose end hands it over, so
    that it has no job yet."""

    prepared: Prepared
    job: str
    host: str = ""
    found: bool = False
    further: tuple[str, ...] = ()
    waits_for: str = ""

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
            "waits_for": self.waits_for,
        }


def submit_run(
    request: SubmitRequest,
    host: Host,
    submitter: Submitter | None = None,
    *,
    behind: Sequence[Prepared] = (),
    agreed: bool = False,
) -> SentSubmission:
    """Submit the next attempt of a run, or go on with one whose submission was interrupted. What it and the submissions
    `behind` it may cost is within their budget (site.budget), or the person has `agreed` to it.

    A run that follows another one gets no job before that is finished, unless jobs there may not submit jobs: it then
    waits in the queue for the last job of that run. Raises UserError where something is wrong or refused, SiteError
    where the scheduler does not answer.
    """
    submitter = submitter or Submitter(host)
    prepared = prepare(request, host, look=True)
    check_budget([estimate_cost(each) for each in (prepared, *behind)], agreed=agreed)
    job, last = prepared.job, prepared.ledger.last
    check_free_for_job(host, prepared.ledger, submitter.tell)
    check_not_waiting(host, prepared.ledger)
    if last is not None and find_followed(prepared.ledger) is not None:
        submitter.check_given_up(last)
        host.run(("mkdir", str(last.attempt.handover)))  # no job hands it over while this settles it
    place = find_place(host, job) if job.follows is not None else PlaceInRow()
    known = Known(str(job.run), host.name, job.site)
    if last is not None and last.is_unsent and (found := submitter.recover(job, last)):
        remember(known)
        return SentSubmission(prepared, found.job, host.name, found=True)
    host.run(("rm", "-f", str(RunDir(job.run).stop_path)))  # obeyed by an earlier attempt; this one is wanted
    is_new = False

    def fill(attempt: Attempt) -> None:
        nonlocal is_new
        is_new = remember(known)  # before the scheduler is asked, so that a kill does not lose it
        if prepared.snapshot is not None:
            bring_snapshot(host, prepared.snapshot, attempt)

    try:
        if place.is_listed:
            submitted = submitter.submit_when_finished(job, prepared.files, fill)
        else:
            submitted = submitter.submit(job, prepared.files, after=place.after, fill=fill)
    except BaseException:
        with contextlib.suppress(ShardwayError):
            left = host.run(("test", "-e", known.run)) if is_new else None
            if left is not None and left.code == 1 and not left.timed_out:  # refused, and nothing of it is left
                forget(known)
        raise
    if job.follows is not None and not place.is_listed:
        list_follower(host, job.follows, job.folder, job.token)
    if not submitted.job:
        return SentSubmission(prepared, "", host.name, waits_for=str(job.follows))
    further = [submitted.job]
    while job.chain.until_done and job.chain.ahead and job.attempt < job.chain.max_attempts:
        job = job.successor()
        further.append(submitter.submit(job, {}, after=further[-1]).job)
    return SentSubmission(prepared, submitted.job, host.name, submitted.found, tuple(further[1:]))


def bring_snapshot(host: Host, plan: SnapshotPlan, attempt: Attempt) -> None:
    """Copy the code, as the plan has it, into the folder `code` of an attempt on the host."""
    if not host.name:
        take_snapshot(plan, attempt.code)
        return
    with tempfile.TemporaryDirectory() as scratch:
        local = Attempt(Path(scratch) / attempt.path.name)
        take_snapshot(plan, local.code)
        host.copy_tree(local.code, PurePosixPath(attempt.code))
        records = [path for path in sorted(local.path.iterdir()) if path.is_file()]
        host.write_files(
            {PurePosixPath(attempt.path / path.name): path.read_bytes().decode("utf-8") for path in records}
        )


# --- the claim of a submitter: the process in one line of words without blanks, "-" for what is unknown


def render_claim(who: Identity) -> str:
    """HOST PROCESS START BOOT NAMESPACE."""
    host = "".join(who.host.split()) or "localhost"
    return " ".join((host, str(who.pid), *(word or "-" for word in (who.started, who.boot, who.namespace))))


def parse_claim(text: str) -> Identity | None:
    """A claim from its line; None for anything else, such as that of an older Shardway."""
    parts = ["" if word == "-" else word for word in text.split()]
    if len(parts) != 5 or not parts[1].isdecimal():
        return None
    host, process, start, boot, namespace = parts
    return Identity(host, boot, namespace, int(process), start)


# --- submit an attempt

TRIES = 6
FIRST_PAUSE_S = 2.0
"""A silent scheduler is asked again after 2, 4, 8, 16 and 32 seconds."""

SUBMIT_TIMEOUT_S = 60.0

UNDER_WAY_S = 120.0
"""An attempt counts as being submitted if it was prepared less long ago, by a process that is not visible from here,
and is not recorded as given up."""

IN_FLIGHT_S = 5.0
"""How long a script may take to appear in the queue that was handed over just before its submitter was killed."""

_CERTAINLY_NOT_TAKEN = ("scheduler_down", "max_jobs_queued")
"""Codes of refusals after which no job can exist."""


@dataclass(frozen=True)
class Submitted:
    """A job that the scheduler has taken. `found`: its answer was lost, and the job was found by its name."""

    job: str
    found: bool = False


Taken = TypeVar("Taken", str, tuple[str, ...])


@dataclass(frozen=True)
class Handover(Generic[Taken]):
    """What a scheduler is asked to take: the words, how its answer is read (empty for no answer), and how a job is
    found whose answer was lost. `left`: what lies prepared if it does not answer."""

    words: Sequence[str]
    read: Callable[[str], Taken]
    find: Callable[[], Taken]
    asked: RequestedResources
    where: str
    left: str


@dataclass(frozen=True)
class Submitter:
    """Submits to one host. `pause` waits between two tries (tests do not wait); `tell` gets a sentence for the waiting
    user."""

    host: Host
    pause: Callable[[float], None] = time.sleep
    tell: Callable[[str], None] = lambda sentence: None

    def submit(
        self, job: Job, files: dict[Path, str], after: str = "", fill: Callable[[Attempt], None] = lambda attempt: None
    ) -> Submitted:
        """Submit an attempt whose folder does not exist yet, with these files and what `fill` adds.

        Raises UserError if the folder exists or the scheduler refuses, SiteError if it does not answer.
        """
        return self._submit(job, files, fill, lambda submission: self._hand_over(job, submission), after)

    def submit_when_finished(
        self, job: Job, files: dict[Path, str], fill: Callable[[Attempt], None] = lambda attempt: None
    ) -> Submitted:
        """Prepare an attempt as `submit` does, for the job that finishes the run that it follows. Where that run is
        finished by now, the first to make the folder `handover` submits it; the job is "" while it waits."""
        return self._submit(job, files, fill, lambda submission: self._list(job, submission))

    def _list(self, job: Job, submission: Submission) -> Submitted:
        run = job.follows or job.run
        try:
            list_follower(self.host, run, job.folder, job.token)
        except UserError:
            self.remove(job.folder)
            raise
        # Its job writes the result before it reads the list, and this reads the result after the list is written.
        if not is_finished(read_ledger(self.host, run)):
            return Submitted("")
        if self.host.run(("mkdir", str(job.folder.handover))).ok:
            try:
                return self._hand_over(job, submission)
            except UserError:  # refused
                unlist_follower(self.host, run, job.folder, job.token)
                raise
        now = read_again(self.host, LedgerEntry(job.folder))
        return Submitted(now.job)

    def _submit(
        self,
        job: Job,
        files: dict[Path, str],
        fill: Callable[[Attempt], None],
        hand_over: Callable[[Submission], Submitted],
        after: str = "",
    ) -> Submitted:
        attempt, asked, claim = job.folder, asdict(list_requested(job)), render_claim(own_identity())
        made = self.make_folder(attempt)
        try:
            submission = Submission(
                *(job.scheduler, job.token, "", self.host.name, after, time.time(), asked, claim),
                follows=str(job.follows or ""),
                workdir=str(job.around.workdir),
            )
            texts = {
                attempt.submission_path: render_submission(submission),  # the claim, before anything else
                attempt.job_script: render_job_script(job),
                attempt.job_library: render_library(job.scheduler),
                attempt.enter_script: render_enter_script(job),
                **files,
            }
            try:
                self.host.write_files({PurePosixPath(path): text for path, text in texts.items()})
                fill(attempt)
                submission = replace(submission, submitted=time.time())  # filling may take long
                write_submission(self.host, attempt, submission)
            except BaseException:
                self.remove(attempt)
                raise
            try:
                return hand_over(submission)
            except UserError:
                raise  # and the folder is gone
            except BaseException:
                with contextlib.suppress(ShardwayError):  # this process has given it up
                    write_submission(self.host, attempt, replace(submission, submitted=0.0))
                raise
        except BaseException:
            self.sweep_up(made)
            raise

    def make_folder(self, attempt: Attempt) -> tuple[str, ...]:
        """Make the folder of an attempt; returns the parent folders that were made, the innermost first.

        Raises UserError if another submitter has just made it, or if the file system refuses.
        """
        above = tuple(map(str, attempt.path.parents))
        look = ("find", *above, "-maxdepth", "0", "-print0")
        private = ("mkdir", "-p", "-m", f"{FOLDER_MODE:o}", above[1])
        looked, *made = self.host.run_many([look, private, ("mkdir", "-p", above[0]), ("mkdir", str(attempt.path))])
        mine, there = made[-1], looked.out.split("\0")
        new = tuple(folder for folder in above if folder not in there) if "/" in there else ()
        if all(done.ok for done in made):
            made.append(self.host.run(("mkdir", str(attempt.log_folder))))
        failed = next((done for done in made if not done.ok), None)
        if failed is None:
            return new
        if mine.ok:
            self.remove(attempt)
        self.sweep_up(new)
        if "File exists" in mine.err:
            raise UserError(
                f"attempt {attempt.number} of {attempt.path.parents[1]} was made by another command just now.\n"
                "  Nothing was submitted. To do: look with `shardway status`, then submit again."
            )
        raise UserError(
            f"{attempt.path} cannot be made: {failed.err.strip()}\n"
            f"  Nothing was submitted. To do: {find_remedy(failed.err, ANOTHER_FOLDER)}."
        )

    def _hand_over(self, job: Job, submission: Submission) -> Submitted:
        """Hand a prepared attempt to the scheduler, again if it does not answer."""
        scheduler = find_scheduler(job.scheduler)
        handover = Handover(
            words=scheduler.submit(str(job.folder.job_script), str(job.folder.job_log), submission.after),
            read=scheduler.read_job_id,
            find=lambda: self._find(scheduler, job),
            asked=list_requested(job),
            where=f"{job.scheduler} on {job.site}",
            left=f"Attempt {job.attempt} is prepared in {job.folder.path}",
        )
        try:
            taken, found = self.hand_over(scheduler, handover)
        except UserError:
            self.remove(job.folder)
            raise
        return self._note(job, submission, taken, found=found)

    def hand_over(self, scheduler: Scheduler, handover: Handover[Taken]) -> tuple[Taken, bool]:
        """What the scheduler has taken, and whether an earlier try had got through. Raises UserError if it refuses,
        SiteError if it does not answer."""
        pause, where = FIRST_PAUSE_S, handover.where
        refusal: Explanation | None = None
        unsure = False  # whether an earlier try may have reached the scheduler
        for number in range(TRIES):
            if number:
                if number == 1:
                    why = refusal.sentence if refusal else "there was no answer."
                    self.tell(f"{where} did not take the job: {why} Trying again for about a minute.")
                self.pause(pause)
                pause *= 2
                try:
                    if found := handover.find():
                        return found, True
                except (SchedulerSilent, HostUnreachable):
                    if unsure:
                        continue
            try:
                done = self.host.run(handover.words, timeout_s=SUBMIT_TIMEOUT_S)
            except HostUnreachable:
                unsure = True
                continue
            if done.timed_out:
                unsure = True
                continue
            if done.ok and (taken := handover.read(done.out)):
                return taken, False
            refusal = scheduler.explain_refusal(done, replace(handover.asked, host=self.host.name))
            if refusal.hopeless:
                # without its client here it saw no job
                missing = refusal.code in ("not_installed", "not_configured")
                outcome = f"the job did not reach {where}" if missing else f"{where} refused the job"
                raise UserError(f"{outcome}: {refusal.sentence}\n  Nothing was submitted. To do: {refusal.remedy}")
            unsure = unsure or refusal.code not in _CERTAINLY_NOT_TAKEN
        why = f"its last words: {refusal.sentence}" if refusal else "there was no answer at all"
        raise SiteError(
            f"{where} did not take the job in {TRIES} tries; {why}\n"
            f"  {handover.left}. To do: run the same command again later; it "
            "first looks whether the job got through, so that it is never submitted twice."
        )

    def recover(self, job: Job, entry: LedgerEntry) -> Submitted | None:
        """Settle an interrupted submission: return its job if it reached the scheduler; else remove its folder and
        return None.

        Raises SchedulerSilent or HostUnreachable if this is unknown, UserError if the attempt is being submitted now,
        or was submitted since the entry was read.
        """
        submission = entry.submission
        self.check_given_up(entry)
        now = read_again(self.host, entry)  # its submitter may have succeeded meanwhile
        if not now.is_unsent:
            raise UserError(
                f"attempt {entry.number} of {entry.attempt.run_path} was submitted just now by another command, as job "
                f"{now.job or 'unknown'}.\n  Nothing was submitted. To do: look with `shardway status`."
            )
        if submission is not None:
            named, scheduler = replace(job, attempt=entry.number, token=submission.token), find_scheduler(job.scheduler)
            found = self._find(scheduler, named)
            if not found and submission.array and (array := self.find_named(scheduler, submission.array)):
                found = scheduler.name_task(array, submission.task)
            if found:
                return self._note(named, submission, found, found=True)
        self.remove(entry.attempt)
        return None

    def check_given_up(self, entry: LedgerEntry) -> None:
        """Raise UserError if another submitter may be at work on an attempt. A process on this machine is looked up;
        for any other the age of its record decides."""
        submission, head = entry.submission, f"attempt {entry.number} of {entry.attempt.run_path}"
        claim = parse_claim(submission.claim) if submission is not None else None
        if submission is None:
            minutes = f"-{round(UNDER_WAY_S / 60)}"  # by the clock of the host
            found = self.host.run(("find", str(entry.attempt.path), "-maxdepth", "0", "-mmin", minutes))
            left = UNDER_WAY_S if found.out else 0.0
        else:
            age, alive = time.time() - submission.submitted, is_alive(claim) if claim else None
            if claim and alive and claim.pid != os.getpid() and submission.submitted:
                raise UserError(
                    f"{head} is being submitted just now, by process {claim.pid} on {claim.host}.\n"
                    "  Nothing was submitted. To do: wait for it; or end that process (`kill` and its number), and "
                    "submit again."
                )
            if alive is False and age < IN_FLIGHT_S:
                self.pause(IN_FLIGHT_S - max(age, 0.0))
            left = UNDER_WAY_S - age if alive is not False else 0.0
        if left > 0:
            who = "another command"
            if claim:
                who = f"process {claim.pid} on {claim.host}; whether that still runs is not seen from here"
            raise UserError(
                f"{head} is being submitted just now, by {who}.\n"
                "  Nothing was submitted. To do: look with `shardway status`; if no command is at it, submit again in "
                f"{math.ceil(left)} seconds, when it counts as given up."
            )

    def _find(self, scheduler: Scheduler, job: Job) -> str:
        """The id of a job with this one's name; empty if the scheduler has none. Raises SchedulerSilent,
        HostUnreachable."""
        return self.find_named(scheduler, job.scheduler_name)

    def find_named(self, scheduler: Scheduler, name: str) -> str:
        """The id of the job or array of this name, as `_find` gives it."""
        found = scheduler.parse_found(self.host.run_many(scheduler.find(name)))
        return found[0] if found else ""

    def _note(self, job: Job, submission: Submission, taken: str, *, found: bool = False) -> Submitted:
        try:
            write_submission(self.host, job.folder, replace(submission, job=taken))
        except UserError as error:
            raise UserError(
                f"job {taken} was submitted, but its id could not be noted: {error}\n"
                "  It will run. To submit again finds it by its name, and does not double it."
            ) from None
        return Submitted(taken, found)

    def remove(self, attempt: Attempt) -> None:
        """Remove a folder that no job will ever use, and its parents if they are empty then."""
        around = [("rmdir", str(folder)) for folder in (attempt.path.parent, attempt.run_path)]
        self.host.run_many([("rm", "-rf", str(attempt.path)), *around])

    def sweep_up(self, folders: Sequence[str]) -> None:
        """Remove the empty folders among those that were made for a submission."""
        with contextlib.suppress(ShardwayError):
            self.host.run_many([("rmdir", folder) for folder in folders])


def list_requested(job: Job) -> RequestedResources:
    """What a job requests from its scheduler, for messages about it."""
    terms, shape = job.terms, job.shape
    return RequestedResources(
        name=job.scheduler_name,
        queue=terms.queue or terms.partition,
        account=terms.account,
        qos=terms.qos,
        constraint=terms.constraint,
        walltime_s=terms.walltime_s,
        nodes=shape.nodes,
        cores=shape.cores_per_node,
        accelerators=shape.accelerators_per_node,
        memory=shape.memory_bytes,
        script=str(job.folder.job_script),
    )
