"""torchrun: one agent on each node starts the ranks there. What takes the same options may be started in its place.

The agents meet by the c10d rendezvous. Who hosts its store is said (`is_host`) and not guessed: torch compares the
endpoint with the node's own names, and where these mean another network nobody hosts and all wait until they give up.
For the same reason each agent is told its own address on the network for computing (`--local-addr`), which the ranks
get as MASTER_ADDR.

Invariant: whichever node an agent is on, it gets the same endpoint and its own address from the list that the job
script made. This module must not know schedulers beyond how they start one command on each node.

Sources: torchrun's manual, "Multi-node multi-worker"; pytorch/pytorch#73656.
"""

from __future__ import annotations

from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import quote, quote_all, quote_shell
from shardway.launch.starters.base import LaunchCommand, name_cores

SHOWN_RANKS = 16
"""A larger job shows the output of one rank of each node; that of each rank is in its own file in any case."""


def start(job: Job, scheduler: SchedulerScript) -> LaunchCommand:
    """One torchrun on each node."""
    return start_launcher(job, scheduler, "torch.distributed.run")


def start_launcher(job: Job, scheduler: SchedulerScript, module: str, *further: str) -> LaunchCommand:
    """One `python3 -m MODULE` on each node, with torchrun's options and `further` lines of its own."""
    each_node = scheduler.each_node(job)
    lines = quote_shell(_agent(job, each_node.index, module, further))
    return LaunchCommand(each_node.words, ("bash", "-c", lines, "agent", *program_words(job)))


def program_words(job: Job) -> tuple[str, ...]:
    """The program as torchrun takes it: a script or `-m module`, or any program after `--no-python`."""
    words = job.program.words if job.program.python else ("--no-python", *job.program.words)
    return tuple(quote_all([word]) for word in words)


def _choose_python(job: Job, module: str) -> tuple[str, ...]:
    """The lines of shell that find who starts ranks of another interpreter: itself where it has the launcher, so that
    both have the same torch, else the Python of the environment."""
    if not job.program.interpreter:
        return ()
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec('{module.split('.')[0]}') is None)"
    return (f'  python={quote(job.program.interpreter)}; "$python" -c "{look}" || python=python3',)


def _agent(job: Job, index: str, module: str, further: tuple[str, ...]) -> str:
    """What the shell of one node runs; the program follows as its arguments."""
    shape, python = job.shape, '"$python"' if job.program.interpreter else "python3"
    shown = "--tee=3" if shape.ranks <= SHOWN_RANKS else "--redirects=3 --tee=0:3"
    lines = (
        f"node={index}; addresses=($SHARDWAY_NODES); host=false",
        "  [ $node != 0 ] || host=true",
        *(f"  {line}" for line in name_cores(job)),
        '  export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="\\${rank}: "',
        *_choose_python(job, module),
        # its ranks take the warnings of schedulers for a stop; torchrun would die of them, and the ranks with it
        *(("  trap '' USR1 USR2",) if job.program.meets_by_itself else ()),
        f"  exec {python} -m {module} --nnodes={shape.nodes} --nproc-per-node={shape.ranks_per_node} \\",
        '    --rdzv-backend=c10d --rdzv-id="$SHARDWAY_JOB" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\',
        '    --rdzv-conf="is_host=$host" --local-addr="${addresses[$node]}" \\',
        *(f"    {line} \\" for line in further),
        f'    --log-dir="$SHARDWAY_ATTEMPT_DIR/log/node-$node" {shown} "$@"',
    )
    return "\n".join(lines)
