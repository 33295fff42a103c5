"""Progress pages: what a rank writes is what its agent reads."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardway.ranks.agent.page import (
    VARIABLE,
    Entry,
    PageWriter,
    open_page,
    page_path,
    pages_folder,
    read_page,
    sweep_folders,
)
from shardway.ranks.progress import Activity


def test_a_reader_gets_what_was_written_last(tmp_path: Path) -> None:
    page = PageWriter(tmp_path / "rank-0")
    assert read_page(tmp_path / "rank-0") is None
    page.write(Activity.LOAD, 0, 1.5)
    page.write(Activity.STEP, 7, 2.5)
    assert read_page(tmp_path / "rank-0") == Entry(2, os.getpid(), Activity.STEP, 7, 2.5)


def test_a_page_that_is_opened_again_goes_on(tmp_path: Path) -> None:
    PageWriter(tmp_path / "rank-0").write(Activity.START, 0, 1.0)
    assert read_page(tmp_path / "rank-0") is not None
    PageWriter(tmp_path / "rank-0").write(Activity.LOAD, 0, 2.0)
    entry = read_page(tmp_path / "rank-0")
    assert entry is not None
    assert (entry.changes, entry.activity) == (2, Activity.LOAD)


@pytest.mark.parametrize("content", [b"", b"short", b"\1" + bytes(47), b"\x07" * 48])
def test_what_is_no_whole_page_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_bytes(content)
    assert read_page(tmp_path / "rank-0") is None


def test_no_page_where_nobody_wants_one_or_none_can_be_made(tmp_path: Path) -> None:
    assert open_page({}, 0) is None
    assert open_page({VARIABLE: ""}, 0) is None
    assert open_page({VARIABLE: str(tmp_path / "gone")}, 0) is None


@pytest.mark.slow
def test_a_page_is_whole_at_any_moment(tmp_path: Path) -> None:
    """A rank writes as fast as it can: since = step, so that a torn entry would show."""
    code = """
import sys
from pathlib import Path
from shardway.ranks.agent.page import PageWriter
from shardway.ranks.progress import Activity
page, step = PageWriter(Path(sys.argv[1])), 0
while True:
    step += 1
    page.write(Activity.STEP, step, float(step))
"""
    path = page_path(tmp_path, 0)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], env=environ) as rank:
        try:
            while read_page(path) is None:
                assert rank.poll() is None
            entries = []
            # On a single free core the two take turns, so that many looks see the same entry.
            until = time.monotonic() + 60
            while len(entries) < 20_000 or (len({entry.step for entry in entries}) <= 100 and time.monotonic() < until):
                entries += [entry for _ in range(5_000) if (entry := read_page(path)) is not None]
        finally:
            rank.kill()
    assert len({entry.step for entry in entries}) > 100
    assert all(entry.step == entry.since == entry.changes for entry in entries)


def test_the_folder_of_pages_is_private_and_goes() -> None:
    with pages_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        PageWriter(page_path(folder, 3)).write(Activity.STEP, 1, 1.0)
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
    sweep_folders(tmp_path)
    os.close(descriptor)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name for folder in (foreign, held, young)]
    assert (held / "rank-0").exists()
    assert (foreign / "notes.txt").exists()


def test_an_agent_holds_its_folder() -> None:
    with pages_folder() as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    assert not folder.exists()
