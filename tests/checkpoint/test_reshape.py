"""A checkpoint of one layout is a checkpoint of every other: same bits after loading, and the curve goes on."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drawn_layouts import MODELS, SMALL, Drawn, draw_layouts
from pool import ranks
from runs import pool_ranks, read_column, train_alone, train_tiny, worst_difference
from saved_tensors import read_whole, save_checkpoint
from shardway.checkpoint.state import Trained
from shardway.rundir.directory import RunDir
from shardway.train.run import LiveRun

SAVED, ALL = 2, 4
STEPS = (f"train.steps={ALL}", "optim.schedule=constant", "optim.warmup=1 steps", "checkpoint.every=100 steps")
LAYOUTS = draw_layouts(160)


def draw_pairs(world: int, count: int) -> list[tuple[Drawn, Drawn]]:
    """Pairs of different layouts of one model on `world` ranks, the same in every session."""
    dice = random.Random(world)
    pairs: list[tuple[Drawn, Drawn]] = []
    while len(pairs) < count:
        model = dice.choice(list(MODELS))
        fitting = [drawn for drawn in LAYOUTS if (drawn.world, drawn.model) == (world, model)]
        if len(fitting) > 1:
            first, second = dice.sample(fitting, 2)
            if (first, second) not in pairs and first.parallel != second.parallel:
                pairs.append((first, second))
    return pairs


def of_world(world: int, count: int) -> pytest.MarkDecorator:
    """The pairs of a world; all but every thirteenth, and eight ranks, are for `make exhaustive`."""
    early = range(0, 0 if world == 8 else count, 13)
    cases = [
        pytest.param(before, after, id=f"{before} -> {after}", marks=() if index in early else pytest.mark.exhaustive)
        for index, (before, after) in enumerate(draw_pairs(world, count))
    ]
    return pytest.mark.parametrize(("before", "after"), cases)


def only_checkpoint(directory: Path) -> Path:
    run = RunDir(directory)
    return run.checkpoint_path(run.checkpoint_steps()[0])


def save_at_start(copy: Path, run: LiveRun, step: int) -> None:
    """Before the first step after a resume: save what was loaded, elsewhere."""
    if step == SAVED + 1:
        directory = RunDir(copy)
        run.session.ranks.together(lambda: directory.create() if run.is_first else None)
        save_checkpoint(
            directory,
            run.session.ranks,
            Trained(run._held.models[0].parallel.module, run._held.optimizers[0].optimizer),
            SAVED,
            {},
        )


def stop_after_save(run: LiveRun, step: int) -> None:
    """Ask for a stop, and so for a save, in the last step of the first part."""
    if step == SAVED and run.is_first:
        run.directory.request_stop("test")
        assert run._loop is not None
        run._loop._stopping._looked_at = 0.0


def check_pair(rank: int, folder: Path, references: Path, before: Drawn, after: Drawn) -> None:
    layers = max(before.layers, after.layers)
    words = (*STEPS, f"model.layers={layers}")
    alone = references / f"{before.model}, {layers} layers, {ALL} steps"
    train_alone(rank, alone, *before.alone, *words, base=SMALL, once=True)
    train_tiny(folder / "run", pool_ranks(), *before.overrides, *words, base=SMALL, before_step=stop_after_save)
    if rank == 0:
        shutil.copytree(only_checkpoint(folder / "run"), folder / "saved")
    dist.barrier()
    train_tiny(
        folder / "run",
        pool_ranks(),
        *after.overrides,
        *words,
        base=SMALL,
        before_step=lambda run, step: save_at_start(folder / "copy", run, step),
    )
    if rank == 0:
        saved, loaded = read_whole(folder / "saved"), read_whole(only_checkpoint(folder / "copy"))
        assert saved.keys() == loaded.keys()
        assert any(name.startswith("optimizer.state") for name in saved)
        different = [name for name, tensor in saved.items() if not torch.equal(loaded[name], tensor)]
        assert not different
        losses = read_column(folder / "run")
        assert len(losses) == ALL
        assert worst_difference(losses, read_column(alone)) < 1e-5


@of_world(2, 8)
@ranks(2)
def test_two_ranks(rank: int, tmp_path: Path, references: Path, before: Drawn, after: Drawn) -> None:
    check_pair(rank, tmp_path, references, before, after)


@of_world(4, 26)
@ranks(4, timeout_s=120.0)
def test_four_ranks(rank: int, tmp_path: Path, references: Path, before: Drawn, after: Drawn) -> None:
    check_pair(rank, tmp_path, references, before, after)


@of_world(8, 6)
@ranks(8, timeout_s=240.0)
def test_eight_ranks(rank: int, tmp_path: Path, references: Path, before: Drawn, after: Drawn) -> None:
    check_pair(rank, tmp_path, references, before, after)


def test_forty_pairs_are_drawn() -> None:
    pairs = {pair for world, count in ((2, 8), (4, 26), (8, 6)) for pair in draw_pairs(world, count)}
    assert len(pairs) >= 40
