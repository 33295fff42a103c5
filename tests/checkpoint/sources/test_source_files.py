"""Sources are recognised by what they are; what is damaged or would run code is refused in one message."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from runs import lone_rank
from shardway.checkpoint.file_format import Manifest, write_manifest
from shardway.checkpoint.import_weights import ForeignSource, open_source
from shardway.checkpoint.writer import write_tensors
from shardway.errors import UserError
from shardway.models.huggingface.weights import TensorRegion

WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.tensor(7, dtype=torch.int64)}


def write_safetensors(folder: Path) -> Path:
    folder.mkdir()
    save_file(WEIGHTS, folder / "anything.safetensors")
    return folder


def write_single(folder: Path) -> Path:
    return write_safetensors(folder).joinpath("anything.safetensors").rename(folder / "no ending")


def write_distributed(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**WEIGHTS, "epoch": 3}, checkpoint_id=folder, no_dist=True)
    return folder


def write_torch(folder: Path) -> Path:
    folder.mkdir()
    torch.save(WEIGHTS, folder / "model.bin")
    return folder / "model.bin"


def write_own(folder: Path) -> Path:
    folder.mkdir()
    seals = write_tensors(folder, lone_rank(), dict(WEIGHTS))
    write_manifest(folder, Manifest(1, 1, {}, seals))
    return folder


FORMS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "folder of safetensors": (write_safetensors, "safetensors"),
    "one file of safetensors": (write_single, "safetensors"),
    "distributed": (write_distributed, "a checkpoint of torch.distributed"),
    "torch.save": (write_torch, "a file of torch.save"),
    "own": (write_own, "a Shardway checkpoint"),
}


def read(source: ForeignSource, name: str, start: tuple[int, ...] = (), shape: tuple[int, ...] = ()) -> torch.Tensor:
    with source.open() as reader:
        return reader.read(name, TensorRegion(start, shape)).clone()


@pytest.mark.parametrize("form", FORMS)
def test_a_source_is_known_by_what_it_is_and_read_by_regions(form: str, tmp_path: Path) -> None:
    write, kind = FORMS[form]
    source = open_source(write(tmp_path / "source"))
    assert source.kind == kind
    found = {name: (each.shape, each.dtype) for name, each in source.tensors.items()}
    assert found == {"a.weight": ((3, 4), "float32"), "b": ((), "int64")}
    assert torch.equal(read(source, "a.weight", (1, 1), (2, 2)), WEIGHTS["a.weight"][1:3, 1:3])
    assert torch.equal(read(source, "b"), WEIGHTS["b"])


def test_parts_of_a_distributed_tensor_are_put_together(tmp_path: Path) -> None:
    """As ranks write them: two boxes in two files."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    weight, boxes, places = WEIGHTS["a.weight"], [], {}
    for number, (first, last) in enumerate(((0, 2), (2, 3))):
        torch.save(weight[first:last].clone(), tmp_path / f"__{number}_0.distcp")
        length = (tmp_path / f"__{number}_0.distcp").stat().st_size
        boxes.append(ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((last - first, 4))))
        places[MetadataIndex("a.weight", (first, 0))] = _StorageInfo(f"__{number}_0.distcp", 0, length)
    row = TensorStorageMetadata(TensorProperties(torch.float32), weight.shape, boxes)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"a.weight": row}, storage_data=places)))
    assert torch.equal(read(open_source(tmp_path), "a.weight", (0, 0), (3, 4)), weight)
    short = Metadata({"a.weight": TensorStorageMetadata(row.properties, row.size, boxes[:1])}, storage_data=places)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(short))
    with pytest.raises(UserError, match=r"the parts of a\.weight are not the whole of it"):
        open_source(tmp_path)
    places[MetadataIndex("a.weight", (0, 0))].relative_path = "../elsewhere"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"a.weight": row}, storage_data=places)))
    with pytest.raises(UserError, match="is said to be in another folder"):
        open_source(tmp_path)


class Harm:
    """Unpickled by Python, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def harm_torch(folder: Path, harm: Harm) -> Path:
    torch.save({**WEIGHTS, "more": harm}, folder / "model.pt")
    return folder / "model.pt"


def harm_pickle(folder: Path, harm: Harm) -> Path:
    (folder / "model.pt").write_bytes(pickle.dumps(harm))
    return folder / "model.pt"


def harm_metadata(folder: Path, harm: Harm) -> Path:
    write_distributed(folder / "made")
    (folder / "made/.metadata").write_bytes(pickle.dumps({"state_dict_metadata": harm}))
    return folder / "made"


def harm_distcp(folder: Path, harm: Harm) -> Path:
    """The metadata are good, and what they lead to is not."""
    write_distributed(folder / "made")
    path = folder / "made/__0_0.distcp"
    path.write_bytes(pickle.dumps(harm).ljust(path.stat().st_size, b"\0"))
    return folder / "made"


@pytest.mark.parametrize("write", [harm_torch, harm_pickle, harm_metadata, harm_distcp])
def test_what_would_run_code_is_refused_and_does_not_run(write: Callable[[Path, Harm], Path], tmp_path: Path) -> None:
    mark = tmp_path / "harm was done"
    with pytest.raises(UserError, match=r"could run code|is damaged \(__0_0\.distcp") as told:
        read(open_source(write(tmp_path, Harm(mark))), "a.weight", (0, 0), (3, 4))
    assert "Nothing was written. To do: " in str(told.value)
    assert not mark.exists()
    with pytest.raises(FileExistsError):  # that it would have run
        pickle.loads(pickle.dumps(Harm(tmp_path)))


@pytest.mark.parametrize("form", ["folder of safetensors", "one file of safetensors", "distributed", "torch.save"])
def test_a_file_that_came_in_part_is_told_when_it_is_opened(form: str, tmp_path: Path) -> None:
    path = FORMS[form][0](tmp_path / "source")
    largest = max(path.iterdir(), key=lambda each: each.stat().st_size) if path.is_dir() else path
    largest = path / "__0_0.distcp" if form == "distributed" else largest
    largest.write_bytes(largest.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"is damaged \(__0_0|cannot be read") as told:
        open_source(path)
    assert "again" in str(told.value)


def test_what_is_no_source_is_told_with_what_could_be(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("weights")
    (tmp_path / "empty").mkdir()
    for name, what in (("notes", "is no file of weights"), ("empty", "holds no weights"), ("gone", "cannot be read")):
        with pytest.raises(UserError, match=what) as told:
            open_source(tmp_path / name)
        assert "To do: name a folder or a file of safetensors" in str(told.value)
    with pytest.raises(UserError, match=r"--step 3: .* is no run directory"):
        open_source(write_torch(tmp_path / "torch"), 3)
