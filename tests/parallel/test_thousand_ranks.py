"""Meshes of 1,024 ranks and models of hundreds of billions of parameters, built in one process on a fake group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exact_states import estimate_states
from exact_weights import held_elements, transformer_weights, weights_of_rank
from runs import place
from shardway.layout import layout_of
from shardway.models.build import build_model
from shardway.models.contract import held_by_rank
from shardway.parallel.apply import ApplyOptions, apply_parallelism
from shardway.parallel.mesh import build_mesh
from shardway.plan.placement import place_mesh
from shardway.ranks.start import Ranks
from shardway.runfile.schema import ModelSection, ParallelSection
from speed import picked, thinned
from trained import FP32

WORLD, NODE = 1024, 8
LIMIT_S = 60.0
"""CPU time of this process: waiting for a busy machine does not count."""


def llama(dim: int, layers: int, heads: int, ffn: int) -> ModelSection:
    return ModelSection(
        dim=dim, layers=layers, heads=heads, kv_heads=8, head_dim=128, ffn_dim=ffn, vocab=128256, tied=False
    )


LLAMA_70B, LLAMA_405B = llama(8192, 80, 64, 28672), llama(16384, 126, 128, 53248)
"""Sizes of Llama 3 (arXiv:2407.21783, table 3)."""

DEEPSEEK_V3 = ModelSection(
    dim=7168,
    layers=61,
    heads=128,
    kv_heads=128,
    head_dim=128,
    ffn_dim=18432,
    vocab=129280,
    tied=False,
    experts=256,
    experts_per_token=8,
    expert_dim=2048,
    shared_experts=1,
    dense_layers=3,
    kv_rank=512,
    q_rank=1536,
    rope_head_dim=64,
    value_head_dim=128,
)
"""Sizes of DeepSeek-V3 (arXiv:2412.19437, section 4.2) without its second head."""


@dataclass(frozen=True)
class Case:
    """A layout, the blocks of its stages, and local shapes worked out by hand, on every rank that has the weight."""

    model: ModelSection
    degrees: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    blocks: tuple[int, ...] = ()

    @property
    def parallel(self) -> ParallelSection:
        return ParallelSection(**{"dp_replicate": 1, "pp_stages_per_rank": 1, **self.degrees})


SHORT = "tp 8 x cp 4 x dp_shard 32, eight blocks"
DEEPEST = "tp 2 x dp_replicate 2 x dp_shard 256, ep 128"
CASES = {
    "tp 8 x pp 16 x dp_shard 8": Case(
        LLAMA_405B,
        {"tp": 8, "pp": 16, "dp_shard": 8, "pp_split": [7] + [8] * 14 + [7]},
        {
            "attention.wq.weight": (16384 // 64, 16384),
            "attention.wk.weight": (8 * 128 // 64, 16384),
            "attention.wo.weight": (16384 // 8, 16384 // 8),
            "ffn.down.weight": (16384 // 8, 53248 // 8),
            "ffn_norm.weight": (16384 // 8,),
            "embedding.weight": (128256 // 64, 16384),
        },
        blocks=(7, *[8] * 14, 7),
    ),
    "tp 8 x cp 4 x dp_shard 32": Case(
        LLAMA_405B,
        {"tp": 8, "cp": 4, "dp_shard": 32},
        {
            "attention.wq.weight": (16384 // 8 // 128, 16384),
            "attention.wk.weight": (1, 16384),
            "ffn.down.weight": (16384 // 128, 53248 // 8),
            "norm.weight": (128,),
        },
    ),
    SHORT: Case(
        llama(16384, 8, 128, 53248),
        {"tp": 8, "cp": 4, "dp_shard": 32},
        {"attention.wk.weight": (1, 16384), "ffn.down.weight": (16384 // 128, 53248 // 8), "norm.weight": (128,)},
    ),
    "dp_replicate 4 x dp_shard 256": Case(
        LLAMA_405B,
        {"dp_replicate": 4, "dp_shard": 256},
        {"attention.wk.weight": (1024 // 256, 16384), "embedding.weight": (501, 16384), "norm.weight": (64,)},
    ),
    "tp 4 x dp_shard 256, ep 64": Case(
        DEEPSEEK_V3,
        {"tp": 4, "dp_shard": 256, "ep": 64},
        {
            "ffn.experts.gate": (1, 2048 // 4, 7168),
            "ffn.experts.down": (1, 7168, 2048 // 4),
            "attention.wq.weight": (128 * 192 // 4 // 256, 1536),
            "attention.kv_up.weight": (128 * 256 // 4 // 256, 512),
        },
    ),
    DEEPEST: Case(
        DEEPSEEK_V3,
        {"tp": 2, "dp_replicate": 2, "dp_shard": 256, "ep": 128},
        {"ffn.experts.gate": (1, 2048 // 2, 7168), "ffn.shared.up": (2048 // 2 // 256, 7168)},
    ),
}


class LargestReal(TorchDispatchMode):
    """Remembers the largest tensor with real memory that was made inside its context."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and not (each.is_meta or isinstance(each, FakeTensor)):
                self.nbytes = max(self.nbytes, each.untyped_storage().nbytes())
        return out


@contextlib.contextmanager
def fake_ranks(rank: int) -> Iterator[Ranks]:
    """One of 1,024 ranks whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        yield Ranks(place(rank, WORLD), torch.device("cpu"), grouped=True)
    finally:
        dist.destroy_process_group()


def leave_unfilled(model: nn.Module) -> None:
    """Memory that nobody writes to costs nothing."""


def build(model: ModelSection) -> nn.Module:
    return build_model(model, vocab=int(model.vocab), sample_shape=(8192,))


@thinned("rank", [WORLD - 1, 0, 515])
@pytest.mark.parametrize("name", picked(CASES, "tp 8 x pp 16 x dp_shard 8", SHORT, DEEPEST))
def test_a_rank_holds_its_part_alone(name: str, rank: int) -> None:
    """Every local size is the formula's, some shapes are as worked out by hand, and at no time is there a real tensor
    larger than the largest part."""
    case, start = CASES[name], time.process_time()
    weights = transformer_weights(case.model)
    held = weights_of_rank(weights, case.parallel, case.blocks or (case.model.layers,), rank)
    layout = layout_of(case.parallel)
    expected = {weight.name: held_elements(weight, layout, rank) for weight in held}
    with fake_ranks(rank) as ranks, LargestReal() as largest:
        mesh = build_mesh(ranks, case.parallel)
        options = ApplyOptions(case.parallel, FP32, fill=leave_unfilled)
        module = apply_parallelism(build(case.model), mesh, ranks.device, options).module
        parts = {each: held_by_rank(parameter.detach()) for each, parameter in module.named_parameters()}
        sizes = {each: part.numel() for each, part in parts.items()}
        shapes = {each: tuple(part.shape) for each, part in parts.items()}
        held_bytes = sum(part.untyped_storage().nbytes() for part in parts.values())
        largest_part = max(part.untyped_storage().nbytes() for part in parts.values())
    assert sizes == expected
    for leaf, shape in case.shapes.items():
        assert {found for each, found in shapes.items() if each.endswith(leaf)} <= {shape}
    assert any(each.endswith(tuple(case.shapes)) for each in shapes)
    assert held_bytes == estimate_states(weights, case.parallel, rank, case.blocks).parameters
    assert largest.nbytes <= max(largest_part, 8 * WORLD)
    assert time.process_time() - start < LIMIT_S


@pytest.mark.parametrize("name", CASES)
def test_what_talks_most_is_inside_a_node(name: str) -> None:
    """Every tensor group is within a node of 8, and inner axes are on no more nodes than they need."""
    placement = place_mesh(layout_of(CASES[name].parallel), NODE)
    assert placement.nodes == WORLD // NODE
    inner = 1
    for each in placement.dims:
        if each.dim in ("tp", "cp"):
            inner *= each.degree
            assert each.nodes == max(1, inner // NODE)
            assert all(len({rank // NODE for rank in group}) == each.nodes for group in each.groups)


def test_70_billion_parameters_on_meta_in_seconds() -> None:
    start = time.process_time()
    model = build(LLAMA_70B)
    assert sum(parameter.numel() for parameter in model.parameters()) == 70_553_706_496
    assert all(parameter.is_meta for parameter in model.parameters())
    assert time.process_time() - start < 5.0
