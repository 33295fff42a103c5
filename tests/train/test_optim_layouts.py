"""An optimizer's step is the same in every layout, and its state moves from one layout to another."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optim_layouts import LR, SECTIONS, as_laid_out, everything, lay_out, train, train_laid_out
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pool import ranks
from shardway.runfile.schema import OptimSection
from shardway.train.optim.kinds import build_optimizer
from speed import picked, picked_pairs, thinned


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal but for the rounding of fp32 sums whose terms are of the order of 1 and may cancel."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.allclose(found[name], tensor, rtol=2e-6, atol=1e-6), name


NAMES = ("adamw bf16", "adafactor", "muon")
MOVES = (("hybrid", "plain"), ("hybrid", "shard"), ("shard x tensor", "shard"), ("mixed", "shard x tensor"))


@pytest.mark.parametrize("case", picked_pairs(SECTIONS, ["shard", "mixed"]), ids=", ".join)
@ranks(2)
def test_two_ranks_step_as_one_does(rank: int, case: tuple[str, str]) -> None:
    name, layout = case
    section = SECTIONS[name]
    assert_close(everything(*train_laid_out(layout, section)), everything(*train_laid_out("plain", section)))


@thinned(("name", "layout"), itertools.product(NAMES, ["shard", "hybrid", "shard x tensor", "mixed"]), every=6)
@ranks(4)
def test_four_ranks_step_as_one_does(rank: int, layout: str, name: str) -> None:
    section = SECTIONS[name]
    assert_close(everything(*train_laid_out(layout, section)), everything(*train_laid_out("plain", section)))


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@ranks(2)
def test_bf16_weights_are_rounded_alike(rank: int, name: str) -> None:
    """Not to the nearest, yet the same everywhere: replicas that rounded for themselves would come apart."""
    plain = everything(*train_laid_out("plain", SECTIONS[name], dtype=torch.bfloat16))
    assert {tensor.dtype for key, tensor in plain.items() if not key.endswith("step")} == {torch.bfloat16}
    found = everything(*train_laid_out("mixed", SECTIONS[name], dtype=torch.bfloat16))
    different = [key for key, tensor in plain.items() if not torch.equal(found[key], tensor)]
    assert not different


def save_and_load(folder: Path, section: OptimSection, before: str, after: str) -> None:
    """States saved in one layout are bit for bit there in the other, and training goes on alike."""
    model, optimizer = train_laid_out(before, section, 3)
    expected = everything(model, optimizer)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    other = lay_out(after)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(as_laid_out(expected[f"{name} weight"], parameter))
    resumed = build_optimizer(section, other, LR)
    template = {"optimizer": get_optimizer_state_dict(other, resumed)}
    dcp.load(template, checkpoint_id=folder)
    set_optimizer_state_dict(other, resumed, template["optimizer"])
    found = everything(other, resumed)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    train(model, optimizer, range(3, 5))
    train(other, resumed, range(3, 5))
    assert_close(everything(other, resumed), everything(model, optimizer))


ALIKE = {"adamw foreach", "sgd nesterov", "sgd bf16", "muon bf16"}
"""What has states of the kinds and formats that others have too."""


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param("shard", "plain", marks=pytest.mark.exhaustive), ("mixed", "shard")],
)
@pytest.mark.parametrize("name", picked(SECTIONS, *(SECTIONS.keys() - ALIKE)))
@ranks(2)
def test_a_checkpoint_fits_another_layout(rank: int, tmp_path: Path, name: str, before: str, after: str) -> None:
    save_and_load(tmp_path, SECTIONS[name], before, after)


@thinned(("name", "layouts"), itertools.product(NAMES, MOVES), every=6)
@ranks(4)
def test_a_checkpoint_of_two_shards_fits_one_and_four(
    rank: int, tmp_path: Path, name: str, layouts: tuple[str, str]
) -> None:
    save_and_load(tmp_path, SECTIONS[name], *layouts)


def train_eight_bits(*shape: int, split: bool, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One matrix, whole or over two ranks, some steps on; torchao's update runs uncompiled."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(shape[1], shape[0], bias=False)
    if split:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = build_optimizer(OptimSection(name="adamw8bit"), model, LR)
    with torch.compiler.set_stance("force_eager"):
        train(model, optimizer, range(steps))
        get_optimizer_state_dict(model, optimizer)  # makes the states where no step has
    return model, optimizer


@ranks(2)
def test_eight_bits_move_where_blocks_are_cut_alike(rank: int, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    split, whole = train_eight_bits(64, 128, split=True), train_eight_bits(64, 128, split=False)
    (held,), (weight,) = split[0].parameters(), whole[0].parameters()
    assert torch.equal(held.full_tensor(), weight)  # type: ignore[attr-defined]
    dcp.save({"optimizer": get_optimizer_state_dict(*whole)}, checkpoint_id=tmp_path)
    resumed = train_eight_bits(64, 128, split=True, steps=0)
    template = {"optimizer": get_optimizer_state_dict(*resumed)}
    dcp.load(template, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*resumed, template["optimizer"])
    (found,), expected = resumed[1].state.values(), whole[1].state[weight]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(found[name].full_tensor().dequantize(), expected[name].dequantize())


@ranks(2)
def test_eight_bits_are_refused_where_blocks_are_cut_otherwise(rank: int, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    split, whole = train_eight_bits(66, 128, split=True), train_eight_bits(66, 128, split=False)
    template = {"optimizer": get_optimizer_state_dict(*split)}
    dcp.save({"optimizer": get_optimizer_state_dict(*whole)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="align with block boundary"):
        dcp.load(template, checkpoint_id=tmp_path)
