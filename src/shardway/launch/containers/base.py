"""What a container runtime contributes to a job script.

Invariant: the functions are pure; the scheduler's own commands always stay outside. This module must not know
schedulers or launchers beyond the variables that they hand to a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardway.launch.job import ContainerMount, ContainerUse, Job
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.script import ScriptLine

HOST_NAMES = ContainerMount("/etc/hosts", "/etc/hosts", read_only=True)
"""For runtimes whose containers have a file of their own, in which the nodes of the job are not named."""


def _nothing(job: Job, scheduler: SchedulerScript) -> tuple[ScriptLine, ...]:
    return ()


def _no_words(job: Job, scheduler: SchedulerScript) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Runtime:
    """`wrap`: words before a command that put it into a container, quoted already. `of_launcher`: options of
    srun (Pyxis is one). `setup`, `teardown`: lines before and after the ranks. `images`: what may be an image."""

    wrap: Callable[[Job, SchedulerScript], tuple[str, ...]] = _no_words
    of_launcher: Callable[[Job, SchedulerScript], tuple[str, ...]] = _no_words
    setup: Callable[[Job, SchedulerScript], tuple[ScriptLine, ...]] = _nothing
    teardown: Callable[[Job, SchedulerScript], tuple[ScriptLine, ...]] = _nothing
    images: str = "a file on the site"


def all_mounts(job: Job, *more: ContainerMount) -> tuple[ContainerMount, ...]:
    """What the container sees: the run, the working folder, what the run and the site name, each once.

    A folder below one that is mounted as it is needs no mount of its own; not every runtime could make a place for it.
    """
    folders = [job.run] if job.around.workdir.is_relative_to(job.run) else [job.run, job.around.workdir]
    whole = [mount.source for mount in job.container.mounts if mount.source == mount.target and not mount.read_only]
    own = [ContainerMount(str(folder), str(folder)) for folder in folders if not any(map(folder.is_relative_to, whole))]
    return tuple(dict.fromkeys((*own, *job.container.mounts, *more)))


def command_of(use: ContainerUse, usual: str) -> str:
    """The runtime's command, which some sites have under another name."""
    return use.rules.command or usual
