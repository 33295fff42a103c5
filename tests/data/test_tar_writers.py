"""Tar shards keep the keys of records where they can; an Energon folder is what `energon prepare` would have made."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardway.data import tar_writers
from shardway.data.detect import open_records, place_of
from shardway.data.formats.base import Record
from shardway.data.tar_writers import write_energon, write_webdataset
from shardway.errors import UserError

RECORDED = Path(__file__).parents[1] / "recorded/data/energon"


def keys_of(out: Path) -> list[str]:
    found = open_records(place_of(out))
    return [each["__key__"] for each in found.read(range(len(found)))]


def named(keys: Iterable[str]) -> Iterable[Record]:
    return ({"__key__": key, f"x{number}": b"1"} for number, key in enumerate(keys))


@pytest.mark.parametrize("write", [write_webdataset, write_energon])
def test_keys_stay_where_they_can(tmp_path: Path, write: Any) -> None:
    own = ["a", "b/c", "ü", "f.g/h", "x" * 200]
    others = ["a", "d.e", "", "a/", "/a", "../a", "__m__/a", "a/__b", "n\0m", "\udc80"]
    write(iter(named([*own, *others])), tmp_path / "out")
    assert keys_of(tmp_path / "out") == [*own, *(f"{number:09d}" for number in range(len(own), len(own + others)))]


def test_the_number_of_a_record_may_be_the_key_of_another(tmp_path: Path) -> None:
    """Its fields would otherwise become those of its neighbour."""
    write_webdataset(iter(named(["000000001", ""])), tmp_path / "out")
    assert keys_of(tmp_path / "out") == ["000000001", "000000001-2"]


@pytest.mark.parametrize(("write", "second"), [(write_webdataset, "a"), (write_energon, "000000001")])
def test_a_key_may_come_again_in_another_shard_but_for_energon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, second: str
) -> None:
    monkeypatch.setattr(tar_writers, "SHARD_BYTES", 1024)
    write(iter(named(["a", "a"])), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["000000.tar", "000001.tar"]
    assert keys_of(tmp_path / "out") == ["a", second]


@pytest.mark.parametrize("name", ["a/b", "a\0", "\udc80"])
def test_a_field_that_is_no_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        UserError, match="cannot be the suffix of a member of a tar shard\n  to do: leave the field out"
    ):
        write_webdataset(iter([{name: b"1"}]), tmp_path / "out")


def rows_of(out: Path) -> dict[str, list[list[Any]]]:
    with contextlib.closing(sqlite3.connect(out / ".nv-meta" / "index.sqlite")) as index:
        assert index.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {
            table: [list(row) for row in index.execute(f"SELECT * FROM {table} ORDER BY rowid")]
            for table in ("samples", "sample_parts")
        }


def test_the_files_of_energon_are_those_that_it_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded shards, written by us with as many records in each."""
    monkeypatch.setattr(tar_writers, "SHARD_BYTES", 3 * 3072)
    expected = json.loads((RECORDED / "expected.json").read_text())
    records = [
        {name: value if name == "__key__" else bytes.fromhex(value) for name, value in sample.items()}
        for sample in expected["train"] + expected["val"]
    ]
    out = tmp_path / "out"
    write_energon(iter(records), out)
    assert rows_of(out) == json.loads((RECORDED / "index.json").read_text())
    for number in range(3):
        theirs = RECORDED / "parts" / f"shard-{number:03d}.tar.idx"
        assert (out / f"{number:06d}.tar.idx").read_bytes() == theirs.read_bytes()
    info = (RECORDED / ".nv-meta" / ".info.json").read_text().replace("parts/shard-", "000")
    assert (out / ".nv-meta" / ".info.json").read_text() == info
    split = yaml.safe_load((out / ".nv-meta" / "split.yaml").read_text())
    assert split == {"split_parts": {"train": ["{000000..000002}.tar"]}, "exclude": []}
    dataset = yaml.safe_load((out / ".nv-meta" / "dataset.yaml").read_text())
    assert dataset == {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}


def test_the_index_of_energon_says_where_members_lie(tmp_path: Path) -> None:
    """Also of names that need two headers."""
    records = [{"__key__": "k" * length, "a": b"x" * length, "b" * 90: b""} for length in (1, 60, 101, 600)]
    write_energon(iter(records), tmp_path / "out")
    found = rows_of(tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "000000.tar") as tar:
        members = tar.getmembers()
        assert [row[3:] for row in found["sample_parts"]] == [[each.offset_data, each.size] for each in members]
        starts = [each.offset for each in members[::2]]
        assert [row[3:] for row in found["samples"]] == [
            [start, stop - start] for start, stop in zip(starts, [*starts[1:], tar.offset], strict=True)
        ]
    assert yaml.safe_load((tmp_path / "out/.nv-meta/split.yaml").read_text())["split_parts"] == {
        "train": ["000000.tar"]
    }


def test_a_disk_that_is_full_for_the_index_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardway.data.convert import convert_records
    from shardway.errors import JobError

    source = tmp_path / "rows.jsonl"
    source.write_text('{"a": 1}\n')

    def full(*values: Any, **more: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(JobError, match="cannot be written: database or disk is full; nothing of it is left"):
        convert_records(open_records(place_of(source)), tmp_path / "out", "energon", (), lambda done, total: None)
    assert not (tmp_path / "out").exists()
