"""Pyxis: options of srun that run its tasks in an enroot container.

Invariant: the job's variables win over those of the image (`--container-env`), as they do without a container. This
module must not start anything.

Source: Pyxis, README "Usage" (--container-image, --container-mounts, --container-workdir, --container-env).
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
        f"--container-env={','.join((*job.variables, *job.around.secret_names))}",
        *map(quote, use.rules.options),
    )


PYXIS = Runtime(of_starter=_options, images="a .sqsh file, or a URI such as nvcr.io#nvidia/pytorch:25.04-py3")
