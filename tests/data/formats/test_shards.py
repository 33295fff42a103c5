from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.content import DataPath
from shardway.data.convert import WRITERS
from shardway.data.formats import shards
from shardway.data.formats.base import BLOCK_BYTES, DamagedData, sum_blocks
from shardway.data.formats.shard_file import read_shard_facts, write_record_shard, write_token_shard
from shardway.data.formats.shard_manifest import read_manifest, write_manifest
from shardway.data.formats.shard_repair import find_folder_damage, repair_shards
from shardway.data.formats.shards import ShardRecords, ShardTokens, open_token_shards
from shardway.data.formats.tokens import TokenRecords
from shardway.errors import UserError


def at(path: Path) -> DataPath:
    return DataPath("data.path", str(path))


def write_records(folder: Path, *parts: Sequence[dict[str, Any]], **described: Any) -> Path:
    folder.mkdir(exist_ok=True)
    facts = [write_record_shard(folder / f"{number:05d}.shard", part) for number, part in enumerate(parts)]
    write_manifest(folder, "records", facts, described)
    return folder


def write_tokens(folder: Path, *parts: Sequence[Any], dtype: str = "uint16", **described: Any) -> Path:
    folder.mkdir(exist_ok=True)
    facts = [
        write_token_shard(
            folder / f"{number:05d}.shard", [each if isinstance(each, tuple) else (each, None) for each in part], dtype
        )
        for number, part in enumerate(parts)
    ]
    write_manifest(folder, "tokens", facts, described)
    return folder


def same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and np.array_equal(first, second)
    return type(first) is type(second) and first == second


def equal(found: list[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> bool:
    return len(found) == len(expected) and all(
        first.keys() == second.keys() and all(same(first[name], second[name]) for name in second)
        for first, second in zip(found, expected, strict=True)
    )


RECORDS = [
    {
        "jpg": bytes([number]) * (number * 7 % 50),
        "cls": number - 40,
        "text": f"Zeile {number} äöü\ud800" if number % 3 else "",
        "ratio": number / 7,
        "good": number % 2 == 0,
        "box": np.arange(4, dtype=np.float32) + number,
        "tokens": np.arange(number % 5, dtype=np.uint16),
        "turns": [{"role": "user", "content": "hü"}] * (number % 3),
        "meta": {"number": number, "none": None},
    }
    for number in range(100)
]

MIXED: list[dict[str, Any]] = [
    {},
    {"a": 1},
    {"a": "one", "b": b""},
    {"a": None, "b": b"x"},
    {"a": [1, 2.5, "drei"], "c": 2**70},
    {"a": np.zeros((2, 3), np.int8), "c": -(2**63)},
    {"a": np.ones((4, 3), np.int8), "c": 2**63},
    {"a": np.float32(1.5), "b": b"abc", "c": True},
    {"a": np.zeros((), np.int64), "c": 0.5, "d": np.array(["x", "yz"])},
    {"a": np.zeros((0, 3), np.int8), "b": b"last", "d": np.zeros((3, 0), ">i4")},
]
MIXED_READ = [dict(record) for record in MIXED]
MIXED_READ[7]["a"] = 1.5


# --- records


def test_records_are_what_was_written(tmp_path: Path) -> None:
    reader = ShardRecords.open(at(write_records(tmp_path / "d", RECORDS[:60], [], RECORDS[60:])))
    assert len(reader) == 100
    assert equal(reader.read(range(100)), RECORDS)
    assert reader.fields == {
        "jpg": "bytes",
        "cls": "int",
        "text": "text",
        "ratio": "float",
        "good": "bool",
        "box": "float32[4]",
        "tokens": "uint16[?]",
        "turns": "list",
        "meta": "mapping",
    }
    assert reader.read([3])[0]["box"].flags.writeable
    assert reader.read([]) == []


@pytest.mark.parametrize("ids", [[99, 0, 0, 60, 59], [5] * 70, list(range(99, -1, -1)), list(range(50, 70)) * 2])
def test_records_come_in_the_order_asked_for(tmp_path: Path, ids: list[int]) -> None:
    reader = ShardRecords.open(at(write_records(tmp_path / "d", RECORDS[:60], RECORDS[60:])))
    assert equal(reader.read(ids), [RECORDS[number] for number in ids])
    assert equal(reader.read(np.array(ids)), [RECORDS[number] for number in ids])


@pytest.mark.parametrize("fields", [["jpg"], ["meta", "jpg"], ["cls"], ["text", "turns"], ["nothing"], ["ratio", "no"]])
def test_only_the_fields_asked_for_are_read(tmp_path: Path, fields: list[str]) -> None:
    reader = ShardRecords.open(at(write_records(tmp_path / "d", RECORDS[:60], RECORDS[60:])))
    expected = [{name: value for name, value in record.items() if name in fields} for record in RECORDS]
    for ids in (range(100), [1, 99, 2]):  # as columns, and one by one
        assert equal(reader.read(ids, fields), [expected[number] for number in ids])


def test_fields_may_be_missing_and_of_several_types(tmp_path: Path) -> None:
    reader = ShardRecords.open(at(write_records(tmp_path / "d", MIXED * 4)))
    assert equal(reader.read(range(40)), MIXED_READ * 4)
    few = ShardRecords.open(at(write_records(tmp_path / "e", MIXED[:5], MIXED[5:])))
    assert equal(few.read(range(10)), MIXED_READ)
    assert few.fields["a"] == "any"


_values = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=20),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.lists(st.integers(), max_size=3),
    st.lists(st.integers(0, 255), max_size=5).map(lambda values: np.array(values, np.uint8)),
)


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.dictionaries(st.sampled_from("abc"), _values), max_size=6), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_records_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[dict[str, Any]]], draw: random.Random
) -> None:
    reader = ShardRecords.open(at(write_records(tmp_path_factory.mktemp("any"), *parts)))
    records = [record for part in parts for record in part]
    ids = [draw.randrange(len(records)) for _ in range(40)] if records else []
    assert equal(reader.read(ids), [records[number] for number in ids])
    assert equal(reader.read(range(len(records))), records)
    assert list(reader.find_damage()) == []


@pytest.mark.parametrize("value", [{"x": {1, 2}}, {"x": [b"bytes"]}, {"x": np.array([object()])}])
def test_a_value_that_cannot_be_stored_is_refused(tmp_path: Path, value: dict[str, Any]) -> None:
    with pytest.raises(UserError, match='field "x"'):
        write_record_shard(tmp_path / "00000.shard", [value])
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_no_record_has_is_refused(tmp_path: Path) -> None:
    reader = ShardRecords.open(at(write_records(tmp_path / "d", RECORDS[:5])))
    for wrong in (-1, 5):
        with pytest.raises(UserError, match=f"no record {wrong}; allowed: 0 to 4"):
            reader.read([0, wrong])


def test_a_reader_is_pickled_without_what_it_read(tmp_path: Path) -> None:
    reader = ShardRecords.open(at(write_records(tmp_path / "d", RECORDS[:60], RECORDS[60:])))
    small = len(pickle.dumps(reader))
    reader.read(range(100))
    assert len(pickle.dumps(reader)) == small
    copy = pickle.loads(pickle.dumps(reader))
    assert equal(copy.read([70, 3]), [RECORDS[70], RECORDS[3]])
    code = "import pickle, sys; reader = pickle.load(sys.stdin.buffer); print(reader.read([70])[0]['cls'])"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(reader), capture_output=True, check=True)
    assert done.stdout.split() == [b"30"]


def test_where_a_record_lies(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "d", RECORDS[:60], [{"cls": 1}], [{"a": b"before"}, {"a": b"four", "b": b"5"}])
    reader = ShardRecords.open(at(folder))
    where = reader.extent(62)
    assert (where.path, where.offset, where.size) == (folder / "00002.shard", 6, 5)
    assert (folder / "00002.shard").read_bytes()[6:11] == b"four5"
    assert reader.extent(60).path == folder / "00001.shard"


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_records(tmp_path / name, RECORDS[:50], RECORDS[50:], source={"path": "x"}) for name in "ab")
    for name in ("00000.shard", "00001.shard", "shards.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    third = write_records(tmp_path / "c", RECORDS[:50], RECORDS[51:])
    prints = {ShardRecords.open(at(folder)).fingerprint for folder in (first, second, third)}
    assert len(prints) == 2


def test_only_a_few_columns_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "COLUMN_BYTES", 100)
    reader = ShardRecords.open(at(write_records(tmp_path / "d", RECORDS[:60], RECORDS[60:])))
    assert equal(reader.read([0, 99] * 40), [RECORDS[0], RECORDS[99]] * 40)
    assert len(reader.parts._columns) == 1


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    parts = [[{"x": f"{number}".encode()}] for number in range(80)]
    reader = ShardRecords.open(at(write_records(tmp_path / "d", *parts)))
    ids = random.Random(0).choices(range(80), k=500)
    assert [record["x"] for record in reader.read(ids)] == [f"{number}".encode() for number in ids]


# --- tokens

DOCUMENTS = [np.arange(number * 3 % 11, dtype=np.uint16) + number for number in range(40)]


def test_documents_of_tokens_are_what_was_written(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "d", DOCUMENTS[:15], [], DOCUMENTS[15:], vocab=100, end=3, text_bytes=999)
    store = open_token_shards(at(folder))
    flat = np.concatenate(DOCUMENTS)
    assert len(store) == len(flat)
    assert (store.manifest.vocab, store.manifest.end, store.manifest.text_bytes) == (100, 3, 999)
    assert store.manifest.samples == 40
    assert store.read_ends().tolist() == np.cumsum([len(each) for each in DOCUMENTS]).tolist()
    starts = np.arange(len(flat) - 7)
    assert store.rows(starts, 7).tolist() == [flat[start : start + 7].tolist() for start in starts]
    assert store.count_rows(starts, 7) is None
    records = TokenRecords.open(at(folder))
    assert len(records) == 40
    assert [record["tokens"].tolist() for record in records.read(range(40))] == [each.tolist() for each in DOCUMENTS]
    assert [record["tokens"].tolist() for record in records.read([39, 2, 2])] == [
        DOCUMENTS[number].tolist() for number in (39, 2, 2)
    ]
    assert pickle.loads(pickle.dumps(records)).read([15])[0]["tokens"].tolist() == DOCUMENTS[15].tolist()
    where = records.extent(16)
    assert (where.path.name, where.size) == ("00002.shard", 2 * len(DOCUMENTS[16]))
    assert where.path.read_bytes()[where.offset :][: where.size] == DOCUMENTS[16].tobytes()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_each_width_of_tokens(tmp_path: Path, dtype: str) -> None:
    store = open_token_shards(at(write_tokens(tmp_path / "d", DOCUMENTS[:15], DOCUMENTS[15:], dtype=dtype)))
    assert store.dtype == np.dtype(dtype)
    assert store.rows(np.array([0]), len(store))[0].tolist() == np.concatenate(DOCUMENTS).tolist()


def test_tokens_that_do_not_count(tmp_path: Path) -> None:
    marked = [(each, each % 2 == 0) for each in DOCUMENTS[10:20]]
    parts = [DOCUMENTS[:10], [DOCUMENTS[9], *marked, DOCUMENTS[20]], DOCUMENTS[21:]]
    folder = write_tokens(tmp_path / "d", *parts)
    store = open_token_shards(at(folder))
    documents = [*DOCUMENTS[:10], DOCUMENTS[9], *DOCUMENTS[10:]]
    expected = np.concatenate([each % 2 == 0 if 11 <= n < 21 else each >= 0 for n, each in enumerate(documents)])
    starts = np.array([0, 5, len(store) - 9, 60, 61])
    assert store.count_rows(starts, 9).tolist() == [expected[start : start + 9].tolist() for start in starts]
    counted = store.count_rows(np.array([0]), len(store))
    assert counted is not None
    assert counted[0].tolist() == expected.tolist()
    records = TokenRecords.open(at(folder)).read(range(41), ["counted"])
    assert np.concatenate([record["counted"] for record in records]).tolist() == expected.tolist()


@pytest.mark.parametrize("wrong", [np.array([70000]), np.array([-1])])
def test_a_token_that_the_type_does_not_hold_is_refused(tmp_path: Path, wrong: np.ndarray) -> None:
    with pytest.raises(UserError, match=f"document 1 of 00000.shard holds the token {wrong[0]}"):
        write_token_shard(tmp_path / "00000.shard", [(DOCUMENTS[0], None), (wrong, None)], "uint16")
    with pytest.raises(UserError, match="has 1 tokens and 3 marks"):
        write_token_shard(tmp_path / "00000.shard", [(np.array([1]), np.ones(3, np.bool_))], "uint16")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_no_half_shard(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib, numpy as np\n"
        "from shardway.data.formats.shard_file import write_token_shard\n"
        "def documents():\n"
        "    yield np.zeros(3_000_000, np.uint16), None\n"
        "    os.kill(os.getpid(), 9)\n"
        "write_token_shard(pathlib.Path(sys.argv[1]), documents(), 'uint16')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "00000.shard")], check=False)
    assert done.returncode == -9
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_facts_come_from_the_shard_itself(tmp_path: Path) -> None:
    written = write_token_shard(tmp_path / "00000.shard", [(each, None) for each in DOCUMENTS], "uint16")
    assert read_shard_facts(tmp_path / "00000.shard") == written
    assert (written.samples, written.tokens, written.dtype) == (40, sum(map(len, DOCUMENTS)), "uint16")
    written = write_record_shard(tmp_path / "00001.shard", RECORDS)
    assert read_shard_facts(tmp_path / "00001.shard") == written
    written = write_record_shard(tmp_path / "00002.shard", [{f"field {number}" * 40: b"x" for number in range(500)}])
    assert read_shard_facts(tmp_path / "00002.shard") == written  # a footer of more than is read at once


# --- the manifest


def test_a_manifest_says_what_it_was_told(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "d", DOCUMENTS, vocab=77, seq_len=8, source={"path": "a.txt"}, end=None)
    manifest = read_manifest(at(folder))
    assert (manifest.vocab, manifest.end, manifest.described["seq_len"]) == (77, None, 8)
    assert manifest == read_manifest(at(folder / "shards.json"))
    content = json.loads((folder / "shards.json").read_text())
    assert (content["format"], content["version"], content["kind"]) == ("shardway shards", 1, "tokens")
    assert (content["samples"], content["dtype"], content["tokenizer"]) == (40, "uint16", None)
    with pytest.raises(UserError, match="computes samples itself"):
        write_manifest(folder, "tokens", manifest.shards, {"samples": 3})


def test_shards_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "d", DOCUMENTS)
    other = write_token_shard(folder / "00001.shard", [], "uint8")
    records = write_record_shard(folder / "00002.shard", RECORDS)
    facts = read_manifest(at(folder)).shards
    with pytest.raises(UserError, match="one type, and these hold uint16, uint8"):
        write_manifest(folder, "tokens", [*facts, other], {})
    with pytest.raises(UserError, match=r"do not hold tokens: 00002\.shard"):
        write_manifest(folder, "tokens", [*facts, records], {})


def refused(path: Path, kind: str = "records") -> str:
    with pytest.raises(UserError) as caught:
        ShardRecords.open(at(path)) if kind == "records" else open_token_shards(at(path))
    return str(caught.value)


def test_what_is_wrong_is_said_when_it_is_opened(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "d", RECORDS[:30], RECORDS[30:])
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert 'holds records\n      allowed: tokens\n      to do: set data.kind = "shards"' in refused(folder, "tokens")
    assert "has no shards.json" in refused(tmp_path / "missing")
    (folder / "00001.shard").unlink()
    assert "lacks 1 of its shards: 00001.shard" in refused(folder)
    (folder / "00001.shard").write_bytes(whole["00001.shard"][:-9])
    size = len(whole["00001.shard"])
    assert f"shards that were cut or changed: 00001.shard (has {size - 9} bytes, should have {size})" in refused(folder)
    (folder / "00001.shard").write_bytes(b"")
    assert "(has 0 bytes" in refused(folder)
    (folder / "00001.shard").write_bytes(whole["00001.shard"])
    for wrong in (
        b"",
        b"[]",
        b"{}",
        b"\xff",
        whole["shards.json"][:-1],
        whole["shards.json"].replace(b" 1", b"  1"),
    ):
        (folder / "shards.json").write_bytes(wrong)
        assert "shards.json that is damaged (byte 0: checksum mismatch)" in refused(folder)
        assert ShardRecords.is_at(folder)
    (folder / "shards.json").unlink()
    assert "has no shards.json" in refused(folder)


def test_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardway.data.formats import shard_file, shard_manifest

    monkeypatch.setattr(shard_manifest, "MANIFEST_VERSION", 2)
    folder = write_records(tmp_path / "d", RECORDS)
    monkeypatch.setattr(shard_file, "SHARD_VERSION", 2)
    write_record_shard(folder / "00001.shard", RECORDS)
    monkeypatch.undo()
    assert "shards.json of version 2\n      allowed: up to 1" in refused(folder)
    with pytest.raises(UserError, match="a shard of version 2"):
        read_shard_facts(folder / "00001.shard")


def test_what_lies_at_a_path(tmp_path: Path) -> None:
    records, tokens = write_records(tmp_path / "r", RECORDS), write_tokens(tmp_path / "t", DOCUMENTS)
    assert (ShardRecords.is_at(records), TokenRecords.is_at(records)) == (True, False)
    assert (ShardRecords.is_at(tokens), TokenRecords.is_at(tokens)) == (False, True)
    (tokens / "shards.json").unlink()
    assert TokenRecords.is_at(tokens)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "shards.json").write_text("{}")
    for other in (tmp_path, tmp_path / "e", tmp_path / "missing", tmp_path / "r" / "00000.shard"):
        assert not ShardRecords.is_at(other)
        assert not TokenRecords.is_at(other)


# --- damage


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ (1 << bit % 8)]))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of records of some blocks each; not to be changed."""
    draw = np.random.default_rng(0)
    blob, sizes = draw.bytes(700), draw.integers(0, 700, 10_000).tolist()
    record = [{"x": blob[700 - size :], "n": size} for size in sizes]
    folder = tmp_path_factory.mktemp("large") / "d"
    return write_records(folder, record[:7_000], record[7_000:], source={"path": "somewhere"})


@pytest.fixture
def folder(large: Path, tmp_path: Path) -> Path:
    """Records of some blocks, to be damaged."""
    return Path(shutil.copytree(large, tmp_path / "d"))


def test_a_thousand_flipped_bits_are_found_with_file_and_place(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    shard = read_shard_facts(paths[0])
    assert shard.bytes > 2 * BLOCK_BYTES
    draw, found = random.Random(0), 0
    sizes = [path.stat().st_size for path in paths]
    for number in range(1000):
        # Half of them anywhere, the others where little lies: the ends of shards, and the manifest.
        path = draw.choices(paths, sizes)[0] if number % 2 else draw.choice(paths)
        size = path.stat().st_size
        bit = draw.randrange(8 * (size - 1600 if number % 2 == 0 and path.suffix == ".shard" else 0), 8 * size)
        flip(path, bit)
        damage = list(find_folder_damage(folder))
        flip(path, bit)
        hits = [each for each in damage if each.path == path and each.offset <= bit // 8 < each.offset + each.size]
        found += bool(hits) and len(damage) == 1
        assert hits, (path, bit)
    assert found == 1000
    assert list(find_folder_damage(folder)) == []


def test_every_damaged_block_is_named(folder: Path) -> None:
    for bit in (0, 8 * BLOCK_BYTES + 3, 8 * BLOCK_BYTES + 99):
        flip(folder / "00000.shard", bit)
    flip(folder / "00001.shard", 77)
    reader = ShardRecords.open(at(folder))
    assert [sentence.partition(": ")[0] for sentence in reader.find_damage()] == [
        f"{folder / '00000.shard'} is damaged at byte 0",
        f"{folder / '00000.shard'} is damaged at byte {BLOCK_BYTES}",
        f"{folder / '00001.shard'} is damaged at byte 0",
    ]
    with pytest.raises(DamagedData, match=r"00000\.shard is damaged at byte 0: "):
        reader.read([1])
    with pytest.raises(DamagedData, match=r"00001\.shard is damaged at byte 0"):
        reader.read([7_000, 9_999])


@pytest.mark.parametrize("from_end", [1, 20, 40, 300])
def test_a_damaged_end_of_a_shard_is_found_when_it_is_read(tmp_path: Path, from_end: int) -> None:
    folder = write_records(tmp_path / "d", RECORDS)
    size = (folder / "00000.shard").stat().st_size
    flip(folder / "00000.shard", 8 * (size - from_end))
    reader = ShardRecords.open(at(folder))
    with pytest.raises(DamagedData, match=r"00000\.shard is damaged at byte"):
        reader.read([0])


def test_another_shard_of_the_same_size_is_found(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "d", [{"x": b"one"}], [{"x": b"two"}])
    shutil.copy(folder / "00000.shard", folder / "00001.shard")
    reader = ShardRecords.open(at(folder))
    assert reader.read([0]) == [{"x": b"one"}]
    with pytest.raises(DamagedData, match="another shard than the manifest names"):
        reader.read([1])
    assert len(list(reader.find_damage())) == 1


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "d", RECORDS)
    reader = ShardRecords.open(at(folder))
    reader.read([0])
    os.truncate(folder / "00000.shard", 100)
    with pytest.raises(DamagedData, match="the file ends after"):
        reader.read([90])
    with pytest.raises(DamagedData, match="the file ends after"):
        reader.read(range(100))


def test_checksums_of_whole_files_are_given_to_a_copier(large: Path) -> None:
    reader = ShardRecords.open(at(large))
    for number, sums in enumerate(reader.parts.sums):
        assert sums.tolist() == sum_blocks(reader.parts.path(number)).tolist()


def test_damaged_tokens_are_found_when_they_are_touched(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "d", [np.zeros(BLOCK_BYTES, np.uint16)], [np.zeros(BLOCK_BYTES, np.uint16)])
    flip(folder / "00001.shard", 8 * BLOCK_BYTES + 5)
    store = open_token_shards(at(folder))
    store.rows(np.array([0, BLOCK_BYTES + 5]), 100)
    with pytest.raises(DamagedData, match=rf"00001\.shard is damaged at byte {BLOCK_BYTES}"):
        store.rows(np.array([0, 2 * BLOCK_BYTES - 200]), 100)
    large: ShardTokens = open_token_shards(at(folder))
    large.memory_bytes = BLOCK_BYTES  # the store does not fit: it is not read whole for a few rows
    assert large.rows(np.array([2 * BLOCK_BYTES - 200]), 100).shape == (1, 100)
    records = TokenRecords.open(at(folder))
    assert len(list(records.find_damage())) == 1
    with pytest.raises(DamagedData):
        records.read([1])


# --- mending


def test_damaged_blocks_are_copied_from_another_copy(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    flip(folder / "00000.shard", 8 * BLOCK_BYTES)
    size = (folder / "00001.shard").stat().st_size
    flip(folder / "00001.shard", 8 * (size - 100))  # the footer
    flip(folder / "00001.shard", 8 * 5)
    flip(copy / "00000.shard", 5)  # elsewhere, so each mends the other
    done, left = repair_shards(folder, copy)
    assert left == []
    assert done[0] == f"{folder / '00000.shard'}: 1 of 3 blocks were copied"
    assert done[1] == f"{folder / '00001.shard'} was copied whole"
    assert list(find_folder_damage(folder)) == []
    assert repair_shards(copy, folder)[1] == []
    assert list(find_folder_damage(copy)) == []
    assert repair_shards(folder, copy) == ([], [])
    assert sorted(path.name for path in folder.iterdir()) == ["00000.shard", "00001.shard", "shards.json"]


def test_a_missing_or_cut_shard_is_copied(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "d", RECORDS[:30], RECORDS[30:])
    copy = shutil.copytree(folder, tmp_path / "copy")
    (folder / "00000.shard").unlink()
    os.truncate(folder / "00001.shard", 50)
    done, left = repair_shards(folder)
    assert (done, len(left)) == ([], 3)
    done, left = repair_shards(folder, copy)
    assert (len(done), left) == (2, [])
    assert equal(ShardRecords.open(at(folder)).read(range(100)), RECORDS)


def test_a_damaged_copy_makes_nothing_worse(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "d", RECORDS[:30], RECORDS[30:])
    copy = shutil.copytree(folder, tmp_path / "copy")
    flip(folder / "00001.shard", 8)
    flip(copy / "00001.shard", 16)
    before = (folder / "00001.shard").read_bytes()
    done, left = repair_shards(folder, copy)
    assert (done, left) == ([], [str(each) for each in find_folder_damage(folder)])
    assert (folder / "00001.shard").read_bytes() == before
    other = write_records(tmp_path / "other", RECORDS[:31], RECORDS[31:])
    assert "is another data set" in repair_shards(folder, other)[1][0]
    (other / "shards.json").unlink()
    assert "is damaged or missing too" in repair_shards(folder, other)[1][0]
    assert (folder / "00001.shard").read_bytes() == before


def test_checksums_are_made_anew_without_a_copy(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "d", RECORDS)
    whole = (folder / "00000.shard").read_bytes()
    reader = ShardRecords.open(at(folder))
    flip(folder / "00000.shard", 8 * reader.parts.footer(0).sums.offset + 3)
    done, left = repair_shards(folder)
    assert (len(done), left) == (1, [])
    assert (folder / "00000.shard").read_bytes() == whole


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_manifest_is_made_anew_from_the_shards(tmp_path: Path, how: str) -> None:
    folder = write_tokens(tmp_path / "d", DOCUMENTS[:9], DOCUMENTS[9:], vocab=80)
    copy = shutil.copytree(folder, tmp_path / "copy")
    before = read_manifest(at(folder))
    for each in (folder, copy):
        (each / "shards.json").unlink() if how == "missing" else flip(each / "shards.json", 99)
    done, left = repair_shards(folder)
    assert left == []
    assert "was made anew from 2 shards" in done[0]
    after = read_manifest(at(folder))
    assert (after.fingerprint, after.shards, after.vocab) == (before.fingerprint, before.shards, None)
    done, left = repair_shards(copy, folder)
    assert (done, left) == ([f"{copy / 'shards.json'} was copied"], [])


def test_a_manifest_is_not_made_of_damaged_shards(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "d", RECORDS[:30], RECORDS[30:])
    copy = shutil.copytree(folder, tmp_path / "copy")
    (folder / "shards.json").unlink()
    flip(folder / "00001.shard", 8)
    done, left = repair_shards(folder)
    assert done == []
    assert "cannot be made anew: shards are damaged" in left[0]
    done, left = repair_shards(folder, copy)
    assert (len(done), left) == (2, [])
    assert list(find_folder_damage(folder)) == []
    (folder / "shards.json").unlink()
    (folder / "00000.shard").unlink()
    assert "00000.shard is missing" in repair_shards(folder)[1][0]
    other = write_records(tmp_path / "other", RECORDS)
    assert "is not seen to be the same data set" in repair_shards(folder, other)[1][0]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
def test_tokens_of_any_type_are_converted(tmp_path: Path, dtype: str) -> None:
    given = [np.array([3, 200, 1], dtype), np.zeros(0, dtype), np.array([7], dtype)]
    WRITERS["tokens"](iter({"tokens": each} for each in given), tmp_path / "d")
    assert read_manifest(at(tmp_path / "d")).described["vocab"] == 201
    assert [each["tokens"].tolist() for each in TokenRecords.open(at(tmp_path / "d")).read(range(3))] == [
        each.tolist() for each in given
    ]
