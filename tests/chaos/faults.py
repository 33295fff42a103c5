"""What can happen to two ranks and their agent, each at a moment that a seed chooses.

Invariant: a fault is real (a signal, a file, a process), strikes only processes of the command that it is given, and
strikes once. What has to come of it is for the test to say.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from commands import Command
from shardway.ranks.agent.page import VARIABLE, Entry, page_path, read_page
from shardway.ranks.progress import Activity

HANG = "SHARDWAY_TEST_HANG"
"""RANK:STEP:FILE for `inject/sitecustomize.py`: that rank hangs once it has done that many steps, if FILE is new."""

SLOW = "SHARDWAY_TEST_SLOW"
"""Seconds that each batch of a validation takes longer, for `inject/sitecustomize.py`."""

STALL = "SHARDWAY_TEST_STALL"
"""RANK:BATCH:FILE for `inject/sitecustomize.py`: that rank waits an hour for that batch of training, if FILE is new."""

STOPS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)

FIRST, LAST = 22, 130
"""Steps between which most faults strike: after the first checkpoint, and with some to come."""


@dataclass(frozen=True)
class Struck:
    """When a fault struck (Unix seconds, this host), and whom."""

    time: float
    whom: str


@dataclass(frozen=True)
class Fault:
    """A fault: its name in the table, what strikes, and what the run needs for it besides."""

    name: str
    strike: Callable[[Command, random.Random], Struck]
    words: tuple[str, ...] = ()
    environ: Callable[[Path, random.Random], Mapping[str, str]] = field(default=lambda folder, dice: {})
    restarts_itself: bool = True
    """Whether nobody has to give the command again."""
    is_further: bool = False
    """Whether `make test` leaves it out, since other tests or another fault show much of it."""


# --- whom


def children(command: Command) -> dict[int, psutil.Process]:
    """The ranks that live, by number."""
    found = {}
    for child in psutil.Process(command.process.pid).children(recursive=False):
        try:
            if "shardway.cli.rank" in " ".join(child.cmdline()):
                found[int(child.environ()["RANK"])] = child
        except psutil.Error:  # it ends at this moment
            continue
    return found


def see(command: Command, rank: int) -> Entry | None:
    """What a rank shows its agent."""
    child = children(command).get(rank)
    try:
        folder = child.environ().get(VARIABLE, "") if child is not None else ""
    except psutil.Error:
        return None
    return read_page(page_path(Path(folder), rank)) if folder else None


def wait_for(command: Command, rank: int, holds: Callable[[Entry], bool]) -> None:
    """Until what a rank shows is so."""
    command.wait_until(lambda: (entry := see(command, rank)) is not None and holds(entry))
    command.note_processes()


def wait_for_some_step(command: Command, dice: random.Random) -> None:
    """Until a moment within a random step, wherever the ranks are then."""
    step = dice.randrange(FIRST, LAST)
    wait_for(command, 0, lambda entry: entry.step >= step)
    time.sleep(dice.uniform(0.0, 0.02))


def strike(process: psutil.Process, number: signal.Signals, whom: str) -> Struck:
    """Send a signal."""
    struck = Struck(time.time(), whom)
    process.send_signal(number)
    return struck


# --- what


def signal_rank(number: signal.Signals, rank: int | None = None) -> Callable[[Command, random.Random], Struck]:
    """A signal to one rank (None: any) at some step."""

    def act(command: Command, dice: random.Random) -> Struck:
        wait_for_some_step(command, dice)
        who = dice.randrange(2) if rank is None else rank
        return strike(children(command)[who], number, f"rank {who}")

    return act


def kill_while(activity: Activity) -> Callable[[Command, random.Random], Struck]:
    """kill -9 a rank that is busy with this."""

    def act(command: Command, dice: random.Random) -> Struck:
        who = dice.randrange(2)
        least = dice.randrange(FIRST, LAST) if activity is not Activity.START else 0
        wait_for(command, who, lambda entry: entry.activity is activity and entry.step >= least)
        time.sleep(dice.uniform(0.0, 0.5 if activity is Activity.START else 0.03))
        return strike(children(command)[who], signal.SIGKILL, f"rank {who}")

    return act


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
        who = dice.randrange(2)
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
    wait_for(again, dice.randrange(2), lambda entry: entry.activity is Activity.LOAD)
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
    mark = command.folder.parent / "stalled"
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
    command.wait_until(command.run.stop_requested)
    agent.send_signal(signal.SIGINT)
    code, said = command.end()
    assert code in (0, 130), said  # 0: it was gone before
    return struck


def kill_agent(command: Command, dice: random.Random) -> Struck:
    """kill -9 the process that started the ranks."""
    wait_for_some_step(command, dice)
    return strike(psutil.Process(command.process.pid), signal.SIGKILL, "agent")


def kill_loader(command: Command, dice: random.Random) -> Struck:
    """kill -9 a process that loads data for a rank."""
    wait_for_some_step(command, dice)
    who = dice.randrange(2)
    workers = [each for each in children(command)[who].children() if "resource_tracker" not in " ".join(each.cmdline())]
    return strike(dice.choice(workers), signal.SIGKILL, f"loader of rank {who}")


def ask_to_stop(command: Command, dice: random.Random) -> Struck:
    """`touch stop`."""
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "run")
    command.run.request_stop("")
    return struck


def launch_twice(command: Command, dice: random.Random) -> Struck:
    """The same command once more beside the first."""
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "run")
    again = command.again()
    code, said = again.end()
    assert code == 2, said
    assert "another run is training into" in said
    return struck


def damage_newest(command: Command, dice: random.Random) -> Struck:
    """kill -9 the agent and all ranks, then damage the newest checkpoint in one of many ways."""
    wait_for_some_step(command, dice)
    command.wait_until(lambda: len(command.run.checkpoint_steps()) > 1)
    struck = Struck(time.time(), "newest checkpoint")
    for process in (psutil.Process(command.process.pid), *children(command).values()):
        process.kill()
    command.end()
    newest = command.run.checkpoint_path(command.run.checkpoint_steps()[-1])
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    dice.choice((_flip, _truncate, _zero, _remove, _empty))(dice.choice(files), dice)
    return struck


def _flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def _zero(path: Path, dice: random.Random) -> None:
    """A block that never reached the disk; set to ones where it was zeros."""
    data = bytearray(path.read_bytes())
    start = dice.randrange(len(data))
    length = min(4096, len(data) - start)
    fill = b"\0" if any(data[start : start + length]) else b"\1"
    data[start : start + length] = fill * length
    path.write_bytes(data)


def _remove(path: Path, dice: random.Random) -> None:
    path.unlink()


def _empty(path: Path, dice: random.Random) -> None:
    """A folder half deleted."""
    for each in dice.sample(sorted(path.parent.iterdir()), k=max(1, len(list(path.parent.iterdir())) // 2)):
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def injected(**variables: str) -> dict[str, str]:
    """What makes every Python of a command import `inject/sitecustomize.py`, and tells it what to do."""
    where = Path(__file__).parent / "inject"
    path = os.pathsep.join([str(where), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {**variables, "PYTHONPATH": path}


def hangs_once(folder: Path, dice: random.Random) -> dict[str, str]:
    """A rank that holds Python's lock and does nothing, from some step on."""
    return injected(**{HANG: f"{dice.randrange(2)}:{dice.randrange(FIRST, LAST)}:{folder / 'hung'}"})


def validates_slowly(folder: Path, dice: random.Random) -> dict[str, str]:
    """A validation that takes seconds, so that it can be broken off."""
    return injected(**{SLOW: "0.2"})


def validates_for_ever() -> dict[str, str]:
    """A validation that waits an hour, where no wait for data can be ended."""
    return injected(**{SLOW: "3600"})


def stalls_once(folder: Path, dice: random.Random) -> dict[str, str]:
    """A rank that waits an hour for its data, at some step or at the first of the process."""
    batch = dice.choice((0, dice.randrange(FIRST, LAST)))
    return injected(**{STALL: f"{dice.randrange(2)}:{batch}:{folder / 'stalled'}"})


def wait_for_hang(command: Command, dice: random.Random) -> Struck:
    """The rank hangs by itself (`hangs_once`); when it did is the age of its mark."""
    mark = command.folder.parent / "hung"
    command.wait_until(mark.exists)
    command.note_processes()
    return Struck(mark.stat().st_mtime, "a rank")


FAULTS = (
    Fault("SIGKILL of rank 0", signal_rank(signal.SIGKILL, 0), is_further=True),
    Fault("SIGKILL of a rank", signal_rank(signal.SIGKILL), is_further=True),
    Fault("SIGKILL of a rank in a save", kill_while(Activity.SAVE)),
    Fault("SIGKILL of a rank that starts", kill_while(Activity.START), is_further=True),
    Fault("SIGKILL of the agent", kill_agent, restarts_itself=False),
    Fault("SIGKILL of a loader worker", kill_loader, words=("data.workers=1",)),
    Fault("SIGSTOP of a rank", signal_rank(signal.SIGSTOP), is_further=True),
    # Steps of milliseconds may be over before the rank hangs, and in a save it would be given a minute.
    Fault("hang with Python's lock held", wait_for_hang, ("run.hang_timeout=10s",), hangs_once),
    Fault("SIGTERM to a rank", signal_rank(signal.SIGTERM), restarts_itself=False, is_further=True),
    Fault("SIGUSR2 to a rank", signal_rank(signal.SIGUSR2), restarts_itself=False, is_further=True),
    Fault("stop file", ask_to_stop, restarts_itself=False, is_further=True),
    Fault("stop signal at the start", stop_while(Activity.START, 4.0), restarts_itself=False, is_further=True),
    Fault("stop signal in a load", stop_load, restarts_itself=False, is_further=True),
    Fault("stop signal in a validation", stop_while(Activity.VALIDATE, 0.5), (), validates_slowly, False),
    Fault("stop signal in a save", stop_while(Activity.SAVE, 0.02), restarts_itself=False, is_further=True),
    Fault("stop signal while data do not come", stop_stall, (), stalls_once, False, True),
    Fault("second Ctrl-C in a save", stop_save_twice, restarts_itself=False),
    Fault("stop file before the start", stop_before, restarts_itself=False, is_further=True),
    Fault("second launch of the run", launch_twice, is_further=True),
    Fault("newest checkpoint damaged", damage_newest, restarts_itself=False, is_further=True),
)
