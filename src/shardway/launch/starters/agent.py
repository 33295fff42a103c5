"""Our own agent on each node: it starts the ranks there, again after a failure, and goes on with fewer nodes.

The agents know each other by the list of addresses that the job script has made (`shardway train --nodes`); the first
one leads.

Invariant: as `torchrun`'s. It starts `shardway train` alone, which is an agent itself. This module must not know
schedulers beyond how they start one command on each node.
"""

from __future__ import annotations

from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import quote_all, quote_shell
from shardway.launch.starters.base import LaunchCommand, name_cores


def start(job: Job, scheduler: SchedulerScript) -> LaunchCommand:
    """One agent on each node."""
    each_node = scheduler.each_node(job)
    lines = (
        *name_cores(job),
        f'exec python3 "$@" --nproc {job.shape.ranks_per_node} \\',
        f'    --nodes "$SHARDWAY_NODES" --node "{each_node.index}" --port "$MASTER_PORT"',
    )
    words = tuple(quote_all([word]) for word in job.program.words)
    return LaunchCommand(each_node.words, ("bash", "-c", quote_shell("\n".join(lines)), "agent", *words))
