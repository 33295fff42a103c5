"""Number formats of a step: autocast, formats of weights and inputs, products of linear layers.

Invariants:
- `linear_with(module, x, module.weight, module.bias)` equals `module(x)`, so a region that computes with the local part
  of a weight is independent of formats.
- `apply_formats` keeps names and values (rounded once to bf16); buffers and batch norms keep fp32, since running
  statistics would not change in bf16.
- A copy of an autocast model computes as its original, with its own weights.
- One `Precision` holds all formats; if weights are kept in fp32 the optimizer works on fp32.

A script's loss written for fp32 may use operators that autocast refuses (`binary_cross_entropy` on CUDA) or mix its
formats, so autocast around the whole loss is optional.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree
from torch.utils._pytree import tree_map_only

from shardway.parallel.formats.float8 import Float8Options
from shardway.runfile.schema import PrecisionSection

# --- linear layers with a given weight


class FormattedLinear(nn.Linear):
    """A linear layer that multiplies in a format of its own.

    An existing `nn.Linear` becomes one by a change of its class, so that its name, parameters, hooks and whatever
    stands in for its `forward` stay.
    """

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., in] @ weight [out, in] transposed -> [..., out] in x's dtype."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_with(self, x, self.weight, self.bias)


def linear_with(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What the linear layer `module` computes of x [..., in], with this weight [out, in] and bias [out]."""
    if not isinstance(module, FormattedLinear):
        return F.linear(x, weight, bias)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):  # the format is chosen here, not by the operator inside
        y = module.multiply(x, weight)
        return y if bias is None else y + bias.to(y.dtype)


# --- formats of weights and inputs

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Formats:
    """`weights` None leaves them; `channels_last` orders the memory of 4-dim weights and inputs as N, H, W, C."""

    weights: torch.dtype | None = None
    channels_last: bool = False


def apply_formats(model: nn.Module, formats: Formats) -> None:
    """Bring weights into these formats, in place, and each input of the model when it is called.

    To be applied to each stage of a pipeline, since a stage has hooks of its own; weights that stages share do not
    change a second time.
    """
    if formats.weights is not None:
        _cast_weights(model, formats.weights)
    if formats.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if formats != Formats():
        model.register_forward_pre_hook(_InputHook(formats), with_kwargs=True)


def _cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    norms = {p for module in model.modules() if isinstance(module, _BATCH_NORMS) for p in module.parameters()}
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter in norms:
            continue
        cast = parameter.detach().to(dtype)
        if isinstance(parameter, DTensor):  # its `.data` takes another dtype without an error and keeps its own
            torch.utils.swap_tensors(parameter, nn.Parameter(cast, parameter.requires_grad))
        else:
            parameter.data = cast


@dataclass(frozen=True)
class _InputHook:
    """Brings the tensors of a call into the model's formats."""

    formats: Formats

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, self._bring, (args, kwargs))

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.formats.weights is not None and tensor.is_floating_point():
            tensor = tensor.to(self.formats.weights)
        if self.formats.channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor


# --- autocast of the model alone


@dataclass(eq=False)
class ModelAutocast:
    """Hooks of one module; `dtype` is the format of its products. In an autocast of the caller's, that one holds."""

    device_type: str
    dtype: torch.dtype
    _open: list[AbstractContextManager[Any] | None] = field(default_factory=list)

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook."""
        is_on = torch.is_autocast_enabled(self.device_type)
        context = None if is_on else torch.autocast(self.device_type, self.dtype)
        if context is not None:
            context.__enter__()
        self._open.append(context)

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """A forward hook, called whatever ends the pass."""
        context = self._open.pop() if self._open else None
        if context is None:
            return output
        context.__exit__(None, None, None)
        return _pytree.tree_map_only(torch.Tensor, self._widen, output)

    def _widen(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == self.dtype else tensor


def autocast_model(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Compute a model under autocast from now on; returns what ends that."""
    hooks = ModelAutocast(device.type, dtype)
    first = model.register_forward_pre_hook(hooks.enter)
    last = model.register_forward_hook(hooks.leave, always_call=True)

    def end() -> None:
        first.remove()
        last.remove()

    return end


# --- the formats of a step

_COMPUTE = {"auto": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}
"""Format of products; with float8 that of everything which is not a converted linear layer. "auto" is of a section that
was not resolved, for weights that are read or written and not trained."""

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """`autocast_dtype` None computes in the format of the weights; `reduce_dtype` is that of summed sharded gradients.

    `scales_loss`: fp16, whose gradients need a `LossScale`. `float8` None: no layer is converted.
    """

    autocast_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    weights_dtype: torch.dtype = torch.float32
    float8: Float8Options | None = None
    model_dtype: torch.dtype | None = None
    """What a script's model computes its products in by hooks of its own, where no autocast is around its loss."""

    @property
    def scales_loss(self) -> bool:
        """Whether the loss must be scaled, so that small gradients do not vanish."""
        return self.autocast_dtype == torch.float16

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context in which a forward pass runs; none where weights are kept in the format of products."""
        if self.autocast_dtype in (None, self.weights_dtype):
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)


def read_precision(section: PrecisionSection) -> Precision:
    """The formats that a resolved run file names."""
    return Precision(
        _COMPUTE[section.compute],
        _FORMATS[section.reduce],
        _FORMATS[section.weights],
        _read_float8(section) if section.compute == "float8" else None,
    )


def left_to_model(precision: Precision) -> Precision:
    """The same formats if the model itself casts its products (`ModelAutocast`)."""
    return replace(precision, autocast_dtype=None, model_dtype=precision.autocast_dtype)


def _read_float8(section: PrecisionSection) -> Float8Options:
    return Float8Options(
        section.float8_recipe,
        section.float8_engine,
        section.float8_emulate,
        section.float8_all_gather is True,
        section.first_last,
    )


def formats_of(precision: Precision, *, channels_last: bool = False) -> Formats:
    """What `apply_formats` is to do to the model, or to each stage of a pipeline."""
    dtype = precision.weights_dtype
    return Formats(None if dtype == torch.float32 else dtype, channels_last)
