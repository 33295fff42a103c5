"""The scripts of examples/: how little changes, and that they train, resume and take any layout as they stand."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from example_scripts import EXAMPLES, PAIRS, command_environment, compare_pair, run_script, torchrun
from page_tables import check_block, check_table
from pool import RankPool, ranks
from runs import lone_rank, pool_ranks, read_column, read_named, worst_difference
from shardway.rundir.directory import RunDir

SHORT = {
    "mnist": ("--epochs", "1"),
    "wikitext2": ("--epochs", "1", "--dim", "32"),
    "fsdp2": ("--epochs", "1", "--dim", "64", "--layers", "2"),
}
STEPS = ("train.steps=8",)
LAYOUTS = {
    "mnist": ("dp_replicate=2", "dp_shard=2"),
    "wikitext2": ("dp_replicate=2", "dp_shard=2"),
    "fsdp2": ("dp_replicate=2", "dp_shard=2", "tp=2", "cp=2", "pp=2", "dp_shard=2 tp=2", "dp_shard=2 pp=2", "cp=2 tp=2"),
}
"""Degrees beside which all others are 1."""
MICRO = "train.micro_batch=4"
"""The same micro-batches on any number of ranks: masks of dropout follow them."""
FIRST = [pytest.param(name, LAYOUTS[name][-1 if name != "fsdp2" else 1], id=name) for name in PAIRS]


def degrees(layout: str) -> tuple[str, ...]:
    return tuple(f"parallel.{word}" for word in layout.split())


def size_of(layout: str) -> int:
    product = 1
    for word in layout.split():
        product *= int(word.partition("=")[2])
    return product


def run_on_ranks(rank: int, name: str, directory: Path, words: tuple[str, ...], alone: bool, last: int | None) -> None:
    """A script on the ranks of the pool, or on its rank 0 alone."""
    if not alone:
        run_script(name, directory, pool_ranks(), *SHORT[name], *words, last=last)
    elif rank == 0:
        run_script(name, directory, lone_rank(), *SHORT[name], *words, last=last)
    dist.barrier()


def losses(pool: RankPool, name: str, directory: Path, *words: str, layout: str = "", last: int | None = None) -> list[float]:
    """The losses of a run of a script, which goes on where it was."""
    arguments = {"name": name, "directory": directory, "alone": not layout, "last": last}
    pool.run(run_on_ranks, size_of(layout) if layout else 1, {**arguments, "words": (*words, *degrees(layout))}, 120.0)
    return read_column(directory)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in PAIRS for layout in LAYOUTS[name]])
def test_a_layout_gives_the_curve_of_one_rank(rank_pool: RankPool, tmp_path: Path, name: str, layout: str) -> None:
    alone = losses(rank_pool, name, tmp_path / "alone", *STEPS, MICRO)
    there = losses(rank_pool, name, tmp_path / "there", *STEPS, MICRO, layout=layout)
    assert len(alone) == 8
    assert worst_difference(there, alone) < 1e-4
