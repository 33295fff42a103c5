"""Float8 by emulation: which layers, how near to fp32, on sharded weights, compiled; and what is refused."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardway.errors import UserError
from shardway.parallel.precision import apply_float8, check_float8, linear_with
from shardway.runfile.schema import PrecisionSection
from small_stack import PlannedStack, Stack, build_stack, float8, gradients, stack_loss, token_batch

CPU = torch.device("cpu")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")


def emulated(recipe: str = "tensorwise", **options: Any) -> PrecisionSection:
    return float8(recipe, emulate=True, **options)


def convert(model: Stack, options: PrecisionSection, device: torch.device = CPU, **facts: Any) -> list[str]:
    facts.setdefault("plan", model.plan() if isinstance(model, PlannedStack) else None)
    return apply_float8(model, list(model.blocks), options, device, **facts)


# --- which layers


def test_the_matrices_that_a_plan_splits_are_converted_and_no_others() -> None:
    model = build_stack(2)
    assert convert(model, emulated()) == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert [type(block.router) for block in model.blocks] == [nn.Linear, nn.Linear]


def test_without_a_plan_all_of_the_blocks_are_converted_and_the_output_layer_is_not() -> None:
    model = Stack(1)
    assert convert(model, emulated()) == ["blocks.0.up", "blocks.0.router", "blocks.0.down"]
    assert type(model.head) is nn.Linear
    chain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    report = apply_float8(chain, [chain[0], chain[2]], emulated(), CPU)
    assert report == ["0"]


def test_the_first_and_the_last_block_may_stay() -> None:
    model = build_stack(3)
    edges = (model.blocks[0], model.blocks[2])
    assert convert(model, emulated(first_last="bf16"), edges=edges) == ["blocks.1.up", "blocks.1.down"]
    assert len(convert(build_stack(3), emulated(), edges=edges)) == 6


def test_names_parameters_and_what_stands_in_for_forward_stay() -> None:
    model = build_stack(1)
    layer, before = model.blocks[0].up, dict(model.named_parameters())
    layer.forward = lambda x: linear_with(layer, x, layer.weight * 0, layer.bias)
    convert(model, emulated())
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.blocks[0].up is layer
    assert torch.equal(layer(torch.randn(2, 32)), layer.bias.expand(2, -1))


def test_layers_whose_dims_do_not_fit_stay() -> None:
    model = build_stack(2)
    model.blocks[1].up = nn.Linear(32, 40)
    assert convert(model, emulated()) == ["blocks.0.up", "blocks.0.down", "blocks.1.down"]
    assert type(model.blocks[1].up) is nn.Linear


def test_a_model_without_any_layer_that_fits_is_refused() -> None:
    chain = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10))
    with pytest.raises(UserError, match=r"has none whose dims are multiples of 16 \(0 is not, for one\)"):
        apply_float8(chain, [chain[0], chain[2]], emulated(), CPU)
    with pytest.raises(UserError, match="has no linear layer inside its blocks"):
        apply_float8(nn.Sequential(nn.Conv2d(3, 3, 3)), [], emulated(), CPU)


# --- how near


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_layer_is_as_near_as_the_format(recipe: str) -> None:
    """E4M3 has 3 digits after the point: a value is rounded by at most 2^-4, and half of that on the average."""
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    plain = nn.Linear(64, 32)
    plain.load_state_dict(chain[0].state_dict())
    apply_float8(chain, [chain[0]], emulated(recipe), CPU)
    x, out = torch.randn(4, 16, 64), torch.randn(4, 16, 32)
    (chain[0](x) * out).sum().backward()
    (plain(x) * out).sum().backward()
    assert 0 < _distance(chain[0](x), plain(x)) < 2**-4
    error = _distance(chain[0].weight.grad, plain.weight.grad)
    assert error < 1e-6 if recipe == "rowwise_with_gw_hp" else 0 < error < 2**-3  # E5M2 has one digit less
    assert torch.equal(chain[0].bias.grad, plain.bias.grad)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found.float() - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_is_handed_in_is_multiplied_in_float8(recipe: str) -> None:
    """A part of the rows gives that part of the output where scales are of rows, and is near it where they are not."""
    model = build_stack(1)
    layer = model.blocks[0].up
    convert(model, emulated(recipe))
    x = torch.randn(2, 16, 32)
    part = linear_with(layer, x, layer.weight[:32], layer.bias[:32])
    assert _distance(part, layer(x)[..., :32]) < (2**-4 if recipe == "tensorwise" else 1e-6)
    assert _distance(part, F.linear(x, layer.weight[:32], layer.bias[:32])) > 1e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_trains_nearly_as_in_fp32(recipe: str) -> None:
    model, plain = build_stack(2), build_stack(2)
    convert(model, emulated(recipe))
    losses = [_train(each) for each in (model, plain)]
    assert losses[1] < 2.5  # it has learnt: it starts at 5
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def _train(model: nn.Module) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        loss = stack_loss(model, token_batch())
        loss.backward()
        optimizer.step()
    return float(loss.detach())


# --- what is refused


@dataclass(frozen=True)
class Refused:
    options: PrecisionSection
    told: str

    def __str__(self) -> str:
        keys = self.options
        return f"{keys.float8_engine}-{keys.float8_recipe}-{keys.float8_emulate}"


REFUSALS = [
    Refused(
        float8(),
        'precision.float8_recipe = "tensorwise" cannot be computed on a CPU: it needs an accelerator with compute '
        "capability 8.9 or above.\n  To do: choose another recipe or precision.compute, or precision.float8_emulate = "
        "true with a recipe of torchao other than blockwise (slow: for tests).",
    ),
    Refused(emulated("blockwise"), 'precision.float8_recipe = "blockwise" cannot be computed on a CPU: it needs an'),
    Refused(float8("mxfp8"), "capability 10.0 or above"),
    Refused(emulated(engine="transformer_engine"), "cannot be computed on a CPU"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_a_cpu_refuses_what_it_cannot_do(case: Refused) -> None:
    with pytest.raises(UserError) as told:
        convert(build_stack(1), case.options)
    assert case.told in str(told.value)


@pytest.mark.parametrize(
    ("recipe", "capability", "can"),
    [
        ("tensorwise", (8, 9), True),
        ("tensorwise", (8, 6), False),
        ("rowwise", (8, 9), False),
        ("rowwise", (9, 0), True),
        ("mxfp8", (9, 0), False),
        ("mxfp8", (10, 0), True),
        ("blockwise", (9, 0), True),
    ],
)
def test_what_an_accelerator_can_do_follows_from_its_capability(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int], can: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    gpu = torch.device("cuda")
    if can:
        assert check_float8(float8(recipe), gpu) is False
        return
    version = f"{capability[0]}.{capability[1]}"
    with pytest.raises(UserError, match=rf"cannot be computed on NVIDIA Test \(compute capability {version}\)"):
        check_float8(float8(recipe), gpu)
    assert check_float8(emulated(recipe), gpu) is True


@pytest.mark.parametrize(
    ("engine", "package"),
    [("torchao", r"'shardway\[float8\]'"), ("transformer_engine", r"'transformer_engine\[pytorch\]'")],
)
def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, engine: str, package: str) -> None:
    _pretend_gpu(monkeypatch)
    monkeypatch.delitem(sys.modules, "shardway.parallel.float8_torchao", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(UserError, match=rf"needs {engine}, which cannot be imported(.|\n)*pip install {package}"):
        convert(build_stack(1), float8(engine=engine), torch.device("cuda"))


def test_a_recipe_that_the_library_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training.mxfp8_linear", None)
    with pytest.raises(UserError, match='"mxfp8" is not in the torchao that is installed'):
        convert(build_stack(1), float8("mxfp8"), torch.device("cuda"))


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))


# --- Transformer Engine, by a stand-in of its interface: it runs on CUDA alone


class _TeLinear(nn.Module):
    """What of `transformer_engine.pytorch.Linear` is used: its arguments, its parameters, its call."""

    def __init__(self, in_features: int, out_features: int, bias: bool, params_dtype: Any, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else None
        self.recipes = _ACTIVE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.recipes == ["Float8CurrentScaling"]
        return F.linear(x, self.weight, self.bias)


_ACTIVE: list[str] = []


class _Autocast:
    def __init__(self, enabled: bool, fp8_recipe: Any) -> None:
        self.name = type(fp8_recipe).__name__ if enabled else ""

    def __enter__(self) -> None:
        _ACTIVE.append(self.name)

    def __exit__(self, *error: object) -> None:
        _ACTIVE.pop()


def test_transformer_engine_takes_the_place_of_layers_and_keeps_their_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _pretend_gpu(monkeypatch)
    pytorch, common = types.ModuleType("transformer_engine.pytorch"), types.ModuleType("transformer_engine.common")
    pytorch.Linear, pytorch.fp8_autocast = _TeLinear, _Autocast  # type: ignore[attr-defined]
    common.recipe = types.SimpleNamespace(Float8CurrentScaling=type("Float8CurrentScaling", (), {}))  # type: ignore[attr-defined]
    whole = types.ModuleType("transformer_engine")
    for name, module in (("", whole), (".pytorch", pytorch), (".common", common)):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    whole.pytorch = pytorch  # type: ignore[attr-defined]
    model, options = build_stack(1), float8(engine="transformer_engine")
    before, expected = dict(model.named_parameters()), gradients(build_stack(1), token_batch())
    report = convert(model, options, torch.device("cuda"))
    assert report == ["blocks.0.up", "blocks.0.down"]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: id(parameter) for name, parameter in before.items()
    }
    found = gradients(model, token_batch())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(UserError, match="this version of transformer_engine has no MXFP8BlockScaling"):
        convert(build_stack(1), float8("mxfp8", engine="transformer_engine"), torch.device("cuda"))
