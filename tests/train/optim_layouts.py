"""A model whose gradients are made up, laid out in several ways, for tests of optimizers alone.

Invariant: weights and gradients are functions of name and step, never of the layout, so whatever differs after a step
comes from the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from shardway.models.contract import ModelPlan
from shardway.runfile.schema import OptimSection
from shardway.train.optim.kinds import build_optimizer

SECTIONS = {
    "adamw": OptimSection(),
    "adamw foreach": OptimSection(kernel="foreach"),
    "adamw bf16": OptimSection(state_dtype="bf16"),
    "sgd": OptimSection(name="sgd"),
    "sgd nesterov": OptimSection(name="sgd", nesterov=True),
    "sgd bf16": OptimSection(name="sgd", state_dtype="bf16"),
    "sgd plain": OptimSection(name="sgd", momentum=0.0),
    "adafactor": OptimSection(name="adafactor"),
    "muon": OptimSection(name="muon", muon_lr_factor=2.0),
    "muon bf16": OptimSection(name="muon", muon_adjust="original", state_dtype="bf16"),
}
LR = 0.02


class Block(nn.Module):
    """Two matrices of a feed-forward layer, two of attention, one stack of experts and a norm; odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.experts = Experts()


class Experts(nn.Module):
    """Matrices of four experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 7, 6))


class Model(nn.Module):
    """An embedding, three blocks and an output layer; it has a plan and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(3)})
        self.head = nn.Linear(6, 11, bias=False)

    def plan(self) -> ModelPlan:
        return ModelPlan(
            blocks=("blocks.*",),
            tensor={
                "embedding": "vocabulary",
                "blocks.*.up": "column",
                "blocks.*.down": "row",
                "head": "logits",
            },
            experts=("blocks.*.experts",),
        )


def make_model() -> Model:
    """The model with weights that are the same every time."""
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values(f"weight of {name}", parameter.shape))
    return model


def values(name: str, shape: torch.Size) -> torch.Tensor:
    """Normal values that depend on a name; every third row is 100 times smaller."""
    generator = torch.Generator().manual_seed(sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**63)
    drawn = torch.randn(shape, generator=generator)
    drawn[::3] *= 0.01
    return drawn


def lay_out(layout: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model in a layout: every rank of the pool takes part."""
    model = make_model().to(dtype)
    LAYOUTS[layout](model)
    return model


def _keep(model: nn.Module) -> None:
    """Plain parameters on every rank."""


def _shard(model: nn.Module) -> None:
    """FSDP2 over all ranks."""
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shard",)))


def _hybrid(model: nn.Module) -> None:
    """FSDP2 over two ranks, twice."""
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _shard_and_split(model: nn.Module) -> None:
    """FSDP2 over two ranks, and two ranks of a tensor axis inside it."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for block in model.blocks.values():  # type: ignore[operator,union-attr]
        _distribute(block.up, "weight", grid["tensor"], Shard(0))
        _distribute(block.up, "bias", grid["tensor"], Shard(0))
        _distribute(block.down, "weight", grid["tensor"], Shard(1))
        _distribute(block.experts, "weight", grid["tensor"], Shard(2))
    _distribute(model.embedding, "weight", grid["tensor"], Shard(0))
    fully_shard(model, mesh=grid["shard"])


def _mix(model: nn.Module) -> None:
    """Experts on a mesh of their own, norms and the output layer plain, everything else split."""
    size = torch.distributed.get_world_size()
    dense = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    sparse = init_device_mesh("cpu", (size,), mesh_dim_names=("expert",))
    _distribute(model.embedding, "weight", dense, Shard(0))
    for block in model.blocks.values():  # type: ignore[operator,union-attr]
        _distribute(block.up, "weight", dense, Shard(0))
        _distribute(block.up, "bias", dense, Shard(0))
        _distribute(block.down, "weight", dense, Shard(1))
        _distribute(block.experts, "weight", sparse, Shard(0))


LAYOUTS = {
    "plain": _keep,
    "shard": _shard,
    "hybrid": _hybrid,
    "shard x tensor": _shard_and_split,
    "mixed": _mix,
}


def _distribute(module: object, name: str, mesh: DeviceMesh, *placements: Placement) -> None:
    whole = getattr(module, name).detach()
    setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, placements)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Give every parameter its gradient of each step and let the optimizer take it."""
    for step in steps:
        for name, parameter in model.named_parameters():
            whole = values(f"gradient {step} of {name}", parameter.shape).to(parameter.dtype)
            parameter.grad = as_laid_out(whole, parameter)
        optimizer.step()
        optimizer.zero_grad()


def as_laid_out(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor, laid out as the parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    everywhere = [Replicate() for _ in parameter.placements]
    replicated = DTensor.from_local(whole, parameter.device_mesh, everywhere, run_check=False)
    return replicated.redistribute(placements=parameter.placements)


def train_laid_out(
    layout: str, section: OptimSection, steps: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in a layout and its optimizer, some steps on."""
    model = lay_out(layout, dtype)
    optimizer = build_optimizer(section, model, LR)
    train(model, optimizer, range(steps))
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states by name, each whole."""
    return dict(_list_everything(model, optimizer))


def _list_everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        for kind, tensor in {"weight": parameter, **optimizer.state[parameter]}.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield f"{name} {kind}", whole.detach().clone()
