"""What qsub prints: the id of the job that it took, or why it took none.

Invariant: a refusal that nobody knows is handed on in qsub's own words. A refusal that is not hopeless may hide a job
that was taken; whoever tries again looks for it by its name first. This module must not run a command.
Sources: qsub(1B); `refusals.toml` beside this module.
"""

from __future__ import annotations

import re

from shardway.launch.hosts.base import Done
from shardway.launch.schedulers import explain
from shardway.launch.schedulers.records import Asked, Explanation

_TAKEN = re.compile(r"^(\d+(?:\[\])?(?:\.[\w.-]+)?)\s*$", re.MULTILINE)


def parse_job_id(text: str) -> str:
    """The job id in qsub's standard output ("12.server", "12[].server"); empty where there is none. A site's hook may
    print lines of its own around it."""
    found = _TAKEN.findall(text)
    return found[-1] if found else ""


def explain_refusal(done: Done, asked: Asked) -> Explanation:
    """Why qsub took no job, and what to do; not `hopeless` where the same may be taken later."""
    return explain.explain_refusal(explain.load_rules("pbs/refusals", "refusal"), done, asked)
