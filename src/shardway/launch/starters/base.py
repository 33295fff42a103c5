"""What a starter contributes to a job script.

Invariant: the words of a program are handed on as separate words, never joined into a text that a shell reads again.
This module must not know containers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardway.launch.job import Job
from shardway.launch.schedulers.base import SchedulerScript


@dataclass(frozen=True)
class Started:
    """A command in two halves: `outside` a container (who starts processes where), and `inside` (what each runs).

    All words are quoted already.
    """

    outside: tuple[str, ...]
    inside: tuple[str, ...]


Starter = Callable[[Job, SchedulerScript], Started]
