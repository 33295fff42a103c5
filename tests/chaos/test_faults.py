"""Whatever happens, the run comes out as if nothing had happened.

python -m pytest tests/chaos                       each fault once
make chaos [TIMES=20]                              each fault so often, and the table of docs/faults.md
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import FAULTS, Fault, Struck, children, strike, validates_for_ever, wait_for

from commands import Command, Start, training_commands
from runs import TINY, read_column, read_steps
from shardway.ranks.progress import Activity
from shardway.rundir.directory import RunDir

pytestmark = pytest.mark.slow

TIMES = int(os.environ.get("SHARDWAY_CHAOS_TIMES", "1"))
WORDS = (
    *("--nproc", "2", *TINY, "train.steps=160", "checkpoint.every=20 steps", "model.dropout=0.1"),
    *("data.record_ids=true", "train.validate_every=50 steps"),
)
MOST_STARTS = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with training_commands(folder) as start:
        start("run", *WORDS).finish()
    return folder / "run"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("name", *words)` in a folder of that name."""
    with training_commands(tmp_path) as go:
        yield go


@pytest.mark.parametrize("seed", range(TIMES))
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[pytest.mark.exhaustive] if fault.is_further else [])
        for fault in FAULTS
    ],
)
def test_the_run_comes_out_as_if_nothing_had_happened(
    fault: Fault, seed: int, start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    dice = random.Random(f"{fault.name} {seed}")
    environ = fault.environ(tmp_path, dice)
    command = start("run", *WORDS, *fault.words, environ=environ)
    struck = fault.strike(command, dice)
    starts = 1
    while not _finished(command):
        assert starts < MOST_STARTS, command.run.read_status()
        command, starts = start("run", *WORDS, *fault.words, environ=environ), starts + 1
    assert starts == 1 or not fault.restarts_itself
    for column in ("step", "loss", "grad_norm", "lr"):
        assert read_column(command.folder, column) == read_column(undisturbed, column)
    assert _used(command.folder) == _used(undisturbed)
    assert _validations(command.folder) == _validations(undisturbed)
    _note(fault, seed, struck, starts, command.run)


@pytest.mark.exhaustive
def test_a_stop_that_takes_too_long_ends_the_run_with_the_reason(start: Start, undisturbed: Path) -> None:
    """A rank is in a validation that takes an hour; nothing starts again by itself, and the same command goes on."""
    command = start("run", *WORDS, "run.stop_timeout=3s", "run.collective_timeout=2s", environ=validates_for_ever())
    wait_for(command, 0, lambda entry: entry.activity is Activity.VALIDATE)
    strike(children(command)[0], signal.SIGTERM, "rank 0")
    code, said = command.end()
    assert code == 4
    assert (
        "the stop took longer than run.stop_timeout = 3s (command line), so rank 0 was ended in a validation." in said
    )
    assert "slowly (" in said, "where it was"
    assert command.left_alive() == []
    assert command.run.read_status()["state"] == "failed"
    start("run", *WORDS).finish()
    assert read_column(command.folder) == read_column(undisturbed)
    assert _validations(command.folder) == _validations(undisturbed)


def _finished(command: Command) -> bool:
    """Wait for the end of a command; whether the run is at its end, with none of its processes left."""
    code, said = command.end()
    assert command.left_alive() == []
    assert "Traceback" not in said, said
    state = command.run.read_status().get("state")
    assert code == 0 or state != "finished", said
    return code == 0 and state == "finished"


def _used(folder: Path) -> dict[int, list[Any]]:
    """Step -> the samples of each rank."""
    samples: dict[int, list[Any]] = {}
    for rank in RunDir(folder).ranks_with_events():
        for event in read_steps(folder, rank):
            samples.setdefault(event["step"], []).append(event["ids"])
    return samples


def _validations(folder: Path) -> dict[int, float]:
    """Step -> the loss on held-out data."""
    return {event["step"]: event["loss"] for event in RunDir(folder).events() if event["event"] == "validation"}


def _note(fault: Fault, seed: int, struck: Struck, starts: int, run: RunDir) -> None:
    """A line for the table where one is wanted."""
    path = os.environ.get("SHARDWAY_CHAOS_NOTES")
    if not path:
        return
    after = [event for event in run.all_events() if event["time"] > struck.time]
    begun = [event for event in after if event["event"] == "started"]
    steps = [event["time"] for event in after if event["event"] == "step"]
    lost = max(
        (event["step"] for event in run.all_events() if event["time"] <= struck.time and "loss" in event), default=0
    )
    again = begun[0]["time"] if begun else struck.time
    facts = {
        "fault": fault.name,
        "seed": seed,
        "whom": struck.whom,
        "starts": starts,
        "noticed_s": next((event["time"] - struck.time for event in after if event["event"] == "restarted"), None),
        "trains_s": next((time - struck.time for time in steps if time >= again), None),
        "steps_lost": max(0, lost - begun[0]["step"]) if begun else 0,
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")
