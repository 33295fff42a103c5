"""A rank that hangs in a training run: what is told of it, and where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Start, stalling, training_commands
from runs import TINY, read_named

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with training_commands(tmp_path) as go:
        yield go


def test_a_hang_names_who_has_not_entered_what_the_others_are_in(start: Start, tmp_path: Path) -> None:
    words = ("--nproc", "2", "run.max_restarts=0", "run.hang_timeout=3s", *TINY, "train.steps=1000")
    command = start("run", *words, environ=stalling(1, 5, tmp_path / "stalled"))
    code, said = command.end()
    assert code == 4
    (first, *others) = said[said.index("shardway: rank 1 did nothing for") :].splitlines()
    assert " while waiting for data after step 5 (more than 3.0 s means a hang): rank 0 is in all_reduce of " in first
    assert " of ranks 0 and 1 (gloo), which rank 1 has not entered (the last one there was all_reduce of " in first
    assert first.endswith("; all ranks were ended.")
    assert [line.partition(":")[0] for line in others[:2]] == ["  rank 0", "  rank 1"]
    assert command.run.read_status()["reason"] == first.removeprefix("shardway: ")
    (fault,) = [event for event in command.run.all_events(1) if event["event"] == "fault"]
    assert fault["message"] == first.removeprefix("shardway: ").removesuffix("; all ranks were ended.")
    (told,) = fault["collectives"]
    assert fault["message"].endswith(told)
    assert read_named(command.folder, "step")[-1]["step"] == 5
    assert command.left_alive() == []
