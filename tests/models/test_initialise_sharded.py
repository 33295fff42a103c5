"""Every rank's slice of a sharded model has the values of the unsharded one.

A fake process group plays one rank of many without communication, which initialisation must not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardway.errors import Bug
from shardway.models.contract import match_modules
from shardway.models.initialise import normal_
from shardway.models.transformer import Transformer, TransformerShape

SHAPE = TransformerShape(vocab=13, dim=24, layers=2, heads=4, kv_heads=2, ffn_dim=20)


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    _clear_sharding_prop_cache()  # it holds the meshes, and with them the ranks, that this process played before
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


def whole(shape) -> torch.Tensor:
    tensor = torch.empty(shape)
    normal_(tensor, seed=5, name="w", std=1.0)
    return tensor


@pytest.mark.parametrize("shape", [(7, 5), (3, 8), (9, 4, 3)])
@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Shard(0)),
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(1)),
        (Shard(1), Replicate()),
    ],
    ids=str,
)
def test_uneven_shards_join_to_the_whole(shape, placements):
    expected = whole(shape)
    seen = torch.full(shape, torch.nan)
    for rank in range(4):
        with fake_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            tensor = dtensor.empty(shape, device_mesh=mesh, placements=placements)
            normal_(tensor, seed=5, name="w", std=1.0)
            part = seen
            for (coordinate, size), placement in zip(
                zip(mesh.get_coordinate(), mesh.shape, strict=True), placements, strict=True
            ):
                if isinstance(placement, Shard):
                    chunks = part.chunk(size, placement.dim)
                    part = chunks[coordinate] if coordinate < len(chunks) else part.narrow(placement.dim, 0, 0)
            part.copy_(tensor.to_local())
    assert torch.equal(seen, expected)


def test_a_partial_layout_is_refused():
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.empty(4), mesh, [Partial()], run_check=False)
        with pytest.raises(Bug, match="which is no slice of it"):
            normal_(tensor, seed=0, name="w", std=1.0)


def reference_weights() -> dict[str, torch.Tensor]:
    model = Transformer(SHAPE)
    model.init_weights(3)
    return model.state_dict()


def build_sharded(mesh, apply) -> Transformer:
    with torch.device("meta"):
        model = Transformer(SHAPE)
    apply(model, mesh)
    model.to_empty(device="cpu")
    model.init_weights(3)
    return model


def apply_fsdp(model, mesh) -> None:
    for _, block in match_modules(model, model.plan().blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def apply_tensor(model, mesh) -> None:
    styles = {
        "column": ColwiseParallel,
        "key_value": ColwiseParallel,
        "logits": ColwiseParallel,
        "row": RowwiseParallel,
        "vocabulary": RowwiseParallel,
    }
    splits = {pattern: split for pattern, split in model.plan().tensor.items() if split in styles}
    for pattern, split in splits.items():
        for name, module in match_modules(model, [pattern]):
            if next(module.parameters(), None) is not None:
                parallelize_module(model, mesh, {name: styles[split]()})


def apply_both(model, mesh) -> None:
    apply_tensor(model, mesh["tp"])
    apply_fsdp(model, mesh["dp_shard"])


@pytest.mark.parametrize("world", [2, 3, 16])
def test_a_fully_sharded_transformer_has_the_weights_of_a_whole_one(world):
    expected = reference_weights()
    for rank in (0, 1, world - 1):
        with fake_rank(rank, world):
            model = build_sharded(init_device_mesh("cpu", (world,)), apply_fsdp)
            for name, value in model.state_dict().items():
                chunks = expected[name].chunk(world)
                part = chunks[rank] if rank < len(chunks) else expected[name][:0]
                assert torch.equal(value.to_local(), part), name


def test_splits_over_tensor_and_shard_axes_keep_the_weights():
    expected = reference_weights()
    for rank in range(4):
        with fake_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
            shard, split = mesh.get_coordinate()
            model = build_sharded(mesh, apply_both)
            local = {name: value.to_local() for name, value in model.state_dict().items()}
            wq = expected["blocks.1.attention.wq.weight"].chunk(2, 0)[split].chunk(2, 0)[shard]
            wo = expected["blocks.1.attention.wo.weight"].chunk(2, 1)[split].chunk(2, 0)[shard]
            table = expected["embedding.weight"].chunk(2, 0)[split].chunk(2, 0)[shard]
            assert torch.equal(local["blocks.1.attention.wq.weight"], wq)
            assert torch.equal(local["blocks.1.attention.wo.weight"], wo)
            assert torch.equal(local["embedding.weight"], table)
