"""The folder of a run on a node's own disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardway.errors import JobError, UserError
from shardway.rundir import names as module
from shardway.rundir.names import LocalRun, find_local_run


def make(local: LocalRun, node: int, *steps: int) -> None:
    folder = local.make(node)
    for step in steps:
        (folder / f"step-{step:09d}").mkdir()
        (folder / f"step-{step:09d}" / "rank-00000.bin").write_bytes(b"x")


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_DISK", str(tmp_path))
    local = find_local_run("$OWN_DISK/runs", "abc")
    assert local.make(3) == tmp_path / "runs" / "shardway-abc" / "node-3"
    assert [path.stat().st_mode & 0o777 for path in (local.path, local.node(3))] == [0o700, 0o700]
    for folder in ("$NOT_SET_AT_ALL/runs", "runs"):
        with pytest.raises(UserError, match="which is no whole path"):
            find_local_run(folder, "abc")


def test_what_somebody_else_has_there_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalRun(tmp_path / "shardway-abc")
    local.path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(JobError, match="belongs to another user"):
        local.make(0)
    own, uid = LocalRun(tmp_path / "shardway-own"), os.getuid()
    own.make(0)
    monkeypatch.setattr(module.os, "getuid", lambda: uid + 1)
    with pytest.raises(JobError, match="belongs to another user"):
        own.make(1)
    assert own.nodes() == []


def test_which_stay(tmp_path: Path) -> None:
    local = LocalRun(tmp_path / "shardway-abc")
    assert (local.nodes(), local.steps()) == ([], [])
    make(local, 0, 2, 4, 6)
    make(local, 7, 4, 8)
    (local.node(0) / ".step-000000009.start-x.partial").mkdir()
    (local.path / "notes").mkdir()
    assert local.steps() == [2, 4, 6, 8]
    local.keep_only({4, 6}, up_to=6)
    assert [local.steps_of(node) for node in local.nodes()] == [[4, 6], [4, 8]]
    local.remove_after(4)
    assert [local.steps_of(node) for node in local.nodes()] == [[4], [4]]
    local.remove_partials(0)
    assert sorted(path.name for path in local.node(0).iterdir()) == ["step-000000004"]
    local.remove()
    assert list(tmp_path.iterdir()) == []
