"""Faults of processes that are stopped (SIGSTOP) and could go on.

Invariant: nobody but the agent tells a process that is stopped to go on. Only processes of the command are struck.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from commands import Command, injected, pacing
from faults.processes import signal_loader, signal_rank
from faults.saves import KILL, MARK
from faults.strike import (
    EVERY,
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
from shardway.telemetry.activity import Activity

ENTERED_S = 0.5
"""In which a rank that waits for nothing else has come to the next collective."""


def stop_while(activity: Activity) -> Callable[[Command, random.Random], Struck]:
    """Stop a rank that is busy with this."""

    def act(command: Command, dice: random.Random) -> Struck:
        who, least = any_rank(dice), dice.randrange(FIRST, LAST)
        wait_for(command, who, lambda entry: entry.activity is activity and entry.step >= least)
        return strike(children(command)[who], signal.SIGSTOP, f"rank {who}")

    return act


def stop_in_collective(command: Command, dice: random.Random) -> Struck:
    """Stop a rank that is in a collective, since the other one has not come there; which then does."""
    wait_for_some_step(command, dice)
    who = any_rank(dice)
    ranks = children(command)
    ranks[1 - who].suspend()
    time.sleep(ENTERED_S)
    struck = strike(ranks[who], signal.SIGSTOP, f"rank {who}")
    ranks[1 - who].resume()
    return struck


def stops_in_save(folder: Path, dice: random.Random) -> Mapping[str, str]:
    """A rank stops itself while it writes its shard."""
    step = EVERY * dice.randrange(2, 7)
    return injected(**{KILL: f"{any_rank(dice)}:writing:{step}:{folder / MARK}", "SHARDWAY_TEST_STRIKE": "SIGSTOP"})


def slows_data(folder: Path, dice: random.Random) -> Mapping[str, str]:
    """Waits for data that are long enough to be met."""
    return pacing(0.02)


def went_on(after: Aftermath) -> None:
    """Nothing was started again."""
    reasons = [event["reason"] for event in after.events("restarted")]
    assert not reasons, reasons


FAULTS = (
    Fault("SIGSTOP of a rank", signal_rank(signal.SIGSTOP), is_further=True),
    Fault("SIGSTOP of a rank in a step", stop_while(Activity.STEP), is_further=True, expects=went_on),
    Fault("SIGSTOP of a rank in a collective", stop_in_collective, is_further=True, expects=went_on, least_ranks=2),
    Fault(
        "SIGSTOP of a rank that waits for data",
        stop_while(Activity.DATA),
        environ=slows_data,
        is_further=True,
        expects=went_on,
    ),
    Fault(
        "SIGSTOP of a rank in a save",
        wait_for_mark(MARK),
        ("checkpoint.background=false",),
        stops_in_save,
        is_further=True,
        expects=went_on,
    ),
    Fault(
        "SIGSTOP of a loader worker",
        signal_loader(signal.SIGSTOP),
        ("data.workers=1",),
        is_further=True,
        expects=went_on,
    ),
)
