"""`--search optuna`: what is chosen from the results of runs, and what the same command goes on with."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Shardway

from shardway.cli import sweep_search
from shardway.cli.sweep_search import choose_values
from shardway.launch.submission import array
from shardway.launch.sweep.axes import read_axes
from shardway.launch.sweep.record import Member, SweepRecord, name_members
from shardway.rundir.attempts import Ending, Result
from shardway.rundir.directory import RunDir
from shardway.units import LOSS

optuna = pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
optuna.logging.set_verbosity(optuna.logging.WARNING)

WORDS = ("optim.lr=log:1e-5..1e-1", "train.seed=0..9", "optim.schedule=constant,cosine")


def search(rounds: int, batch: int) -> list[Member]:
    """Rounds of a search whose loss is the distance of the learning rate from 1e-3 in orders of magnitude."""
    axes = read_axes(WORDS, search="optuna").axes
    record = SweepRecord("my", "optuna", "", "", (), {axis.key: axis.text for axis in axes}, (), seed=1)
    for _ in range(rounds):
        results = {
            member.name: abs(math.log10(float(member.values["optim.lr"])) + 3)
            for member in record.members
            if member.name != "001"  # which has failed
        }
        chosen = choose_values(optuna, axes, record, results, LOSS, batch)
        record = replace(record, members=(*record.members, *name_members(chosen, len(record.members))))
    return [*record.members]


def test_later_values_are_better_than_the_first() -> None:
    members = search(rounds=6, batch=5)
    distances = [abs(math.log10(float(member.values["optim.lr"])) + 3) for member in members]
    assert sum(distances[-10:]) < sum(distances[:10])
    assert [member.name for member in members[:2]] == ["000", "001"]
    assert all(member.values["optim.schedule"] in ("constant", "cosine") for member in members)
    assert search(rounds=2, batch=5) == members[:10], "the record and the results alone decide"


def test_the_command_goes_on_with_what_is_recorded(
    tmp_path: Path, shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier one was ended between two batches; a run that has failed is not started again."""
    submitted: list[list[str]] = []

    def submit(asked: array.ArrayRequest, host: object, submitter: object, prepared: Sequence[array.Prepared]) -> list:
        submitted.append([Path(str(request.run_request.directory)).name for request in asked.requests])
        sent = []
        for each in prepared:
            attempt = RunDir(each.job.run).attempt(1)
            attempt.make()
            state = Ending.CRASHED if each.job.run.name == "001" else Ending.FINISHED
            attempt.write_result(Result(state, "by the test", job="1", by="rank 0"))
            sent.append(array.SentSubmission(each, "1"))
        return sent

    monkeypatch.setattr(array, "submit_array", submit)
    monkeypatch.setattr(sweep_search, "read_values", lambda folder, record, monitor: {"000": 2.0, "002": 1.0})
    words = ("sweep", "run.name=my", *WORDS, "--search", "optuna", "--max-parallel", "2", "--trials")
    told = json.loads(shardway(*words, "3", "--json").out)
    assert submitted == [["000", "001"], ["002"]]
    assert told["best"] == "002"
    assert shardway(*words, "4").code == 0
    assert submitted[2:] == [["003"]]
    other = shardway("sweep", "run.name=my", "optim.lr=1e-3..1", "--search", "optuna", "--trials", "4")
    assert "holds a search of other axes" in other.err
