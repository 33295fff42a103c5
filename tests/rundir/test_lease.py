"""Epochs, beats, fences: what a lease does on a real folder, with a clock that a test moves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shardway.errors import Fenced, JobError, UserError
from shardway.rundir import file_io
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import write_new
from shardway.rundir.lease import (
    KEPT,
    Beat,
    Claim,
    FollowerLease,
    Identity,
    Lease,
    LeaseFiles,
    LeaseOptions,
    LeaseTimes,
    LeaseVerdict,
    is_gone,
    own_identity,
    read_beat,
    survey,
    watch,
    write_beat,
    write_claim,
)

ELSEWHERE = Identity("n1", "boot", "pids", 7, "100")


@dataclass
class Hand:
    """A clock that goes on when somebody waits, and then does what it was told."""

    time: float = 100.0
    during: Callable[[float], None] = field(default=lambda time: None)

    def now(self) -> float:
        return self.time

    def date(self) -> str:
        return "2026-01-02 03:04:05"

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.during(self.time)


@pytest.fixture
def files(tmp_path: Path) -> LeaseFiles:
    return LeaseFiles(tmp_path / "lease")


@pytest.fixture
def hand() -> Hand:
    return Hand()


def lease_of(files: LeaseFiles, hand: Hand, who: Identity = ELSEWHERE) -> Lease:
    return Lease(files, "runs/a", LeaseOptions(who=who, clock=hand))


def taken(files: LeaseFiles, hand: Hand, who: Identity = ELSEWHERE) -> Lease:
    lease = lease_of(files, hand, who)
    lease.take(lambda line: None)
    lease.prune()
    return lease


def test_a_holder_elsewhere_is_watched_for_the_whole_time(files: LeaseFiles, hand: Hand) -> None:
    taken(files, hand)
    told: list[str] = []
    began = hand.now()
    second = lease_of(files, hand, replace(ELSEWHERE, host="n2"))
    second.take(told.append)
    assert told == ["another host (n1) held this run; watching for 15 s whether it still does"]
    assert 15.0 <= hand.now() - began < 17.0
    assert second.epoch == 2


def test_one_beat_is_enough_to_be_refused(files: LeaseFiles, hand: Hand) -> None:
    first = taken(files, hand)
    hand.during = lambda time: first.beat() if 114.0 < time < 114.6 else None
    with pytest.raises(UserError, match="another run is training into runs/a: process 7 on host n1 since "):
        lease_of(files, hand).take(lambda line: None)
    first.confirm()


@pytest.mark.parametrize("slept", ["asleep", "slow"])
def test_a_watcher_that_slept_begins_anew(files: LeaseFiles, hand: Hand, slept: str) -> None:
    taken(files, hand)
    standing = survey(files)
    assert standing is not None

    def sleep_on(time: float) -> None:
        hand.during = lambda time: None
        hand.time += 60.0

    class Slow(LeaseFiles):
        def names(self) -> list[str]:
            if hand.time < 110.0:
                hand.time += 60.0
            return super().names()

    if slept == "asleep":
        hand.during = sleep_on
    seen = Slow(files.folder) if slept == "slow" else files
    assert watch(seen, hand, standing, LeaseTimes()) is LeaseVerdict.SILENT
    assert hand.now() > 100.0 + 60.0 + 15.0


def test_a_watcher_that_sees_nothing_decides_nothing(files: LeaseFiles, hand: Hand) -> None:
    taken(files, hand)
    standing = survey(files)
    assert standing is not None

    class Away(LeaseFiles):
        def names(self) -> list[str]:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        watch(Away(files.folder), hand, standing, LeaseTimes())
    assert hand.now() > 115.0


def test_a_silence_holds_until_the_next_beat(files: LeaseFiles, hand: Hand) -> None:
    first = taken(files, hand)
    lease_of(files, hand).await_free(lambda line: None)
    standing = survey(files)
    assert standing is not None
    assert standing.given_up
    first.beat()
    standing = survey(files)
    assert standing is not None
    assert not standing.given_up


def test_a_holder_that_was_overtaken_finds_out(files: LeaseFiles, hand: Hand) -> None:
    first, second = taken(files, hand), lease_of(files, hand)
    hand.time += 5.0
    first.check()
    second.take(lambda line: None)
    for ask in (first.check, first.confirm, first.beat, FollowerLease(files, "runs/a", 1).confirm):
        with pytest.raises(Fenced, match=r"another run has taken over runs/a: .* \(epoch 2; this one had 1\)"):
            ask()
    before = read_beat(files, 1)
    first.release()
    assert read_beat(files, 1) == before
    second.confirm()
    FollowerLease(files, "runs/a", 2).confirm()


def test_files_that_are_away_cost_no_run(files: LeaseFiles, hand: Hand) -> None:
    first = taken(files, hand)
    away = files.folder.with_name("away")
    files.folder.rename(away)
    hand.time += 9.0
    first.check()
    hand.time += 600.0
    with pytest.raises(FileNotFoundError):
        first.check()
    away.rename(files.folder)
    first.check()
    first.confirm()


def test_a_run_of_another_folder_under_the_same_name_is_another_run(files: LeaseFiles, hand: Hand) -> None:
    first = taken(files, hand)
    files.folder.rename(files.folder.with_name("moved"))
    taken(files, hand)
    with pytest.raises(Fenced):
        first.confirm()


def test_nothing_is_said_after_a_release(files: LeaseFiles, hand: Hand) -> None:
    first = taken(files, hand)
    first.release()
    with pytest.raises(Fenced, match="has ended its writing in runs/a"):
        first.beat()
    assert read_beat(files, 1).released


def test_the_folder_stays_small_and_keeps_the_newest(files: LeaseFiles, hand: Hand) -> None:
    (files.folder).mkdir()
    (files.folder / "notes.txt").touch()
    (files.folder / ".beat-000001.ab12.tmp").touch()
    for _ in range(30):
        taken(files, hand).release()
    names = sorted(files.names())
    assert names[0] == "beat-000023"
    assert len(names) == 2 * KEPT + 1
    assert "epoch-000030.json" in names
    assert "notes.txt" in names


def test_an_epoch_below_the_highest_is_no_right(files: LeaseFiles, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody was asleep between a look and a claim, while others came, and old epochs were removed."""
    taken(files, hand).release()
    late, create = lease_of(files, hand), LeaseFiles.create

    def after_others(self: LeaseFiles, name: str, text: str) -> bool:
        monkeypatch.setattr(LeaseFiles, "create", create)
        for _ in range(KEPT + 2):
            taken(files, hand).release()
        return create(self, name, text)

    monkeypatch.setattr(LeaseFiles, "create", after_others)
    late.take(lambda line: None)
    assert late.epoch == KEPT + 4


def test_an_answer_that_was_lost_is_looked_up(files: LeaseFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, create = Claim(1, "mine", ELSEWHERE, "now"), LeaseFiles.create

    def lose(self: LeaseFiles, name: str, text: str) -> bool:
        create(self, name, text)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LeaseFiles, "create", lose)
    assert write_claim(files, claim)
    assert not write_claim(files, replace(claim, token="other"))


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(file_io.os, "link", refuse)
    assert write_new(tmp_path / "a", "one")
    assert not write_new(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "one"
    assert os.listdir(tmp_path) == ["a"]


def test_a_beat_of_nonsense_is_none(files: LeaseFiles) -> None:
    files.folder.mkdir()
    for text in ("", "x", "-3", "released"):
        files.replace("beat-000001", text)
        assert read_beat(files, 1).count == -1
    write_beat(files, 1, Beat(4, released=True))
    assert read_beat(files, 1) == Beat(4, released=True)


# --- who is gone


def test_only_what_is_certain_is_gone() -> None:
    own = own_identity()
    assert not is_gone(own)
    nobody = replace(own, pid=2**22 + 1)
    assert is_gone(nobody)
    assert is_gone(replace(own, started="1"))
    assert not is_gone(replace(own, started=""))
    for field_name in ("host", "boot", "namespace"):
        assert not is_gone(replace(nobody, **{field_name: "another"}))
        assert not is_gone(replace(nobody, **{field_name: ""}))


def test_a_process_of_somebody_else_that_cannot_be_seen_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("boot\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    other = Identity(own_identity().host, "boot", "pid:[1]", 4711, "100")
    monkeypatch.setattr(os, "kill", refuse)
    assert not is_gone(other, tmp_path)
    (tmp_path / "4711/task/4711").mkdir(parents=True)
    (tmp_path / "4711/stat").write_text(f"4711 (a) b) Z {' '.join('0' * 18)} 100 0")
    assert is_gone(other, tmp_path)
    (tmp_path / "4711/task/4712").mkdir()  # a thread that is still in the middle of a write
    assert not is_gone(other, tmp_path)


# --- the fence


def test_a_new_holder_takes_the_saves_that_earlier_ones_have_begun(tmp_path: Path, hand: Hand) -> None:
    run = RunDir(tmp_path)
    run.create()
    first = replace(run, lease=taken(LeaseFiles(tmp_path / "lease"), hand))
    partial = first.partial_checkpoint_path(3)
    assert partial.name == ".step-000000003.epoch-000001.partial"
    partial.mkdir()
    first.confirm_writer()
    second = replace(run, lease=taken(LeaseFiles(tmp_path / "lease"), hand))
    second.fence_saves()
    with pytest.raises(FileNotFoundError):
        partial.rename(run.checkpoint_path(3))
    assert [path.name for path in run.partial_checkpoints()] == [f"{partial.name}.fenced-000002.partial"]
    assert run.checkpoint_steps() == []
    assert second.partial_checkpoint_path(3) != partial
    assert (second.epoch, run.epoch, run.beside(2).epoch) == (2, 0, 2)
    run.beside(2).check_writer()
    run.confirm_writer()


def test_a_right_that_cannot_be_seen_is_no_right_now(tmp_path: Path, hand: Hand) -> None:
    run = RunDir(tmp_path)
    run.create()
    held = replace(run, lease=taken(LeaseFiles(tmp_path / "lease"), hand))
    (tmp_path / "lease").rename(tmp_path / "away")
    with pytest.raises(JobError, match=r"whether this run still holds .* cannot be seen: No such file or directory"):
        held.confirm_writer()
