"""A checkpoint that a thread has written is that of a save that was waited for, byte by byte."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pool import ranks
from runs import lone_rank, pool_ranks
from saved_tensors import save_checkpoint
from shardway.checkpoint.file_format import read_manifest
from shardway.checkpoint.manager import AsyncSave, Staging
from shardway.checkpoint.reader import load_latest
from shardway.checkpoint.writer import SavedCheckpoint, collect_content, shared_place, write_checkpoint
from shardway.errors import JobError
from shardway.parallel.mesh import set_apart
from shardway.rundir.directory import RunDir
from trained import assert_same_bits, make_trained, train_on, whole_state


def made(folder: Path) -> RunDir:
    directory = RunDir(folder)
    directory.create()
    return directory


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@ranks(2)
def test_the_files_are_the_same(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    on, trained = pool_ranks(), make_trained(pool_ranks(), shape)
    waited, flown = made(tmp_path / "waited"), made(tmp_path / "flown")
    apart, numbers = set_apart(on), {"step": 2, "samples": 16}
    assert save_checkpoint(waited, on, trained, 2, numbers) is not None
    expected = whole_state(trained.model, trained.optimizer)
    content = collect_content(on, trained, 2, numbers)
    copied = replace(content, tensors=Staging().stage(content.tensors))
    save = AsyncSave(2, apart, lambda: write_checkpoint(shared_place(flown, apart), apart, copied))
    save.start()
    train_on(trained, 3)  # its collectives and those of the thread do not meet
    save.join(60.0)
    assert save.has_ended
    assert save.error is None
    on.barrier()
    one, other = (read_manifest(directory.checkpoint_path(2)) for directory in (waited, flown))
    shards = [name for name in one.files if name.endswith(".bin")]
    assert len(shards) == 2
    assert {name: other.files[name] for name in shards} == {name: one.files[name] for name in shards}
    again = make_trained(on, shape, steps=0, seed=1)
    assert load_latest(flown, on, again) is not None
    assert_same_bits(whole_state(again.model, again.optimizer), expected)


def test_what_went_wrong_is_kept_for_who_asks() -> None:
    released = threading.Event()

    def write() -> SavedCheckpoint:
        released.wait(120.0)
        raise JobError("no space")

    save = AsyncSave(7, lone_rank(), write)
    save.start()
    save.join(0.0)
    assert (save.has_ended, save.saved, save.error) == (False, None, None)
    released.set()
    save.join(120.0)
    assert save.has_ended
    assert save.saved is None
    assert str(save.error) == "no space"


@ranks(2)
def test_ranks_apart_talk_beside_the_others(rank: int) -> None:
    """Each rank's two threads gather at the same time, in another order on each rank."""
    on = pool_ranks()
    apart, heard = set_apart(on), []
    thread = threading.Thread(target=lambda: heard.append(apart.gather(("apart", rank))))
    if rank == 0:
        thread.start()
        thread.join(0.2)
    assert on.gather(("training", rank)) == [("training", 0), ("training", 1)]
    if rank == 1:
        thread.start()
    thread.join(50.0)
    assert heard == [[("apart", 0), ("apart", 1)]]
    assert apart.group is not dist.group.WORLD
    assert float(apart.sum(torch.ones(1))) == 2.0
