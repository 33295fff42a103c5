"""Submits many runs as one array of jobs: each task runs the job script of its own run.

An array is a thin script with the head of one job; a task takes its number, finds the script of its run in a list, and
becomes that script. So every run has its own directory, attempt, records, stop and chain, as if it had been submitted
alone; only the id of its job is that of a task. The next job of a run (a chain, `resume`) is a job of its own.

Invariants:
- All members are prepared and checked before anything is written; a refused array leaves nothing behind.
- A member has at most one job that does any work: those whose submission was interrupted are looked for first.
- Jobs of one array ask for the same; those that ask for something else are an array of their own.
- One member alone is a job, and no array. A scheduler without arrays gets a job a member.

The order is that of `submit`: folders (each made once), records with the array's unique name, the scheduler, its
answer. If the answer is lost, the scheduler is asked for an array of that name.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

from shardway.errors import Bug, Problem, ShardwayError, UserError, check_no_problems
from shardway.launch.hosts.base import Host
from shardway.launch.job import Job, is_plain_path
from shardway.launch.job_script import render_enter_script, render_job_script, render_library
from shardway.launch.runs.find import Known, forget, remember
from shardway.launch.runs.followers import check_not_waiting, is_finished
from shardway.launch.runs.job_status import (
    check_free_for_job,
    describe_active,
    read_ledger,
    read_ledgers,
    read_standing,
    read_standings,
    render_submission,
)
from shardway.launch.schedulers.base import Scheduler, find_scheduler
from shardway.launch.script import ScriptLine, ScriptSection, quote, quote_comment, render_script, script_lines
from shardway.launch.snapshot import SnapshotPlan
from shardway.launch.submission.budget import check_budget, estimate_cost
from shardway.launch.submission.prepare import Prepared, SubmitRequest, prepare
from shardway.launch.submission.submit import (
    Handover,
    SentSubmission,
    Submitter,
    bring_snapshot,
    list_requested,
    render_claim,
)
from shardway.refusals import ANOTHER_FOLDER, find_remedy
from shardway.rundir.attempts import Attempt, Submission
from shardway.rundir.directory import FOLDER_MODE, RunDir
from shardway.rundir.lease import own_identity
from shardway.rundir.sweep import ArrayDir, SweepDir
from shardway.version import __version__

COPY_S = 600.0
"""How long copies of the code for all members of an array may take."""

# --- the whole


@dataclass(frozen=True)
class ArrayRequest:
    """Many requests at once. `folder`: on the host, for the scripts of arrays (`SweepDir`); `name`: of their jobs;
    `at_once`: how many run at one time, 0 for no limit."""

    requests: Sequence[SubmitRequest]
    folder: Path
    name: str
    at_once: int = 0


def submit_array(
    asked: ArrayRequest,
    host: Host,
    submitter: Submitter | None = None,
    prepared: Sequence[Prepared] = (),
    *,
    agreed: bool = False,
) -> list[SentSubmission]:
    """Submit the next attempt of each run, in the order of the requests, as arrays of jobs. `prepared`: what
    `prepare_array` has made of the requests, where that was called before. What all of them may cost is within their
    budget (site.budget), or the person has `agreed` to it.

    Raises UserError where something of any member is wrong or refused: nothing is submitted then, unless there are
    several arrays, of which the message names those that are there. SiteError where the scheduler does not answer.
    """
    if not asked.requests:
        return []
    prepared = prepared or prepare_array(asked.requests, host, look=True)
    check_budget([estimate_cost(each) for each in prepared], agreed=agreed)
    return ArraySubmission(asked, host, submitter or Submitter(host)).submit(prepared)


def prepare_array(requests: Sequence[SubmitRequest], host: Host, *, look: bool = False) -> list[Prepared]:
    """Everything of the next attempt of each run. The first of them is prepared as `prepare` does it, and what the
    others share with it (profile, snapshot, secrets, what the host has) is not looked for again.

    Raises UserError with the problems of all members, each once.
    """
    found: list[Prepared] = []
    problems: dict[Problem, None] = {}
    errors: list[UserError] = []
    places = host.expand_many([str(_find_folder(request)) for request in requests])
    ledgers = read_ledgers(host, [Path(str(place)) for place in places])
    for request, ledger in zip(requests, ledgers, strict=True):
        try:
            found.append(prepare(request, host, look=look, like=found[0] if found else None, ledger=ledger))
        except UserError as error:
            problems |= dict.fromkeys(error.problems or ())
            errors.append(error)
    if errors and (len({str(error) for error in errors}) == 1 or not problems):
        raise errors[0]
    check_no_problems(f"{len(errors)} of the {len(requests)} runs", list(problems))
    return found


def _find_folder(request: SubmitRequest) -> Path:
    if request.run_request.directory is None:
        raise Bug("a member of an array has no run directory of its own")
    return Path(request.run_request.directory)


@dataclass(frozen=True)
class ArraySubmission:
    """One submission of many runs to one host."""

    asked: ArrayRequest
    host: Host
    submitter: Submitter

    def submit(self, prepared: Sequence[Prepared]) -> list[SentSubmission]:
        """As `submit_array` does."""
        asked = self.asked
        check_chains(prepared)
        groups = group_alike([each.job for each in prepared])
        self._check_free(prepared)
        after = self._find_after(prepared[0].job)
        sent: dict[int, SentSubmission] = {}
        for index, each in enumerate(prepared):
            last = each.ledger.last
            if last is not None and last.is_unsent and (found := self.submitter.recover(each.job, last)):
                remember(self._known(each))
                sent[index] = SentSubmission(each, found.job, self.host.name, found=True)
        left = [[index for index in group if index not in sent] for group in groups]
        left = [group for group in left if group]
        if len(left) > 1 and asked.at_once and find_scheduler(prepared[0].job.scheduler).array_index:
            raise UserError(describe_groups(prepared, left))
        scheduler = find_scheduler(prepared[0].job.scheduler)
        rest = left if scheduler.array_index else [sorted(index for group in left for index in group)]
        for group in filter(None, rest):
            members = [prepared[index] for index in group]
            try:
                if len(members) > 1 and scheduler.array_index:
                    done = self._submit_group(scheduler, members, after)
                else:
                    done = self._submit_one_by_one(members, after)
            except ShardwayError as error:
                if not sent:
                    raise
                names = ", ".join(each.prepared.job.run.name for each in sent.values())
                raise type(error)(f"{error}\n  Submitted before that: {names}.") from None
            sent |= dict(zip(group, done, strict=True))
        return [sent[index] for index in range(len(prepared))]

    def _known(self, prepared: Prepared) -> Known:
        return Known(str(prepared.job.run), self.host.name, prepared.job.site)

    def _check_free(self, prepared: Sequence[Prepared]) -> None:
        """Raise UserError where a member has a job, waits for another run, or is trained by hand."""
        statuses = read_standings(self.host, [each.ledger for each in prepared])
        for each, status in zip(prepared, statuses, strict=True):
            if describe_active(status) or not self.host.name:
                check_free_for_job(self.host, each.ledger, self.submitter.tell)
            check_not_waiting(self.host, each.ledger)

    def _find_after(self, job: Job) -> str:
        """The job behind which all members wait, where they follow a run. Raises UserError where that has none, or
        makes further ones."""
        if job.follows is None:
            return ""
        ledger = read_ledger(self.host, job.follows)
        if is_finished(ledger):
            return ""
        active = [each for each in read_standing(self.host, ledger) if each.is_active]
        if not active:
            raise UserError(
                f"{job.follows} is not finished and has no job that waits or runs, so nothing can follow it.\n"
                f"  To do: `shardway resume {shlex.quote(str(job.follows))}` first, or submit these runs when it is "
                "finished."
            )
        text = self.host.read_files([PurePosixPath(active[-1].entry.attempt.job_script)])
        if any(re.search(r"^ *queue_next\b", script, re.MULTILINE) for script in text.values()):
            raise UserError(
                f"{job.follows} is a chain, whose last job is not there yet; an array waits only for a job that is.\n"
                "  To do: submit these runs when it is finished, or that run without --until-done."
            )
        return active[-1].entry.job

    # --- one array

    def _submit_one_by_one(self, members: Sequence[Prepared], after: str) -> list[SentSubmission]:
        """A job a member; as many at once as may run, each of the others behind one before it."""
        sent: list[SentSubmission] = []
        at_once = self.asked.at_once
        for each in members:
            before = sent[-at_once].job if at_once and len(sent) >= at_once else after
            self._remove_stops([each])
            is_new = remember(self._known(each))

            def fill(attempt: Attempt, each: Prepared = each) -> None:
                if each.snapshot is not None:
                    bring_snapshot(self.host, each.snapshot, attempt)

            try:
                taken = self.submitter.submit(each.job, each.files, after=before, fill=fill)
            except UserError:
                self._forget([each] if is_new else [])
                raise
            sent.append(SentSubmission(each, taken.job, self.host.name, taken.found))
        return sent

    def _submit_group(self, scheduler: Scheduler, members: Sequence[Prepared], after: str) -> list[SentSubmission]:
        jobs, place = [each.job for each in members], self._make_place()
        array = replace(jobs[0], name=_name_job(self.asked.name), token=os.urandom(3).hex(), attempt=place.number)
        claim = render_claim(own_identity())
        records = {
            job.folder: Submission(
                *(job.scheduler, job.token, "", self.host.name, after, time.time(), asdict(list_requested(job)), claim),
                follows=str(job.follows or ""),
                workdir=str(job.around.workdir),
                array=array.scheduler_name,
                task=index,
            )
            for index, job in enumerate(jobs)
        }
        new: list[Prepared] = []
        try:
            self._make_folders([job.folder for job in jobs])
            try:
                new = [each for each in members if remember(self._known(each))]
                self._write_records(records)  # the claims, before anything else
                self._write_files(members)
                script = render_array_script(array, jobs, self.asked.at_once, place)
                self.host.write_files({PurePosixPath(place.script): script})
                self._remove_stops(members)
                records = {path: replace(record, submitted=time.time()) for path, record in records.items()}
                self._write_records(records)
            except BaseException:
                self._remove([job.folder for job in jobs])
                raise
            taken, found = self._hand_over(scheduler, array, records, place, after)
        except UserError:
            self.host.run(("rm", "-rf", str(place.path)))
            self.host.run_many([("rmdir", str(path)) for path in (place.path.parent, self.asked.folder)])
            self._forget(new)
            raise
        try:
            self._write_records(
                {path: replace(record, job=job) for (path, record), job in zip(records.items(), taken, strict=True)}
            )
        except UserError as error:
            raise UserError(
                f"the array {array.scheduler_name} was submitted, but its ids could not be noted: {error}\n"
                "  It will run. To submit again finds it by its name, and does not double it."
            ) from None
        return [
            SentSubmission(each, job, self.host.name, found=found) for each, job in zip(members, taken, strict=True)
        ]

    def _hand_over(
        self, scheduler: Scheduler, array: Job, records: dict[Attempt, Submission], place: ArrayDir, after: str
    ) -> tuple[tuple[str, ...], bool]:
        scripts = [str(attempt.job_script) for attempt in records]
        logs = str(place.log_folder)

        def find() -> tuple[str, ...]:
            known = self.submitter.find_named(scheduler, array.scheduler_name)
            return tuple(scheduler.name_task(known, index) for index in range(len(scripts))) if known else ()

        handover = Handover(
            words=scheduler.submit_array(str(place.script), logs, scripts, after),
            read=lambda text: scheduler.read_task_ids(text, len(scripts)),
            find=find,
            asked=replace(list_requested(array), script=str(place.script)),
            where=f"{array.scheduler} on {array.site}",
            left=f"{len(scripts)} attempts are prepared below {self.asked.folder}",
        )
        try:
            return self.submitter.hand_over(scheduler, handover)
        except UserError:
            self._remove(list(records))
            raise
        except BaseException:
            with contextlib.suppress(ShardwayError):  # this process has given them up
                self._write_records({path: replace(record, submitted=0.0) for path, record in records.items()})
            raise

    # --- folders and files, those of all members in one exchange

    def _make_place(self) -> ArrayDir:
        """The folder of the next array. Raises UserError where it cannot be made."""
        folder = SweepDir(self.asked.folder)
        listed = self.host.run(("ls", "-1", str(folder.arrays_folder))).out.split()
        number = max((int(name) for name in listed if name.isdecimal()), default=0) + 1
        place = folder.array(number)
        commands = [
            ("mkdir", "-p", "-m", f"{FOLDER_MODE:o}", str(folder.path)),
            ("mkdir", "-p", str(folder.arrays_folder)),
            ("mkdir", str(place.path)),
            ("mkdir", str(place.log_folder)),
        ]
        failed = next((done for done in self.host.run_many(commands) if not done.ok), None)
        if failed is not None:
            raise _refuse_folder(place.path, failed.err)
        return place

    def _make_folders(self, attempts: Sequence[Attempt]) -> None:
        """Make the folders of attempts, of which none may be there. Raises UserError, and leaves none then."""
        done = self.host.run(("bash", "-c", _MAKE, f"{FOLDER_MODE:o}", *(str(each.path) for each in attempts)))
        made = {path for path in done.out.split("\n") if path}
        if done.ok:
            return
        self._remove([each for each in attempts if str(each.path) in made])
        if "File exists" in done.err:
            raise UserError(
                f"an attempt below {self.asked.folder} was made by another command just now: {done.err.strip()}\n"
                "  Nothing was submitted. To do: look with `shardway status`, then submit again."
            )
        raise _refuse_folder(self.asked.folder, done.err)

    def _remove(self, attempts: Sequence[Attempt]) -> None:
        """Remove folders that no job will ever use, and their parents if they are empty then."""
        with contextlib.suppress(ShardwayError):
            self.host.run(("bash", "-c", _REMOVE, "remove", *(str(each.path) for each in attempts)))

    def _forget(self, members: Sequence[Prepared]) -> None:
        for each in members:
            forget(self._known(each))

    def _remove_stops(self, members: Sequence[Prepared]) -> None:
        """Stop files that an earlier attempt has obeyed."""
        self.host.run(("rm", "-f", *(str(RunDir(each.job.run).stop_path) for each in members)))

    def _write_records(self, records: dict[Attempt, Submission]) -> None:
        texts = {PurePosixPath(each.submission_path): render_submission(record) for each, record in records.items()}
        self.host.write_files(texts)

    def _write_files(self, members: Sequence[Prepared]) -> None:
        """Scripts and requests of all members; the code is brought to the first, and copied there for the others."""
        texts: dict[Path, str] = {}
        library = render_library(members[0].job.scheduler)
        for each in members:
            attempt = each.job.folder
            texts |= {
                attempt.job_script: render_job_script(each.job),
                attempt.job_library: library,
                attempt.enter_script: render_enter_script(each.job),
                **each.files,
            }
        self.host.write_files({PurePosixPath(path): text for path, text in texts.items()})
        brought: list[tuple[SnapshotPlan, list[Attempt]]] = []
        for each in members:
            if each.snapshot is None:
                continue
            alike = next((attempts for plan, attempts in brought if plan is each.snapshot), None)
            if alike is None:
                bring_snapshot(self.host, each.snapshot, each.job.folder)
                brought.append((each.snapshot, [each.job.folder]))
            else:
                alike.append(each.job.folder)
        for _, (source, *others) in brought:
            words = [str(path) for path in (source.code, source.snapshot_path, source.diff_path)]
            targets = [str(attempt.path) for attempt in others]
            done = self.host.run(("bash", "-c", _COPY, *words, *targets), timeout_s=COPY_S)
            if not done.ok:
                raise _refuse_folder(others[0].path, done.err)


_MAKE = """
for attempt; do
  run=${attempt%/attempts/*}
  mkdir -p -m "$0" "$run" && mkdir -p "$run/attempts" && mkdir "$attempt" && mkdir "$attempt/log" || exit
  printf '%s\\n' "$attempt"
done
"""
_REMOVE = """
for attempt; do
  rm -rf "$attempt"
  rmdir "${attempt%/*}" "${attempt%/attempts/*}" 2> /dev/null
done
true
"""
_COPY = """
record=$1 diff=$2
shift 2
for target; do
  cp -a --reflink=auto "$0" "$target/" || exit
  for file in "$record" "$diff"; do
    [ ! -e "$file" ] || cp -a "$file" "$target/" || exit
  done
done
"""


def _refuse_folder(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} cannot be made: {why.strip()}\n  Nothing was submitted. To do: {find_remedy(why, ANOTHER_FOLDER)}."
    )


# --- which jobs are alike


def group_alike(jobs: Sequence[Job]) -> list[list[int]]:
    """Numbers of jobs that ask their scheduler for the same, so that one array can stand for them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, job in enumerate(jobs):
        nameless = replace(job, name="job", token="", run=Path("/"), attempt=1)
        lines = find_scheduler(job.scheduler).directives(nameless)
        groups.setdefault((job.scheduler, *(line.text for line in lines)), []).append(index)
    return list(groups.values())


def describe_groups(prepared: Sequence[Prepared], groups: Sequence[Sequence[int]]) -> str:
    """Why members of several kinds have no common limit."""
    kinds = []
    for group in groups:
        shape, names = prepared[group[0]].job.shape, [prepared[index].job.run.name for index in group]
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        kinds.append(f"    {shape.nodes} nodes of {shape.ranks_per_node} ranks: {shown}")
    return (
        f"the runs ask for {len(groups)} kinds of jobs, and a scheduler limits the tasks of one array, whose jobs ask "
        "for the same:\n" + "\n".join(kinds) + "\n  To do: leave out --max-parallel, or submit each kind by itself."
    )


def check_chains(prepared: Sequence[Prepared]) -> None:
    """Raise UserError where members would go on by jobs that their site does not let them submit."""
    job = next((each.job for each in prepared if each.job.chain.until_done and each.job.chain.ahead), None)
    if job is not None:
        raise UserError(
            f"jobs of {job.site} may not submit jobs, so the runs of an array cannot go on by themselves.\n"
            "  To do: leave out --until-done, and `shardway resume` what is not finished when the array has ended."
        )


def _name_job(name: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:180]
    return name if name[:1].isalpha() else f"sweep-{name}".rstrip("-")


# --- the script


def render_array_script(array: Job, jobs: Sequence[Job], at_once: int, place: ArrayDir) -> str:
    """The script of an array; `array`: one of the jobs under the array's name."""
    scheduler = find_scheduler(array.scheduler)
    logs = str(place.log_folder) if is_plain_path(str(place.log_folder)) else ""
    at_once = at_once if at_once < len(jobs) else 0
    head = script_lines(
        ("#!/bin/bash", ""),
        (f"# Written by Shardway {__version__} for {quote_comment(array.site)}: {len(jobs)} jobs as one array", ""),
    )
    entries = "\n".join(f"  {quote(str(job.folder.job_script))}" for job in jobs)
    lines = script_lines(
        (f"jobs=(\n{entries}\n)", "the job script of each run"),
        (f"job=${{jobs[{scheduler.array_index}]}}", "that of this task"),
        ("here=${job%/*}", ""),
        ('[ ! -e "$here/result.json" ] || exit 0', "a task that is started again has nothing to do where it had ended"),
    )
    run = ScriptLine('exec bash "$job" "${@:3}" >> "$here/log/job.out" 2>&1', "from here on it is the job of its run")
    parts = (
        ScriptSection("", (*head, *scheduler.array_directives(array, len(jobs), at_once, logs))),
        ScriptSection("which run this task is", lines),
        ScriptSection("the job", (*scheduler.array_lines(at_once, str(place.path)), run)),
    )
    return render_script(parts, behind=True)


def render_arrays(asked: ArrayRequest, prepared: Sequence[Prepared]) -> Iterator[str]:
    """The scripts that would be submitted, for a dry run."""
    for number, group in enumerate(group_alike([each.job for each in prepared]), 1):
        jobs = [prepared[index].job for index in group]
        if len(jobs) == 1 or not find_scheduler(jobs[0].scheduler).array_index:
            yield from (render_job_script(job) for job in jobs)
            continue
        array = replace(jobs[0], name=_name_job(asked.name), attempt=number)
        yield render_array_script(array, jobs, asked.at_once, SweepDir(asked.folder).array(number))
