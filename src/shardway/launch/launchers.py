"""The class of a launcher, and ours: torchrun, ft_launcher, our agent, srun and mpirun, and one process for servers.

Invariants:
- The words of a program stay separate words, never joined into text that a shell reads again.
- Ranks are numbered node by node, so that local ranks are neighbours.
- torchrun and ft_launcher: every agent gets the same endpoint, and its own address from the job script's list.

Our agent starts `shardway train` alone, which is an agent itself. The agents use the job script's list of addresses
(`shardway train --nodes`); the first one coordinates.

torchrun's agents meet by the c10d rendezvous. The host of its store is stated (`is_host`): torch would compare the
endpoint with the node's own names, and if these belong to another network, no agent hosts it and all wait until they
give up. For the same reason each agent gets its own address (`--local-addr`), which becomes MASTER_ADDR.

ft_launcher is started as `python3 -m`, so that it runs in the Python of the ranks. Its limits are those of the run: a
training reports them by activity (`ranks.ft_launcher_client`), any other program has those of the options.

srun and mpirun: any program but Shardway's gets torch's variables from the shell of the rank, since outside a rank
(`$SLURM_PROCID` in a job script) they would mean rank 0 everywhere.

Sources: torchrun's manual, "Multi-node multi-worker"; pytorch/pytorch#73656; the options of nvidia-resiliency-ext
0.4.1, `ft_launcher --help`; srun(1) "OUTPUT ENVIRONMENT VARIABLES"; mpirun(1) of Open MPI, "--map-by", "-x".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from shardway.errors import Bug
from shardway.launch.job import Job
from shardway.launch.schedulers.base import Scheduler
from shardway.launch.script import quote, quote_shell
from shardway.plugins import list_names, make_plugin

# --- what a launcher contributes


@dataclass(frozen=True)
class LaunchCommand:
    """A command in two halves: `outside` a container (which processes start where), and `inside` (what each runs). All
    words are quoted already."""

    outside: tuple[str, ...]
    inside: tuple[str, ...]


class Launcher(ABC):
    """One launcher. A class of another package that derives from this one and has an entry point in the group
    `shardway.launchers` can be named in `site.launcher` and in a profile. It is made without arguments."""

    one_agent_a_node: ClassVar[bool] = False
    """The scheduler starts one process on each node, which starts the ranks there."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Python packages that it needs where the ranks run."""
    works_with_container_of_scheduler: ClassVar[bool] = True
    """Ranks can be in a container that the scheduler's own commands start (`Container.of_launcher`)."""

    def goes_with(self, scheduler: Scheduler) -> bool:
        """Whether it starts ranks in jobs of this scheduler."""
        return True

    def rank_variables(self, scheduler: Scheduler) -> tuple[str, ...]:
        """Variables that it gives a rank, for containers that take names; where it has agents, what these need."""
        return scheduler.node_variables

    @abstractmethod
    def start(self, job: Job, scheduler: Scheduler) -> LaunchCommand:
        """The command that starts the ranks of a job."""


def list_launchers(scheduler: Scheduler) -> tuple[str, ...]:
    """The names of the launchers that start ranks in jobs of a scheduler."""
    names = list_names("launchers")
    return tuple(name for name in names if make_plugin("launchers", name).goes_with(scheduler))


def name_cores(job: Job) -> tuple[str, ...]:
    """The line of shell by which ranks of one agent a node know their cores (`ranks.heartbeat`), since the scheduler
    binds the agent alone; none where the site does not bind ranks."""
    return (f"export SHARDWAY_CPU_MASKS={','.join(job.start.masks)}",) if job.start.masks else ()


# --- launchers that start one agent on each node


class Agent(Launcher):
    """Our own agent."""

    one_agent_a_node = True
    modules = ("torch",)

    def start(self, job: Job, scheduler: Scheduler) -> LaunchCommand:
        each_node = scheduler.each_node(job)
        lines = (
            *name_cores(job),
            f'exec python3 "$@" --nproc {job.shape.ranks_per_node} \\',
            f'    --nodes "$SHARDWAY_NODES" --node "{each_node.index}" --port "$MASTER_PORT"',
        )
        shell = ("bash", "-c", quote_shell("\n".join(lines)), "agent", *map(quote, job.program.words))
        return LaunchCommand(each_node.words, shell)


class Torchrun(Launcher):
    """torch's launcher."""

    one_agent_a_node = True
    modules = ("torch",)

    def start(self, job: Job, scheduler: Scheduler) -> LaunchCommand:
        return start_module(job, scheduler, "torch.distributed.run")


def start_module(job: Job, scheduler: Scheduler, module: str, *further: str) -> LaunchCommand:
    """One `python3 -m MODULE` on each node, with torchrun's options and `further` lines of its own. The program follows
    as arguments: a script or `-m module`, or any program after `--no-python`."""
    shape, program, each_node = job.shape, job.program, scheduler.each_node(job)
    python, choose_python = "python3", []
    if program.interpreter:
        # For ranks of another interpreter: that one if it has the launcher, so that both have the same torch.
        look = f"import importlib.util as u, sys; sys.exit(u.find_spec('{module.split('.')[0]}') is None)"
        choose = f'  python={quote(program.interpreter)}; "$python" -c "{look}" || python=python3'
        python, choose_python = '"$python"', [choose]
    # A larger job shows the output of one rank of each node; that of each rank is in its own file in any case.
    shown = "--tee=3" if shape.ranks <= 16 else "--redirects=3 --tee=0:3"
    lines = (
        f"node={each_node.index}; addresses=($SHARDWAY_NODES); host=false",
        "  [ $node != 0 ] || host=true",
        *(f"  {line}" for line in name_cores(job)),
        '  export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="\\${rank}: "',
        *choose_python,
        # its ranks take the warnings of schedulers for a stop; torchrun would die of them, and the ranks with it
        *(("  trap '' USR1 USR2",) if program.meets_by_itself else ()),
        f"  exec {python} -m {module} --nnodes={shape.nodes} --nproc-per-node={shape.ranks_per_node} \\",
        '    --rdzv-backend=c10d --rdzv-id="$SHARDWAY_JOB" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\',
        '    --rdzv-conf="is_host=$host" --local-addr="${addresses[$node]}" \\',
        *(f"    {line} \\" for line in further),
        f'    --log-dir="$SHARDWAY_ATTEMPT_DIR/log/node-$node" {shown} "$@"',
    )
    words = program.words if program.python else ("--no-python", *program.words)
    return LaunchCommand(each_node.words, ("bash", "-c", quote_shell("\n".join(lines)), "agent", *map(quote, words)))


MODULE = "nvidia_resiliency_ext.fault_tolerance.launcher"


class FtLauncher(Launcher):
    """NVIDIA's launcher, with a monitor for each rank."""

    one_agent_a_node = True
    modules = ("torch", "nvidia_resiliency_ext")

    def start(self, job: Job, scheduler: Scheduler) -> LaunchCommand:
        again = job.again
        limits = f"--ft-initial-rank-heartbeat-timeout={again.start_s:g}"
        limits += "" if again.silent_s is None else f" --ft-rank-heartbeat-timeout={again.silent_s:g}"
        # a monitor looks every second, and not every five; it finds NICs by their GPUs
        looks = f"--max-restarts={again.restarts} --ft-workload-check-interval=1"
        looks += "" if job.shape.accelerators_per_node else " --ft-enable-nic-monitor=false"
        return start_module(job, scheduler, MODULE, looks, limits)


class OneProcess(Launcher):
    """One process on each node, which starts what it needs itself: that of an inference server (`launch.serving`)."""

    one_agent_a_node = True

    def goes_with(self, scheduler: Scheduler) -> bool:
        """Never by choice: `shardway submit --serve` takes it for each scheduler."""
        return False

    def start(self, job: Job, scheduler: Scheduler) -> LaunchCommand:
        words = ("python3", *job.program.words) if job.program.python else job.program.words
        return LaunchCommand(scheduler.each_node(job).words, tuple(map(quote, words)))


# --- srun and mpirun: one process per rank


class Srun(Launcher):
    """The launcher of a scheduler that has one (`Scheduler.each_rank`); its output is marked with the rank."""

    def goes_with(self, scheduler: Scheduler) -> bool:
        return scheduler.launcher == "srun"

    def rank_variables(self, scheduler: Scheduler) -> tuple[str, ...]:
        return scheduler.rank_variables

    def start(self, job: Job, scheduler: Scheduler) -> LaunchCommand:
        each_rank = scheduler.each_rank(job)
        if each_rank is None:
            raise Bug(f"{scheduler.name} has no launcher of its own")
        return LaunchCommand(each_rank.words, _rank(job, each_rank.place))


class Mpirun(Launcher):
    """Open MPI's mpirun; its output is marked with the rank."""

    works_with_container_of_scheduler = False

    def rank_variables(self, scheduler: Scheduler) -> tuple[str, ...]:
        return tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))

    def start(self, job: Job, scheduler: Scheduler) -> LaunchCommand:
        shape = job.shape
        cores = f":PE={shape.cores_per_rank}" if shape.cores_per_rank else ""
        words = [
            quote(job.start.mpirun or "mpirun"),
            f"-n {shape.ranks}",
            f"--map-by ppr:{shape.ranks_per_node}:node{cores}",
            "--tag-output",
            *map(quote, job.start.mpirun_options),
            '"${mpirun_options[@]}"',
        ]
        mpi = "$OMPI_COMM_WORLD"
        place = f"export RANK={mpi}_RANK WORLD_SIZE={mpi}_SIZE LOCAL_RANK={mpi}_LOCAL_RANK; "
        return LaunchCommand(tuple(words), _rank(job, place))


def _rank(job: Job, place: str) -> tuple[str, ...]:
    program = job.program
    words = tuple(map(quote, ("python3", *program.words) if program.python else program.words))
    return words if program.meets_by_itself else ("bash", "-c", quote(f'{place}exec "$@"'), "rank", *words)
