"""Taking the run directory: one writer, nothing touched before its lock is held, an old run set aside whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pool import ranks
from runs import layout, lone_rank, open_tiny, pool_ranks, read_column, signal_at, train_tiny
from shardway.checkpoint.catalog import PassedOver, quarantine
from shardway.errors import JobError, UserError
from shardway.resolve.request import ResolveRequest
from shardway.rundir.directory import RunDir
from shardway.train.run import train_run
from shardway.train.session import open_session

SHORT = ("train.steps=6", "optim.warmup=0 steps", "checkpoint.every=3 steps")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@ranks(2)
def test_a_second_writer_is_refused_on_every_rank(rank: int, tmp_path: Path) -> None:
    on = pool_ranks()
    train_tiny(tmp_path, on, *SHORT)
    lock = RunDir(tmp_path).writer_lock()
    if rank == 0:
        lock.acquire()
    on.barrier()
    before = snapshot(tmp_path)
    on.barrier()
    with pytest.raises(UserError) as failure:
        train_tiny(tmp_path, on, "train.steps=9", "optim.warmup=0 steps")
    assert str(failure.value).startswith(f"another run is training into {tmp_path}: process ")
    on.barrier()
    assert snapshot(tmp_path) == before
    on.barrier()
    lock.release()


@ranks(2)
def test_a_fresh_start_sets_the_old_run_aside_whole(rank: int, tmp_path: Path) -> None:
    on, folder = pool_ranks(), tmp_path / "run"
    train_tiny(folder, on, *SHORT, "train.seed=1")
    on.barrier()
    before = {path.removeprefix(str(folder)): data for path, data in snapshot(folder).items()}
    on.barrier()
    with open_tiny(folder, on, *SHORT, "train.steps=2", fresh=True) as run:
        train_run(run)
    aside = tmp_path / "run.old-1"
    after = {path.removeprefix(str(aside)): data for path, data in snapshot(aside).items()}
    assert _without_lease(after) == _without_lease(before)
    assert RunDir(aside).checkpoint_steps() == [3, 6]
    assert RunDir(folder).checkpoint_steps() == [2]
    assert RunDir(aside).find_writer() is None


def _without_lease(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if not path.startswith(("/lease/", "/writer.lock"))}


def test_a_fresh_start_of_a_new_run_sets_nothing_aside(tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path / "run", lone_rank(), *SHORT, fresh=True) as run:
        assert RunDir(tmp_path / "run").find_writer() is not None
        train_run(run)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_unchanged_directory_of_the_future(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), *SHORT)
    status = tmp_path / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "format": 2}))
    before = snapshot(tmp_path)
    for fresh in (False, True):
        with (
            pytest.raises(UserError, match="has run directory format 2"),
            open_tiny(tmp_path, lone_rank(), *SHORT, fresh=fresh),
        ):
            pass
        assert snapshot(tmp_path) == before


@ranks(2)
def test_a_damaged_checkpoint_is_kept_aside_and_the_one_before_is_gone_on_from(rank: int, tmp_path: Path) -> None:
    on = pool_ranks()
    train_tiny(tmp_path, on, *SHORT, *layout(1, 2))
    on.barrier()
    run = RunDir(tmp_path)
    losses, folder = read_column(tmp_path), run.checkpoint_path(6)
    if rank == 0:
        (folder / "manifest.json").unlink()
        kept = snapshot(folder)
    on.barrier()
    train_tiny(tmp_path, on, *SHORT, *layout(1, 2))
    if rank != 0:
        return
    assert read_column(tmp_path) == losses
    assert run.checkpoint_steps() == [3, 6]
    aside = run.checkpoints / "damaged-step-000000006"
    assert list(snapshot(aside).values()) == list(kept.values())
    (event,) = (event for event in run.events(0) if event["event"] == "checkpoint_quarantined")
    assert (event["name"], event["kept_as"], event["step"]) == (folder.name, aside.name, 3)
    assert event["reason"] == "its manifest.json is missing"


def test_a_run_without_a_whole_checkpoint_is_told_before_anything_is_built(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), *SHORT)
    run = RunDir(tmp_path)
    for step in (3, 6):
        (run.checkpoint_path(step) / "manifest.json").unlink()
    with (
        pytest.raises(JobError, match=f"no checkpoint in {run.checkpoints} is whole"),
        open_tiny(tmp_path, lone_rank(), *SHORT),
    ):
        pytest.fail("the session was opened")
    assert run.checkpoint_steps() == [3, 6]


def test_every_damaged_checkpoint_of_a_step_is_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    for _ in range(3):
        run.checkpoint_path(6).mkdir()
        assert quarantine(run, [PassedOver(6, "why")])[0].reason == "why"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "damaged-step-000000006",
        "damaged-step-000000006.2",
        "damaged-step-000000006.3",
    ]
    assert run.checkpoint_steps() == []


def test_leftovers_of_a_cut_off_save_are_removed(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), *SHORT, before_step=signal_at(2))
    partial = RunDir(tmp_path).partial_checkpoint_path(3)
    partial.mkdir()
    (partial / "rank-00000.bin").write_bytes(b"half")
    train_tiny(tmp_path, lone_rank(), *SHORT)
    assert not partial.exists()
    assert RunDir(tmp_path).checkpoint_steps() == [2, 3, 6]


def test_a_run_that_means_something_else_now_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), *SHORT, before_step=signal_at(2))
    resolved = (tmp_path / "resolved.toml").read_bytes()
    with pytest.raises(UserError, match=r"train\.seed \(command line\): 4, but the run in .* was started with 0"):
        train_tiny(tmp_path, lone_rank(), *SHORT, "train.seed=4")
    assert (tmp_path / "resolved.toml").read_bytes() == resolved
    train_tiny(tmp_path, lone_rank(), *SHORT)
    assert read_column(tmp_path, "step") == [1, 2, 3, 4, 5, 6]


def test_a_second_signal_is_written_down(tmp_path: Path, quiet_threads: None) -> None:
    def interrupt(run: object, step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tiny(tmp_path, lone_rank(), *SHORT, before_step=interrupt)
    status = RunDir(tmp_path).read_status()
    assert (status["state"], status["reason"]) == ("stopped", "a second signal ended the run at once")


def test_a_session_without_a_launcher_leaves_the_process_as_it_was(tmp_path: Path, quiet_threads: None) -> None:
    request = ResolveRequest(None, ("run.device=cpu", "run.threads=1"), tmp_path)
    with open_session(request, {}) as session:
        assert (session.ranks.rank, session.ranks.world, session.ranks.grouped) == (0, 1, False)
        assert session.mesh.data_ranks == 1
        assert session.directory.find_writer() is not None
    assert RunDir(tmp_path).find_writer() is None


@ranks(2)
def test_a_refusal_of_two_ranks_changes_nothing(rank: int, tmp_path: Path) -> None:
    on = pool_ranks()
    train_tiny(tmp_path, on, *SHORT, *layout(1, 2))
    on.barrier()
    before = snapshot(tmp_path)
    on.barrier()
    for words in (("train.steps=5",), ("train.steps=9", "data.samples=200"), ("train.steps=9", "model.dim=32")):
        with pytest.raises(UserError):
            train_tiny(tmp_path, on, "optim.warmup=0 steps", *layout(1, 2), *words)
        on.barrier()
        assert snapshot(tmp_path) == before
        on.barrier()  # the other rank looks before this one begins again
    train_tiny(tmp_path, on, *SHORT, *layout(1, 2), "train.steps=7")
    on.barrier()
    assert read_column(tmp_path, "step") == [1, 2, 3, 4, 5, 6, 7]


@ranks(2)
def test_a_start_over_on_two_ranks_writes_by_its_new_right(rank: int, tmp_path: Path) -> None:
    on, folder = pool_ranks(), tmp_path / "run"
    train_tiny(folder, on, *SHORT)
    on.barrier()
    with open_tiny(folder, on, *SHORT, "data.record_ids=true", fresh=True) as run:
        train_run(run)
        assert run.directory.epoch == 1
    on.barrier()
    assert read_column(folder, "step") == [1, 2, 3, 4, 5, 6]
    assert len([event for event in RunDir(folder).events(1) if event["event"] == "step"]) == 6
    assert RunDir(folder).find_writer() is None


def test_a_script_that_only_looks_keeps_what_it_put_there(tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path / "run", lone_rank(), *SHORT) as run:
        (run.directory.path / "notes.txt").write_text("mine")
    assert (tmp_path / "run/notes.txt").read_text() == "mine"
    train_tiny(tmp_path / "run", lone_rank(), *SHORT)
    assert RunDir(tmp_path / "run").checkpoint_steps() == [3, 6]
