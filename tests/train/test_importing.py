"""What was imported is what was there, in any layout; a run then begins with it as if its optimizer had never been."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pool import ranks
from runs import TINY, lone_rank, pool_ranks, read_column, read_named, train_tiny
from saved_tensors import read_whole
from shardway.checkpoint.catalog import verify_checkpoint
from shardway.errors import JobError, UserError
from shardway.ranks.start import Ranks
from shardway.resolve.request import ResolveRequest
from shardway.rundir.directory import RunDir
from shardway.train.run_weights import Imported, ImportRequest, export_on, import_on, resolve_import
from shardway.train.run_weights import _resolve as resolve_export

pytestmark = pytest.mark.usefixtures("warm_starts")

SAVING = ("checkpoint.every=2 steps", "train.steps=4", "model.tied=false")


def bring(source: Path, target: Path, on: Ranks, *words: str, **wanted: Any) -> Imported:
    """Import on ranks that are there."""
    request = ResolveRequest(None, (*TINY, *SAVING, *words), target)
    return import_on(on, resolve_import(request, on.world, on.world), ImportRequest(source, **wanted))


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    whole = read_whole(RunDir(run).checkpoint_path(step))
    return {name.removeprefix("model."): each for name, each in whole.items() if name.startswith("model.")}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def exported(run: Path, target: Path) -> Path:
    export_on(lone_rank(), resolve_export(RunDir(run), 1, 1), RunDir(run), target, "fp32")
    return target


def distributed(run: Path, target: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights(run, 4), "optimizer": {"m": torch.zeros(3)}}, checkpoint_id=target, no_dist=True)
    return target


def torch_file(run: Path, target: Path) -> Path:
    torch.save({"epoch": 3, "model_state_dict": weights(run, 4)}, target)
    return target


def itself(run: Path, target: Path) -> Path:
    return run


@ranks(1)
def test_weights_come_back_bit_for_bit_from_every_form(rank: int, tmp_path: Path) -> None:
    first = tmp_path / "first"
    train_tiny(first, lone_rank(), *SAVING)
    for number, write in enumerate((exported, distributed, torch_file, itself)):
        target = tmp_path / f"run-{number}"
        told = bring(write(first, tmp_path / f"source-{number}"), target, lone_rank())
        assert (told.step, told.directory, told.full, told.converted) == (0, str(target), False, {})
        assert same(weights(target, 0), weights(first, 4))
        verify_checkpoint(RunDir(target), 0)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        train_tiny(target, lone_rank(), *SAVING)
        assert read_column(target) == read_column(tmp_path / "run-0")
        assert read_named(target, "started")[0]["checkpoint"] == "step-000000000"
    assert told.left_out == {"optimizer": 3 * told.tensors, "random": 2}


@ranks(1)
def test_a_run_begins_with_them_and_a_fresh_optimizer(rank: int, tmp_path: Path) -> None:
    """The first loss is that of the trained weights; the update after it is Adam's first, by the sign of a gradient."""
    first, target = tmp_path / "first", tmp_path / "run"
    words = (*SAVING, "train.steps=4", "checkpoint.every=1 steps", "checkpoint.keep=9", "train.global_batch=96")
    more = (
        "optim.schedule=constant",
        "optim.warmup=0 steps",
        "optim.lr=0.001",
        "optim.weight_decay=0",
        "data.validation_fraction=0",
        "data.shuffle=false",
    )
    train_tiny(first, lone_rank(), *words, *more)  # one batch is all of the data
    bring(first, target, lone_rank(), *words, *more, step=3)
    train_tiny(target, lone_rank(), *words, *more)
    assert read_column(target)[0] == read_column(first)[3]
    before, after = weights(target, 0), weights(target, 1)
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before]).abs()
    moved = moved[moved > 0]
    assert moved.median() == pytest.approx(0.001, rel=1e-2)
    assert moved.max() < 0.00101
    later = weights(first, 4)  # the old optimizer remembers: its update is another
    assert not same(after, later)


@ranks(1)
def test_the_whole_state_goes_on_as_if_nothing_had_been(rank: int, tmp_path: Path) -> None:
    first, target, words = tmp_path / "first", tmp_path / "run", (*SAVING, "model.dropout=0.1", "optim.warmup=1 steps")
    train_tiny(first, lone_rank(), *words)
    told = bring(first, target, lone_rank(), *words, full=True, step=2)
    assert (told.step, told.full) == (2, True)
    train_tiny(target, lone_rank(), *words)
    assert read_column(target) == read_column(first)[2:]
    whole = [read_whole(RunDir(run).checkpoint_path(4)) for run in (first, target)]
    assert same(*whole)
    with pytest.raises(UserError, match=r"optim\.name"):
        bring(first, tmp_path / "other", lone_rank(), *words, "optim.name=sgd", full=True)
    with pytest.raises(UserError, match="has no whole state of a Shardway run"):
        bring(exported(first, tmp_path / "x"), tmp_path / "other", lone_rank(), full=True)
    assert not (tmp_path / "other").exists()


@ranks(2)
def test_every_layout_begins_with_what_any_number_of_ranks_imported(rank: int, tmp_path: Path) -> None:
    words = ("train.steps=2", "optim.warmup=1 steps")
    if rank == 0:
        train_tiny(tmp_path / "first", lone_rank(), *SAVING)
        exported(tmp_path / "first", tmp_path / "source")
        bring(tmp_path / "source", tmp_path / "alone", lone_rank())
    pool_ranks().barrier()
    bring(tmp_path / "source", tmp_path / "two", pool_ranks())
    assert RunDir(tmp_path / "two").checkpoint_path(0).joinpath("rank-00001.bin").exists()
    assert same(weights(tmp_path / "two", 0), weights(tmp_path / "alone", 0))
    train_tiny(tmp_path / "two", pool_ranks(), *SAVING, *words, "parallel.tp=2")
    if rank == 0:
        train_tiny(tmp_path / "alone", lone_rank(), *SAVING, *words)
        assert read_column(tmp_path / "two") == pytest.approx(read_column(tmp_path / "alone"), rel=1e-5)
    pool_ranks().barrier()


@ranks(1)
def test_what_exists_is_not_touched_and_what_does_not_fit_writes_nothing(rank: int, tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    train_tiny(first, lone_rank(), *SAVING)
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    with pytest.raises(UserError, match="nothing is imported over what exists"):
        bring(first, first, lone_rank())
    for words, told in (
        (("model.dim=32",), "a run with 16"),
        (("model.rope_theta=7",), r"come from a run with 10000\.0"),
        (("model.layers=3",), "a run with 2"),
        (("train.engine=deepspeed",), "keeps a state of its own"),
    ):
        with pytest.raises(UserError, match=told):
            bring(first, other, lone_rank(), *words)
    assert {path.name for path in tmp_path.iterdir()} == {"first"}
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before


@ranks(1)
def test_damage_found_while_reading_leaves_nothing(rank: int, tmp_path: Path) -> None:
    first = tmp_path / "first"
    train_tiny(first, lone_rank(), *SAVING)
    shard = RunDir(first).checkpoint_path(4) / "rank-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    for full in (False, True):
        with pytest.raises(JobError, match="has changed"):
            bring(first, tmp_path / "run", lone_rank(), full=full)
    assert {path.name for path in tmp_path.iterdir()} == {"first"}


def test_a_checkpoint_that_names_files_elsewhere_is_not_copied(tmp_path: Path) -> None:
    from shardway.checkpoint.catalog import FoundCheckpoint, copy_checkpoint
    from shardway.checkpoint.file_format import Damaged, Manifest, checksum_bytes, write_manifest

    source = tmp_path / "a/source"
    source.mkdir(parents=True)
    (tmp_path / "a/secret").write_bytes(b"x")
    write_manifest(source, Manifest(1, 1, {}, {"../secret": checksum_bytes(b"x")}))
    target = RunDir(tmp_path / "b/run")
    target.create()
    with pytest.raises(Damaged, match="which is not in it"):
        copy_checkpoint(FoundCheckpoint(source, None), target)
    assert not list((tmp_path / "b").rglob("secret"))
    assert target.checkpoint_steps() == []


SLOWLY = """
import sys, time, pathlib
sys.path[:0] = [{tests!r}]
from shardway.checkpoint import writer
from shardway.train import run_weights
from test_importing import bring, lone_rank
def wait(*_):
    pathlib.Path({mark!r}).touch()
    time.sleep(60)
{patch}
bring(pathlib.Path({source!r}), pathlib.Path({target!r}), lone_rank())
"""


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param("writer.write_manifest = wait", marks=pytest.mark.exhaustive),
        "run_weights.verify_checkpoint = wait",
    ],
)
def test_a_kill_in_the_middle_leaves_nothing_that_is_loaded(patch: str, tmp_path: Path) -> None:
    """Once before the checkpoint is complete, once after, while its run directory is not."""
    first, mark = tmp_path / "weights.pt", tmp_path / "mark"
    target = tmp_path / "run"
    train_tiny(tmp_path / "first", lone_rank(), *SAVING)
    torch.save(weights(tmp_path / "first", 4), first)
    here = Path(__file__).parent
    facts = {"tests": str(here), "mark": str(mark), "patch": patch, "source": str(first), "target": str(target)}
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", SLOWLY.format(**facts)], env=environ)
    while not mark.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not target.exists()
    assert (tmp_path / ".run.unfinished").exists()
    bring(first, target, lone_rank())
    assert not (tmp_path / ".run.unfinished").exists()
    assert same(weights(target, 0), weights(tmp_path / "first", 4))


def test_the_request_is_kept_without_the_keys_of_the_import(tmp_path: Path) -> None:
    train_tiny(tmp_path / "first", lone_rank(), *SAVING)
    bring(tmp_path / "first", tmp_path / "run", lone_rank(), "recompute.mode=full")
    resolved = RunDir(tmp_path / "run").read_resolved()
    assert resolved["model"]["dim"] == 16
    assert "compile" not in resolved["train"]
    assert "mode" not in resolved.get("recompute", {})
    train_tiny(tmp_path / "run", lone_rank(), *SAVING)
    assert read_named(tmp_path / "run", "started")[0]["changed"] == {}


def test_a_run_whose_imported_weights_were_removed_does_not_begin_without_them(tmp_path: Path) -> None:
    train_tiny(tmp_path / "first", lone_rank(), *SAVING)
    bring(tmp_path / "first", tmp_path / "run", lone_rank())
    shutil.rmtree(RunDir(tmp_path / "run").checkpoint_path(0))
    with pytest.raises(JobError, match=r"begins with weights from .*/first/checkpoints/step-000000004 .*no checkpoint"):
        train_tiny(tmp_path / "run", lone_rank(), *SAVING)
    assert list(RunDir(tmp_path / "run").all_events()) == []
