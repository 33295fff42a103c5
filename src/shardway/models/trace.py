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
import logging
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from shardway.errors import UserError
from shardway.models.contract import find_plan, match_modules
from shardway.plan.shapes import Measured, Unit, merge_units

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
    units = count_units(module, inputs)
    shown = (f"{str(x.dtype).removeprefix('torch.')} [{', '.join(map(str, x.shape))}]" for x in _list_tensors(inputs))
    return Measured(
        name=name or type(module).__name__,
        units=merge_units(units),
        source=f"traced with {', '.join(shown)}",
        value_bytes=next((p.element_size() for p in module.parameters() if p.is_floating_point()), 4),
    )


def count_units(module: nn.Module, inputs: Inputs, *, alike: bool = False) -> tuple[Unit, ...]:
    """The counts of `trace_module`, one entry a unit. With `alike`, of units that are alike and get inputs of the same
    shapes only the first runs: right for layers that do nothing but turn what they are given into what they return."""
    given = _list_tensors(inputs)
    if what := _refuse(given):
        raise UserError(f"the model cannot be counted: it was given {what}.\n  To do: give what `forward` takes")
    try:  # shares all tensors with the module; what `forward` leaves in attributes stays in the copy
        module = copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    except Exception as error:
        raise UserError(
            f"the model cannot be counted: copy.deepcopy of {type(module).__name__} failed with "
            f"{type(error).__name__}: {error}\n  To do: give the model before anything is wrapped around it"
        ) from error
    units = dict(_list_units(module))
    tally = _Tally([REST, *units])
    for unit_name, unit in units.items():
        tally.watch(unit_name, unit)
        if alike:
            tally.run_once(unit_name, unit)
    with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True), _without_records():
        # Parameters and buffers, a shared one once: `functional_call` finds its other names.
        state = {each: _imitate(tensor) for each, tensor in (*module.named_parameters(), *module.named_buffers())}
        try:
            named = inputs if isinstance(inputs, Mapping) else {}
            keywords = {each: _imitate(tensor) for each, tensor in named.items()}
            tally.run(module, state, () if named else tuple(map(_imitate, given)), keywords)
        except Exception as error:
            raise _explain(module, error, tally.inside[-1]) from error

    counted, seen, batch = [], set[int](), given[0].shape[0]
    for unit_name, unit in (*units.items(), (REST, module)):  # a parameter that is shared counts where it is met first
        own = [each for each in unit.parameters() if id(each) not in seen]
        seen.update(map(id, own))
        number, counts = sum(each.numel() for each in own), tally.counts[unit_name]
        if unit_name != REST or number or counts.flops or counts.saved:
            each_of = Unit(
                name=unit_name,
                parameters=number,
                forward_flops=counts.flops / batch,
                saved_bytes=counts.saved / batch,
                fixed_bytes=counts.fixed / batch,
            )
            counted.append(each_of)
    return tuple(counted)


def _list_tensors(inputs: Inputs) -> list[torch.Tensor]:
    """The tensors of inputs; what is none of the three kinds of inputs stands for itself."""
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]  # type: ignore[list-item]


def _refuse(given: Sequence[Any]) -> str:
    """What inputs were given that nothing can be counted with; "" for others."""
    if not given:
        return "no inputs"
    odd = [type(each).__name__ for each in given if not isinstance(each, torch.Tensor)]
    if odd:
        return f"an input that is no tensor: {odd[0]}"
    return "a first input without samples" if given[0].dim() == 0 or given[0].shape[0] == 0 else ""


@contextmanager
def _without_records() -> Iterator[None]:
    """What fails on fake tensors is reported by this module, without torch's own record of it and its traceback."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _imitate(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without numbers, on the CPU wherever the other is: there fused attention has a kernel."""
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return copied.requires_grad_(tensor.requires_grad)


def _list_units(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """(name, module) of each unit; none is inside another."""
    plan = find_plan(module)
    if plan is not None and plan.blocks:
        return match_modules(module, plan.blocks)
    return list(_find_lists(module, "")) or module.named_children()


def _find_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{prefix}{name}.{index}", block) for index, block in enumerate(child))
        else:
            yield from _find_lists(child, f"{prefix}{name}.")


@dataclass(frozen=True)
class _Ran:
    """A unit that ran: its counts, what it returned, and which of the tensors that it returned it had been given."""

    flops: int
    kept: list[tuple[int, int, bool]]
    """Of each storage: its address, its bytes, and whether it holds floating-point numbers."""
    outputs: Any
    places: Mapping[int, int]
    """Identity of a tensor that was given -> its place among the inputs."""
    given: Sequence[Any]  # held, so that no identity is given out twice


_PLACES = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx")
"""Attributes in which modules of libraries keep their place among others that are alike."""


def _describe_unit(unit: nn.Module) -> Hashable:
    """What two units have to have in common to be alike: classes, plain attributes, and shapes of tensors."""
    found: list[Hashable] = []
    for name, module in unit.named_modules():
        plain = sorted((k, repr(v)) for k, v in vars(module).items() if k not in _PLACES and type(v) in _PLAIN)
        found.append((name, type(module), *plain))
    tensors = (*unit.named_parameters(remove_duplicate=False), *unit.named_buffers(remove_duplicate=False))
    return (*found, *((name, _describe_value(each)) for name, each in tensors))


_PLAIN = (bool, int, float, str, type(None), tuple, list)


def _describe_value(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    return type(value), repr(value) if type(value) in _PLAIN else ""


@dataclass
class _Counts:
    flops: int = 0
    saved: int = 0
    fixed: int = 0


class _Tally:
    """Counts by unit while a forward pass runs: what happens counts for the unit that was entered last, and what is
    handed to several units (rotary factors, masks) for none of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.counts = {name: _Counts() for name in names}
        self.inside = [REST]
        # Held, so that no address is given out twice.
        self._seen: dict[int, torch.UntypedStorage] = {}
        self._given: dict[int, tuple[torch.UntypedStorage, set[str]]] = {}
        self._saved_in: dict[int, str] = {}
        self._ran: dict[Hashable, _Ran] = {}
        self._keeping: list[tuple[int, int, bool]] = []  # what `_Ran.kept` of the unit that runs will be
        self._counter = FlopCounterMode(display=False, custom_mapping=_UNKNOWN_TO_COUNTER)
        self._counted = 0

    def run(self, module: nn.Module, state: dict[str, torch.Tensor], args: Any, keywords: Any) -> None:
        """The forward pass with other parameters and buffers, which do not count as kept."""
        for tensor in state.values():
            self._remember(tensor)
        with self._counter, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            functional_call(module, state, args, keywords)
        self._settle()
        for key, unit in self._saved_in.items():
            if key in self._given and len(self._given[key][1]) > 1:
                size = self._seen[key].nbytes()
                self.counts[unit].saved -= size
                self.counts[REST].saved += size

    def watch(self, name: str, unit: nn.Module) -> None:
        def enter(_: nn.Module, *given: Any) -> None:
            self._settle()
            self.inside.append(name)
            for each in tree_leaves(given):
                if isinstance(each, torch.Tensor) and each.is_floating_point():
                    storage = each.untyped_storage()
                    self._given.setdefault(storage._cdata, (storage, set()))[1].add(name)

        def leave(*_: Any) -> None:
            self._settle()
            self.inside.pop()

        unit.register_forward_pre_hook(enter, with_kwargs=True)
        unit.register_forward_hook(leave)

    def run_once(self, name: str, unit: nn.Module) -> None:
        """Of units that are alike, run the first. The others return empty tensors, and have its counts, but for what it
        kept of tensors that they were given as well."""
        kind, whole = _describe_unit(unit), unit.forward

        def forward(*args: Any, **keywords: Any) -> Any:
            given, form = tree_flatten((args, keywords))
            key = (kind, str(form), *map(_describe_value, given))
            if key not in self._ran:
                self._settle()
                counts, self._keeping = self.counts[name], []
                before = counts.flops
                outputs = whole(*args, **keywords)
                self._settle()
                places = {id(each): place for place, each in enumerate(given) if isinstance(each, torch.Tensor)}
                self._ran[key] = _Ran(counts.flops - before, self._keeping, outputs, places, given)
                return outputs
            ran, counts = self._ran[key], self.counts[name]
            here = {each.untyped_storage()._cdata for each in given if isinstance(each, torch.Tensor)}
            kept = [each for each in ran.kept if each[0] not in here]
            counts.flops += ran.flops
            counts.saved += sum(size for _, size, _ in kept)
            counts.fixed += sum(size for _, size, floats in kept if not floats)

            def repeat(output: Any) -> Any:
                if id(output) in ran.places:
                    return given[ran.places[id(output)]]
                return _imitate(output) if isinstance(output, torch.Tensor) else output

            return tree_map(repeat, ran.outputs)

        unit.forward = forward

    def _settle(self) -> None:
        """Give the FLOPs since the last call to the unit that is inside."""
        total = self._counter.get_total_flops()
        self.counts[self.inside[-1]].flops += total - self._counted
        self._counted = total

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._remember(tensor):
            storage, unit = tensor.untyped_storage(), self.inside[-1]
            counts = self.counts[unit]
            counts.saved += storage.nbytes()
            self._keeping.append((storage._cdata, storage.nbytes(), tensor.is_floating_point()))
            if tensor.is_floating_point():
                self._saved_in[storage._cdata] = unit
            else:
                counts.fixed += storage.nbytes()
        return tensor

    def _remember(self, tensor: torch.Tensor) -> bool:
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


def _explain(module: nn.Module, error: Exception, unit: str) -> UserError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    where = type(module).__name__ if unit == REST else f"{unit} of {type(module).__name__}"
    return UserError(
        f"the model cannot be counted without numbers: {where} failed with {type(error).__name__}: {first}\n"
        "  allowed: a forward pass that depends on the shapes of its inputs alone, and takes the inputs it is given\n"
        "  to do: give inputs as training does; a model that looks at values, such as one that sends lists of tokens "
        "to experts, is counted from its sizes: a [model] section, a Hugging Face config.json, or a name"
    )
