"""Pyxis: options of srun that run its tasks in an enroot container.

Invariant: ranks find what Pyxis hands on of the environment, which is all that the image does not set itself. This
module must not start anything.

Source: Pyxis, README "Usage" (--container-image, --container-mounts, --container-workdir).
"""

from __future__ import annotations

from shardway.launch.containers.base import Runtime, all_mounts
from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import quote, quote_place


def _options(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    use = job.container
    return (
        f"--container-image={quote_place(use.image)}",
        f"--container-mounts={','.join(quote_place(mount.render()) for mount in all_mounts(job))}",
        f"--container-workdir={quote(str(job.around.workdir))}",
        *map(quote, use.rules.options),
    )


PYXIS = Runtime(of_starter=_options, images="a .sqsh file, or a URI such as nvcr.io#nvidia/pytorch:25.04-py3")
