"""What happens to a run, each at a moment that a seed chooses, and what a person then does.

Invariant: only processes and files of the case are struck.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from case import Case
from judge import Record, count_orphaned

FIRST, LAST = 22, 130
STRUCK = range(FIRST, LAST)
"""Steps at which most faults strike: after the first checkpoint, and with some to come."""

EVERY = 20
ORPHANS_S = 5.0
"""So long after its launcher was killed a run is started again, or as soon as its ranks are gone."""

SLOW = {"FAULT_PACE": "0.15"}
"""So that ranks without a launcher have not trained to the end by then."""

LONG, LATE = {"FAULT_PACE": "0.6"}, range(125, 140)
"""Steps of a run that has trained for more than a minute, as most have when something happens to them."""


@dataclass(frozen=True)
class Struck:
    """When (monotonic seconds), whom, and what was seen at once."""

    time: float
    whom: str
    seen: str = ""


@dataclass(frozen=True)
class Fault:
    """`environ` is what the run has in its environment for it; `signs` are lines that show that it was noticed, where
    they are not those of the tool; `mend` is done before a person starts the run again, and says what it was."""

    name: str
    strike: Callable[[Case, random.Random], Struck]
    environ: Callable[[Path, random.Random], Mapping[str, str]] = lambda folder, dice: {}
    signs: str = ""
    mend: Callable[[Case], str] = lambda case: ""
    tools: tuple[str, ...] = ()


def wait_for_some_step(case: Case, dice: random.Random, steps: range = STRUCK) -> None:
    step = dice.choice(steps)
    case.wait_until(lambda: case.last_step() >= step)
    time.sleep(dice.uniform(0.0, 0.03))


def send(process: psutil.Process, number: signal.Signals, whom: str) -> Struck:
    struck = Struck(time.monotonic(), whom)
    process.send_signal(number)
    return struck


# --- processes


def lives(process: psutil.Process) -> bool:
    """One that has ended may stay in the table of processes where nobody asks how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def signal_rank(
    number: signal.Signals, rank: int | None = None, steps: range = STRUCK
) -> Callable[[Case, random.Random], Struck]:
    """A signal to a rank (None: to any) at one of these steps."""

    def act(case: Case, dice: random.Random) -> Struck:
        who = dice.randrange(2) if rank is None else rank
        wait_for_some_step(case, dice, steps)
        return send(case.ranks()[who], number, f"rank {who}")

    return act


def kill_launcher(case: Case, dice: random.Random) -> Struck:
    """Then look how long its ranks live."""
    wait_for_some_step(case, dice, range(FIRST, LAST // 2))
    before = list(case.ranks().values())
    struck = send(psutil.Process(case.launchers[0].pid), signal.SIGKILL, "launcher")
    while (alive := [process for process in before if lives(process)]) and time.monotonic() < struck.time + ORPHANS_S:
        time.sleep(0.05)
    steps = count_orphaned(case.records(), struck.time)
    for_s = time.monotonic() - struck.time
    told = f"{len(alive)} of 2 ranks train on without it" if alive else f"ranks left after {for_s:.1f} s"
    return Struck(struck.time, struck.whom, f"{told}, {steps} more steps by then")


def kill_lighthouse(case: Case, dice: random.Random) -> Struck:
    wait_for_some_step(case, dice)
    services = [each for each in case.processes() if "lighthouse" in " ".join(each.cmdline())]
    return send(services[0], signal.SIGKILL, "lighthouse")


def term_launcher(case: Case, dice: random.Random) -> Struck:
    """SIGTERM to what was started, as a scheduler does it."""
    wait_for_some_step(case, dice)
    struck = Struck(time.monotonic(), "launcher")
    for launcher in case.launchers:
        launcher.send_signal(signal.SIGTERM)
    return struck


# --- inside a rank

MARK = "struck"


def inside(kind: str, rank: int | None = None) -> Callable[[Path, random.Random], Mapping[str, str]]:
    """`harm.py` strikes at some step; a save is at a multiple of `EVERY`."""

    def environ(folder: Path, dice: random.Random) -> Mapping[str, str]:
        who = dice.randrange(2) if rank is None else rank
        step = EVERY * dice.randrange(2, 7) if kind == "die" else dice.randrange(FIRST, LAST)
        return {"FAULT_HARM": f"{kind}:{who}:{step}:{folder / MARK}"}

    return environ


def wait_for_mark(suffix: str = "") -> Callable[[Case, random.Random], Struck]:
    """The mark is made at the moment of the fault."""

    def act(case: Case, dice: random.Random) -> Struck:
        mark = (case.folder / MARK).with_suffix(suffix)
        case.wait_until(mark.exists)
        return Struck(mark.stat().st_ctime - time.time() + time.monotonic(), "a rank")

    return act


def mend_code(case: Case) -> str:
    (case.folder / MARK).touch()
    return "mend the code"


# --- checkpoints


def damage_newest(harm: Callable[[Path, random.Random], None]) -> Callable[[Case, random.Random], Struck]:
    """kill -9 all but services, damage the newest checkpoint, and start again; that start is when it counts from."""

    def act(case: Case, dice: random.Random) -> Struck:
        wait_for_some_step(case, dice)
        case.wait_until(lambda: case.tool.newest(case.folder) is not None)
        case.end_ranks_and_launchers()
        newest = case.tool.newest(case.folder)
        assert newest is not None
        harm(newest, dice)
        struck = Struck(time.monotonic(), "newest checkpoint")
        case.start()
        return struck

    return act


def flip_bit(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def finds_failed_start(records: list[Record], since: float) -> bool:
    """Whether the start at that time has brought no step."""
    return not any(record.time > since for record in records)


DAMAGE = r"PytorchStreamReader|invalid load key|Unpickling|EOFError|Error\(|Error:|damaged|set aside"

FAULTS = (
    Fault("SIGKILL of rank 1", signal_rank(signal.SIGKILL, 1)),
    Fault("SIGKILL of rank 0", signal_rank(signal.SIGKILL, 0)),
    Fault(
        "SIGKILL of a rank after more than a minute",
        signal_rank(signal.SIGKILL, steps=LATE),
        lambda folder, dice: LONG,
    ),
    Fault("SIGKILL of the launcher", kill_launcher, lambda folder, dice: SLOW),
    Fault("SIGKILL of the lighthouse", kill_lighthouse, tools=("torchft",)),
    Fault("SIGSTOP of a rank", signal_rank(signal.SIGSTOP)),
    Fault("hang with Python's lock held", wait_for_mark(), inside("hang")),
    Fault("SIGKILL in the middle of a save", wait_for_mark(), inside("die", 0)),
    Fault("one bit of the newest checkpoint flipped", damage_newest(flip_bit), signs=DAMAGE),
    Fault("newest checkpoint cut off", damage_newest(truncate), signs=DAMAGE),
    Fault("SIGTERM to the launcher", term_launcher),
    Fault(
        "SIGTERM to the launcher, caught by the script",
        term_launcher,
        lambda folder, dice: {"FAULT_CATCH_TERM": "1"},
        tools=("torchrun", "ft_launcher"),
    ),
    Fault("user's code raises, until mended", wait_for_mark(".first"), inside("raise"), mend=mend_code),
)
