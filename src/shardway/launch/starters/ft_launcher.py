"""NVIDIA's ft_launcher: one on each node, as torchrun, with a monitor for each rank that ends a silent one.

Its limits are those of the run. A training tells its monitor what they are by activity (`ranks.monitor`); any other
program has what stands here.

Invariant: as `torchrun`'s, with whose options it is started. It is `python3 -m` and not the command of that name, so
that it is the Python of the ranks that has to have it.

Source: the options of nvidia-resiliency-ext 0.4.1, `ft_launcher --help`.
"""

from __future__ import annotations

from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.starters.base import LaunchCommand
from shardway.launch.starters.torchrun import start_launcher

MODULE = "nvidia_resiliency_ext.fault_tolerance.launcher"

CHECK_S = 1
"""How often a monitor looks; by itself it does so every five seconds."""


def start(job: Job, scheduler: SchedulerScript) -> LaunchCommand:
    """One ft_launcher on each node."""
    again = job.again
    limits = [f"--ft-initial-rank-heartbeat-timeout={again.start_s:g}"]
    limits += [] if again.silent_s is None else [f"--ft-rank-heartbeat-timeout={again.silent_s:g}"]
    looks = [f"--max-restarts={again.restarts}", f"--ft-workload-check-interval={CHECK_S}"]
    looks += [] if job.shape.accelerators_per_node else ["--ft-enable-nic-monitor=false"]  # it finds NICs by their GPUs
    return start_launcher(job, scheduler, MODULE, " ".join(looks), " ".join(limits))
