"""MDS: what MosaicML Streaming wrote is read as it reads it; each kind of damage is one message."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardway.data.content import DataPath
from shardway.data.formats import mds
from shardway.data.formats.base import DamagedData
from shardway.data.formats.indexes import make_sums
from shardway.data.formats.mds import MdsRecords
from shardway.data.formats.mds_columns import MdsColumn, make_layout
from shardway.errors import JobError, UserError
from shardway.places import find_own_folder

RECORDED = Path(__file__).parents[2] / "recorded/data/mds"
IMAGES = {"jpg", "png", "jpgs", "pngs", "jpeg_array"}


def open_mds(path: Path) -> MdsRecords:
    return MdsRecords.open(DataPath("data.path", str(path)))


def copy(name: str, to: Path) -> Path:
    return Path(shutil.copytree(RECORDED / name, to / name))


def change_index(folder: Path, change: Any) -> None:
    """Write index.json again after a function has changed what is in it."""
    index = json.loads((folder / "index.json").read_text())
    index = change(index) or index
    (folder / "index.json").write_text(json.dumps(index))


def write_shards(folder: Path, shards: list[list[bytes]], columns: dict[str, tuple[str, int | None]]) -> Path:
    """MDS of encoded samples, without hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, samples in enumerate(shards):
        config = b'{"format": "mds"}'
        first = 4 + 4 * (len(samples) + 1) + len(config)
        offsets = np.cumsum([first, *map(len, samples)]).astype("<u4")
        content = struct.pack("<I", len(samples)) + offsets.tobytes() + config + b"".join(samples)
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(content)
        listed.append(
            {
                "column_names": list(columns),
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_sizes": [size for _, size in columns.values()],
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "zip_data": None,
                "samples": len(samples),
                "size_limit": 2**26,
                "version": 2,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return folder


def write_texts(folder: Path, shards: list[list[str]]) -> Path:
    encoded = [[struct.pack("<I", len(text.encode())) + text.encode() for text in texts] for texts in shards]
    return write_shards(folder, encoded, {"text": ("str", None)})


def check_image(found: bytes, expected: Any) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(found))).astype(int)
    assert np.abs(pixels - np.array(expected["array"])).max() <= 2


def check_value(name: str, found: Any, expected: Any) -> None:
    """A value as the other reader gave it."""
    if isinstance(expected, list) and name in {*IMAGES, "pils"}:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_value(name, one, other)
    elif name in IMAGES:
        check_image(found, expected)
    elif isinstance(expected, dict) and "array" in expected:
        np.testing.assert_array_equal(found, np.array(expected["array"]))
        assert found.dtype.name == expected.get("dtype", "uint8")
        assert found.flags.writeable
    elif isinstance(expected, dict) and "bytes" in expected:
        assert found == bytes.fromhex(expected["bytes"])
    else:
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize("name", ["all", "plain"])
def test_is_read_as_streaming_reads_it(name: str) -> None:
    records, expected = open_mds(RECORDED / name), json.loads((RECORDED / f"{name}.json").read_text())
    assert len(records) == len(expected)
    for found, other in zip(records.read(range(len(records))), expected, strict=True):
        assert found.keys() == other.keys()
        for key in other:
            check_value(key, found[key], other[key])
    assert list(records.find_damage()) == []


def test_fields_name_types() -> None:
    fields = open_mds(RECORDED / "all").fields
    assert fields["blob"] == fields["jpg"] == "bytes"
    assert fields["text"] == fields["exact"] == "text"
    assert (fields["label"], fields["f16"], fields["digits"], fields["real"]) == ("int", "float", "int", "float")
    assert (fields["any"], fields["typed"], fields["fixed"]) == ("array", "float32[...]", "int32[2, 3]")
    assert (fields["jpgs"], fields["meta"]) == ("list", "json")


def test_order_duplicates_fields_and_pickling() -> None:
    records = open_mds(RECORDED / "plain")
    ids = [11, 0, 5, 5, 3, 11, 1]
    again = pickle.loads(pickle.dumps(records))
    whole = records.read(range(12))
    assert again.read(np.array(ids)) == [whole[number] for number in ids]
    assert records.read([4, 2], ["label", "other"]) == [{"label": 4}, {"label": 2}]
    assert records.read([]) == []
    with pytest.raises(UserError, match="no record 12"):
        records.read([12])
    with pytest.raises(UserError, match="no record -1"):
        records.read([-1])


def test_extent_holds_the_sample() -> None:
    records = open_mds(RECORDED / "plain")
    for number in (0, 7, 11):
        extent = records.extent(number)
        content = extent.path.read_bytes()[extent.offset : extent.offset + extent.size]
        assert content.endswith(records.read([number])[0]["image"] + struct.pack("<q", number))


def test_is_at() -> None:
    assert MdsRecords.is_at(RECORDED / "plain")
    assert MdsRecords.is_at(RECORDED / "plain/index.json")
    assert not MdsRecords.is_at(RECORDED)
    assert not MdsRecords.is_at(RECORDED / "plain.json")


def test_long_runs_and_far_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[f"{number}-" + "x" * (number * 37 % 900) for number in range(first, first + 40)] for first in (0, 40)]
    records = open_mds(write_texts(tmp_path, [texts[0], [], texts[1]]))
    monkeypatch.setattr(mds, "READ_RUN_BYTES", 2000)
    monkeypatch.setattr(mds, "READ_GAP_BYTES", 100)
    expected = [{"text": text} for text in texts[0] + texts[1]]
    assert records.read(range(80)) == expected
    assert records.read(range(79, -1, -3)) == expected[::-3]
    monkeypatch.setattr(mds, "TABLE_BYTES", 0)
    assert open_mds(tmp_path).read(range(80)) == expected


@given(st.data())
def test_any_texts_in_any_shards(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shards = data.draw(st.lists(st.lists(st.text(max_size=9), max_size=4), min_size=1, max_size=4))
    texts = [text for shard in shards for text in shard]
    folder = write_texts(tmp_path_factory.mktemp("mds"), shards)
    if not texts:
        with pytest.raises(UserError, match="has no samples"):
            open_mds(folder)
        return
    ids = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=8))
    assert [record["text"] for record in open_mds(folder).read(ids)] == [texts[number] for number in ids]


# --- compressed shards


def cached() -> list[Path]:
    folder = find_own_folder("CACHE")
    assert folder is not None
    return sorted((folder / "mds").glob("*"))


def test_compressed_shards_are_unpacked_once_in_the_cache() -> None:
    records = open_mds(RECORDED / "all")
    assert cached() == []
    whole = records.read([0], ["label", "text"])
    assert len(cached()) == 1
    when = cached()[0].stat().st_mtime_ns
    assert open_mds(RECORDED / "all").read([0], ["label", "text"]) == whole
    assert pickle.loads(pickle.dumps(records)).read([0], ["label", "text"]) == whole
    assert [path.stat().st_mtime_ns for path in cached()] == [when]
    assert records.extent(0).path == cached()[0]
    cached()[0].write_bytes(b"short")
    assert open_mds(RECORDED / "all").read([0], ["label", "text"]) == whole


@pytest.mark.parametrize(("family", "pack"), [("gz:6", gzip.compress), ("bz2", bz2.compress)])
def test_gz_and_bz2(tmp_path: Path, family: str, pack: Any) -> None:
    folder = copy("plain", tmp_path)
    whole, print_ = open_mds(folder).read(range(12)), open_mds(folder).fingerprint
    compress_shards(folder, family, pack)
    records = open_mds(folder)
    assert records.read(range(12)) == whole
    assert records.fingerprint == print_
    packed = folder / f"shard.00001.mds.{family[:2]}"
    packed.write_bytes(packed.read_bytes()[:-20] + b"\xff" * 20)
    with pytest.raises(DamagedData, match=r"shard\.00001.*cannot be decompressed"):
        open_mds(folder_again(folder, tmp_path)).read([6])


def compress_shards(folder: Path, family: str, pack: Any) -> None:
    def change(index: Any) -> None:
        for shard in index["shards"]:
            raw = folder / shard["raw_data"]["basename"]
            name, content = f"{raw.name}.{family[:2]}", pack(raw.read_bytes())
            (folder / name).write_bytes(content)
            raw.unlink()
            shard["compression"], shard["zip_data"] = family, {"basename": name, "bytes": len(content), "hashes": {}}

    change_index(folder, change)


def folder_again(folder: Path, below: Path) -> Path:
    """The same files elsewhere, so that nothing is in the cache."""
    return Path(shutil.copytree(folder, below / "again"))


def test_raw_shard_beside_is_preferred(tmp_path: Path) -> None:
    folder = copy("plain", tmp_path)
    raw = {path.name: path.read_bytes() for path in folder.glob("*.mds")}
    whole = open_mds(folder).read(range(12))
    compress_shards(folder, "br", lambda content: b"brotli" + content)
    with pytest.raises(UserError, match=r'compressed with "br"(.|\n)*allowed: zstd, gz, bz2\n.*decompress each beside'):
        open_mds(folder)
    for name, content in raw.items():
        (folder / name).write_bytes(content)
    assert open_mds(folder).read(range(12)) == whole
    assert cached() == []


def test_packed_shard_that_is_another(tmp_path: Path) -> None:
    folder = copy("plain", tmp_path)
    compress_shards(folder, "gz", lambda content: gzip.compress(content[:-1] + b"?"))
    with pytest.raises(DamagedData, match="has another md5 than"):
        open_mds(folder).read([0])
    assert cached() == []
    change_index(folder, lambda index: index["shards"][1]["raw_data"].update(bytes=500))
    with pytest.raises(DamagedData, match=r"shard.00001.*decompresses to more bytes, and index.json says 500"):
        open_mds(folder).read([6])
    change_index(folder, lambda index: index["shards"][1]["raw_data"].update(bytes=900))
    with pytest.raises(DamagedData, match=r"shard.00001.*decompresses to 581 bytes, and index.json says 900"):
        open_mds(folder).read([6])


def test_truncated_zstd(tmp_path: Path) -> None:
    folder = copy("all", tmp_path)
    packed = folder / "shard.00000.mds.zstd"
    packed.write_bytes(packed.read_bytes()[:700])
    change_index(folder, lambda index: index["shards"][0]["zip_data"].update(bytes=700))
    with pytest.raises(DamagedData, match=r"shard\.00000\.mds\.zstd is damaged at byte"):
        open_mds(folder).read([0])


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(JobError, match=r"cannot be written: Not a directory\n  To do: decompress them beside"):
        open_mds(RECORDED / "all").read([0])


# --- what is wrong


def test_index_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no index.json that can be read: No such file"):
        open_mds(tmp_path / "nothing")
    copy("plain", tmp_path)
    with pytest.raises(UserError, match=r"has no index.json(.|\n)*to do: name one of its folders: plain"):
        open_mds(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "index.json is not JSON: Expecting value: line 1 column 1"),
        (b'{"version": 2, "shards": [', "index.json is not JSON"),
        (b"\xff\xfe", "index.json is not UTF-8 at byte 0"),
        (b"[" * 100_000, "index.json is nested too deeply"),
        (b"[]", "index.json is not a mapping"),
        (b'{"shards": []}', 'index.json lacks "version"'),
        (b'{"version": 3, "shards": []}', r"is MDS of version 3(.|\n)*allowed: version 2"),
        (b'{"version": 2, "shards": []}', "has no samples: index.json lists 0 shards"),
        (b'{"version": 2, "shards": {}}', "index.json has '{}' as \"shards\""),
        (b'{"version": 2, "shards": [7]}', "shard 0 of index.json is not a mapping"),
    ],
)
def test_damaged_index(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_mds(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "csv"}, 'is of format "csv", version 2'),
        ({"version": 1}, 'is of format "mds", version 1'),
        ({"samples": -1}, "has '-1' as \"samples\""),
        ({"samples": 10**15}, "has 1000000000000000 samples in 581 bytes"),
        ({"samples": "4"}, "has '4' as \"samples\""),
        ({"raw_data": None}, "has 'None' as \"raw_data\""),
        ({"raw_data": {"basename": "../x", "bytes": 4}}, r'"\.\./x", which is not in the folder'),
        ({"raw_data": {"basename": "x", "bytes": 4, "hashes": {"md5": 3}}}, "hashes that are not text"),
        ({"raw_data": {"basename": "x", "bytes": 99}}, "lacks 1 of the 3 shards that index.json lists: x"),
        ({"column_sizes": [8]}, "a name, an encoding and a size for each column"),
        ({"column_sizes": [None, "8"]}, "sizes of columns"),
        ({"column_sizes": [None, 4]}, r'column "label" \(int\) has 4 bytes(.|\n)*allowed: 8 bytes'),
    ],
)
def test_damaged_shard_in_the_index(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = copy("plain", tmp_path)
    change_index(folder, lambda index: index["shards"][1].update(changes))
    with pytest.raises(UserError, match=message):
        open_mds(folder)


def test_missing_empty_and_truncated_shards(tmp_path: Path) -> None:
    folder = copy("plain", tmp_path)
    shard = folder / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"shard\.00001\.mds has 580 bytes, and index\.json says 581"):
        open_mds(folder)
    shard.write_bytes(b"")
    with pytest.raises(UserError, match=r"shard\.00001\.mds has 0 bytes"):
        open_mds(folder)
    shard.unlink()
    with pytest.raises(UserError, match=r"lacks 1 of the 3 shards .*: shard\.00001\.mds"):
        open_mds(folder)


def test_shard_that_shrinks_later(tmp_path: Path) -> None:
    folder = copy("plain", tmp_path)
    records = open_mds(folder)
    shard = folder / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:300])
    with pytest.raises(DamagedData, match=r"shard\.00001\.mds.*the file ends after"):
        records.read([6])
    assert any("300 bytes, and 581 were expected" in found for found in records.find_damage())


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, 3, "at byte 0: it says that it has 3 samples, and index.json says 4"),
        (8, 9_000, "at byte 12: sample 1 ends at 263, before it begins"),
        (4, 8, "at byte 4: the first sample begins at 8"),
        (20, 570, "at byte 20: the last sample ends at 570, and the file has 581"),
    ],
)
def test_damaged_offsets(tmp_path: Path, offset: int, value: int, message: str) -> None:
    folder = copy("plain", tmp_path)
    shard = folder / "shard.00001.mds"
    content = bytearray(shard.read_bytes())
    first = json.loads((folder / "index.json").read_text())["shards"][0]["samples"]
    content[offset : offset + 4] = struct.pack("<I", value)
    shard.write_bytes(content)
    with pytest.raises(DamagedData, match=message.replace("263", r"\d+")):
        open_mds(folder).read([first])
    assert any(found.startswith(f"record {first}: {shard}") for found in open_mds(folder).find_damage())


def test_offsets_that_are_read_for_each_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mds, "TABLE_BYTES", 0)
    folder = write_texts(tmp_path, [["a", "b", "c"]])
    shard = folder / "shard.00000.mds"
    content = bytearray(shard.read_bytes())
    content[8:12] = struct.pack("<I", 9_000)
    shard.write_bytes(content)
    assert open_mds(folder).read([2]) == [{"text": "c"}]
    with pytest.raises(DamagedData, match="sample 0 goes from byte 37 to 9000 of"):
        open_mds(folder).read([0])


@pytest.mark.parametrize(
    ("column", "content", "message"),
    [
        (("str", None), b"\1\0\0\0\xff", "'utf-8' codec"),
        (("str", None), b"\1\0", "fewer than the lengths"),
        (("str", None), b"\2\0\0\0x", "1 bytes beyond its end"),
        (("str", None), b"\1\0\0\0xx", "1 bytes follow"),
        (("int", 8), b"1234567", "1 bytes beyond its end"),
        (("json", None), b"\1\0\0\0{", "Expecting property name"),
        (("str_int", None), b"\1\0\0\0x", "invalid literal"),
        (("ndarray:int32", None), b"\5\0\0\0\x08\2\3ab", "an array of int32 has 2 bytes"),
        (("ndarray:int32", None), b"\1\0\0\0\x08", "2 axes and no bytes"),
        (("ndarray", None), b"\1\0\0\0\x07", "sample 0 of the shard cannot be read: 7"),
        (("ndarray", None), b"\0\0\0\0", "sample 0 of the shard cannot be read"),
        (("ndarray:uint8:2,2", 4), b"1234", ""),
        (("pil", None), struct.pack("<4I", 15, 1, 1, 3) + b"XYZ", "the mode 'XYZ'"),
        (("pil", None), struct.pack("<4I", 14, 1, 1, 1) + b"L?", ""),
        (("pil", None), struct.pack("<4I", 14, 3, 1, 1) + b"1\xa0", ""),
        (("list[png]", None), struct.pack("<3I", 8, 0, 9), "9 elements"),
        (("list[png]", None), struct.pack("<4I", 12, 0, 1, 9), "an element of a list goes beyond"),
    ],
)
def test_damaged_samples(tmp_path: Path, column: tuple[str, int | None], content: bytes, message: str) -> None:
    records = open_mds(write_shards(tmp_path, [[content]], {"x": column}))
    if not message:
        assert records.read([0])[0]["x"].size in (1, 3, 4)
        return
    with pytest.raises(DamagedData, match=message):
        records.read([0])
    assert [found for found in records.find_damage() if found.startswith("record 0: ")]


def test_image_of_bits_is_a_mask(tmp_path: Path) -> None:
    content = struct.pack("<4I", 15, 3, 2, 1) + b"1\xa0\x40"
    (record,) = open_mds(write_shards(tmp_path, [[content]], {"x": ("pil", None)})).read([0])
    assert record["x"].tolist() == [[True, False, True], [False, True, False]]


def test_hashes_are_compared(tmp_path: Path) -> None:
    folder = copy("plain", tmp_path)
    shard = folder / "shard.00002.mds"
    content = bytearray(shard.read_bytes())
    content[-30] ^= 1
    shard.write_bytes(content)
    found = list(open_mds(folder).find_damage())
    assert len(found) == 4
    assert all(str(shard) in sentence for sentence in found)
    assert f"that of the file is {hashlib.sha1(content).hexdigest()}" in "".join(found)
    change_index(
        folder, lambda index: [shard["raw_data"].update(hashes={"new": "0"}) for shard in index["shards"]] and None
    )
    assert list(open_mds(folder).find_damage()) == [
        f"{folder}/index.json: 3 shards have a hash new, which is not known here"
    ]


def test_hashes_of_a_compressed_shard(tmp_path: Path) -> None:
    folder = copy("all", tmp_path)
    change_index(folder, lambda index: index["shards"][3]["zip_data"]["hashes"].update(md5="0" * 32))
    assert ["shard.00003.mds.zstd" in found for found in open_mds(folder).find_damage()] == [True]


def test_sums_are_compared_when_reading(tmp_path: Path) -> None:
    folder = copy("plain", tmp_path)
    make_sums(folder, open_mds(folder).parts.files)
    assert len(open_mds(folder).read(range(12))) == 12
    shard = folder / "shard.00000.mds"
    content = bytearray(shard.read_bytes())
    content[-30] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedData, match="checksum"):
        open_mds(folder).read([0])


def test_pickled_and_unknown_columns_are_passed_over(tmp_path: Path) -> None:
    sample = struct.pack("<3I", 3, 2, 1) + b"abc" + b"de" + b"f"
    columns: dict[str, tuple[str, int | None]] = {"p": ("pkl", None), "t": ("str", None), "u": ("mine", None)}
    records = open_mds(write_shards(tmp_path / "some", [[sample]], columns))
    assert records.fields == {"p": "pickle", "t": "text", "u": "unknown"}
    assert records.read([0]) == records.read([0], ["t"]) == [{"t": "de"}]
    with pytest.raises(
        UserError, match=r'pickled column "p"(.|\n)*to do: name other columns, or write it again as json'
    ):
        records.read([0], ["t", "p"])
    with pytest.raises(UserError, match='unknown encoding "mine"'):
        records.read([0], ["u"])
    folder = write_shards(tmp_path / "only", [[struct.pack("<I", 1) + b"x"]], {"p": ("pkl", None)})
    with pytest.raises(UserError, match="executes nothing that a file holds"):
        open_mds(folder)


@given(st.binary(max_size=40), st.sampled_from(["ndarray", "list[pil]", "json", "str_float", "ndarray:int16:3", "int"]))
def test_random_bytes_never_give_another_error(content: bytes, encoding: str) -> None:
    layout = make_layout((MdsColumn("x", encoding, 0),))
    try:
        layout.decode(struct.pack("<I", len(content)) + content, 0, 4 + len(content), None)
    except (ValueError, KeyError, IndexError, TypeError, struct.error, RecursionError) as error:
        assert str(error)
