"""A block is read and compared once, whatever little pieces of it are wanted."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch

from runs import lone_rank
from shardway.checkpoint import file_format
from shardway.checkpoint.catalog import PARTS
from shardway.checkpoint.file_format import (
    BlockReader,
    Chunk,
    Damaged,
    Manifest,
    TensorRow,
    TensorTable,
    checksum_bytes,
    checksum_file,
    write_manifest,
)
from shardway.checkpoint.reader import TensorReader, find_differences
from shardway.checkpoint.writer import write_tensors

BLOCK = 4096


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "BLOCK", BLOCK)


@pytest.fixture(name="read")
def _read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every read of a file: folder and name, first byte, bytes."""
    read: list[tuple[str, int, int]] = []
    fill = BlockReader._fill

    def noted(self: BlockReader, name: str, at: int, target: memoryview) -> str:
        read.append((f"{self._folder.name}/{name}", at, len(target)))
        return fill(self, name, at, target)

    monkeypatch.setattr(BlockReader, "_fill", noted)
    return read


def test_many_small_tensors_cost_one_reading_of_each_block(tmp_path: Path, read: list[tuple[str, int, int]]) -> None:
    """Names whose order is not that of the file, and tensors that lie across the end of a block."""
    tensors = {f"{number * 7919 % 1000:03d}": torch.arange(17.0) + number for number in range(300)}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        seals = write_tensors(tmp_path / name, lone_rank(), {"model": tensors})
        write_manifest(tmp_path / name, Manifest(1, 1, {}, seals))
        tensors = {**tensors, "919": torch.zeros(17)}
    first, second = (TensorReader(tmp_path / name) for name in ("a", "b"))
    assert [each.name for each in find_differences(first, second, PARTS)] == ["model.919"]
    size = (tmp_path / "a/rank-00000.bin").stat().st_size
    assert size == 300 * 17 * 4
    whole = [(at, min(BLOCK, size - at)) for at in range(0, size, BLOCK)]
    for name in ("a", "b"):
        assert [(at, length) for file, at, length in read if file == f"{name}/rank-00000.bin"] == whole


def shared_over_files(folder: Path, files: int, tensors: int, rows: int) -> TensorReader:
    """Tensors [files, rows] of which each file has one row, as a sharded run writes them."""
    folder.mkdir()
    made: dict[str, TensorRow] = {}
    data = {f"rank-{number:05d}.bin": bytearray() for number in range(files)}
    for index in range(tensors):
        chunks = []
        for number, (name, content) in enumerate(data.items()):
            chunks.append(Chunk(name, len(content), (number, 0), (1, rows)))
            content += (torch.arange(rows, dtype=torch.float32) + index * files + number).numpy().tobytes()
        made[f"model.{index:03d}"] = TensorRow("float32", (files, rows), tuple(chunks))
    for name, content in data.items():
        (folder / name).write_bytes(content)
    seals = {name: checksum_bytes(bytes(content)) for name, content in data.items()}
    seals[file_format.TABLE] = file_format.write_table(folder / file_format.TABLE, TensorTable(made, {}))
    write_manifest(folder, Manifest(1, files, {}, seals))
    return TensorReader(folder)


@pytest.mark.parametrize("files", [2, file_format.HELD, file_format.HELD + 3])
def test_files_that_are_read_side_by_side_are_read_once_too(
    files: int, tmp_path: Path, read: list[tuple[str, int, int]]
) -> None:
    """More of them than blocks are held: what is wanted is read again then, and not the blocks around it."""
    reader = shared_over_files(tmp_path / "a", files, tensors=40, rows=64)
    for index in range(40):
        found = reader.read(f"model.{index:03d}")
        expected = torch.arange(64.0) + (index * files + torch.arange(files)[:, None])
        assert torch.equal(found, expected)
    size = 40 * 64 * 4
    read = [each for each in read if each[0].endswith(".bin")]
    blocks_read = [each for each in read if each[1] % BLOCK == 0 and each[2] in (BLOCK, size % BLOCK)]
    assert len(blocks_read) == len(set(blocks_read)) == files * -(-size // BLOCK)
    assert sum(length for _, _, length in read) <= (files * size if files <= file_format.HELD else 2 * files * size)


def test_a_block_that_differs_hands_out_nothing(tmp_path: Path) -> None:
    data = bytearray(range(256)) * 40
    (tmp_path / "x").write_bytes(data)
    seals = {"x": checksum_file(tmp_path / "x")}
    data[BLOCK + 5] ^= 1
    (tmp_path / "x").write_bytes(data)
    reader, target = BlockReader(tmp_path, seals), bytearray(10)
    reader.read("x", BLOCK - 10, memoryview(target))
    assert bytes(target) == bytes(data[BLOCK - 10 : BLOCK])
    for at in (BLOCK, 2 * BLOCK - 1):
        with pytest.raises(Damaged, match="the content of x has changed"):
            reader.read("x", at, memoryview(bytearray(1)))
    with pytest.raises(Damaged, match="more are said to be in it"):
        reader.read("x", len(data) - 1, memoryview(bytearray(2)))
    with pytest.raises(Damaged, match="y is not in the manifest"):
        reader.read("y", 0, memoryview(bytearray(1)))
    (tmp_path / "x").write_bytes(data[:-1])
    with pytest.raises(Damaged, match="x has 10239 bytes"):
        reader.read("x", 2 * BLOCK, memoryview(bytearray(1)))


def test_no_more_blocks_than_said_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = 2**18
    monkeypatch.setattr(file_format, "BLOCK", block)
    (tmp_path / "x").write_bytes(bytes(9 * block))
    reader, target = BlockReader(tmp_path, {"x": checksum_file(tmp_path / "x")}, held=2), memoryview(bytearray(1))
    tracemalloc.start()
    try:
        for number in range(9):
            reader.read("x", number * block, target)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * block
    finally:
        tracemalloc.stop()


def test_parts_that_are_not_the_whole_tensor_are_damage(tmp_path: Path) -> None:
    reader = shared_over_files(tmp_path / "a", 2, tensors=1, rows=3)
    row = reader._table.tensors["model.000"]
    for changed in (TensorRow(row.dtype, (3, 3), row.chunks), TensorRow(row.dtype, (1, 6), row.chunks)):
        reader._table = TensorTable({"model.000": changed}, {})
        with pytest.raises(Damaged, match=r"its parts of model\.000 are not the whole of it"):
            reader.read("model.000")
