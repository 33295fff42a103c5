"""Faults of the file system that holds the run: full, without inodes, read-only, slow, or hanging for a while.

Invariant: it is a real one and the kernel's own refusals; it is well again before the run is judged.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil

from commands import Command, Room, injected
from faults.strike import (
    FIRST,
    Aftermath,
    Fault,
    Struck,
    any_rank,
    children,
    see,
    strike,
    wait_for,
    wait_for_some_step,
)
from faults.volume import Volume, ext4, tmpfs, with_quota

PACE = "SHARDWAY_TEST_PACE"
"""Seconds that each batch takes longer, for `inject/sitecustomize.py`: so that a disk can be ill while a run trains."""

RETRY = "SHARDWAY_TEST_RETRY"
"""Seconds after a save that failed until the next try, for `inject/sitecustomize.py`, in place of 30."""

SMALL = "size=8m,nr_inodes=200"
RARE = 40
"""Steps from one checkpoint to the next, so that a save that is tried again by the clock is at a step of its own."""

RETRY_S = 0.2
"""Ten steps at most, at the pace of these runs."""

_NO_ROOM = ("No space left", "no space is left", "are free", "inodes", "quota of this user")

SHORT_S = 4.0
"""How long a disk is ill where people speak of a minute."""

LONG_S = 12.0
"""Longer than a holder of the run can be without a beat and not doubt itself (10 s)."""


def volume_of(command: Command) -> Volume:
    """The file system that a command writes into."""
    assert isinstance(command.room, Volume)
    return command.room


# --- what


def _after_next_save(command: Command, every: int) -> None:
    """Until rank 0 has tried one more save, and trains on."""
    entry = see(command, 0)
    due = ((entry.step if entry is not None else 0) // every + 1) * every
    wait_for(command, 0, lambda entry: entry.step > due + 1)


def full_in_save(command: Command, dice: random.Random) -> Struck:
    """Not a byte is left from some step until a save was tried."""
    return _ill(command, dice, Volume.fill)


def no_inodes_in_save(command: Command, dice: random.Random) -> Struck:
    """Not a file can be made from some step until a save was tried."""
    return _ill(command, dice, Volume.use_up_names)


def _ill(command: Command, dice: random.Random, harm: Callable[[Volume], None]) -> Struck:
    volume, step = volume_of(command), dice.randrange(FIRST, 75)
    wait_for(command, 0, lambda entry: entry.step >= step)
    struck = Struck(time.time(), "disk")
    harm(volume)
    try:
        _after_next_save(command, RARE)
        time.sleep(dice.uniform(0.0, 0.3))
        _free_long_before_a_save(command, volume)
    finally:
        volume.free()
    return struck


def _free_long_before_a_save(command: Command, volume: Volume) -> None:
    """When the next is more than a few `RETRY_S` away, so that it is the clock that the one that failed is tried again
    by; the ranks stand still meanwhile, and go on from there."""
    is_early = False
    while not is_early:
        assert command.process.poll() is None, command.process.communicate()
        ranks = list(children(command).values())
        for process in ranks:
            process.suspend()
        entry = see(command, 0)
        is_early = entry is not None and 1 < entry.step % RARE <= RARE // 2
        if is_early:
            volume.free()
        for process in ranks:
            process.resume()
        time.sleep(0.0 if is_early else 0.05)


def full_for_events(command: Command, dice: random.Random) -> Struck:
    """Not a byte is left while steps are recorded and no save is due."""
    volume, step = volume_of(command), dice.randrange(85, 110)
    wait_for(command, 0, lambda entry: entry.step >= step)
    struck = Struck(time.time(), "disk")
    volume.fill()
    try:
        wait_for(command, 0, lambda entry: entry.step >= step + 30)
    finally:
        volume.free()
    return struck


def full_to_the_end(command: Command, dice: random.Random) -> Struck:
    """Not a byte is left until the run has ended with what it has to say; then there is room, and it is given again."""
    volume = volume_of(command)
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "disk")
    volume.fill()
    try:
        code, said = command.end()
    finally:
        volume.free()
    assert code == 4, said
    assert "Traceback" not in said
    assert "To do: make room" in said, said
    assert "run the same command again" in said, said
    return struck


def read_only(command: Command, dice: random.Random) -> Struck:
    """No file can be opened for writing for some seconds."""
    volume, step = volume_of(command), dice.randrange(FIRST, 50)
    wait_for(command, 0, lambda entry: entry.step >= step)
    struck = Struck(time.time(), "disk")
    volume.forbid_writing()
    try:
        time.sleep(SHORT_S)
    finally:
        volume.allow_writing()
    return struck


def read_only_and_kill(command: Command, dice: random.Random) -> Struck:
    """A rank is killed while no file can be opened for writing; the run ends with what it has to say, and is given
    again when writing is allowed."""
    volume = volume_of(command)
    wait_for_some_step(command, dice)
    volume.forbid_writing()
    try:
        struck = strike(children(command)[any_rank(dice)], signal.SIGKILL, "disk and a rank")
        code, said = command.end()
    finally:
        volume.allow_writing()
    assert code == 4, said
    assert "Traceback" not in said
    assert "Read-only file system" in said, said
    return struck


def hang(seconds: float) -> Callable[[Command, random.Random], Struck]:
    """Whoever writes waits for so long."""

    def act(command: Command, dice: random.Random) -> Struck:
        wait_for_some_step(command, dice)
        struck = Struck(time.time(), "disk")
        with volume_of(command).frozen():
            time.sleep(seconds)
        return struck

    return act


def slow(command: Command, dice: random.Random) -> Struck:
    """Each write may take a third of a second, for some seconds."""
    step = dice.randrange(FIRST, 50)
    wait_for(command, 0, lambda entry: entry.step >= step)
    struck = Struck(time.time(), "disk")
    volume_of(command).freeze_now_and_then(SHORT_S, 0.3, 0.05)
    return struck


def hang_and_kill(command: Command, dice: random.Random) -> Struck:
    """Whoever writes waits, and is killed meanwhile; processes that wait in the kernel end when it lets them."""
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "disk, agent and ranks")
    with volume_of(command).frozen():
        time.sleep(dice.uniform(0.0, 1.0))
        command.note_processes()
        for process in command.seen:
            with suppress(psutil.Error):
                process.kill()
    command.end()
    psutil.wait_procs(command.seen, timeout=20)
    return struck


# --- what is expected


def goes_on_after_failed_save(after: Aftermath) -> None:
    """A save failed, was told with its reason, and tried again before the next one was due; nothing started again."""
    failed = after.events("save_failed")
    assert failed
    assert after.restarts == 0
    for each in failed:
        assert any(words in each["reason"] for words in _NO_ROOM), each
    assert any(each["step"] % RARE for each in after.events("saved")), "it was tried again by the clock"


def goes_on_after_refused_save(after: Aftermath) -> None:
    """As above, on a file system that was read-only."""
    assert any("Read-only file system" in each["reason"] for each in after.events("save_failed"))
    assert after.restarts == 0
    assert [each["step"] for each in after.events("saved")][-1] == 160


def tells_events_late(after: Aftermath) -> None:
    """Nothing started again, and what could not be written was written later, in order."""
    assert after.restarts == 0
    assert [each["reason"] for each in after.events("recorded_late")] == ["No space left on device"]


def nothing_started_again(after: Aftermath) -> None:
    """It waited, and went on."""
    assert after.restarts == 0
    assert len(after.events("started")) == 1


# --- where


def on_tmpfs(folder: Path) -> AbstractContextManager[Room]:
    return tmpfs(folder, SMALL)


def within_quota(folder: Path) -> AbstractContextManager[Room]:
    return with_quota(folder, 24)


def on_ext4(folder: Path) -> AbstractContextManager[Room]:
    return ext4(folder, 32)


def paced(seconds: float, retry_s: float = 30.0) -> Callable[[Path, random.Random], Mapping[str, str]]:
    def environ(folder: Path, dice: random.Random) -> Mapping[str, str]:
        return injected(**{PACE: str(seconds), RETRY: str(retry_s)})

    return environ


_RARELY = (f"checkpoint.every={RARE} steps",)
_BEHIND = ("checkpoint.background=true",)

FAULTS = (
    Fault(
        "disk full in a save",
        full_in_save,
        _RARELY,
        paced(0.02, RETRY_S),
        room=on_tmpfs,
        expects=goes_on_after_failed_save,
        is_further=True,
    ),
    Fault(
        "disk full in a save in the background",
        full_in_save,
        (*_RARELY, *_BEHIND),
        paced(0.02, RETRY_S),
        room=on_tmpfs,
        expects=goes_on_after_failed_save,
        is_further=True,
    ),
    Fault(
        "inodes used up in a save",
        no_inodes_in_save,
        _RARELY,
        paced(0.02, RETRY_S),
        room=on_tmpfs,
        expects=goes_on_after_failed_save,
        is_further=True,
    ),
    Fault(
        "quota used up in a save",
        full_in_save,
        _RARELY,
        paced(0.02, RETRY_S),
        room=within_quota,
        expects=goes_on_after_failed_save,
        is_further=True,
    ),
    Fault(
        "disk full while events are written",
        full_for_events,
        ("checkpoint.every=80 steps",),
        paced(0.01),
        room=on_tmpfs,
        expects=tells_events_late,
        is_further=True,
    ),
    Fault(
        "disk full to the end",
        full_to_the_end,
        room=on_tmpfs,
        restarts_itself=False,
        is_further=True,
    ),
    Fault(
        "file system read-only for 4 s",
        read_only,
        (),
        paced(0.06, 1.0),
        room=on_tmpfs,
        expects=goes_on_after_refused_save,
        is_further=True,
    ),
    Fault(
        "SIGKILL of a rank while the file system is read-only",
        read_only_and_kill,
        (),
        paced(0.02),
        room=on_tmpfs,
        restarts_itself=False,
        is_further=True,
    ),
    Fault("file system hangs for 4 s", hang(SHORT_S), room=on_ext4, expects=nothing_started_again, is_further=True),
    Fault(
        "file system hangs for 12 s",
        hang(LONG_S),
        _BEHIND,
        paced(0.02),
        room=on_ext4,
        expects=nothing_started_again,
        is_further=True,
    ),
    Fault(
        "file system slow for 4 s",
        slow,
        (),
        paced(0.03),
        room=on_ext4,
        expects=nothing_started_again,
        is_further=True,
    ),
    Fault(
        "SIGKILL of all while the file system hangs",
        hang_and_kill,
        room=on_ext4,
        restarts_itself=False,
        is_further=True,
    ),
)
