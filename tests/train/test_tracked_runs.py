"""Runs with trackers: rank 0 writes what it records, a resumed run goes on, and no failure of a tracker is one of the
run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from event_files import read_scalars
from pool import ranks
from runs import COMMON, Died, die_at, lone_rank, open_tiny, pool_ranks, read_column, read_named, train_tiny

TRACKED = ('track.to=["tensorboard"]', "train.steps=6", "checkpoint.every=2 steps")
FOLDER = "tensorboard"


@ranks(2)
def test_rank_0_writes_every_step_and_a_resumed_run_goes_on(rank: int, tmp_path: Path) -> None:
    words = (*TRACKED, "parallel.dp_shard=2", "parallel.dp_replicate=1", "train.validate_every=3 steps")
    with pytest.raises(Died):
        train_tiny(tmp_path, pool_ranks(), *words, before_step=die_at(5))
    train_tiny(tmp_path, pool_ranks(), *words)
    if rank:
        return
    first, second = (
        read_scalars(path) for path in sorted((tmp_path / FOLDER).iterdir(), key=lambda p: p.stat().st_mtime_ns)
    )
    assert [step for step, values in first if "loss" in values] == [1, 2, 3, 4, 5]
    assert second[0] == (5, {})  # what was of step 5 is undone
    found = {step: values["loss"] for step, values in (*first, *second) if "loss" in values}
    assert [found[step] for step in range(1, 7)] == pytest.approx(read_column(tmp_path))
    validated = {step: values for step, values in (*first, *second) if "validation/loss" in values}
    assert {event["step"]: event["loss"] for event in read_named(tmp_path, "validation")} == pytest.approx(
        {step: values["validation/loss"] for step, values in validated.items()}
    )


def test_what_a_script_logs_is_tracked(tmp_path: Path) -> None:
    with open_tiny(tmp_path, lone_rank(), *TRACKED, base=COMMON) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.zeros(16, 1))
        for batch in run.steps(run.loader(data, batch_size=4)):
            run.step(model, batch, nn.functional.mse_loss)
            run.log(accuracy=run.step_number / 8)
    [path] = (tmp_path / FOLDER).iterdir()
    rows = [(step, values) for step, values in read_scalars(path) if "accuracy" in values]
    assert rows == [(step, {"accuracy": (step - 1) / 8}) for step, _ in rows]
    assert len(rows) == 6


def test_a_tracker_that_fails_is_an_event(tmp_path: Path) -> None:
    words = (*TRACKED, 'track.settings={tensorboard = {folder = "/proc/nowhere"}}')
    outcome = train_tiny(tmp_path / "run", lone_rank(), *words)
    assert (outcome.state, outcome.step) == ("finished", 6)
    [failed] = read_named(tmp_path / "run", "tracker_failed")
    assert failed["tracker"] == "tensorboard"
    assert failed["reason"].startswith("is switched off for this attempt: FileNotFoundError")


def test_without_trackers_there_is_no_thread(tmp_path: Path) -> None:
    with open_tiny(tmp_path, lone_rank()) as run:
        run.session.begin()
        assert run.session.recorder.trackers is None
