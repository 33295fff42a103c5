"""What every scheduler provides: directives for a job script, records of jobs in one form, answers of its commands.

Invariants:
- The functions are pure.
- A record holds what one answer stated, nothing remembered; what the scheduler did not state is empty or None.
- A missing answer is never taken for "no job".
- Options: each given option appears, in the order given, except those that are false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shardway.errors import SiteError
from shardway.launch.hosts.base import MISSING, Done
from shardway.launch.job import Job
from shardway.launch.script import ScriptLine

# --- one job's record, in words common to all schedulers


class SchedulerSilent(SiteError):
    """The scheduler gave no answer that can be used; nothing is known of any job, least of all that there is none."""


class JobPhase(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The scheduler answered, and does not know the job."""


class SchedulerEnding(StrEnum):
    """How a job ended as far as a scheduler can tell; it does not know what the program meant by its exit code."""

    COMPLETED = "completed"
    """Exit code 0."""
    FAILED = "failed"
    """Another exit code, or a signal of unknown origin."""
    TIMEOUT = "timeout"
    """The wall-time was over."""
    CANCELLED = "cancelled"
    """A user deleted it, running or queued; queued if it has no `started`."""
    PREEMPTED = "preempted"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILURE = "node_failure"
    NEVER_STARTED = "never_started"
    """It ended without having run and was not deleted: a dependency that cannot be met, a launch that failed."""
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class JobRecord:
    """One job as a scheduler describes it now.

    `state`, `reason` and `exit_text` ("0:9", "-29") are the scheduler's own words. `ending` is None unless `phase` is
    ENDED. `exit_code` is that of the job script, 0 to 255, None where a signal ended it or nothing is known; `signal`
    the number of that signal, 0 for none. Times are Unix seconds (local time where a scheduler names no zone), None
    for unknown. `note` names a known defect of the answer, such as lost output.
    """

    job: str
    phase: JobPhase
    state: str = ""
    reason: str = ""
    ending: SchedulerEnding | None = None
    exit_code: int | None = None
    signal: int = 0
    started: float | None = None
    ended: float | None = None
    nodes: str = ""
    restarts: int = 0
    name: str = ""
    note: str = ""
    exit_text: str = ""


@dataclass(frozen=True)
class RequestedResources:
    """What a job asked of a scheduler, for sentences about it; empty or None is what it did not ask for.

    `queue` is a PBS queue or a Slurm partition, `account` a PBS project or a Slurm account. `walltime_s` is in
    seconds, `memory` in bytes of one node; `accelerators` and `cores` are those of one node. `host` is where the
    scheduler was asked, as ssh knows it; empty for this machine. `run` is how other verbs name the run.
    """

    name: str = ""
    queue: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    walltime_s: float | None = None
    nodes: int | None = None
    cores: int | None = None
    accelerators: int | None = None
    memory: int | None = None
    script: str = ""
    host: str = ""
    run: str = ""


@dataclass(frozen=True)
class Explanation:
    """Why a scheduler refuses a job, lets it wait, or how it ended: a sentence, and what to do about it.

    `hopeless`: waiting, or asking the same again later, will not help. `code` is a short stable name, such as
    "walltime_over_limit".
    """

    code: str
    sentence: str
    remedy: str
    hopeless: bool = False


# --- what a scheduler contributes to a job script


@dataclass(frozen=True)
class EachNode:
    """How one command runs on every node of a job at once.

    `words` are quoted already; the command follows them. `index` and `name` are shell that the command's own shell
    evaluates on each node: the node's number from 0 on.
    """

    words: tuple[str, ...]
    index: str


@dataclass(frozen=True)
class SchedulerScript:
    """The scheduler's part of a job script.

    `directives` are the lines that the scheduler reads; `shell` names the file of its functions (`launch/shell`);
    `functions` those that a job needs; `each_node` starts one command a node. `warns`: it can be asked for a signal
    before the wall-time ends. `launcher_variables` are patterns of what its launchers tell a rank.
    `signals_every_process`: not the script alone, when a job is deleted or signalled. `own_jobs`: shell that prints the
    ids of the person's jobs that wait or run, one a line; "" where none was tried.
    """

    directives: Callable[[Job], tuple[ScriptLine, ...]]
    shell: str
    functions: Callable[[Job], tuple[str, ...]]
    each_node: Callable[[Job], EachNode]
    warns: bool
    launcher_variables: tuple[str, ...]
    signals_every_process: bool = False
    own_jobs: str = ""


# --- shared by the answers of every scheduler

_LINES = 2


def describe_silence(done: Done) -> str:
    """Why an answer cannot be used, in one line: "squeue did not answer in time"."""
    words = done.words[3:] if done.words[:2] == ("sh", "-c") else done.words
    program = next((word for word in words if "=" not in word and word != "env"), "the scheduler")
    if done.timed_out:
        return f"{program} did not answer in time"
    if done.code == MISSING:
        return f"{program} was not found"
    said = [line.strip() for line in (done.err or done.out).splitlines() if line.strip()][:_LINES]
    return f"{program} failed with exit code {done.code}: {'; '.join(said) or 'it said nothing'}"


def merge_tasks(job: str, tasks: Sequence[JobRecord]) -> JobRecord:
    """One record for an array: it runs while a task runs, it waits while none has run, and it ended as its first task
    that did not complete."""
    phases = {task.phase for task in tasks}
    if phases == {JobPhase.ENDED}:
        first = next((task for task in tasks if task.ending is not SchedulerEnding.COMPLETED), tasks[0])
        ended = _latest(task.ended for task in tasks)
        return replace(first, job=job, started=_earliest(task.started for task in tasks), ended=ended)
    phase = JobPhase.RUNNING if phases & {JobPhase.RUNNING, JobPhase.ENDED} else JobPhase.QUEUED
    first = next((task for task in tasks if task.phase is phase), tasks[0])
    started = _earliest(task.started for task in tasks)
    return replace(first, job=job, phase=phase, ending=None, exit_code=None, signal=0, started=started, ended=None)


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _latest(times: Iterable[float | None]) -> float | None:
    return max((time for time in times if time is not None), default=None)


# --- options as words of a command line


def render_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Words such as `--qos=debug`, `--exclusive`, `-W group_list=x`; a name of one letter takes its value apart.

    True is the bare option, false leaves it out, a list gives it several times. Dashes before a name may be left out.
    """
    for name, value in options.items():
        bare = name.lstrip("-")
        for entry in value if isinstance(value, list | tuple) else [value]:
            if entry is False:
                continue
            dashed = f"-{bare}" if len(bare) == 1 else f"--{bare}"
            if entry is True:
                yield dashed
            else:
                yield f"{dashed} {entry}" if len(bare) == 1 else f"{dashed}={entry}"
