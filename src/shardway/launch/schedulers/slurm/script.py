"""Slurm's part of a job script: #SBATCH lines and srun.

Invariant: srun is always told nodes, tasks and cores, because inside a job it takes what it is not told from the
variables of the job, and since 22.05 it does not take cores a task from there at all. This module must not talk to
Slurm.

Sources: sbatch(1) "OPTIONS", srun(1) "OPTIONS" and "--cpus-per-task".
"""

from __future__ import annotations

from collections.abc import Iterator

from shardway.launch.job import Job
from shardway.launch.schedulers.base import EachNode, SchedulerScript
from shardway.launch.schedulers.options import render_options
from shardway.launch.script import ScriptLine, quote


def directives(job: Job) -> tuple[ScriptLine, ...]:
    """The #SBATCH lines."""
    return tuple(ScriptLine(f"#SBATCH {line.text}", line.purpose) for line in _options(job))


def _options(job: Job) -> Iterator[ScriptLine]:
    terms, shape = job.terms, job.shape
    yield ScriptLine(f"--job-name={job.scheduler_name}", "the run, its attempt, and what makes it unique")
    if terms.account:
        yield ScriptLine(f"--account={quote(terms.account)}", "who is charged, and where the job waits")
    if terms.partition:
        yield ScriptLine(f"--partition={quote(terms.partition)}", "who is charged, and where the job waits")
    if terms.qos:
        yield ScriptLine(f"--qos={quote(terms.qos)}", "who is charged, and where the job waits")
    if terms.constraint:
        yield ScriptLine(f"--constraint={quote(terms.constraint)}", "the kind of node")
    yield ScriptLine(f"--nodes={shape.nodes}", "nodes, and what is wanted of each")
    tasks = 1 if job.one_agent_a_node else shape.ranks_per_node
    yield ScriptLine(f"--ntasks-per-node={tasks}")
    if cpus := cpus_of_task(job, tasks):
        yield ScriptLine(f"--cpus-per-task={cpus}")
    yield from _generic_resources(job)
    if shape.memory_bytes:
        yield ScriptLine(f"--mem={shape.memory_bytes // 2**20}M")
    if shape.whole_nodes:
        yield ScriptLine("--exclusive")
    yield ScriptLine(f"--time={_render_time(terms.walltime_s)}", "wall-time of this attempt")
    if job.warn_s:
        yield ScriptLine(f"--signal=B:USR2@{round(job.warn_s)}", "warns this script before the wall-time ends")
    yield ScriptLine(
        "--no-requeue", "an attempt that loses its nodes ends; the next attempt goes on from the last checkpoint"
    )
    if job.elastic:
        yield ScriptLine(
            "--no-kill", "a node that is lost does not end the job: the run goes on with those that are left"
        )
    yield ScriptLine("--open-mode=append", "what it prints")
    yield ScriptLine(f"--output={job.log_for_scheduler}")
    for words in render_options({name: value for name, value in terms.options.items() if name.lstrip("-") != _GRES}):
        yield ScriptLine(words, "options of this run or site that Shardway has no name for")


_GRES = "gres"


def _generic_resources(job: Job) -> Iterator[ScriptLine]:
    """Accelerators, and what an option asks for besides them (local disks): of two --gres the last alone would hold."""
    count, kind = job.shape.accelerators_per_node, job.terms.accelerator_type
    asked = f"{kind}:{count}" if kind else str(count)
    gres = [f"gpu:{asked}"] if count and job.terms.accelerators == "gres" else []
    for name, value in job.terms.options.items():
        if name.lstrip("-") == _GRES:
            gres += map(str, value if isinstance(value, list | tuple) else [value])
    if gres:
        yield ScriptLine(f"--gres={','.join(gres)}")
    if count and job.terms.accelerators == "gpus-per-node":
        yield ScriptLine(f"--gpus-per-node={asked}")


def _render_time(seconds: float) -> str:
    """Slurm counts whole minutes; a part of one counts as one (sbatch(1), --time)."""
    minutes = max(1, -(-round(seconds) // 60))
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def cpus_of_task(job: Job, tasks_per_node: int) -> int:
    """What Slurm calls CPUs: all hardware threads of the cores of one task; 0 where the site does not say them."""
    cores = (job.shape.cores_per_node or 0) // tasks_per_node
    return max(1, cores) * job.shape.threads_per_core if job.shape.cores_per_node else 0


def srun(job: Job, tasks_per_node: int) -> tuple[str, ...]:
    """The words of an srun that starts so many tasks on each node."""
    cpus = cpus_of_task(job, tasks_per_node)
    words = [
        "srun",
        f"--nodes={job.shape.nodes}",
        f"--ntasks={job.shape.nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *_on_a_bad_end(job),
        *map(quote, job.start.srun_options),
    ]
    return tuple(words)


def _on_a_bad_end(job: Job) -> tuple[str, ...]:
    """Agents see by themselves that one of them is gone; srun would tell the others by SIGTERM, which means a stop."""
    if job.launcher != "agent":
        return ("--kill-on-bad-exit=1",)
    return ("--kill-on-bad-exit=0", "--wait=0", *(("--no-kill",) if job.elastic else ()))


def _each_node(job: Job) -> EachNode:
    return EachNode(srun(job, 1), "$SLURM_NODEID")


SLURM = SchedulerScript(
    directives=directives,
    shell="slurm",
    functions=lambda job: ("begin", "ask_ending", "submit_after", "cancel_job"),
    each_node=_each_node,
    warns=True,
    launcher_variables=("SLURM_*", "PMI_*", "PMIX_*"),
    own_jobs='squeue --all --noheader --user="$(id -un)" --format=%A 2> /dev/null',
)
