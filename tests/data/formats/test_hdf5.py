"""HDF5: every storage and type is read as h5py reads it; each kind of damage is one message."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.content import DataPath
from shardway.data.formats import hdf5
from shardway.data.formats.base import DamagedData
from shardway.data.formats.hdf5 import Hdf5Records
from shardway.data.formats.indexes import make_sums
from shardway.errors import UserError

ROWS = 50
STORAGES: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunks": {"chunks": (8, 6)},
    "growing": {"chunks": (8, 6), "maxshape": (None, 6)},
    "split chunks": {"chunks": (8, 4)},
    "gzip": {"chunks": (8, 6), "compression": "gzip", "shuffle": True},
    "gzip rows": {"chunks": (1, 6), "compression": "gzip"},
    "lzf": {"chunks": (7, 6), "compression": "lzf"},
    "fletcher32": {"chunks": (8, 6), "fletcher32": True},
    "one chunk": {"chunks": (ROWS, 6), "compression": "gzip"},
}


def open_hdf5(path: Path) -> Hdf5Records:
    return Hdf5Records.open(DataPath("data.path", str(path)))


def write(path: Path, datasets: dict[str, Any], **settings: Any) -> Path:
    with h5py.File(path, "w", libver="latest", **settings) as file:
        for name, data in datasets.items():
            file.create_dataset(name, data=data)
    return path


def numbers() -> np.ndarray[Any, Any]:
    return np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 6) / 3


def check_rows(records: Hdf5Records, name: str, expected: Any, ids: list[int]) -> None:
    for record, number in zip(records.read(ids, [name]), ids, strict=True):
        assert record.keys() == {name}
        np.testing.assert_array_equal(record[name], expected[number])


IDS = [49, 0, 7, 8, 8, 23, 24, 25, 26, 1, 0, 49]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("userblock", [0, 512])
def test_storages(tmp_path: Path, storage: str, order: str, userblock: int) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=userblock) as file:
        file.create_dataset("x", data=numbers().astype(f"{order}f4"), **STORAGES[storage])
    records = open_hdf5(tmp_path / "a.h5")
    assert len(records) == ROWS
    assert records.fields == {"x": "float32[6]"}
    check_rows(records, "x", numbers(), IDS)
    check_rows(records, "x", numbers(), list(range(ROWS)))
    found = records.read([3])[0]["x"]
    assert found.dtype == np.dtype("f4")
    assert found.flags.writeable
    found[:] = 0
    check_rows(records, "x", numbers(), [3])
    assert list(records.find_damage()) == []


def test_types(tmp_path: Path) -> None:
    kind = np.dtype([("a", "<i4"), ("b", "S3"), ("c", "<f4", (2,))])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["int"] = np.arange(4, dtype=">i2")
        file["float"] = np.arange(4) / 4
        file["bool"] = np.array([True, False, True, True])
        file["text"] = ["a", "größe", "", "日本"]
        file["fixed"] = np.array([b"ab", b"c", b"", "ü".encode()])
        file["words"] = np.array([[b"a", b"b"]] * 4)
        file["opaque"] = np.array([b"\0\1\0", b"abc", b"\xff\0\0", b"\0\0\0"], "V3")
        file["group/image"] = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3)
        file["mapping"] = np.array([(number, b"xy", (1, number)) for number in range(4)], kind)
        file["array type"] = np.zeros(4, np.dtype(("<i4", (3,))))
        ragged = file.create_dataset("ragged", (4,), h5py.vlen_dtype(np.int16))
        ragged[0], ragged[2] = [1, 2, 3], [4]
        file.create_dataset("never", (4, 2), "f4", fillvalue=7)
        file.create_dataset("never in chunks", (4, 2), "f4", chunks=(2, 2), fillvalue=7)
        file["scalar"], file["other"] = 3, np.arange(9)
        file["reference"] = np.array([file["int"].ref] * 4, h5py.ref_dtype)
        file["link"] = h5py.ExternalLink("nothing.h5", "/x")
    records = open_hdf5(tmp_path / "a.h5")
    assert records.fields == {
        "array type": "int32[3]",
        "bool": "bool",
        "fixed": "text",
        "float": "float",
        "group/image": "uint8[2, 3]",
        "int": "int",
        "mapping": "mapping",
        "never": "float32[2]",
        "never in chunks": "float32[2]",
        "opaque": "bytes",
        "ragged": "int16[...]",
        "text": "text",
        "words": "list",
    }
    one, two = records.read([3, 0])
    assert (one["int"], one["float"], one["bool"], one["text"], one["fixed"]) == (3, 0.75, True, "日本", "ü")
    assert [type(two[name]) for name in ("int", "float", "bool", "text", "fixed", "opaque")] == [
        int, float, bool, str, str, bytes
    ]  # fmt: skip
    assert (two["words"], two["opaque"]) == (["a", "b"], b"\0\1\0")
    assert one["mapping"] == {"a": 3, "b": "xy", "c": [1.0, 3.0]}
    assert (two["ragged"].tolist(), two["ragged"].dtype, one["ragged"].size) == ([1, 2, 3], np.int16, 0)
    assert one["group/image"].tolist() == [[18, 19, 20], [21, 22, 23]]
    assert one["never"].tolist() == one["never in chunks"].tolist() == [7, 7]
    assert one["array type"].tolist() == [0, 0, 0]
    assert pickle.loads(pickle.dumps(records)).read([2], ["text"]) == [{"text": ""}]


def test_which_datasets_are_fields(tmp_path: Path) -> None:
    datasets = {"x": np.zeros((5, 9)), "y": np.zeros(5), "test/x": np.zeros((3, 9)), "test/y": np.zeros(3)}
    assert list(open_hdf5(write(tmp_path / "a.h5", datasets)).fields) == ["x", "y"]
    assert list(open_hdf5(write(tmp_path / "b.h5", {**datasets, "test/z": np.zeros(3)})).fields) == [
        "test/x", "test/y", "test/z"
    ]  # fmt: skip


@settings(max_examples=30)
@given(st.data())
def test_any_rows_of_any_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    chunk = data.draw(st.sampled_from([None, 1, 3]))
    folder, first = tmp_path_factory.mktemp("hdf5"), 0
    for number, length in enumerate(lengths):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            rows = np.arange(first, first + length)
            file.create_dataset(
                "a",
                data=rows,
                chunks=(chunk,) if chunk and length else None,
                maxshape=None if not chunk or not length else (None,),
            )
            file["b"] = rows.reshape(-1, 1).repeat(3, axis=1)
            first += length
    if not first:
        with pytest.raises(UserError, match="has no rows"):
            open_hdf5(folder)
        return
    ids = data.draw(st.lists(st.integers(0, first - 1), max_size=9))
    records = open_hdf5(folder)
    assert [(record["a"], record["b"].tolist()) for record in records.read(ids)] == [(i, [i] * 3) for i in ids]


def test_folder_pattern_and_empty_files(tmp_path: Path) -> None:
    for number, rows in enumerate((3, 0, 2)):
        write(tmp_path / f"part-{number}.h5", {"x": np.arange(rows) + 10 * number, "y": np.zeros((rows, 2))})
    for path in (tmp_path, tmp_path / "part-*.h5", tmp_path / "part-{0..2}.h5"):
        assert Hdf5Records.is_at(path)
        records = open_hdf5(path)
        assert [record["x"] for record in records.read(range(5))] == [0, 1, 2, 20, 21]
    assert open_hdf5(tmp_path / "part-{0,2}.h5").extent(3).path.name == "part-2.h5"
    with pytest.raises(UserError, match=r"names files that are missing: part-3\.h5"):
        open_hdf5(tmp_path / "part-{0..3}.h5")
    with pytest.raises(UserError, match="no record 5"):
        open_hdf5(tmp_path).read([0, 5])
    assert open_hdf5(tmp_path).read([]) == []


def test_more_files_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "OPEN_FILES", 2)
    for number in range(5):
        write(tmp_path / f"{number}.h5", {"x": [f"{number}a", f"{number}b"]})
    records = open_hdf5(tmp_path)
    for _ in range(2):
        assert [record["x"] for record in records.read(range(10))] == [f"{n}{s}" for n in range(5) for s in "ab"]
    assert len(records._handles) == 2


def test_cache_of_chunks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "CHUNK_CACHE_BYTES", 600)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=numbers(), **STORAGES["gzip"])
    records = open_hdf5(tmp_path / "a.h5")
    check_rows(records, "x", numbers(), [*range(ROWS), *IDS])
    assert records._chunks._bytes <= 600
    assert len(records._chunks._kept) == 3


def test_extent(tmp_path: Path) -> None:
    for name in ("contiguous", "chunks", "gzip"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=numbers(), **STORAGES[name])
        extent = open_hdf5(tmp_path / f"{name}.h5").extent(11)
        content = extent.path.read_bytes()[extent.offset : extent.offset + extent.size]
        assert (content == numbers()[11].tobytes()) == (name != "gzip")
        assert extent.size > 0


def test_is_at(tmp_path: Path) -> None:
    write(tmp_path / "a.mat", {"x": [1]}, userblock_size=512)
    (tmp_path / "b.mat").write_bytes(b"x" * 600)
    assert Hdf5Records.is_at(tmp_path / "a.mat")
    assert Hdf5Records.is_at(tmp_path / "nothing.hdf5")
    assert not Hdf5Records.is_at(tmp_path / "b.mat")
    assert not Hdf5Records.is_at(tmp_path)
    assert len(open_hdf5(tmp_path / "a.mat")) == 1


def _read_in_child(records: Hdf5Records, results: Any) -> None:
    results.put([record["x"].tolist() for record in records.read([5, 40])])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(tmp_path: Path, method: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=numbers(), **STORAGES["gzip"])
    records = open_hdf5(tmp_path / "a.h5")
    here = [record["x"].tolist() for record in records.read([5, 40])]
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_read_in_child, args=(records, results))
    child.start()
    assert results.get(timeout=60) == here
    child.join()
    assert [record["x"].tolist() for record in records.read([5, 40])] == here


def test_file_that_this_process_has_open(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", {"x": np.arange(4)})
    with h5py.File(tmp_path / "a.h5", "r", locking=True):
        assert open_hdf5(tmp_path / "a.h5").read([2]) == [{"x": 2}]


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"{number}.h5", {"x": np.arange(4)})
    os.chmod(tmp_path / "0.h5", 0o400)
    os.chmod(tmp_path, 0o500)
    try:
        assert len(open_hdf5(tmp_path)) == 8
    finally:
        os.chmod(tmp_path, 0o700)


# --- what is wrong


def test_missing_empty_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_hdf5(tmp_path / "a.h5")
    with pytest.raises(UserError, match="has no HDF5 files"):
        open_hdf5(tmp_path)
    (tmp_path / "a.h5").write_bytes(b"")
    with pytest.raises(UserError, match=r"has an empty file: .*a\.h5 has 0 bytes"):
        open_hdf5(tmp_path)
    (tmp_path / "a.h5").write_bytes(b"not HDF5" * 900)
    with pytest.raises(UserError, match=r"not HDF5, or whose first bytes are damaged: .*a\.h5"):
        open_hdf5(tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {"x": numbers()})
    records = open_hdf5(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"has a truncated file, or one that is still written: .*a\.h5: .*eof"):
        open_hdf5(path)
    with pytest.raises(DamagedData, match="HDF5 cannot open it"):
        records.read([0])
    assert any("bytes, and" in found for found in records.find_damage())


def test_truncated_while_open(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {"x": numbers()})
    records = open_hdf5(path)
    records.read([0])
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(DamagedData, match="the file ends after"):
        records.read([49])


def test_nothing_that_fits(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'has no dataset with rows that can be read: it holds "a" int64 \[\]'):
        open_hdf5(write(tmp_path / "a.h5", {"a": 3}))
    with pytest.raises(UserError, match="it holds no datasets"):
        open_hdf5(write(tmp_path / "b.h5", {}))
    with pytest.raises(UserError, match=r'has no rows: it holds "x" float64 \[0, 3\]'):
        open_hdf5(write(tmp_path / "c.h5", {"x": np.zeros((0, 3))}))


def test_unequal_files(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", {"x": np.zeros((3, 2)), "y": np.zeros(3)})
    write(tmp_path / "b.h5", {"x": np.zeros((3, 4)), "y": np.zeros(3)})
    with pytest.raises(UserError, match=r'unequal datasets: "x" of .*b\.h5 is float64 \[3, 4\](.|\n)*float64\[2\]'):
        open_hdf5(tmp_path)
    write(tmp_path / "b.h5", {"x": np.zeros((3, 2))})
    with pytest.raises(UserError, match=r'"y" of .*b\.h5 is missing'):
        open_hdf5(tmp_path)
    write(tmp_path / "b.h5", {"x": np.zeros((3, 2)), "y": np.zeros(2)})
    with pytest.raises(UserError, match=r"unequal lengths, \[2, 3\]: .*b\.h5"):
        open_hdf5(tmp_path)


@pytest.mark.parametrize("storage", ["gzip", "gzip rows", "fletcher32"])
def test_damaged_chunk(tmp_path: Path, storage: str) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("group/x", data=numbers(), **STORAGES[storage])
        chunk = dataset.id.get_chunk_info_by_coord((16, 0))
    content = bytearray(path.read_bytes())
    for place in range(8, min(20, chunk.size)):
        content[chunk.byte_offset + place] ^= 0x5A
    path.write_bytes(content)
    records = open_hdf5(path)
    rows = "row 16" if storage == "gzip rows" else "rows 16 to 23"
    message = f'is damaged at byte {chunk.byte_offset}: dataset "group/x", {rows}, cannot be read'
    with pytest.raises(DamagedData, match=message):
        records.read(range(ROWS))
    with pytest.raises(DamagedData, match=message):
        records.read([16])
    check_rows(records, "group/x", numbers(), [0, 15, 24])
    damage = list(records.find_damage())
    assert len(damage) == (1 if storage == "gzip rows" else 8)
    assert all(message in found for found in damage)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", {"x": np.array([b"ok", b"\xff\xfe"])})
    with pytest.raises(DamagedData, match=r'a\.h5 is damaged at byte \d+: dataset "x", row 1, is not UTF-8 text'):
        open_hdf5(tmp_path / "a.h5").read([0, 1])


def test_filter_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=numbers(), **STORAGES["gzip"])
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: code != 1)
    with pytest.raises(
        UserError, match=r'"/x" compressed with filter 1 \(deflate\).*\n.*to do: pip install hdf5plugin'
    ):
        open_hdf5(path)


def test_values_in_other_files(tmp_path: Path) -> None:
    write(tmp_path / "source.hdf5", {"x": np.arange(4)})
    layout = h5py.VirtualLayout((4,), "i8")
    layout[:] = h5py.VirtualSource(tmp_path / "source.hdf5", "x", (4,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with pytest.raises(UserError, match='dataset "/x" with values in other files'):
        open_hdf5(tmp_path / "a.h5")


@pytest.mark.parametrize("storage", ["contiguous", "gzip"])
def test_sums_are_compared_when_reading(tmp_path: Path, storage: str) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=numbers(), **STORAGES[storage])
        file["text"] = [f"{number}" for number in range(ROWS)]
    make_sums(tmp_path, open_hdf5(path).parts.files)
    records = open_hdf5(path)
    check_rows(records, "x", numbers(), IDS)
    assert records.read([7], ["text"]) == [{"text": "7"}]
    assert list(records.find_damage()) == []
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedData, match="checksum"):
        pickle.loads(pickle.dumps(records)).read([0])
    with pytest.raises(UserError, match="checksum"):
        open_hdf5(path)


def test_damaged_tables_are_one_message(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {"x": numbers(), "y": np.arange(ROWS)})
    whole, seen = path.read_bytes(), 0
    for place in range(8, 400, 4):
        content = bytearray(whole)
        content[place : place + 4] = struct.pack("<I", 0xFFFFFFF0)
        path.write_bytes(content)
        try:
            open_hdf5(path).read(range(ROWS))
        except (UserError, DamagedData) as error:
            assert "a.h5" in str(error)
            seen += 1
    assert seen > 20
