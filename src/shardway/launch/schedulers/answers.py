"""What the answers of every scheduler share: whether one came at all, and one record for many tasks of an array.

Invariant: no answer is never taken for "no job". This module must not know a scheduler's words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardway.launch.hosts.base import MISSING, Done
from shardway.launch.schedulers.records import JobPhase, JobRecord, SchedulerEnding

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
