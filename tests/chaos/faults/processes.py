"""Faults of processes: killed, stopped, hanging, or started twice.

Invariant: only processes of the command are struck, each once.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from commands import Command, injected, pacing
from faults.strike import (
    FIRST,
    LAST,
    Aftermath,
    Fault,
    Struck,
    any_rank,
    children,
    strike,
    wait_for,
    wait_for_mark,
    wait_for_some_step,
)
from left_folders import list_left_folders
from shardway.ranks.heartbeat import GATES, Activity

HANG = "SHARDWAY_TEST_HANG"
"""RANK:STEP:FILE for `inject/sitecustomize.py`: that rank hangs once it has done that many steps, if FILE is new."""


def signal_rank(number: signal.Signals, rank: int | None = None) -> Callable[[Command, random.Random], Struck]:
    """A signal to one rank (None: any) at some step."""

    def act(command: Command, dice: random.Random) -> Struck:
        wait_for_some_step(command, dice)
        who = any_rank(dice) if rank is None else rank
        return strike(children(command)[who], number, f"rank {who}")

    return act


def kill_while(activity: Activity) -> Callable[[Command, random.Random], Struck]:
    """kill -9 a rank that is busy with this."""

    def act(command: Command, dice: random.Random) -> Struck:
        who = any_rank(dice)
        least = dice.randrange(FIRST, LAST) if activity is not Activity.START else 0
        wait_for(command, who, lambda entry: entry.activity is activity and entry.step >= least)
        time.sleep(dice.uniform(0.0, 0.5 if activity is Activity.START else 0.03))
        return strike(children(command)[who], signal.SIGKILL, f"rank {who}")

    return act


def kill_agent(command: Command, dice: random.Random) -> Struck:
    """kill -9 the process that started the ranks."""
    wait_for_some_step(command, dice)
    return strike(psutil.Process(command.process.pid), signal.SIGKILL, "agent")


def signal_loader(number: signal.Signals) -> Callable[[Command, random.Random], Struck]:
    """A signal to a process that loads data for a rank."""

    def act(command: Command, dice: random.Random) -> Struck:
        wait_for_some_step(command, dice)
        who = any_rank(dice)
        return strike(dice.choice(find_loaders(command, who)), number, f"loader of rank {who}")

    return act


def kill_loader_in_save(command: Command, dice: random.Random) -> Struck:
    """kill -9 a process that loads data, while its rank saves."""
    wait_for_some_step(command, dice)
    who = any_rank(dice)
    loaders = find_loaders(command, who)
    wait_for(command, who, lambda entry: entry.activity is Activity.SAVE)
    return strike(dice.choice(loaders), signal.SIGKILL, f"loader of rank {who}")


def find_loaders(command: Command, rank: int) -> list[psutil.Process]:
    """The processes that load data for a rank, but for what else it starts: multiprocessing's tracker, and the template
    that processes of tests are forked from (`warm`)."""
    return [each for each in children(command)[rank].children() if "spawn_main" in " ".join(each.cmdline())]


def launch_twice(command: Command, dice: random.Random) -> Struck:
    """The same command once more beside the first."""
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "run")
    again = command.again()
    code, said = again.end()
    assert code == 2, said
    assert "another run is training into" in said
    return struck


def hangs_once(folder: Path, dice: random.Random) -> dict[str, str]:
    """A rank that holds Python's lock and does nothing, from some step on."""
    return injected(**{HANG: f"{any_rank(dice)}:{dice.randrange(FIRST, LAST)}:{folder / 'hung'}"})


def tells_crash(left: Aftermath) -> None:
    """The rank is named, and what called the library."""
    (reason,) = {event["reason"] for event in left.events("restarted")}
    assert "crashed in native code (SIGSEGV), called from " in reason


def pace_steps(folder: Path, dice: random.Random) -> Mapping[str, str]:
    """Steps slow enough for spares to be there."""
    return pacing(0.1)


def nothing_was_left(left: Aftermath) -> None:
    """No folder of a gate that is younger than the run."""
    assert list_left_folders(GATES, (left.run.path / "run-id").stat().st_mtime) == []


FAULTS = (
    Fault("SIGKILL of rank 0", signal_rank(signal.SIGKILL, 0), is_further=True),
    Fault("SIGKILL of a rank", signal_rank(signal.SIGKILL), is_further=True),
    Fault(
        "SIGKILL of a rank, with spares",
        signal_rank(signal.SIGKILL),
        ("run.spares=1s",),
        pace_steps,
        expects=nothing_was_left,
        is_further=True,
    ),
    Fault("SIGKILL of a rank in a save", kill_while(Activity.SAVE), is_further=True),
    Fault("SIGKILL of a rank that starts", kill_while(Activity.START), is_further=True),
    Fault("SIGKILL of the agent", kill_agent, restarts_itself=False),
    Fault("SIGKILL of a loader worker", signal_loader(signal.SIGKILL), words=("data.workers=1",), is_further=True),
    Fault("SIGKILL of a loader worker in a save", kill_loader_in_save, words=("data.workers=1",), is_further=True),
    Fault("crash of a rank in a library (SIGSEGV)", signal_rank(signal.SIGSEGV), expects=tells_crash, is_further=True),
    # Steps of milliseconds may be over before the rank hangs, and in a save it would be given a minute.
    Fault(
        "hang with Python's lock held", wait_for_mark("hung"), ("run.hang_timeout=10s",), hangs_once, is_further=True
    ),
    Fault("second launch of the run", launch_twice, is_further=True),
)
