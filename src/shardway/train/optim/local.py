"""The base of our optimizers: each rank updates what it holds, whatever mesh that belongs to.

Invariant: an update that takes each element by itself needs no communication, and no kernel sees a DTensor: torch
refuses DTensors of several meshes, or beside plain tensors, in one call. This module must not know a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardway.models.contract import held_by_rank
from shardway.models.initialise import held_part
from shardway.train.optim.groups import Groups
from shardway.train.optim.parts import Kernel, ParameterPart, local_gradient
from shardway.train.optim.widen import is_narrow, update_widened

FUSED_DEVICES = ("cpu", "cuda")
"""Devices on which torch 2.11 to 2.13 have fused kernels of all optimizers here."""


@dataclass(frozen=True)
class Numerics:
    """How an update is computed. `state_dtype` None keeps elementwise states in the format of their parameter."""

    kernel: Literal["auto", "fused", "foreach"] = "auto"
    state_dtype: torch.dtype | None = None


class LocalOptimizer(torch.optim.Optimizer):
    """Steps on the local tensors of parameters. A subclass names its elementwise states and has a kernel for them.

    Every parameter has the state `step` besides: its number of updates, fp32 on the CPU.
    """

    def __init__(self, groups: Groups, defaults: dict[str, Any], numerics: Numerics) -> None:
        super().__init__(groups, defaults)
        self._numerics = numerics
        self._offsets: dict[torch.Tensor, tuple[int, ...]] = {}
        self.register_load_state_dict_post_hook(self._restore_formats)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The states of a group's parameters that have one number an element, at most two."""
        raise NotImplementedError

    def update(self, group: dict[str, Any], parts: Sequence[ParameterPart]) -> None:
        """Change parameters and states of the parts in place; states come in the order of `state_names`."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if used:
                self.advance(group, used)
        return loss

    def advance(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Update parameters of a group that have gradients."""
        self.run(lambda some: self.update(group, some), self.next_parts(group, parameters))

    def run(self, kernel: Kernel, parts: Sequence[ParameterPart]) -> None:
        """Apply a kernel that takes each element by itself; what is kept in bf16 reaches it in fp32."""
        wide: list[ParameterPart] = []
        narrow: list[ParameterPart] = []
        for part in parts:
            (narrow if is_narrow(part) else wide).append(part)
        if wide:
            kernel(wide)
        if narrow:
            update_widened(narrow, kernel)

    def next_parts(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> list[ParameterPart]:
        """What this rank holds of parameters, their steps counted up: all at once, or a small model waits for it."""
        states, names = [self.state_of(group, parameter) for parameter in parameters], self.state_names(group)
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, 1)
        steps = torch.stack(counts).tolist()
        return [
            ParameterPart(
                parameter=held_by_rank(parameter),
                gradient=local_gradient(parameter),
                states=tuple([held_by_rank(state[name]) for name in names]),
                step=int(step),
                shape=parameter.shape,
                offset=self._offset(parameter),
            )
            for parameter, state, step in zip(parameters, states, steps, strict=True)
        ]

    def state_of(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter, made at its first update."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(self.new_states(group, parameter))
        return state

    def new_states(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """States of a parameter before its first update."""
        dtype = self._numerics.state_dtype or parameter.dtype
        return {name: torch.zeros_like(parameter, dtype=dtype) for name in self.state_names(group)}

    def can_fuse(self, parts: Sequence[ParameterPart]) -> bool:
        """Whether a fused kernel may take these parts.

        It walks through memory without looking at strides: tensors that lie there differently (channels_last
        weights with other gradients) would be combined wrongly, without an error.
        """
        if self._numerics.kernel == "foreach":
            return False
        known = self._numerics.kernel == "fused" or parts[0].parameter.device.type in FUSED_DEVICES
        return known and all(len({tensor.stride() for tensor in part.tensors}) == 1 for part in parts)

    def _offset(self, parameter: torch.Tensor) -> tuple[int, ...]:
        if torch.bfloat16 not in (self._numerics.state_dtype, parameter.dtype):
            return ()  # only rounding asks for it, and it takes longer to find than a small update
        if parameter not in self._offsets:
            self._offsets[parameter] = held_part(parameter, f"of shape {tuple(parameter.shape)}").offset
        return self._offsets[parameter]

    def _restore_formats(self, _: torch.optim.Optimizer) -> None:
        """Put states back into their own format: torch casts what it loads to that of the parameter."""
        dtype = self._numerics.state_dtype
        for group in self.param_groups if dtype is not None else ():
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                state.update({name: state[name].to(dtype) for name in self.state_names(group) if name in state})
