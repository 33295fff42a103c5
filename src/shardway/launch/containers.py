"""The class of a container runtime, and ours: Apptainer, Charliecloud, Enroot, Podman, Pyxis.

Invariants:
- The functions are pure; the scheduler's own commands run outside the container.
- Apptainer and Charliecloud: the container gets the job's variables, since both pass the environment on.
- Enroot: containers of two jobs or nodes never share a name or a folder.
- Enroot and Podman: of the host's environment the container gets only the secrets and the
  launcher's variables of a rank.
- Pyxis: ranks get all of the environment that the image does not set itself. They may write into the container, as with
  every other runtime that creates one per job: by default its root is read-only and without the user's home.

If PBS creates the container (`containers.by_scheduler` of the site: container_engine=enroot, container_image,
container_name), the script only starts it, under the name and from the folder that PBS gave it.

An Enroot container has the name of its job and node, since enroot keeps containers in the home folder, which nodes
share, unless the site or ENROOT_DATA_PATH sets another, and refuses an existing name.

Sources: Apptainer User Guide, "apptainer exec" (--nv, --rocm, --bind, --pwd); ch-run(1) (--bind, --cd); enroot's
documentation, "enroot create", "enroot start" (--root, --rw, --mount, --env), "Image format" (x-create);
ENROOT_DATA_PATH, ENROOT_RUNTIME_PATH in "Configuration"; issues 13 and 23 of NVIDIA/enroot; podman-run(1) (--env with a
name or a pattern ending in *, --volume, --network, --device, --ipc); Pyxis, README "Usage" (--container-image,
--container-mounts, --container-workdir, --container-writable since 0.11); Pyxis 0.24 with Enroot 4.1.2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from shardway.launch.job import ContainerMount, ContainerUse, Job
from shardway.launch.schedulers.base import Scheduler
from shardway.launch.script import ScriptLine, quote, quote_expanding, quote_place, wrap_command
from shardway.plugins import make_plugin

if TYPE_CHECKING:
    from shardway.launch.image.request import Reference

# --- what a container runtime contributes

HOST_NAMES = ContainerMount("/etc/hosts", "/etc/hosts", read_only=True)
"""For runtimes whose containers have a file of their own, in which the nodes of the job are not named."""


class Container(ABC):
    """One container runtime. A class of another package that derives from this one and has an entry point in the group
    `shardway.containers` can be named in `site.container` and in a profile. It is made without arguments."""

    images: ClassVar[str] = "a file on the site"
    """What may be an image, for messages."""
    starts_files: ClassVar[str] = ""
    """For a runtime whose images are files alone: what to do with an image of a registry, IMAGE."""
    divider: ClassVar[str] = r"[:\x00-\x1f]"
    """Regular expression of the characters that end a path in its words for a mount."""

    @abstractmethod
    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        """Words before a command that put it into a container, quoted already."""

    def of_launcher(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        """Options of the command that starts the ranks, for a runtime that is a part of a scheduler."""
        return ()

    def setup(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        """Lines before the ranks."""
        return ()

    def teardown(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        """Lines after the ranks."""
        return ()

    def name_image(self, image: Reference) -> str | None:
        """An image of a registry as this runtime names it; None where it takes the words as they are."""
        return None


class NoContainer(Container):
    """Ranks on the host."""

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        return ()


def all_mounts(job: Job, *more: ContainerMount) -> tuple[ContainerMount, ...]:
    """What the container sees: the run, the working folder, what the run and the site name, each once.

    A folder below one that is mounted as it is needs no mount of its own; not every runtime could make a place for it.
    """
    folders = [job.run] if job.around.workdir.is_relative_to(job.run) else [job.run, job.around.workdir]
    whole = [mount.source for mount in job.container.mounts if mount.source == mount.target and not mount.read_only]
    own = [ContainerMount(str(folder), str(folder)) for folder in folders if not any(map(folder.is_relative_to, whole))]
    return tuple(dict.fromkeys((*own, *job.container.mounts, *more)))


def command_of(use: ContainerUse, usual: str) -> str:
    """The runtime's command, which some sites have under another name."""
    return use.rules.command or usual


# --- Apptainer or Singularity: exec of an image file or folder

_APPTAINER_ACCELERATORS = {"nvidia": ("--nv",), "amd": ("--rocm",)}


class Apptainer(Container):
    """exec of an image file or folder, or of a URI."""

    images = "a .sif or .sqsh file or a folder, or a URI such as docker://IMAGE:TAG"
    divider = r"[:,]"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use = job.container
        return (
            f"{quote(command_of(use, 'apptainer'))} exec",
            *_APPTAINER_ACCELERATORS.get(use.vendor, ()),
            *(f"--bind {quote_place(mount.render())}" for mount in all_mounts(job)),
            f"--pwd {quote(str(job.around.workdir))}",
            *map(quote, use.rules.options),
            quote_place(use.image),
        )

    def name_image(self, image: Reference) -> str:
        """docker://REGISTRY/IMAGE:TAG."""
        from shardway.launch.image.request import render_docker

        return f"{image.transport}://{render_docker(image)}"


# --- Charliecloud: ch-run of an image folder or squashfs file


class Charliecloud(Container):
    """ch-run of an image folder or squashfs file."""

    images = "a .sqfs or .sqsh file, or a folder"
    starts_files = "name the file or folder"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use = job.container
        return (
            quote(command_of(use, "ch-run")),
            *(f"--bind {quote_place(f'{mount.source}:{mount.target}')}" for mount in all_mounts(job)),
            f"--cd {quote(str(job.around.workdir))}",
            *map(quote, use.rules.options),
            quote_place(use.image),
            "--",
        )


# --- Enroot: created per node, started per rank, removed

# Shell of a node, `$named` and `$cleared` of lib.sh: the container's name there, and those of earlier jobs, which are
# removed. A job that was cancelled or killed starts no more steps and leaves its own, as large as the image (seen with
# enroot 4.1.2 under Slurm); a job of PBS starts no more tasks once it was signalled. An id is a number, or under PBS a
# number and the server's name.


def _enroot(job: Job, *words: str) -> tuple[str, ...]:
    """enroot with these words, of which the first `--` stands for the name of the container."""
    command = quote(command_of(job.container, "enroot"))
    if job.container.rules.by_scheduler:
        return (command, *(quote(job.name) if word == "--" else word for word in words))
    return ('bash -c "$named"', '"shardway-$SHARDWAY_JOB"', command, *words)


class Enroot(Container):
    """Created per node, started per rank, removed."""

    images = "a .sqsh file"
    starts_files = "`shardway image import IMAGE` makes the file"
    divider = r"[:\s]"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use, around = job.container, job.around
        variables = make_plugin("launchers", job.launcher).rank_variables(scheduler)
        return _enroot(
            job,
            "start --root --rw",
            *(f"--mount {quote_place(_render(mount))}" for mount in all_mounts(job, HOST_NAMES)),
            *(f"--env {name}" for name in (*around.secret_names, *variables)),  # it knows no patterns
            *map(quote, use.rules.options),
            "--",
            *_in_folder(job),
        )

    def setup(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        rules = job.container.rules
        lines = []
        if rules.data_path:
            path = quote_expanding(rules.data_path)
            lines.append(
                ScriptLine(f"export ENROOT_DATA_PATH={path}", "where this job's containers are, on the node's own disk")
            )
        if not rules.by_scheduler:
            each_node = scheduler.each_node(job).words
            words = _enroot(job, "create --name", "--", quote_place(job.container.image))
            if scheduler.own_jobs:
                alive = f"alive=$({scheduler.own_jobs} | tr -cs 0-9 ' ')"
                lines.append(ScriptLine(alive, "jobs that are not over: containers of others are removed"))
                words = ("bash -c \"alive='$alive';$cleared$named\"", *words[1:])
            create = wrap_command((*each_node, *words))
            lines.append(
                ScriptLine(
                    f"{create} || fail 'the container could not be created' create",
                    "the container of this job, on every node",
                )
            )
        return tuple(lines)

    def teardown(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        if job.container.rules.by_scheduler:
            return ()
        words = _enroot(job, "remove --force", "--")
        return (
            ScriptLine(wrap_command((*scheduler.each_node(job).words, *words)), "the container is not needed any more"),
        )


def _render(mount: ContainerMount) -> str:
    """A line of enroot's fstab with colons; what is not named there makes no mount point."""
    return f"{mount.source}:{mount.target}:x-create=auto,rbind{',ro' if mount.read_only else ''}"


def _in_folder(job: Job) -> tuple[str, ...]:
    """enroot has no option for the working folder."""
    return ("bash", "-c", quote('cd "$0" && exec "$@"'), quote(str(job.around.workdir)))


# --- Podman: a container on the host's network

_PODMAN_ACCELERATORS = {
    "nvidia": ("--device nvidia.com/gpu=all",),
    "amd": ("--device /dev/kfd", "--device /dev/dri", "--group-add keep-groups"),
}
_LAUNCHERS = ("OMPI_*", "PMIX_*", "PMI_*")


class Podman(Container):
    """A container on the host's network."""

    images = "an image that every node has (podman images), or a URI that nodes can pull"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use, around = job.container, job.around
        patterns = dict.fromkeys((*scheduler.launcher_variables, *_LAUNCHERS))
        return (
            f"{quote(command_of(use, 'podman'))} run --rm --network=host --security-opt=label=disable",
            '"${ipc[@]}"',
            *_PODMAN_ACCELERATORS.get(use.vendor, ()),
            *(f"--env {name}" for name in around.secret_names),
            *(f"--env '{pattern}'" for pattern in patterns),
            *(f"--volume {quote_place(mount.render())}" for mount in all_mounts(job, HOST_NAMES)),
            f"--workdir {quote(str(around.workdir))}",
            *map(quote, use.rules.options),
            quote_place(use.image),
        )

    def setup(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        """`--ipc=host` also mounts the node's message queues, and fails where the node has none."""
        return (
            ScriptLine(
                "ipc=(--ipc=host)", "ranks share memory of the node; its /dev/shm alone where it has no message queues"
            ),
            ScriptLine("[ -e /dev/mqueue ] || ipc=(--ipc=private --volume=/dev/shm:/dev/shm)"),
        )

    def name_image(self, image: Reference) -> str:
        """REGISTRY/IMAGE:TAG."""
        from shardway.launch.image.request import render_docker

        return render_docker(image)


# --- Pyxis: options of srun

_SAID = frozenset(("--container-writable", "--container-readonly"))
"""Of both, Pyxis takes one."""


class Pyxis(Container):
    """Options of srun."""

    images = "a .sqsh file, or a URI such as nvcr.io#nvidia/pytorch:25.04-py3"
    divider = r"[:,\s]"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        """Nothing: the container is there before the process."""
        return ()

    def of_launcher(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use = job.container
        return (
            f"--container-image={quote_place(use.image)}",
            f"--container-mounts={','.join(quote_place(mount.render()) for mount in all_mounts(job))}",
            f"--container-workdir={quote(str(job.around.workdir))}",
            *(() if _SAID.intersection(use.rules.options) else ("--container-writable",)),
            *map(quote, use.rules.options),
        )

    def name_image(self, image: Reference) -> str:
        """REGISTRY#IMAGE:TAG."""
        from shardway.launch.image.request import render_enroot

        return render_enroot(image).removeprefix("docker://")
