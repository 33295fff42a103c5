"""How two tensors differ, and what two checkpoints have that the other has not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pool import ranks
from runs import lone_rank, pool_ranks
from saved_tensors import read_whole, save_checkpoint
from shardway.checkpoint import reader
from shardway.checkpoint.catalog import PARTS, TensorEntry
from shardway.checkpoint.file_format import Damaged, FileChecksum, Manifest, write_manifest
from shardway.checkpoint.reader import (
    TensorDifference,
    TensorReader,
    Values,
    compare_values,
    find_differences,
    find_other_files,
)
from shardway.checkpoint.writer import write_tensors
from shardway.rundir.directory import RunDir
from trained import make_trained

INFINITE = float("inf")
PAIRS = {
    "the same": ([1.0, -2.0], [1.0, -2.0], (2, 0.0, 0.0)),
    "the same nan": ([1.0, float("nan")], [1.0, float("nan")], (2, 0.0, 0.0)),
    "one apart": ([1.0, -2.0, 8.0], [1.0, -2.0, 10.0], (2, 2.0, 0.2)),
    "signs of 0": ([0.0, 1.0], [-0.0, 1.0], (1, 0.0, 0.0)),
    "from 0": ([0.0], [0.5], (0, 0.5, 1.0)),
    "to nan": ([1.0, 2.0], [float("nan"), 3.0], (0, INFINITE, INFINITE)),
    "to infinity": ([INFINITE, 5.0], [-INFINITE, 5.0], (1, INFINITE, INFINITE)),
}


@pytest.mark.parametrize("block", [1, 2, 100])
@pytest.mark.parametrize("name", PAIRS)
def test_how_far_two_tensors_are_apart(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK", block)
    first, second, (same, absolute, relative) = PAIRS[name]
    found = compare_values(torch.tensor([first]), torch.tensor([second]))
    assert found == Values(len(first), same, absolute, relative)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.complex64])
def test_formats_of_all_widths_are_compared(dtype: torch.dtype) -> None:
    first, second = torch.tensor([1.0, 2.0, 4.0]).to(dtype), torch.tensor([1.0, 2.0, 3.0]).to(dtype)
    assert compare_values(first, second) == Values(3, 2, 1.0, 0.25)
    assert compare_values(first[0], second[0]) == Values(1, 1, 0.0, 0.0)
    assert compare_values(first[:0], second[:0]) == Values(0, 0, 0.0, 0.0)


def write(folder: Path, **tensors: object) -> TensorReader:
    """A checkpoint of tensors, and of what is none."""
    folder.mkdir(exist_ok=True)
    seals = write_tensors(folder, lone_rank(), {"model": dict(tensors)})
    write_manifest(folder, Manifest(1, 1, {}, seals))
    return TensorReader(folder)


def test_shapes_formats_and_names_are_told(tmp_path: Path) -> None:
    same, ones = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    first = write(tmp_path / "a", same=same, shape=ones, dtype=ones, gone=ones, words=["x", 1], other=["x"])
    second = write(tmp_path / "b", same=same, shape=ones[:1], dtype=ones.half(), new=ones, words=["x", 1], other=["y"])
    found = {each.name: each for each in find_differences(first, second, PARTS)}
    assert sorted(found) == ["model.dtype", "model.gone", "model.new", "model.other", "model.shape"]
    vector = TensorEntry("model.gone", (2,), "float32", 8)
    assert found["model.gone"] == TensorDifference("model.gone", vector, None)
    assert (found["model.new"].first, found["model.dtype"].second) == (
        None,
        TensorEntry("model.dtype", (2,), "float16", 4),
    )
    assert found["model.other"].first is not None
    assert found["model.other"].first.dtype == "value"
    assert list(find_differences(first, second, ["optimizer"])) == []


def test_what_was_changed_is_told(tmp_path: Path) -> None:
    reader = write(tmp_path, weight=torch.ones(2))
    (tmp_path / "rank-00000.bin").write_bytes(b"not them")
    with pytest.raises(Damaged, match=r"the content of rank-00000\.bin has changed"):
        reader.read("model.weight")
    (tmp_path / "tensors.json").write_bytes(b"nor this")
    with pytest.raises(Damaged, match=r"tensors\.json has 8 bytes"):
        TensorReader(tmp_path)


def seal(digest: str) -> FileChecksum:
    return FileChecksum(1, (digest,))


def test_files_of_other_libraries_are_compared_by_their_seals() -> None:
    first = Manifest(
        1, 1, {}, {"tensors.json": seal("a"), "rank-00000.bin": seal("a"), "zero/a": FileChecksum(3, ("b",))}
    )
    second = Manifest(
        1, 1, {}, {"tensors.json": seal("x"), "zero/a": FileChecksum(3, ("c",)), "zero/b": FileChecksum(4, ("d",))}
    )
    found = [(each.name, each.first, each.second) for each in find_other_files(first, second)]
    assert found == [("zero/a", 3, 3), ("zero/b", None, 4)]
    assert find_other_files(first, first) == []


@ranks(2)
def test_a_sharded_checkpoint_is_that_of_one_rank(rank: int, tmp_path: Path) -> None:
    run, alone = RunDir(tmp_path / "two"), RunDir(tmp_path / "one")
    trained = make_trained(pool_ranks(), (1, 2), steps=0)
    if rank == 0:
        run.create()
        alone.create()
    pool_ranks().barrier()
    save_checkpoint(run, pool_ranks(), trained, 1, {"step": 1})
    if rank == 0:
        save_checkpoint(alone, lone_rank(), make_trained(lone_rank(), steps=0), 1, {"step": 1})
        first, second = (TensorReader(each.checkpoint_path(1)) for each in (run, alone))
        assert list(find_differences(first, second, ["model"])) == []
        whole = read_whole(run.checkpoint_path(1))
        assert whole
        assert all(torch.equal(first.read(name), tensor) for name, tensor in whole.items())
        assert [each.name for each in find_differences(first, second, ["random"])][-1].startswith("random.rank-1.")
