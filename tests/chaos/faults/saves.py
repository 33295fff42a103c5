"""Faults of checkpoints: a rank is killed in each phase of a save, or the newest is damaged after it was complete.

Invariant: only the newest checkpoint is damaged, so that an older one is whole.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from commands import Command, injected
from faults.strike import (
    EVERY,
    Aftermath,
    Fault,
    Struck,
    any_rank,
    children,
    kill_all,
    strike,
    wait_for_mark,
    wait_for_some_step,
)

KILL = "SHARDWAY_TEST_KILL"
"""RANK:PHASE:STEP:FILE for `inject/sitecustomize.py`: in that phase of the first save from STEP on that rank is killed
by itself, if FILE is new; FILE then says which step was saved."""

PHASES = {
    "while the state is collected": "collected",
    "while the state is copied": "staging",
    "while a shard is written": "writing",
    "before the rename": "unnamed",
    "after the rename": "named",
}
"""What the table says -> what `inject/sitecustomize.py` calls it."""

MARK = "killed"


# --- killed in a phase


def killed_in(phase: str) -> Callable[[Path, random.Random], Mapping[str, str]]:
    """Rank 0 alone renames; in the other phases any rank is struck."""

    def environ(folder: Path, dice: random.Random) -> Mapping[str, str]:
        rank = 0 if phase in ("unnamed", "named") else any_rank(dice)
        step = EVERY * dice.randrange(2, 7)
        return injected(**{KILL: f"{rank}:{phase}:{step}:{folder / MARK}"})

    return environ


def goes_on_from_before(after: Aftermath) -> None:
    """The save that was cut off has left no checkpoint."""
    assert _resumed(after) < _cut_off(after)


def goes_on_from_it(after: Aftermath) -> None:
    """The checkpoint had its name, so it is whole."""
    assert _resumed(after) == _cut_off(after)


def _cut_off(after: Aftermath) -> int:
    return int((after.home / MARK).read_text())


def _resumed(after: Aftermath) -> int:
    assert after.restarts == 1
    return int(after.events("started")[-1]["step"])


def _phase_fault(words: str, phase: str, *, background: bool) -> Fault:
    return Fault(
        f"SIGKILL {words}, {'in the background' if background else 'waited for'}",
        wait_for_mark(MARK),
        (f"checkpoint.background={str(background).lower()}",),
        killed_in(phase),
        is_further=True,
        expects=goes_on_from_it if phase == "named" else goes_on_from_before,
    )


# --- damaged

Harm = Callable[[Path, random.Random], None]


def damage_newest(harm: Harm) -> Callable[[Command, random.Random], Struck]:
    """kill -9 the agent and all ranks, then damage the newest checkpoint."""

    def act(command: Command, dice: random.Random) -> Struck:
        wait_for_some_step(command, dice)
        command.wait_until(lambda: len(command.run.checkpoint_steps()) > 1)
        struck = Struck(time.time(), "newest checkpoint")
        kill_all(command)
        harm(_newest(command), dice)
        return struck

    return act


def damage_while_on(command: Command, dice: random.Random) -> Struck:
    """Damage the newest checkpoint while the ranks train, then kill -9 one of them before they save another."""
    wait_for_some_step(command, dice)
    command.wait_until(lambda: len(command.run.checkpoint_steps()) > 1)
    for process in children(command).values():
        process.suspend()
    dice.choice(tuple(HARMS.values()))(_newest(command), dice)
    struck = strike(children(command)[any_rank(dice)], signal.SIGKILL, "newest checkpoint and a rank")
    for process in children(command).values():
        process.resume()
    return struck


def _newest(command: Command) -> Path:
    return command.run.checkpoint_path(command.run.checkpoint_steps()[-1])


def _shard(folder: Path, dice: random.Random) -> Path:
    return dice.choice(sorted(folder.glob("rank-*.bin")))


def flip_bit(folder: Path, dice: random.Random) -> None:
    path = _shard(folder, dice)
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def truncate(folder: Path, dice: random.Random) -> None:
    path = _shard(folder, dice)
    os.truncate(path, dice.randrange(path.stat().st_size))


def zero(folder: Path, dice: random.Random) -> None:
    """A block that never reached the disk; set to ones where it was zeros."""
    path = _shard(folder, dice)
    data = bytearray(path.read_bytes())
    start = dice.randrange(len(data))
    length = min(4096, len(data) - start)
    fill = b"\0" if any(data[start : start + length]) else b"\1"
    data[start : start + length] = fill * length
    path.write_bytes(data)


def remove_manifest(folder: Path, dice: random.Random) -> None:
    (folder / "manifest.json").unlink()


def half_delete(folder: Path, dice: random.Random) -> None:
    each = sorted(folder.iterdir())
    for path in dice.sample(each, k=max(1, len(each) // 2)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


HARMS: dict[str, Harm] = {
    "a shard cut off": truncate,
    "one bit of a shard flipped": flip_bit,
    "a block of a shard zeroed": zero,
    "manifest missing": remove_manifest,
    "half of its files deleted": half_delete,
}


def damage_all(command: Command, dice: random.Random) -> Struck:
    """kill -9 all, then damage every checkpoint: nothing is loaded, each is named, and nothing has changed; then they
    are what they were."""
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "all checkpoints")
    kill_all(command)
    run = command.run
    kept = command.home / "kept"
    shutil.copytree(run.checkpoints, kept)
    for step in run.checkpoint_steps():
        flip_bit(run.checkpoint_path(step), dice)
    steps = run.checkpoint_steps()
    code, said = command.again().end()
    assert code == 4, said
    assert run.checkpoint_steps() == steps
    for step in steps:
        assert f"step-{step:09d}" in said
    shutil.rmtree(run.checkpoints)
    shutil.copytree(kept, run.checkpoints)
    return struck


def set_aside(after: Aftermath) -> None:
    """The damaged checkpoint was set aside with the reason, and is told of."""
    (told,) = after.events("checkpoint_quarantined")
    assert told["reason"]
    assert (after.run.checkpoints / told["kept_as"]).is_dir()


FAULTS = (
    *(
        _phase_fault(words, phase, background=background)
        for words, phase in PHASES.items()
        for background in (False, True)
        if background or phase != "staging"
    ),
    *(
        Fault(
            f"newest checkpoint damaged: {words}",
            damage_newest(harm),
            restarts_itself=False,
            is_further=True,
            expects=set_aside,
        )
        for words, harm in HARMS.items()
    ),
    Fault("newest checkpoint damaged while the run is on", damage_while_on, is_further=True, expects=set_aside),
    Fault("every checkpoint damaged", damage_all, restarts_itself=False, is_further=True),
)
