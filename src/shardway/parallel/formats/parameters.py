"""Formats that weights and inputs of a model are kept in: bf16 numbers, channels-last images.

Invariant: names and values stay (values rounded once to bf16); buffers and batch norms keep fp32, since running
statistics would stand still in bf16. This module must not know how products are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

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
        if isinstance(parameter, DTensor):  # its `.data` takes another dtype without a word and keeps its own
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
