"""Pyxis: options of srun that run its tasks in an enroot container.

Invariant: ranks find what Pyxis hands on of the environment, which is all that the image does not set itself. They may
write into the container, as with every other runtime that makes one for a job: its root is read-only and has no home
of the person where Enroot's configuration says nothing else. This module must not start anything.

Source: Pyxis, README "Usage" (--container-image, --container-mounts, --container-workdir, --container-writable since
0.11); Pyxis 0.24 with Enroot 4.1.2.
"""

from __future__ import annotations

from shardway.launch.containers.base import Runtime, all_mounts
from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import quote, quote_place

_SAID = frozenset(("--container-writable", "--container-readonly"))
"""Of both, Pyxis takes one."""


def _options(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    use = job.container
    return (
        f"--container-image={quote_place(use.image)}",
        f"--container-mounts={','.join(quote_place(mount.render()) for mount in all_mounts(job))}",
        f"--container-workdir={quote(str(job.around.workdir))}",
        *(() if _SAID.intersection(use.rules.options) else ("--container-writable",)),
        *map(quote, use.rules.options),
    )


PYXIS = Runtime(of_launcher=_options, images="a .sqsh file, or a URI such as nvcr.io#nvidia/pytorch:25.04-py3")
