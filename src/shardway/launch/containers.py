"""Container runtimes, and what each contributes to a job script: Apptainer, Charliecloud, Enroot, Podman, Pyxis.

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

from collections.abc import Callable
from dataclasses import dataclass

from shardway.launch.job import ContainerMount, ContainerUse, Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import ScriptLine, quote, quote_expanding, quote_place, quote_shell, wrap_command

# --- what a container runtime contributes

HOST_NAMES = ContainerMount("/etc/hosts", "/etc/hosts", read_only=True)
"""For runtimes whose containers have a file of their own, in which the nodes of the job are not named."""


def _nothing(job: Job, scheduler: SchedulerScript) -> tuple[ScriptLine, ...]:
    return ()


def _no_words(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Runtime:
    """`wrap`: words before a command that put it into a container, quoted already. `of_launcher`: options of
    srun (Pyxis is one). `setup`, `teardown`: lines before and after the ranks. `images`: what may be an image."""

    wrap: Callable[[Job, SchedulerScript], tuple[str, ...]] = _no_words
    of_launcher: Callable[[Job, SchedulerScript], tuple[str, ...]] = _no_words
    setup: Callable[[Job, SchedulerScript], tuple[ScriptLine, ...]] = _nothing
    teardown: Callable[[Job, SchedulerScript], tuple[ScriptLine, ...]] = _nothing
    images: str = "a file on the site"


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


def _wrap_apptainer(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    use = job.container
    return (
        f"{quote(command_of(use, 'apptainer'))} exec",
        *_APPTAINER_ACCELERATORS.get(use.vendor, ()),
        *(f"--bind {quote_place(mount.render())}" for mount in all_mounts(job)),
        f"--pwd {quote(str(job.around.workdir))}",
        *map(quote, use.rules.options),
        quote_place(use.image),
    )


APPTAINER = Runtime(
    wrap=_wrap_apptainer, images="a .sif or .sqsh file or a folder, or a URI such as docker://IMAGE:TAG"
)


# --- Charliecloud: ch-run of an image folder or squashfs file


def _wrap_charliecloud(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    use = job.container
    return (
        quote(command_of(use, "ch-run")),
        *(f"--bind {quote_place(f'{mount.source}:{mount.target}')}" for mount in all_mounts(job)),
        f"--cd {quote(str(job.around.workdir))}",
        *map(quote, use.rules.options),
        quote_place(use.image),
        "--",
    )


CHARLIECLOUD = Runtime(wrap=_wrap_charliecloud, images="a .sqfs or .sqsh file, or a folder")


# --- Enroot: created per node, started per rank, removed

_PLACE = '[ -w "${XDG_RUNTIME_DIR:-/run}" ] || export XDG_RUNTIME_DIR=${TMPDIR:-/tmp}/$0\n'
"""$HOSTNAME may be another node's, whose environment srun handed on, and so may XDG_RUNTIME_DIR be, which PBS does not
set: enroot makes a folder in it, or in /run, unless the site has another in its enroot.conf."""

_NAMED = """\
  words=(); until [ "$1" = -- ]; do words+=("$1"); shift; done
  exec "${words[@]}" "$0-$(uname -n)" "${@:2}\""""
"""Shell of the node on which it runs: enroot's words up to `--`, the container's name there, and what follows."""

_CLEARED = """\
  job=${0#shardway-} own=${0#shardway-} own=${own%%[!0-9]*}
  for name in $([[ " $alive " != *" $own "* ]] || "$1" list); do
    of=${name#shardway-} of=${of%%[!0-9]*}
    [ "$name" = "shardway-$of${job#"$own"}-$(uname -n)" ] && [ "${of:-$own}" -lt "$own" ] || continue
    [[ " $alive " = *" $of "* ]] || "$1" remove --force "$name"
  done
"""
"""Before these words: removes containers on this node of earlier jobs that are over. One that was cancelled or killed
starts no more steps and leaves its own, as large as the image (seen with enroot 4.1.2 under Slurm); a job of PBS starts
no more tasks once it was signalled. `alive`: the numbers of the person's jobs, of which this is one where the scheduler
answered. An id is a number, or under PBS a number and the server's name."""


def _enroot(job: Job, *words: str) -> tuple[str, ...]:
    """enroot with these words, of which the first `--` stands for the name of the container."""
    command = quote(command_of(job.container, "enroot"))
    if job.container.rules.by_scheduler:
        return (command, *(quote(job.name) if word == "--" else word for word in words))
    return ('bash -c "$named"', '"shardway-$SHARDWAY_JOB"', command, *words)


def _wrap_enroot(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    use, around = job.container, job.around
    return _enroot(
        job,
        "start --root --rw",
        *(f"--mount {quote_place(_render(mount))}" for mount in all_mounts(job, HOST_NAMES)),
        *(f"--env {name}" for name in (*around.secret_names, *_launcher_variables(job))),
        *map(quote, use.rules.options),
        "--",
        *_in_folder(job),
    )


def _render(mount: ContainerMount) -> str:
    """A line of enroot's fstab with colons; what is not named there makes no mount point."""
    return f"{mount.source}:{mount.target}:x-create=auto,rbind{',ro' if mount.read_only else ''}"


def _launcher_variables(job: Job) -> tuple[str, ...]:
    """enroot passes on what is named, and knows no patterns."""
    ranks: dict[str, tuple[str, ...]] = {
        "srun": (
            *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
            *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        ),
        "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    }
    agents = {"slurm": ("SLURM_NODEID",), "pbs": ("NODE",)}
    return ranks[job.launcher] if job.launcher in ranks else agents.get(job.scheduler, ())


def _in_folder(job: Job) -> tuple[str, ...]:
    """enroot has no option for the working folder."""
    return ("bash", "-c", quote('cd "$0" && exec "$@"'), quote(str(job.around.workdir)))


def _set_up_enroot(job: Job, scheduler: SchedulerScript) -> tuple[ScriptLine, ...]:
    rules = job.container.rules
    lines = []
    if rules.data_path:
        path = quote_expanding(rules.data_path)
        lines.append(
            ScriptLine(f"export ENROOT_DATA_PATH={path}", "where this job's containers are, on the node's own disk")
        )
    if not rules.by_scheduler:
        lines.append(
            ScriptLine(
                f"named={quote_shell(_PLACE + _NAMED)}", "adds the container's name, of this job and of the node"
            )
        )
        each_node = scheduler.each_node(job).words
        words = _enroot(job, "create --name", "--", quote_place(job.container.image))
        if scheduler.own_jobs:
            lines.append(
                ScriptLine(f"cleared={quote_shell(_PLACE + _CLEARED)}", "removes those of earlier jobs that are over")
            )
            lines.append(ScriptLine(f"alive=$({scheduler.own_jobs} | tr -cs 0-9 ' ')"))
            words = ("bash -c \"alive='$alive';$cleared$named\"", *words[1:])
        create = wrap_command((*each_node, *words))
        lines.append(
            ScriptLine(
                f"{create} || fail 'the container could not be created' create",
                "the container of this job, on every node",
            )
        )
    return tuple(lines)


def _teardown(job: Job, scheduler: SchedulerScript) -> tuple[ScriptLine, ...]:
    if job.container.rules.by_scheduler:
        return ()
    words = _enroot(job, "remove --force", "--")
    return (
        ScriptLine(wrap_command((*scheduler.each_node(job).words, *words)), "the container is not needed any more"),
    )


ENROOT = Runtime(wrap=_wrap_enroot, setup=_set_up_enroot, teardown=_teardown, images="a .sqsh file")


# --- Podman: a container on the host's network

_PODMAN_ACCELERATORS = {
    "nvidia": ("--device nvidia.com/gpu=all",),
    "amd": ("--device /dev/kfd", "--device /dev/dri", "--group-add keep-groups"),
}
_LAUNCHERS = ("OMPI_*", "PMIX_*", "PMI_*")


def _set_up_podman(job: Job, scheduler: SchedulerScript) -> tuple[ScriptLine, ...]:
    """`--ipc=host` also mounts the node's message queues, and fails where the node has none."""
    return (
        ScriptLine(
            "ipc=(--ipc=host)", "ranks share memory of the node; its /dev/shm alone where it has no message queues"
        ),
        ScriptLine("[ -e /dev/mqueue ] || ipc=(--ipc=private --volume=/dev/shm:/dev/shm)"),
    )


def _wrap_podman(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
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


PODMAN = Runtime(
    wrap=_wrap_podman,
    setup=_set_up_podman,
    images="an image that every node has (podman images), or a URI that nodes can pull",
)


# --- Pyxis: options of srun

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
