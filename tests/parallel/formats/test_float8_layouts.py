"""Float8 by emulation on weights that are sharded, split, gathered in eight bits, recomputed and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pool import ranks
from shardway.models.transformer import Transformer, TransformerShape
from shardway.parallel.axes.tensor import apply_tensor
from shardway.parallel.blocks import apply_recompute
from shardway.parallel.precision import apply_float8, compute_scales
from shardway.runfile.schema import PrecisionSection, RecomputeSection
from small_stack import PlannedStack, build_stack, float8, gradients, stack_loss, token_batch
from speed import picked

CPU = torch.device("cpu")


def emulated(recipe: str = "tensorwise", **options: Any) -> PrecisionSection:
    return float8(recipe, emulate=True, **options)


def convert(model: PlannedStack, options: PrecisionSection) -> None:
    apply_float8(model, list(model.blocks), options, CPU, model.plan())


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


def _sharded(rank: int, options: PrecisionSection, dtype: torch.dtype | None = None) -> PlannedStack:
    """The model of `build_stack`, built on meta, converted, sharded over two ranks and filled."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    with torch.device("meta"):
        model = PlannedStack(2)
    convert(model, options)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # as sharding does
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    model.init_weights(seed=0)
    return model


@ranks(2)
def test_sharded_weights_gathered_in_float8_compute_what_whole_ones_do(rank: int) -> None:
    whole = build_stack(2)
    convert(whole, emulated())
    expected = gradients(whole, token_batch())
    for gathers in (False, True):
        model = _sharded(rank, emulated(all_gather=gathers))
        gathered: list[str] = []
        model.blocks[0].up.register_forward_pre_hook(lambda layer, _, g=gathered: g.append(type(layer.weight).__name__))
        found = gradients(model, token_batch())
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient.full_tensor(), expected[name], rtol=1e-5, atol=1e-6)
        assert gathered == ["Float8TrainingTensor" if gathers else "Parameter"]


@ranks(2)
def test_a_state_dict_shows_ordinary_weights_and_takes_them_back(rank: int) -> None:
    model, other = _sharded(rank, emulated(all_gather=True)), _sharded(rank, emulated(all_gather=True))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.to_local().fill_(rank + 1.0)
    state = get_model_state_dict(model)
    assert {type(value.to_local()) for value in state.values()} == {torch.Tensor}
    plain = build_stack(2).state_dict()
    assert state.keys() == plain.keys()
    assert all(torch.equal(value.full_tensor(), plain[name]) for name, value in state.items())
    set_model_state_dict(other, state)
    after = get_model_state_dict(other)
    assert all(torch.equal(value.full_tensor(), plain[name]) for name, value in after.items())
    assert _loss(other) == _loss(model)


def _loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(stack_loss(model, token_batch()))


@ranks(2)
def test_scales_computed_at_once_are_those_computed_one_by_one(rank: int) -> None:
    options = emulated(all_gather=True)
    losses = []
    for at_once in (True, False):
        model = _sharded(rank, options, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in range(3):
            gradients(model, token_batch())
            optimizer.step()
            if at_once:
                compute_scales(model, options)
        assert (model.blocks[0].up.weight._local_tensor._precomputed_scale is not None) == at_once
        losses.append(_loss(model))
    assert losses[0] == losses[1]
    compute_scales(nn.Linear(2, 2), None)


@ranks(4, timeout_s=120.0)
def test_split_and_sharded_weights_recompute_in_float8(rank: int) -> None:
    """Scales are those of a rank's part, so the loss is that of whole weights within the error of the format."""
    options = emulated(all_gather=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole = _transformer()
    whole.init_weights(0)
    apply_float8(whole, list(whole.blocks.values()), emulated(), CPU, whole.plan())
    with torch.device("meta"):
        model = _transformer()
    plan, units = model.plan(), list(model.blocks.values())
    apply_tensor(model, plan, mesh["tp"], sequence=True, split_logits=False)
    apply_recompute(units, RecomputeSection(mode="selective"))
    report = apply_float8(model, units, options, CPU, plan)
    assert len(report) == 14
    for part in (*units, model):
        fully_shard(part, mesh=mesh["dp_shard"])
    model.to_empty(device="cpu")
    model.init_weights(0)
    expected, found = stack_loss(whole, token_batch()), stack_loss(model, token_batch())
    assert found.item() == pytest.approx(expected.item(), rel=5e-3)
    expected.backward()
    found.backward()
    up, whole_up = model.blocks["1"].ffn.up.weight, whole.blocks["1"].ffn.up.weight
    assert 0 < _distance(up.grad.full_tensor(), whole_up.grad) < 0.2
    assert type(up.to_local()).__name__ == "WeightWithDynamicFloat8CastTensor"


def _transformer() -> Transformer:
    """Two blocks with one key/value head, which both tensor ranks compute."""
    return Transformer(TransformerShape(vocab=48, dim=64, layers=2, heads=4, kv_heads=1, ffn_dim=96, tied=False))


# --- compiled

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
"""The third computes gradients of weights in bf16 and all else as the second."""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("recipe", picked(RECIPES, "tensorwise", "rowwise_with_gw_hp", "mxfp8"))
def test_compiled_blocks_compute_the_same_in_one_graph(recipe: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    plain, model = build_stack(2), build_stack(2)
    counter = CompileCounterWithBackend("aot_eager")
    for each in (plain, model):
        convert(each, emulated(recipe))
    for block in model.blocks:
        block.compile(backend=counter)
    found = []
    for each in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = stack_loss(each, token_batch())
        loss.backward()
        found.append({name: parameter.grad for name, parameter in each.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@ranks(2, timeout_s=120.0)
def test_compiled_sharded_blocks_compute_the_same(rank: int) -> None:
    torch._dynamo.reset()
    options = emulated(all_gather=True)
    expected = gradients(_sharded(rank, options), token_batch())
    model = _sharded(rank, options)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    found = gradients(model, token_batch())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].to_local(), gradient.to_local(), rtol=1e-6, atol=1e-7)
