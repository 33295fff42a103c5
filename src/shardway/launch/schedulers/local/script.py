"""The part of a job script where this machine is the scheduler: a process with a wall-time.

Invariant: the job bears a name that all it starts inherits, so that ending it ends everything. This module must not
start processes.
"""

from __future__ import annotations

from shardway.launch.job import Job
from shardway.launch.schedulers.base import EachNode, SchedulerScript
from shardway.launch.script import ScriptLine, quote_comment


def directives(job: Job) -> tuple[ScriptLine, ...]:
    """No scheduler reads them; they say how the job is started."""
    return (
        ScriptLine(f"# local {job.scheduler_name}"),
        ScriptLine(f"# output {quote_comment(str(job.folder.job_log))}"),
        ScriptLine("predecessor=${1:-}", "the job that this one follows, if there is one"),
    )


LOCAL = SchedulerScript(
    directives=directives,
    shell="local",
    functions=lambda job: (
        "begin",
        "end_time",
        "ask_ending",
        "began",
        "members",
        "start_job",
        "submit_after",
        "cancel_job",
        "kill_job",
    ),
    each_node=lambda job: EachNode((), "0"),
    warns=False,
    launcher_variables=(),
)
