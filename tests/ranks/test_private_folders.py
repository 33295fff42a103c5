"""Private folders of agents: gone when they are left, and after an agent that was killed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from shardway.ranks.heartbeat import HEARTBEATS, private_folder, sweep_folders


def test_a_folder_is_private_and_goes() -> None:
    with private_folder(HEARTBEATS) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "rank-3").touch()
    assert not folder.exists()


def test_folders_of_agents_that_were_killed_go_and_those_of_others_stay(tmp_path: Path) -> None:
    """What an agent holds stays, and what is young, and what holds something else."""
    left, held, young, foreign = (tmp_path / f"shardway-pages-{name}" for name in ("left", "held", "young", "foreign"))
    for folder in (left, held, young, foreign):
        folder.mkdir()
        (folder / "rank-0").touch()
        for name in ("stacks-0", "asked-0", "record-0"):
            (folder / name).touch()
    (foreign / "notes.txt").touch()
    for folder in (left, held, foreign):
        os.utime(folder, (1, 1))
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    sweep_folders(HEARTBEATS, tmp_path)
    os.close(descriptor)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name for folder in (foreign, held, young)]
    assert (held / "rank-0").exists()
    assert (foreign / "notes.txt").exists()


def test_an_agent_holds_its_folder() -> None:
    with private_folder(HEARTBEATS) as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    assert not folder.exists()
