"""Parquet and Arrow files: rows that pyarrow and `datasets` wrote are read right, and damage is a clear message."""

from __future__ import annotations

import datetime
import io
import json
import pickle
import shutil
from collections.abc import Callable
from decimal import Decimal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardway.data.content import DataPath
from shardway.data.formats import columns, indexes
from shardway.data.formats.arrow_values import WrongValue, make_take, name_type
from shardway.data.formats.base import DamagedData, describe_file
from shardway.data.formats.columns import ColumnRecords
from shardway.data.formats.parquet import ArrowRecords, ParquetRecords
from shardway.data.formats.parquet_footer import parse_groups, parse_tail
from shardway.data.formats.splits import find_split
from shardway.errors import ShardwayError, UserError

RECORDED = Path(__file__).parents[2] / "recorded" / "data" / "hf"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache folder of one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def place(path: Path | str) -> DataPath:
    return DataPath("data.path", str(path))


def write_parquet(path: Path, table: pa.Table, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **{"row_group_size": 3, **options})


def write_stream(path: Path, table: pa.Table, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=3)


def write_file(path: Path, table: pa.Table, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=3)


KINDS: list[tuple[type[ColumnRecords], Callable[..., None], str]] = [
    (ParquetRecords, write_parquet, "parquet"),
    (ArrowRecords, write_stream, "arrow"),
    (ArrowRecords, write_file, "arrow"),
]
each_kind = pytest.mark.parametrize(("reader", "write", "end"), KINDS, ids=["parquet", "stream", "file"])


def refusal(reader: type[ColumnRecords], path: Path) -> str:
    with pytest.raises(UserError) as caught:
        reader.open(place(path))
    return str(caught.value)


def damage(records: ColumnRecords, number: int) -> str:
    with pytest.raises(DamagedData) as caught:
        records.read([number])
    return str(caught.value).splitlines()[0]


def rows(first: int, end: int) -> pa.Table:
    numbers = range(first, end)
    return pa.table(
        {
            "text": pa.array([None if i == 4 else f"row {i} é" for i in numbers], pa.string()),
            "blob": pa.array([bytes([i]) * i for i in numbers], pa.binary()),
            "tokens": pa.array([list(range(i)) for i in numbers], pa.list_(pa.int32())),
            "label": pa.array(numbers, pa.int64()),
            "image": pa.array([{"bytes": b"x" * i, "path": None} for i in numbers],
                              pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        }
    )  # fmt: skip


def row(i: int) -> dict[str, Any]:
    return {
        "text": None if i == 4 else f"row {i} é",
        "blob": bytes([i]) * i,
        "tokens": list(range(i)),
        "label": i,
        "image": {"bytes": b"x" * i, "path": None},
    }


def plain(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With arrays as lists, which compare."""
    return [{**record, "tokens": record["tokens"].tolist()} for record in records]


# --- reading


@each_kind
def test_reads_rows_of_several_files_in_any_order(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    write(tmp_path / "data" / f"train-00000-of-00003.{end}", rows(0, 7))
    write(tmp_path / "data" / f"train-00001-of-00003.{end}", rows(0, 0))
    write(tmp_path / "data" / f"train-00002-of-00003.{end}", rows(7, 20))
    records = reader.open(place(tmp_path))
    assert len(records) == 20
    assert records.fields == {
        "text": "text", "blob": "bytes", "tokens": "int32[]", "label": "int", "image": "object"
    }  # fmt: skip
    ids = [19, 0, 7, 7, 6, 3, 4, 19, 8, 0]
    found = records.read(ids)
    assert plain(found) == [row(i) for i in ids]
    assert found[0]["tokens"].dtype == np.int32
    found[0]["tokens"][0] = 7  # an array of its own
    assert records.read([19])[0]["tokens"][0] == 0
    assert records.read([5, 1], ["label", "none"]) == [{"label": 5}, {"label": 1}]
    assert records.read([]) == []
    assert list(records.find_damage()) == []
    for wrong in (20, -1):
        with pytest.raises(UserError, match=f"no record {wrong}"):
            records.read([0, wrong])


@each_kind
def test_extents_are_groups_of_rows(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    write(tmp_path / f"a.{end}", rows(0, 7))
    records = reader.open(place(tmp_path / f"a.{end}"))
    extents = [records.extent(i) for i in range(7)]
    assert extents[0] == extents[2] != extents[3] == extents[5] != extents[6]
    assert extents[0].path == tmp_path / f"a.{end}"
    assert extents[0].offset + extents[0].size == extents[3].offset
    assert extents[6].offset + extents[6].size <= (tmp_path / f"a.{end}").stat().st_size


def read_in_child(records: ColumnRecords, ids: list[int]) -> list[dict[str, Any]]:
    return records.read(ids)


@each_kind
def test_a_pickled_reader_reads_in_another_process(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    write(tmp_path / f"a.{end}", rows(0, 7))
    records = reader.open(place(tmp_path))
    records.read([0])
    for way in ("spawn", "fork"):
        with get_context(way).Pool(1) as pool:
            assert plain(pool.apply(read_in_child, (records, [6, 1]))) == [row(6), row(1)]


@each_kind
def test_pickling_keeps_no_open_file(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    write(tmp_path / f"a.{end}", rows(0, 7))
    records = reader.open(place(tmp_path))
    records.read(range(7))
    again = pickle.loads(pickle.dumps(records))
    assert plain(again.read([6, 2])) == [row(6), row(2)]
    assert again.fingerprint == records.fingerprint
    assert len(pickle.dumps(records)) < 5000


@each_kind
def test_the_index_is_made_once_and_few_groups_are_kept(
    tmp_path: Path,
    reader: type[ColumnRecords],
    write: Callable[..., None],
    end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / f"a.{end}", rows(0, 20))
    reader.open(place(tmp_path))
    monkeypatch.setattr("shardway.data.formats.parquet.make_groups_index", None)
    monkeypatch.setattr(columns, "GROUP_BYTES", 1)
    monkeypatch.setattr(columns, "_MAPPED_GROUPS", 2)
    records = reader.open(place(tmp_path))
    assert plain(records.read(range(20))) == [row(i) for i in range(20)]
    assert len(records._loaded) == 2
    assert plain(records.read([0, 19])) == [row(0), row(19)]


EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
VALUES: list[tuple[pa.Array, list[Any], str]] = [
    (pa.array([1.5, None, 3.0], pa.float32()), [1.5, None, 3.0], "float"),
    (pa.array([1.5, None, 3.0], pa.float16()), [1.5, None, 3.0], "float"),
    (pa.array([2**64 - 1, 0, None], pa.uint64()), [2**64 - 1, 0, None], "int"),
    (pa.array([True, None, False]), [True, None, False], "bool"),
    (pa.array(["é", None, ""], pa.large_string()), ["é", None, ""], "text"),
    (pa.array([b"\xff", None, b""], pa.large_binary()), [b"\xff", None, b""], "bytes"),
    (pa.array([[1, 2], [], None], pa.large_list(pa.int8())), [[1, 2], [], None], "int8[]"),
    (pa.array([[1, None], [3], None], pa.list_(pa.int64())), [[1, None], [3], None], "int64[]"),
    (pa.array([["a", None], [], None], pa.list_(pa.string())), [["a", None], [], None], "list"),
    (pa.array([[[1], []], [], None], pa.list_(pa.list_(pa.int16()))), [[[1], []], [], None], "list"),
    (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.float32(), 2)), [[1, 2], None, [3, 4]], "float32[2]"),
    (pa.array([{"a": {"b": [1]}}, None, {"a": None}]), [{"a": {"b": [1]}}, None, {"a": None}], "object"),
    (pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"], "text"),
    (pa.nulls(3), [None, None, None], "null"),
    (pa.array([Decimal("1.50"), None, Decimal("2.00")]), [Decimal("1.50"), None, Decimal("2.00")], "decimal128(3, 2)"),
    (
        pa.array([1_000_000_001, None, 0], pa.timestamp("ns", "UTC")),
        [EPOCH + datetime.timedelta(seconds=1), None, EPOCH],
        "timestamp[ns, tz=UTC]",
    ),
    (pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())), [[("k", 1)], None, []], "map<string, int64>"),
]  # fmt: skip


def lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [lists(each) for each in value]
    return {name: lists(each) for name, each in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(("array", "values", "name"), VALUES, ids=[str(array.type)[:30] for array, _, _ in VALUES])
def test_values_of_each_type(tmp_path: Path, array: pa.Array, values: list[Any], name: str) -> None:
    assert name_type(array.type) == name
    longer = pa.concat_arrays([array, array])  # a slice begins anywhere, also inside of a byte of the mask
    for cut in (longer.slice(1, 4), pa.concat_arrays([longer, longer, longer]).slice(11, 4)):
        want = (values * 6)[1 if cut.offset == 1 else 11 :][:4]
        assert [lists(value) for value in make_take(cut)([3, 0, 1, 2, 0])] == [want[i] for i in (3, 0, 1, 2, 0)]
    table = pa.table({"x": longer})
    for reader, write, end in KINDS:
        path = tmp_path / write.__name__ / f"a.{end}"
        write(path, table)
        found = reader.open(place(path)).read([5, 0, 1, 2, 3])
        assert [lists(record["x"]) for record in found] == [values[i] for i in (2, 0, 1, 2, 0)]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_tensor_keeps_its_shape(tmp_path: Path, order: Any) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    if order == "F":
        values = np.asarray([np.asfortranarray(value) for value in values]).transpose(0, 2, 1)
    table = pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(values)})
    for reader, write, end in KINDS:
        path = tmp_path / write.__name__ / f"a.{end}"
        write(path, table)
        records = reader.open(place(path))
        found = [record["x"] for record in records.read([1, 0])]
        assert records.fields == {"x": f"float32{list(values.shape[1:])}"}
        assert np.array_equal(found, values[::-1])


ITEMS = st.one_of(
    st.tuples(st.just(pa.list_(pa.int32())), st.lists(st.one_of(st.none(), st.lists(st.integers(-9, 9), max_size=4)))),
    st.tuples(st.just(pa.string()), st.lists(st.one_of(st.none(), st.text(max_size=4)))),
    st.tuples(
        st.just(pa.struct([("a", pa.list_(pa.string())), ("b", pa.bool_())])),
        st.lists(
            st.one_of(
                st.none(),
                st.fixed_dictionaries(
                    {"a": st.none() | st.lists(st.none() | st.text(max_size=2)), "b": st.none() | st.booleans()}
                ),
            )
        ),
    ),
)


@given(ITEMS, st.data())
def test_values_are_those_of_pyarrow(items: tuple[pa.DataType, list[Any]], data: Any) -> None:
    array = pa.array(items[1], items[0])
    start = data.draw(st.integers(0, len(array)))
    part = array.slice(start, data.draw(st.integers(0, len(array) - start)))
    numbers = data.draw(st.lists(st.integers(0, len(part) - 1), max_size=5)) if len(part) else []
    assert [lists(value) for value in make_take(part)(numbers)] == [part[i].as_py() for i in numbers]


def test_a_column_in_pieces() -> None:
    pieces = [pa.array(["a", "b"]), pa.array([], pa.string()), pa.array(["c"])]
    assert columns.take_chunks(pieces)([2, 0, 1, 2]) == ["c", "a", "b", "c"]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_batches(tmp_path: Path, codec: str) -> None:
    write_file(tmp_path / "a.feather", rows(0, 7), compression=codec)
    assert plain(ArrowRecords.open(place(tmp_path)).read([6, 0])) == [row(6), row(0)]


def test_views_of_text(tmp_path: Path) -> None:
    words = ["a", None, "longer than twelve bytes"]
    write_file(tmp_path / "a.arrow", pa.table({"x": pa.array(words, pa.string_view())}))
    records = ArrowRecords.open(place(tmp_path))
    assert records.fields == {"x": "text"}
    assert [record["x"] for record in records.read([2, 1, 0])] == words[::-1]


def test_a_date_that_python_has_not_is_a_message(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"x": pa.array([2**60], pa.timestamp("us"))}))
    assert 'field "x": a value of type timestamp[us] is none that Python has' in damage(
        ParquetRecords.open(place(tmp_path)), 0
    )


def test_names_with_dots(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"a": [{"b": 1}], "a.b": [2], "c": [3]}))
    records = ParquetRecords.open(place(tmp_path))
    assert records.read([0]) == [{"a": {"b": 1}, "a.b": 2, "c": 3}]
    assert records.read([0], ["a.b"]) == [{"a.b": 2}]
    assert records.read([0], ["a"]) == [{"a": {"b": 1}}]


def test_the_footer_is_read_as_pyarrow_reads_it(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows(0, 20), use_dictionary=["text"], write_page_index=True)
    content, expected = (tmp_path / "a.parquet").read_bytes(), pq.read_metadata(tmp_path / "a.parquet")
    length = parse_tail(content[-8:])
    found, offsets, sizes = parse_groups(content[-8 - length : -8])
    groups = [expected.row_group(i) for i in range(expected.num_row_groups)]
    assert found == [group.num_rows for group in groups]
    chunks = [[group.column(i) for i in range(group.num_columns)] for group in groups]
    assert offsets == [min(chunk.dictionary_page_offset or chunk.data_page_offset for chunk in each) for each in chunks]
    assert sizes == [sum(chunk.total_compressed_size for chunk in each) for each in chunks]


# --- which files


def test_is_at(tmp_path: Path) -> None:
    write_parquet(tmp_path / "p" / "data" / "a.parquet", rows(0, 1))
    write_stream(tmp_path / "a" / "a.arrow", rows(0, 1))
    assert ParquetRecords.is_at(tmp_path / "p")
    assert ParquetRecords.is_at(tmp_path / "p" / "data" / "a.parquet")
    assert ParquetRecords.is_at(tmp_path / "p" / "data" / "*.parquet")
    assert not ParquetRecords.is_at(tmp_path / "a")
    assert ArrowRecords.is_at(tmp_path / "a")
    assert ArrowRecords.is_at(RECORDED / "dict")
    assert not ArrowRecords.is_at(tmp_path / "p")
    assert not ArrowRecords.is_at(tmp_path / "none")


@each_kind
def test_missing_empty_and_mixed(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    assert "does not exist" in refusal(reader, tmp_path / f"none.{end}")
    (tmp_path / "empty").mkdir()
    assert "has no" in refusal(reader, tmp_path / "empty")
    write(tmp_path / "rows" / f"a.{end}", rows(0, 0))
    assert "holds no records: its files have 0 rows" in refusal(reader, tmp_path / "rows")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / "splits" / f"{name}.{end}", rows(0, 2))
    found = refusal(reader, tmp_path / "splits")
    assert "holds more than one split: train (2 files, such as train-00000-of-00002" in found
    assert f'name the files of one, such as "{tmp_path}/splits/train-*.{end}"' in found
    assert len(reader.open(place(tmp_path / "splits" / f"train-*.{end}"))) == 4
    (tmp_path / "splits" / f"train-00001-of-00002.{end}").unlink()
    assert f"lacks 1 of 2 files: train-00001-of-00002.{end}" in refusal(reader, tmp_path / "splits" / f"train-*.{end}")


def test_names_of_splits() -> None:
    names = ("train-00000", "data/Train.x", "my_val.x", "x/dev/a", "test", "trainer", "train-test", "contest", "eval-1")
    assert [find_split(name) for name in names] == [
        "train", "train", "validation", "validation", "test", "", "", "", "test"
    ]  # fmt: skip


@each_kind
def test_files_with_other_fields_are_refused_with_both_names(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    def both(first: dict[str, Any], second: dict[str, Any]) -> Path:
        for name, values in (("a", first), ("b", second)):
            write(tmp_path / f"{name}.{end}", pa.table(values))
        return tmp_path

    assert f'"x" is int64 in a.{end} and string in b.{end}' in refusal(reader, both({"x": [1]}, {"x": ["1"]}))
    assert f'a.{end} has "y", and b.{end} has not' in refusal(reader, both({"x": [1], "y": [1]}, {"x": [1]}))
    assert f'b.{end} has "y", and a.{end} has not' in refusal(reader, both({"x": [1]}, {"x": [1], "y": [1]}))
    records = reader.open(place(both({"x": [1], "y": ["a"]}, {"y": pa.nulls(1), "x": [2]})))
    assert records.read([1, 0]) == [{"x": 2, "y": None}, {"x": 1, "y": "a"}]
    write(tmp_path / f"b.{end}", pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"]))
    assert "two fields of one name" in refusal(reader, tmp_path / f"b.{end}")


# --- damage


@each_kind
def test_truncated_files_are_refused(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    path = tmp_path / f"a.{end}"
    write(path, rows(0, 7))
    whole = path.read_bytes()
    for kept in [0, 1, 5, 8, 9, *range(10, len(whole), 97), len(whole) - 8, len(whole) - 1]:
        path.write_bytes(whole[:kept])
        assert f"a.{end}" in refusal(reader, path)
    path.write_bytes(b"x" * 1000)
    assert f"a.{end}" in refusal(reader, path)


def test_messages_of_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, rows(0, 7))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert f"no Parquet file, or not all of one: a.parquet ({len(whole) - 9} bytes)" in refusal(ParquetRecords, path)
    path.write_bytes(b"")
    assert "has an empty file: a.parquet has 0 bytes" in refusal(ParquetRecords, path)
    path = tmp_path / "a.arrow"
    write_stream(path, rows(0, 7))
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    assert f"{path} is damaged at byte {len(whole) - 8}: the stream has no end mark" in refusal(ArrowRecords, path)
    path.write_bytes(whole + whole)
    assert f"the stream ends there, and {len(whole)} bytes follow" in refusal(ArrowRecords, path)


def test_a_damaged_page_names_file_offset_and_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, rows(0, 7), write_page_checksum=True, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"row 5", b"row 6"))
    records = ParquetRecords.open(place(path))
    assert records.read([5], ["label"]) == [{"label": 5}]
    offset = records.extent(5).offset
    assert f"{path} is damaged at byte {offset}: group 1 (3 rows): " in damage(records, 5)
    assert len(list(records.find_damage())) == 1
    assert plain(records.read([6])) == [row(6)]


@each_kind
def test_checksums_find_a_flipped_bit(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    path = tmp_path / f"a.{end}"
    write(path, rows(0, 7), **({"compression": "none"} if end == "parquet" else {}))
    indexes.make_sums(tmp_path, [describe_file(tmp_path, path.name)])
    assert plain(reader.open(place(path)).read([6, 0])) == [row(6), row(0)]
    records = pickle.loads(pickle.dumps(reader.open(place(path))))  # as in a process that has checked nothing yet
    content = path.read_bytes()
    path.write_bytes(content.replace(b"row 5", b"row 6"))
    assert "checksum" in damage(records, 5)
    assert any("checksum" in line for line in records.find_damage())


@each_kind
def test_a_file_that_has_become_shorter(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    path = tmp_path / f"a.{end}"
    write(path, rows(0, 7))
    records = reader.open(place(path))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    assert f"the file has {size - 100} bytes, and {size} were expected" in damage(records, 0)


def test_offsets_that_lead_elsewhere_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_stream(path, pa.table({"x": ["ab", "cd", "ef"]}))
    whole = path.read_bytes()
    good = np.array([0, 2, 4, 6], np.int32).tobytes()
    path.write_bytes(whole.replace(good, np.array([0, 2, 1 << 30, 6], np.int32).tobytes()))
    records = ArrowRecords.open(place(path))
    assert 'group 0 (3 rows): field "x": row 1 would go from byte 2 to 1073741824 of 6' in damage(records, 1)
    path.write_bytes(whole.replace(b"abcdef", b"ab\xff\xffef"))
    records = ArrowRecords.open(place(path))
    assert "the text of row 1 is not UTF-8" in damage(records, 1)
    assert records.read([0, 2]) == [{"x": "ab"}, {"x": "ef"}]
    assert [line.partition(":")[0] for line in records.find_damage()] == ["row 1"]


def test_a_dictionary_that_lacks_a_word() -> None:
    indices = pa.array([0, 5], pa.int32())
    array = pa.DictionaryArray.from_arrays(indices, pa.array(["a"]), safe=False)
    with pytest.raises(WrongValue, match="word 5 of a dictionary of 1"):
        make_take(array)([1])


@each_kind
def test_flipped_bits_end_in_a_message_or_in_values(
    tmp_path: Path, reader: type[ColumnRecords], write: Callable[..., None], end: str
) -> None:
    path = tmp_path / f"a.{end}"
    write(path, rows(0, 4))
    whole = path.read_bytes()
    for number in np.random.default_rng(0).integers(0, len(whole), 60).tolist():
        shutil.rmtree(tmp_path / ".shardway", ignore_errors=True)
        path.write_bytes(whole[:number] + bytes([whole[number] ^ 0x80]) + whole[number + 1 :])
        try:
            records = reader.open(place(path))
            assert len(records.read(range(len(records)))) == len(records)
        except ShardwayError as error:
            assert "a." + end in str(error)


# --- folders of `datasets`


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A copy of what `datasets` wrote."""
    return shutil.copytree(RECORDED, tmp_path / "hf")


def row_of_datasets(i: int) -> dict[str, Any]:
    return {"text": f"row {i} é", "ids": list(range(i)), "y": i / 2}


def lists_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [lists(record) for record in records]


def test_a_saved_folder(recorded: Path) -> None:
    records = ArrowRecords.open(place(recorded / "shards"))
    assert records.fields == {"text": "text", "ids": "int64[]", "y": "float"}
    assert lists_of(records.read([9, 0, 4, 9])) == [row_of_datasets(i) for i in (9, 0, 4, 9)]
    assert [file.name for file in records.parts.files] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    assert list(records.find_damage()) == []


def test_a_saved_folder_is_in_the_order_that_it_states(recorded: Path) -> None:
    first = ArrowRecords.open(place(recorded / "shards")).fingerprint
    path = recorded / "shards" / "state.json"
    state = json.loads(path.read_bytes())
    state["_data_files"].reverse()
    path.write_text(json.dumps(state))
    records = ArrowRecords.open(place(recorded / "shards"))
    assert [record["y"] for record in records.read(range(10), ["y"])] == [3.5, 4, 4.5, 2, 2.5, 3, 0, 0.5, 1, 1.5]
    assert records.fingerprint != first


def test_images_are_as_they_lie_there(recorded: Path) -> None:
    records = ArrowRecords.open(place(recorded / "images"))
    (found,) = records.read([1])
    assert found["label"] == 1
    assert Image.open(io.BytesIO(found["image"]["bytes"])).getpixel((0, 0)) == (1, 0, 0)
    assert records.fields == {"image": "object", "label": "int"}


def test_a_folder_of_splits_is_refused(recorded: Path) -> None:
    found = refusal(ArrowRecords, recorded / "dict")
    assert "is a DatasetDict with the splits train, test" in found
    assert f'name the folder of one, such as "{recorded}/dict/train"' in found
    assert len(ArrowRecords.open(place(recorded / "dict" / "train"))) == 10


def test_a_cache_with_several_splits_is_refused(recorded: Path) -> None:
    found = refusal(ArrowRecords, recorded / "cache")
    assert f'such as "{recorded}/cache/json-train.arrow"' in found
    assert ArrowRecords.open(place(recorded / "cache" / "json-train.arrow")).read([0, 1]) == [{"a": 1}, {"a": 2}]
    (recorded / "cache" / "json-test.arrow").unlink()
    assert len(ArrowRecords.open(place(recorded / "cache"))) == 2  # what `map` left there is no part of it
    write_stream(recorded / "cache" / "json-extra.arrow", pa.table({"a": [1]}))
    assert "holds 2 sets of files: json-extra, json-train" in refusal(ArrowRecords, recorded / "cache")


def add_indices(folder: Path, table: pa.Table) -> None:
    write_stream(folder / "indices.arrow", table)
    state = json.loads((folder / "state.json").read_bytes())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))


def test_a_selection_kept_as_indices_is_respected(recorded: Path) -> None:
    folder = recorded / "shards"
    add_indices(folder, pa.table({"indices": pa.array([9, 2, 2, 5], pa.uint64())}))
    records = ArrowRecords.open(place(folder))
    assert len(records) == 4
    assert lists_of(records.read([1, 0, 3, 2])) == [row_of_datasets(i) for i in (2, 9, 5, 2)]
    assert records.extent(0).path.name == "data-00002-of-00003.arrow"
    assert list(records.find_damage()) == []
    with pytest.raises(UserError, match="no record 4"):
        records.read([4])
    assert pickle.loads(pickle.dumps(records)).read([0], ["y"]) == [{"y": 4.5}]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pa.table({"indices": pa.array([3, 10], pa.uint64())}), "selects row 10, and its files have 10 rows"),
        (pa.table({"indices": pa.array([], pa.uint64())}), "it selects no row"),
        (pa.table({"other": [1]}), 'a selection without the column "indices"'),
    ],
)
def test_wrong_selections(recorded: Path, table: pa.Table, said: str) -> None:
    add_indices(recorded / "shards", table)
    assert said in refusal(ArrowRecords, recorded / "shards")


def test_wrong_states(recorded: Path) -> None:
    folder = recorded / "shards"
    (folder / "data-00001-of-00003.arrow").unlink()
    assert "lacks 1 of 3 files that its state.json lists: data-00001" in refusal(ArrowRecords, folder)
    for text, said in (
        ("{", "has a damaged state.json"),
        ("[]", "is no JSON object"),
        ("{}", "lists no files"),
        ('{"_data_files": [1]}', "is no list of files"),
    ):
        (folder / "state.json").write_text(text)
        assert said in refusal(ArrowRecords, folder)
