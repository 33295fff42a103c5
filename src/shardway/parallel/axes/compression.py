"""What PowerSGD remembers from one backward pass for the next, so that a pass can be repeated.

Invariant: after `put_back` the hook compresses the same gradients to the same bits. This module must not compress.

Of the state of torch's hook a backward pass replaces the tensors of errors, which are as large as the gradients, and
writes into those of the low-rank factors. So errors are kept by reference and the second factors as copies; the first
are computed from the second (Vogels et al., arXiv:1905.13727, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class CompressionBefore:
    """The state of PowerSGD at one moment."""

    state: PowerSGDState
    errors: Mapping[int, torch.Tensor]
    first: Mapping[int, torch.Tensor]
    second: Mapping[int, torch.Tensor]
    random: Any
    iteration: int

    def put_back(self) -> None:
        """Let the next backward pass be compressed as from that moment on."""
        self.state.error_dict = dict(self.errors)
        self.state.p_memory_dict = dict(self.first)
        self.state.q_memory_dict = {bucket: tensor.clone() for bucket, tensor in self.second.items()}
        self.state.rng.set_state(self.random)
        self.state.iter = self.iteration


@dataclass(frozen=True)
class Compression:
    """The compression of a model's copies."""

    state: PowerSGDState

    def remember(self) -> CompressionBefore:
        """The state now."""
        state = self.state
        second = {bucket: tensor.clone() for bucket, tensor in state.q_memory_dict.items()}
        first, random = dict(state.p_memory_dict), state.rng.get_state()
        return CompressionBefore(state, dict(state.error_dict), first, second, random, state.iter)


def find_compression(call: nn.Module) -> Compression | None:
    """That of a model as it is called, where it has one that remembers."""
    hooks = call._comm_hooks if isinstance(call, DistributedDataParallel) else []
    states = [state for _, state in hooks if isinstance(state, PowerSGDState)]
    return Compression(states[0]) if states else None
