"""What each scheduler is told and asked, and how its answers are read: one table, scheduler -> functions.

Invariant: every function is pure: words to run, or the reading of what they printed. This module must not run anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from shardway.launch.blocks import read_block
from shardway.launch.hosts.base import Done
from shardway.launch.schedulers.explain import Explainer
from shardway.launch.schedulers.local import query as local
from shardway.launch.schedulers.pbs import query as pbs
from shardway.launch.schedulers.records import Explanation, JobRecord, RequestedResources, SchedulerSilent
from shardway.launch.schedulers.slurm import query as slurm

Words = tuple[str, ...]

_SLURM, _PBS = Explainer("slurm"), Explainer("pbs")

_TAKEN_BY_SBATCH = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?\s*$", re.MULTILINE)
"""With or without --parsable, sbatch(1): "12", "12;cluster", "Submitted batch job 12"."""

_TAKEN_BY_QSUB = re.compile(r"^(\d+(?:\[\])?(?:\.[\w.-]+)?)\s*$", re.MULTILINE)
"""qsub(1B): "12.server", "12[].server"."""


@dataclass(frozen=True)
class SchedulerClient:
    """The functions of one scheduler.

    `submit(script, log, after)` are the words that submit a script, to start when the job `after` has ended ("": at
    once). `warn(jobs)` sends SIGUSR1 to every process of jobs that run: ranks obey it as they do the stop file.
    `find(name)` looks for jobs of that name, `query(jobs)` asks about jobs; the outputs of their commands go
    to `read_found` and `read_records`. `read_job_id` gives the id in what a submission printed, empty where there is
    none. `forgets`: of a job that was cancelled it does not say so, but `cancel` has seen its end.
    """

    submit: Callable[[str, str, str], Words]
    cancel: Callable[[Sequence[str]], tuple[Words, ...]]
    warn: Callable[[Sequence[str]], tuple[Words, ...]]
    query: Callable[[Sequence[str]], tuple[Words, ...]]
    read_records: Callable[[Sequence[str], Sequence[Done]], dict[str, JobRecord]]
    find: Callable[[str], tuple[Words, ...]]
    read_found: Callable[[Sequence[Done]], tuple[str, ...]]
    read_job_id: Callable[[str], str]
    explain_refusal: Callable[[Done, RequestedResources], Explanation]
    explain_pending: Callable[[JobRecord, RequestedResources], Explanation | None]
    explain_ending: Callable[[JobRecord, RequestedResources], Explanation | None]
    forgets: bool = False


def _sbatch(script: str, log: str, after: str) -> Words:
    return ("sbatch", "--parsable", *([f"--dependency=afterany:{after}"] if after else []), script)


def _qsub(script: str, log: str, after: str) -> Words:
    shell = f'{read_block("pbs", "submit_as_program").text}\nsubmit_as_program "$@"'
    return ("bash", "-c", shell, "qsub", script, *(["-W", f"depend=afterany:{after}"] if after else []))


def _parse_job_id(pattern: re.Pattern[str], text: str) -> str:
    """The last id in a standard output: a site's wrapper or hook may print lines of its own around it."""
    found = pattern.findall(text)
    return found[-1] if found else ""


CLIENTS: Mapping[str, SchedulerClient] = MappingProxyType(
    {
        "slurm": SchedulerClient(
            submit=_sbatch,
            cancel=lambda jobs: (("scancel", *jobs),),
            warn=lambda jobs: (("scancel", "--full", "--signal=USR1", *jobs),),
            query=slurm.query_commands,
            read_records=slurm.parse_records,
            find=slurm.find_commands,
            read_found=slurm.parse_found,
            read_job_id=partial(_parse_job_id, _TAKEN_BY_SBATCH),
            explain_refusal=_SLURM.explain_refusal,
            explain_pending=_SLURM.explain_pending,
            explain_ending=_SLURM.explain_ending,
        ),
        "pbs": SchedulerClient(
            submit=_qsub,
            cancel=lambda jobs: tuple(("qdel", job) for job in jobs),
            warn=lambda jobs: tuple(("qsig", "-s", "SIGUSR1", job) for job in jobs),
            query=pbs.query_commands,
            read_records=pbs.parse_records,
            find=pbs.find_commands,
            read_found=pbs.parse_found,
            read_job_id=partial(_parse_job_id, _TAKEN_BY_QSUB),
            explain_refusal=_PBS.explain_refusal,
            explain_pending=_PBS.explain_pending,
            explain_ending=_PBS.explain_ending,
        ),
        "local": SchedulerClient(
            submit=local.submit_command,
            cancel=local.cancel_commands,
            warn=local.warn_commands,
            query=local.query_commands,
            read_records=local.parse_records,
            find=local.find_commands,
            read_found=local.parse_found,
            read_job_id=local.parse_job_id,
            explain_refusal=local.explain_refusal,
            explain_pending=local.explain_pending,
            explain_ending=local.explain_ending,
            forgets=True,
        ),
    }
)


_JOB_ID = re.compile(r"\d[\w.+\[\]-]*")


def is_job_id(job: str) -> bool:
    """Whether a text may be the id of a job: a record that is damaged must not become an option of `scancel`."""
    return _JOB_ID.fullmatch(job) is not None


def find_client(scheduler: str) -> SchedulerClient:
    """The functions of a scheduler. Raises SchedulerSilent for a name that is none's, as in a damaged record."""
    if scheduler not in CLIENTS:
        raise SchedulerSilent(f'"{scheduler}" is no scheduler that Shardway knows; allowed: {", ".join(CLIENTS)}.')
    return CLIENTS[scheduler]
