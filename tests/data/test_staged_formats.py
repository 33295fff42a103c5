"""Every kind of data that lies in files is read from its staged copy alone, by this process and by a spawned one."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_elastic import CASES, DATA, NUMBERS, PICTURES, Case, Room, numbers, pictures, texts

from shardway.data.content import DataPath
from shardway.data.convert import WRITERS
from shardway.data.detect import open_records
from shardway.data.formats.base import Records
from shardway.data.sources.base import DataSource, is_drawing, stage_source
from shardway.data.stage import StageFolder


def write_zst(path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path.write_bytes(zstandard.ZstdCompressor().compress(b"".join(lines_of(texts()))))


def write_gz_numbers(path: Path) -> None:
    with gzip.open(path, "wb") as stream:
        stream.writelines(lines_of({"x": row["x"].tolist(), "y": int(row["y"])} for row in numbers()))


def lines_of(records: Iterator[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(record).encode() + b"\n" for record in records]


def write_packed_mds(folder: Path) -> None:
    WRITERS["mds"](pictures(), folder)
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        raw = folder / shard["raw_data"]["basename"]
        packed = gzip.compress(raw.read_bytes())
        raw.with_name(f"{raw.name}.gz").write_bytes(packed)
        raw.unlink()
        shard["compression"] = "gz"
        shard["zip_data"] = {"basename": f"{raw.name}.gz", "bytes": len(packed), "hashes": {}}
    (folder / "index.json").write_text(json.dumps(index))


MORE: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "lines-zst": ("lines.jsonl.zst", write_zst),
    "numbers-gz": ("numbers.jsonl.gz", write_gz_numbers),
    "packed-mds": ("folder", write_packed_mds),
}
ALL_CASES = {
    **CASES,
    "lines-zst": Case("lines-zst", "jsonl"),
    "numbers-gz": Case("numbers-gz", "jsonl", "images", {**NUMBERS, "inputs": "x", "targets": "y"}),
    "packed-mds": Case("packed-mds", "mds", "images", PICTURES),
}
IN_FILES = [name for name, case in ALL_CASES.items() if case.kind != "synthetic"]
KINDS = {case.data: case.kind for case in ALL_CASES.values() if case.data and case.kind != "synthetic"}


@pytest.fixture(scope="module")
def loader() -> Iterator[Pool]:
    """A process as loaders are: it gets a pickled source and opens what it reads."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    """Data in a folder that also holds every cache: all that nodes share."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared/own"))
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr("test_elastic.DATA", {**DATA, **MORE})
    return Room(tmp_path / "shared")


def stage_all(source: Any, room: Room, stage: Callable[[Any, Any], Any]) -> Any:
    """The same, read from staged files; what nodes share is gone from now on."""
    staged = stage(source, StageFolder(room.folder.parent / "disk").hold)
    room.folder.rename(room.folder.with_name("gone"))
    return staged


def read_samples(source: DataSource, cache: str = "") -> dict[str, bytes]:
    """All samples, twice and out of order, as files are read in a run."""
    os.environ["XDG_CACHE_HOME"] = cache or os.environ["XDG_CACHE_HOME"]
    found: dict[str, bytes] = {}
    for times in range(2):
        for ids in np.array_split(np.arange(len(source), dtype=np.int64)[::-1], 5):
            arrays = source.batch_of(ids, ids % 3) if is_drawing(source) else source.batch(ids)
            for name, array in arrays.items():  # perhaps of objects, an array for each sample
                found[f"{times} {ids} {name}"] = b"".join(row.tobytes() for row in array)
    return found


@pytest.mark.parametrize("name", IN_FILES)
def test_samples_are_read_from_staged_files_alone(name: str, room: Room, loader: Pool) -> None:
    source, _ = room.open(ALL_CASES[name])
    expected = read_samples(source)
    source, _ = room.open(ALL_CASES[name])
    staged = stage_all(source, room, stage_source)
    assert read_samples(staged) == expected
    assert loader.apply(read_samples, (staged, os.environ["XDG_CACHE_HOME"])) == expected
    assert not room.folder.exists()


def read_records(records: Records, cache: str = "") -> list[str]:
    os.environ["XDG_CACHE_HOME"] = cache or os.environ["XDG_CACHE_HOME"]
    numbers = [*range(len(records))][::-1] * 2
    return [repr(records.read([number])) for number in numbers]


@pytest.mark.parametrize("data", KINDS)
def test_records_are_read_from_staged_files_alone(data: str, room: Room, loader: Pool) -> None:
    place = DataPath("data.path", room.path_of(data))
    expected = read_records(open_records(place, KINDS[data]))
    records = open_records(place, KINDS[data])
    mark = records.fingerprint
    staged = stage_all(records, room, lambda records, hold: records.staged(hold))
    assert read_records(staged) == expected
    assert str(staged.extent(0).path).startswith(str(room.folder.with_name("disk")))
    assert staged.fingerprint == mark
    assert loader.apply(read_records, (staged, os.environ["XDG_CACHE_HOME"])) == expected
    assert not room.folder.exists()


def test_an_image_that_was_replaced_is_staged_anew(tmp_path: Path) -> None:
    """By one of the same size: its time of change is another."""
    folder, disk = tmp_path / "data", StageFolder(tmp_path / "disk")
    (folder / "cats").mkdir(parents=True)
    for name, content in (("1", b"one"), ("2", b"two")):
        (folder / "cats" / f"{name}.png").write_bytes(content)
    place = DataPath("data.path", str(folder))
    found = open_records(place, "images").staged(disk.hold).read([0, 1], ["image"])
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(folder / "cats/1.png")
    os.utime(folder / "cats", ns=(5, 5))
    again = open_records(place, "images").staged(disk.hold).read([0, 1], ["image"])
    assert [row["image"] for row in (*found, *again)] == [b"one", b"two", b"new", b"two"]


@pytest.mark.parametrize(("data", "kind"), [("packed-mds", "mds"), ("lines-zst", "jsonl"), ("lines", "jsonl")])
def test_what_compressed_files_hold_is_known_before_it_is_staged(room: Room, data: str, kind: str) -> None:
    """It is what readers write beside the staged files."""
    records = open_records(DataPath("data.path", room.path_of(data)), kind)
    staged = records.staged(StageFolder(room.folder.parent / "disk").hold)
    read_records(staged)
    read_records(staged)
    written = [path for path in room.folder.with_name("disk").glob("*/sets/*/.unpacked/**/*") if path.is_file()]
    assert sum(path.stat().st_size for path in written) <= records.parts.unpacked_bytes
    assert bool(records.parts.unpacked_bytes) == (data == "packed-mds")
