"""The part of a job script where this machine is the scheduler: a process with a wall-time.

Invariant: the job is the session that its script leads, so that ending it ends everything that it started. This module
must not start processes.
"""

from __future__ import annotations

from shardway.launch.job import Job
from shardway.launch.schedulers.base import EachNode, SchedulerScript
from shardway.launch.script import Line


def directives(job: Job) -> tuple[Line, ...]:
    """No scheduler reads them; they say how the job is started."""
    return (
        Line(f"# local {job.scheduler_name}"),
        Line(f"# output {job.folder.job_log}"),
        Line("predecessor=${1:-}", "the process that this job follows, if there is one"),
    )


LOCAL = SchedulerScript(
    directives=directives,
    shell="local",
    functions=lambda job: ("begin", "ask_ending", "submit_after", "cancel_job"),
    each_node=lambda job: EachNode((), "0"),
    warns=False,
    launcher_variables=(),
)
