"""The files of tests/recorded/data/megatron were written by IndexedDatasetBuilder of NVIDIA/Megatron-LM d98e8a64."""

from __future__ import annotations

import pickle
import shutil
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.content import DataPath
from shardway.data.formats.base import DamagedData
from shardway.data.formats.indexes import make_sums
from shardway.data.formats.megatron import (
    MegatronRecords,
    is_megatron,
    name_files,
    open_megatron_store,
    write_megatron_files,
)
from shardway.data.kinds import MegatronKind
from shardway.data.sources.base import DataRequest
from shardway.data.sources.packed import PackedDocuments
from shardway.data.sources.tokens import TokenWindows, open_megatron
from shardway.errors import UserError
from shardway.runfile.schema import DataSection

RECORDED = Path(__file__).parents[2] / "recorded" / "data" / "megatron"
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def at(path: Path) -> DataPath:
    return DataPath("data.path", str(path))


def write(prefix: Path, documents: Sequence[Sequence[Any]], dtype: str = "uint16", **changed: Any) -> Path:
    """Documents, each a list of sequences, as Megatron's builder writes them; `changed`: arrays of the index."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    content = b"".join(sequence.tobytes() for sequence in sequences)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(content)
    lengths = [len(sequence) for sequence in sequences]
    arrays = {
        "lengths": np.array(lengths, np.int32),
        "pointers": np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize,
        "marks": np.cumsum([0, *map(len, documents)]),
        "modes": np.zeros(0, np.int8),
        **changed,
    }
    counts = changed.get("counts", (len(arrays["lengths"]), len(arrays["marks"])))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", changed.get("version", 1), changed.get("code", CODES[dtype]), *counts)
    types = {"lengths": np.int32, "pointers": np.int64, "marks": np.int64, "modes": np.int8}
    body = b"".join(np.asarray(arrays[name], kind).tobytes() for name, kind in types.items())
    prefix.with_name(f"{prefix.name}.idx").write_bytes(head + body)
    return prefix


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_megatron_store(at(path)).read_ends()
    return str(caught.value)


DOCUMENTS = [[range(5)], [range(100, 103), range(103, 107)], [[65499]], [[]], [range(20)]]


@pytest.mark.parametrize("name", ["tiny", "tiny.bin", "tiny.idx"])
def test_what_megatron_wrote_is_read(name: str) -> None:
    reader = MegatronRecords.open(at(RECORDED / name))
    assert (len(reader), reader.fields) == (5, {"tokens": "uint16[?]"})
    assert [record["tokens"].tolist() for record in reader.read(range(5))] == [
        [token for sequence in document for token in sequence] for document in DOCUMENTS
    ]
    assert reader.more_facts() == {"tokens": 33, "sequences": 6}
    assert [file.name for file in reader.parts.files] == ["tiny.bin", "tiny.idx"]
    assert list(reader.find_damage()) == []


def test_what_the_names_begin_with_is_there(tmp_path: Path) -> None:
    write(tmp_path / "data", [[[1, 2, 3]]])
    for name, there in (("data", True), ("data.bin", True), (".", True), ("other", False)):
        section = DataSection(kind="megatron", path=str(tmp_path / name))
        assert MegatronKind().exists(section) is there


def test_a_folder_with_one_pair_is_that_pair(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "a.v1", [[[1, 2, 3]]])
    assert is_megatron(folder)
    assert MegatronRecords.open(at(folder)).read([0])[0]["tokens"].tolist() == [1, 2, 3]
    write(tmp_path / "corpus", [[[4]]])
    assert MegatronRecords.open(at(folder)).read([0])[0]["tokens"].tolist() == [4], "as it is named comes first"
    (tmp_path / "corpus.idx").unlink()
    write(folder / "b", [[[5]]])
    assert not is_megatron(folder)
    assert "lacks corpus.idx" in refused(folder)
    assert "or a folder with one such pair" in refused(folder)


def test_multimodal_data_of_megatron_are_read() -> None:
    reader = MegatronRecords.open(at(RECORDED / "modes"))
    assert [record["tokens"].tolist() for record in reader.read([1, 0])] == [[70000], list(range(10))]


def test_the_writer_of_the_tests_writes_what_megatron_does(tmp_path: Path) -> None:
    write(tmp_path / "tiny", DOCUMENTS)
    write(tmp_path / "modes", [[range(4), range(4, 10)], [[70000]]], "int32", modes=[1, 0, 0])
    for name in ("tiny.bin", "tiny.idx", "modes.bin", "modes.idx"):
        assert (tmp_path / name).read_bytes() == (RECORDED / name).read_bytes()


@settings(max_examples=40)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 127), max_size=6), min_size=1, max_size=3), min_size=1, max_size=6
    ),
    dtype=st.sampled_from(["uint8", "int8", "int16", "uint16", "int32", "int64"]),
)
def test_documents_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], dtype: str
) -> None:
    joined = [[token for sequence in document for token in sequence] for document in documents]
    flat = [token for document in joined for token in document]
    prefix = write(tmp_path_factory.mktemp("m") / "data", documents, dtype)
    if not flat:
        assert "is empty" in refused(prefix)
        return
    store = open_megatron_store(at(prefix))
    assert (len(store), store.dtype) == (len(flat), np.dtype(dtype))
    assert store.read_ends().tolist() == np.cumsum([len(document) for document in joined]).tolist()
    assert store.rows(np.array([0]), len(flat)).tolist() == [flat]
    reader = MegatronRecords.open(at(prefix))
    assert [record["tokens"].tolist() for record in reader.read(range(len(reader)))] == joined


def test_records_are_read_in_any_order_and_after_pickling(tmp_path: Path) -> None:
    reader = MegatronRecords.open(at(write(tmp_path / "d.v1", DOCUMENTS)))
    assert MegatronRecords.is_at(tmp_path / "d.v1")
    for each in (reader, pickle.loads(pickle.dumps(reader))):
        assert [len(record["tokens"]) for record in each.read([4, 0, 0, 3])] == [20, 5, 5, 0]
        assert each.read([1], ["other"]) == [{}]
        with pytest.raises(UserError, match="no record 5; allowed: 0 to 4"):
            each.read([5])
    where = reader.extent(1)
    assert (where.path, where.offset, where.size) == (tmp_path / "d.v1.bin", 10, 14)


def test_sequences_that_no_document_marks(tmp_path: Path) -> None:
    # What end_document() was not called for is a document of its own; without any mark each sequence is one.
    for marks, expected in (([0, 1], [5, 10]), ([0], [5, 8, 10]), ([], [5, 8, 10]), ([1, 3], [5, 10])):
        prefix = write(tmp_path / "d", [[range(5), range(3), range(2)]], marks=marks)
        assert open_megatron_store(at(prefix)).read_ends().tolist() == expected
        assert len(MegatronRecords.open(at(prefix))) == len(expected)


def test_what_is_wrong_is_said_when_it_is_opened(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    index, content = (prefix.with_name(name) for name in ("d.idx", "d.bin"))
    whole, tokens = index.read_bytes(), content.read_bytes()
    assert "lacks x.bin and x.idx" in refused(tmp_path / "x.bin")
    assert "is a folder" in refused(Path("/"))
    for part, message in (
        (b"", "is no index of Megatron-LM (byte 0)"),
        (b"MMIDIDY" + whole[7:], "is no index of Megatron-LM (byte 0)"),
        (whole[:20], "d.idx of 20 bytes, too few"),
        (whole[:-1], f"d.idx of {len(whole) - 1} bytes, and 6 sequences in 6 documents need {len(whole)}"),
        (whole + b"1", "sequences in"),
        (whole[:9] + b"\2" + whole[10:], "version 2 (byte 9)"),
        (whole[:17] + b"\6" + whole[18:], "tokens float64 (byte 17)"),
        (whole[:17] + b"\x63" + whole[18:], "tokens of code 99 (byte 17)"),
        (whole[:18] + b"\xff" * 8 + whole[26:], "sequences in"),
    ):
        index.write_bytes(part)
        assert message in refused(prefix)
    index.write_bytes(whole)
    for part, message in (
        (b"", "is empty"),
        (tokens[:-2], "holds 64 bytes of tokens and its index ends at byte 66: the file is truncated"),
        (tokens + b"12", "holds 68 bytes of tokens and its index ends at byte 66: the index belongs to another file"),
    ):
        content.write_bytes(part)
        assert message in refused(prefix)
    content.unlink()
    assert "lacks d.bin" in refused(prefix)
    assert not is_megatron(prefix)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pointers": [0, 10, 18, 24, 26, 26]}, "sequence 2 does not follow the one before (byte 74)"),
        ({"pointers": [2, 10, 16, 24, 26, 26]}, "sequence 0 does not follow the one before (byte 58)"),
        ({"lengths": [5, 3, 4, 1, -1, 20]}, "with a length below 0 (byte 50)"),
        ({"marks": [0, 1, 3, 4, 5, 7]}, "with a document beyond its sequences (byte 146)"),
        ({"marks": [0, 3, 1, 4, 5, 6]}, "with documents out of order (byte 106)"),
        ({"lengths": [], "pointers": [], "marks": [0]}, "has an index without sequences"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS, **changed)
    assert message in refused(prefix)


def test_a_contradiction_in_the_index_is_damage(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS, pointers=[0, 10, 18, 24, 26, 26])
    assert "sequence 2 does not follow" in "".join(MegatronRecords.open(at(prefix)).find_damage())


def test_flipped_bits_are_found_where_there_are_checksums(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    reader = MegatronRecords.open(at(prefix))
    make_sums(tmp_path, reader.parts.files)
    (tmp_path / "d.bin").write_bytes(b"\1" + (tmp_path / "d.bin").read_bytes()[1:])
    assert len(list(MegatronRecords.open(at(prefix)).find_damage())) == 1
    with pytest.raises(DamagedData, match=r"d\.bin is damaged at byte 0"):
        MegatronRecords.open(at(prefix)).read([0])
    with pytest.raises(DamagedData, match=r"d\.bin is damaged at byte 0"):
        open_megatron_store(at(prefix)).rows(np.array([3]), 2)


def test_names_of_files() -> None:
    for name in ("a/b", "a/b.bin", "a/b.idx"):
        assert name_files(Path(name)) == (Path("a/b.bin"), Path("a/b.idx"))
    assert name_files(Path("a.v1_text")) == (Path("a.v1_text.bin"), Path("a.v1_text.idx"))


# --- samples


def test_samples_for_a_model(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    section = DataSection(kind="megatron", path=str(prefix), seq_len=4)
    windows = open_megatron(at(prefix), DataRequest(section, 0, "tokens", 65500))
    assert isinstance(windows, TokenWindows)
    assert windows.facts.description == f"33 tokens (uint16) in {tmp_path / 'd.bin'}"
    assert windows.batch(np.array([1]))["inputs"].tolist() == [[4, 100, 101, 102]]
    with pytest.raises(UserError, match="holds the token 65499"):
        open_megatron(at(prefix), DataRequest(section, 0, "tokens", 1000))
    packed = open_megatron(at(prefix), DataRequest(section.model_copy(update={"pack": True}), 0, "tokens", 65500))
    assert isinstance(packed, PackedDocuments)


# --- writing


@pytest.mark.parametrize(("dtype", "stored"), [("uint8", "uint8"), ("uint16", "uint16"), ("int64", "int32")])
def test_what_is_written_is_what_megatron_writes(tmp_path: Path, dtype: str, stored: str) -> None:
    documents = [[range(5)], [[]], [range(100, 107)], [[44]]]
    write(tmp_path / "expected", documents, stored)
    write_megatron_files(tmp_path / "found", (np.array(document[0], dtype) for document in documents))
    for suffix in (".bin", ".idx"):
        expected = (tmp_path / f"expected{suffix}").read_bytes()
        assert (tmp_path / f"found{suffix}").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "expected.bin",
        "expected.idx",
        "found.bin",
        "found.idx",
    ]


def test_a_token_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="document 1 holds the token 2147483648\n  allowed: 0 to 2147483647"):
        write_megatron_files(tmp_path / "d", iter([np.array([1]), np.array([2**31])]))
    with pytest.raises(UserError, match="document 0 holds the token -1"):
        write_megatron_files(tmp_path / "d", iter([np.array([-1])]))
    assert list(tmp_path.iterdir()) == []


# --- cost


def test_opening_does_not_depend_on_the_number_of_documents(tmp_path: Path) -> None:
    """Against what the index of a sample order costs, which Megatron builds at the first start: a pass over all."""
    count = 2_000_000
    lengths = np.random.default_rng(0).integers(1, 3, count).astype(np.int32)
    content = tmp_path / "d.bin"
    with content.open("wb") as stream:
        stream.truncate(2 * int(lengths.sum()))
    pointers, marks = np.cumsum(lengths, dtype=np.int64) * 2 - lengths * 2, np.arange(count + 1)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1)
    (tmp_path / "d.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + marks.tobytes())
    small = write(tmp_path / "small", DOCUMENTS)

    def measure(prefix: Path) -> float:
        costs = []
        for _ in range(5):
            start = time.process_time()
            open_megatron_store(at(prefix))
            costs.append(time.process_time() - start)
        return min(costs)

    start = time.process_time()
    ends = open_megatron_store(at(tmp_path / "d")).read_ends()
    all_of_it = time.process_time() - start
    assert len(ends) == count
    assert measure(tmp_path / "d") < all_of_it / 10
    assert measure(tmp_path / "d") < 10 * measure(small)


def test_a_copy_elsewhere_is_the_same_data(tmp_path: Path) -> None:
    write(tmp_path / "d", DOCUMENTS)
    (tmp_path / "copy").mkdir()
    for name in ("d.bin", "d.idx"):
        shutil.copy(tmp_path / name, tmp_path / "copy" / name)
    readers = [MegatronRecords.open(at(folder / "d")) for folder in (tmp_path, tmp_path / "copy")]
    assert readers[0].fingerprint == readers[1].fingerprint
