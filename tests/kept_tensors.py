"""Counts what a forward pass leaves behind for its backward pass, while a run trains.

Invariant: a storage counts once, whole, from the moment that autograd (or selective recompute) saves the first tensor
in it until the last is let go; parameters do not count, whole ones that are gathered neither. Copies of parameters do.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardway.parallel import blocks


class _Held:
    """A tensor that autograd saved; when it is gone, so is what autograd kept."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its history: an operator that saves its own result would keep itself alive.
        self.tensor = tensor.detach()


class KeptTensors:
    """`peak`: most bytes that were kept at once since the start."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._uses: Counter[int] = Counter()
        self._parameters: dict[int, torch.UntypedStorage] = {}
        self._open: list[Any] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Results of operators that selective recompute keeps count as well."""
        keep = blocks._keep

        def counted(value: Any) -> Any:
            kept = keep(value)
            if isinstance(kept, blocks._Kept):
                self._hold(kept, kept.tensor)
            return kept

        with mock.patch.object(blocks, "_keep", counted):
            yield

    def watch(self, model: nn.Module) -> None:
        """Count what forward passes of this model save, and nothing that is computed from its output."""
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(self._pass_over)
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        hooks.__enter__()
        self._open.append(hooks)

    def _leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    def _pass_over(self, module: nn.Module, _: Any) -> None:
        """Parameters as they are at the moment of their use: whole, where they are shared."""
        for parameter in module.parameters(recurse=False):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            storage = local.untyped_storage()
            self._parameters[storage._cdata] = storage

    def _pack(self, tensor: torch.Tensor) -> _Held:
        held = _Held(tensor)
        self._hold(held, tensor)
        return held

    def _hold(self, owner: object, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._parameters:
            return
        if not self._uses[key]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self._uses[key] += 1
        weakref.finalize(owner, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            self.now -= size
