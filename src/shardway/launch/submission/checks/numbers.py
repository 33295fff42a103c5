"""A wish against the profile of its site: wall-time, nodes, accelerators, memory, account, launcher, container.

Invariant: a limit that the profile does not state is not held against anybody. A check gives all of its problems and
changes nothing. This module must not look at files or machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from shardway.errors import Problem
from shardway.launch.job_script import LAUNCHERS, RUNTIMES
from shardway.launch.submission.job_request import (
    JobRequest,
    is_elastic,
    launcher_of,
    runtime_of,
    shape_of,
    walltime_of,
)
from shardway.units import format_bytes, render_seconds

Check = Callable[[JobRequest], Iterator[Problem]]


def problem(wish: JobRequest, key: str, what: str, allowed: str = "", remedy: str = "") -> Problem:
    """A problem of a key of [site], with where its value comes from."""
    return Problem(f"site.{key}", what, wish.loaded.origins[f"site.{key}"], allowed, remedy)


def a_wall_time_is_known_and_within_the_limit(wish: JobRequest) -> Iterator[Problem]:
    """Schedulers let a job over the limit wait for ever, or refuse it without naming the limit."""
    walltime, queue = walltime_of(wish), wish.queue
    if walltime is None:
        unknown = wish.section.queue and queue is None and wish.profile.queues
        limit = f'does not know the queue "{wish.section.queue}"' if unknown else "states no limit"
        what = f"nothing says how long a job may run: the profile of {wish.profile.name} {limit}"
        yield problem(wish, "walltime", what, 'a time such as "24h"', "set site.walltime, or give --walltime")
    elif queue is not None and queue.max_walltime is not None and walltime > queue.max_walltime:
        limit = render_seconds(queue.max_walltime)
        what = f'{render_seconds(walltime)} is longer than the queue "{queue.name}" of {wish.profile.name} allows'
        remedy = f'set site.walltime = "{limit}"; --until-done goes on in as many jobs as the work needs'
        yield problem(wish, "walltime", what, f"at most {limit}", remedy)


def nodes_are_within_the_limits(wish: JobRequest) -> Iterator[Problem]:
    """More nodes than a queue gives out are never found."""
    nodes, queue = wish.section.nodes, wish.queue
    if wish.profile.scheduler == "local" and nodes > 1:
        remedy = "leave it at 1, or name a site that has nodes: --on SITE"
        yield problem(wish, "nodes", f"{nodes} nodes, and {wish.profile.name} is one machine", "1", remedy)
    if queue is not None and queue.max_nodes is not None and nodes > queue.max_nodes:
        larger = [q.name for q in wish.profile.queues if (q.max_nodes or nodes) >= nodes and q is not queue]
        remedy = f"choose another queue: {', '.join(larger)}" if larger else "ask for fewer nodes"
        yield problem(wish, "nodes", f'{nodes} nodes in the queue "{queue.name}"', f"at most {queue.max_nodes}", remedy)
    if queue is not None and queue.min_nodes is not None and nodes < queue.min_nodes:
        yield problem(wish, "nodes", f'{nodes} nodes in the queue "{queue.name}"', f"at least {queue.min_nodes}")


def an_account_is_named_where_one_is_needed(wish: JobRequest) -> Iterator[Problem]:
    """A job without an account is refused, or charged to nobody knows whom."""
    request = wish.profile.request
    if request.account == "required" and not wish.section.account:
        listing = f"; `{request.account_command}` lists yours" if request.account_command else ""
        remedy = f"set site.account{listing}; for good: [defaults] account in a profile of your own (docs/sites.md)"
        yield problem(wish, "account", f"{wish.profile.name} wants to know who is charged", remedy=remedy)


def ranks_of_a_node_have_an_accelerator_each(wish: JobRequest) -> Iterator[Problem]:
    """A rank without an accelerator fails when the job starts, hours later."""
    node, asked = wish.profile.node, wish.section.ranks_per_node
    most = node.accelerators_per_node if wish.loaded.values.run.device != "cpu" else 0
    if asked != "auto" and most and int(asked) > most:
        what = f"{asked} ranks on nodes with {most} accelerators"
        remedy = 'lower site.ranks_per_node, or leave it at "auto"; run.device = "cpu" trains on cores'
        yield problem(wish, "ranks_per_node", what, f"at most {most}", remedy)
    if asked != "auto" and node.cores and int(asked) > node.cores:
        yield problem(wish, "ranks_per_node", f"{asked} ranks on nodes of {node.cores} cores", f"at most {node.cores}")


def memory_is_there_and_may_be_asked_for(wish: JobRequest) -> Iterator[Problem]:
    """A node that no machine has is waited for for ever."""
    asked, node, request = wish.section.memory, wish.profile.node, wish.profile.request
    if asked == "auto":
        return
    if request.memory is False:
        what = f"{wish.profile.name} does not take a job that says how much memory it wants"
        yield problem(wish, "memory", what, '"auto"', "leave it out")
    if node.memory is not None and int(asked) > node.memory:
        what = f"{format_bytes(int(asked))} of nodes with {format_bytes(node.memory)}"
        yield problem(wish, "memory", what, f"at most {format_bytes(node.memory)}")


def a_launcher_goes_with_its_scheduler(wish: JobRequest) -> Iterator[Problem]:
    """srun is Slurm's own."""
    launcher, scheduler = launcher_of(wish), wish.profile.scheduler
    if launcher not in LAUNCHERS[scheduler]:
        allowed = ", ".join(LAUNCHERS[scheduler])
        yield problem(wish, "launcher", f'"{launcher}" does not go with the scheduler {scheduler}', allowed)
    if launcher == "agent" and not wish.program.is_training:
        what = '"agent" starts the training of a run file alone, and this is a command of your own'
        yield problem(wish, "launcher", what, ", ".join(name for name in LAUNCHERS[scheduler] if name != "agent"))
    if launcher != "agent" and is_elastic(wish):
        what = f'"{launcher}" ends the job where a node is lost, and run.elastic wants it to go on'
        yield problem(wish, "launcher", what, '"agent" or "auto"', "leave it out, or set run.elastic to off")
    if launcher == "mpirun" and runtime_of(wish) == "pyxis":
        what = '"mpirun" does not go with pyxis, whose containers are started by srun'
        yield problem(wish, "launcher", what, "torchrun, srun")


def a_container_has_a_runtime_and_an_image(wish: JobRequest) -> Iterator[Problem]:
    """An image needs somebody to start it, and a runtime something to start."""
    section, runtime = wish.section, runtime_of(wish)
    if section.image and runtime == "none":
        if section.container == "none":
            what = f'"{section.image}" is named, but site.container = "none"'
        else:
            what = f'"{section.image}" is named, and the profile of {wish.profile.name} knows no container runtime'
        yield problem(
            wish, "image", what, remedy=f"set site.container to one of {', '.join(sorted(set(RUNTIMES) - {'none'}))}"
        )
    if runtime != "none" and not section.image:
        yield problem(
            wish, "container", f'"{runtime}" needs an image', remedy=f"set site.image: {RUNTIMES[runtime].images}"
        )
    if runtime == "pyxis" and wish.profile.scheduler != "slurm":
        yield problem(wish, "container", '"pyxis" is a part of Slurm', "enroot, apptainer, podman, charliecloud")


def the_run_stops_before_its_time_is_over(wish: JobRequest) -> Iterator[Problem]:
    """A margin as long as the wall-time leaves nothing to train in."""
    margin, walltime = wish.loaded.values.run.stop_margin, walltime_of(wish)
    if margin != "auto" and walltime is not None and float(margin) >= walltime:
        what = f"{render_seconds(float(margin))} before the end of a wall-time of {render_seconds(walltime)} is no time"
        yield Problem("run.stop_margin", what, wish.loaded.origins["run.stop_margin"], "less than the wall-time")


CHECKS: tuple[Check, ...] = (
    a_wall_time_is_known_and_within_the_limit,
    nodes_are_within_the_limits,
    an_account_is_named_where_one_is_needed,
    ranks_of_a_node_have_an_accelerator_each,
    memory_is_there_and_may_be_asked_for,
    a_launcher_goes_with_its_scheduler,
    a_container_has_a_runtime_and_an_image,
    the_run_stops_before_its_time_is_over,
)


def list_warnings(wish: JobRequest) -> list[str]:
    """What may be meant so, but is worth a sentence."""
    warnings, shape, node = [], shape_of(wish), wish.profile.node
    idle = (node.accelerators_per_node or 0) - shape.ranks_per_node
    if idle > 0 and wish.profile.request.whole_nodes and shape.accelerators_per_node:
        warnings.append(
            f"{shape.ranks_per_node} ranks a node leave {idle} of {node.accelerators_per_node} accelerators idle, and "
            f"{wish.profile.name} charges whole nodes"
        )
    queue, known = wish.section.queue, [entry.name for entry in wish.profile.queues]
    if queue and known and queue not in known:
        warnings.append(
            f'the profile of {wish.profile.name} does not know the queue "{queue}" (it knows {", ".join(known)}), so '
            "its limits are not checked"
        )
    return warnings


NAMED_BY_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "slurm": {
            **dict.fromkeys(("time", "t"), "site.walltime"),
            **dict.fromkeys(("nodes", "N"), "site.nodes"),
            **dict.fromkeys(("partition", "p"), "site.queue"),
            **dict.fromkeys(("account", "A"), "site.account"),
            **dict.fromkeys(("ntasks", "n", "ntasks-per-node"), "site.ranks_per_node"),
            **dict.fromkeys(("gres", "gpus-per-node", "G", "gpus"), "site.ranks_per_node and site.accelerator_type"),
            **dict.fromkeys(("job-name", "J"), "run.name"),
            **dict.fromkeys(("mem",), "site.memory"),
            # of sbatch they would put the job script itself into the container, where there is no srun
            **dict.fromkeys(("container", "container-image"), "site.container and site.image"),
            "container-mounts": "site.mounts",
            **dict.fromkeys(
                (
                    *("container-name", "container-workdir", "container-save", "container-mount-home"),
                    *("container-remap-root", "container-writable", "container-readonly", "container-env"),
                ),
                "containers.options of a profile",
            ),
            **dict.fromkeys(
                ("output", "o", "error", "e", "dependency", "d", "array", "a", "chdir", "D", "requeue"), ""
            ),
        },
        "pbs": {
            "q": "site.queue",
            "P": "site.account",
            "N": "run.name",
            **dict.fromkeys(("o", "e", "j", "k", "J", "r", "v", "V", "S"), ""),
        },
        "local": {},
    }
)
"""Scheduler -> options that a key of the run file names ("": that the job script needs for itself)."""
