"""The class of a container runtime, and ours: Apptainer, Charliecloud, Enroot, Podman, Pyxis.

Invariants:
- The functions are pure; the scheduler's own commands run outside the container.
- Apptainer and Charliecloud: the container gets the job's variables, since both pass the environment on.
- Enroot: containers of two jobs or nodes never share a name or a folder.
- Enroot and Podman: of the host's environment the container gets only the secrets and the launcher's variables of a
  rank.
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

from shardway.launch.job import ContainerMount, Job
from shardway.launch.schedulers.base import Scheduler
from shardway.launch.script import ScriptLine, quote, quote_expanding, quote_place, script_lines, wrap_command
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

    def setup_beside(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        """Lines before one more command in the container of a job that runs, whose `setup` was done."""
        return self.setup(job, scheduler)

    def name_image(self, image: Reference) -> str | None:
        """An image of a registry as this runtime names it; None where it takes the words as they are."""
        return None


def all_mounts(job: Job, *more: ContainerMount) -> tuple[ContainerMount, ...]:
    """What the container sees: the run, the working folder, what the run and the site name, each once.

    A folder below one that is mounted as it is needs no mount of its own; not every runtime could make a place for it.
    """
    folders = [job.run] if job.around.workdir.is_relative_to(job.run) else [job.run, job.around.workdir]
    whole = [mount.source for mount in job.container.mounts if mount.source == mount.target and not mount.read_only]
    own = [ContainerMount(str(folder), str(folder)) for folder in folders if not any(map(folder.is_relative_to, whole))]
    return tuple(dict.fromkeys((*own, *job.container.mounts, *more)))


# --- ours


class NoContainer(Container):
    """Ranks on the host."""

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        return ()


class Apptainer(Container):
    """Apptainer or Singularity: exec of an image file or folder, or of a URI."""

    images = "a .sif or .sqsh file or a folder, or a URI such as docker://IMAGE:TAG"
    divider = r"[:,]"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use = job.container
        return (
            f"{quote(use.rules.command or 'apptainer')} exec",
            *{"nvidia": ("--nv",), "amd": ("--rocm",)}.get(use.vendor, ()),
            *(f"--bind {quote_place(mount.render())}" for mount in all_mounts(job)),
            f"--pwd {quote(str(job.around.workdir))}",
            *map(quote, use.rules.options),
            quote_place(use.image),
        )

    def name_image(self, image: Reference) -> str:
        """docker://REGISTRY/IMAGE:TAG."""
        from shardway.launch.image.request import render_docker

        return f"{image.transport}://{render_docker(image)}"


class Charliecloud(Container):
    """ch-run of an image folder or squashfs file."""

    images = "a .sqfs or .sqsh file, or a folder"
    starts_files = "name the file or folder"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use = job.container
        return (
            quote(use.rules.command or "ch-run"),
            *(f"--bind {quote_place(f'{mount.source}:{mount.target}')}" for mount in all_mounts(job)),
            f"--cd {quote(str(job.around.workdir))}",
            *map(quote, use.rules.options),
            quote_place(use.image),
            "--",
        )


class Enroot(Container):
    """Created per node, started per rank, removed."""

    images = "a .sqsh file"
    starts_files = "`shardway image import IMAGE` makes the file"
    divider = r"[:\s]"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use, around = job.container, job.around
        variables = make_plugin("launchers", job.launcher).rank_variables(scheduler)
        mounts = []  # lines of enroot's fstab with colons; what is not named there makes no mount point
        for mount in all_mounts(job, HOST_NAMES):
            options = f"x-create=auto,rbind{',ro' if mount.read_only else ''}"
            mounts.append(f"--mount {quote_place(f'{mount.source}:{mount.target}:{options}')}")
        return (
            *_enroot(job),
            "start --root --rw",
            *mounts,
            *(f"--env {name}" for name in (*around.secret_names, *variables)),  # it knows no patterns
            *map(quote, use.rules.options),
            _name(job),
            # it has no option for the working folder
            *("bash", "-c", quote('cd "$0" && exec "$@"'), quote(str(around.workdir))),
        )

    def setup(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        shell, *enroot = _enroot(job)
        alive = f"alive=$({scheduler.own_jobs} | tr -cs 0-9 ' ')" if scheduler.own_jobs else ""
        if alive:
            shell = "bash -c \"alive='$alive';$cleared$named\""
        words = (shell, *enroot, "create --name", _name(job), quote_place(job.container.image))
        create = wrap_command((*scheduler.each_node(job).words, *words))
        by_script = not job.container.rules.by_scheduler
        return script_lines(
            (_export_data_path(job), _OWN_DISK),
            (by_script and alive, "jobs that are not over: containers of others are removed"),
            (
                by_script and f"{create} || fail 'the container could not be created' create",
                "the container of this job, on every node",
            ),
        )

    def teardown(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        if job.container.rules.by_scheduler:
            return ()
        words = (*scheduler.each_node(job).words, *_enroot(job), "remove --force", _name(job))
        return (ScriptLine(wrap_command(words), "the container is not needed any more"),)

    def setup_beside(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        """The job's container is there, under its name."""
        return script_lines((_export_data_path(job), _OWN_DISK))


_OWN_DISK = "where this job's containers are, on the node's own disk"


def _export_data_path(job: Job) -> str:
    """Shell that sets the folder of a job's containers; "" where the site names none."""
    path = job.container.rules.data_path
    return f"export ENROOT_DATA_PATH={quote_expanding(path)}" if path else ""


def _enroot(job: Job) -> tuple[str, ...]:
    """enroot, in the shell of a node with `$named` and `$cleared` of lib.sh: the container's name there, and those of
    earlier jobs, which are removed. A job that was cancelled or killed starts no more steps and leaves its own, as
    large as the image (seen with enroot 4.1.2 under Slurm); a job of PBS starts no more tasks once it was signalled.
    An id is a number, or under PBS a number and the server's name."""
    command = quote(job.container.rules.command or "enroot")
    if job.container.rules.by_scheduler:
        return (command,)
    return ('bash -c "$named"', '"shardway-$SHARDWAY_JOB"', command)


def _name(job: Job) -> str:
    """The word for the name of the container: the `--` that `$named` replaces, or the name that PBS gave it."""
    return quote(job.name) if job.container.rules.by_scheduler else "--"


class Podman(Container):
    """A container on the host's network."""

    images = "an image that every node has (podman images), or a URI that nodes can pull"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use, around = job.container, job.around
        accelerators = {
            "nvidia": ("--device nvidia.com/gpu=all",),
            "amd": ("--device /dev/kfd", "--device /dev/dri", "--group-add keep-groups"),
        }
        patterns = dict.fromkeys((*scheduler.launcher_variables, "OMPI_*", "PMIX_*", "PMI_*"))
        return (
            f"{quote(use.rules.command or 'podman')} run --rm --network=host --security-opt=label=disable",
            '"${ipc[@]}"',
            *accelerators.get(use.vendor, ()),
            *(f"--env {name}" for name in around.secret_names),
            *(f"--env '{pattern}'" for pattern in patterns),
            *(f"--volume {quote_place(mount.render())}" for mount in all_mounts(job, HOST_NAMES)),
            f"--workdir {quote(str(around.workdir))}",
            *map(quote, use.rules.options),
            quote_place(use.image),
        )

    def setup(self, job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
        """`--ipc=host` also mounts the node's message queues, and fails where the node has none."""
        purpose = "ranks share memory of the node; its /dev/shm alone where it has no message queues"
        return script_lines(
            ("ipc=(--ipc=host)", purpose),
            ("[ -e /dev/mqueue ] || ipc=(--ipc=private --volume=/dev/shm:/dev/shm)", ""),
        )

    def name_image(self, image: Reference) -> str:
        """REGISTRY/IMAGE:TAG."""
        from shardway.launch.image.request import render_docker

        return render_docker(image)


class Pyxis(Container):
    """Options of srun."""

    images = "a .sqsh file, or a URI such as nvcr.io#nvidia/pytorch:25.04-py3"
    divider = r"[:,\s]"

    def wrap(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        """Nothing: the container is there before the process."""
        return ()

    def of_launcher(self, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
        use = job.container
        said = {"--container-writable", "--container-readonly"}.intersection(use.rules.options)  # Pyxis takes one
        writable = () if said else ("--container-writable",)
        return (
            f"--container-image={quote_place(use.image)}",
            f"--container-mounts={','.join(quote_place(mount.render()) for mount in all_mounts(job))}",
            f"--container-workdir={quote(str(job.around.workdir))}",
            *writable,
            *map(quote, use.rules.options),
        )

    def name_image(self, image: Reference) -> str:
        """REGISTRY#IMAGE:TAG."""
        from shardway.launch.image.request import render_enroot

        return render_enroot(image).removeprefix("docker://")
