"""What a scheduler says of one job, in words that are the same for every scheduler.

Invariant: a record holds what one answer said and nothing that was remembered; what the scheduler did not say is
empty or None. This module must not ask a scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shardway.errors import SiteError


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
    """Another exit code, or a signal that nobody claims."""
    TIMEOUT = "timeout"
    """The wall-time was over."""
    CANCELLED = "cancelled"
    """Somebody deleted it, running or queued; queued where it has no `started`."""
    PREEMPTED = "preempted"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILURE = "node_failure"
    NEVER_STARTED = "never_started"
    """It ended without having run and nobody deleted it: a dependency that cannot be met, a launch that failed."""
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class JobRecord:
    """One job as a scheduler describes it now.

    `state`, `reason` and `exit_text` ("0:9", "-29") are the scheduler's own words. `ending` is None unless `phase` is
    ENDED. `exit_code` is that of the job script, 0 to 255, None where a signal ended it or nothing is known; `signal`
    the number of that signal, 0 for none. Times are Unix seconds (local time where a scheduler names no zone), None
    for unknown. `note` tells a known defect of the answer, such as lost output.
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
