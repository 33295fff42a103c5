"""Autocast around a model's forward pass alone: what it returns is fp32 again, so that a loss is computed as it is
written.

A loss that a script has written for fp32 may hold what autocast refuses (`binary_cross_entropy` on CUDA) or mix its
formats; around the whole of it, autocast is for who asks for it.

Invariant: a model that was copied computes as its original, with its own weights. This module must not decide which
model is computed so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree


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
