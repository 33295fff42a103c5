"""Two tiers: a run goes on from what nodes saved on their own disks where that holds, and else from its directory."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pool import ranks
from runs import Died, die_at, lone_rank, pool_ranks, read_column, read_named, signal_at, train_tiny
from shardway.checkpoint import local_tier, manager
from shardway.checkpoint.manager import LeastCost
from shardway.cli.status import status
from shardway.errors import UserError
from shardway.ranks.launcher import Placement
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.rundir.names import SHARED, LocalRun, find_local_run, find_run_id, read_line
from shardway.train.run import LiveRun

WORDS = ("train.steps=12", "optim.warmup=0 steps", "checkpoint.background=true", "model.dropout=0.1")


def words(folder: Path, local: int = 2, shared: int = 6) -> tuple[str, ...]:
    """A run that saves on the disk of its node every so many steps."""
    disk = folder / "disk"
    return (
        *WORDS,
        *(f"checkpoint.local_every={local} steps", f"checkpoint.local_dir={disk}", f"checkpoint.every={shared} steps"),
    )


def local_of(folder: Path) -> LocalRun:
    """What a run has on the disk."""
    return find_local_run(str(folder / "disk"), find_run_id(folder / "run"))


def settled(then: Callable[[LiveRun, int], None] = lambda run, step: None) -> Callable[[LiveRun, int], None]:
    """For `before_step`: nothing is under way before a step, so that what is saved does not depend on time."""

    def look(run: LiveRun, step: int) -> None:
        run._loop._checkpoints.settle()  # type: ignore[union-attr]
        then(run, step)

    return look


def train(folder: Path, *more: str, last: int | None = None, on: Ranks | None = None, **how: int) -> None:
    """Train, and die after step `last`."""
    look = settled(die_at(last)) if last is not None else settled()
    if last is None:
        train_tiny(folder / "run", on or lone_rank(), *words(folder, **how), *more, before_step=look)
        return
    with pytest.raises(Died):
        train_tiny(folder / "run", on or lone_rank(), *words(folder, **how), *more, before_step=look)


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run that nothing happens to, with one tier."""
    folder, threads = tmp_path_factory.mktemp("well"), torch.get_num_threads()
    torch.set_num_threads(1)
    train_tiny(folder, lone_rank(), *WORDS, "checkpoint.every=6 steps", before_step=settled())
    torch.set_num_threads(threads)
    return read_column(folder)


Die = Callable[[Path, int], None]


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Die:
    """`died(folder, last)`: there is a run that died after step `last`, and what it saved on the disk of its node."""
    known: dict[int, Path] = {}

    def put(folder: Path, last: int) -> None:
        if last not in known:
            known[last] = tmp_path_factory.mktemp("died")
            train(known[last], last=last)
        shutil.copytree(known[last], folder, dirs_exist_ok=True)

    return put


def train_well(folder: Path, *more: str) -> Path:
    """The same on the ranks of the pool, once for all that ask for it in this folder."""
    run = folder / "-".join(("tiers", *more)).replace("parallel.", "")
    is_there = run.exists()
    dist.barrier()
    if not is_there:
        train_tiny(run, pool_ranks(), *WORDS, *more, "checkpoint.every=6 steps", before_step=settled())
    return run


def started(folder: Path) -> list[tuple[int, Any]]:
    """Where each attempt went on from: step and tier."""
    return [(event["step"], event["checkpoint_tier"]) for event in read_named(folder / "run", "started")]


def saved(folder: Path) -> list[tuple[int, str]]:
    """What was told as saved: step and tier."""
    return [(event["step"], event["tier"]) for event in read_named(folder / "run", "saved")]


def test_a_run_that_died_goes_on_from_what_its_node_saved(
    tmp_path: Path, quiet_threads: None, died: Die, well: list[float]
) -> None:
    died(tmp_path, 9)
    assert RunDir(tmp_path / "run").checkpoint_steps() == [6]
    assert local_of(tmp_path).steps() == [6, 8]
    assert local_of(tmp_path).path.stat().st_mode & 0o777 == 0o700
    train(tmp_path)
    assert started(tmp_path) == [(0, None), (8, "local")]
    assert read_column(tmp_path / "run") == well
    saved = [(event["step"], event["tier"]) for event in read_named(tmp_path / "run", "saved")]
    assert saved == [
        (2, "local"),
        (4, "local"),
        (6, "local"),
        (6, "shared"),
        (8, "local"),
        (10, "local"),
        (12, "shared"),
    ]
    assert [entry.from_step for entry in read_line(tmp_path / "run").entries] == [0, 8]
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_run_that_stops_leaves_what_its_node_has(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path / "run", lone_rank(), *words(tmp_path), before_step=settled(signal_at(5)))
    assert RunDir(tmp_path / "run").checkpoint_steps() == [5]
    assert local_of(tmp_path).steps() == [2, 4]
    train(tmp_path)
    assert started(tmp_path)[-1] == (5, "shared")


def newest(folder: Path) -> Path:
    """The newest checkpoint on the disk."""
    local = local_of(folder)
    (found,) = [node / f"step-{local.steps()[-1]:09d}" for node in local.nodes()]
    return found


def flip(folder: Path) -> None:
    path = folder / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(folder: Path) -> None:
    path = folder / "rank-00000.bin"
    path.write_bytes(path.read_bytes()[:-1])


HARMS: dict[str, Callable[[Path], None]] = {
    "the content of rank-00000.bin has changed": flip,
    "bytes, the manifest says": cut,
    "its manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
    "tensors.json": lambda folder: (folder / "tensors.json").unlink(),
}


@pytest.mark.parametrize("reason", HARMS)
def test_what_is_damaged_on_a_node_is_passed_over(
    tmp_path: Path, quiet_threads: None, died: Die, reason: str, well: list[float]
) -> None:
    died(tmp_path, 11)
    assert local_of(tmp_path).steps() == [8, 10]
    HARMS[reason](newest(tmp_path))
    train(tmp_path)
    assert started(tmp_path)[-1] == (8, "local")
    (told,) = read_named(tmp_path / "run", "checkpoint_quarantined")
    assert told["name"] == "step-000000010"
    assert reason in told["reason"]
    assert read_column(tmp_path / "run") == well


def test_where_nothing_on_a_node_holds_the_run_directory_does(
    tmp_path: Path, quiet_threads: None, died: Die, well: list[float]
) -> None:
    died(tmp_path, 11)
    for step in (8, 10):
        flip(newest(tmp_path).with_name(f"step-{step:09d}"))
    train(tmp_path)
    assert started(tmp_path)[-1] == (6, "shared")
    assert [event["name"] for event in read_named(tmp_path / "run", "checkpoint_quarantined")] == [
        "step-000000010",
        "step-000000008",
    ]
    assert read_column(tmp_path / "run") == well


def test_a_disk_that_was_lost_costs_the_steps_since_the_last_copy(
    tmp_path: Path, quiet_threads: None, died: Die, well: list[float]
) -> None:
    died(tmp_path, 9)
    shutil.rmtree(tmp_path / "disk")
    train(tmp_path)
    assert started(tmp_path)[-1] == (6, "shared")
    assert read_column(tmp_path / "run") == well


def test_two_failures_from_one_local_checkpoint_drop_the_tier_for_the_next_start(
    tmp_path: Path, quiet_threads: None, died: Die, capsys: pytest.CaptureFixture[str], well: list[float]
) -> None:
    died(tmp_path, 9)
    for _ in range(2):
        train(tmp_path, last=9)
    assert started(tmp_path) == [(0, None), (8, "local"), (8, "local")]
    train(tmp_path, last=9)
    assert started(tmp_path)[-1] == (6, "shared")
    (told,) = read_named(tmp_path / "run", "local_checkpoints_ignored")
    assert told["dropped"] == 8
    assert RunDir(tmp_path / "run").read_status()["local_checkpoints_ignored"] == 8
    status([str(tmp_path / "run")])
    said = "  nodes       what they have saved is left out: two starts from step 8 failed"
    assert said in capsys.readouterr().out.splitlines()
    assert local_of(tmp_path).steps() == [8], "saved again by the start that left them out"
    train(tmp_path)
    assert started(tmp_path)[-1] == (8, "local")
    assert read_column(tmp_path / "run") == well


def test_what_was_saved_before_a_start_without_the_tier_is_not_taken(
    tmp_path: Path, quiet_threads: None, died: Die
) -> None:
    died(tmp_path, 9)
    train(tmp_path, "checkpoint.local_every=off", last=7)
    train(tmp_path)
    assert started(tmp_path) == [(0, None), (6, "shared"), (6, "shared")]
    (told,) = read_named(tmp_path / "run", "checkpoint_quarantined")
    assert told["reason"] == "the run went on from step 6 after it was saved"


def test_a_run_that_went_on_from_its_node_and_stops_at_once_is_saved(
    tmp_path: Path, quiet_threads: None, died: Die
) -> None:
    """Nothing was learnt since, but the run directory lacks that step."""
    died(tmp_path, 9)
    (tmp_path / "run" / "stop").touch()
    train(tmp_path)
    assert started(tmp_path)[-1] == (8, "local")
    assert RunDir(tmp_path / "run").checkpoint_steps() == [6, 8]
    assert RunDir(tmp_path / "run").read_status()["state"] == "stopped"


def test_a_run_that_died_right_before_its_last_save_makes_it(tmp_path: Path, quiet_threads: None, died: Die) -> None:
    died(tmp_path, 9)
    train(tmp_path, "train.steps=8")
    assert started(tmp_path)[-1] == (8, "local")
    assert RunDir(tmp_path / "run").checkpoint_steps() == [6, 8]
    assert list((tmp_path / "disk").iterdir()) == []


def test_another_model_is_refused_where_only_nodes_have_saved(
    tmp_path: Path, quiet_threads: None, well: list[float]
) -> None:
    train(tmp_path, last=5)
    assert RunDir(tmp_path / "run").checkpoint_steps() == []
    with pytest.raises(UserError, match=r"model\.dim"):
        train(tmp_path, "model.dim=32")
    train(tmp_path)
    assert read_column(tmp_path / "run") == well


def test_a_variable_that_is_not_set_is_told(tmp_path: Path, quiet_threads: None) -> None:
    with pytest.raises(UserError, match=r'checkpoint\.local_dir = "\$NO_SUCH_DISK" is "\$NO_SUCH_DISK" on this node'):
        train(tmp_path, "checkpoint.local_dir=$NO_SUCH_DISK")


def test_saves_by_the_clock(tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeastCost, "interval_s", lambda cost, save_s: 0.0)
    train(tmp_path, "checkpoint.local_every=auto", "checkpoint.every=off", "train.steps=4")
    assert saved(tmp_path) == [(1, "local"), (2, "local"), (3, "local"), (4, "shared")]


def test_what_the_clock_asks_for_in_the_run_directory_is_copied_once(tmp_path: Path, quiet_threads: None) -> None:
    def look(run: LiveRun, step: int) -> None:
        if step == 3:
            run._loop._checkpoints._cadences[SHARED]._tried_at -= 7200.0  # type: ignore[union-attr]

    more = ("checkpoint.local_every=5 steps", "checkpoint.every=1h")
    train_tiny(tmp_path / "run", lone_rank(), *words(tmp_path), *more, before_step=settled(look))
    assert [step for step, tier in saved(tmp_path) if tier == SHARED] == [3, 12]


def test_saves_that_are_waited_for(tmp_path: Path, quiet_threads: None) -> None:
    train(tmp_path, "checkpoint.background=false", last=9)
    assert saved(tmp_path) == [(2, "local"), (4, "local"), (6, "shared"), (8, "local")]
    train(tmp_path, "checkpoint.background=false")
    assert started(tmp_path)[-1] == (8, "local")


def test_what_a_copy_of_the_run_saved_on_the_same_node_is_not_taken(
    tmp_path: Path, quiet_threads: None, died: Die, well: list[float]
) -> None:
    """It has the same id, so that both use one folder."""
    died(tmp_path, 9)
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    train(tmp_path, "optim.lr=0.1", last=11)
    assert local_of(tmp_path).steps() == [8, 10]
    train_tiny(tmp_path / "copied", lone_rank(), *words(tmp_path), before_step=settled())
    begun = [(event["step"], event["checkpoint_tier"]) for event in read_named(tmp_path / "copied", "started")]
    assert begun == [(0, None), (8, "local")]
    (told,) = read_named(tmp_path / "copied", "checkpoint_quarantined")
    assert (told["name"], told["reason"]) == ("step-000000010", "the run does not come from the start that saved it")
    assert read_column(tmp_path / "copied") == well


class FullDisk:
    """A node's disk that is full before some steps."""

    def __init__(self, folder: Path, *full_before: int) -> None:
        self._folder, self._full_before, self._usage = folder, full_before, shutil.disk_usage
        self.full = False

    def look(self, run: LiveRun, step: int) -> None:
        self.full = step + 1 in self._full_before

    def usage(self, path: Any) -> Any:
        here = self.full and Path(path).is_relative_to(self._folder)
        return self._usage(path)._replace(free=100) if here else self._usage(path)


def test_a_full_disk_of_a_node_costs_no_save_in_the_run_directory(
    tmp_path: Path, quiet_threads: None, well: list[float]
) -> None:
    disk = FullDisk(tmp_path / "disk", 5, 7)
    with mock.patch.object(shutil, "disk_usage", disk.usage):
        look = settled(disk.look)
        train_tiny(tmp_path / "run", lone_rank(), *words(tmp_path), before_step=look)
    failed = [(event["step"], event["tier"]) for event in read_named(tmp_path / "run", "save_failed")]
    assert failed == [(4, "local")]
    assert saved(tmp_path) == [(2, "local"), (6, "shared"), (8, "local"), (10, "local"), (12, "shared")]
    assert read_column(tmp_path / "run") == well


def test_a_damaged_file_is_not_copied(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch, well: list[float]
) -> None:
    monkeypatch.setattr(manager, "RETRY_S", 0.0)
    copy, struck = local_tier._replicate, []

    def damage_first(source: Path, target: Path, seal: Any) -> None:
        if not struck:
            struck.append(source)
            flip(source.parent)
        copy(source.with_name("rank-00000.bin") if source in struck else source, target, seal)

    monkeypatch.setattr(local_tier, "_replicate", damage_first)
    train(tmp_path, shared=4)
    failed = [(event["step"], event["tier"]) for event in read_named(tmp_path / "run", "save_failed")]
    assert failed == [(4, "shared")]
    assert (
        "is not what was written there, so it was not copied"
        in read_named(tmp_path / "run", "save_failed")[0]["reason"]
    )
    assert RunDir(tmp_path / "run").checkpoint_steps() == [5, 8, 12]
    assert RunDir(tmp_path / "run").partial_checkpoints() == []
    assert read_column(tmp_path / "run") == well


def test_nodes_save_on_while_a_slow_file_system_is_written(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch, well: list[float]
) -> None:
    gate, copy = threading.Event(), local_tier.replicate_checkpoint

    def wait_first(*arguments: Any) -> Any:
        assert gate.wait(60.0)
        return copy(*arguments)

    monkeypatch.setattr(local_tier, "replicate_checkpoint", wait_first)

    def look(run: LiveRun, step: int) -> None:
        if (save := run._loop._checkpoints._saving) is not None:  # type: ignore[union-attr]
            save.join()
        if step == 11:
            assert RunDir(tmp_path / "run").checkpoint_steps() == []
            assert local_of(tmp_path).steps() == [4, 8, 10]
            gate.set()

    train_tiny(tmp_path / "run", lone_rank(), *words(tmp_path, shared=4), before_step=look)
    assert [(event["step"], event["saving"]) for event in read_named(tmp_path / "run", "save_skipped")] == [(8, 4)]
    assert RunDir(tmp_path / "run").checkpoint_steps() == [4, 12]
    assert read_column(tmp_path / "run") == well


def test_what_is_due_while_nodes_still_write_is_copied_right_after(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), manager.write_checkpoint

    def wait_first(place: Any, on: Any, content: Any) -> Any:
        assert content.step != 5 or gate.wait(60.0)
        return write(place, on, content)

    monkeypatch.setattr(manager, "write_checkpoint", wait_first)

    def look(run: LiveRun, step: int) -> None:
        if step == 8:
            gate.set()
        if step >= 8:
            run._loop._checkpoints.settle()  # type: ignore[union-attr]

    train_tiny(tmp_path / "run", lone_rank(), *words(tmp_path, local=5), before_step=look)
    assert [(event["step"], event["saving"]) for event in read_named(tmp_path / "run", "save_skipped")] == [(6, 5)]
    assert RunDir(tmp_path / "run").checkpoint_steps() == [8, 12]


def two_nodes() -> Ranks:
    """The two ranks of the pool, each on a node of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = Placement(rank, world, 0, 1, rank, world, "127.0.0.1", 0, "torchrun")
    return Ranks(place, torch.device("cpu"), grouped=True)


@ranks(2)
def test_ranks_go_on_from_what_their_node_saved(rank: int, tmp_path: Path, references: Path) -> None:
    layout = ("parallel.dp_replicate=1", "parallel.dp_shard=2")
    train(tmp_path, *layout, last=9, on=pool_ranks())
    train(tmp_path, *layout, on=pool_ranks())
    expected = train_well(references, *layout)
    if rank == 0:
        assert started(tmp_path) == [(0, None), (8, "local")]
        assert read_column(tmp_path / "run") == read_column(expected)
        assert list((tmp_path / "disk").iterdir()) == []


def own_disk(tmp_path: Path, rank: int) -> tuple[str, ...]:
    """Each node has a disk that the other does not see."""
    return (f"checkpoint.local_dir={tmp_path / f'disk-{rank}'}",)


def on_two_disks(
    rank: int, tmp_path: Path, expected: Path, *more: str, between: Callable[[], None] = lambda: None
) -> None:
    """A run on two nodes with disks of their own dies after step 9, and goes on; to what that has which is expected."""
    train(tmp_path, *more, *own_disk(tmp_path, rank), last=9, on=two_nodes())
    if rank == 0:
        between()
    dist.barrier()
    train(tmp_path, *more, *own_disk(tmp_path, rank), on=two_nodes())
    dist.barrier()
    if rank == 0:
        assert read_column(tmp_path / "run") == read_column(expected)
        assert [list((tmp_path / f"disk-{node}").glob("*")) for node in range(2)] == [[], []]


@ranks(2)
def test_files_of_another_node_are_fetched(rank: int, tmp_path: Path, references: Path) -> None:
    """Replicated parameters lie partly on one node and partly on the other."""
    expected = train_well(references, "parallel.dp_replicate=2")
    with mock.patch.object(local_tier, "make_transfers", wraps=local_tier.make_transfers) as made:
        on_two_disks(rank, tmp_path, expected, "parallel.dp_replicate=2")
    sent = [(each.name, each.sender, each.receiver) for call in made.call_args_list for each in call.args[1]]
    assert sent == [("tensors.json", 0, 1), ("rank-00000.bin", 0, 1), ("rank-00001.bin", 1, 0)]
    if rank == 0:
        assert started(tmp_path) == [(0, None), (8, "local")]


@ranks(2)
def test_two_nodes_may_be_on_one_machine(rank: int, tmp_path: Path, references: Path) -> None:
    """They see each other's folders, and both remove."""
    train(tmp_path, "parallel.dp_replicate=2", last=9, on=two_nodes())
    dist.barrier()
    if rank == 0:
        assert [node.name for node in local_of(tmp_path).nodes()] == ["node-0", "node-1"]
        assert local_of(tmp_path).steps() == [6, 8]
    dist.barrier()
    train(tmp_path, "parallel.dp_replicate=2", on=two_nodes())
    expected = train_well(references, "parallel.dp_replicate=2")
    if rank == 0:
        assert started(tmp_path) == [(0, None), (8, "local")]
        assert read_column(tmp_path / "run") == read_column(expected)
        assert list((tmp_path / "disk").iterdir()) == []


@ranks(2)
def test_a_node_that_lost_its_disk_brings_all_back_to_the_run_directory(
    rank: int, tmp_path: Path, references: Path
) -> None:
    expected, lose = train_well(references, "parallel.dp_replicate=2"), lambda: shutil.rmtree(tmp_path / "disk-1")
    on_two_disks(rank, tmp_path, expected, "parallel.dp_replicate=2", between=lose)
    if rank == 0:
        assert started(tmp_path) == [(0, None), (6, "shared")]
        (told,) = read_named(tmp_path / "run", "checkpoint_quarantined")
        assert told["reason"] == "no node has rank-00001.bin"


@ranks(2)
def test_fewer_ranks_read_what_more_have_saved_where_their_node_has_all(rank: int, tmp_path: Path) -> None:
    train(tmp_path, "parallel.dp_replicate=1", "parallel.dp_shard=2", last=9, on=pool_ranks())
    if rank == 0:
        train(tmp_path)
        assert started(tmp_path) == [(0, None), (8, "local")]
        assert read_named(tmp_path / "run", "started")[-1]["checkpoint_world"] == 2
    dist.barrier()
