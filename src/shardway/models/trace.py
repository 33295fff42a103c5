"""Counts any model by a forward pass on fake tensors: parameters, FLOPs, and the bytes kept for the backward pass.

Invariant: no memory is taken for tensors, and the given module is not changed. FLOPs are those of
`torch.utils.flop_counter`: matrix products, convolutions, and all attention scores, also masked ones
(`Architecture.forward_flops_per_token(causal=False)` of a model without windows). Kept are the tensors that autograd
saves on a CPU: each storage once, whole, without parameters and buffers, in the unit that saves it first; a fused
attention keeps no scores. This module must not depend on how a model is trained.

A forward pass that depends on values (experts that get lists of tokens) is refused. Not seen are what recompute holds
and tensors that an autograd function holds beside `save_for_backward`. Dropout on a CPU keeps a number where CUDA keeps
a byte. An unfused attention keeps its scores, as on a GPU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from shardway.errors import UserError
from shardway.models.contract import find_plan, match_modules
from shardway.plan.shapes import Measured, Unit

Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""What `forward` takes: one tensor, several in order, or by name; values do not matter, and "meta" will do."""

REST = "rest"
"""The unit of all that is in no block."""


def trace_module(module: nn.Module, inputs: Inputs, *, name: str = "") -> Measured:
    """The counts of a module, per sample: dim 0 of the first input numbers the samples. In training or evaluation as
    it stands; built on any device, "meta" too.

    Units are the blocks of the module's plan, or else what its outermost `nn.ModuleList`s hold, or else its children.
    Raises UserError where the forward pass fails, or needs the values of a tensor.
    """
    given = list(_list_inputs(inputs))
    if not given or given[0].dim() == 0:
        what = "no inputs" if not given else "a first input without samples"
        raise UserError(f"the model cannot be counted: it was given {what}.\n  To do: give what `forward` takes")
    module = _copy(module)
    units = dict(_list_units(module))
    tally = _Tally([REST, *units])
    with torch.enable_grad():
        _run(module, units, tally, inputs)
    return Measured(
        name=name or type(module).__name__,
        units=_merge(_make_units(_count_parameters(module, units), tally, given[0].shape[0])),
        source=f"traced with {', '.join(map(_render, given))}",
        value_bytes=next((p.element_size() for p in module.parameters() if p.is_floating_point()), 4),
    )


def _copy(module: nn.Module) -> nn.Module:
    """A module that shares all tensors with this one; what `forward` leaves in attributes stays in the copy."""
    tensors = (*module.parameters(), *module.buffers())
    try:
        return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    except Exception as error:
        raise UserError(
            f"the model cannot be counted: copy.deepcopy of {type(module).__name__} failed with "
            f"{type(error).__name__}: {error}\n  To do: give the model before anything is wrapped around it"
        ) from error


@dataclass
class _Counts:
    """What one unit computes and keeps of the whole batch."""

    flops: int = 0
    saved: int = 0
    fixed: int = 0


class _Tally:
    """Counts by unit while a forward pass runs: what happens counts for the unit that was entered last."""

    def __init__(self, names: Sequence[str]) -> None:
        self.counts = {name: _Counts() for name in names}
        self.inside = [REST]
        # Held, so that no address is given out twice.
        self._seen: dict[int, torch.UntypedStorage] = {}
        self._counter = FlopCounterMode(display=False, custom_mapping=_UNKNOWN_TO_COUNTER)
        self._counted = 0

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these as kept."""
        for tensor in tensors:
            self._remember(tensor)

    def run(self, module: nn.Module, state: Mapping[str, torch.Tensor], inputs: Inputs) -> Any:
        """The forward pass with other parameters and buffers."""
        args, keywords = _as_arguments(inputs)
        with self._counter, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            outputs = functional_call(module, dict(state), args, keywords)
        self._settle()
        return outputs

    def watch(self, name: str, unit: nn.Module) -> None:
        """Count for `name` what happens in a unit."""

        def enter(*_: Any) -> None:
            self._settle()
            self.inside.append(name)

        def leave(*_: Any) -> None:
            self._settle()
            self.inside.pop()

        unit.register_forward_pre_hook(enter)
        unit.register_forward_hook(leave)

    def _settle(self) -> None:
        """Give the FLOPs since the last call to the unit that is inside."""
        total = self._counter.get_total_flops()
        self.counts[self.inside[-1]].flops += total - self._counted
        self._counted = total

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._remember(tensor):
            counts, size = self.counts[self.inside[-1]], tensor.untyped_storage().nbytes()
            counts.saved += size
            counts.fixed += 0 if tensor.is_floating_point() else size
        return tensor

    def _remember(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage is seen for the first time."""
        storage = tensor.untyped_storage()
        new = storage._cdata not in self._seen
        self._seen[storage._cdata] = storage
        return new


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """All scores, and sums of all values: a mask is not looked at, as for the other fused kernels of the counter."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def _grouped_flops(rows: Sequence[int], weights: Sequence[int], *_: Any, **__: Any) -> int:
    """Rows of features, each through one of the weights [experts, inputs, outputs], or groups of rows through all."""
    return 2 * math.prod(rows) * weights[-1]


_UNKNOWN_TO_COUNTER = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
}
"""FLOPs of operators from the shapes of their arguments, which torch's own table lacks (torch 2.13)."""


def _list_units(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of each unit; none is inside another."""
    plan = find_plan(module)
    if plan is not None and plan.blocks:
        yield from match_modules(module, plan.blocks)
        return
    lists = list(_find_lists(module, ""))
    yield from lists or ((name, child) for name, child in module.named_children())


def _find_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """What the outermost lists of modules hold."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{prefix}{name}.{index}", block) for index, block in enumerate(child))
        else:
            yield from _find_lists(child, f"{prefix}{name}.")


def _run(module: nn.Module, units: Mapping[str, nn.Module], tally: _Tally, inputs: Inputs) -> None:
    """One forward pass on tensors without numbers."""
    for name, unit in units.items():
        tally.watch(name, unit)
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = {name: _imitate(tensor) for name, tensor in _list_state(module)}
        tally.ignore(state.values())
        try:
            tally.run(module, state, _imitate_inputs(inputs))
        except Exception as error:
            raise _explain(module, error, tally.inside[-1]) from error


def _list_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, a shared one once: `functional_call` finds its other names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _imitate(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without numbers, on the CPU wherever the other is: there fused attention has a kernel."""
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return copied.requires_grad_(tensor.requires_grad)


def _imitate_inputs(inputs: Inputs) -> Inputs:
    if isinstance(inputs, torch.Tensor):
        return _imitate(inputs)
    if isinstance(inputs, Mapping):
        return {name: _imitate(tensor) for name, tensor in inputs.items()}
    return [_imitate(tensor) for tensor in inputs]


def _as_arguments(inputs: Inputs) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(_list_inputs(inputs)), {}


def _list_inputs(inputs: Inputs) -> Iterable[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    return inputs.values() if isinstance(inputs, Mapping) else inputs


def _count_parameters(module: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, int]:
    """Parameters by unit; one that is shared counts where it is met first."""
    seen: set[int] = set()
    counted = {}
    for name, unit in (*units.items(), (REST, module)):
        own = [each for each in unit.parameters() if id(each) not in seen]
        seen.update(map(id, own))
        counted[name] = sum(each.numel() for each in own)
    return counted


def _make_units(parameters: Mapping[str, int], tally: _Tally, batch: int) -> Iterator[Unit]:
    """Blocks in order, then what is in none, where there is such."""
    for name, number in parameters.items():
        counts = tally.counts[name]
        if name != REST or number or counts.flops or counts.saved:
            yield Unit(
                name=name,
                parameters=number,
                forward_flops=counts.flops / batch,
                saved_bytes=counts.saved / batch,
                fixed_bytes=counts.fixed / batch,
            )


def _merge(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Units that follow one another and are alike in all numbers as one."""
    merged = []
    for _, group in groupby(units, key=lambda unit: replace(unit, name="")):
        alike = list(group)
        name = alike[0].name if len(alike) == 1 else f"{alike[0].name} to {alike[-1].name}"
        merged.append(replace(alike[0], name=name, count=len(alike)))
    return tuple(merged)


def _render(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(map(str, tensor.shape))}]"


def _explain(module: nn.Module, error: Exception, unit: str) -> UserError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    where = type(module).__name__ if unit == REST else f"{unit} of {type(module).__name__}"
    return UserError(
        f"the model cannot be counted without numbers: {where} failed with {type(error).__name__}: {first}\n"
        "  allowed: a forward pass that depends on the shapes of its inputs alone, and takes the inputs it is given\n"
        "  to do: give inputs as training does; a model that looks at values, such as one that sends lists of tokens "
        "to experts, is counted from its sizes: a [model] section, a Hugging Face config.json, or a name"
    )
