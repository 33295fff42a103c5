"""TensorBoard's event files: the bytes, an independent reader, and TensorBoard's own where it is installed."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from event_files import masked, read_scalars
from shardway.watch.trackers.tensorboard import FOLDER, TensorBoard, crc32c, frame


def write(folder: Path, id: str | None = None, first: int = 1, last: int = 3) -> str:
    tracker = TensorBoard({"folder": ""})
    id = tracker.start("a", folder, {}, id)
    tracker.rewind(first - 1)
    for step in range(first, last + 1):
        tracker.log(step, {"loss": 1.0 / step, "validation/loss": 2.5}, 1000.0 + step)
    tracker.finish("finished")
    return id


# --- what they hold


def test_the_checksum_is_that_of_the_standard() -> None:
    """RFC 3720, appendix B.4."""
    vectors = {bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E, b"123456789": 0xE3069283}
    assert {data: crc32c(data) for data in vectors} == vectors


def test_a_record_has_the_bytes_that_tensorflow_writes() -> None:
    """The first record of every file, but for its time."""
    content = bytes.fromhex("090000000000000000") + b"\x1a\x0dbrain.Event:2"
    assert frame(content) == bytes.fromhex("1800000000000000a37f4b22") + content + struct.pack("<I", masked(content))


def test_an_independent_reader_finds_every_value(tmp_path: Path) -> None:
    write(tmp_path)
    [path] = (tmp_path / FOLDER).iterdir()
    restart, *rows = read_scalars(path)
    assert restart == (1, {})
    assert [step for step, _ in rows] == [1, 2, 3]
    assert [values["loss"] for _, values in rows] == pytest.approx([1, 1 / 2, 1 / 3])
    assert {values["validation/loss"] for _, values in rows} == {2.5}


def test_what_is_not_finite_or_too_large_is_written(tmp_path: Path) -> None:
    tracker = TensorBoard({"folder": str(tmp_path / "all")})
    assert tracker.start("a", tmp_path, {}, None) == str(tmp_path / "all/a")
    tracker.log(2**40, {"a": math.nan, "b": math.inf, "c": 1e300, "d": -1e300}, 0.0)
    tracker.finish("finished")
    [path] = (tmp_path / "all/a").iterdir()
    [(step, values)] = read_scalars(path)
    assert step == 2**40
    assert math.isnan(values.pop("a"))
    assert values == {"b": math.inf, "c": math.inf, "d": -math.inf}


def test_tensorboard_reads_them_and_drops_what_was_undone(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    id = write(tmp_path, last=6)
    assert write(tmp_path, id, first=4, last=5) == id
    reader = accumulators.EventAccumulator(str(tmp_path / FOLDER))
    reader.Reload()
    assert reader.Tags()["scalars"] == ["loss", "validation/loss"]
    assert [each.step for each in reader.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert [each.value for each in reader.Scalars("loss")] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
