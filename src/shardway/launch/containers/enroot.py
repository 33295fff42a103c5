"""Enroot: a container that is created on each node from a squashfs file, started for each rank, and removed.

Where PBS makes the container itself (`containers.by_scheduler` of the site: container_engine=enroot, container_image,
container_name), it is only started, under the name and from the folder that PBS gave it.

A container has the name of its job and of its node, since enroot keeps containers in the home folder, which nodes
share, unless the site or ENROOT_DATA_PATH says otherwise, and refuses a name that is there.

Invariant: containers of two jobs or nodes never share a name or a folder. This module must not start anything.

Sources: enroot's documentation, "enroot create", "enroot start" (--root, --rw, --mount, --env), "Image format"
(x-create); ENROOT_DATA_PATH, ENROOT_RUNTIME_PATH in "Configuration"; issues 13 and 23 of NVIDIA/enroot.
"""

from __future__ import annotations

from shardway.launch.containers.base import HOST_NAMES, Runtime, all_mounts, command_of
from shardway.launch.job import ContainerMount, Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import ScriptLine, quote, quote_expanding, quote_place, quote_shell, wrap_command

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


def _wrap(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
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


def _setup(job: Job, scheduler: SchedulerScript) -> tuple[ScriptLine, ...]:
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


ENROOT = Runtime(wrap=_wrap, setup=_setup, teardown=_teardown, images="a .sqsh file")
