"""Apptainer (or Singularity, its older name): `exec` of an image file or folder.

Invariant: the container sees the job's variables, since Apptainer passes the environment on. This module must not
start anything.

Source: Apptainer User Guide, "apptainer exec" (--nv, --rocm, --bind, --pwd).
"""

from __future__ import annotations

from shardway.launch.containers.base import Runtime, all_mounts, command_of
from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import quote, quote_place

_ACCELERATORS = {"nvidia": ("--nv",), "amd": ("--rocm",)}


def _wrap(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    use = job.container
    return (
        f"{quote(command_of(use, 'apptainer'))} exec",
        *_ACCELERATORS.get(use.vendor, ()),
        *(f"--bind {quote_place(mount.render())}" for mount in all_mounts(job)),
        f"--pwd {quote(str(job.around.workdir))}",
        *map(quote, use.rules.options),
        quote_place(use.image),
    )


APPTAINER = Runtime(wrap=_wrap, images="a .sif or .sqsh file or a folder, or a URI such as docker://IMAGE:TAG")
