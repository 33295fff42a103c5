"""PBS's part of a job script: #PBS lines and one task on each node.

Invariant: a job asks in the `select` form alone (a chunk a node, scattered), never mixed with the older
`-l nodes=`, which PBS refuses; no value goes through `qsub -v`, which changes quotes and backslashes. This module must
not talk to PBS.

Sources: qsub(1B) "-l select", "-k oed"; pbs_resources(7B); PBS Professional User's Guide, "Multi-node jobs", pbs_tmrsh.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardway.launch.job import Job
from shardway.launch.schedulers.base import EachNode, SchedulerScript
from shardway.launch.schedulers.options import render_options
from shardway.launch.script import ScriptLine, quote


def directives(job: Job) -> tuple[ScriptLine, ...]:
    """The #PBS lines."""
    return tuple(ScriptLine(f"#PBS {line.text}", line.purpose) for line in _options(job))


def _options(job: Job) -> Iterator[ScriptLine]:
    terms = job.terms
    yield ScriptLine(f"-N {job.scheduler_name}", "the run, its attempt, and what makes it unique")
    if terms.account:
        yield ScriptLine(f"-P {quote(terms.account)}", "who is charged, and where the job waits")
    if terms.queue:
        yield ScriptLine(f"-q {quote(terms.queue)}", "who is charged, and where the job waits")
    yield ScriptLine(f"-l select={render_select(job)}", "nodes, and what is wanted of each")
    yield ScriptLine(f"-l place=scatter{':excl' if job.shape.whole_nodes else ''}")
    yield from (ScriptLine(f"-l {entry}", "the container that PBS makes on each node") for entry in _container(job))
    yield ScriptLine(f"-l walltime={_render_time(terms.walltime_s)}", "wall-time of this attempt")
    yield ScriptLine("-r n", "an attempt that loses its nodes ends; the next attempt goes on from the last checkpoint")
    yield ScriptLine("-S /bin/bash", "the shell of this script, whatever the login shell is")
    yield ScriptLine("-j oe", "what it prints, at once and not when it has ended")
    yield ScriptLine("-k oed")
    yield ScriptLine(f"-o {job.log_for_scheduler}")
    for words in render_options(terms.options):
        yield ScriptLine(words, "options of this run or site that Shardway has no name for")


def render_select(job: Job) -> str:
    """The chunks: `2:ncpus=112:ngpus=8:mem=1880gb:mpiprocs=8`. mpiprocs is how often PBS_NODEFILE names a node."""
    shape = job.shape
    parts = [
        str(shape.nodes),
        f"ncpus={shape.cores_per_node or shape.ranks_per_node}",
        f"mpiprocs={shape.ranks_per_node if job.launcher == 'mpirun' else 1}",
    ]
    if shape.accelerators_per_node and job.terms.accelerators == "ngpus":
        parts.append(f"ngpus={shape.accelerators_per_node}")
    if shape.memory_bytes:
        parts.append(f"mem={shape.memory_bytes // 2**20}mb")
    if _made_by_pbs(job):
        parts.append("container_engine=enroot")
    return ":".join(parts)


def _made_by_pbs(job: Job) -> bool:
    return job.container.runtime == "enroot" and bool(job.container.rules.by_scheduler)


def _container(job: Job) -> Iterator[str]:
    if _made_by_pbs(job):
        yield f"container_image={quote(job.container.image)}"
        yield f"container_name={job.name}"


def _render_time(seconds: float) -> str:
    whole = -(-seconds // 1)
    minutes, rest = divmod(int(whole), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"


def _functions(job: Job) -> tuple[str, ...]:
    launcher = ("on_each_node",) if job.one_agent_a_node else ("remote_shell",)
    setup = ("on_each_node",) if job.container.runtime == "enroot" and not _made_by_pbs(job) else ()
    needed = dict.fromkeys((*launcher, *setup))
    return ("begin", "ask_ending", "submit_as_program", "submit_after", "cancel_job", *needed)


PBS = SchedulerScript(
    directives=directives,
    shell="pbs",
    functions=_functions,
    each_node=lambda job: EachNode(("on_each_node",), "$NODE"),
    warns=False,
    launcher_variables=("PBS_*", "NODE"),
    signals_every_process=True,
    own_jobs='qselect -u "$(id -un)" 2> /dev/null',
)
