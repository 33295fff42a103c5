"""What is different when a run goes on: its data, its run file, how many ranks there are and how they share the work.

Invariant: all processes are killed before anything changes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from commands import Command
from faults.strike import Aftermath, Fault, Struck, kill_all, wait_for_some_step
from runs import layout

CLOSE = 1e-5
"""How far a loss may be from that of another layout, relative: sums are added in another order."""

DATA = "tokens.npy"
_FROM_FILE = ("data.kind=tokens", f"data.path={{folder}}/{DATA}", "data.validation_fraction=0.1")


def make_tokens(folder: Path) -> None:
    """A token file of some hundred samples."""
    np.save(folder / DATA, np.random.default_rng(7).integers(0, 32, 12 * 120 + 1, dtype=np.uint16))


def _kill_and_try(command: Command, dice: random.Random, whom: str, *words: str) -> tuple[Struck, str]:
    """kill -9 all; the same command, with further words, has to be refused before it changes anything."""
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), whom)
    kill_all(command)
    return struck, _refused(command, *words)


def _refused(command: Command, *words: str) -> str:
    before = command.run.checkpoint_steps()
    code, said = command.again(*words).end()
    assert code == 2, said
    assert "Traceback" not in said
    assert command.run.checkpoint_steps() == before
    return said


def change_data(command: Command, dice: random.Random) -> Struck:
    """One token is another when the run is to go on; then the file is what it was."""
    path = command.home / DATA
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "data")
    kill_all(command)
    whole = path.read_bytes()
    tokens = np.load(path)
    place = dice.randrange(len(tokens))
    tokens[place] = (tokens[place] + 1) % 32
    np.save(path, tokens)
    said = _refused(command)
    assert "the training data is not what the first" in said
    assert "restore the data, or start over with --fresh" in said
    path.write_bytes(whole)
    return struck


def remove_data(command: Command, dice: random.Random) -> Struck:
    """The data file is gone when the run is to go on; then it is back."""
    path = command.home / DATA
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "data")
    kill_all(command)
    path.rename(path.with_suffix(".away"))
    said = _refused(command)
    assert "data.path" in said
    assert str(path) in said
    path.with_suffix(".away").rename(path)
    return struck


def cut_data(command: Command, dice: random.Random) -> Struck:
    """The data file is cut off when the run is to go on; then it is whole."""
    path = command.home / DATA
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "data")
    kill_all(command)
    whole = path.read_bytes()
    path.write_bytes(whole[: dice.randrange(200, len(whole))])
    assert "the file is truncated or damaged" in _refused(command)
    path.write_bytes(whole)
    return struck


def change_model(command: Command, dice: random.Random) -> Struck:
    """A key that decides what the weights mean is another; then it is as it was."""
    key, value = dice.choice(
        (("model.dim", "32"), ("model.layers", "3"), ("train.seed", "5"), ("data.seq_len", "10"), ("optim.name", "sgd"))
    )
    struck, said = _kill_and_try(command, dice, "run file", f"{key}={value}")
    assert key in said
    assert "restore the value, choose another directory with --dir" in said
    return struck


def change_free_key(command: Command, dice: random.Random) -> Struck:
    """A key that may change is another from then on."""
    wait_for_some_step(command, dice)
    struck = Struck(time.time(), "run file")
    kill_all(command)
    return Struck(struck.time, struck.whom, command.again("checkpoint.keep=7"))


def tells_change(after: Aftermath) -> None:
    """The start says which key changed, from what to what."""
    assert after.events("started")[-1]["changed"] == {"checkpoint.keep": [3, 7]}


def go_on_with(*words: str) -> Callable[[Command, random.Random], Struck]:
    """kill -9 all; then the run goes on with these words besides."""

    def act(command: Command, dice: random.Random) -> Struck:
        wait_for_some_step(command, dice)
        struck = Struck(time.time(), "layout")
        kill_all(command)
        return Struck(struck.time, struck.whom, command.again(*words))

    return act


def _world_fault(name: str, *words: str, base: tuple[str, ...] = (), ranks: int = 2) -> Fault:
    """Goes on with so many ranks. With micro-batches of one size everywhere, dropout draws the same masks."""
    return Fault(
        f"goes on with {name}",
        go_on_with("--nproc", str(ranks), *words),
        restarts_itself=False,
        is_further=True,
        base=("train.micro_batch=2", *base),
        tolerance=CLOSE,
        least_ranks=max(2, ranks),
    )


def _data_fault(name: str, act: Callable[[Command, random.Random], Struck]) -> Fault:
    return Fault(name, act, restarts_itself=False, is_further=True, base=_FROM_FILE, prepare=make_tokens)


FAULTS = (
    _data_fault("data file changed, until it is back", change_data),
    _data_fault("data file missing, until it is back", remove_data),
    _data_fault("data file cut off, until it is back", cut_data),
    Fault("run file changed in what must not", change_model, restarts_itself=False, is_further=True),
    Fault(
        "run file changed in what may",
        change_free_key,
        restarts_itself=False,
        is_further=True,
        expects=tells_change,
    ),
    _world_fault("1 rank", ranks=1),
    _world_fault("3 ranks", base=("train.global_batch=12",), ranks=3),
    _world_fault("4 ranks", ranks=4),
    _world_fault("8 ranks", base=("train.global_batch=16",), ranks=8),
    _world_fault("2 ranks that hold the whole model each", *layout(2, 1)),
    _world_fault("2 ranks that hold half of each matrix", "parallel.tp=2", "parallel.tp_sequence=false"),
    _world_fault("2 stages of a pipeline", "parallel.pp=2", base=("model.tied=false",)),
    _world_fault("4 ranks, two copies of two shards", *layout(2, 2), ranks=4),
)
