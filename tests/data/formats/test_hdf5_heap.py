"""Values of variable length in HDF5: read from the heap as they were written; damage is an error with its place."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardway.data.content import DataPath
from shardway.data.formats.base import DamagedData
from shardway.data.formats.hdf5 import Hdf5Records
from shardway.errors import UserError

ROWS = 24
SIZES = [0, 1, 7, 8, 4047, 4048, 4064, 4065, 4095, 4096, 70_000]
TYPES = ["?", "u1", "<f2", "<i4", ">i4", ">f8", "<c16"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunks": {"chunks": (5,), "maxshape": (None,)},
    "rows": {"chunks": (1,)},
    "gzip": {"chunks": (5,), "compression": "gzip"},
}


def open_hdf5(path: Path) -> Hdf5Records:
    return Hdf5Records.open(DataPath("data.path", str(path)))


def is_equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, str):
        return type(found) is str and found == expected
    return bool(found.dtype == expected.dtype and found.dtype.isnative and np.array_equal(found, expected))


def check(records: Hdf5Records, expected: dict[str, list[Any]]) -> None:
    rows = len(records)
    for ids in (list(range(rows)), [rows - 1, 0, 3, 3, 2, 0], [4]):
        for number, record in zip(ids, records.read(ids), strict=True):
            assert record.keys() == expected.keys()
            for name, values in expected.items():
                assert is_equal(record[name], values[number]), (name, number)


def make_text(random: np.random.Generator, size: int) -> str:
    text = bytes(random.integers(97, 123, size, dtype=np.uint8)).decode()
    return text if size < 7 else "é" + text[2:]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", ["earliest", "latest"])
@pytest.mark.parametrize("userblock", [0, 512])
def test_values_are_those_written(tmp_path: Path, version: str, layout: str, userblock: int) -> None:
    random = np.random.default_rng(7)
    is_ours = layout != "gzip" and not userblock
    types = TYPES if is_ours else [name for name in TYPES if ">" not in name]
    expected: dict[str, list[Any]] = {"text": [""] * ROWS}
    expected |= {f"v{i}": [np.empty(0, np.dtype(name).newbyteorder("="))] * ROWS for i, name in enumerate(types)}
    with h5py.File(tmp_path / "a.h5", "w", libver=version, userblock_size=userblock) as file:
        file.create_dataset("text", (ROWS,), h5py.string_dtype(), **LAYOUTS[layout])
        for i, name in enumerate(types):
            file.create_dataset(f"v{i}", (ROWS,), h5py.vlen_dtype(np.dtype(name)), **LAYOUTS[layout])
        for row in random.permutation(ROWS).tolist():
            if row in (2, 10, 11, 12, 13, 14):  # references that are missing; of rows 10 to 14 the chunk is
                continue
            expected["text"][row] = file["text"][row] = make_text(random, int(random.choice(SIZES)))
            for i, name in enumerate(types):
                value = random.integers(0, 99, int(random.choice(SIZES)) // 8).astype(name)
                file[f"v{i}"][row] = value
                expected[f"v{i}"][row] = value.astype(value.dtype.newbyteorder("="))
    records = open_hdf5(tmp_path / "a.h5")
    check(records, expected)
    assert (records._use(0, "text").element is not None) == is_ours


def test_long_values_and_values_that_were_written_again(tmp_path: Path) -> None:
    random = np.random.default_rng(8)
    texts = [make_text(random, size) for size in (5_000_000, 1, 2**20, 70_000, 0, 2**20 + 1)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("text", (6,), h5py.string_dtype())
        for row in range(6):
            dataset[row] = make_text(random, 3000)
        for row in (3, 0, 5, 2, 4, 1):
            dataset[row] = texts[row]
    check(open_hdf5(tmp_path / "a.h5"), {"text": texts})


@pytest.mark.parametrize("fill", ["", "fillé"])
def test_rows_that_were_never_written(tmp_path: Path, fill: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        text = file.create_dataset("text", (12,), h5py.string_dtype(), chunks=(5,), maxshape=(None,), fillvalue=fill)
        ragged = file.create_dataset("v", (12,), h5py.vlen_dtype(np.int16), chunks=(5,), maxshape=(None,))
        text[0] = "first"
        text[11] = ""
        ragged[11] = np.arange(3, dtype=np.int16)
        for dataset in (text, ragged):
            dataset.resize((11,))
            dataset.resize((31,))
    empty = np.empty(0, np.int16)
    check(open_hdf5(tmp_path / "a.h5"), {"text": ["first", *[fill] * 30], "v": [empty] * 31})


@pytest.mark.parametrize("storage", [{"compression": "gzip", "chunks": (2,)}, {"userblock": 512}])
def test_other_byte_order_that_h5py_reads_wrong_is_refused(tmp_path: Path, storage: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=storage.pop("userblock", 0)) as file:
        file.create_dataset("v", (4,), h5py.vlen_dtype(np.dtype(">i4")), **storage)[0] = np.arange(3, dtype=">i4")
    with pytest.raises(UserError, match=r'dataset "/v" of variable length in the other byte order \(>i4\)'):
        open_hdf5(tmp_path / "a.h5")


# --- damage


def make_small(path: Path, version: str, chunks: int) -> tuple[list[int], list[int]]:
    """Where references and collections begin."""
    random = np.random.default_rng(9)
    storage = {"chunks": (chunks,), "maxshape": (None,)} if chunks else {}
    with h5py.File(path, "w", libver=version) as file:
        text = file.create_dataset("text", (ROWS,), h5py.string_dtype(), **storage)
        ragged = file.create_dataset("v", (ROWS,), h5py.vlen_dtype(np.int32), **storage)
        for row in range(ROWS):
            text[row] = "ab" * int(random.choice([0, 1, 50, 2047, 2048, 9000]))
            ragged[row] = np.arange(int(random.choice([0, 1, 100, 1020, 5000])))
        blocks = []
        for dataset in (text, ragged):
            if chunks:
                count = dataset.id.get_num_chunks()
                blocks += [dataset.id.get_chunk_info(block).byte_offset for block in range(count)]
            else:
                blocks.append(dataset.id.get_offset())
    return blocks, find_all(path.read_bytes(), b"GCOL")


def find_all(content: bytes, part: bytes) -> list[int]:
    found, at = [], content.find(part)
    while at >= 0:
        found.append(at)
        at = content.find(part, at + 1)
    return found


def damage(random: np.random.Generator, good: bytes, blocks: list[int], heaps: list[int]) -> Iterator[bytes]:
    """Flips in references, in the heads of collections and their objects, and in the index of chunks; bytes of zero;
    and truncation."""
    indexed = [at for block in blocks for at in find_all(good, struct.pack("<Q", block))]
    for places, width in ((blocks, 16 * 4), (heaps, 48), (indexed, 8)):
        for _ in range(14 if places else 0):
            content = bytearray(good)
            for _ in range(random.integers(1, 4)):
                content[int(random.choice(places)) + int(random.integers(width))] ^= int(random.integers(1, 256))
            yield bytes(content)
    for size in (1, 16, 4096):
        for _ in range(6):
            start = int(random.integers(min(blocks + heaps), len(good) - size))
            yield good[:start] + bytes(size) + good[start + size :]
    for _ in range(10):
        yield good[: int(random.integers(len(good)))]


@pytest.mark.parametrize("chunks", [0, 4])
@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_damage_is_an_error_or_values_of_the_same_kind(tmp_path: Path, version: str, chunks: int) -> None:
    path = tmp_path / "a.h5"
    blocks, heaps = make_small(path, version, chunks)
    good = path.read_bytes()
    expected = open_hdf5(path).read(range(ROWS))
    random, counts = np.random.default_rng(10), {"equal": 0, "other": 0, "damaged": 0, "refused": 0}
    for content in damage(random, good, blocks, heaps):
        path.write_bytes(content)
        try:
            records = open_hdf5(path)
        except UserError:
            counts["refused"] += 1
            continue
        assert records.fields == {"text": "text", "v": "int32[...]"}
        for row in random.permutation(ROWS).tolist():
            for name in records.fields:
                try:
                    found = records.read([row], [name])[0][name]
                except DamagedData as error:
                    assert error.place is not None
                    assert f"{path} is damaged at byte {error.place.offset}: " in str(error)
                    counts["damaged"] += 1
                    continue
                assert type(found) is type(expected[row][name])
                counts["equal" if is_equal(found, expected[row][name]) else "other"] += 1
    assert min(counts["equal"], counts["damaged"], counts["refused"]) > 0
    assert counts["other"] < counts["equal"] / 5


FILE_BYTES = 2**40


def change_large_file(path: Path, find: str, at: int, value: bytes) -> None:
    """Two texts in one collection; bytes of it, of their references or of the index of chunks are set to `value`."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("text", (2,), h5py.string_dtype(), chunks=(2,))
        dataset[:] = ["first", "second"]
        block = dataset.id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    sought = {"heap": b"GCOL", "index": struct.pack("<Q", block)}
    start = (block if find == "reference" else find_all(bytes(content), sought[find])[-1]) + at
    content[start : start + len(value)] = value
    path.write_bytes(content)
    os.truncate(path, FILE_BYTES)  # a hole: nothing but a bound on what is read prevents a MemoryError


@pytest.mark.parametrize(
    ("find", "at", "value", "message"),
    [
        ("reference", 0, b"\xff\xff\xff\xff", "object 2 of the heap there has 5 bytes, and 4294967295 were expected"),
        ("reference", 4, b"\xff" * 8, "its values would lie at byte 18446744073709551615"),
        ("reference", 12, b"\x09", "the heap there has no object 9"),
        ("heap", 0, b"g", "no collection of values begins there"),
        ("heap", 8, struct.pack("<Q", 2 * FILE_BYTES), "and the file ends before"),
        ("heap", 24, struct.pack("<Q", FILE_BYTES // 2), "a value there would have 549755813888 bytes"),
        ("heap", 40, b"\x01", "object 1 of the heap there is in it twice"),
        ("index", 7, b"\xf0", "is damaged at byte 4611686018427387904"),
    ],
)
def test_each_damage_is_named(tmp_path: Path, find: str, at: int, value: bytes, message: str) -> None:
    change_large_file(tmp_path / "a.h5", find, at, value)
    with pytest.raises(DamagedData) as found:
        open_hdf5(tmp_path / "a.h5").read([0, 1])
    assert message in str(found.value)


def test_collection_of_giant_size_is_not_read_whole(tmp_path: Path) -> None:
    change_large_file(tmp_path / "a.h5", "heap", 8, struct.pack("<Q", FILE_BYTES // 2))
    assert open_hdf5(tmp_path / "a.h5").read([1, 0], ["text"]) == [{"text": "second"}, {"text": "first"}]
