"""Linear layers that multiply in eight bits, by NVIDIA's Transformer Engine.

Invariant: a layer keeps its name and its parameters; only these layers compute in float8. This module imports
Transformer Engine, so `parallel.formats.float8` imports it only when it is asked for. It needs a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common import recipe as te_recipes

_RECIPES = {
    "tensorwise": "Float8CurrentScaling",
    "mxfp8": "MXFP8BlockScaling",
    "blockwise": "Float8BlockScaling",
}


def find_conversion(
    model: nn.Module, recipe: str, *, emulate: bool, all_gather: bool
) -> Callable[[str, nn.Linear], None]:
    """What puts a layer of Transformer Engine in the place of a layer of `model`, given with its name.

    It neither emulates nor gathers in float8. Raises ImportError where the installed one lacks the recipe.
    """
    kind = getattr(te_recipes, _RECIPES[recipe], None)
    if kind is None:
        raise ImportError(f"this version of transformer_engine has no {_RECIPES[recipe]}")

    def convert(name: str, linear: nn.Linear) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, _rebuild(kind(), linear))

    return convert


def _rebuild(recipe: Any, linear: nn.Linear) -> nn.Module:
    has_bias = linear.bias is not None
    with torch.device("meta"):
        layer = te.Linear(
            linear.in_features, linear.out_features, bias=has_bias, params_dtype=linear.weight.dtype, device="meta"
        )
    layer.weight = linear.weight
    if has_bias:
        layer.bias = linear.bias
    layer.forward = partial(_in_float8, recipe, layer.forward)
    return layer


def _in_float8(recipe: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        return forward(*args, **kwargs)
