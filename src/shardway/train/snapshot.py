"""What the passes of a step change beside gradients, kept so that they can be repeated as if for the first time.

Invariant: after `put_back` the same passes on the same batch compute the same bits, except in the first backward pass
of a process, by which DDP orders its buckets. This module must not run passes.

Kept are the random generators of this rank, the buffers of the model (running statistics, counts of balanced experts)
and what PowerSGD remembers. Gradients are not kept: the caller drops them. What a script's own model or loss function
keeps in Python objects is not seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shardway.data.batch_tree import list_leaves
from shardway.parallel.apply import ParallelModel
from shardway.parallel.axes.replicate import Compression, CompressionBefore, find_compression


@dataclass(frozen=True)
class Generators:
    """States of torch (CPU and the current device), numpy and Python."""

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    numpy: Any
    python: Any

    def put_back(self) -> None:
        """Restore every generator."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def find_generators() -> Generators:
    """Their states now."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return Generators(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())


@dataclass(frozen=True)
class _SavedBuffer:
    """A buffer of a module as it was: the tensor itself, and a copy of its values."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    values: torch.Tensor

    def put_back(self) -> None:
        """Restore the same tensor with its values, whether the pass changed or replaced it."""
        self.tensor.copy_(self.values)
        self.owner._buffers[self.name] = self.tensor


@dataclass(frozen=True)
class Before:
    """The state before the passes of a step."""

    generators: Generators
    buffers: tuple[_SavedBuffer, ...]
    compressions: tuple[CompressionBefore, ...]
    batch: tuple[tuple[torch.Tensor, int], ...]

    def put_back(self) -> None:
        """Restore everything."""
        self.generators.put_back()
        self.put_back_model()

    @torch.no_grad()
    def put_back_model(self) -> None:
        """All but the generators: a step that is skipped has drawn its random numbers."""
        for buffer in self.buffers:
            buffer.put_back()
        for compression in self.compressions:
            compression.put_back()

    def has_its_batch(self) -> bool:
        """Whether no pass wrote into the tensors of the batch."""
        return all(tensor._version == version for tensor, version in self.batch)


@dataclass(frozen=True)
class RngAndBufferSnapshot:
    """The parts of a model that passes may change; found once, since walking over a large model takes time."""

    owners: tuple[nn.Module, ...]
    compressions: tuple[Compression, ...] = ()

    @torch.no_grad()
    def remember(self, batch: Any) -> Before:
        """The state now, before the passes of `batch`."""
        held = [
            (owner, name, tensor)
            for owner in self.owners
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]
        buffers = tuple(_SavedBuffer(owner, name, tensor, tensor.clone()) for owner, name, tensor in held)
        compressions = tuple(each.remember() for each in self.compressions)
        return Before(find_generators(), buffers, compressions, tuple(_versions(list_leaves(batch))))


def find_changeable(*parallels: ParallelModel) -> RngAndBufferSnapshot:
    """The parts that passes may change, of models in training."""
    owners = tuple(module for each in parallels for module in each.module.modules() if module._buffers)
    found = (find_compression(each.call) for each in parallels)
    return RngAndBufferSnapshot(owners, tuple(each for each in found if each is not None))


def _versions(leaves: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
    """Torch counts writes into a tensor, also through views of it."""
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor)]
