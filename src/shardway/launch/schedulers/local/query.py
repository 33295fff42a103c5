"""Asks this machine about the processes that are its jobs, and reads the answers.

A job's id is "PID.START", START being the process's start in clock ticks since the machine booted: a number alone may
belong to another process by now.

Invariant: a process that is a zombie, or has another start, has ended. This module must not run a command.
Source: proc_pid_stat(5), fields (1) pid, (3) state, (22) starttime.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardway.launch.hosts.base import Done
from shardway.launch.schedulers.answers import describe_silence
from shardway.launch.schedulers.records import Asked, Explanation, JobRecord, Phase, SchedulerEnding, SchedulerSilent

_JOB = re.compile(r"(\d+)\.(\d+)")
_GRACE_S = 30
_LOOK = """for job in "$@"; do stat=$(cat "/proc/${job%%.*}/stat" 2>/dev/null) && echo "$stat"; done; true"""
_FIND = """pattern="# local $1"; for d in /proc/[0-9]*; do
  script=$(tr '\\0' '\\n' < "$d/cmdline" 2>/dev/null | sed -n 2p)
  case $script in */job.sh) grep -qxF -- "$pattern" "$script" 2>/dev/null && cat "$d/stat" 2>/dev/null ;; esac
done; true"""
_START = """setsid bash "$1" "$2" > "$3" 2>&1 < /dev/null & sleep 0.2; cat "/proc/$!/stat\""""
_END = """for job in "$@"; do
  stat=$(sed 's/.*) //' "/proc/${job%%.*}/stat" 2>/dev/null | cut -d' ' -f20)
  [ "$stat" != "${job##*.}" ] || kill -TERM -- "-${job%%.*}"
done; true"""


def query_commands(jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The command whose output `parse_records` reads."""
    known = [job for job in jobs if _JOB.fullmatch(job)]
    return (("bash", "-c", _LOOK, "look", *known),) if known else ()


def find_commands(token: str) -> tuple[tuple[str, ...], ...]:
    """The command whose output `parse_found` reads: processes of a job script with this name."""
    return (("bash", "-c", _FIND, "find", token),)


def submit_command(script: str, log: str, after: str) -> tuple[str, ...]:
    """Start a job script in a session of its own; it waits for the job `after`."""
    return ("bash", "-c", _START, "start", script, after.split(".")[0], log)


def cancel_commands(jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """End jobs with everything that they started; a number that is another process by now is left alone."""
    return (("bash", "-c", _END, "end", *jobs),)


def parse_records(jobs: Sequence[str], answers: Sequence[Done]) -> dict[str, JobRecord]:
    """A record of each of these jobs. Raises SchedulerSilent where the machine did not answer."""
    if answers and not answers[0].ok:
        raise SchedulerSilent(describe_silence(answers[0]))
    alive = {_id_of(line): line for line in (answers[0].out.splitlines() if answers else ())}
    return {job: _record(job, alive.get(job, "")) for job in jobs}


def parse_found(answers: Sequence[Done]) -> tuple[str, ...]:
    """Ids of the jobs of a name. Raises SchedulerSilent where the machine did not answer."""
    if not answers[0].ok:
        raise SchedulerSilent(describe_silence(answers[0]))
    return tuple(_id_of(line) for line in answers[0].out.splitlines())


def parse_job_id(text: str) -> str:
    """The id of the process that was started; empty where there is none."""
    return _id_of(text.strip()) if text.strip() else ""


def explain_refusal(done: Done, asked: Asked) -> Explanation:
    """A machine takes every job; what goes wrong is that the script cannot be started."""
    return Explanation("not_started", describe_silence(done), "look whether bash and setsid are installed", True)


def explain_pending(record: JobRecord, asked: Asked) -> Explanation | None:
    """A job of this machine waits for nothing but the one before it."""
    return None


def explain_ending(record: JobRecord, asked: Asked) -> Explanation | None:
    """A process leaves no record."""
    return None


def _record(job: str, stat: str) -> JobRecord:
    state = stat.rpartition(") ")[2][:1]
    if state in ("", "Z", "X"):
        return JobRecord(job, Phase.ENDED, state="gone", ending=SchedulerEnding.UNCLEAR)
    return JobRecord(job, Phase.RUNNING, state=state)


def _id_of(stat: str) -> str:
    pid, rest = stat.split(" ", 1)[0], stat.rpartition(") ")[2].split()
    return f"{pid}.{rest[19]}" if len(rest) > 19 else ""
