"""Progress heartbeats: what a rank writes is what its agent reads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardway.ranks.heartbeat import (
    VARIABLE,
    Activity,
    HeartbeatEntry,
    HeartbeatWriter,
    heartbeat_path,
    open_heartbeat,
    read_heartbeat,
)


def test_a_reader_gets_what_was_written_last(tmp_path: Path) -> None:
    heartbeat = HeartbeatWriter(tmp_path / "rank-0")
    assert read_heartbeat(tmp_path / "rank-0") is None
    heartbeat.write(Activity.LOAD, 0, 1.5)
    heartbeat.write(Activity.STEP, 7, 2.5)
    assert read_heartbeat(tmp_path / "rank-0") == HeartbeatEntry(2, os.getpid(), Activity.STEP, 7, 2.5)


def test_a_heartbeat_that_is_opened_again_goes_on(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path / "rank-0").write(Activity.START, 0, 1.0)
    assert read_heartbeat(tmp_path / "rank-0") is not None
    HeartbeatWriter(tmp_path / "rank-0").write(Activity.LOAD, 0, 2.0)
    entry = read_heartbeat(tmp_path / "rank-0")
    assert entry is not None
    assert (entry.changes, entry.activity) == (2, Activity.LOAD)


@pytest.mark.parametrize("content", [b"", b"short", b"\1" + bytes(47), b"\x07" * 48])
def test_what_is_no_whole_heartbeat_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_bytes(content)
    assert read_heartbeat(tmp_path / "rank-0") is None


def test_no_heartbeat_where_nobody_wants_one_or_none_can_be_made(tmp_path: Path) -> None:
    assert open_heartbeat({}, 0) is None
    assert open_heartbeat({VARIABLE: ""}, 0) is None
    assert open_heartbeat({VARIABLE: str(tmp_path / "gone")}, 0) is None


def test_a_heartbeat_is_whole_at_any_moment(tmp_path: Path) -> None:
    """A rank writes as fast as it can: since = step, so that a torn entry would show."""
    code = """
import sys
from pathlib import Path
from shardway.ranks.heartbeat import HeartbeatWriter
from shardway.ranks.heartbeat import Activity
heartbeat, step = HeartbeatWriter(Path(sys.argv[1])), 0
while True:
    step += 1
    heartbeat.write(Activity.STEP, step, float(step))
"""
    path = heartbeat_path(tmp_path, 0)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], env=environ) as rank:
        try:
            while read_heartbeat(path) is None:
                assert rank.poll() is None
            entries = []
            # On a single free core the two take turns, so that many looks see the same entry.
            until = time.monotonic() + 60
            while len(entries) < 20_000 or (len({entry.step for entry in entries}) <= 100 and time.monotonic() < until):
                entries += [entry for _ in range(5_000) if (entry := read_heartbeat(path)) is not None]
        finally:
            rank.kill()
    assert len({entry.step for entry in entries}) > 100
    assert all(entry.step == entry.since == entry.changes for entry in entries)
