"""What is said of staging before a run is queued."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from shardway.data import read_rate, stage_forecast
from shardway.data.formats.shard_file import write_token_shard
from shardway.data.formats.shard_manifest import write_manifest
from shardway.data.stage import StageFolder
from shardway.data.stage_forecast import StagingForecast, forecast_staging
from shardway.hardware.mounts import MountedFileSystem
from shardway.runfile.schema import RunFile


def forecast(data: dict[str, Any], **more: bool) -> StagingForecast | None:
    values = RunFile.model_validate({"data": data})
    asked = {"takes_tokens": True, "chosen": True, "data_here": True, "disk_here": False, **more}
    return forecast_staging(values, 8, **asked)


def describe(data: dict[str, Any], **more: bool) -> str:
    found = forecast(data, **more)
    return "" if found is None else str(found)


@pytest.fixture(autouse=True)
def known_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file system is read at 1.25 GB/s."""
    monkeypatch.setattr(stage_forecast, "measure_read_rate", lambda files, threads: 1.25e9 * threads / 4)
    monkeypatch.setattr(stage_forecast.socket, "gethostname", lambda: "login1")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    np.save(tmp_path / "t.npy", np.zeros(1937, np.uint16))
    return tmp_path / "t.npy"


def test_bytes_and_place_are_said_and_what_is_not_known(tokens: Path) -> None:
    told = describe({"kind": "tokens", "path": str(tokens), "stage": "/raid"})
    assert told == (
        "data.stage copies 4002B of data to /raid of each node before the first step (room there: n/a; "
        "time: about 1 s at 1.2 GB/s, as login1 reads these data now)"
    )
    elsewhere = describe({"kind": "tokens", "path": str(tokens), "stage": "/raid"}, data_here=False)
    assert "copies data of a size that is not known here to /raid" in elsewhere
    assert elsewhere.endswith("(room there: n/a; time: n/a: the data are not on this machine)")


def test_nothing_is_said_where_nothing_is_staged(tokens: Path) -> None:
    assert describe({"kind": "tokens", "path": str(tokens), "stage": "off"}) == ""
    assert describe({"kind": "synthetic", "stage": "/raid"}) == ""


def test_each_file_counts_once(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(bytes(500))
    paths: list[dict[str, Any]] = [{"path": str(tokens)}, {"path": str(tokens)}]
    parts = [{**each, "weight": 1} for each in (*paths, {"path": str(tmp_path / "m"), "kind": "megatron"})]
    data = {"kind": "tokens", "blend": parts, "validation": str(tokens), "stage": "/raid"}
    assert "copies 4502B of data" in describe(data)


def test_text_is_prepared_first_so_that_its_size_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    told = describe({"path": str(tmp_path), "stage": "/raid"})
    assert "of a size that is not known here" in told
    assert told.endswith("time: n/a: their size is not known here)")


def test_prepared_shards_and_folders_of_images_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, images = tmp_path / "shards", tmp_path / "images"
    shards.mkdir()
    facts = write_token_shard(shards / "0.shard", [(np.zeros(100, np.uint16), None)], "uint16")
    write_manifest(shards, "tokens", [facts], {})
    listed = sum(path.stat().st_size for path in shards.iterdir())
    (shards / ".shardway").mkdir()
    (shards / ".shardway" / "bins-64").write_bytes(bytes(300))  # an index is not copied
    assert f"copies {listed}B of data" in describe({"kind": "tokens", "path": str(shards), "stage": "/raid"})
    for name in "abc":
        (images / name).mkdir(parents=True)
        (images / name / "1.png").write_bytes(bytes(70))
    data = {"kind": "images", "path": str(images), "stage": "/raid"}
    assert "copies 210B of data" in describe(data, takes_tokens=False)
    monkeypatch.setattr(stage_forecast, "MOST_FILES", 2)
    assert "of a size that is not known here" in describe(data, takes_tokens=False)


def test_the_disk_of_this_machine_is_looked_at(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"kind": "tokens", "path": str(tokens), "stage": str(tmp_path / "disk")}
    for room, words in ((5000, "5kB, enough"), (3000, "3kB, too little")):
        monkeypatch.setattr(StageFolder, "find_room", lambda self, room=room: room)
        assert f"(room there: {words}; time: about" in describe(data, disk_here=True)
    by_windows = describe({**data, "shuffle": "windows"}, disk_here=True)
    assert "(room there: 3kB, too little: window by window; time: about" in by_windows
    assert "room there: n/a" in describe({**data, "stage": "$NOT_SET_HERE"}, disk_here=True)
    assert not (tmp_path / "disk").exists()


def test_the_disk_of_a_site_is_for_data_that_nodes_share(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"kind": "tokens", "path": str(tokens), "stage": "/raid"}
    for kind, words in (("ext4", ""), ("lustre", "data.stage copies 4002B of data to /raid of each node")):
        mount = MountedFileSystem(PurePosixPath("/"), kind, "x")
        monkeypatch.setattr(stage_forecast, "find_mount", lambda path, mounts, mount=mount: mount)
        told = describe(data, chosen=False)
        assert told.startswith(words)
        assert bool(told) == bool(words)
    assert "before the first step, if they fit there (" in told
    elsewhere = describe(data, chosen=False, data_here=False)
    assert ", if they lie on a file system that nodes share and fit there (" in elsewhere


# --- how long it takes


@pytest.mark.parametrize(
    ("size", "rate", "words"),
    [
        (300 * 10**9, 1.25e9, "about 4 min at 1.2 GB/s"),
        (300 * 10**9, 85.4e6, "about 59 min at 85 MB/s"),
        (10**13, 999e6, "about 2.8 h at 1000 MB/s"),
        (10**10, 1e9, "about 10 s at 1 GB/s"),
        (100, 2e6, "about 1 s at 2 MB/s"),
    ],
)
def test_time_is_bytes_by_rate(size: int, rate: float, words: str) -> None:
    found = StagingForecast("/raid", size, None, rate, "")
    assert f"time: {words}, as " in str(found)
    assert found.as_json()["seconds"] == pytest.approx(size / rate)
    assert (found.as_json()["bytes"], found.as_json()["bytes_per_second"]) == (size, rate)


class Clock:
    """A time that moves when something is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("bytes_per_s", "expected"), [(4e6, 4e6), (1e9, 1e9)])
def test_rate_is_what_was_read_by_the_time_it_took(bytes_per_s: float, expected: float) -> None:
    """It stops after its time, or when as much was read as there is."""
    clock, asked = Clock(), list[tuple[str, int, int]]()
    files = [(Path("a"), 10 * 2**20), (Path("empty"), 0), (Path("b"), 3000)]

    def read(path: Path, offset: int, size: int) -> int:
        asked.append((path.name, offset, size))
        clock.now += size / bytes_per_s
        return size

    rate = read_rate.measure_read_rate(files, read=read, clock=clock, seconds=0.5, threads=1)
    assert rate == pytest.approx(expected)
    assert {name for name, _, _ in asked} <= {"a", "b"}
    sizes = {path.name: size for path, size in files}
    assert all(offset >= 0 and offset + size <= sizes[name] and size > 0 for name, offset, size in asked)
    whole, count = 10 * 2**20 + 3000, sum(size for _, _, size in asked)
    assert clock.now - 100.0 < 0.5 + read_rate.PIECE_BYTES / bytes_per_s or count < whole + read_rate.PIECE_BYTES


def test_files_are_read_several_at_once() -> None:
    """As many threads as there are files, up to the number of them, are in a read together."""
    meet, calls = threading.Barrier(3, timeout=20), itertools.count()

    def read(path: Path, offset: int, size: int) -> int:
        if next(calls) < 3:
            meet.wait()
        return size

    files = [(Path(name), 1000) for name in "abc"]
    assert read_rate.measure_read_rate(files, read=read, seconds=10.0, threads=4) > 0


def test_a_file_system_that_does_not_answer_delays_nothing() -> None:
    stuck = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no byte came within 0\.02 s"):
        read_rate.measure_read_rate(
            [(Path("a"), 100)], read=lambda path, offset, size: int(stuck.wait(20)), seconds=0.01
        )
    assert time.monotonic() - began < 10
    stuck.set()


def test_files_that_cannot_be_read_leave_the_time_unknown(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"kind": "tokens", "path": str(tokens), "stage": "/raid"}
    monkeypatch.setattr(stage_forecast, "measure_read_rate", read_rate.measure_read_rate)

    def refuse(path: Path, offset: int, size: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(read_rate, "read_uncached", refuse)
    assert describe(data).endswith(f"time: n/a: {tokens}: Permission denied)")
    found = forecast(data)
    assert found is not None
    assert found.as_json() == {
        "folder": "/raid",
        "bytes": 4002,
        "room_bytes": None,
        "bytes_per_second": None,
        "seconds": None,
        "why_no_time": f"{tokens}: Permission denied",
    }


def test_real_files_are_read(tmp_path: Path) -> None:
    files = []
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(bytes(3_000_000 + number))
        files.append((tmp_path / f"{number}", 3_000_000 + number))
    assert 1e3 < read_rate.measure_read_rate(files) < 1e12
    (tmp_path / "0").unlink()
    with pytest.raises(FileNotFoundError, match="0"):
        read_rate.measure_read_rate(files[:1])
    with pytest.raises(OSError, match="they are empty"):
        read_rate.measure_read_rate([(tmp_path / "1", 0)])
