"""srun and mpirun: one process a rank.

A program of Shardway finds its rank in what the launcher says. Any other program gets torch's own variables from it,
set by the shell of the rank, since outside a rank (`$SLURM_PROCID` in a job script) they would mean rank 0 everywhere.

Invariant: ranks are numbered node by node, so that local ranks are neighbours. This module must not know containers.

Sources: srun(1) "OUTPUT ENVIRONMENT VARIABLES"; mpirun(1) of Open MPI, "--map-by", "-x".
"""

from __future__ import annotations

from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.schedulers.slurm.script import srun
from shardway.launch.script import quote, quote_all
from shardway.launch.starters.base import LaunchCommand

_SRUN_PLACE = "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; "
_MPI_PLACE = (
    "export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK; "
)


def start_by_srun(job: Job, scheduler: SchedulerScript) -> LaunchCommand:
    """One srun task a rank; its output is marked with the rank."""
    binding = (f"--cpu-bind={quote(job.start.bind)}",) if job.start.bind else ()
    return LaunchCommand((*srun(job, job.shape.ranks_per_node), "--label", *binding), _rank(job, _SRUN_PLACE))


def start_by_mpirun(job: Job, scheduler: SchedulerScript) -> LaunchCommand:
    """One process a rank by Open MPI's mpirun; its output is marked with the rank."""
    shape = job.shape
    words = [
        quote(job.start.mpirun or "mpirun"),
        f"-n {shape.ranks}",
        f"--map-by ppr:{shape.ranks_per_node}:node" + (f":PE={shape.cores_per_rank}" if shape.cores_per_rank else ""),
        "--tag-output",
        *map(quote, job.start.mpirun_options),
        '"${mpirun_options[@]}"',
    ]
    return LaunchCommand(tuple(words), _rank(job, _MPI_PLACE))


def _rank(job: Job, place: str) -> tuple[str, ...]:
    program = job.program
    words = tuple(quote_all([word]) for word in (("python3", *program.words) if program.python else program.words))
    return words if program.meets_by_itself else ("bash", "-c", quote(f'{place}exec "$@"'), "rank", *words)
