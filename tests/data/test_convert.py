"""Records come back from every format that can be written, or are refused; nothing half written is left."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data import record_writers
from shardway.data.convert import WRITERS, convert_records, pack_squashfs
from shardway.data.detect import open_records, place_of
from shardway.data.formats.base import FileParts, Record, Records
from shardway.errors import JobError, UserError

PNG = b"\x89PNG\r\n\x1a\n0000"
JPEG = b"\xff\xd8\xff\xe00000"
BLOBS = ("webdataset", "energon", "lmdb")
"""Formats that hold bytes alone."""


class Given(Records):
    """Records that a test has made."""

    format = "given"

    def __init__(self, records: Sequence[Record]) -> None:
        self.records, self.parts = list(records), FileParts(Path("/"), [])

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return False

    @classmethod
    def open(cls, place: Any) -> Given:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.records)

    @property
    def fields(self) -> dict[str, str]:
        return {name: "" for record in self.records for name in record}

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        found = (self.records[number] for number in ids)
        return [{name: value for name, value in each.items() if not fields or name in fields} for each in found]


def write(records: Sequence[Record], out: Path, to: str, **more: Any) -> dict[str, int]:
    return convert_records(
        Given(records), out, to, more.get("fields", ()), more.get("advance", lambda done, total: None)
    )


def read(out: Path, to: str = "") -> list[Record]:
    found = open_records(place_of(out), to)
    assert not to or found.format == to
    return [{k: v for k, v in each.items() if not k.startswith("__")} for each in found.read(range(len(found)))]


def there_and_back(records: Sequence[Record], folder: Path, to: str) -> list[Record]:
    assert write(records, folder / "out", to)["samples"] == len(records)
    return read(folder / "out", to)


def refused(records: Sequence[Record], folder: Path, to: str) -> str:
    with pytest.raises(UserError) as error:
        write(records, folder / "out", to)
    assert os.listdir(folder) == []
    return str(error.value)


# --- there and back


def flat(value: Any) -> Any:
    """What two values have in common that differ in their types alone: text, bytes and rows of bytes; arrays and
    lists."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, np.ndarray | np.generic):
        return flat(value.tolist())
    if isinstance(value, dict):
        return {name: flat(each) for name, each in value.items() if each is not None}
    return [flat(each) for each in value] if isinstance(value, list) else value


NUMBERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(max_size=20),
    "text": st.text(max_size=20),
    "int": NUMBERS,
    "float": FLOATS,
    "flag": st.booleans(),
    "row": st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda each: np.array(each, np.int32)),
    "image": st.lists(FLOATS, min_size=6, max_size=6).map(lambda each: np.array(each).reshape(2, 3)),
    "list": st.lists(NUMBERS, max_size=3),
    "table": st.fixed_dictionaries({"a": NUMBERS, "b": st.text(max_size=5)}),
}
ANY = st.one_of(*COLUMNS.values(), st.none())


@st.composite
def tables(draw: st.DrawFn) -> list[Record]:
    """Records of one kind, or of anything."""
    count = draw(st.integers(1, 5))
    if draw(st.integers(0, 3)):
        names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, unique=True))
        return [{name: draw(COLUMNS[name]) for name in names} for _ in range(count)]
    names = draw(st.lists(st.sampled_from(["x", "y", "z.json", "a/b"]), min_size=1, unique=True))
    return [{name: draw(ANY) for name in names if draw(st.integers(0, 5))} for _ in range(count)]


@pytest.mark.parametrize("to", sorted(set(WRITERS) - {"images", "idx", "text", "tokens", "megatron"}))
@settings(max_examples=25)
@given(records=tables())
def test_records_come_back_or_are_refused(to: str, records: list[Record]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            found = there_and_back(records, folder, to)
        except UserError as error:
            assert os.listdir(folder) == []
            assert len(str(error).splitlines()) <= 4
            return
        if to == "lmdb":
            for each in found:
                each.pop("key", None)
        for number, (record, back) in enumerate(zip(records, found, strict=True)):
            if to in BLOBS:
                kept = {k: v for k, v in record.items() if v is not None or to == "lmdb"}
                expected = sorted(record_writers.as_bytes(value, number, name) for name, value in kept.items())
                assert sorted(back.values()) == expected
            elif to == "mds":
                assert flat(back) == flat(record)
            else:
                assert flat(back) == flat({k: v for k, v in record.items() if v is not None})


@pytest.mark.parametrize("to", ["tokens", "megatron"])
@settings(max_examples=20)
@given(rows=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=5))
def test_tokens_come_back(to: str, rows: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        try:
            found = there_and_back([{"tokens": np.array(row, np.int64)} for row in rows], Path(name), to)
        except UserError as error:
            assert not any(rows), error
            return
        assert [each["tokens"].tolist() for each in found] == rows


def test_records_keep_their_types_in_shards(tmp_path: Path) -> None:
    record = {"a": b"x", "b": "ü", "c": 3, "d": 0.5, "e": None, "f": [1, "a"], "g": {"h": 1}, "i": True}
    (found,) = there_and_back([record], tmp_path, "shards")
    assert found == record
    assert {name: type(value) for name, value in found.items()} == {name: type(each) for name, each in record.items()}


def test_images_become_jpg_and_cls(tmp_path: Path) -> None:
    """So that any reader of WebDataset knows them."""
    records = [{"image": {"bytes": JPEG, "path": None}, "label": 2, "thumb": JPEG, "x": np.zeros(2)}]
    (found,) = there_and_back(records, tmp_path, "webdataset")
    assert sorted(found) == ["cls", "jpg", "thumb.jpg", "x.npy"]
    assert (found["jpg"], found["cls"], found["thumb.jpg"]) == (JPEG, b"2", JPEG)


def test_texts_are_files(tmp_path: Path) -> None:
    found = there_and_back([{"content": "ab", "n": 1}, {"txt": b"c\n"}], tmp_path, "text")
    assert [each["text"] for each in found] == ["ab", "c\n"]
    assert "record 1 has no text" in refused([{"text": "a"}, {"other": "b"}], ensure(tmp_path / "again"), "text")


def test_images_of_idx_come_back(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).integers(0, 256, (3, 4, 5), np.uint8)
    labels: list[Any] = [255, "7", b"0"]
    records = [{"image": image, "label": label} for image, label in zip(drawn, labels, strict=True)]
    records[2]["cls"] = records[2].pop("label")
    found = there_and_back(records, tmp_path, "idx")
    assert [each["label"] for each in found] == [255, 7, 0]
    assert np.array_equal([each["image"] for each in found], drawn)


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ({"image": np.zeros((2, 2), np.uint8), "label": 256}, 'record 1: the field "label" holds int, which idx'),
        ({"image": np.zeros((2, 2), np.uint8)}, 'record 1: the field "label" holds NoneType'),
        ({"image": np.zeros((2, 3), np.uint8), "label": 0}, "uint8 [2, 3], which idx (uint8 of one shape [H, W])"),
        ({"image": np.zeros((2, 2)), "label": 0}, "float64 [2, 2]"),
        ({"image": PNG, "label": 0}, 'record 1: the field "image" holds bytes'),
    ],
)
def test_what_idx_cannot_hold_is_refused(tmp_path: Path, second: Record, what: str) -> None:
    assert what in refused([{"image": np.zeros((2, 2), np.uint8), "label": 0}, second], tmp_path, "idx")


def ensure(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_classes_keep_their_numbers(tmp_path: Path) -> None:
    """Ten sorts before two, as text."""
    found = there_and_back([{"png": PNG, "cls": str(number).encode()} for number in range(12)], tmp_path, "images")
    assert [each["label"] for each in found] == list(range(12))
    assert [each["image"] for each in found] == [PNG] * 12
    again = there_and_back([{"png": PNG, "label": name} for name in ("dog", "cat")], ensure(tmp_path / "b"), "images")
    assert [(each["name"], each["label"]) for each in again] == [("cat/000000001.png", 0), ("dog/000000000.png", 1)]


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"png": PNG, "label": 1}, "there is class 1 (record 0) and none of the class before it"),
        ({"png": PNG, "label": "../x"}, 'the class "../x", which cannot be the name of a folder'),
        ({"png": PNG, "label": ""}, "cannot be the name of a folder"),
        ({"png": PNG}, "record 0 has no class (label, cls, class, y, target) among its fields png"),
        ({"png": b"BMW", "label": 1, "__key__": "a"}, "record 0 has no image among its fields png, label"),
        ({"wav": b"RIFF0000WAVE", "label": 1}, "record 0 has no image"),
    ],
)
def test_what_is_no_image_of_a_class_is_refused(tmp_path: Path, record: Record, what: str) -> None:
    assert what in refused([record], tmp_path, "images")


MIXED: list[tuple[str, list[Record], str]] = [
    ("mds", [{"a": 1}, {"a": 2.5}], 'record 1: the field "a" holds float, which an mds column of int'),
    ("mds", [{"a": "1"}, {"a": b"1"}], 'record 1: the field "a" holds bytes'),
    ("mds", [{"a": 2**63}], "8 bytes an integer"),
    ("mds", [{"a": 1}, {"b": 1}], "record 1 has the fields b\n  allowed: a"),
    ("lmdb", [{"a": 1, "b": 1}, {"a": 1}], "record 1 has the fields a\n  allowed: a, b"),
    ("lmdb", [{"a-b": 1}], 'the field "a-b" cannot be part of a key of lmdb'),
    ("lmdb", [dict.fromkeys("abcdefghi", 1)], "there are 9 fields"),
    (
        "hdf5",
        [{"a": 1}, {"a": 2.5}],
        'record 1: the field "a" holds ndarray of float64 [], which an hdf5 data set of int',
    ),
    ("hdf5", [{"a": "x\0y"}], "byte 0 ends a text there"),
    ("hdf5", [{"a": [[1], [1, 2]]}], 'record 0: the field "a" holds list'),
    ("hdf5", [{"a": None}], 'record 0: the field "a" holds NoneType'),
    ("arrays", [{"a": 1}, {}], "record 1 has no fields, and arrays"),
    (
        "arrays",
        [{"a": [1, 2]}, {"a": [1]}],
        'record 1: the field "a" holds ndarray of int64 [1], which arrays of int64 [2]',
    ),
    ("arrays", [{"a/b": 1}], 'the field "a/b" cannot be the name of a .npy file'),
    ("arrays", [{"a": "text"}], 'record 0: the field "a" holds str, which arrays cannot hold'),
    ("parquet", [{"a": 1}, {"a": "x"}], 'the field "a" of the records 0 to 1 does not fit one column'),
    ("parquet", [{"a": np.zeros((2, 2))}], "choose hdf5, arrays, mds or shards"),
    ("arrow", [{}], "record 0 has no fields"),
    ("webdataset", [{"a": None}], "record 0 has no fields"),
    ("jsonl", [{"a": b"\xff"}], 'record 0: the field "a" holds bytes, which jsonl cannot hold'),
    ("tokens", [{"text": "a", "__key__": "b"}], "has no field of tokens (tokens or input_ids), but text\n"),
    ("tokens", [{"tokens": [0.5]}], "a row of tokens"),
    ("megatron", [{"tokens": [-1]}], "give one row of integers from 0 on"),
]


@pytest.mark.parametrize("case", MIXED, ids=lambda case: f"{case[0]}: {case[2][:30]}")
def test_a_value_that_does_not_fit_is_named(tmp_path: Path, case: tuple[str, list[Record], str]) -> None:
    to, records, what = case
    said = refused(records, tmp_path, to)
    assert what in said
    assert "to do: " in said or "allowed: " in said or "cannot hold such a record" in said


LATE: list[tuple[str, Any, Any]] = [
    ("parquet", {"a": 1}, {"a": 1, "b": 2}),
    ("arrow", {"a": 1}, {"a": 0.5}),
    ("hdf5", {"a": 1}, {"b": 1}),
    ("hdf5", {"a": [1, 2]}, {"a": [1, 2, 3]}),
    ("hdf5", {"a": 1}, {"a": 0.5}),
]


@pytest.mark.parametrize("case", LATE, ids=str)
def test_what_comes_late_is_not_lost(tmp_path: Path, case: tuple[str, Any, Any]) -> None:
    """The first rows of a table decide its columns."""
    to, first, late = case
    assert str(record_writers._ROWS) in refused([first] * record_writers._ROWS + [late], tmp_path, to)


def test_ragged_rows_stay_ragged_in_later_parts(tmp_path: Path) -> None:
    rows = [[1, 2], *([[3]] * (record_writers._ROWS - 1)), [4], [5]]
    found = there_and_back([{"a": row} for row in rows], tmp_path, "hdf5")
    assert [each["a"].tolist() for each in found] == rows


def test_fields_may_be_chosen(tmp_path: Path) -> None:
    records = [{"a": 1, "b": b"\xff"}]
    write(records, tmp_path / "out.jsonl", "jsonl", fields=["a"])
    assert (tmp_path / "out.jsonl").read_text() == '{"a": 1}\n'
    with pytest.raises(UserError, match='"c" is no field of these records\n      allowed: a, b'):
        write(records, tmp_path / "other", "jsonl", fields=["c"])


# --- libraries read it


def test_the_libraries_of_the_formats_read_it(tmp_path: Path) -> None:
    h5py, parquet, arrow = map(pytest.importorskip, ("h5py", "pyarrow.parquet", "pyarrow"))
    records = [{"text": f"number {number}", "n": number, "row": np.arange(number + 1)} for number in range(3)]
    for to in ("parquet", "arrow", "hdf5"):
        write(records, tmp_path / to, to)
    table = parquet.read_table(tmp_path / "parquet").to_pylist()
    assert table == [{**record, "row": record["row"].tolist()} for record in records]
    with (tmp_path / "arrow" / "data-00000-of-00001.arrow").open("rb") as stream:
        assert arrow.ipc.open_stream(stream).read_all().to_pylist() == table
    with h5py.File(tmp_path / "hdf5" / "data.h5") as file:
        assert file["text"].asstr()[:].tolist() == [record["text"] for record in records]
        assert file["n"][:].tolist() == [0, 1, 2]
        assert [row.tolist() for row in file["row"]] == [record["row"].tolist() for record in records]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves files open
def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    write([{"image": JPEG, "label": number, "text": "ü"} for number in range(3)], tmp_path / "out", "webdataset")
    found = list(webdataset.WebDataset(str(tmp_path / "out" / "000000.tar"), shardshuffle=False))
    assert [(each["jpg"], each["cls"], each["text"].decode()) for each in found] == [
        (JPEG, str(number).encode(), "ü") for number in range(3)
    ]


# --- ends in between


def in_a_child(work: Callable[[], object]) -> tuple[int, str]:
    """The wait status of a process that does this alone, and what it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        said = pipe.read()
    return os.waitpid(child, 0)[1], said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork, where threads of another test's library live
@pytest.mark.parametrize("to", ["jsonl", "parquet", "hdf5", "lmdb", "mds", "energon", "shards", "megatron"])
def test_a_kill_leaves_nothing_under_the_name(tmp_path: Path, to: str) -> None:
    records = [{"tokens": [number]} for number in range(600)]

    def die(done: int, total: int) -> None:
        if done >= 512:
            os.kill(os.getpid(), signal.SIGKILL)

    status, _ = in_a_child(lambda: write(records, tmp_path / "out", to, advance=die))
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert os.listdir(tmp_path) == [".out.writing"]
    write(records, tmp_path / "out", to)
    assert os.listdir(tmp_path) == ["out"]
    assert len(read(tmp_path / "out")) == 600


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("to", sorted(set(WRITERS) - {"tokens", "megatron", "arrays", "idx"}))
def test_a_full_disk_is_one_sentence(tmp_path: Path, to: str) -> None:
    """A bound on the size of a file stands in for it: also what libraries write is refused."""
    records = [{"png": PNG + os.urandom(50_000), "cls": 0, "text": "b" * 50_000}] * 2
    fields = ["cls", "text"] if to == "jsonl" else []

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        write(records, tmp_path / "out", to, fields=fields)

    status, said = in_a_child(work)
    assert status == 0
    assert said.startswith("JobError: ")
    assert "cannot be written: " in said
    assert ("Input/output error" if to == "lmdb" else "To do: raise `ulimit -f`") in said
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(UserError, match=r'OUT: ".*out" is there already\n      to do: name another path'):
        write([{"a": 1}], tmp_path / "out", "jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: File exists"):
        write([{"a": 1}], tmp_path / "file" / "below", "jsonl")


def test_a_source_that_cannot_be_read_is_not_a_full_disk(tmp_path: Path) -> None:
    class Gone(Given):
        def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
            raise OSError(5, "Input/output error")

    with pytest.raises(JobError, match="/ cannot be read: Input/output error"):
        convert_records(Gone([{"a": 1}]), tmp_path / "out", "jsonl", (), lambda done, total: None)
    assert os.listdir(tmp_path) == []


def test_squashfs_packs_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ensure(tmp_path / "source")
    (source / "a").write_bytes(b"1")
    tools = ensure(tmp_path / "tools")
    (tools / "mksquashfs").write_text(
        '#!/bin/sh\ncase "$1" in *bad) echo broken >&2; exit 3;; esac\necho image > "$2"\n'
    )
    (tools / "mksquashfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    assert pack_squashfs(source, tmp_path / "a.sqsh") == {"samples": 1, "bytes": 6, "files": 1}
    with pytest.raises(JobError, match="mksquashfs failed with exit code 3: broken"):
        pack_squashfs(ensure(tmp_path / "bad"), tmp_path / "b.sqsh")
    with pytest.raises(UserError, match="is no folder"):
        pack_squashfs(source / "a", tmp_path / "c.sqsh")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match="mksquashfs is not there"):
        pack_squashfs(source, tmp_path / "d.sqsh")


def test_json_of_numbers_of_numpy(tmp_path: Path) -> None:
    buffer = io.StringIO()
    write([{"a": np.float32(0.5), "b": {"c": np.arange(2)}}], tmp_path / "out.jsonl", "jsonl")
    with contextlib.redirect_stdout(buffer):
        assert json.loads((tmp_path / "out.jsonl").read_text()) == {"a": 0.5, "b": {"c": [0, 1]}}
