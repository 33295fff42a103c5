"""WebDataset: shards are read as the webdataset library and tarfile read them; each kind of damage is one message."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import tarfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_iterator

from shardway.data.content import DataPath
from shardway.data.formats import webdataset as ours
from shardway.data.formats.base import DamagedData
from shardway.data.formats.indexes import make_sums
from shardway.data.formats.tar_headers import BadTar, list_members
from shardway.data.formats.webdataset import WebDatasetRecords, index_shard, index_shards
from shardway.errors import JobError, UserError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
BLOCK = 512


def open_shards(path: Path | str) -> WebDatasetRecords:
    return WebDatasetRecords.open(DataPath("data.path", str(path)))


def refusal(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        open_shards(path)
    assert str(caught.value).startswith("1 problem in the data\n  data.path: ")
    return str(caught.value)


def write_tar(path: Path, members: list[tuple[str, bytes]], kind: str = "ustar", end: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=FORMATS[kind]) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        whole = tar.offset
    path.write_bytes(stream.getvalue() if end else stream.getvalue()[:whole])
    return path


def write_shards(folder: Path, shards: int = 3, records: int = 5) -> list[dict[str, Any]]:
    """Shards that the webdataset library writes, and their records."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"s-{shard:03}.tar")) as writer:
            for number in range(records):
                record = {
                    "__key__": f"{shard:02}/{number:04}",
                    "cls": f"{number}".encode(),
                    "jpg": os.urandom(number * 400),
                }
                writer.write(record)
                written.append(record)
    return written


def read_by_library(paths: list[Path]) -> list[dict[str, Any]]:
    """What the webdataset library makes of shards (its WebDataset class leaves them open)."""
    found = []
    for path in paths:
        with path.open("rb") as file:
            members = ({**member, "__url__": ""} for member in tar_file_iterator(file))
            found += list(group_by_keys(members))
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in found]


def read_all(records: WebDatasetRecords) -> list[dict[str, Any]]:
    return records.read(range(len(records)))


# --- reading


def test_records_are_those_that_the_library_writes_and_reads(tmp_path: Path) -> None:
    written = write_shards(tmp_path)
    records = open_shards(tmp_path)
    assert len(records) == 15
    assert read_all(records) == written == read_by_library(sorted(tmp_path.glob("*.tar")))
    assert records.fields == {"__key__": "text", "cls": "bytes", "jpg": "bytes"}
    assert records.shard_lengths == [5, 5, 5]


def test_order_of_ids_is_kept_and_an_id_may_come_twice(tmp_path: Path) -> None:
    written = write_shards(tmp_path)
    records, ids = open_shards(tmp_path), [14, 0, 3, 3, 14, 7, 2]
    assert records.read(ids) == [written[number] for number in ids]
    assert records.read(np.array(ids)) == records.read(ids)  # type: ignore[arg-type]
    assert records.read([]) == []


@given(ids=st.lists(st.integers(0, 14)), fields=st.sets(st.sampled_from(["__key__", "cls", "jpg", "none"])))
def test_any_ids_and_fields(ids: list[int], fields: set[str], shards: tuple[WebDatasetRecords, Any]) -> None:
    records, written = shards
    wanted = fields or set(written[0])
    expected = [{name: value for name, value in written[number].items() if name in wanted} for number in ids]
    assert records.read(ids, sorted(fields)) == expected


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[WebDatasetRecords, Any]:
    folder = tmp_path_factory.mktemp("shards")
    written = write_shards(folder)
    return open_shards(folder), written


def test_key_alone_needs_no_shard(tmp_path: Path) -> None:
    written = write_shards(tmp_path, shards=1)
    records = open_shards(tmp_path)
    (tmp_path / "s-000.tar").unlink()
    assert records.read([4, 1], ["__key__"]) == [{"__key__": written[4]["__key__"]}, {"__key__": written[1]["__key__"]}]


@pytest.mark.parametrize("number", [-1, 15])
def test_a_number_that_no_record_has_is_refused(number: int, shards: tuple[WebDatasetRecords, Any]) -> None:
    with pytest.raises(UserError, match="allowed: 0 to 14"):
        shards[0].read([0, number])
    with pytest.raises(UserError, match="allowed: 0 to 14"):
        shards[0].extent(number)


def test_a_pickled_reader_reads_in_another_process(tmp_path: Path) -> None:
    written = write_shards(tmp_path)
    records = open_shards(tmp_path)
    read_all(records)
    again = pickle.loads(pickle.dumps(records))
    assert not again.parts._open
    assert read_all(again) == written
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        assert pool.submit(records.read, [3, 12]).result() == [written[3], written[12]]


def test_extent_goes_from_the_first_field_to_the_last(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("0.a", b"12345"), ("0.b", b"678"), ("1.a", b"9")])
    records = open_shards(tmp_path)
    assert str(records.extent(0)) == f"{tmp_path / 'a.tar'}, byte 512"
    assert (records.extent(0).size, records.extent(1).offset, records.extent(1).size) == (1024 + 3, 2560, 1)


def test_a_second_opening_reads_the_index_and_no_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_shards(tmp_path)
    first = open_shards(tmp_path)
    monkeypatch.setattr(ours, "index_shards", None)
    second = open_shards(tmp_path)
    assert read_all(second) == written
    assert second.fingerprint == first.fingerprint


def test_a_changed_shard_gets_a_new_index(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("0.a", b"1"), ("1.a", b"2")])
    assert len(open_shards(tmp_path)) == 2
    write_tar(tmp_path / "a.tar", [("0.a", b"1"), ("2.a", b"3"), ("3.a", b"4")])
    assert [record["__key__"] for record in read_all(open_shards(tmp_path))] == ["0", "2", "3"]


def test_names_are_split_as_the_library_does(tmp_path: Path) -> None:
    names = [
        "0.JPG",
        "0.seg.png",
        "a.b/1.txt",
        "a.b/plain",
        "./2.x",
        "dir/3.x.y.z",
        "__m__/4.x",
        "__m__",
        "__5.x",
        "6.",
    ]
    path = write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    assert read_all(open_shards(path)) == read_by_library([path])


def test_hidden_members_are_skipped(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("x/._0.a", b"-"), ("x/0.a", b"1"), (".DS_Store", b"-"), ("x/0.b", b"2")])
    assert read_all(open_shards(path)) == [{"__key__": "x/0", "a": b"1", "b": b"2"}]


def test_members_without_payload_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("0.d", tarfile.DIRTYPE), ("0.l", tarfile.SYMTYPE), ("0.h", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "t" * 150
            tar.addfile(info)
        info = tarfile.TarInfo("0.a")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    assert read_all(open_shards(path)) == [{"__key__": "0", "a": b"abc"}] == read_by_library([path])


def test_what_gnu_tar_writes(tmp_path: Path) -> None:
    folder = tmp_path / "in" / ("sub" * 20)  # a prefix for ustar, a long name for the others
    folder.mkdir(parents=True)
    names = [f"{'long' * 20}-{number}.{field}" for number in range(3) for field in ("jpg", "txt")]
    for name in names:
        (folder / name).write_bytes(name.encode() * 20)
    for kind in ("gnu", "posix", "oldgnu", "ustar"):
        path = tmp_path / f"{kind}.tar"
        command = ["tar", f"--format={kind}", "--sort=name", "-C", str(tmp_path / "in"), "-cf", str(path), "."]
        subprocess.run(command, check=True)
        records = read_all(open_shards(path))
        assert records == read_by_library([path])
        assert [record["jpg"] for record in records] == [name.encode() * 20 for name in names[::2]]


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "0.bin").open("wb") as file:
        file.truncate(2**20)
        file.seek(2**19)
        file.write(b"x")
    for kind in ("gnu", "posix"):
        path = tmp_path / f"{kind}.tar"
        subprocess.run(["tar", f"--format={kind}", "-S", "-C", str(tmp_path), "-cf", str(path), "0.bin"], check=True)
        message = refusal(path)
        assert f"{path.name}, byte 0: " in message
        assert "is stored as a sparse file" in message
        assert "to do: pack the shard again without --sparse" in message


letters = st.text(st.characters(codec="utf-8", exclude_characters="\0/.", exclude_categories=["Cc", "Cs"]), min_size=1)
paths = st.builds(
    lambda folders, stem, times, field: "/".join([*folders, stem * times]) + f".{field}",
    st.lists(letters, max_size=2),
    letters,
    st.integers(1, 120),
    letters,
)


@given(
    names=st.lists(paths, min_size=1, max_size=8, unique=True),
    kind=st.sampled_from(["gnu", "pax"]),
    sizes=st.lists(st.sampled_from([0, 1, 511, 512, 513, 5000]), min_size=8, max_size=8),
)
def test_members_are_those_of_tarfile(
    names: list[str], kind: str, sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "property.tar"
    write_tar(path, [(name, bytes([7]) * size) for name, size in zip(names, sizes, strict=False)], kind)
    with tarfile.open(path) as tar:
        expected = [(member.name, member.offset, member.offset_data, member.size) for member in tar]
    assert [(each.name, each.header, each.offset, each.size) for each in list_members(path)] == expected


def test_size_above_8_gib_and_a_pax_size(tmp_path: Path) -> None:
    for kind in ("gnu", "pax"):
        info = tarfile.TarInfo("0.bin")
        info.size = 2**33 + 5
        head = info.tobuf(FORMATS[kind])
        path = tmp_path / f"{kind}.tar"
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + 2**33 + BLOCK)
        (member,) = list_members(path)
        assert (member.size, member.offset) == (2**33 + 5, len(head))
        path.unlink()


def test_a_global_pax_header_holds_for_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}) as tar:
        info = tarfile.TarInfo("ü.a")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"1"))
    assert read_all(open_shards(path)) == [{"__key__": "ü", "a": b"1"}]
    with tarfile.open(path) as tar:
        assert index_shard(path)["offsets"].tolist() == [member.offset_data for member in tar]


def test_headers_summed_as_signed_bytes(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("ü.a", b"1")], "gnu")
    content = bytearray(path.read_bytes())
    signed = sum(byte - 256 if byte > 127 else byte for byte in content[:148] + content[156:512]) + 8 * 32
    content[148:156] = b"%06o\0 " % signed
    path.write_bytes(content)
    assert [member.name for member in list_members(path)] == ["ü.a"]


# --- which files


def test_folder_pattern_and_file(tmp_path: Path) -> None:
    written = write_shards(tmp_path / "in", shards=3, records=2)
    assert read_all(open_shards(tmp_path / "in" / "s-{001..002}.tar")) == written[2:]
    assert read_all(open_shards(tmp_path / "in" / "s-*.tar")) == written
    assert read_all(open_shards(tmp_path / "in" / "s-001.tar")) == written[2:4]
    for path in (tmp_path, tmp_path / "in", tmp_path / "in" / "s-000.tar", tmp_path / "s-{0..1}.tar"):
        assert WebDatasetRecords.is_at(path)
    for path in (tmp_path / "none", tmp_path / "in" / "x.zip"):
        assert not WebDatasetRecords.is_at(path)


def test_a_missing_shard_of_a_pattern_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "s-001.tar").unlink()
    assert "names files that are missing: s-001.tar, s-003.tar" in refusal(tmp_path / "s-{000..003}.tar")


def test_nothing_there(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.tar")
    assert "has no tar shards (*.tar)" in refusal(tmp_path)


def test_compressed_shards_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, shards=2)
    subprocess.run(["gzip", str(tmp_path / "s-001.tar")], check=True)
    message = refusal(tmp_path)
    assert "has a compressed shard, s-001.tar.gz" in message
    assert f"to do: gunzip {tmp_path}/s-001.tar.gz" in message
    (tmp_path / "s-001.tar.gz").rename(tmp_path / "s-001.tar")
    message = refusal(tmp_path)
    assert "s-001.tar, byte 0: it is compressed" in message
    assert "to do: gunzip" in message


def test_empty_shards_among_others_are_legal(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [])
    write_tar(tmp_path / "b.tar", [("0.a", b"1")])
    write_tar(tmp_path / "c.tar", [("no-field", b"")])
    write_tar(tmp_path / "d.tar", [("0.b", b"2"), ("1.c", b"")])
    records = open_shards(tmp_path)
    assert read_all(records) == [{"__key__": "0", "a": b"1"}, {"__key__": "0", "b": b"2"}, {"__key__": "1", "c": b""}]
    assert records.fields == {"__key__": "text", "a": "bytes", "b": "bytes"}
    assert records.extent(1).path == tmp_path / "d.tar"
    assert list(records.find_damage()) == []


def test_no_record_at_all(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("no-field", b"")])
    assert "has no record in its shards" in refusal(tmp_path)


# --- damage


def test_a_file_of_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    assert "a.tar, byte 0: it is empty (0 bytes)" in refusal(tmp_path)


def test_no_tar_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"text\n" * 500)
    assert "a.tar, byte 0: no header of a member lies there (its checksum does not match)" in refusal(tmp_path)
    (tmp_path / "a.tar").write_bytes(b"text\n")
    assert "a.tar, byte 0: the file ends within a header, after 5 bytes" in refusal(tmp_path)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_at_any_place_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    members = [(f"{number}{'n' * 120 * (number % 2)}.a", bytes([65 + number]) * (300 * number)) for number in range(4)]
    members = [(name.replace("n" * 120, "n" * 60 if kind == "ustar" else "n" * 120), data) for name, data in members]
    whole = write_tar(tmp_path / "whole.tar", members, kind)
    content, path = whole.read_bytes(), tmp_path / "cut.tar"
    ends = {each.offset + each.size: number + 1 for number, each in enumerate(list_members(whole))}
    starts = [each.header for each in list_members(whole)]
    for size in sorted({*range(1, len(content), 97), *ends, *starts[1:]}):
        path.write_bytes(content[:size])
        whole_records = max((count for end, count in ends.items() if end <= size), default=0)
        begun = whole_records < len(starts) and size > starts[whole_records]
        if begun:
            with pytest.raises(BadTar):
                index_shard(path)
        else:
            assert len(index_shard(path)["heads"]) == whole_records


def test_a_member_that_goes_past_the_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.a", b"1"), ("1.a", b"x" * 3000)])
    os.truncate(path, 2000)
    assert "a.tar, byte 1536: a member there needs 3000 bytes and the file ends after 464" in refusal(path)


def test_an_archive_without_its_end_is_legal(tmp_path: Path) -> None:
    members = [("0.a", b"1" * 700), ("1.a", b"2")]
    path = write_tar(tmp_path / "a.tar", members, end=False)
    assert path.stat().st_size % 10240
    assert [record["a"] for record in read_all(open_shards(path))] == [b"1" * 700, b"2"]
    os.truncate(path, path.stat().st_size - 511)
    assert [record["a"] for record in read_all(open_shards(path))] == [b"1" * 700, b"2"]


def test_an_extended_header_without_its_member(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "whole.tar", [("n" * 200 + ".a", b"1")], "gnu").read_bytes()
    for rest in (b"", bytes(1024)):
        (tmp_path / "a.tar").write_bytes(whole[:1024] + rest)
        assert "belongs to a further member" in refusal(tmp_path / "a.tar")


def test_two_archives_in_one_file(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "one.tar", [("0.a", b"1")]).read_bytes()
    (tmp_path / "two.tar").write_bytes(one + one)
    assert "two.tar, byte 10240: a further archive begins there" in refusal(tmp_path / "two.tar")
    (tmp_path / "two.tar").write_bytes(one + b"no header" * 100)
    assert len(open_shards(tmp_path / "two.tar")) == 1


def test_a_field_that_a_record_has_twice(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.a", b"1"), ("0.A", b"2")])
    assert 'a.tar, byte 1024: "0.A" is the second field "a" of its record' in refusal(path)


def test_a_record_whose_members_are_apart(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.a", b"1"), ("1.a", b"2"), ("0.b", b"3"), ("1.b", b"4")])
    message = refusal(path)
    assert 'a.tar, byte 2048: members of the record "0" do not follow those at byte 0: others lie between' in message
    assert "tar --sort=name" in message


def test_a_key_that_comes_again_is_another_record(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.a", b"1"), ("0.b", b"2"), ("1.a", b"3"), ("0.b", b"4"), ("0.a", b"5")])
    assert read_all(open_shards(path)) == read_by_library([path])
    assert len(open_shards(path)) == 3


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        tar.addfile(tarfile.TarInfo("ü.a"))
    assert "a.tar, byte 0: the name of a member is not UTF-8" in refusal(path)


def test_a_size_that_is_no_number(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.a", b"1")])
    content = bytearray(path.read_bytes())
    for field in (b"0000000009z\0", b"-0000000001\0", b"\xff" * 12):
        content[124:136] = field
        content[148:156] = b"%06o\0 " % (sum(content[:148] + content[156:512]) + 8 * 32)
        path.write_bytes(content)
        assert "a.tar, byte 0: the size of a member is no number" in refusal(path)


def test_a_damaged_pax_header(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("ü" * 100 + ".a", b"1")], "pax")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"212 path=", b"213 path="))
    assert "a.tar, byte 512: an extended header cannot be read" in refusal(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_changed_bit_of_a_header_is_found(kind: str, tmp_path: Path) -> None:
    name = "0é.a" if kind == "pax" else "0.a"
    path = write_tar(tmp_path / "a.tar", [(name, b"payload"), ("1.b", b"")], kind)
    records, content = open_shards(path), path.read_bytes()
    stat = path.stat()
    assert list(records.find_damage()) == []
    places = [place for each in list_members(path) for place in range(each.header, each.offset)]
    for place in places[:: max(1, len(places) // 300)]:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        found = list(records.find_damage())
        assert found, place
        assert str(path) in found[0]


def test_records_that_vanish_are_found(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.a", b"1"), ("1.a", b"2"), ("2.a", b"3")])
    records = open_shards(path)
    content = bytearray(path.read_bytes())
    content[2048:3072] = bytes(1024)
    path.write_bytes(content)
    assert list(records.find_damage()) == [f"{path} has 2 records, and 3 were there when its index was made"]


def test_a_changed_payload_is_found_only_with_checksums(tmp_path: Path) -> None:
    write_shards(tmp_path)
    path = tmp_path / "s-001.tar"
    plain = open_shards(tmp_path)
    make_sums(tmp_path, plain.parts.files)
    summed = open_shards(tmp_path)
    assert list(summed.find_damage()) == []
    at = summed.extent(9).offset
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    assert list(plain.find_damage()) == []
    again = pickle.loads(pickle.dumps(summed))
    with pytest.raises(DamagedData, match=f"{path} is damaged at byte 0: the checksum"):
        again.read([9])
    assert again.read([0, 14])
    assert any(str(path) in each for each in again.find_damage())


def test_a_shard_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    write_shards(tmp_path)
    records, path = open_shards(tmp_path), tmp_path / "s-001.tar"
    os.truncate(path, records.extent(7).offset)
    with pytest.raises(DamagedData, match=f"{path} is damaged at byte"):
        records.read([7])
    found = list(records.find_damage())
    assert f"{path} has {path.stat().st_size} bytes" in found[0]
    assert any(each.startswith("record 7: ") for each in found)
    path.unlink()
    with pytest.raises(JobError):
        pickle.loads(pickle.dumps(records)).read([7])


# --- in several processes


def test_the_index_made_in_several_processes_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, shards=3)
    write_tar(tmp_path / "t.tar", [("0.other", b"1")])
    shards = sorted(tmp_path.glob("*.tar"))
    alone = index_shards(shards)
    monkeypatch.setattr(ours, "SPREAD_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    spread = index_shards(shards)
    assert alone.keys() == spread.keys()
    for name, array in alone.items():
        np.testing.assert_array_equal(array, spread[name])
    os.truncate(shards[1], 1536)
    assert "s-001.tar, byte 1536: a member there needs 1 bytes" in refusal(tmp_path)
