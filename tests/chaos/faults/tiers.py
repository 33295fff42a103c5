"""Faults of checkpoints on the disks of the nodes: cut off while one is copied, damaged, lost with its disk.

Invariant: the run directory is left as it is.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from commands import Command, injected
from faults.saves import HARMS, KILL, MARK
from faults.strike import (
    EVERY,
    Aftermath,
    Fault,
    Struck,
    any_rank,
    children,
    kill_all,
    wait_for_mark,
    wait_for_some_step,
)
from shardway.rundir.names import LocalRun, find_local_run, find_run_id

DISK = "disk"
OFTEN = 5
WORDS = (
    *("checkpoint.background=true", f"checkpoint.local_every={OFTEN} steps"),
    f"checkpoint.local_dir={{folder}}/{DISK}",
)


def in_a_copy(folder: Path, dice: random.Random) -> Mapping[str, str]:
    """Any rank, while it copies a checkpoint to the run directory."""
    return injected(**{KILL: f"{any_rank(dice)}:copying:{EVERY * dice.randrange(2, 7)}:{folder / MARK}"})


def local_of(home: Path, run: Path) -> LocalRun:
    """What the run has on the disk."""
    return find_local_run(str(home / DISK), find_run_id(run))


def strike_the_disk(harm: Callable[[LocalRun, random.Random], None]) -> Callable[[Command, random.Random], Struck]:
    """Stop all ranks when the disk has what the run directory lacks and never gets; then something happens to the disk,
    and kill -9 all."""

    def act(command: Command, dice: random.Random) -> Struck:
        wait_for_some_step(command, dice)
        local, run = local_of(command.home, command.folder), command.run

        def is_alone() -> bool:
            newest = max(local.steps(), default=0)
            return newest % EVERY != 0 and newest > max(run.checkpoint_steps(), default=0)

        def is_alone_in_peace() -> bool:
            if is_alone():
                stop_ranks(command)
                if is_alone():
                    return True
                resume_ranks(command)
            return False

        command.wait_until(is_alone_in_peace)
        struck = Struck(time.time(), "disk of a node")
        harm(local, dice)
        kill_all(command)
        return struck

    return act


def stop_ranks(command: Command) -> None:
    """SIGSTOP all ranks, and wait until none of their threads runs: a copy or a save in the background stands too."""
    for rank in children(command).values():
        rank.suspend()
    for rank in children(command).values():
        command.wait_until(lambda rank=rank: rank.status() == psutil.STATUS_STOPPED)  # type: ignore[misc]


def resume_ranks(command: Command) -> None:
    for rank in children(command).values():
        rank.resume()


def damage(local: LocalRun, dice: random.Random) -> None:
    """In any of the ways in which those in the run directory are damaged."""
    (newest,) = [node / f"step-{local.steps()[-1]:09d}" for node in local.nodes()]
    dice.choice(tuple(HARMS.values()))(newest, dice)


def goes_on_from_the_nodes(after: Aftermath) -> None:
    assert after.events("started")[-1]["checkpoint_tier"] == "local"
    left_nothing(after)


def passes_it_over(after: Aftermath) -> None:
    """It goes on from the one before, on the node or in the run directory; steps may be too quick for each to be saved
    that is due, and the last one may have come too late to be recorded."""
    (told,) = after.events("checkpoint_quarantined")
    assert (told["tier"], told["kept_as"]) == ("local", "")
    damaged = int(told["name"].rpartition("-")[2])
    begun = after.events("started")[-1]
    earlier = [event["step"] for event in after.events("saved") if event["time"] < begun["time"]]
    assert max(step for step in earlier if step < damaged) <= begun["step"] < damaged, (damaged, earlier)
    left_nothing(after)


def goes_on_from_the_run_directory(after: Aftermath) -> None:
    """Or from the start, where the first copy had not come there yet: a busy machine takes its time."""
    begun = after.events("started")[-1]
    earlier = [event for event in after.events("saved") if event["time"] < begun["time"]]
    has_copy = any(event["tier"] == "shared" for event in earlier)
    assert begun["checkpoint_tier"] in (("shared",) if has_copy else ("shared", None))
    left_nothing(after)


def left_nothing(after: Aftermath) -> None:
    assert not local_of(after.home, after.run.path).path.exists()


FAULTS = (
    Fault(
        "SIGKILL while the disk of a node is copied",
        wait_for_mark(MARK),
        WORDS,
        in_a_copy,
        is_further=True,
        expects=goes_on_from_the_nodes,
    ),
    Fault(
        "checkpoint on the disk of a node damaged",
        strike_the_disk(damage),
        WORDS,
        restarts_itself=False,
        is_further=True,
        expects=passes_it_over,
    ),
    Fault(
        "disk of a node lost",
        strike_the_disk(lambda local, dice: shutil.rmtree(local.path)),
        WORDS,
        restarts_itself=False,
        is_further=True,
        expects=goes_on_from_the_run_directory,
    ),
)
