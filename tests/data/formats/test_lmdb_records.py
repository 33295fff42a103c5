"""LMDB: what the library wrote is read as it reads it; whatever bytes are damaged, it is a message."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.content import DataPath
from shardway.data.formats import lmdb_records, lmdb_tree
from shardway.data.formats.base import DamagedData
from shardway.data.formats.indexes import make_sums
from shardway.data.formats.lmdb_records import LmdbRecords
from shardway.errors import JobError, UserError

PAGE = 4096
SOME = {b"k%03d" % number: bytes([number]) * (number * 37 % 6000) for number in range(200)}


def open_lmdb(path: Path) -> LmdbRecords:
    return LmdbRecords.open(DataPath("data.path", str(path)))


def write(path: Path, entries: Mapping[bytes, bytes], subdir: bool = True, **settings: Any) -> Path:
    environment = lmdb.open(str(path), map_size=2**26, subdir=subdir, **settings)
    with environment.begin(write=True) as transaction:
        for key, value in entries.items():
            transaction.put(key, value)
    environment.close()
    return path


def change(path: Path, offset: int, content: bytes) -> None:
    """Other bytes in the middle of a file, which gets another time of change."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(content)
    os.utime(path, ns=(0, random.getrandbits(60)))


def find_leaf(path: Path) -> int:
    """The first page of a file that is a leaf."""
    content = path.read_bytes()
    return next(at for at in range(2 * PAGE, len(content), PAGE) if content[at + 10] == 2)


def test_values_in_key_order(tmp_path: Path) -> None:
    records = open_lmdb(write(tmp_path / "a", SOME))
    assert len(records) == 200
    assert records.fields == {"value": "bytes", "key": "text"}
    expected = [{"value": value, "key": key.decode()} for key, value in sorted(SOME.items())]
    assert records.read(range(200)) == expected
    ids = [199, 0, 0, 7, 8, 9, 10, 150, 199]
    assert pickle.loads(pickle.dumps(records)).read(ids) == [expected[number] for number in ids]
    assert records.read([4], ["key"]) == [{"key": "k004"}]
    assert records.read([4], ["value", "other"]) == [{"value": SOME[b"k004"]}]
    assert records.read([]) == []
    assert list(records.find_damage()) == []
    with pytest.raises(UserError, match="no record 200"):
        records.read([200])
    extent = records.extent(150)
    assert extent.path.read_bytes()[extent.offset : extent.offset + extent.size] == SOME[b"k150"]


@settings(max_examples=20)
@given(
    st.dictionaries(st.binary(min_size=1, max_size=20), st.integers(0, 9000), min_size=1, max_size=60),
    st.integers(0, 3),
)
def test_any_entries_after_any_deletions(
    tmp_path_factory: pytest.TempPathFactory, sizes: dict[bytes, int], every: int
) -> None:
    folder = tmp_path_factory.mktemp("lmdb")
    entries = {b"/" + key: (key * 9000)[:size] for key, size in sizes.items()}
    environment = lmdb.open(str(folder), map_size=2**24, sync=False)
    with environment.begin(write=True) as transaction:
        for key, value in entries.items():
            transaction.put(key, value)
    with environment.begin(write=True) as transaction:
        for key in list(entries)[:: every + 2]:
            transaction.delete(key)
            del entries[key]
    environment.close()
    if not entries:
        with pytest.raises(UserError, match="has no records"):
            open_lmdb(folder)
        return
    records = open_lmdb(folder)
    assert records.read(range(len(records)), ["value"]) == [{"value": value} for _, value in sorted(entries.items())]


def test_deep_tree_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_tree, "PAGES_AT_ONCE", 7)
    keys = [b"%0300d" % number for number in range(3000)]
    records = open_lmdb(write(tmp_path / "a", dict.fromkeys(keys, b"v"), sync=False))
    assert records._meta.tree.depth >= 3
    assert [record["key"].encode() for record in records.read(range(3000), ["key"])] == keys


def test_single_file_keys_in_hex_and_facts(tmp_path: Path) -> None:
    entries = {b"\xff\1": b"a", b"ok": b"b", b"__len__": b"2", b"__keys__": b"x", b"length": b" 12"}
    path = write(tmp_path / "a.mdb", entries, subdir=False)
    assert LmdbRecords.is_at(path)
    assert open_lmdb(path).read(range(2)) == [{"value": b"b", "key": "6f6b"}, {"value": b"a", "key": "ff01"}]
    words = {b"length": b"a vector", b"num-samples": b"", b"width": b"another"}
    assert len(open_lmdb(write(tmp_path / "b", words))) == 3


def test_numbered_fields(tmp_path: Path) -> None:
    entries = {b"num-samples": b"12"}
    for number in range(1, 13):
        entries |= {b"image-%09d" % number: b"jpeg%d" % number * number, b"label-%09d" % number: b"%d" % number}
    records = open_lmdb(write(tmp_path / "a", entries))
    assert len(records) == 12
    assert records.fields == {"image": "bytes", "label": "bytes", "key": "text"}
    assert records.read([11, 0]) == [
        {"image": b"jpeg12" * 12, "label": b"12", "key": "000000012"},
        {"image": b"jpeg1", "label": b"1", "key": "000000001"},
    ]
    assert records.read([5], ["label"]) == [{"label": b"6"}]
    del entries[b"label-000000004"]
    assert open_lmdb(write(tmp_path / "b", entries)).fields == {"value": "bytes", "key": "text"}
    one = {b"image-%d" % number: b"x" for number in range(9)}
    assert open_lmdb(write(tmp_path / "c", one)).fields == {"value": "bytes", "key": "text"}


def test_pickled_values_are_bytes(tmp_path: Path) -> None:
    value = pickle.dumps(os.getcwd)
    assert open_lmdb(write(tmp_path / "a", {b"x": value})).read([0], ["value"]) == [{"value": value}]


def test_other_orders_and_only_database(tmp_path: Path) -> None:
    environment = lmdb.open(str(tmp_path / "a"), map_size=2**24, max_dbs=2)
    only = environment.open_db(b"only", integerkey=True)
    with environment.begin(write=True, db=only) as transaction:
        for number in (1, 256, 3, 70000):
            transaction.put(struct.pack("<Q", number), b"%d" % number)
    environment.close()
    assert [record["value"] for record in open_lmdb(tmp_path / "a").read(range(4))] == [b"1", b"3", b"256", b"70000"]
    environment = lmdb.open(str(tmp_path / "a"), map_size=2**24, max_dbs=2)
    environment.open_db(b"two")
    environment.close()
    with pytest.raises(UserError, match=r"has 2 databases \(b'only', b'two'\), and one is read"):
        open_lmdb(tmp_path / "a")


def test_several_values_for_a_key(tmp_path: Path) -> None:
    environment = lmdb.open(str(tmp_path / "a"), map_size=2**24, max_dbs=1)
    several = environment.open_db(b"only", dupsort=True)
    with environment.begin(write=True, db=several) as transaction:
        transaction.put(b"a", b"1")
        transaction.put(b"a", b"2")
    environment.close()
    with pytest.raises(UserError, match="several values for a key"):
        open_lmdb(tmp_path / "a")


def _read_in_child(records: LmdbRecords, results: Any) -> None:
    results.put(records.read([5, 150]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(tmp_path: Path, method: str) -> None:
    records = open_lmdb(write(tmp_path / "a", SOME))
    here = records.read([5, 150])
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_read_in_child, args=(records, results))
    child.start()
    assert results.get(timeout=60) == here
    child.join()


def test_beside_the_library_in_one_process(tmp_path: Path) -> None:
    write(tmp_path / "a", SOME)
    with lmdb.open(str(tmp_path / "a"), readonly=True) as environment, environment.begin() as transaction:
        one, two = open_lmdb(tmp_path / "a"), open_lmdb(tmp_path / "a")
        assert one.read([3]) == two.read([3]) == [{"value": transaction.get(b"k003"), "key": "k003"}]


def test_index_is_made_anew_for_a_changed_file(tmp_path: Path) -> None:
    before = open_lmdb(write(tmp_path / "a", SOME))
    moved = pickle.dumps(before)
    write(tmp_path / "a", {b"a": b"first"})
    after = open_lmdb(tmp_path / "a")
    assert len(after) == 201
    assert after.read([0]) == [{"value": b"first", "key": "a"}]
    assert after.fingerprint != before.fingerprint
    with pytest.raises(JobError, match="has changed since it was opened"):
        pickle.loads(moved).read([0])


def test_fields_are_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_records, "MOST_FIELDS", 2)
    path = write(tmp_path / "a", {b"%c1" % letter: b"" for letter in b"abc"})
    assert open_lmdb(path).fields == {"value": "bytes", "key": "text"}


# --- what is wrong


def test_missing_empty_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_lmdb(tmp_path / "nothing.mdb")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/a", SOME)
    with pytest.raises(UserError, match=r"has no data\.mdb(.|\n)*name one of its folders: a"):
        open_lmdb(tmp_path / "folder")
    assert not LmdbRecords.is_at(tmp_path / "folder")
    assert LmdbRecords.is_at(tmp_path / "folder/a")
    (tmp_path / "a.mdb").write_bytes(b"")
    with pytest.raises(UserError, match=r"is empty: .*a\.mdb has 0 bytes"):
        open_lmdb(tmp_path / "a.mdb")
    (tmp_path / "a.mdb").write_bytes(b"text")
    with pytest.raises(UserError, match="152 bytes were expected there and the file ends after 4"):
        open_lmdb(tmp_path / "a.mdb")
    (tmp_path / "a.mdb").write_bytes(b"text" * 4000)
    with pytest.raises(UserError, match="is not an LMDB environment: its first page is no meta page"):
        open_lmdb(tmp_path / "a.mdb")
    assert not LmdbRecords.is_at(tmp_path / "a.mdb")


def test_empty_environment(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no records: the environment holds 0 keys"):
        open_lmdb(write(tmp_path / "a", {}))
    with pytest.raises(UserError, match="has no records: the environment holds 1 keys"):
        open_lmdb(write(tmp_path / "b", {b"__len__": b"0"}))


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (20, struct.pack("<I", 2), r"of version 2, and version 1 \(LMDB 0\.9\) is read"),
        (16, bytes.fromhex("beefc0de"), "written on a big-endian machine"),
        (40, struct.pack("<I", 0), "pages of 0 bytes, or was written on a 32-bit machine"),
        (PAGE + 16, b"\0\0\0\0", "byte 4096: there is no second meta page"),
        (PAGE + 120, struct.pack("<Q", 199), r"its tree has 200 entries, and 199 were written"),
        (
            PAGE + 128,
            struct.pack("<Q", 10**6),
            r"byte \d+: page 1000000, the root, is needed and the file ends",
        ),
    ],
)
def test_damaged_meta_pages(tmp_path: Path, offset: int, content: bytes, message: str) -> None:
    path = write(tmp_path / "a", SOME) / "data.mdb"
    change(path, offset, content)
    with pytest.raises(UserError, match=message):
        open_lmdb(tmp_path / "a")


def test_damaged_leaf(tmp_path: Path) -> None:
    path = write(tmp_path / "a", SOME) / "data.mdb"
    records, leaf = open_lmdb(tmp_path / "a"), find_leaf(path)
    whole = path.read_bytes()
    for offset, content, message in [
        (0, b"\1", f"byte {leaf}: page {leaf // PAGE} is not the leaf page that was written there"),
        (10, b"\1", "is not the leaf page"),
        (16, b"\xff\xff", f"an entry of page {leaf // PAGE} leads out of it"),
    ]:
        change(path, leaf + offset, content)
        with pytest.raises(UserError, match=message):
            open_lmdb(tmp_path / "a")
        assert any(message in found for found in records.find_damage())
        path.write_bytes(whole)
    key = whole.index(b"k003", leaf)
    change(path, key, b"k001")
    with pytest.raises(UserError, match="the keys of its page do not rise"):
        open_lmdb(tmp_path / "a")
    with pytest.raises(DamagedData, match='the value of key "k003" is not there any more'):
        records.read([2, 3])
    assert records.read([4])[0]["value"] == SOME[b"k004"]


def test_large_value_that_is_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a", SOME) / "data.mdb"
    records = open_lmdb(tmp_path / "a")
    offset = records.extent(150).offset
    assert offset % PAGE == lmdb_tree.HEAD_BYTES
    change(path, offset - 16, b"\xff")
    with pytest.raises(DamagedData, match=f'byte {offset - 16}: the value of key "k150" is not there any more'):
        records.read([150])


def test_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "a", SOME) / "data.mdb"
    records = open_lmdb(tmp_path / "a")
    whole = path.read_bytes()
    for size in (100, PAGE, 2 * PAGE, path.stat().st_size // 2, path.stat().st_size - PAGE):
        os.truncate(path, size)
        with pytest.raises(UserError, match=r"cannot be read: .*data\.mdb is damaged at byte \d+: .*file ends"):
            open_lmdb(tmp_path / "a")
        assert any(f"has {size} bytes, and" in found for found in records.find_damage())
        path.write_bytes(whole)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DamagedData, match=r"the file ends after"):
        records.read(range(200))


def test_any_damage_is_a_message(tmp_path: Path) -> None:
    """Random bytes in the heads of pages give an error, or records that lie in the file."""
    small = {b"k%04d" % number: bytes(number % 100) for number in range(900)}
    path = write(tmp_path / "a", small) / "data.mdb"
    whole, chance, seen = path.read_bytes(), random.Random(5), 0
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content) // PAGE) * PAGE + chance.randrange(200)] = chance.randrange(256)
        path.write_bytes(content)
        os.utime(path, ns=(0, chance.getrandbits(60)))
        try:
            records = open_lmdb(tmp_path / "a")
            records.read(range(len(records)))
        except (UserError, DamagedData):
            seen += 1
    assert seen > 25


def test_sums_are_compared_when_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "a", SOME) / "data.mdb"
    make_sums(tmp_path / "a", open_lmdb(tmp_path / "a").parts.files)
    records = open_lmdb(tmp_path / "a")
    place = records.extent(150).offset + 9
    assert len(records.read(range(200))) == 200
    change(path, place, b"?")
    with pytest.raises(UserError, match="checksum"):
        open_lmdb(tmp_path / "a")
    assert any("checksum" in found for found in records.find_damage())
