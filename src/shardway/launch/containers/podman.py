"""Podman: a container of the host's network, removed when the rank has ended.

Invariant: the container gets the secrets and what the launcher tells a rank, and nothing else of the host's
environment.
This module must not start anything.

Source: podman-run(1) (--env with a name or a pattern ending in *, --volume, --network, --device, --ipc).
"""

from __future__ import annotations

from shardway.launch.containers.base import HOST_NAMES, Runtime, all_mounts, command_of
from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import ScriptLine, quote, quote_place

_ACCELERATORS = {
    "nvidia": ("--device nvidia.com/gpu=all",),
    "amd": ("--device /dev/kfd", "--device /dev/dri", "--group-add keep-groups"),
}
_LAUNCHERS = ("OMPI_*", "PMIX_*", "PMI_*")


def _setup(job: Job, scheduler: SchedulerScript) -> tuple[ScriptLine, ...]:
    """`--ipc=host` also mounts the node's message queues, and fails where the node has none."""
    return (
        ScriptLine(
            "ipc=(--ipc=host)", "ranks share memory of the node; its /dev/shm alone where it has no message queues"
        ),
        ScriptLine("[ -e /dev/mqueue ] || ipc=(--ipc=private --volume=/dev/shm:/dev/shm)"),
    )


def _wrap(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    use, around = job.container, job.around
    patterns = dict.fromkeys((*scheduler.launcher_variables, *_LAUNCHERS))
    return (
        f"{quote(command_of(use, 'podman'))} run --rm --network=host --security-opt=label=disable",
        '"${ipc[@]}"',
        *_ACCELERATORS.get(use.vendor, ()),
        *(f"--env {name}" for name in around.secret_names),
        *(f"--env '{pattern}'" for pattern in patterns),
        *(f"--volume {quote_place(mount.render())}" for mount in all_mounts(job, HOST_NAMES)),
        f"--workdir {quote(str(around.workdir))}",
        *map(quote, use.rules.options),
        quote_place(use.image),
    )


PODMAN = Runtime(
    wrap=_wrap, setup=_setup, images="an image that every node has (podman images), or a URI that nodes can pull"
)
