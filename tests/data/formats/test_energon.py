"""Energon: a folder that `energon prepare` made is read as Energon reads it; metadatasets are flattened as it does.

`recorded/data/energon` was prepared by Megatron Energon 7.4.1; expected.json holds what its reader gave for each split,
index.json the rows of its index.sqlite, and the weights below are those of its loader.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardway.data.content import DataPath
from shardway.data.formats.base import DamagedData
from shardway.data.formats.energon import EnergonRecords, open_split, read_metadataset
from shardway.data.formats.indexes import make_sums
from shardway.data.formats.webdataset import WebDatasetRecords
from shardway.errors import UserError

RECORDED = Path(__file__).parents[2] / "recorded/data/energon"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED, tmp_path / "prepared"))


def place(path: Path) -> DataPath:
    return DataPath("data.path", str(path))


def expected(split: str) -> list[dict[str, Any]]:
    samples = json.loads((RECORDED / "expected.json").read_text())[split]
    return [
        {name: value if name == "__key__" else bytes.fromhex(value) for name, value in sample.items()}
        for sample in samples
    ]


def read_all(records: EnergonRecords) -> list[dict[str, Any]]:
    return records.read(range(len(records)))


def refusal(path: Path, split: str = "") -> str:
    with pytest.raises(UserError) as caught:
        open_split(place(path), split)
    assert str(caught.value).startswith(f'1 problem in the data\n  data.path: "{path}')
    return str(caught.value)


def write_splits(folder: Path, **content: Any) -> None:
    (folder / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump(content))


def write_info(folder: Path, change: dict[str, int]) -> None:
    path = folder / ".nv-meta" / ".info.json"
    info = json.loads(path.read_text())
    info["shard_counts"].update(change)
    path.write_text(json.dumps(info))


# --- a prepared folder


@pytest.mark.parametrize("split", ["train", "val"])
def test_records_are_those_that_energon_reads(split: str, folder: Path) -> None:
    records = open_split(place(folder), split)
    assert read_all(records) == expected(split)
    assert records.fields == {"__key__": "text", "json": "bytes", "seg.bin": "bytes", "txt": "bytes"}
    ids = [1, 0, 1]
    assert records.read(ids, ["txt"]) == [{"txt": expected(split)[number]["txt"]} for number in ids]


def test_train_is_opened_if_nothing_is_said(folder: Path) -> None:
    assert EnergonRecords.is_at(folder)
    assert not EnergonRecords.is_at(folder / "parts")
    records = EnergonRecords.open(place(folder))
    assert read_all(records) == expected("train")
    assert records.extent(5).path == folder / "parts/shard-001.tar"


def test_all_shards_without_splits(folder: Path) -> None:
    (folder / ".nv-meta" / "split.yaml").unlink()
    assert read_all(EnergonRecords.open(place(folder))) == expected("train") + expected("val")
    write_splits(folder, split_parts={"other": ["parts/shard-002.tar"]})
    assert read_all(EnergonRecords.open(place(folder))) == expected("train") + expected("val")


def test_older_folders_have_yaml_and_json_the_other_way_round(folder: Path) -> None:
    meta = folder / ".nv-meta"
    (meta / ".info.yaml").write_text(yaml.safe_dump(json.loads((meta / ".info.json").read_text())))
    (meta / "split.json").write_text(json.dumps(yaml.safe_load((meta / "split.yaml").read_text())))
    (meta / ".info.json").unlink()
    (meta / "split.yaml").unlink()
    assert EnergonRecords.is_at(folder)
    assert read_all(EnergonRecords.open(place(folder))) == expected("train")


def test_shards_come_in_the_order_of_the_split(folder: Path) -> None:
    write_splits(folder, split_parts={"train": ["parts/shard-{002,000}.tar"]})
    assert read_all(EnergonRecords.open(place(folder))) == expected("val") + expected("train")[:3]


def test_excluded_shards_and_records_are_left_out(folder: Path) -> None:
    whole = EnergonRecords.open(place(folder))
    excluded = ["parts/shard-000.tar", "parts/shard-001.tar/{0003,0005}", "parts/shard-002.tar/0006"]
    write_splits(folder, split_parts={"train": ["parts/shard-{000..001}.tar"]}, exclude=excluded)
    records = pickle.loads(pickle.dumps(EnergonRecords.open(place(folder))))
    assert read_all(records) == expected("train")[4:5]
    assert records.extent(0) == whole.extent(4)
    assert len({records.fingerprint, whole.fingerprint}) == 2
    with pytest.raises(UserError, match="allowed: 0 to 0"):
        records.read([1])
    excluded.append("parts/shard-001.tar/0004")
    write_splits(folder, split_parts={"train": ["parts/shard-{000..001}.tar"]}, exclude=excluded)
    assert "has no record that its split does not exclude" in refusal(folder)


def test_names_of_fields_stay_as_written(folder: Path) -> None:
    shard = folder / "parts" / "shard-002.tar"
    content = shard.read_bytes().replace(b"0006.txt\0", b"0006.TXT\0")
    fixed = bytearray(content)
    at = content.index(b"0006.TXT\0")
    header = content[at : at + 512]
    fixed[at + 148 : at + 156] = b"%06o\0 " % (sum(header[:148] + header[156:]) + 256)
    shard.write_bytes(fixed)
    assert "TXT" in open_split(place(folder), "val").read([0])[0]
    assert "txt" in WebDatasetRecords.open(place(shard)).read([0])[0]


def test_damage_is_found(folder: Path) -> None:
    records = EnergonRecords.open(place(folder))
    make_sums(folder, records.parts.files)
    records = EnergonRecords.open(place(folder))
    assert list(records.find_damage()) == []
    shard = folder / "parts" / "shard-001.tar"
    content = bytearray(shard.read_bytes())
    content[records.extent(4).offset] ^= 1
    shard.write_bytes(content)
    assert any(f"{shard} is damaged at byte 0" in each for each in records.find_damage())
    with pytest.raises(DamagedData):
        pickle.loads(pickle.dumps(records)).read([4])


def test_what_is_no_prepared_folder(tmp_path: Path, folder: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none")
    message = refusal(folder / "parts")
    assert "has no .nv-meta/.info.json" in message
    assert f"to do: energon prepare {folder / 'parts'}" in message


def test_a_split_that_is_not_there(folder: Path) -> None:
    message = refusal(folder, "test")
    assert 'has no split "test"' in message
    assert "allowed: train, val" in message
    write_splits(folder, split_parts={"train": []})
    assert 'has no shard in its split "train"' in refusal(folder)


def test_a_folder_that_was_changed_after_it_was_prepared(folder: Path) -> None:
    write_info(folder, {"parts/shard-001.tar": 4})
    message = refusal(folder)
    assert "has 3 records in parts/shard-001.tar, and 4 were there when it was prepared" in message
    assert "to do: run energon prepare on it again" in message
    write_splits(folder, split_parts={"train": ["parts/shard-{002..004}.tar"]})
    assert 'in its split "train" that were not prepared: parts/shard-003.tar, parts/shard-004.tar' in refusal(folder)


def test_a_missing_shard(folder: Path) -> None:
    (folder / "parts" / "shard-001.tar").unlink()
    assert "names a shard that cannot be read: parts/shard-001.tar: No such file or directory" in refusal(folder)


def test_a_truncated_shard(folder: Path) -> None:
    shard = folder / "parts" / "shard-001.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    assert "has 1 records in parts/shard-001.tar, and 3 were there" in refusal(folder)
    shard.write_bytes(b"")
    assert "shard-001.tar, byte 0: it is empty (0 bytes)" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (".info.json", b"", "has a file that cannot be read, .nv-meta/.info.json"),
        (".info.json", b"{", "has a file that cannot be read, .nv-meta/.info.json"),
        (".info.json", b"\xff", "has a file that cannot be read, .nv-meta/.info.json"),
        (".info.json", b"[]", "has no shards in .nv-meta/.info.json"),
        (".info.json", b'{"shard_counts": {}}', "has no shards in .nv-meta/.info.json"),
        (".info.json", b'{"shard_counts": {"a.tar": "3"}}', "has no shards in .nv-meta/.info.json"),
        ("split.yaml", b"a: [", "has a file that cannot be read, .nv-meta/split.yaml"),
        ("split.yaml", b"\xff\xfe\xff", "has a file that cannot be read, .nv-meta/split.yaml"),
        ("split.yaml", b"- a", "has no lists of shards in .nv-meta/split.yaml"),
        ("split.yaml", b"split_parts: {train: parts}", "has no lists of shards in .nv-meta/split.yaml"),
        ("split.yaml", b"split_parts: {train: [1]}", "has no lists of shards in .nv-meta/split.yaml"),
    ],
)
def test_a_damaged_file_of_the_preparation(name: str, content: bytes, said: str, folder: Path) -> None:
    (folder / ".nv-meta" / name).write_bytes(content)
    assert said in refusal(folder)


# --- metadatasets


def blend_of(path: Path, content: Any, split: str = "train") -> list[tuple[str, float, str]]:
    path.write_text(yaml.safe_dump(content))
    return read_metadataset(place(path), split)


def blend_refusal(path: Path, content: Any, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        blend_of(path, content, split)
    return str(caught.value)


def test_weights_are_those_that_energon_blends_with(folder: Path) -> None:
    path, own = folder / "blend.yaml", str(folder)
    assert read_metadataset(place(path), "train") == [
        (own, pytest.approx(0.75), "train"),
        (own, pytest.approx(0.05), "val"),
        (own, pytest.approx(0.2), "train"),
    ]
    assert read_metadataset(place(path), "val") == [(own, 1.0, "val")]
    # Energon: 6 records twice and 2 records half a time in an epoch.
    assert read_metadataset(place(path), "test") == [
        (own, pytest.approx(12 / 13), "train"),
        (own, pytest.approx(1 / 13), "val"),
    ]


def test_a_metadataset_of_one_data_set_is_opened_as_it(folder: Path) -> None:
    assert EnergonRecords.is_at(folder / "blend.yaml")
    assert read_all(open_split(place(folder / "blend.yaml"), "val")) == expected("val")
    message = refusal(folder / "blend.yaml")
    assert f"blends 3 data sets: {folder}, {folder}, {folder}" in message


def test_other_yaml_is_no_metadataset(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("splits: 3\n")
    assert not EnergonRecords.is_at(tmp_path / "a.yaml")
    assert not EnergonRecords.is_at(tmp_path / "none.yaml")


def test_paths_count_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.yaml").write_text(
        "splits: {val: {datasets: [{path: x}, {path: s3://bucket/y, weight: 3}]}}"
    )
    content = {"blend": [{"path": "inner/b.yaml", "split_part": "val", "weight": 2}, {"path": "/z", "weight": 2}]}
    found = blend_of(tmp_path / "a.yaml", {"__class__": "MetadatasetV2", "splits": {"train": content}})
    assert found == [(str(tmp_path / "inner/x"), 0.125, "val"), ("s3://bucket/y", 0.375, "val"), ("/z", 0.5, "train")]


@given(
    weights=st.lists(
        st.tuples(st.floats(0.01, 100), st.lists(st.floats(0.01, 100), min_size=1, max_size=4)), min_size=1
    )
)
def test_weights_multiply_and_sum_to_one(
    weights: list[tuple[float, list[float]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp()
    entries = []
    for number, (weight, inner) in enumerate(weights):
        datasets = [{"path": f"{number}-{each}", "weight": share} for each, share in enumerate(inner)]
        (base / f"{number}.yaml").write_text(yaml.safe_dump({"splits": {"train": {"datasets": datasets}}}))
        entries.append({"path": f"{number}.yaml", "weight": weight})
    found = blend_of(base / "all.yaml", {"__class__": "MetadatasetV2", "splits": {"train": {"blend": entries}}})
    whole = sum(weight for weight, _ in weights)
    shares = [weight / whole * share / sum(inner) for weight, inner in weights for share in inner]
    assert [weight for _, weight, _ in found] == pytest.approx(shares)
    assert math.fsum(weight for _, weight, _ in found) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "is no metadataset: a.yaml has no splits"),
        ({"splits": {"val": {"path": "x"}}}, 'has no split "train" in a.yaml\n      allowed: val'),
        ({"__class__": "Other", "splits": {"train": {"path": "x"}}}, 'is of the class "Other" (a.yaml)'),
        ({"splits": {"train": ["x"]}}, 'has an entry in its split "train" of a.yaml that is no mapping'),
        ({"splits": {"train": {"weight": 1}}}, 'has an entry in its split "train" of a.yaml without a path'),
        ({"splits": {"train": {"blend": []}}}, "has no data sets below blend in a.yaml"),
        ({"splits": {"train": {"blend": ["x"]}}}, "has no data sets below blend in a.yaml"),
        ({"splits": {"train": {"blend": [{"path": "x", "weight": -1}]}}}, "has weight = -1 in a.yaml"),
        ({"splits": {"train": {"blend": [{"path": "x", "weight": "3"}]}}}, "has weight = 3 in a.yaml"),
        ({"splits": {"train": {"blend": [{"path": "x", "weight": 0}]}}}, "has weights in a.yaml whose sum is 0"),
        ({"splits": {"train": {"join": [{"path": "x"}]}}}, 'joins data sets in its split "train" of a.yaml'),
        ({"splits": {"train": {"path": "x", "subset": {"range": ["0%", "5%"]}}}}, "takes a part of a data set in"),
        ({"splits": {"train": {"path": "x", "split_config": "s.yaml"}}}, "takes its splits from another file in"),
        ({"splits": {"train": {"path": "x", "aux": {"y": "z"}}}}, "names auxiliary data in"),
        ({"splits": {"train": {"path": "a.yaml"}}}, "is a metadataset that contains itself: "),
        ({"splits": {"train": {"path": "none.yaml"}}}, "cannot be read: none.yaml: No such file or directory"),
        ({"splits": {"train": {"blend_epochized": [{"path": "x"}]}}}, "whose number of records is not known"),
    ],
)
def test_what_a_metadataset_may_not_say(content: Any, said: str, tmp_path: Path) -> None:
    assert said in blend_refusal(tmp_path / "a.yaml", content)


def test_the_two_kinds_of_blends_do_not_mix(folder: Path) -> None:
    blend = {"blend": [{"path": "blend.yaml", "split_part": "test"}]}
    message = blend_refusal(folder / "a.yaml", {"splits": {"train": blend}})
    assert "mixes blend and blend_epochized in a.yaml" in message
    repeated = {"blend_epochized": [{"path": ".", "repetitions": 0}]}
    assert "has no data set with a weight over 0" in blend_refusal(folder / "a.yaml", {"splits": {"train": repeated}})
