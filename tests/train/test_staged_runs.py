"""Runs whose data are copied to the node's disk: the same samples and losses from there, and what goes wrong on it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import io
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import psutil
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
from shardway.data.formats.base import DamagedData
from shardway.data.formats.shard_file import write_record_shard, write_token_shard
from shardway.data.formats.shard_manifest import write_manifest
from shardway.data.open import Data
from shardway.data.stage import StageFolder
from shardway.errors import SiteError
from shardway.hardware.mounts import MountedFileSystem
from shardway.ranks.heartbeat import Progress
from shardway.resolve.draft import Resolved
from shardway.train import run as run_module
from shardway.train import staging
from shardway.units import format_bytes
from speed import picked

TOKENS = tuple(word for word in TINY if not word.startswith(("data.kind", "data.samples", "model.vocab")))
IMAGES = tuple(word for word in TINY_IMAGES if not word.startswith(("data.kind", "data.samples", "data.shape")))
HELD = ("data.record_ids=true", "train.steps=4", "train.validate_every=2 steps", "optim.warmup=0 steps")
ROWS = 60


def draw_texts() -> list[str]:
    dice = random.Random(3)
    return ["".join(dice.choice(("ab", "cde", "f")) for _ in range(dice.randint(4, 30))) for _ in range(ROWS)]


def draw_tokens(count: int = 12 * ROWS + 1, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 32, count).astype(np.uint16)


def draw_pixels() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 256, (ROWS, 8, 8)).astype(np.uint8)


def draw_png(number: int) -> bytes:
    image_module = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image_module.fromarray(draw_pixels()[number]).save(stream, "png")
    return stream.getvalue()


def write_text(folder: Path) -> list[str]:
    (folder / "a.txt").write_text("".join(draw_texts()))
    return ["data.kind=text", f"data.path={folder / 'a.txt'}", f"data.cache={folder / 'cache'}", "model.vocab=256"]


def write_texts(folder: Path) -> list[str]:
    for number, text in enumerate(draw_texts()):
        (folder / f"{number}.txt").write_text(text)
    words = [f"data.path={folder}", f"data.cache={folder / 'cache'}", "data.include=*.txt", "data.pack=true"]
    return ["data.kind=text", *words, "model.vocab=256"]


def write_tokens(folder: Path) -> list[str]:
    np.save(folder / "t.npy", draw_tokens())
    return ["data.kind=tokens", f"data.path={folder / 't.npy'}", "model.vocab=32"]


def write_validated(folder: Path) -> list[str]:
    np.save(folder / "v.npy", draw_tokens(12 * 16 + 1, seed=9))
    return [*write_tokens(folder), f"data.validation={folder / 'v.npy'}"]


def write_blend(folder: Path) -> list[str]:
    for number in (1, 2):
        np.save(folder / f"{number}.npy", draw_tokens(12 * 20 * number + 1, seed=number))
    named = ", ".join(f'{{path = "{folder / f"{number}.npy"}", weight = {number}}}' for number in (1, 2))
    return ["data.kind=tokens", f"data.blend=[{named}]", "model.vocab=32"]


def write_prepared(folder: Path) -> list[str]:
    documents = np.array_split(draw_tokens(), 12)
    facts = [
        write_token_shard(folder / f"{number:05d}.shard", [(each, None) for each in half], "uint16")
        for number, half in enumerate((documents[:5], documents[5:]))
    ]
    write_manifest(folder, "tokens", facts, {"vocab": 32})
    return ["data.kind=tokens", f"data.path={folder}", "model.vocab=32"]


def write_record_shards(folder: Path) -> list[str]:
    rows = [{"png": draw_png(number), "cls": number % 4} for number in range(ROWS)]
    facts = [write_record_shard(folder / "00000.shard", rows)]
    write_manifest(folder, "records", facts, {})
    return ["data.kind=shards", f"data.path={folder}", "data.inputs=png", "data.targets=cls"]


def write_megatron(folder: Path) -> list[str]:
    tokens = draw_tokens()
    (folder / "m.bin").write_bytes(tokens.tobytes())
    lengths = np.diff([*range(0, len(tokens), 50), len(tokens)]).astype(np.int32)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    pointers = np.cumsum([0, *lengths])[:-1].astype(np.int64) * 2
    marks = np.arange(len(lengths) + 1, dtype=np.int64)
    (folder / "m.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + marks.tobytes())
    return ["data.kind=megatron", f"data.path={folder / 'm'}", "model.vocab=32"]


def write_packed_megatron(folder: Path) -> list[str]:
    return [*write_megatron(folder), "data.pack=true"]


def write_jsonl(folder: Path) -> list[str]:
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in draw_texts()))
    words = ["data.inputs=text", "data.pack=true", f"data.cache={folder / 'cache'}", "model.vocab=256"]
    return ["data.kind=jsonl", f"data.path={folder / 'd.jsonl'}", *words]


def write_webdataset(folder: Path) -> list[str]:
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, ROWS, 3):
                for end, content in (("png", draw_png(number)), ("cls", f"{number % 4}".encode())):
                    member = tarfile.TarInfo(f"{number:04}.{end}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return ["data.kind=webdataset", f"data.path={folder}", "data.inputs=png", "data.targets=cls"]


def write_hdf5(folder: Path) -> list[str]:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "d.h5", "w") as file:
        file["x"], file["y"] = draw_pixels()[:, None], np.arange(ROWS) % 4
    return ["data.kind=hdf5", f"data.path={folder / 'd.h5'}", "data.inputs=x", "data.targets=y"]


def write_lmdb(folder: Path) -> list[str]:
    lmdb = pytest.importorskip("lmdb")
    environment = lmdb.open(str(folder / "d"), map_size=2**24)
    with environment.begin(write=True) as transaction:
        for number in range(ROWS):
            transaction.put(f"{number}".encode(), draw_png(number))
    environment.close()
    words = ["data.inputs=value", "data.targets=key", f"model.classes={ROWS}"]
    return ["data.kind=lmdb", f"data.path={folder / 'd'}", *words]


def table_of_images() -> Any:
    pa = pytest.importorskip("pyarrow")
    return pa.table({"png": [draw_png(number) for number in range(ROWS)], "y": [number % 4 for number in range(ROWS)]})


def write_parquet(folder: Path) -> list[str]:
    table = table_of_images()
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "d.parquet", row_group_size=20)
    return ["data.kind=parquet", f"data.path={folder}", "data.inputs=png", "data.targets=y"]


def write_arrow(folder: Path) -> list[str]:
    table, pa = table_of_images(), pytest.importorskip("pyarrow")
    with pa.ipc.new_file(folder / "d.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return ["data.kind=arrow", f"data.path={folder}", "data.inputs=png", "data.targets=y"]


def write_mds(folder: Path) -> list[str]:
    samples = []
    for number in range(ROWS):
        png = draw_png(number)
        samples.append(struct.pack("<I", len(png)) + png + struct.pack("<q", number % 4))
    config = b'{"format": "mds"}'
    offsets = np.cumsum([4 + 4 * (ROWS + 1) + len(config), *map(len, samples)]).astype("<u4")
    content = struct.pack("<I", ROWS) + offsets.tobytes() + config + b"".join(samples)
    (folder / "shard.00000.mds").write_bytes(content)
    described = {
        "column_names": ["png", "y"],
        "column_encodings": ["png", "int"],
        "column_sizes": [None, 8],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "samples": ROWS,
        "size_limit": 2**26,
        "version": 2,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(content), "hashes": {}},
        "zip_data": None,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [described]}))
    return ["data.kind=mds", f"data.path={folder}", "data.inputs=png", "data.targets=y"]


def write_packed_mds(folder: Path) -> list[str]:
    words, name = write_mds(folder), "shard.00000.mds"
    packed = gzip.compress((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / f"{name}.gz").write_bytes(packed)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= {
        "compression": "gz:6",
        "zip_data": {"basename": f"{name}.gz", "bytes": len(packed), "hashes": {}},
    }
    (folder / "index.json").write_text(json.dumps(index))
    return words


def write_image_folder(folder: Path) -> list[str]:
    for number in range(ROWS):
        (folder / f"c{number % 4}").mkdir(exist_ok=True)
        (folder / f"c{number % 4}" / f"{number}.png").write_bytes(draw_png(number))
    return ["data.kind=images", f"data.path={folder}"]


def write_arrays(folder: Path) -> list[str]:
    np.save(folder / "x.npy", draw_pixels())
    np.save(folder / "y.npy", np.arange(ROWS) % 4)
    return ["data.kind=arrays", f"data.path={folder}"]


OF_TOKENS = [
    *(write_text, write_texts, write_tokens, write_validated, write_blend, write_prepared, write_megatron),
    *(write_packed_megatron, write_jsonl),
]
OF_IMAGES = [
    *(write_record_shards, write_webdataset, write_hdf5, write_lmdb, write_parquet, write_arrow, write_mds),
    *(write_packed_mds, write_image_folder, write_arrays),
]


@pytest.fixture(autouse=True)
def no_room_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "SPARE_BYTES", 0)


def base_of(write: Callable[[Path], list[str]]) -> tuple[str, ...]:
    if write in OF_TOKENS:
        return TOKENS
    return IMAGES if write is write_arrays else (*IMAGES, "data.shape=[1, 8, 8]")


def move_away(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on the data of a run are gone once they are staged."""

    def stage_and_move(session: Any, data: Data) -> Data:
        staged = staging.stage_for_node(session, data)
        folder.rename(folder.with_name("gone"))
        return staged

    monkeypatch.setattr(run_module, "stage_for_node", stage_and_move)


def list_ids(directory: Path) -> list[list[int]]:
    return [event["ids"] for event in read_steps(directory)]


@pytest.mark.parametrize("write", [*OF_TOKENS, *OF_IMAGES], ids=lambda write: write.__name__.removeprefix("write_"))
def test_staged_data_train_alike_and_the_data_are_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None, write: Callable[[Path], list[str]]
) -> None:
    folder, plain, staged = tmp_path / "data", tmp_path / "plain", tmp_path / "staged"
    folder.mkdir()
    words = [*write(folder), *HELD]
    train_tiny(plain, lone_rank(), *words, base=base_of(write))
    move_away(monkeypatch, folder)
    train_tiny(staged, lone_rank(), *words, f"data.stage={tmp_path / 'disk'}", base=base_of(write))
    assert read_column(staged) == read_column(plain)
    assert len(read_column(staged)) == 4
    assert list_ids(staged) == list_ids(plain)
    losses = [[event["loss"] for event in read_named(each, "validation")] for each in (plain, staged)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert "copied to disks of nodes" in read_named(staged, "staged")[0]["reason"]
    assert not read_named(staged, "not_staged")


# --- damage, and disks that cannot take the data


def write_large(folder: Path) -> list[str]:
    np.save(folder / "t.npy", draw_tokens(2**20))
    return ["data.kind=tokens", f"data.path={folder / 't.npy'}", "model.vocab=32"]


def find_staged(disk: Path, name: str) -> Path:
    (found,) = (disk / f"shardway-stage-{os.getuid()}" / "sets").glob(f"*/{name}")
    return found


def test_a_flipped_byte_of_a_staged_file_is_named_and_what_removes_it(tmp_path: Path, quiet_threads: None) -> None:
    folder, disk = tmp_path / "data", tmp_path / "disk"
    folder.mkdir()
    words = [*write_large(folder), *HELD, f"data.stage={disk}"]
    train_tiny(tmp_path / "first", lone_rank(), *words, base=TOKENS)
    staged = find_staged(disk, "t.npy")
    assert (staged.stat().st_size, staged.stat().st_mtime_ns) == (
        (folder / "t.npy").stat().st_size,
        (folder / "t.npy").stat().st_mtime_ns,
    )
    with staged.open("r+b") as stream:
        for at in range(500, 2**21, 2**18):
            stream.seek(at)
            stream.write(b"\x1f")
    with pytest.raises(DamagedData) as caught:
        train_tiny(tmp_path / "second", lone_rank(), *words, base=TOKENS)
    message = str(caught.value)
    assert message.startswith(f"{staged} is damaged at byte ")
    command = message.partition("`")[2].partition("`")[0]
    assert command == f"find {disk / staged.parts[len(disk.parts)]} -samefile {staged} -delete"
    subprocess.run(command.split(), check=True)
    train_tiny(tmp_path / "third", lone_rank(), *words, base=TOKENS)
    assert read_column(tmp_path / "third") == read_column(tmp_path / "first")
    assert staged.read_bytes() == (folder / "t.npy").read_bytes()


def tell_disk_size(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Every disk says that it has so much room."""
    size = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda path: size)


def test_a_folder_of_the_users_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    tell_disk_size(monkeypatch, 1000)
    words = [*write_large(folder), *HELD, f"data.stage={tmp_path / 'disk'}"]
    with pytest.raises(SiteError, match="has 1kB free, and 2097280B are to be copied there") as caught:
        train_tiny(tmp_path / "run", lone_rank(), *words, base=TOKENS)
    assert caught.value.exit_code == 3
    assert 'set data.stage = "off"' in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "disk").exists()


def test_a_variable_of_the_nodes_is_filled_in_and_one_that_is_not_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    words = [*write_tokens(folder), *HELD, "data.stage=$NODE_DISK/deep"]
    with pytest.raises(SiteError, match=r"names \$NODE_DISK, which is not set on"):
        train_tiny(tmp_path / "refused", lone_rank(), *words, base=TOKENS)
    assert not (tmp_path / "refused").exists()
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    train_tiny(tmp_path / "run", lone_rank(), *words, base=TOKENS)
    assert find_staged(tmp_path / "disk" / "deep", "t.npy").is_file()


def find_lock(disk: Path) -> Path:
    (lock,) = (disk / f"shardway-stage-{os.getuid()}" / "locks").glob("set-*")
    return lock


def is_held(lock: Path) -> bool:
    with lock.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("fails", [False, True])
def test_a_set_is_held_while_a_run_lasts_and_no_longer(tmp_path: Path, quiet_threads: None, fails: bool) -> None:
    folder, disk, held = tmp_path / "data", tmp_path / "disk", []
    folder.mkdir()
    words = [*write_tokens(folder), *HELD, f"data.stage={disk}"]

    def look(run: Any, step: int) -> None:
        held.append(is_held(find_lock(disk)))
        if fails and step == 2:
            raise OSError("of the test")

    with pytest.raises(OSError, match="of the test") if fails else contextlib.nullcontext():
        train_tiny(tmp_path / "run", lone_rank(), *words, base=TOKENS, before_step=look)
    assert held == [True] * (2 if fails else 4)
    assert not is_held(find_lock(disk))


def test_a_run_goes_on_with_its_data_elsewhere(tmp_path: Path, quiet_threads: None) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    words = [*write_tokens(folder), *HELD]
    train_tiny(tmp_path / "plain", lone_rank(), *words, base=TOKENS)
    for last, place in ((1, "off"), (2, str(tmp_path / "a")), (3, str(tmp_path / "b")), (None, "off")):
        before = signal_at(last) if last is not None else None
        train_tiny(tmp_path / "run", lone_rank(), *words, f"data.stage={place}", base=TOKENS, before_step=before)
    assert read_column(tmp_path / "run") == read_column(tmp_path / "plain")


# --- several ranks, of one node or of several


def start_two_nodes(monkeypatch: pytest.MonkeyPatch, rank: int, disks: Path) -> None:
    """Ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1, each with a disk of its own."""
    monkeypatch.setenv("NODE_DISK", str(disks / f"node{rank // 2}"))
    monkeypatch.setattr(stage, "SPARE_BYTES", 0)
    monkeypatch.setattr(staging, "EXCHANGE_S", 0.05)


def count_reads(monkeypatch: pytest.MonkeyPatch, folder: Path, counted: Path) -> None:
    """From now on this process writes down how many bytes it reads below a folder with os.pread."""
    read = os.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        found = read(descriptor, size, offset)
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder)):
            with counted.open("a") as stream:
                stream.write(f"{len(found)}\n")
        return found

    monkeypatch.setattr(os, "pread", pread)


@ranks(4)
def test_each_byte_is_read_once_for_all_nodes(rank: int, tmp_path: Path) -> None:
    folder, names = tmp_path / "data", [f"{number}.npy" for number in range(5)]
    if rank == 0:
        folder.mkdir()
        for number, name in enumerate(names):
            np.save(folder / name, draw_tokens(300_000 + number, seed=number))
    parts = ", ".join(f'{{path = "{folder / name}", weight = 1}}' for name in names)
    words = ["data.kind=tokens", f"data.blend=[{parts}]", "model.vocab=32", *HELD, "data.stage=$NODE_DISK"]
    pool_ranks().barrier()
    with pytest.MonkeyPatch.context() as monkeypatch:
        start_two_nodes(monkeypatch, rank, tmp_path)
        count_reads(monkeypatch, folder, tmp_path / f"read-{rank}")
        train_tiny(tmp_path / "run", pool_ranks(), *words, *layout(4, 1), base=TOKENS)
    pool_ranks().barrier()
    read = sum(int(line) for path in tmp_path.glob("read-*") for line in path.read_text().split())
    whole = sum((folder / name).stat().st_size for name in names)
    assert read == whole  # once for both nodes
    for node in (0, 1):
        for name in names:
            assert find_staged(tmp_path / f"node{node}", name).read_bytes() == (folder / name).read_bytes()


@ranks(4)
def test_an_error_on_one_node_is_raised_on_all(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    if rank == 0:
        folder.mkdir()
        write_large(folder)
    pool_ranks().barrier()
    words = ["data.kind=tokens", f"data.path={folder / 't.npy'}", "model.vocab=32", *HELD, "data.stage=$NODE_DISK"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        start_two_nodes(monkeypatch, rank, tmp_path)
        if rank == 2:  # the one of its node that copies
            monkeypatch.setattr(StageFolder, "_grow", refuse_full)
        with pytest.raises(SiteError, match=r"node1/shardway-stage-\d+ on .* is full \(No space left on device\)"):
            train_tiny(tmp_path / "run", pool_ranks(), *words, *layout(4, 1), base=TOKENS)
    pool_ranks().barrier()
    assert not (tmp_path / "run").exists()


def refuse_full(self: StageFolder, parts: Any, number: int, *rest: Any, **more: Any) -> None:
    raise self._explain(OSError(errno.ENOSPC, "No space left on device"), parts.path(number))


def choose_by_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """data.stage is what a site's profile names, and every folder is on a file system that nodes share."""
    monkeypatch.setattr(Resolved, "is_derived", lambda self, dotted: True)
    monkeypatch.setattr(
        staging, "find_mount", lambda path, mounts: MountedFileSystem(PurePosixPath("/"), "lustre", "x")
    )


@ranks(4)
def test_a_node_whose_disk_is_too_small_reads_the_data_where_they_lie(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    if rank == 0:
        folder.mkdir()
        write_large(folder)
    pool_ranks().barrier()
    words = ["data.kind=tokens", f"data.path={folder / 't.npy'}", "model.vocab=32", *HELD, "data.stage=$NODE_DISK"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        start_two_nodes(monkeypatch, rank, tmp_path)
        choose_by_site(monkeypatch)
        if rank > 1:
            tell_disk_size(monkeypatch, 1000)
        train_tiny(tmp_path / "run", pool_ranks(), *words, *layout(4, 1), base=TOKENS)
    pool_ranks().barrier()
    assert find_staged(tmp_path / "node0", "t.npy").is_file()
    assert not (tmp_path / "node1").exists()
    if rank == 0:
        (told,) = read_named(tmp_path / "run", "not_staged")
        assert told["reason"].startswith("ranks 2 and 3 read the data where they lie: data.stage: ")
        assert "has 1kB free" in told["reason"]
        assert len(read_column(tmp_path / "run")) == 4


def test_data_that_no_other_node_sees_are_not_staged_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(Resolved, "is_derived", lambda self, dotted: True)
    words = [*write_tokens(folder), *HELD, f"data.stage={tmp_path / 'disk'}"]
    train_tiny(tmp_path / "run", lone_rank(), *words, base=TOKENS)
    (told,) = read_named(tmp_path / "run", "not_staged")
    assert told["reason"] == "the data are read where they lie: they are not on a file system that nodes share"
    assert not (tmp_path / "disk").exists()


def test_a_run_that_is_asked_to_stop_copies_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    words = [*write_tokens(folder), *HELD, f"data.stage={tmp_path / 'disk'}"]

    def take(self: StageFolder, *arguments: Any) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        arguments[-1].note()
        return False  # as if another process were copying without end

    monkeypatch.setattr(staging, "EXCHANGE_S", 0.05)
    monkeypatch.setattr(StageFolder, "_take", take)
    outcome = train_tiny(tmp_path / "run", lone_rank(), *words, base=TOKENS)
    assert (outcome.state, outcome.step) == ("stopped", 0)
    assert read_named(tmp_path / "run", "not_staged")[0]["reason"].endswith("the run was asked to stop")


def test_a_long_copy_is_no_hang_and_one_that_stands_still_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    """The heartbeat changes as long as bytes are copied."""
    folder, beats = tmp_path / "data", list[int]()
    folder.mkdir()
    words = [
        *write_tokens(folder),
        *HELD,
        f"data.stage={tmp_path / 'disk'}",
        "run.start_timeout=40ms",
        "run.collective_timeout=30ms",
    ]
    monkeypatch.setattr(staging, "EXCHANGE_S", 0.005)
    take = StageFolder._take

    def take_slowly(self: StageFolder, *arguments: Any) -> bool:
        progress = arguments[-1]
        for grows in (1, 0):
            before = len(beats)
            for _ in range(30):
                progress.note(grows)
                time.sleep(0.01)
            beats.append(-1 if grows else -2)
            assert (len(beats) > before + 5) == bool(grows)
        return take(self, *arguments)

    enter = Progress.enter
    monkeypatch.setattr(
        Progress, "enter", lambda self, activity, step: (beats.append(step), enter(self, activity, step))
    )
    monkeypatch.setattr(StageFolder, "_take", take_slowly)
    train_tiny(tmp_path / "run", lone_rank(), *words, base=TOKENS)


def test_a_run_that_is_killed_while_it_copies_goes_on_with_what_is_missing(tmp_path: Path, warm_starts: None) -> None:
    folder, disk = tmp_path / "data", tmp_path / "disk"
    folder.mkdir()
    facts = [
        write_token_shard(folder / f"{number}.shard", [(draw_tokens(2**23, seed=number), None)], "uint16")
        for number in range(12)
    ]
    write_manifest(folder, "tokens", facts, {"vocab": 32})
    words = ["data.kind=tokens", f"data.path={folder}", "model.vocab=32", *HELD, f"data.stage={disk}"]
    objects = disk / f"shardway-stage-{os.getuid()}" / "objects"
    command = [
        str(Path(sys.executable).with_name("shardway")),
        "train",
        "--dir",
        str(tmp_path / "run"),
        *TOKENS,
        *words,
    ]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 60
    while len(list(objects.glob("[!.]*.sums"))) <= 2 or not list(objects.glob(".*.part")):
        assert killed.poll() is None
        assert time.monotonic() < until
        time.sleep(0.001)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    there = {path.name: path.stat().st_ino for path in objects.glob("[!.]*") if not path.name.endswith(".sums")}
    assert 0 < len(there) < 12
    assert list(objects.glob(".*.part"))
    train_tiny(tmp_path / "run", lone_rank(), *words, base=TOKENS)
    assert not list(objects.glob(".*"))
    now = {path.name: path.stat().st_ino for path in objects.iterdir() if not path.name.endswith(".sums")}
    assert len(now) == 12
    assert now.items() >= there.items()
    missing = sum(each.bytes for each in facts[len(there) :])
    assert read_named(tmp_path / "run", "staged")[0]["reason"].startswith(format_bytes(missing))


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    "write",
    picked(
        [write_record_shards, write_lmdb, write_blend, write_packed_megatron, write_jsonl, write_mds],
        write_lmdb,
        write_blend,
        write_packed_megatron,
    ),
)
def test_loader_processes_read_what_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None, write: Callable[[Path], list[str]]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    words = [*write(folder), *HELD, "data.workers=1"]
    train_tiny(tmp_path / "plain", lone_rank(), *words, base=base_of(write))
    move_away(monkeypatch, folder)
    words, seen = [*words, f"data.stage={tmp_path / 'disk'}"], list[int]()

    def count_loaders(run: Any, step: int) -> None:
        seen.append(sum(child.name() == "pt_data_worker" for child in psutil.Process().children(recursive=True)))

    train_tiny(tmp_path / "staged", lone_rank(), *words, base=base_of(write), before_step=count_loaders)
    assert max(seen) == 1
    assert read_column(tmp_path / "staged") == read_column(tmp_path / "plain")


def test_what_a_compressed_shard_holds_is_unpacked_on_the_disk_of_the_node(tmp_path: Path, quiet_threads: None) -> None:
    folder, disk = tmp_path / "data", tmp_path / "disk"
    folder.mkdir()
    words = [*write_packed_mds(folder), *HELD, f"data.stage={disk}"]
    train_tiny(tmp_path / "run", lone_rank(), *words, base=base_of(write_packed_mds))
    assert len(list(disk.glob("*/sets/*/.unpacked/mds/*.mds"))) == 1
