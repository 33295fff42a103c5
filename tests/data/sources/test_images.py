from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardway.data.content import DataPath
from shardway.data.kinds import IdxKind
from shardway.data.sources.base import DataRequest
from shardway.data.sources.images import Images, open_arrays, open_idx
from shardway.errors import UserError
from shardway.runfile.schema import DataSection

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 2, 1, 0], np.uint8)


def asked(path: Path, classes: int | None = None, **keys: Any) -> tuple[DataPath, DataRequest]:
    section = DataSection(kind="arrays", path=str(path), **keys)
    return DataPath("data.path", str(path)), DataRequest(section, 0, "images", classes=classes)


def save_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def save_idx(path: Path, array: np.ndarray, zipped: bool = False) -> Path:
    content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path


def save_pair(folder: Path, part: str = "train", suffix: str = "", count: int = 6) -> Path:
    save_idx(folder / f"{part}-images-idx3-ubyte{suffix}", PIXELS[:count], zipped=suffix == ".gz")
    save_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", LABELS[:count], zipped=suffix == ".gz")
    return folder


def refused(opener: Any, path: Path, classes: int | None = None, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        opener(*asked(path, classes, **keys))
    return str(caught.value)


def problem(text: str) -> str:
    return f"1 problem in the data\n  {text}"


def check_content(source: Images, mean: float, std: float) -> None:
    batch = source.batch(np.array([4, 0]))
    assert batch["inputs"].dtype == np.float32
    assert batch["inputs"].shape == (2, 1, 5, 4)
    np.testing.assert_allclose(batch["inputs"][:, 0], (PIXELS[[4, 0]] / 255.0 - mean) / std, rtol=0, atol=1e-6)
    assert batch["targets"].tolist() == [1, 0]
    assert batch["targets"].dtype == np.int64
    assert source.batch(np.empty(0, np.int64))["inputs"].shape == (0, 1, 5, 4)


def test_uint8_pixels_are_scaled_then_normalised(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "a.npz", x=PIXELS, y=LABELS)
    source = open_arrays(*asked(path, mean=0.1307, std=0.3081))
    check_content(source, 0.1307, 0.3081)
    assert len(source) == 6
    assert source.tokens_per_sample == 1
    assert source.facts.sample_shape == (1, 5, 4)
    assert (source.facts.classes, source.facts.vocab, source.facts.bytes_per_token) == (3, None, None)
    assert source.facts.description == f"6 images of shape [1, 5, 4], 3 classes, arrays x and y of {path}"


@pytest.mark.parametrize("shape", [(6, 20), (6, 3, 2, 4)])
def test_floating_inputs_are_only_normalised_and_keep_their_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).normal(size=shape)
    path = save_npz(tmp_path / "a.npz", images=values, labels=LABELS)
    source = open_arrays(*asked(path, inputs="images", targets="labels", mean=1.0, std=2.0))
    np.testing.assert_allclose(source.batch(np.arange(6))["inputs"], (values - 1.0) / 2.0, atol=1e-6)


def test_the_fingerprint_is_that_of_content_and_normalisation(tmp_path: Path) -> None:
    first = open_arrays(*asked(save_npz(tmp_path / "a.npz", x=PIXELS, y=LABELS))).facts.fingerprint
    assert open_arrays(*asked(save_npz(tmp_path / "b.npz", x=PIXELS, y=LABELS))).facts.fingerprint == first
    assert open_arrays(*asked(tmp_path / "a.npz", mean=0.5)).facts.fingerprint != first
    assert open_arrays(*asked(save_npz(tmp_path / "c.npz", x=PIXELS, y=np.roll(LABELS, 1)))).facts.fingerprint != first


def test_an_unknown_array_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "a.npz", images=PIXELS, labels=LABELS)
    assert refused(open_arrays, path, inputs="image", targets="labels") == problem(
        f'data.inputs: "image" is not an array of {path}\n'
        "      allowed: images, labels\n"
        '      to do: did you mean "images"?'
    )
    assert refused(open_arrays, path, inputs="images", targets="qqq") == problem(
        f'data.targets: "qqq" is not an array of {path}\n      allowed: images, labels'
    )


def test_a_missing_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    assert refused(open_arrays, path) == problem(f'data.path: "{path}" does not exist\n      allowed: a .npz file')


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[150] ^= 0xFF  # inside the first array, which the archive's checksum covers
    path.write_bytes(bytes(content))


def pickled(path: Path) -> None:
    np.savez(path, x=np.array([{}], dtype=object), y=LABELS)


def bare_array(path: Path) -> None:
    with path.open("wb") as stream:
        np.save(stream, PIXELS)


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, pickled, bare_array, lambda path: path.write_bytes(b"")])
def test_a_damaged_archive_is_refused(tmp_path: Path, damage: Any) -> None:
    path = save_npz(tmp_path / "a.npz", x=PIXELS, y=LABELS)
    damage(path)
    assert refused(open_arrays, path) == problem(
        f'data.path: "{path}" is not a .npz file that can be read: it is damaged, truncated or holds pickled objects\n'
        "      to do: write it with numpy.savez from plain arrays, or copy it again"
    )


@pytest.mark.parametrize(
    ("inputs", "targets", "classes", "text"),
    [
        (PIXELS[:5], LABELS, None, "has 5 inputs but 6 targets\n      allowed: one target for each input"),
        (PIXELS[:0], LABELS[:0], None, "has no samples"),
        (PIXELS.astype(np.int16), LABELS, None, "has inputs of type int16\n      allowed: uint8, or a floating type"),
        (
            PIXELS[:, 0, 0],
            LABELS,
            None,
            "has inputs of shape [6]\n      allowed: [N, features], [N, H, W], [N, C, H, W]",
        ),
        (PIXELS, LABELS[:, None], None, "has targets of type uint8, shape [6, 1]\n      allowed: integers [N]"),
        (PIXELS, LABELS * 1.0, None, "has targets of type float64, shape [6]\n      allowed: integers [N]"),
        (PIXELS, LABELS.astype(int) - 1, None, "has the target -1\n      allowed: 0 and above"),
        (
            PIXELS,
            LABELS,
            2,
            "has the target 2\n      allowed: 0 to 1, for 2 classes\n"
            "      to do: set model.classes to the number of classes of the data",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, inputs: np.ndarray, targets: np.ndarray, classes: int | None, text: str
) -> None:
    path = save_npz(tmp_path / "a.npz", x=inputs, y=targets)
    assert refused(open_arrays, path, classes) == problem(f'data.path: "{path}" {text}')


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_folder_of_npy_files_is_mapped(tmp_path: Path, order: Any) -> None:
    np.save(tmp_path / "x.npy", np.asarray(PIXELS, order=order))
    np.save(tmp_path / "y.npy", LABELS)
    source = open_arrays(*asked(tmp_path, mean=0.1307, std=0.3081))
    assert isinstance(source.inputs, np.memmap)
    check_content(source, 0.1307, 0.3081)
    check_content(pickle.loads(pickle.dumps(source)), 0.1307, 0.3081)
    single = open_arrays(*asked(save_npz(tmp_path / "a.npz", x=PIXELS, y=LABELS), mean=0.1307, std=0.3081))
    assert source.facts.fingerprint == single.facts.fingerprint


def test_a_mapped_source_is_pickled_as_its_place(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((500, 3, 20, 20), np.float32))
    np.save(tmp_path / "labels.npy", np.arange(500) % 7)
    source = open_arrays(*asked(tmp_path, inputs="images", targets="labels"))
    content = pickle.dumps(source)
    assert len(content) < 10_000
    found = pickle.loads(content)
    assert np.array_equal(found.batch(np.array([9]))["inputs"], source.batch(np.array([9]))["inputs"])


def test_a_folder_that_lacks_arrays_is_refused(tmp_path: Path) -> None:
    assert "has no .npy files" in refused(open_arrays, tmp_path)
    np.save(tmp_path / "y.npy", LABELS)
    assert f'data.inputs: "x" is not an array of {tmp_path}\n      allowed: y' in refused(open_arrays, tmp_path)
    np.save(tmp_path / "x.npy", PIXELS[:5])
    assert "has 5 inputs but 6 targets" in refused(open_arrays, tmp_path)
    np.save(tmp_path / "x.npy", PIXELS[:0])
    assert "has 0 inputs but 6 targets" in refused(open_arrays, tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read(tmp_path: Path, suffix: str) -> None:
    source = open_idx(*asked(save_pair(tmp_path, suffix=suffix), classes=10, mean=0.5, std=0.25))
    check_content(source, 0.5, 0.25)
    assert source.facts.classes == 10


def test_an_unpacked_idx_file_that_kept_its_gz_name_is_read(tmp_path: Path) -> None:
    save_pair(tmp_path, suffix=".gz")
    save_idx(tmp_path / "train-images-idx3-ubyte.gz", PIXELS)
    check_content(open_idx(*asked(tmp_path)), 0.0, 1.0)


def test_the_test_files_of_a_folder_are_its_validation_part(tmp_path: Path) -> None:
    save_pair(tmp_path)
    assert len(IdxKind().open_validation(*asked(tmp_path))) == 6
    save_pair(tmp_path, "t10k", count=4)
    assert len(IdxKind().open_validation(*asked(tmp_path))) == 4


def test_missing_idx_files_are_named(tmp_path: Path) -> None:
    assert refused(open_idx, tmp_path / "no") == problem(
        f'data.path: "{tmp_path / "no"}" is not a folder\n      allowed: the folder that holds the idx files'
    )
    save_idx(tmp_path / "train-images-idx3-ubyte", PIXELS)
    assert refused(open_idx, tmp_path) == problem(
        f'data.path: "{tmp_path}" has no file train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz'
    )


def test_an_idx_file_with_another_magic_is_refused(tmp_path: Path) -> None:
    save_pair(tmp_path)
    name = "train-images-idx3-ubyte"
    for content, start in ((b"hello", "68 65 6c 6c"), (b"\0\0\x0d\x03" + bytes(20), "00 00 0d 03"), (b"", "")):
        (tmp_path / name).write_bytes(content)
        assert refused(open_idx, tmp_path) == problem(
            f'data.path: "{tmp_path}" holds {name}, which is not an idx file of bytes with 3 dimensions: '
            f'it starts with "{start}"\n      allowed: "00 00 08 03"'
        )


@pytest.mark.parametrize(("kept", "shape", "held"), [(16 + 119, [6, 5, 4], 119), (10, [6, 0, 0], 0)])
def test_an_idx_file_of_another_size_is_refused(tmp_path: Path, kept: int, shape: list[int], held: int) -> None:
    name = "train-images-idx3-ubyte"
    path = save_pair(tmp_path) / name
    path.write_bytes(path.read_bytes()[:kept])
    text = refused(open_idx, tmp_path)
    assert f"holds {name}, which is truncated or damaged" in text
    if held:
        assert text == problem(
            f'data.path: "{tmp_path}" holds {name}, which is truncated or damaged: '
            f"shape {shape} needs 120 bytes, it holds {held}\n      to do: copy the file again"
        )


@pytest.mark.parametrize("position", ["end", "middle"])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, position: str) -> None:
    name = "train-images-idx3-ubyte.gz"
    path = save_pair(tmp_path, suffix=".gz") / name
    content = bytearray(path.read_bytes())
    if position == "end":
        content = content[:-20]
    else:
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    assert refused(open_idx, tmp_path) == problem(
        f'data.path: "{tmp_path}" holds {name}, which cannot be decompressed: it is truncated or damaged\n'
        "      to do: copy the file again"
    )
