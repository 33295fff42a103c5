"""Lines of JSON: each line is read right, also compressed, and each kind of damage is one clear message."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shardway.data.content import DataPath
from shardway.data.formats import compressed, indexes
from shardway.data.formats.base import DamagedData, FileParts, describe_file
from shardway.data.formats.compressed import CompressedFile, Expander
from shardway.data.formats.jsonl import JsonlRecords, find_lines
from shardway.errors import JobError, UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of one test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def open_at(path: Path | str) -> JsonlRecords:
    return JsonlRecords.open(DataPath("data.path", str(path)))


def refusal(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        open_at(path)
    return str(caught.value)


def damage(records: JsonlRecords, number: int) -> str:
    with pytest.raises(DamagedData) as caught:
        records.read([number])
    return str(caught.value).splitlines()[0]


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


ROWS: list[dict[str, Any]] = [{"text": f"row {i} é\n", "id": i, "more": {"a": [i, None, 0.5]}} for i in range(40)]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
TEXT = b"\n".join(LINES) + b"\n"


# --- plain files


def test_reads_what_json_wrote_in_any_order(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b"\n".join(LINES[:15]) + b"\n")
    write(tmp_path / "b.ndjson", b"")
    write(tmp_path / "c" / "c.jsonl", b"\n".join(LINES[15:]))
    records = open_at(tmp_path)
    assert len(records) == len(ROWS)
    assert records.read(range(len(ROWS))) == ROWS
    ids = [39, 0, 0, 15, 14, 16, 15, 0, 39, 38]
    assert records.read(ids) == [ROWS[i] for i in ids]
    assert records.read([3, 3], ["id", "none"]) == [{"id": 3}, {"id": 3}]
    assert records.read([]) == []
    assert records.fields == {"text": "text", "id": "int", "more": "object"}


def test_records_of_one_number_are_objects_of_their_own(tmp_path: Path) -> None:
    records = open_at(write(tmp_path / "a.jsonl", TEXT))
    first, second = records.read([5, 5])
    first["text"] = "changed"
    assert second == ROWS[5]


def test_blank_lines_a_missing_newline_and_carriage_returns(tmp_path: Path) -> None:
    records = open_at(write(tmp_path / "a.jsonl", b'\n  \n{"a":1}\r\n\r\n \t\n\n  {"a":2}\n\n{"a":3}'))
    assert records.read(range(3)) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [records.extent(i).offset for i in range(3)] == [4, 19, 30]
    assert records.extent(2).size == 7


def test_a_byte_order_mark_is_tolerated(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a":1}\n{"a":2}\n')
    write(tmp_path / "b.jsonl.gz", gzip.compress(b'\xef\xbb\xbf{"a":3}\n'))
    assert open_at(tmp_path).read([0, 1, 2]) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_types_are_those_of_the_first_records_that_have_a_value(tmp_path: Path) -> None:
    records = open_at(write(tmp_path / "a.jsonl", b'{"a":null,"b":true,"n":null}\n{"a":1.5,"c":[1]}\n'))
    assert records.fields == {"a": "float", "b": "bool", "n": "null", "c": "list"}


def test_json_files_of_a_folder_count_only_without_others(tmp_path: Path) -> None:
    write(tmp_path / "info.json", b'{"version": 1}')
    assert len(open_at(tmp_path)) == 1
    write(tmp_path / "data.jsonl", TEXT)
    assert len(open_at(tmp_path)) == len(ROWS)


def test_is_at(tmp_path: Path) -> None:
    write(tmp_path / "some" / "below" / "a.jsonl.zst", b"")
    write(tmp_path / "none" / "a.csv", b"")
    assert JsonlRecords.is_at(tmp_path / "some")
    assert JsonlRecords.is_at(tmp_path / "some" / "below" / "a.jsonl.zst")
    assert JsonlRecords.is_at(tmp_path / "some" / "below" / "*.jsonl.zst")
    assert not JsonlRecords.is_at(tmp_path / "none")
    assert not JsonlRecords.is_at(tmp_path / "absent")


def read_in_child(records: JsonlRecords, ids: list[int]) -> list[Any]:
    return records.read(ids)


def test_a_pickled_reader_reads_in_another_process(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", TEXT)
    write(tmp_path / "b.jsonl.gz", gzip.compress(TEXT))
    records = open_at(tmp_path)
    records.read([0, 50])
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(read_in_child, (records, [70, 1])) == [ROWS[30], ROWS[1]]


def test_pickling_keeps_no_open_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", TEXT)
    write(tmp_path / "b.jsonl.zst", zstandard.compress(TEXT))
    records = open_at(tmp_path)
    records.read([0, 79])
    again = pickle.loads(pickle.dumps(records))
    assert again.read([79, 0]) == [ROWS[39], ROWS[0]]
    assert again.fingerprint == records.fingerprint


def test_the_index_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", TEXT)
    open_at(tmp_path)

    def fail(*_: object) -> Iterator[bytes]:
        raise AssertionError("the file is read again")

    monkeypatch.setattr("shardway.data.formats.jsonl._blocks", fail)
    assert len(open_at(tmp_path)) == len(ROWS)


@given(st.binary(max_size=60), st.integers(1, 20))
def test_lines_are_those_of_the_whole_text_however_it_is_cut(text: bytes, size: int) -> None:
    text = text.replace(b"\x01", b"\n").replace(b"\x02", b" ").removeprefix(b"\xef\xbb\xbf")
    starts, at = [], 0
    for line in text.split(b"\n"):
        if line.strip(b" \t\r\n\v\f"):
            starts.append(at)
        at += len(line) + 1
    blocks = [text[first : first + size] for first in range(0, len(text), size)]
    assert find_lines(blocks).tolist() == starts


# --- damage


def test_a_torn_last_line_is_damage_with_file_line_and_byte(tmp_path: Path) -> None:
    records = open_at(write(tmp_path / "a.jsonl", b'{"a":1}\n\n{"a":"torn'))
    assert records.read([0]) == [{"a": 1}]
    found = damage(records, 1)
    assert f"{tmp_path / 'a.jsonl'} is damaged at byte 14: line 3: it is not JSON" in found
    assert "may be cut off" in found
    assert [line.partition(": ")[0] for line in records.find_damage()] == ["record 1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[1]", "byte 9: line 3: it is a list, and a record is an object"),
        (b"3.5", "byte 9: line 3: it is a number, and a record is an object"),
        (b"null", "byte 9: line 3: it is null, and a record is an object"),
        (b'"x"', "byte 9: line 3: it is a string, and a record is an object"),
        (b'{"a":"\xff"}', "byte 15: line 3: it is not UTF-8 (byte 0xff"),
        (b'{"\xc3\xa9":}', "byte 15: line 3: it is not JSON (Expecting value)"),
        (b'{"a":1}{"a":2}', "byte 16: line 3: it is not JSON (Extra data)"),
        (b"\0\0\0\0", "byte 9: line 3: it is not JSON"),
        (b"[" * 100_000, "byte 9: line 3: it is not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "byte 9: line 3: it is not JSON"),
    ],
)
def test_a_line_that_is_no_object(tmp_path: Path, line: bytes, said: str) -> None:
    records = open_at(write(tmp_path / "a.jsonl", b'{"a":1}\n\n' + line + b'\n{"a":4}\n'))
    assert said in damage(records, 1)
    assert records.read([0, 2]) == [{"a": 1}, {"a": 4}]


def test_what_to_do_about_a_line_that_is_no_json(tmp_path: Path) -> None:
    records = open_at(write(tmp_path / "a.jsonl", b'{"a":1}\n\n{"a":"open\n{"a":4}\n'))
    with pytest.raises(DamagedData) as caught:
        records.read([1])
    said = str(caught.value).splitlines()[1]
    assert said == "  To do: correct line 3, or remove it, or copy the file again from where it came."


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    records = open_at(write(tmp_path / "a.jsonl", TEXT))
    write(tmp_path / "a.jsonl", TEXT[:100])
    assert "the file ends after" in damage(records, 39)


def test_checksums_find_a_flipped_bit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXT)
    indexes.make_sums(tmp_path, [describe_file(tmp_path, "a.jsonl")])
    write(path, TEXT.replace(b"row 7", b"row 8"))
    assert "checksum" in damage(open_at(tmp_path), 7)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'[{"a":1},\n{"a":2}]', "one list and not one object a line: a.json"),
        ("a.jsonl", b'\n  [{"a":1}]\n', "jq -c '.[]' a.jsonl > a.ndjson"),
        ("a.json", b'{\n  "a": 1\n}\n', "goes over several lines: a.json"),
        ("a.jsonl", '{"a":1}\n'.encode("utf-16"), "UTF-16"),
        ("a.jsonl", b"", "holds no records"),
        ("a.jsonl", b"\n \n", "holds no records"),
        ("a.json.gz", gzip.compress(b"[1]"), "one list and not one object a line"),
    ],
)
def test_refused_at_opening(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    write(tmp_path / name, content)
    assert said in refusal(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.jsonl")
    write(tmp_path / "x.txt", b"")
    assert "has no lines of JSON" in refusal(tmp_path)
    for number in (0, 2):
        write(tmp_path / f"part-{number:05}-of-00003.jsonl", TEXT)
    assert "lacks 1 of 3 files: part-00001-of-00003.jsonl" in refusal(tmp_path)
    assert "lacks 1 of 3 files" in refusal(tmp_path / "part-*.jsonl")
    assert len(open_at(tmp_path / "part-*-of-00003.jsonl")) == 80
    pattern = tmp_path / "part-{00000..00002}-of-00003.jsonl"
    assert "names files that are missing: part-00001-of-00003.jsonl" in refusal(pattern)


def test_a_folder_with_several_splits_is_refused(tmp_path: Path) -> None:
    for name in ("gsm-train.jsonl", "gsm-test.jsonl", "readme.jsonl"):
        write(tmp_path / name, TEXT)
    found = refusal(tmp_path)
    assert "more than one split: train (1 file, such as gsm-train.jsonl), test (1 file" in found
    assert f'"{tmp_path}/gsm-train.jsonl"' in found
    assert len(open_at(tmp_path / "gsm-*.jsonl")) == 80


def test_a_number_that_no_record_has(tmp_path: Path) -> None:
    records = open_at(write(tmp_path / "a.jsonl", TEXT))
    with pytest.raises(UserError, match="no record 40"):
        records.read([0, 40])
    with pytest.raises(UserError, match="no record -1"):
        records.read([-1])


# --- compressed files


def zstd(text: bytes) -> bytes:
    return zstandard.compress(text)


def zstd_stream(text: bytes) -> bytes:
    """As zstd(1) writes what it reads from a pipe: the frame does not state its size."""
    stream = io.BytesIO()
    with zstandard.ZstdCompressor(write_checksum=True).stream_writer(stream, closefd=False) as writer:
        writer.write(text)
    return stream.getvalue()


@pytest.mark.parametrize(("end", "squeeze"), [("gz", gzip.compress), ("zst", zstd), ("zst", zstd_stream)])
def test_compressed_files_read_as_plain_ones(tmp_path: Path, end: str, squeeze: Any) -> None:
    write(tmp_path / f"a.jsonl.{end}", squeeze(TEXT))
    write(tmp_path / f"b.jsonl.{end}", b"".join(squeeze(line + b"\n") for line in LINES))
    records = open_at(tmp_path)
    assert records.read(range(80)) == ROWS + ROWS
    ids = np.random.default_rng(0).integers(0, 80, 200).tolist()
    for first in range(0, 200, 7):
        assert records.read(ids[first : first + 7]) == [ROWS[i % 40] for i in ids[first : first + 7]]
    assert records.extent(79).path == tmp_path / f"b.jsonl.{end}"
    assert list(records.find_damage()) == []


def test_frames_that_are_skipped_and_padding(tmp_path: Path) -> None:
    skipped = bytes.fromhex("5e2a4d1804000000") + b"abcd"
    write(tmp_path / "a.jsonl.zst", skipped + zstd(TEXT) + skipped)
    write(tmp_path / "b.jsonl.gz", gzip.compress(TEXT) + bytes(300_000))
    assert open_at(tmp_path).read([0, 79]) == [ROWS[0], ROWS[39]]


@pytest.mark.parametrize(("end", "squeeze"), [("gz", gzip.compress), ("zst", zstd)])
def test_truncated_or_damaged_compressed_files(tmp_path: Path, end: str, squeeze: Any) -> None:
    whole, path = squeeze(TEXT), tmp_path / f"a.jsonl.{end}"
    for kept in (0, 3, 20, len(whole) - 1):
        write(path, whole[:kept])
        assert f"{path} is damaged at byte {kept}: the file is cut off there" in refusal(path)
    write(path, whole + b"garbage, garbage, garbage")
    assert f"damaged at byte {len(whole)}: the" in refusal(path)
    write(path, TEXT)
    assert "damaged at byte 0: the" in refusal(path)


def test_a_line_of_a_compressed_file_that_is_no_object(tmp_path: Path) -> None:
    records = open_at(write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"a":1}\n\n[1]\n')))
    assert "damaged at byte 9: line 3 (bytes are those of the expanded file): it is a list" in damage(records, 1)


def test_reading_in_order_writes_no_copy_and_jumping_about_writes_one(tmp_path: Path, own_cache: Path) -> None:
    text = b"".join(b'{"id":%d,"x":"%s"}\n' % (i, b"abcdefgh" * 400) for i in range(2000))  # entries are too far apart
    records = open_at(write(tmp_path / "a.jsonl.gz", gzip.compress(text, 1)))
    copies = own_cache / "shardway" / "expanded"
    for first in range(0, 2000, 100):
        assert [record["id"] for record in records.read(range(first, first + 100))] == list(range(first, first + 100))
    assert not copies.exists()
    for i in (1999, 3, 1500, 2, 1000, 1):
        assert records.read([i], ["id"]) == [{"id": i}]
    (copy,) = copies.iterdir()
    assert copy.read_bytes() == text
    again = open_at(tmp_path)
    assert [again.read([i], ["id"])[0]["id"] for i in (1999, 1, 1998, 0)] == [1999, 1, 1998, 0]
    assert list(copies.iterdir()) == [copy]


def test_no_room_for_a_copy_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"".join(b'{"id":%d,"x":"%s"}\n' % (i, b"abcdefgh" * 400) for i in range(2000))
    records = open_at(write(tmp_path / "a.jsonl.gz", gzip.compress(text, 1)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "a-file", b"")))
    with pytest.raises(JobError, match=r"a\.jsonl\.gz is one compressed piece .*\n  To do: expand the file"):
        for i in (1999, 3, 1998, 2, 1997, 1):
            records.read([i])


def test_many_members_are_entered_without_a_copy(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "_ENTRY_BYTES", 1)
    path = write(tmp_path / "a.jsonl.gz", b"".join(gzip.compress(line + b"\n") for line in LINES))
    records = open_at(path)
    for i in np.random.default_rng(0).integers(0, 40, 100).tolist():
        assert records.read([i]) == [ROWS[i]]
    assert records.extent(2).offset == sum(len(gzip.compress(line + b"\n")) for line in LINES[:2])
    assert not (own_cache / "shardway" / "expanded").exists()


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=6), st.data())
def test_any_part_of_a_compressed_file(tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], data: Any) -> None:
    folder = tmp_path_factory.mktemp("parts")
    squeeze, name = data.draw(st.sampled_from([(gzip.compress, "a.gz"), (zstd, "a.zst")]))
    write(folder / name, b"".join(squeeze(text) for text in texts))
    parts, whole = FileParts(folder, [describe_file(folder, name)]), b"".join(texts)
    expander = Expander(parts, 0)
    assert b"".join(expander) == whole
    file = CompressedFile(parts, 0, np.array(expander.entries, np.int64), expander.expanded)
    for _ in range(4):
        start = data.draw(st.integers(0, len(whole) - 1))
        end = data.draw(st.integers(start, len(whole)))
        assert file.read(start, end - start) == whole[start:end]
