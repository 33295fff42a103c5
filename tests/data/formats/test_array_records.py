from __future__ import annotations

import gzip
import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.content import DataPath
from shardway.data.formats.arrays import ArrayRecords, IdxRecords
from shardway.data.formats.base import DamagedData, Records
from shardway.data.formats.indexes import make_sums
from shardway.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 2, 1, 0], np.uint8)
IMAGES_NAME, LABELS_NAME = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def opened(path: Path, reader: type[Records] = ArrayRecords) -> Any:
    return reader.open(DataPath("data.path", str(path)))


def refused(path: Path, reader: type[Records] = ArrayRecords) -> str:
    with pytest.raises(UserError) as caught:
        opened(path, reader)
    return str(caught.value)


def save(path: Path, **arrays: Any) -> Path:
    """As a .npz archive, or a folder of .npy files."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
        return path
    path.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    return path


def write_packed(path: Path) -> None:
    np.savez_compressed(path, x=PIXELS, y=LABELS)


def write_stored(path: Path) -> None:
    np.savez(path, x=PIXELS, y=LABELS)


def check_rows(records: Records, ids: list[int]) -> None:
    found = records.read(ids)
    assert [record["y"] for record in found] == LABELS[ids].tolist()
    assert all(type(record["y"]) is int for record in found)
    for number, record in zip(ids, found, strict=True):
        assert np.array_equal(record["x"], PIXELS[number])
        assert record["x"].dtype == np.uint8


@pytest.mark.parametrize("name", ["stored.npz", "packed.npz", "folder"])
def test_rows_are_read_in_any_order_and_after_pickling(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "packed.npz":
        write_packed(path)
    else:
        save(path, x=PIXELS, y=LABELS)
    records = opened(path)
    assert ArrayRecords.is_at(path)
    assert len(records) == 6
    assert records.fields == {"x": "uint8[5, 4]", "y": "int"}
    for each in (records, pickle.loads(pickle.dumps(records))):
        check_rows(each, [4, 0, 4, 5, 1])
        check_rows(each, [0, 1, 2])
    assert records.read([]) == []
    assert records.read([2], ("y", "nothing")) == [{"y": 2}]
    assert records.read([2, 3], ("nothing",)) == [{}, {}]
    with pytest.raises(UserError, match="there is no record 6; allowed: 0 to 5"):
        records.read([6])
    assert list(records.find_damage()) == []


@pytest.mark.parametrize("name", ["a.npz", "folder"])
def test_the_extent_of_a_record_is_its_bytes(tmp_path: Path, name: str) -> None:
    records = opened(save(tmp_path / name, x=PIXELS, y=LABELS))
    extent = records.extent(3)
    with extent.path.open("rb") as stream:
        stream.seek(extent.offset)
        assert stream.read(extent.size) == PIXELS[3].tobytes()


def test_one_npy_file_is_a_field_of_its_name(tmp_path: Path) -> None:
    np.save(tmp_path / "spectra.npy", np.arange(6.0).reshape(3, 2))
    records = opened(tmp_path / "spectra.npy")
    assert records.fields == {"spectra": "float64[2]"}
    assert [record["spectra"].tolist() for record in records.read([2, 0])] == [[4.0, 5.0], [0.0, 1.0]]


@pytest.mark.parametrize("name", ["a.npz", "packed.npz", "folder"])
def test_other_layouts_give_the_same_values(tmp_path: Path, name: str) -> None:
    arrays = {
        "fortran": np.asfortranarray(PIXELS),
        "big": np.arange(12).reshape(6, 2).astype(">i4"),
        "flag": LABELS > 0,
        "real": LABELS / 4,
        "word": np.array(["a", "bé", "c", "", "e", "f"]),
        "raw": np.array([b"a", b"b", b"cc", b"d", b"e", b"f"]),
        "none": np.zeros((6, 0)),
    }
    if name == "packed.npz":
        np.savez_compressed(tmp_path / name, **arrays)
    else:
        save(tmp_path / name, **arrays)
    records = opened(tmp_path / name)
    second = records.read([5, 1])[1]
    assert np.array_equal(second["fortran"], PIXELS[1])
    assert second["big"].dtype.isnative
    assert second["big"].tolist() == [2, 3]
    assert (second["flag"], second["real"], second["word"], second["raw"]) == (True, 0.25, "bé", b"b")
    assert second["none"].shape == (0,)
    kinds = records.fields
    assert [kinds[name] for name in ("flag", "real", "word", "raw")] == ["bool", "float", "text", "bytes"]


def test_a_row_may_be_written_to(tmp_path: Path) -> None:
    records = opened(save(tmp_path / "d", x=PIXELS, y=LABELS))
    first = records.read([0])[0]["x"]
    first += 1
    assert np.array_equal(records.read([0])[0]["x"], PIXELS[0])


def test_arrays_of_several_lengths_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x_train=PIXELS, x_test=PIXELS[:2])
    text = refused(path)
    assert "holds arrays of several lengths: x_train 6, x_test 2" in text
    assert "allowed: arrays whose first dimension is the same" in text


def test_arrays_that_cannot_be_records_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.npz")
    assert "has no .npy files" in refused(save(tmp_path / "empty"))
    assert "holds x.npy, a single value" in refused(save(tmp_path / "single", x=np.float64(3)))
    assert "holds x.npy, an array of the type datetime64[D]" in refused(
        save(tmp_path / "dates", x=np.array(["2026-01-01"], "datetime64[D]"))
    )
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    assert "holds objects.npy, an array of pickled objects" in refused(tmp_path / "objects.npy")
    with zipfile.ZipFile(tmp_path / "none.npz", "w") as archive:
        archive.writestr("notes.txt", "no array")
    assert "holds no arrays" in refused(tmp_path / "none.npz")


@pytest.mark.parametrize("write", [write_stored, write_packed])
@pytest.mark.parametrize("kept", [0, 1, 100, -1, -40])
def test_a_truncated_archive_is_refused(tmp_path: Path, write: Any, kept: int) -> None:
    path = tmp_path / "a.npz"
    write(path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "is not a .npz file that can be read: it is damaged, truncated or holds pickled objects" in refused(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "holds x.npy, which is not a NumPy file: its header cannot be read"),
        (b"hello, this is no array", "holds x.npy, which is not a NumPy file: its header cannot be read"),
        (None, "holds x.npy, which is truncated or damaged: shape [6, 5, 4] of uint8 needs 120 bytes, it holds 119"),
    ],
)
def test_a_damaged_npy_file_is_refused(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = save(tmp_path / "d", x=PIXELS, y=LABELS) / "x.npy"
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    assert text in refused(tmp_path / "d")


def test_a_file_that_is_cut_after_it_was_opened_is_damage(tmp_path: Path) -> None:
    records = opened(save(tmp_path / "d", x=PIXELS, y=LABELS))
    path = tmp_path / "d" / "x.npy"
    path.write_bytes(path.read_bytes()[:-30])
    check_rows(records, [0, 3, 2])
    with pytest.raises(DamagedData, match=rf"{path} is damaged at byte {128 + 100}: 20 bytes were expected"):
        records.read([1, 5])


def test_a_flipped_byte_of_a_compressed_array_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_packed(path)
    records = opened(path)
    content = bytearray(path.read_bytes())
    content[180] ^= 0xFF  # inside the first array
    path.write_bytes(bytes(content))
    with pytest.raises(DamagedData, match=r"a\.npz is damaged at byte 0: it cannot be decompressed"):
        records.read([0])
    assert any("byte 0: it cannot be decompressed" in line for line in records.find_damage())


def test_a_flipped_byte_of_an_archive_is_found_by_its_own_checksum(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=np.random.default_rng(0).random((6, 9000)), y=LABELS)
    content = bytearray(path.read_bytes())
    content[200_000] ^= 1
    path.write_bytes(bytes(content))
    found = list(opened(path).find_damage())
    assert found == [f"{path} is damaged at byte 0: Bad CRC-32 for file 'x.npy'"]


def test_a_flipped_byte_is_found_by_checksums(tmp_path: Path) -> None:
    records = opened(save(tmp_path / "d", x=PIXELS, y=LABELS))
    make_sums(tmp_path / "d", records.parts.files)
    path = tmp_path / "d" / "x.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DamagedData, match=r"x\.npy is damaged at byte 0: the checksum"):
        opened(tmp_path / "d").read([0])


@settings(max_examples=30)
@given(ids=st.lists(st.integers(0, 99), max_size=60), width=st.integers(0, 3))
def test_any_ids_give_their_rows(tmp_path_factory: pytest.TempPathFactory, ids: list[int], width: int) -> None:
    values = np.arange(100 * width, dtype=np.int32).reshape(100, width)
    records = opened(save(tmp_path_factory.mktemp("d"), v=values, n=np.arange(100)))
    found = records.read(ids)
    assert [record["n"] for record in found] == ids
    assert [record["v"].tolist() for record in found] == values[ids].tolist()


# --- idx


def write_idx(path: Path, array: np.ndarray) -> Path:
    content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_pair(folder: Path, part: str = "train", suffix: str = "", count: int = 6) -> Path:
    folder.mkdir(exist_ok=True)
    write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", PIXELS[:count])
    write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", LABELS[:count])
    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("named", ["", IMAGES_NAME, LABELS_NAME])
def test_idx_files_are_records_of_image_and_label(tmp_path: Path, suffix: str, named: str) -> None:
    write_pair(tmp_path, suffix=suffix)
    write_pair(tmp_path, "t10k", suffix, count=2)
    path = tmp_path / f"{named}{suffix}" if named else tmp_path
    assert IdxRecords.is_at(path)
    records = opened(path, IdxRecords)
    assert records.fields == {"image": "uint8[5, 4]", "label": "int"}
    ids = [5, 1, 1, 0]
    for number, record in zip(ids, pickle.loads(pickle.dumps(records)).read(ids), strict=True):
        assert np.array_equal(record["image"], PIXELS[number])
        assert record["label"] == LABELS[number]
    assert records.extent(2).offset == (0 if suffix else 16 + 40)
    assert list(records.find_damage()) == []


def test_the_test_part_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    assert len(opened(write_pair(tmp_path, "t10k", count=4), IdxRecords)) == 4


def test_a_lone_idx_file_is_one_field(tmp_path: Path) -> None:
    assert opened(write_idx(tmp_path / IMAGES_NAME, PIXELS), IdxRecords).fields == {"image": "uint8[5, 4]"}
    assert opened(write_idx(tmp_path / "any", PIXELS[0]), IdxRecords).fields == {"image": "uint8[4]"}
    assert opened(write_idx(tmp_path / "other", LABELS), IdxRecords).fields == {"label": "int"}


def test_what_is_no_idx_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none", IdxRecords)
    assert f"has no file {IMAGES_NAME} or {IMAGES_NAME}.gz" in refused(tmp_path, IdxRecords)
    assert not IdxRecords.is_at(tmp_path)
    write_idx(tmp_path / IMAGES_NAME, PIXELS)
    assert f"has no file {LABELS_NAME}" in refused(tmp_path, IdxRecords)
    write_idx(tmp_path / LABELS_NAME, LABELS[:5])
    assert "has 6 images but 5 labels" in refused(tmp_path, IdxRecords)
    for content in (b"", b"hello", b"\x1f\x8b", gzip.compress(b""), gzip.compress(b"hello")):
        (tmp_path / LABELS_NAME).write_bytes(content)
        assert f"holds {LABELS_NAME}, which " in refused(tmp_path, IdxRecords)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("kept", [0, 3, 10, 40, -9, -1])
def test_a_truncated_idx_file_is_refused(tmp_path: Path, suffix: str, kept: int) -> None:
    path = write_pair(tmp_path, suffix=suffix) / f"{IMAGES_NAME}{suffix}"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"holds {path.name}, which " in refused(tmp_path, IdxRecords)


def test_damage_inside_a_compressed_idx_file_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = write_pair(tmp_path, suffix=".gz") / f"{IMAGES_NAME}.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    records = opened(tmp_path, IdxRecords)
    with pytest.raises(DamagedData, match=r"idx3-ubyte\.gz is damaged at byte 0: it cannot be decompressed"):
        records.read([0])


def test_an_archive_of_another_writer_is_read(tmp_path: Path) -> None:
    """One with an extra field in the local header, as `numpy.savez` writes for sizes that may pass 4 GiB."""
    stream = io.BytesIO()
    np.save(stream, PIXELS)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("x.npy", "w", force_zip64=True) as member:
        member.write(stream.getvalue())
    assert np.array_equal(opened(tmp_path / "a.npz").read([3])[0]["x"], PIXELS[3])
