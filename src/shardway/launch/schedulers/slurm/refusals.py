"""What sbatch prints: the id of the job that it took, or why it took none.

Invariant: a refusal that nobody knows is handed on in sbatch's own words. A refusal that is not hopeless may hide a job
that was taken; whoever tries again looks for it by its name first. This module must not run a command.
Sources: sbatch(1) "--parsable"; `refusals.toml` beside this module.
"""

from __future__ import annotations

import re

from shardway.launch.hosts.base import Done
from shardway.launch.schedulers import explain
from shardway.launch.schedulers.records import Asked, Explanation

_TAKEN = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?\s*$", re.MULTILINE)


def parse_job_id(text: str) -> str:
    """The job id in sbatch's standard output, with or without --parsable; empty where there is none. A site's wrapper
    may print lines of its own around it."""
    found = _TAKEN.findall(text)
    return found[-1] if found else ""


def explain_refusal(done: Done, asked: Asked) -> Explanation:
    """Why sbatch took no job, and what to do; not `hopeless` where the same may be taken later."""
    return explain.explain_refusal(explain.load_rules("slurm/refusals", "refusal"), done, asked)
