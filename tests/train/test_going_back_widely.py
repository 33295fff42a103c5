"""Runs that go back before a spike, in every layout, and as processes that are killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.hooks import RemovableHandle

from commands import training_commands
from pool import ranks
from runs import Died, die_at, layout, pool_ranks, read_column, read_named, train_tiny
from shardway.rundir.directory import RunDir
from shardway.train.run import LiveRun

LAYOUTS = {
    "shards": layout(1, 2),
    "shards that stay whole": (*layout(1, 2), "parallel.reshard_after_forward=false", "train.micro_batch=2"),
    "shards in bf16": (*layout(1, 2), "precision.compute=bf16", "precision.weights=bf16", "optim.state_dtype=bf16"),
    "fp16": (*layout(2, 1), "precision.compute=fp16"),
    "tensor": ("parallel.tp=2",),
    "pipeline": ("parallel.pp=2", "model.tied=false"),
    "experts": ("model.experts=4", "parallel.dp_shard=2", "parallel.ep=2"),
    "workers": (*layout(2, 1), "data.workers=1", "train.validate_every=off"),
    "muon": (*layout(1, 2), "optim.name=muon"),
}
PICKED = ("shards that stay whole",)
WORDS = (
    *("train.steps=32", "optim.warmup=0 steps", "model.dropout=0.1", "data.samples=400", "checkpoint.every=6 steps"),
    *("train.validate_every=8 steps", "data.validation_fraction=0.05", "train.validation_samples=16"),
    *("guard.spike=30.0", "checkpoint.keep=1"),
)
BACK = ("guard.on_spike=roll_back", "guard.spike_steps=2")
BAD = range(26 * 8, 28 * 8)
"""Positions of steps 27 and 28."""


class Spoiler:
    """For `before_step`: in steps of bad positions, what the last norm of a rank gives is far off."""

    def __init__(self) -> None:
        self.handle: RemovableHandle | None = None

    def __call__(self, run: LiveRun, step: int) -> None:
        if self.handle is not None:
            self.handle.remove()
        opened, model = run._loop._open_step, run._held.models[0].parallel.module  # type: ignore[union-attr]
        if opened is not None and model is not None and opened.batch.position in BAD:
            norm = [module for name, module in model.named_modules() if "norm" in name][-1]
            self.handle = norm.register_forward_hook(lambda _, __, output: output * 300.0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PICKED else pytest.mark.exhaustive) for name in LAYOUTS]
)
@ranks(2)
def test_a_run_goes_back_in_any_layout(rank: int, tmp_path: Path, name: str) -> None:
    """With validations, random numbers, loss scales and what compression remembers."""
    words = (*WORDS, *LAYOUTS[name])
    train_tiny(tmp_path / "back", pool_ranks(), *words, *BACK, before_step=Spoiler())
    train_tiny(tmp_path / "told", pool_ranks(), *words, "data.skip=[[192, 224]]", before_step=Spoiler())
    pool_ranks().barrier()
    assert [each.span for each in RunDir(tmp_path / "back").left_out.read()] == [[192, 224]]
    for column in ("step", "loss", "grad_norm", "lr"):
        assert read_column(tmp_path / "back", column) == read_column(tmp_path / "told", column)
    validations = [
        [
            (event["step"], event["loss"])
            for event in RunDir(tmp_path / folder).events()
            if event["event"] == "validation"
        ]
        for folder in ("back", "told")
    ]
    assert validations[0] == validations[1]
    assert torch.tensor(read_column(tmp_path / "back")).isfinite().all()


@pytest.mark.exhaustive
@ranks(2)
def test_what_no_checkpoint_holds_begins_anew_as_in_a_new_process(rank: int, tmp_path: Path) -> None:
    """PowerSGD's memory is none of a checkpoint: the run that never saw the span goes on from step 24 as well."""
    words = (*WORDS, *layout(2, 1), "parallel.compress=powersgd", "parallel.powersgd_rank=2")
    train_tiny(tmp_path / "back", pool_ranks(), *words, *BACK, before_step=Spoiler())
    with pytest.raises(Died):
        train_tiny(tmp_path / "told", pool_ranks(), *words, before_step=die_at(24))
    train_tiny(tmp_path / "told", pool_ranks(), *words, "data.skip=[[192, 224]]")
    pool_ranks().barrier()
    assert [each.span for each in RunDir(tmp_path / "back").left_out.read()] == [[192, 224]]
    for column in ("step", "loss", "grad_norm", "lr"):
        assert read_column(tmp_path / "back", column) == read_column(tmp_path / "told", column)


def write_arrays(path: Path) -> None:
    """Samples in their order, those of steps 33 and 34 far off."""
    draw = np.random.default_rng(0)
    inputs, labels = draw.normal(size=(640, 4)).astype(np.float32), draw.integers(0, 3, 640)
    inputs[32 * 8 : 34 * 8] *= 1e4
    np.savez(path, x=inputs, y=labels)


ARRAYS = (
    *("model.kind=mlp", "model.hidden=[8]", "model.classes=3", "data.kind=arrays", "data.path=data.npz"),
    *("data.shuffle=false", "data.validation_fraction=0", "train.validate_every=off", "train.global_batch=8"),
    *("train.steps=48", "checkpoint.every=3 steps", "guard.spike=20.0", "run.device=cpu", "run.threads=1"),
    *("checkpoint.background=false", "--nproc", "2"),
)


def killed_at(name: str) -> Callable[[RunDir], bool]:
    """Whether rank 0 has written an event of that name."""
    return lambda run: any(event["event"] == name for event in run.all_events())


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_right_after_going_back_costs_no_bit(tmp_path: Path) -> None:
    """Its agent starts the ranks again by itself."""
    write_arrays(tmp_path / "data.npz")
    with training_commands(tmp_path) as start:
        start("told", *ARRAYS, "data.skip=[[240, 272]]").finish()
        command = start("back", *ARRAYS, *BACK)
        command.wait_for_step(1)
        first = command.ranks()[0]
        command.wait_until(lambda: killed_at("rolled_back")(command.run))
        first.send_signal(signal.SIGKILL)
        command.finish()
    assert [each.span for each in RunDir(tmp_path / "back").left_out.read()] == [[240, 272]]
    assert len(read_named(tmp_path / "back", "started")) == 2
    for column in ("step", "loss", "grad_norm", "lr"):
        assert read_column(tmp_path / "back", column) == read_column(tmp_path / "told", column)
