"""Runs whose data do not fit on the node's disk and are staged window by window: the samples of the order, each byte
copied once an epoch, and never more on the disk than it has room for."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pool import ranks
from runs import (
    TINY,
    TINY_IMAGES,
    layout,
    lone_rank,
    pool_ranks,
    read_column,
    read_named,
    read_steps,
    signal_at,
    train_tiny,
)
from shardway.data import stage
from shardway.data.formats.base import FileParts
from shardway.data.formats.shard_file import write_record_shard, write_token_shard
from shardway.data.formats.shard_manifest import write_manifest
from shardway.data.joint_copy import GrowingFile
from shardway.data.open import open_described, order_of
from shardway.data.stage import StageFolder
from shardway.data.window_order import WindowOrder
from shardway.errors import JobError, SiteError, UserError
from shardway.ranks import stop
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import RunFile
from shardway.train import staging

FILES, ROWS = 8, 40
TOKENS = tuple(word for word in TINY if not word.startswith(("data.kind", "data.samples", "model.vocab")))
OF_TOKENS = ["data.kind=tokens", "model.vocab=32", "data.seq_len=24"]
"""A step of eight samples is a small part of the 22 that a file has."""
IMAGES = tuple(word for word in TINY_IMAGES if not word.startswith(("data.kind", "data.samples", "data.shape")))
WINDOWS = ("data.shuffle=windows", "data.record_ids=true", "optim.warmup=0 steps", "data.workers=0")


def draw_png(number: int) -> bytes:
    image_module = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8)).astype(np.uint8)
    stream = io.BytesIO()
    image_module.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def write_tokens(folder: Path) -> list[str]:
    drawn = np.random.default_rng(0)
    facts = []
    for number in range(FILES):
        documents = [drawn.integers(0, 32, int(drawn.integers(20, 90))).astype(np.uint16) for _ in range(ROWS // 4)]
        facts.append(write_token_shard(folder / f"{number:05d}.shard", [(each, None) for each in documents], "uint16"))
    write_manifest(folder, "tokens", facts, {"vocab": 32})
    return [*OF_TOKENS, f"data.path={folder}"]


def write_marked_tokens(folder: Path) -> list[str]:
    drawn, facts = np.random.default_rng(0), []
    for number in range(FILES):
        documents = [(drawn.integers(0, 32, 500).astype(np.uint16), np.arange(500) % 3 > 0 if number % 2 else None)]
        facts.append(write_token_shard(folder / f"{number:05d}.shard", documents, "uint16"))
    write_manifest(folder, "tokens", facts, {"vocab": 32})
    return [*OF_TOKENS, f"data.path={folder}"]


def rows_of(number: int) -> list[dict[str, Any]]:
    first = number * ROWS
    return [{"png": draw_png(row), "cls": row % 4} for row in range(first, first + ROWS - 3 * number)]


def write_records(folder: Path) -> list[str]:
    facts = [write_record_shard(folder / f"{number:05d}.shard", rows_of(number)) for number in range(FILES)]
    write_manifest(folder, "records", facts, {})
    return ["data.kind=shards", f"data.path={folder}", "data.inputs=png", "data.targets=cls"]


def write_webdataset(folder: Path) -> list[str]:
    for number in range(FILES):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for row, record in enumerate(rows_of(number)):
                for end, content in (("png", record["png"]), ("cls", f"{record['cls']}".encode())):
                    member = tarfile.TarInfo(f"{number}-{row:04}.{end}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return ["data.kind=webdataset", f"data.path={folder}", "data.inputs=png", "data.targets=cls"]


def write_parquet(folder: Path) -> list[str]:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number in range(FILES):
        table = pa.Table.from_pylist(rows_of(number))
        parquet.write_table(table, folder / f"{number:05d}.parquet", row_group_size=16)
    return ["data.kind=parquet", f"data.path={folder}", "data.inputs=png", "data.targets=cls"]


def write_mds(folder: Path) -> list[str]:
    shards = []
    for number in range(FILES):
        rows = rows_of(number)
        samples = [struct.pack("<I", len(row["png"])) + row["png"] + struct.pack("<q", row["cls"]) for row in rows]
        config = b'{"format": "mds"}'
        offsets = np.cumsum([4 + 4 * (len(rows) + 1) + len(config), *map(len, samples)]).astype("<u4")
        content = struct.pack("<I", len(rows)) + offsets.tobytes() + config + b"".join(samples)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(content)
        shards.append(
            {
                "column_names": ["png", "y"],
                "column_encodings": ["png", "int"],
                "column_sizes": [None, 8],
                "compression": None,
                "format": "mds",
                "hashes": [],
                "samples": len(rows),
                "size_limit": 2**26,
                "version": 2,
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return ["data.kind=mds", f"data.path={folder}", "data.inputs=png", "data.targets=y"]


def base_of(write: Callable[[Path], list[str]]) -> tuple[str, ...]:
    return TOKENS if write in (write_tokens, write_marked_tokens) else (*IMAGES, "data.shape=[1, 8, 8]")


class Disk:
    """A disk of a size, and what was copied to it: numbers of files, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, size: int) -> None:
        self.folder, self.size, self.copied = folder, size, list[int]()
        monkeypatch.setattr(stage, "SPARE_BYTES", 0)
        monkeypatch.setattr(staging, "LOOK_S", 0.005)
        monkeypatch.setattr(staging, "EXCHANGE_S", 0.01)
        usage = shutil.disk_usage
        monkeypatch.setattr(
            shutil,
            "disk_usage",
            lambda path: SimpleNamespace(free=self.size - self.used) if self._has(path) else usage(path),
        )
        put = StageFolder._put

        def note(own: StageFolder, growing: GrowingFile) -> None:
            self.copied.append(growing.number)
            put(own, growing)
            assert self.used <= self.size

        monkeypatch.setattr(StageFolder, "_put", note)

    def _has(self, path: Path) -> bool:
        return Path(path) == self.folder.parent or Path(path).is_relative_to(self.folder)

    @property
    def used(self) -> int:
        used = 0
        for path in self.folder.glob("*/objects/*"):
            if ".sums" not in path.name:
                used += max(0, stage._size_at(path))
        return used


def sizes_of(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.iterdir()) if path.suffix != ".json"]


def write_files(tmp_path: Path, write: Callable[[Path], list[str]], *more: str) -> tuple[list[str], list[int]]:
    """Data in a folder "data": the words of a run on all of them, and the sizes of their files."""
    folder = tmp_path / "data"
    folder.mkdir()
    return [*write(folder), *WINDOWS, "data.validation_fraction=0.0", *more], sizes_of(folder)


def small_windows(tmp_path: Path, write: Callable[[Path], list[str]], *more: str) -> tuple[list[str], list[int]]:
    """As `write_files`, with windows of two files."""
    words, sizes = write_files(tmp_path, write, *more)
    return [*words, f"data.window={2 * max(sizes)}B"], sizes


def train_plain(references: Path, write: Callable[[Path], list[str]]) -> Path:
    """A run over small windows of these data twice, read where they lie; trained when it is first asked for."""
    folder = references / f"windowed-{write.__name__}"
    if not folder.exists():
        folder.mkdir()
        words, _ = small_windows(folder, write, "train.steps=2 epochs")
        train_tiny(folder / "run", lone_rank(), *words, base=base_of(write))
    return folder / "run"


def list_ids(directory: Path) -> list[list[int]]:
    return [event["ids"] for event in read_steps(directory)]


@pytest.mark.parametrize(
    "write",
    [write_tokens, write_marked_tokens, write_records, write_webdataset, write_parquet, write_mds],
    ids=lambda write: write.__name__.removeprefix("write_"),
)
def test_data_larger_than_the_disk_train_alike_and_each_file_is_copied_once_an_epoch(
    tmp_path: Path,
    references: Path,
    monkeypatch: pytest.MonkeyPatch,
    quiet_threads: None,
    write: Callable[[Path], list[str]],
) -> None:
    disk, plain = tmp_path / "disk", train_plain(references, write)
    words, sizes = small_windows(tmp_path, write, "train.steps=2 epochs")
    small = Disk(monkeypatch, disk, 5 * max(sizes))
    train_tiny(tmp_path / "staged", lone_rank(), *words, f"data.stage={disk}", base=base_of(write))
    assert read_column(tmp_path / "staged") == read_column(plain)
    assert list_ids(tmp_path / "staged") == list_ids(plain)
    assert sorted(small.copied[:FILES]) == list(range(FILES))
    assert FILES < len(small.copied) <= 2 * FILES + 2  # and what the next step would read
    said = read_named(tmp_path / "staged", "staged")[0]["reason"]
    assert f"staged in {FILES // 2} windows of about" in said


def test_validation_reads_files_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None) -> None:
    folder, disk, other = tmp_path / "data", tmp_path / "disk", tmp_path / "held-out.npy"
    folder.mkdir()
    np.save(other, np.arange(300).astype(np.uint16) % 32)
    words = [*write_tokens(folder), *WINDOWS, "train.steps=1 epochs", "train.validate_every=7 steps", "data.seq_len=12"]
    sizes = sizes_of(folder)
    words.append(f"data.window={2 * max(sizes)}B")
    small = Disk(monkeypatch, disk, 6 * max(sizes))
    for name, held_out, whole in (("part", "data.validation_fraction=0.05", 0), ("own", f"data.validation={other}", 1)):
        small.copied.clear()
        plain, staged = tmp_path / f"{name}-plain", tmp_path / f"{name}-staged"
        train_tiny(plain, lone_rank(), *words, held_out, base=TOKENS)
        train_tiny(staged, lone_rank(), *words, held_out, f"data.stage={disk}", base=TOKENS)
        assert read_column(staged) == read_column(plain)
        losses = [[event["loss"] for event in read_named(each, "validation")] for each in (plain, staged)]
        assert losses[0] == losses[1]
        assert len(losses[0]) > 3
        assert len(small.copied) - whole <= FILES + 2  # and what the next step would read


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("write", [write_tokens, write_records])
def test_loader_processes_find_the_files_of_their_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None, write: Callable[[Path], list[str]]
) -> None:
    disk = tmp_path / "disk"
    words, sizes = write_files(tmp_path, write, "train.steps=2 epochs")
    words += [f"data.window={2 * max(sizes)}B", "data.prefetch=1", "train.global_batch=4"]
    train_tiny(tmp_path / "plain", lone_rank(), *words, base=base_of(write))
    small = Disk(monkeypatch, disk, 5 * max(sizes))
    words += [f"data.stage={disk}", "data.workers=1"]
    train_tiny(tmp_path / "staged", lone_rank(), *words, base=base_of(write))
    assert read_column(tmp_path / "staged") == read_column(tmp_path / "plain")
    assert FILES < len(small.copied) <= 2 * FILES + 2  # and what the next step would read


def test_a_run_that_goes_on_stages_the_window_of_its_position_first(
    tmp_path: Path, references: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    words, sizes = small_windows(tmp_path, write_tokens, "train.steps=2 epochs")
    for last, place in ((10, "a"), (27, "b"), (35, "off"), (None, "c")):
        with monkeypatch.context() as patched:
            small = Disk(patched, tmp_path / place, 5 * max(sizes))
            before = signal_at(last) if last is not None else None
            where = place if place == "off" else str(tmp_path / place)
            train_tiny(tmp_path / "run", lone_rank(), *words, f"data.stage={where}", base=TOKENS, before_step=before)
        if place == "b":
            source = open_described(RunFile.model_validate(RunDir(tmp_path / "run").read_resolved())).train
            order = order_of(RunFile.model_validate(RunDir(tmp_path / "run").read_resolved()), source)
            assert isinstance(order, WindowOrder)
            (window,) = order.windows_at(np.array([10 * 8]))
            assert set(order.blocks_of(window)) <= set(small.copied[:4])
    assert read_column(tmp_path / "run") == read_column(train_plain(references, write_tokens))


# --- several ranks, of one node or of several


@ranks(4)
def test_ranks_of_a_node_share_the_copies_and_a_node_with_room_has_all(
    rank: int, tmp_path: Path, references: Path
) -> None:
    folder, node = tmp_path / "data", tmp_path / f"node{rank // 2}"
    if rank == 0:
        folder.mkdir()
        write_tokens(folder)
    pool_ranks().barrier()
    words = [*OF_TOKENS, f"data.path={folder}", *WINDOWS, "data.validation_fraction=0.0"]
    sizes = sizes_of(folder)
    words += [f"data.window={2 * max(sizes)}B", "train.steps=2 epochs"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("NODE_DISK", str(node))
        small = Disk(monkeypatch, node, 100 * max(sizes) if rank > 1 else 5 * max(sizes))
        train_tiny(tmp_path / "run", pool_ranks(), *words, *layout(4, 1), "data.stage=$NODE_DISK", base=TOKENS)
    copied = pool_ranks().gather(small.copied)
    if rank == 0:
        plain = train_plain(references, write_tokens)
        assert read_column(tmp_path / "run") == pytest.approx(read_column(plain), rel=1e-5)
        assert FILES < len(copied[0] + copied[1]) <= 2 * FILES + 2  # and what the next step would read
        assert sorted(copied[2] + copied[3]) == list(range(FILES))
        told = [event["reason"] for event in read_named(tmp_path / "run", "staged")]
        assert any(": 0B from where they lie, " in each for each in told)


# --- what goes wrong


def test_a_damaged_file_ends_the_run_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    disk = tmp_path / "disk"
    words, sizes = write_files(tmp_path, write_tokens, "train.steps=1 epochs", "data.seq_len=12")
    words += [f"data.window={2 * max(sizes)}B", f"data.stage={disk}"]
    Disk(monkeypatch, disk, 5 * max(sizes))
    damaged = tmp_path / "data/00003.shard"
    content = bytearray(damaged.read_bytes())
    content[200] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(JobError, match=rf"{damaged} is damaged at byte 0"):
        train_tiny(tmp_path / "run", lone_rank(), *words, base=TOKENS)
    content[200] ^= 1
    damaged.write_bytes(content)
    train_tiny(tmp_path / "again", lone_rank(), *words, base=TOKENS)
    assert len(read_column(tmp_path / "again")) > 30


def test_a_damaged_file_is_read_where_it_lies_if_samples_may_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    disk, skip = tmp_path / "disk", ("guard.damaged_data=skip", "guard.max_damaged=1000")
    words, sizes = write_files(tmp_path, write_tokens, "train.steps=1 epochs", *skip)
    words += [f"data.window={2 * max(sizes)}B"]
    damaged = tmp_path / "data/00003.shard"
    content = bytearray(damaged.read_bytes())
    content[200] ^= 1
    damaged.write_bytes(content)
    train_tiny(tmp_path / "plain", lone_rank(), *words, base=TOKENS)
    small = Disk(monkeypatch, disk, 5 * max(sizes))
    train_tiny(tmp_path / "staged", lone_rank(), *words, f"data.stage={disk}", base=TOKENS)
    assert read_column(tmp_path / "staged") == read_column(tmp_path / "plain")
    left_out = [read_named(tmp_path / each, "samples_left_out") for each in ("plain", "staged")]
    assert left_out[0]
    assert [each["ids"] for each in left_out[0]] == [each["ids"] for each in left_out[1]]
    assert {each["file"] for each in left_out[1]} == {str(damaged)}
    assert 3 in small.copied  # it was tried


def test_a_disk_without_room_for_the_windows_of_a_step_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    disk = tmp_path / "disk"
    words, sizes = write_files(tmp_path, write_tokens, f"data.stage={disk}")
    Disk(monkeypatch, disk, 3 * max(sizes))
    with pytest.raises(SiteError, match=r"and 2 windows of .* must be there at once") as caught:
        train_tiny(tmp_path / "run", lone_rank(), *words, f"data.window={2 * max(sizes)}B", base=TOKENS)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "run").exists()
    assert not disk.exists()
    train_tiny(tmp_path / "run", lone_rank(), *words, f"data.window={max(sizes)}B", "train.steps=9", base=TOKENS)
    assert len(read_column(tmp_path / "run")) == 9


def test_data_whose_samples_do_not_follow_each_other_by_file_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros(500, np.uint16))
    words = ["data.kind=tokens", "model.vocab=32", "data.shuffle=windows"]
    with pytest.raises(UserError, match=r'"windows" cannot go with these data, whose samples(?s:.*)shardway data prep'):
        train_tiny(tmp_path / "run", lone_rank(), *words, f"data.path={tmp_path / 't.npy'}", base=TOKENS)


@pytest.mark.parametrize("whole", [0, 5])
def test_a_run_that_is_asked_to_stop_waits_for_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None, whole: int
) -> None:
    disk = tmp_path / "disk"
    words, sizes = write_files(tmp_path, write_tokens, f"data.stage={disk}")
    small, take_well = Disk(monkeypatch, disk, 5 * max(sizes)), StageFolder._take

    def take(self: StageFolder, *arguments: Any) -> bool:
        if len(small.copied) < whole:
            return take_well(self, *arguments)
        if waits or not whole:
            os.kill(os.getpid(), signal.SIGTERM)
        return False  # as if another process were copying without end

    monkeypatch.setattr(stop, "NOTICE_S", 0.1)
    waits, wait_for = list[int](), FileParts._wait_for
    monkeypatch.setattr(FileParts, "_wait_for", lambda *arguments: (waits.append(1), wait_for(*arguments)))
    monkeypatch.setattr(StageFolder, "_take", take)
    words += [f"data.window={2 * max(sizes)}B", "train.steps=2 epochs"]
    outcome = train_tiny(tmp_path / "run", lone_rank(), *words, base=TOKENS)
    assert outcome.state == "stopped"
    assert bool(outcome.step) == bool(whole)


def test_a_step_that_waits_long_is_reported_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    disk = tmp_path / "disk"
    words, sizes = small_windows(tmp_path, write_tokens, "train.steps=1 epochs")
    train_tiny(tmp_path / "plain", lone_rank(), *words, base=TOKENS)
    small, take_well, waits = Disk(monkeypatch, disk, 5 * max(sizes)), StageFolder._take, list[int]()
    wait_for = FileParts._wait_for

    def take(self: StageFolder, *arguments: Any) -> bool:
        return (len(small.copied) < 5 or bool(waits)) and take_well(self, *arguments)

    monkeypatch.setattr(staging, "LONG_S", 0.0)
    monkeypatch.setattr(FileParts, "_wait_for", lambda *arguments: (waits.append(1), wait_for(*arguments)))
    monkeypatch.setattr(StageFolder, "_take", take)
    train_tiny(tmp_path / "staged", lone_rank(), *words, f"data.stage={disk}", base=TOKENS)
    assert read_column(tmp_path / "staged") == read_column(tmp_path / "plain")
    (told,) = read_named(tmp_path / "staged", "data_slow")
    assert "for files that are staged while the run trains" in told["reason"]


@pytest.mark.parametrize("write", [write_records, write_webdataset, write_parquet, write_mds])
def test_no_sample_is_read_where_the_data_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None, write: Callable[[Path], list[str]]
) -> None:
    """Each file is gone once it is copied."""
    disk = tmp_path / "disk"
    words, sizes = small_windows(tmp_path, write, "train.steps=20")
    train_tiny(tmp_path / "plain", lone_rank(), *words, base=base_of(write))
    Disk(monkeypatch, disk, 5 * max(sizes))
    copy = StageFolder._copy

    def move(own: StageFolder, parts: FileParts, number: int, *rest: Any, **more: Any) -> None:
        copy(own, parts, number, *rest, **more)
        parts.path(number).rename(tmp_path / f"gone-{number}")

    monkeypatch.setattr(StageFolder, "_copy", move)
    train_tiny(tmp_path / "staged", lone_rank(), *words, f"data.stage={disk}", base=base_of(write))
    assert read_column(tmp_path / "staged") == read_column(tmp_path / "plain")
    assert len(list(tmp_path.glob("gone-*"))) > 5
