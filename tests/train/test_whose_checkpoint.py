"""A run goes on from its own checkpoints alone, wherever its directory was copied to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pool import ranks
from runs import TINY, lone_rank, read_column, read_named, train_tiny
from shardway.checkpoint.catalog import find_checkpoints, verify_all
from shardway.checkpoint.file_format import Manifest, _digest, read_manifest
from shardway.errors import JobError
from shardway.resolve.request import ResolveRequest
from shardway.rundir.directory import RunDir
from shardway.rundir.names import RUN_ID, find_run_id
from shardway.train.run_weights import ImportRequest, import_on, resolve_import

SAVING = ("checkpoint.every=2 steps", "train.steps=4", "optim.warmup=1 steps")
LONGER = ("checkpoint.every=2 steps", "train.steps=6", "optim.warmup=1 steps")


def manifests(run: Path) -> list[Manifest]:
    directory = RunDir(run)
    return [read_manifest(directory.checkpoint_path(step)) for step in directory.checkpoint_steps()]


def forget(run: Path) -> None:
    """As a run from before there were ids."""
    (run / RUN_ID).unlink()
    for path in run.glob("checkpoints/*/manifest.json"):
        content = json.loads(path.read_text())
        del content["run"], content["xxh3"]
        path.write_text(json.dumps({**content, "xxh3": _digest(content)}))


@ranks(1)
def test_all_checkpoints_of_a_run_have_its_id_and_an_import_a_new_one(rank: int, tmp_path: Path) -> None:
    run, words = tmp_path / "a", (*TINY, *SAVING)
    train_tiny(run, lone_rank(), *SAVING)
    train_tiny(run, lone_rank(), *LONGER)
    assert {manifest.run for manifest in manifests(run)} == {find_run_id(run)}
    for name, full in (("b", False), ("c", True)):
        target = tmp_path / name
        request = resolve_import(ResolveRequest(None, words, target), 1, 1)
        import_on(lone_rank(), request, ImportRequest(run, full=full))
        assert [manifest.run for manifest in manifests(target)] == [find_run_id(target)]
        assert find_run_id(target) not in ("", find_run_id(run))


@ranks(1)
def test_another_runs_checkpoint_is_set_aside(rank: int, tmp_path: Path) -> None:
    run, other, alone = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for each in (run, alone):
        train_tiny(each, lone_rank(), *SAVING)
    train_tiny(other, lone_rank(), *LONGER, "train.seed=7")
    shutil.copytree(RunDir(other).checkpoint_path(6), RunDir(run).checkpoint_path(6))
    whole = [each.is_whole for each in verify_all(find_checkpoints(run))]
    assert whole == [False, True, True]
    for each in (run, alone):
        train_tiny(each, lone_rank(), *LONGER)
    assert read_column(run) == read_column(alone)
    (told,) = read_named(run, "checkpoint_quarantined")
    assert told["name"] == "step-000000006"
    assert told["reason"].startswith(f"it is of another run ({find_run_id(other)}, not {find_run_id(run)})")
    assert RunDir(run).checkpoint_path(6).exists()
    assert RunDir(run).checkpoints.joinpath(told["kept_as"]).exists()


@ranks(1)
def test_where_there_is_no_other_nothing_is_loaded_or_changed(rank: int, tmp_path: Path) -> None:
    run, other = tmp_path / "a", tmp_path / "b"
    for each in (run, other):
        train_tiny(each, lone_rank(), *SAVING, "checkpoint.keep=1")
    RunDir(run).checkpoint_path(4).rename(tmp_path / "kept")
    shutil.copytree(RunDir(other).checkpoint_path(4), RunDir(run).checkpoint_path(4))
    with pytest.raises(JobError, match=r"it is of another run .*checkpoint import"):
        train_tiny(run, lone_rank(), *LONGER)
    assert RunDir(run).checkpoint_steps() == [4]


@ranks(1)
def test_copies_and_older_runs_go_on(rank: int, tmp_path: Path) -> None:
    run, alone = tmp_path / "a", tmp_path / "alone"
    train_tiny(run, lone_rank(), *SAVING)
    shutil.copytree(run, alone)
    train_tiny(alone, lone_rank(), *LONGER)
    assert find_run_id(alone) == find_run_id(run)
    (tmp_path / "moved").mkdir()
    shutil.copytree(run / "checkpoints", tmp_path / "moved/checkpoints")
    shutil.copytree(run, tmp_path / "lost")
    (tmp_path / "lost" / RUN_ID).unlink()
    shutil.copytree(run, tmp_path / "old")
    forget(tmp_path / "old")
    for name in ("moved", "lost", "old"):
        train_tiny(tmp_path / name, lone_rank(), *LONGER)
        assert read_column(tmp_path / name)[-2:] == read_column(alone)[-2:]
        assert read_named(tmp_path / name, "checkpoint_quarantined") == []
        assert (find_run_id(tmp_path / name) == find_run_id(run)) is (name != "old")
        assert find_run_id(tmp_path / name)
