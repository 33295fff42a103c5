"""A checkpoint exists when it is complete, whatever interrupts its making, and what was saved before stays."""

from __future__ import annotations

import hashlib
import os
import pkgutil
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import RankPool, ranks
from runs import lone_rank, pool_ranks
from saved_tensors import save_checkpoint
from shardway.checkpoint import writer
from shardway.checkpoint.file_format import read_manifest
from shardway.checkpoint.manager import RetentionPolicy, prune_checkpoints, remove_leftovers
from shardway.checkpoint.reader import load_latest
from shardway.checkpoint.state import count_bytes
from shardway.errors import Bug, JobError
from shardway.models.transformer import TransformerShape
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from trained import assert_same_bits, make_trained, train_on, whole_state

LARGER = TransformerShape(vocab=1024, dim=128, layers=1, heads=2, kv_heads=2, ffn_dim=128)
"""2.7 MB with its optimizer state, so that what a file costs beside its tensors hardly counts."""


class Killed(BaseException):
    """The process ends here; nothing is caught and nothing cleaned up."""


def made(folder: Path) -> RunDir:
    directory = RunDir(folder)
    directory.create()
    return directory


def numbers(step: int) -> dict[str, int]:
    return {"step": step, "samples": 8 * step, "targets": 96 * step}


def digest_tree(folder: Path) -> dict[str, str]:
    """Name -> content of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


PHASES = {
    "collecting": "shardway.checkpoint.state.Trained.collect",
    "checking space": "shardway.checkpoint.writer._check_space",
    "making the folder": "shardway.checkpoint.writer._clear_and_make",
    "writing tensors": "shardway.checkpoint.writer.write_tensors",
    "writing all files": "shardway.checkpoint.writer._write_share",
    "checksums": "shardway.checkpoint.writer._checksum_others",
    "writing the manifest": "shardway.checkpoint.writer.write_manifest",
    "renaming": "shardway.checkpoint.writer.os.rename",
}


def break_at(patch: pytest.MonkeyPatch, target: str, error: BaseException, *, after: bool) -> None:
    """Raise where `target` is called, before it did anything or once it has."""
    work = pkgutil.resolve_name(target)

    def broken(*arguments: Any, **options: Any) -> Any:
        if after:
            work(*arguments, **options)
        raise error

    patch.setattr(target, broken)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_save_that_is_cut_off_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, after: bool
) -> None:
    directory, trained = made(tmp_path), make_trained(lone_rank())
    save_checkpoint(directory, lone_rank(), trained, 2, numbers(2))
    kept, expected = digest_tree(directory.checkpoint_path(2)), whole_state(trained.model, trained.optimizer)
    train_on(trained, 1)
    renamed = phase == "renaming" and after
    with monkeypatch.context() as patch, pytest.raises(Killed):
        break_at(patch, PHASES[phase], Killed(), after=after)
        save_checkpoint(directory, lone_rank(), trained, 3, numbers(3))
    assert directory.checkpoint_steps() == ([2, 3] if renamed else [2])
    assert digest_tree(directory.checkpoint_path(2)) == kept
    remove_leftovers(directory)
    assert directory.partial_checkpoints() == []
    again = make_trained(lone_rank(), steps=0, seed=1)
    loaded = load_latest(directory, lone_rank(), again)
    assert loaded is not None
    assert loaded.numbers == numbers(3 if renamed else 2)
    if not renamed:
        assert_same_bits(whole_state(again.model, again.optimizer), expected)
        assert save_checkpoint(directory, lone_rank(), trained, 3, numbers(3)) is not None
        assert directory.checkpoint_steps() == [2, 3]


FAILING = {
    "written": "shardway.checkpoint.writer.memory_of",
    "listed": "shardway.checkpoint.writer.list_files",
    "committed": PHASES["renaming"],
}


@pytest.mark.parametrize(
    ("phase", "culprit"),
    [
        ("written", 1),
        ("listed", 0),
        ("committed", 0),
        pytest.param("written", 0),
        pytest.param("listed", 1),
    ],
)
@ranks(2)
def test_a_save_that_fails_on_one_rank_fails_on_all(rank: int, tmp_path: Path, phase: str, culprit: int) -> None:
    directory, trained = made(tmp_path), make_trained(pool_ranks(), (1, 2))
    save_checkpoint(directory, pool_ranks(), trained, 2, numbers(2))
    kept = digest_tree(directory.checkpoint_path(2))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(JobError) as failure:
        if rank == culprit:
            break_at(patch, FAILING[phase], OSError(5, "Input/output error"), after=False)
        save_checkpoint(directory, pool_ranks(), trained, 3, numbers(3))
    assert str(failure.value) == (
        f"the checkpoint of step 3 could not be saved in {directory.checkpoints}: OSError: [Errno 5] Input/output "
        "error\n  Nothing that was saved before has changed; step 2 is the last complete checkpoint.\n"
        "  To do: look at the disk or its server (`dmesg`), or choose another disk with --dir; then run the same "
        "command again."
    )
    pool_ranks().barrier()
    assert directory.checkpoint_steps() == [2]
    assert directory.partial_checkpoints() == []
    assert digest_tree(directory.checkpoint_path(2)) == kept
    assert save_checkpoint(directory, pool_ranks(), trained, 3, numbers(3)) is not None
    assert load_latest(directory, pool_ranks(), trained) is not None


def test_a_defect_is_not_told_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = make_trained(lone_rank())
    break_at(monkeypatch, PHASES["writing the manifest"], KeyError("x"), after=False)
    with pytest.raises(Bug) as failure:
        save_checkpoint(made(tmp_path), lone_rank(), trained, 2, numbers(2))
    assert str(failure.value) == "KeyError: 'x'"
    assert RunDir(tmp_path).partial_checkpoints() == []


@ranks(2)
def test_a_checkpoint_is_never_written_again(rank: int, tmp_path: Path) -> None:
    directory, trained = made(tmp_path), make_trained(pool_ranks(), (2, 1))
    first = save_checkpoint(directory, pool_ranks(), trained, 5, numbers(5))
    assert first is not None
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step-000000005"]
    kept = digest_tree(directory.checkpoint_path(5))
    assert first.manifest.total_bytes == sum(
        path.stat().st_size for path in directory.checkpoint_path(5).iterdir() if path.name != "manifest.json"
    )
    train_on(trained, 1)
    assert save_checkpoint(directory, pool_ranks(), trained, 5, numbers(5)) is None
    assert digest_tree(directory.checkpoint_path(5)) == kept


@ranks(2)
def test_ranks_that_see_different_folders_agree(rank: int, tmp_path: Path) -> None:
    """On a network file system a rank may not see yet what another has written; rank 0's sight decides."""
    directory, trained = made(tmp_path), make_trained(pool_ranks(), (1, 2))
    assert save_checkpoint(directory, pool_ranks(), trained, 5, numbers(5)) is not None
    blind = RunDir(tmp_path / "elsewhere") if rank == 1 else directory
    assert save_checkpoint(blind, pool_ranks(), trained, 5, numbers(5)) is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    directory, trained = made(tmp_path), make_trained(lone_rank())
    for step in (3, 20, 100, 101):
        save_checkpoint(directory, lone_rank(), trained, step, numbers(step))
    prune_checkpoints(directory, lone_rank(), RetentionPolicy(3), 101)
    assert directory.checkpoint_steps() == [20, 100, 101]
    prune_checkpoints(directory, lone_rank(), RetentionPolicy(1), 101)
    assert directory.checkpoint_steps() == [101]
    prune_checkpoints(directory, lone_rank(), RetentionPolicy(2), 101)
    assert directory.checkpoint_steps() == [101]
    assert os.listdir(directory.checkpoints) == ["step-000000101"]


def test_two_rules_keep_checkpoints() -> None:
    saved = [5, 10, 15, 20, 25, 30]
    assert RetentionPolicy(2, 10).find_doomed(saved) == [5, 15]
    assert RetentionPolicy(1, 15).find_doomed(saved) == [5, 10, 20, 25]
    assert RetentionPolicy(2).find_doomed(saved) == [5, 10, 15, 20]
    assert RetentionPolicy(9, 10).find_doomed(saved) == []


def test_the_best_are_kept_beside_them() -> None:
    """Of those that are there: what was validated and not saved takes no place."""
    saved = [5, 10, 15, 20, 25]
    assert RetentionPolicy(1, None, 2).find_doomed(saved, [10, 15, 25, 5]) == [5, 20]
    assert RetentionPolicy(1, None, 2).find_doomed(saved, [7, 5, 8, 9, 20, 25]) == [10, 15]
    assert RetentionPolicy(2, 10, 1).find_doomed(saved, [20, 5]) == [5, 15]
    assert RetentionPolicy(1, None, 2).find_doomed(saved) == [5, 10, 15, 20]
    assert RetentionPolicy(1).find_doomed(saved, [5, 10]) == [5, 10, 15, 20]


def test_a_removal_that_is_cut_off_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, trained = made(tmp_path), make_trained(lone_rank())
    for step in (1, 2):
        save_checkpoint(directory, lone_rank(), trained, step, numbers(step))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at_second_removal(patch)
        prune_checkpoints(directory, lone_rank(), RetentionPolicy(1), 2)
    assert directory.checkpoint_steps() == [2]
    assert len(directory.partial_checkpoints()) == 1
    remove_leftovers(directory)
    assert os.listdir(directory.checkpoints) == ["step-000000002"]


def kill_at_second_removal(patch: pytest.MonkeyPatch) -> None:
    """The first call clears the way; the second is the removal itself, of which one file is done."""
    remove = shutil.rmtree
    calls = []

    def broken(path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            next(path.iterdir()).unlink()
            raise Killed
        remove(path, **options)

    patch.setattr(shutil, "rmtree", broken)


def refuse(*arguments: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_checkpoint_that_cannot_be_removed_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, trained = made(tmp_path), make_trained(lone_rank())
    for step in (1, 2):
        save_checkpoint(directory, lone_rank(), trained, step, numbers(step))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        prune_checkpoints(directory, lone_rank(), RetentionPolicy(1), 2)
    assert directory.checkpoint_steps() == [1, 2]
    prune_checkpoints(directory, lone_rank(), RetentionPolicy(1), 2)
    assert directory.checkpoint_steps() == [2]


def test_leftovers_of_an_earlier_save_do_not_get_into_the_next(tmp_path: Path) -> None:
    directory, trained = made(tmp_path), make_trained(lone_rank())
    partial = directory.partial_checkpoint_path(4)
    partial.mkdir()
    (partial / "rank-00009.bin").write_bytes(b"old")
    save_checkpoint(directory, lone_rank(), trained, 4, numbers(4))
    assert "rank-00009.bin" not in read_manifest(directory.checkpoint_path(4)).files
    assert not (directory.checkpoint_path(4) / "rank-00009.bin").exists()


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_replicas_are_counted_once(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    """What is asked of the disk is what is written, not that times the number of ranks."""
    directory, trained = made(tmp_path), make_trained(pool_ranks(), shape, sizes=LARGER)
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_check_space", lambda directory, ranks, whole_bytes: asked.append(whole_bytes))
        saved = save_checkpoint(directory, pool_ranks(), trained, 1, numbers(1))
    assert saved is not None
    assert saved.manifest.total_bytes * 0.9 < asked[0] < saved.manifest.total_bytes * 1.02


def test_bytes_are_those_of_all_tensors() -> None:
    tree = {"a": {"b": torch.zeros(3, dtype=torch.float64), "n": 7}, "c": torch.zeros(5, dtype=torch.uint8)}
    assert count_bytes(tree) == 3 * 8 + 5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of a few bytes; unmounted at the end."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small tmpfs to fill")
    mounted = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk-{size}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def fill(rank: int, folder: Path, shape: tuple[int, int], blind: bool) -> None:
    """Save until the disk is full, and go on from what fitted; `blind` takes away the look before writing."""
    on = pool_ranks()
    directory, trained = made(folder), make_trained(on, shape, sizes=LARGER)
    assert save_checkpoint(directory, on, trained, 2, numbers(2)) is not None
    kept, expected = digest_tree(directory.checkpoint_path(2)), whole_state(trained.model, trained.optimizer)
    train_on(trained, 1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(JobError) as failure:
        if blind:
            patch.setattr(writer, "_check_space", lambda directory, ranks, whole_bytes: None)
        save_checkpoint(directory, on, trained, 3, numbers(3))
    check_full_disk(str(failure.value), directory, blind)
    on.barrier()
    assert (directory.checkpoint_steps(), directory.partial_checkpoints()) == ([2], [])
    assert digest_tree(directory.checkpoint_path(2)) == kept
    again = make_trained(on, shape, steps=0, seed=1, sizes=LARGER)
    assert load_latest(directory, on, again) is not None
    assert_same_bits(whole_state(again.model, again.optimizer), expected)


def check_full_disk(text: str, directory: RunDir, blind: bool) -> None:
    reasons = (
        [
            "no space is left on the device",
            "the file system took only a part of what was written (no space, or a quota)",
        ]
        if blind
        else ["it needs about 3.0"]
    )
    head = f"the checkpoint of step 3 could not be saved in {directory.checkpoints}: "
    assert any(text.startswith(head + reason) for reason in reasons), text
    assert text.splitlines()[1:] == [
        "  Nothing that was saved before has changed; step 2 is the last complete checkpoint.",
        "  To do: make room, lower checkpoint.keep, or choose another disk with --dir; then run the same command "
        "again.",
    ]


@pytest.mark.parametrize(
    ("shape", "blind"),
    [
        pytest.param((2, 1), False, id="looking first"),
        pytest.param((1, 2), True, id="while writing"),
        pytest.param((1, 1), True, id="alone"),
        pytest.param((2, 1), True, id="replicas"),
        pytest.param((1, 2), False, id="shards"),
    ],
)
def test_a_full_disk_damages_nothing(
    rank_pool: RankPool, small_disk: Callable[[str], Path], shape: tuple[int, int], blind: bool
) -> None:
    folder = small_disk("4m")
    rank_pool.run(fill, shape[0] * shape[1], {"folder": folder, "shape": shape, "blind": blind})


def save_here(on: Ranks, folder: Path) -> dict[str, Any]:
    directory, trained = made(folder), make_trained(on)
    save_checkpoint(directory, on, trained, 7, {"step": 7, "samples": 56, "targets": 9, "data": "abc"})
    manifest = read_manifest(directory.checkpoint_path(7))
    return {"step": manifest.step, "world": manifest.world, "numbers": manifest.numbers, "files": manifest.files}


def test_the_manifest_names_every_file(tmp_path: Path) -> None:
    found = save_here(lone_rank(), tmp_path)
    assert (found["step"], found["world"]) == (7, 1)
    assert found["numbers"] == {"step": 7, "samples": 56, "targets": 9, "data": "abc"}
    folder = RunDir(tmp_path).checkpoint_path(7)
    assert {*found["files"], "manifest.json"} == {path.name for path in folder.iterdir()}
    assert all(seal.bytes == (folder / name).stat().st_size for name, seal in found["files"].items())


@pytest.mark.parametrize(("all_files", "left", "fits"), [(1000, 3, False), (1000, 6, True), (0, 0, True)])
def test_files_that_may_be_made_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_files: int, left: int, fits: bool
) -> None:
    """A file system without a limit of its own says 0 of 0."""
    directory, trained, look = made(tmp_path), make_trained(lone_rank()), os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: _Looked(all_files, left, look(path)))
    if fits:
        save_checkpoint(directory, lone_rank(), trained, 1, numbers(1))
    else:
        with pytest.raises(JobError, match=rf"it needs about 6 files and {left} more may be made \(inodes\)"):
            save_checkpoint(directory, lone_rank(), trained, 1, numbers(1))
    assert directory.checkpoint_steps() == ([1] if fits else [])


class _Looked:
    """What statvfs(3) says, with other numbers of files."""

    def __init__(self, all_files: int, left: int, found: os.statvfs_result) -> None:
        self.f_files, self.f_favail = all_files, left
        self.f_frsize, self.f_bavail, self.f_blocks, self.f_bfree = (
            found.f_frsize,
            found.f_bavail,
            found.f_blocks,
            found.f_bfree,
        )
