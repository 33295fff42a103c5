"""Batches arrive from loader processes whatever the machine is short of: shared memory, or short paths."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from runs import TINY, TINY_IMAGES, read_column, read_named
from shardway.data import handover
from shardway.data.handover import Sent, describe_shortage, hand_over, take_over
from shardway.data.loader import Batch
from shardway.errors import UserError
from speed import picked

pytestmark = pytest.mark.usefixtures("warm_starts")

BATCH = Batch({"x": torch.arange(1024.0), "names": ["a", None]}, np.arange(3), 0, 3)
SMALL_SHM = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'


def same(found: Batch, expected: Batch) -> bool:
    alike = found.data["names"] == expected.data["names"] and np.array_equal(found.ids, expected.ids)
    return alike and torch.equal(found.data["x"], expected.data["x"])


@pytest.mark.parametrize(("room", "kind"), [(2**30, Batch), (2**16, Sent), (0, Sent)])
def test_an_answer_is_sent_in_bytes_where_there_is_no_room(
    room: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "find_room", lambda: room)
    sent = hand_over(BATCH)
    assert type(sent) is kind
    (found,) = take_over(iter([pickle.loads(pickle.dumps(sent))]))
    assert same(found, BATCH)


def test_an_error_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "find_room", lambda: 0)
    (found,) = take_over(iter([hand_over(KeyError("lost"))]))
    assert isinstance(found, KeyError)


def test_an_error_of_ours_is_raised_in_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "find_room", lambda: 0)
    with pytest.raises(UserError, match="no such column"):
        next(take_over(iter([hand_over(UserError("no such column"))])))


@pytest.mark.parametrize(("room", "told"), [(2**30, ""), (2**16, "/dev/shm has 64KiB free"), (0, "--shm-size")])
def test_a_shortage_is_told_with_what_to_do(room: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "find_room", lambda: room)
    assert told in describe_shortage()
    assert bool(told) is bool(describe_shortage())


def test_a_folder_that_is_not_there_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "SHARED", "/no/such/folder")
    assert handover.find_room() == 0


def train(folder: Path, *words: str, before: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "shardway", "train", "--dir", str(folder), *words, "train.steps=6"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environ}
    )


def can_mount() -> bool:
    words = ["unshare", "-m", "bash", "-c", SMALL_SHM, "x", "true"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", picked(["tokens", "images"], "images"))
def test_a_run_with_next_to_no_shared_memory_is_the_same_run(tmp_path: Path, name: str) -> None:
    if not can_mount():
        pytest.skip("needs to mount a file system of its own (root)")
    words = (*(TINY if name == "tokens" else TINY_IMAGES), "data.workers=2")
    assert train(tmp_path / "usual", *words).returncode == 0
    done = train(tmp_path / "small", *words, before=("unshare", "-m", "bash", "-c", SMALL_SHM, "x"))
    assert done.returncode == 0, done.stderr
    assert read_column(tmp_path / "small") == read_column(tmp_path / "usual")
    (noted,) = read_named(tmp_path / "small", "data_order_noted")
    assert "/dev/shm has" in noted["reason"]
    assert read_named(tmp_path / "usual", "data_order_noted") == []


def test_a_long_tmpdir_is_no_matter(tmp_path: Path) -> None:
    """A socket's path has 107 characters at most, and torch's lie below TMPDIR."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    done = train(tmp_path / "run", *TINY, "data.workers=2", TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    assert len(read_column(tmp_path / "run")) == 6
