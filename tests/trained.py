"""Small trained models on ranks that are there already, and what a test compares of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardway.checkpoint.state import Trained
from shardway.models.transformer import Transformer, TransformerShape
from shardway.parallel.apply import ApplyOptions, ParallelModel, apply_parallelism
from shardway.parallel.mesh import build_mesh
from shardway.parallel.precision import Precision
from shardway.ranks.start import Ranks
from shardway.runfile.schema import ParallelSection
from shardway.train.loss import token_cross_entropy
from shardway.train.passes import BatchSplit, Passes

FP32 = Precision(None, torch.float32)
SHAPE = TransformerShape(vocab=64, dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=64)


def apply_shape(model: nn.Module, on: Ranks, shape: tuple[int, int] = (1, 1), seed: int = 0) -> ParallelModel:
    """The model as replicas and shards of `shape`."""
    section = ParallelSection(dp_replicate=shape[0], dp_shard=shape[1])
    return apply_parallelism(model, build_mesh(on, section), on.device, ApplyOptions(section, FP32, seed=seed))


def make_parallel(model: nn.Module, on: Ranks, shape: tuple[int, int] = (1, 1), seed: int = 0) -> nn.Module:
    """What is called of the model as replicas and shards of `shape`."""
    return apply_shape(model, on, shape, seed).call


def make_passes(parallel: ParallelModel, on: Ranks, global_batch: int = 1, accumulation: int = 1) -> Passes:
    """Passes of a rank's even share of a global batch."""
    micro = -(-global_batch // (parallel.mesh.data_ranks * accumulation))
    return Passes(parallel, BatchSplit(global_batch, micro, accumulation), FP32, on.device)


def make_trained(
    on: Ranks, shape: tuple[int, int] = (1, 1), *, steps: int = 2, seed: int = 0, sizes: TransformerShape = SHAPE
) -> Trained:
    """A transformer that AdamW has taken `steps` steps with; every rank sees the same samples."""
    with torch.device("meta"):
        model: nn.Module = Transformer(sizes)
    model = make_parallel(model, on, shape, seed)
    trained = Trained(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    train_on(trained, steps)
    return trained


def train_on(trained: Trained, steps: int) -> None:
    """Take some more steps."""
    assert trained.optimizer is not None
    tokens = torch.arange(40).reshape(4, 10)
    for step in range(steps):
        token_cross_entropy(trained.model((tokens + step) % 64), tokens).total.backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state by name, each whole."""
    state = {f"{plain(name)} buffer": whole(buffer) for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        held = {"weight": parameter, **(optimizer.state.get(parameter, {}) if optimizer else {})}
        state.update({f"{plain(name)} {kind}": whole(tensor) for kind, tensor in held.items()})
    return state


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Both states have the same names and, bit for bit, the same values."""
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different


def plain(name: str) -> str:
    """A parameter's name in the model that was wrapped."""
    return name.removeprefix("module.")
