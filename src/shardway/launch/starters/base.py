"""What a launcher contributes to a job script.

Invariant: the words of a program are handed on as separate words, never joined into a text that a shell reads again.
This module must not know containers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript


@dataclass(frozen=True)
class LaunchCommand:
    """A command in two halves: `outside` a container (who starts processes where), and `inside` (what each runs).

    All words are quoted already.
    """

    outside: tuple[str, ...]
    inside: tuple[str, ...]


Starter = Callable[[Job, SchedulerScript], LaunchCommand]


def name_cores(job: Job) -> tuple[str, ...]:
    """The line of shell by which ranks of one agent a node know their cores (`ranks.cores`), since the scheduler binds
    the agent alone; none where the site does not bind ranks."""
    return (f"export SHARDWAY_CPU_MASKS={','.join(job.start.masks)}",) if job.start.masks else ()
