"""This machine as a scheduler: a job is a process with a wall-time.

Invariants:
- A zombie, or a process with another start time, has ended. A process belongs to a job only if it has its name
  (SHARDWAY_JOB), or is in the session of its script or of such a process.
- All processes of a job inherit its name, so ending it ends them all.

A job's id is "PID.START", START being the process's start in clock ticks since the machine booted: a number alone may
belong to another process by now. A job is everything that its script has started: if the script is killed, the job goes
on as long as one of these processes runs.

Source: proc_pid_stat(5), fields (1) pid, (3) state, (5) pgrp, (6) session, (22) starttime; proc_pid_environ(5).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardway.launch.schedulers.base import (
    NOTHING_ASKED,
    EachNode,
    Explanation,
    JobPhase,
    JobRecord,
    RequestedResources,
    Scheduler,
    SchedulerEnding,
    describe_silence,
    read_lines,
)
from shardway.launch.script import ScriptLine, quote, quote_comment, read_block, read_blocks

if TYPE_CHECKING:  # each rank that a scheduler has started imports this module
    from shardway.launch.hosts.base import Done
    from shardway.launch.job import Job


class ThisMachine(Scheduler):
    """Processes of this machine."""

    name = "local"
    title = "this machine"
    this_machine = True
    keeps_time = False
    forgets = True
    by_hand = "bash THIS_FILE"
    shell = "local"
    array_index = "$1"
    reaches_nodes = True
    generic_site = "laptop"

    # --- the job script

    def directives(self, job: Job) -> tuple[ScriptLine, ...]:
        """No scheduler reads them; they say how the job is started."""
        return (
            ScriptLine(f"# local {job.scheduler_name}"),
            ScriptLine(f"# output {quote_comment(str(job.folder.job_log))}"),
            ScriptLine("predecessor=${1:-}", "the job that this one follows, if there is one"),
        )

    def each_node(self, job: Job) -> EachNode:
        return EachNode((), "0")

    def open_shell(self, job: Job, script: str, *, terminal: bool) -> tuple[str, ...]:
        return ("bash", script)

    # --- commands, and what they print

    def submit(self, script: str, log: str, after: str) -> tuple[str, ...]:
        return _command("start_job", script, after, log)

    def read_job_id(self, text: str) -> str:
        return text.strip() if _JOB.fullmatch(text.strip()) else ""

    def array_directives(self, job: Job, tasks: int, at_once: int, logs: str) -> tuple[ScriptLine, ...]:
        """Each task is a process that gets its number, the script of its job, and the job that all of them follow."""
        return (ScriptLine(f"# local {job.scheduler_name}"),)

    def array_lines(self, at_once: int, folder: str) -> tuple[ScriptLine, ...]:
        if not at_once:
            return ()
        return (
            read_block("local_jobs", "take_slot"),
            ScriptLine(f"take_slot {quote(folder)} {at_once}", "no more of them than this run at once"),
        )

    def submit_array(self, script: str, logs: str, jobs: Sequence[str], after: str) -> tuple[str, ...]:
        return _command("start_tasks", script, logs, after, *jobs)

    def read_task_ids(self, text: str, tasks: int) -> tuple[str, ...]:
        found = tuple(line.strip() for line in text.splitlines() if _JOB.fullmatch(line.strip()))
        return found if len(found) == tasks else ()

    def cancel(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """End jobs with all that they started, and wait until it is gone: SIGTERM, and SIGKILL after `GRACE_S`."""
        return _commands("end_jobs", jobs, str(GRACE_S))

    def warn(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return _commands("warn_jobs", jobs)

    def query(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return _commands("look_at", jobs)

    def parse_records(self, jobs: Sequence[str], answers: Sequence[Done]) -> dict[str, JobRecord]:
        lines = read_lines(answers[0]) if answers else ()
        alive = {match["job"]: _record(match) for match in map(_ANSWER.fullmatch, lines) if match}
        gone = {job: JobRecord(job, JobPhase.ENDED, state="gone", ending=SchedulerEnding.UNCLEAR) for job in jobs}
        return {job: alive.get(job, gone[job]) for job in jobs}

    def find(self, name: str) -> tuple[tuple[str, ...], ...]:
        return (_command("find_jobs", name),)

    def parse_found(self, answers: Sequence[Done]) -> tuple[str, ...]:
        return tuple(line for line in read_lines(answers[0]) if _JOB.fullmatch(line))

    def explain_refusal(self, done: Done, asked: RequestedResources = NOTHING_ASKED) -> Explanation:
        """A machine takes every job; what goes wrong is that the script cannot be started."""
        return Explanation(
            "not_started",
            describe_silence(done),
            "see what bash says: whether setsid is installed, and the folder of the output is there and writable",
            True,
        )

    def explain_pending(self, record: JobRecord, asked: RequestedResources = NOTHING_ASKED) -> Explanation | None:
        """A job of this machine waits for the one before it, or for its turn in an array."""
        if record.phase is not JobPhase.QUEUED:
            return None
        return Explanation("dependency", f"It starts after {record.reason or 'the job before it'}.", "wait")

    def explain_ending(self, record: JobRecord, asked: RequestedResources = NOTHING_ASKED) -> Explanation | None:
        return None


# --- shell that looks at processes

_JOB = re.compile(r"(\d+)\.(\d+)")
_ANSWER = re.compile(r"(?P<job>\d+\.\d+) (?P<word>runs|waits)(?: (?P<after>\d+|in line))?")

GRACE_S = 10
"""How long a job that is ended may take to leave by itself; then it is killed."""


def _command(function: str, *words: str) -> tuple[str, ...]:
    """Shell that uses the functions of a job script, so that both see a job in the same way."""
    blocks = read_blocks("local") | read_blocks("local_jobs")
    texts = [blocks[name].text for name in ("began", "members", "signal_job", "start_words", function)]
    return ("bash", "-c", "\n".join([*texts, f'{function} "$@"']), "local", *words)


def _commands(function: str, jobs: Sequence[str], *first: str) -> tuple[tuple[str, ...], ...]:
    """The command about these jobs; none where no word is an id."""
    known = [job for job in jobs if _JOB.fullmatch(job)]
    return (_command(function, *first, *known),) if known else ()


def _record(match: re.Match[str]) -> JobRecord:
    if match["word"] == "runs":
        return JobRecord(match["job"], JobPhase.RUNNING, state="runs")
    if match["after"] == "in line":
        return JobRecord(match["job"], JobPhase.QUEUED, state="waits", reason="others of its array")
    reason = "the run that it follows" if match["after"] == "0000" else f"attempt {match['after'] or 'before it'}"
    return JobRecord(match["job"], JobPhase.QUEUED, state="waits", reason=reason)
