"""Faults that ask for an end: signals to an agent or a rank, and the stop file.

Invariant: a stop is asked for once (or, where the fault says so, twice), and nothing is killed by this room.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from commands import Command, injected
from faults.processes import signal_rank
from faults.strike import FIRST, LAST, Fault, Struck, any_rank, children, strike, wait_for, wait_for_some_step
from shardway.telemetry.activity import Activity

SLOW = "SHARDWAY_TEST_SLOW"
"""Seconds that each batch of a validation takes longer, for `inject/sitecustomize.py`."""

STALL = "SHARDWAY_TEST_STALL"
"""RANK:BATCH:FILE for `inject/sitecustomize.py`: that rank waits an hour for that batch of training, if FILE is new."""

STOPS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


def stop_one(command: Command, dice: random.Random) -> Struck:
    """A stop signal to the agent or to one rank."""
    whom = dice.choice(["agent", *children(command)])
    process = psutil.Process(command.process.pid) if whom == "agent" else children(command)[whom]
    number = dice.choice(STOPS)
    return strike(process, number, f"{number.name} to {whom if whom == 'agent' else f'rank {whom}'}")


def stop_while(activity: Activity, longest_s: float = 0.0) -> Callable[[Command, random.Random], Struck]:
    """Ask for a stop while a rank is busy with this, so long after it has begun."""

    def act(command: Command, dice: random.Random) -> Struck:
        least = dice.randrange(FIRST, LAST) if activity is not Activity.START else 0
        who = any_rank(dice)
        wait_for(command, who, lambda entry: entry.activity is activity and entry.step >= least)
        time.sleep(dice.uniform(0.0, longest_s))
        return stop_one(command, dice)

    return act


def stop_load(command: Command, dice: random.Random) -> Struck:
    """Ask a run for a stop that goes on from a checkpoint, while it loads."""
    wait_for_some_step(command, dice)
    command.run.request_stop("")
    command.end()
    again = command.again()
    wait_for(again, any_rank(dice), lambda entry: entry.activity is Activity.LOAD)
    struck = stop_one(again, dice)
    code, said = again.end()
    assert code == 0, said
    assert again.run.read_status()["state"] == "stopped"
    return struck


def stop_before(command: Command, dice: random.Random) -> Struck:
    """`touch stop` before any rank is there."""
    command.wait_until(command.folder.is_dir)
    struck = Struck(time.time(), "run")
    command.run.request_stop("")
    code, said = command.end()
    assert code == 0, said
    assert not command.run.stop_requested()
    return struck


def stop_stall(command: Command, dice: random.Random) -> Struck:
    """Ask for a stop while a rank waits for data that do not come."""
    mark = command.home / "stalled"
    command.wait_until(mark.exists)
    command.note_processes()
    time.sleep(dice.uniform(0.0, 1.0))
    return stop_one(command, dice)


def stop_save_twice(command: Command, dice: random.Random) -> Struck:
    """Ctrl-C in a save, and once more."""
    kind = Activity.SAVE
    least = dice.randrange(FIRST, LAST)
    wait_for(command, 0, lambda entry: entry.activity is kind and entry.step >= least)
    agent = psutil.Process(command.process.pid)
    struck = strike(agent, signal.SIGINT, "agent")
    # The run takes the file away when it has obeyed, which may be before anybody looks.
    command.wait_until(lambda: command.run.stop_requested() or command.process.poll() is not None)
    with contextlib.suppress(psutil.NoSuchProcess):
        agent.send_signal(signal.SIGINT)
    code, said = command.end()
    assert code in (0, 130), said  # 0: it was gone before
    return struck


def ask_to_stop(command: Command, dice: random.Random) -> Struck:
    """`touch stop`."""
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "run")
    command.run.request_stop("")
    return struck


def validates_slowly(folder: Path, dice: random.Random) -> dict[str, str]:
    """A validation that takes seconds, so that it can be broken off."""
    return injected(**{SLOW: "0.2"})


def validates_for_ever(mark: Path) -> dict[str, str]:
    """A validation that waits an hour, where no wait for data can be ended; a rank that does leaves MARK-RANK."""
    return injected(**{SLOW: f"3600:{mark}"})


def stalls_once(folder: Path, dice: random.Random) -> dict[str, str]:
    """A rank that waits an hour for its data, at some step or at the first of the process."""
    batch = dice.choice((0, dice.randrange(FIRST, LAST)))
    return injected(**{STALL: f"{any_rank(dice)}:{batch}:{folder / 'stalled'}"})


FAULTS = (
    Fault("SIGTERM to a rank", signal_rank(signal.SIGTERM), restarts_itself=False, is_further=True),
    Fault("SIGUSR2 to a rank", signal_rank(signal.SIGUSR2), restarts_itself=False, is_further=True),
    Fault("stop file", ask_to_stop, restarts_itself=False, is_further=True),
    Fault("stop signal at the start", stop_while(Activity.START, 4.0), restarts_itself=False, is_further=True),
    Fault("stop signal in a load", stop_load, restarts_itself=False, is_further=True),
    Fault("stop signal in a validation", stop_while(Activity.VALIDATE, 0.5), (), validates_slowly, False, True),
    Fault("stop signal in a save", stop_while(Activity.SAVE, 0.02), restarts_itself=False, is_further=True),
    Fault("stop signal while data do not come", stop_stall, (), stalls_once, False, True),
    Fault("second Ctrl-C in a save", stop_save_twice, restarts_itself=False, is_further=True),
    Fault("stop file before the start", stop_before, restarts_itself=False, is_further=True),
)
