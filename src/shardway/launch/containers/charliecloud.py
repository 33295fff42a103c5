"""Charliecloud: `ch-run` of an image folder or squashfs file, without any privilege.

Invariant: the container sees the job's variables, since ch-run passes the environment on. This module must not start
anything.

Source: ch-run(1) (--bind, --cd).
"""

from __future__ import annotations

from shardway.launch.containers.base import Runtime, all_mounts, command_of
from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import quote, quote_place


def _wrap(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    use = job.container
    return (
        quote(command_of(use, "ch-run")),
        *(f"--bind {quote_place(f'{mount.source}:{mount.target}')}" for mount in all_mounts(job)),
        f"--cd {quote(str(job.around.workdir))}",
        *map(quote, use.rules.options),
        quote_place(use.image),
        "--",
    )


CHARLIECLOUD = Runtime(wrap=_wrap, images="a .sqfs or .sqsh file, or a folder")
