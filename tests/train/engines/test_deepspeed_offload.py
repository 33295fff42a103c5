"""What ZeRO keeps in CPU memory or on disk is updated as on the device, and comes back with a checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from zero_runs import UNEVEN, needs_deepspeed, stage, train_both, what_nvme_lacks

from pool import ranks
from runs import Died, die_at, pool_ranks, read_column, read_named, train_tiny, worst_difference
from shardway.rundir.directory import RunDir

pytestmark = needs_deepspeed

LARGE_ENOUGH = ("model.dim=128", "model.heads=2", "model.ffn_dim=512", "model.vocab=2048")
"""DeepSpeed leaves parts below 1 MiB in memory."""


FURTHER = [(1, "none"), (2, "none"), (3, "cpu")]


@pytest.mark.parametrize(
    ("number", "params"), [(3, "none"), *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in FURTHER)]
)
@ranks(2, timeout_s=180.0)
def test_cpu(rank: int, tmp_path: Path, number: int, params: str) -> None:
    offloaded = (*stage(number), "deepspeed.offload_optimizer=cpu", f"deepspeed.offload_params={params}")
    ours, theirs = train_both(tmp_path, zero=offloaded)
    if rank == 0:
        for name in ("loss", "grad_norm"):
            assert worst_difference(read_column(theirs, name), read_column(ours, name)) < 1e-5


@pytest.mark.skipif(bool(what_nvme_lacks()), reason=what_nvme_lacks())
@pytest.mark.exhaustive
@ranks(2, timeout_s=1200.0)
def test_nvme(rank: int, tmp_path: Path) -> None:
    """DeepSpeed compiles its access to disks at the first start on a machine, which takes minutes."""
    words = (*LARGE_ENOUGH, "train.steps=8", "checkpoint.every=3")
    disk = tmp_path / "disk"
    offloaded = (*stage(3), "deepspeed.offload_optimizer=nvme", f"deepspeed.nvme_path={disk}")
    ours, theirs = train_both(tmp_path, *words, zero=offloaded)
    with contextlib.suppress(Died):
        train_tiny(tmp_path / "died", pool_ranks(), *words, *offloaded, base=UNEVEN, before_step=die_at(5))
    train_tiny(tmp_path / "died", pool_ranks(), *words, *offloaded, base=UNEVEN)
    if rank:
        return
    assert worst_difference(read_column(theirs), read_column(ours)) < 1e-5
    assert [event["step"] for event in read_named(tmp_path / "died", "started")] == [0, 3]
    assert worst_difference(read_column(tmp_path / "died"), read_column(theirs)) < 1e-6
    assert list(disk.rglob("*.swp"))
    assert list(RunDir(theirs).checkpoint_path(8).rglob("zero/offloaded_tensors/rank*/*.swp"))
