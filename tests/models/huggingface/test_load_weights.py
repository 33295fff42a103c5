"""Weights come from files as they were written, a rank reads no more than it holds, and misfits are all told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pool import ranks
from shardway.errors import UserError
from shardway.models.huggingface import weights as files_module
from shardway.models.huggingface.weights import (
    ExpertNames,
    RegionReader,
    TensorRegion,
    WeightFiles,
    find_weights,
    fit_weights,
    keep_names,
    load_weights,
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 5, bias=False)
        self.scale = nn.Parameter(torch.zeros(()))


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(p.shape, generator=generator) for name, p in Small().named_parameters()}


def write(folder: Path, tensors: dict[str, torch.Tensor], parts: int = 1) -> Path:
    """The tensors in so many files, with an index where there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    if parts == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{part}.safetensors" for part in range(parts)]
    placed = {name: names[index % parts] for index, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensor for name, tensor in tensors.items() if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def found(folder: Path) -> WeightFiles:
    files = find_weights(folder)
    assert files is not None
    return files


@pytest.mark.parametrize("parts", [1, 3])
def test_a_model_takes_the_values_of_the_files(tmp_path: Path, parts: int) -> None:
    files, model = found(write(tmp_path, values(), parts)), Small()
    load_weights(model, fit_weights(model, files, keep_names))
    assert all(torch.equal(parameter, values()[name]) for name, parameter in model.named_parameters())


def test_values_are_converted_to_the_format_of_the_parameter(tmp_path: Path) -> None:
    halves = {name: value.to(torch.bfloat16) for name, value in values().items()}
    model = Small()
    load_weights(model, fit_weights(model, found(write(tmp_path, halves)), keep_names))
    assert model.up.weight.dtype == torch.float32
    assert torch.equal(model.up.weight, halves["up.weight"].float())


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, values(), parts=2)
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert set(found(tmp_path).shapes) == set(values())


def test_a_folder_with_a_config_alone_has_no_weights(tmp_path: Path) -> None:
    assert find_weights(tmp_path) is None


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    tensors = values()
    del tensors["down.weight"]
    tensors |= {"up.weight": torch.zeros(4, 6), "rotary.inv_freq": torch.zeros(1)}
    tensors |= {f"extra.{index}": torch.zeros(1) for index in range(10)}
    with pytest.raises(UserError) as told:
        fit_weights(Small(), found(write(tmp_path, tensors)), keep_names, spare=("*.inv_freq",))
    remedy = "\n      to do: fetch the model again, or correct config.json: they are not of the same model"
    assert str(told.value) == (
        f"3 problems in the weights in {tmp_path}\n"
        f"  missing: 1 tensors are not in the files: down.weight{remedy}\n"
        "  left over: 10 tensors are in the files, and the model has no such parameter: "
        + ", ".join(f"extra.{index}" for index in range(8))
        + f", and 2 more{remedy}\n"
        f"  shape: 1 tensors are not of the right shape: up.weight [4, 6] where config.json says [10, 6]{remedy}"
    )


def cut_short(folder: Path) -> None:
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "model-0.safetensors").unlink(), "is missing, though the index names it"),
        (cut_short, "the file is damaged, or came in part alone"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "is no index of safetensors files"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("["), "is no index of safetensors files"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[" * 9999), "is no index of safetensors"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(write(tmp_path, values(), parts=2))
    with pytest.raises(UserError, match=words):
        find_weights(tmp_path)


def test_bin_files_are_refused_with_the_way_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"has weights as \.bin files") as told:
        find_weights(tmp_path)
    assert "save_pretrained" in str(told.value)


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(package: str) -> None:
        raise UserError(f"{package} cannot be imported")

    write(tmp_path, values())
    monkeypatch.setattr(files_module, "import_extra", refuse)
    with pytest.raises(UserError, match="safetensors cannot be imported"):
        find_weights(tmp_path)


class Stacked(nn.Module):
    """A mixture's experts, where a model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"experts": nn.Module()})
        for leaf, shape in {"gate": (4, 6, 8), "up": (4, 6, 8), "down": (4, 8, 6)}.items():
            self.mlp["experts"].register_parameter(leaf, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_come_from_files_of_their_own_or_from_stacks(tmp_path: Path, stacked: bool) -> None:
    gate_up, down = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    tensors = {"m.mlp.experts.gate_up_proj": gate_up, "m.mlp.experts.down_proj": down}
    if not stacked:
        gates, ups = gate_up.chunk(2, dim=1)
        kinds = {"w1": gates, "w3": ups, "w2": down}
        tensors = {
            f"m.moe.experts.{index}.{kind}.weight": stack[index].clone()
            for kind, stack in kinds.items()
            for index in range(4)
        }
    model = nn.ModuleDict({"m": Stacked()})
    load_weights(model, fit_weights(model, found(write(tmp_path, tensors)), ExpertNames("moe", "w1", "w3", "w2")))
    experts = dict(model.named_parameters())
    assert torch.equal(torch.cat((experts["m.mlp.experts.gate"], experts["m.mlp.experts.up"]), dim=1), gate_up)
    assert torch.equal(experts["m.mlp.experts.down"], down)


class Counting:
    """Counts the values that are read, in place of `Reader.read`."""

    def __init__(self) -> None:
        self.read, self.elements, self.largest = RegionReader.read, 0, 0

    def __call__(self, reader: RegionReader, name: str, region: TensorRegion) -> torch.Tensor:
        tensor = self.read(reader, name, region)
        self.elements += tensor.numel()
        self.largest = max(self.largest, tensor.numel())
        return tensor


def count_reads() -> tuple[Counting, pytest.MonkeyPatch]:
    counting, patch = Counting(), pytest.MonkeyPatch()
    patch.setattr(RegionReader, "read", lambda reader, name, region: counting(reader, name, region))
    return counting, patch


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write(tmp_path / "weights", values())


@ranks(2)
def test_a_sharded_model_reads_each_rank_its_part(rank: int, written: Path) -> None:
    with torch.device("meta"):
        model = Small()
    del model.scale  # fully_shard takes no parameter without a dim
    fit = fit_weights(model, found(written), keep_names, spare=("scale",))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    counting, patch = count_reads()
    load_weights(model, fit)
    patch.undo()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), values()[name])
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert counting.elements == held == (65, 55)[rank]
    assert counting.largest == 30  # half of the largest weight: nothing is read whole and then cut


@ranks(4)
def test_any_layout_is_filled(rank: int, written: Path) -> None:
    """Rows split twice (which DTensor holds in strides), rows and columns, uneven parts, copies."""
    files = found(written)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    with torch.device("meta"):
        model = Small()
    del model.scale
    fit = fit_weights(model, files, keep_names, spare=("scale",))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    model.to_empty(device="cpu")
    load_weights(model, fit)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), values()[name])
    for placements in [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Shard(0))]:
        plain = nn.Module()
        plain.w = nn.Parameter(dtensor.zeros(5, 10, device_mesh=mesh, placements=placements))
        holder = nn.ModuleDict({"down": plain})
        renamed = lambda name, shape: keep_names("down.weight", shape)  # noqa: E731
        load_weights(holder, fit_weights(holder, files, renamed, spare=("*",)))
        assert torch.equal(plain.w.full_tensor(), values()["down.weight"])
    dist.barrier()
