"""What a scheduler contributes to a job script.

Invariant: the functions are pure: a job in, lines out. This module must not talk to a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardway.launch.job import Job
from shardway.launch.script import ScriptLine


@dataclass(frozen=True)
class EachNode:
    """How one command runs on every node of a job at once.

    `words` are quoted already; the command follows them. `index` and `name` are shell that the command's own shell
    evaluates on each node: the node's number from 0 on.
    """

    words: tuple[str, ...]
    index: str


@dataclass(frozen=True)
class SchedulerScript:
    """The scheduler's part of a job script.

    `directives` are the lines that the scheduler reads; `shell` names the file of its functions (`launch/shell`);
    `functions` those that a job needs; `each_node` starts one command a node. `warns`: it can be asked for a signal
    before the wall-time ends. `launcher_variables` are patterns of what its launchers tell a rank.
    `signals_every_process`: not the script alone, when a job is deleted or signalled. `own_jobs`: shell that prints the
    ids of the person's jobs that wait or run, one a line; "" where none was tried.
    """

    directives: Callable[[Job], tuple[ScriptLine, ...]]
    shell: str
    functions: Callable[[Job], tuple[str, ...]]
    each_node: Callable[[Job], EachNode]
    warns: bool
    launcher_variables: tuple[str, ...]
    signals_every_process: bool = False
    own_jobs: str = ""
