"""What a disturbed run has to come out as: the numbers and samples of one that nothing happened to.

Invariant: losses, gradient norms and samples are compared to the bit unless a tolerance is given; a checkpoint that is
not whole fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import Command
from runs import read_column, read_steps
from shardway.checkpoint.catalog import verify_checkpoint
from shardway.rundir.directory import RunDir


def finished(command: Command, told: list[str]) -> bool:
    """Wait for the end of a command and note what it said; whether the run is at its end, with none of its processes
    left."""
    code, said = command.end()
    told.append(said)
    assert command.left_alive() == []
    assert "Traceback" not in said, said
    state = command.run.read_status().get("state")
    assert code == 0 or state != "finished", said
    return code == 0 and state == "finished"


def compare(folder: Path, other: Path, tolerance: float) -> None:
    """The same numbers from the same samples, and nothing but whole checkpoints."""
    for column in ("step", "loss", "grad_norm", "lr"):
        assert read_column(folder, column) == _near(read_column(other, column), tolerance)
    assert _samples(folder) == _samples(other)
    assert tolerance or used_samples(folder) == used_samples(other)
    assert _validations(folder) == _near(_validations(other), tolerance)
    run = RunDir(folder)
    assert run.checkpoint_steps()[-1] == 160
    for step in run.checkpoint_steps():
        verify_checkpoint(run, step)


def _near(numbers: Any, tolerance: float) -> Any:
    return pytest.approx(numbers, rel=tolerance) if tolerance else numbers


def used_samples(folder: Path) -> dict[int, list[Any]]:
    """Step -> the samples of each rank."""
    samples: dict[int, list[Any]] = {}
    for rank in RunDir(folder).ranks_with_events():
        for event in read_steps(folder, rank):
            samples.setdefault(event["step"], []).append(event["ids"])
    return samples


def _samples(folder: Path) -> dict[int, list[int]]:
    """Step -> its samples, whoever used them; ranks that work on the same share count as one."""
    shares = {step: {tuple(ids) for ids in of_ranks} for step, of_ranks in used_samples(folder).items()}
    return {step: sorted(sample for share in of_step for sample in share) for step, of_step in shares.items()}


def _validations(folder: Path) -> dict[int, float]:
    """Step -> the loss on held-out data."""
    return {event["step"]: event["loss"] for event in RunDir(folder).events() if event["event"] == "validation"}
