"""Any flipped bit of data with checksums is named with file and offset, whatever it keeps from being opened.

`bench/data/flips.py` does the same with 1,000 bits of larger data.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardway.data.convert import WRITERS
from shardway.data.detect import open_records, place_of
from shardway.data.formats.base import BLOCK_BYTES
from shardway.data.verification import make_checksums, verify_data
from shardway.errors import UserError

PNG = b"\x89PNG\r\n\x1a\n"
FLIPS = 40


def blobs() -> Iterator[dict[str, Any]]:
    drawn = np.random.default_rng(0)
    return ({"x": drawn.bytes(60_000 + number)} for number in range(20))


def rows(count: int = 200) -> Iterator[dict[str, Any]]:
    drawn = np.random.default_rng(0)
    return ({"image": drawn.integers(0, 256, (40, 40), np.uint8), "label": number % 10} for number in range(count))


def pictures() -> Iterator[dict[str, Any]]:
    return ({"image": PNG + os.urandom(500), "label": number % 2} for number in range(4))


def texts() -> Iterator[dict[str, Any]]:
    return ({"text": f"line {number} " * 4000} for number in range(30))


def tokens() -> Iterator[dict[str, Any]]:
    drawn = np.random.default_rng(0)
    return ({"tokens": drawn.integers(0, 50_000, 4000)} for _ in range(80))


RECORDS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    **dict.fromkeys(WRITERS, blobs),
    **dict.fromkeys(("arrays", "idx"), rows),
    "images": pictures,
    "jsonl": texts,
    "text": texts,
    "megatron": tokens,
    "tokens": tokens,
}


def write(to: str, folder: Path, with_sums: bool = True) -> Path:
    WRITERS[to](RECORDS[to](), folder / "d")
    if with_sums:
        make_checksums(open_records(place_of(folder / "d"), to))
    return folder / "d"


def verify(path: Path) -> list[str]:
    said: list[str] = []
    verify_data(place_of(path), "", said.append)
    return said


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with path.open("r+b") as stream:
        stream.seek(byte)
        old = stream.read(1)[0]
        stream.seek(byte)
        stream.write(bytes([old ^ (1 << bit)]))


@pytest.mark.parametrize("to", sorted(WRITERS))
def test_flipped_bits_are_named_with_file_and_offset(to: str, tmp_path: Path) -> None:
    """Of every file, also of those that hold no record, and of the checksums themselves."""
    folder = write(to, tmp_path)
    assert verify(folder) == []
    listed = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    paths = [path for path in listed if path.parent.name != ".shardway" or path.name.startswith("sums-")]
    assert any(path.name.startswith("sums-") for path in paths)
    drawn = random.Random(to)
    for number in range(FLIPS):
        path = drawn.choice(paths) if number >= len(paths) else paths[number]
        stat = path.stat()
        byte = drawn.choice((drawn.randrange(stat.st_size), stat.st_size - 1 - drawn.randrange(min(300, stat.st_size))))
        flip(path, byte, number % 8)
        changed = stat.st_mtime_ns + (10**9 if number % 2 else 0)  # a bad copy, or a disk that decays
        os.utime(path, ns=(stat.st_atime_ns, changed))
        said = verify(folder)
        flip(path, byte, number % 8)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        offsets = [
            int(each) for sentence in said if path.name in sentence for each in re.findall(r"byte (\d+)", sentence)
        ]
        assert any(offset <= byte < offset + BLOCK_BYTES for offset in offsets), (path, byte, said)
    assert verify(folder) == []


def test_a_file_that_was_cut_off_is_named_after_its_checksums(tmp_path: Path) -> None:
    """Its whole lines would otherwise be all that there is."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    make_checksums(open_records(place_of(path)))
    path.write_text('{"a": 1}\n')
    assert verify(path) == [f"{path} has 9 bytes, and had 18 when its checksums were made"]


def test_files_that_are_not_asked_for_are_not_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"a": 1}\n')
        make_checksums(open_records(place_of(tmp_path / f"{name}.jsonl")))
    flip(tmp_path / "b.jsonl", 6)
    assert verify(tmp_path / "a.jsonl") == []
    what = f"{tmp_path / 'b.jsonl'} is damaged at byte 0: the checksum of the 9 bytes from there on is another"
    assert verify(tmp_path / "b.jsonl")[0] == what
    assert what in verify(tmp_path)


def test_checksums_in_the_cache_are_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write("energon", tmp_path, with_sums=False)
    shutil.rmtree(folder / ".shardway", ignore_errors=True)
    (folder / ".shardway").touch()  # so that nothing can be kept beside the data
    kept = make_checksums(open_records(place_of(folder)))
    assert kept.is_relative_to(tmp_path / "cache")
    flip(folder / ".nv-meta" / "split.yaml", 0)
    assert verify(folder) == [
        f"{folder}/.nv-meta/split.yaml is damaged at byte 0: the checksum of the 49 bytes from there on is another"
    ]


@pytest.mark.parametrize(
    ("to", "file", "byte", "said"),
    [
        ("webdataset", "000000.tar", 150, "000000.tar, byte 0: no header of a member lies there"),
        ("shards", "shards.json", 20, "shards.json is damaged at byte 0: checksum mismatch of the manifest"),
        ("tokens", "shards.json", 20, "shards.json is damaged at byte 0: checksum mismatch of the manifest"),
    ],
)
def test_what_cannot_be_opened_is_named_by_its_own_checksums(
    tmp_path: Path, to: str, file: str, byte: int, said: str
) -> None:
    folder = write(to, tmp_path, with_sums=False)
    flip(folder / file, byte)
    (found,) = verify(folder)
    assert said in found


def test_what_is_no_damage_stays_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        verify(tmp_path / "none")
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match="has a compressed shard"):
        verify(tmp_path / "a.tar.gz")


@pytest.mark.parametrize(
    ("to", "checks"),
    [
        ("hdf5", "none; `shardway"),
        ("arrays", "none; `shardway"),
        ("lmdb", "none; `shardway"),
        ("text", "none; `shardway"),
        ("megatron", "none; `shardway"),
        ("images", "none; `shardway"),
        ("energon", "of the headers of members; `shardway"),
        ("parquet", "of pages, where their writer made some; `shardway"),
        ("mds", "of each shard; `shardway"),
        ("shards", "of every MiB"),
    ],
)
def test_a_format_says_what_its_own_checksums_cover(tmp_path: Path, to: str, checks: str) -> None:
    assert open_records(place_of(write(to, tmp_path, with_sums=False))).describe_checks().startswith(checks)


def test_compressed_and_chunked_files_say_it_too(tmp_path: Path) -> None:
    import gzip

    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n'))
    WRITERS["hdf5"](rows(), tmp_path / "c.h5")
    checks = [open_records(place_of(tmp_path / name)).own_checks() for name in ("a.npz", "b.jsonl.gz", "c.h5")]
    assert checks == ["of each array", "of each gzip member", "of each chunk (fletcher32)"]
