"""Linear layers that multiply in eight bits, by torchao.

Invariant: a layer is converted in place and keeps its name, and a state dict shows its weight as an ordinary tensor.
This module imports torchao, so `parallel.precision` imports it only when it is asked for.

Formats: one scale per tensor or per row (Micikevicius et al., arXiv:2209.05433); one for 32 values (OCP Microscaling
Formats MX specification 1.0, section 5); one for 128 values of an activation and 128 x 128 of a weight (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from shardway.models.contract import held_by_rank
from shardway.parallel.precision import FormattedLinear


class ScaledLinear(FormattedLinear, Float8Linear):
    """One scale per tensor or per row; its attributes are those of torchao's class."""

    config: Any
    linear_mm_config: Any

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), self.linear_mm_config, self.config)


class BlockScaledLinear(FormattedLinear):
    """One scale for a block of values, of an activation and of a weight; `product` is by torchao."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.product(x, weight.to(x.dtype))


def find_conversion(
    model: nn.Module, recipe: str, *, emulate: bool, all_gather: bool
) -> Callable[[str, nn.Linear], None]:
    """What makes a layer of `model`, given with its name, multiply in eight bits.

    Raises ImportError where torchao or a library of kernels lacks the recipe.
    """
    kind, attributes = _RECIPES[recipe](recipe, emulate)
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))

    def convert(name: str, linear: nn.Linear) -> None:
        used_once = uses[cast(nn.Parameter, linear.weight)] == 1
        for key, value in attributes.items():
            if key not in vars(linear):
                setattr(linear, key, value)
        linear.__class__ = kind
        # A weight that two modules use would come apart: the one that knows float8 is a parameter of its own.
        if all_gather and isinstance(linear, ScaledLinear) and used_once:
            _gather_in_float8(linear)

    return convert


Kind = tuple[type[FormattedLinear], dict[str, Any]]


def _scaled(recipe: str, emulate: bool) -> Kind:
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    # torchao's own entry fills the attributes, and mends inductor's code for float8 while it is at it.
    template = convert_to_float8_training(nn.Linear(16, 16, bias=False, device="meta"), config=config)
    return ScaledLinear, vars(template)


def _microscaled(recipe: str, emulate: bool) -> Kind:
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    product = partial(
        _to_mxfp8_then_scaled_mm,
        kernel_preference=KernelPreference.EMULATED if emulate else KernelPreference.AUTO,
        scale_calculation_mode=ScaleCalculationMode.RCEIL,
    )
    return BlockScaledLinear, {"product": product}


def _blockwise(recipe: str, emulate: bool) -> Kind:
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    return BlockScaledLinear, {"product": partial(_multiply_blockwise, fp8_blockwise_mm)}


def _multiply_blockwise(function: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return function.apply(x, weight, 128, x.dtype)


_RECIPES: dict[str, Callable[[str, bool], Kind]] = {
    "tensorwise": _scaled,
    "rowwise": _scaled,
    "rowwise_with_gw_hp": _scaled,
    "mxfp8": _microscaled,
    "blockwise": _blockwise,
}


def _gather_in_float8(linear: ScaledLinear) -> None:
    """Let FSDP2 cast this layer's weight before it gathers it: a quarter of the bytes of fp32 travel.

    The weight becomes a tensor subclass that knows how; `state_dict` shows the tensor inside.
    """
    weight = linear.weight.detach()
    local = WeightWithDynamicFloat8CastTensor(
        held_by_rank(weight), linear.linear_mm_config, linear.config.cast_config_weight.target_dtype
    )
    linear.weight = nn.Parameter(_with_local(weight, local), linear.weight.requires_grad)
    linear.register_state_dict_post_hook(_show_plain_weight)


def _with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` laid out over ranks as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _show_plain_weight(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    weight = state[f"{prefix}weight"]
    local = held_by_rank(weight)
    if isinstance(local, WeightWithDynamicFloat8CastTensor):
        state[f"{prefix}weight"] = _with_local(weight, local._tensor)


compute_scales = precompute_float8_dynamic_scale_for_fsdp
