"""The base of our optimizers (groups of parameters, what a rank holds of each, bf16 states), and the elementwise ones.

Invariants:
- Parts: the tensors of a part have one shape and share memory with what they were taken from.
- Groups: every trainable parameter is in exactly one group, and a group is never empty.
- Rounding: a rounded value has the exact one as its mean. It is a pure function of step and row-major index in the
  whole parameter, so a run repeats itself, every layout rounds alike and replicas stay equal.
- Updates: an elementwise update needs no communication, and no kernel sees a DTensor: torch refuses DTensors of several
  meshes, or beside plain tensors, in one call. The numbers of AdamW and SGD are those of `torch.optim.AdamW` and
  `torch.optim.SGD`, whose functional forms compute them.
- Only this module imports torchao, when 8-bit states are asked for.

Rounding to the nearest would stall second moments: with beta2 = 0.999 they fall by at most 1/1000 of themselves, and
two neighbours in bf16 lie 1/256 to 1/128 apart. Weights lose small updates in the same way.

8-bit states: a block of 256 numbers is quantized together, and blocks are cut from what a rank holds. So a checkpoint
fits another layout only if that also cuts a parameter between blocks (otherwise torchao raises ValueError). States of
parts below 4096 numbers stay in fp32 and are quantized when they become part of a larger one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shardway.errors import Bug, UserError
from shardway.models.contract import ModelPlan, canonical_name, held_by_rank, matches
from shardway.models.initialise import held_part
from shardway.parallel.axes.replicate import send
from shardway.parallel.blocks import find_units

# --- parts: what a rank holds of a parameter


class ParameterPart(NamedTuple):
    """What this rank holds of one parameter, or some rows of that; `step` counts from 1, and `step_tensor` is
    the same number on the CPU (fp32, 0-dim).

    `shape` is that of the whole parameter and `offset` the place of this part in it; a rank that holds a part needs
    no communication to update it. A tuple: one is made for each parameter and step.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    states: tuple[torch.Tensor, ...]
    step: int
    step_tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The parameter, its gradient and its states."""
        return (self.parameter, self.gradient, *self.states)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> ParameterPart:
        """The same part with other tensors in the order of `tensors`."""
        return self._replace(parameter=tensors[0], gradient=tensors[1], states=tuple(tensors[2:]))


Kernel = Callable[[Sequence[ParameterPart]], None]
"""Changes the parameters and states of parts in place."""


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of the elements that this rank holds of a parameter."""
    gradient = parameter.grad
    if gradient is None:
        raise Bug(f"a parameter of shape {tuple(parameter.shape)} has no gradient and is updated")
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements != parameter.placements:  # plain DTensor operators may leave it a sum over ranks
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def split_dim(placement: Placement) -> int | None:
    """The dim that an axis of a mesh splits, or None; FSDP2 over tensor parallel has a kind of split of its own."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


# --- the base class

FUSED_DEVICES = ("cpu", "cuda")
"""Devices on which torch 2.11 to 2.13 have fused kernels of all optimizers here."""

Groups = list[dict[str, Any]]
"""Parameter groups as `torch.optim` takes them."""


@dataclass(frozen=True)
class Numerics:
    """How an update is computed. `state_dtype` None keeps elementwise states in the format of their parameter."""

    kernel: Literal["auto", "fused", "foreach"] = "auto"
    state_dtype: torch.dtype | None = None


class LocalOptimizer(torch.optim.Optimizer):
    """Steps on the local tensors of parameters. A subclass names its elementwise states and has a kernel for them.

    Every parameter has the state `step` besides: its number of updates, fp32 on the CPU.

    `found_inf`, where it is set, is as torch's fused optimizers have it for a gradient scaler: where it is 1 on the
    device (0-dim, fp32), `step` changes no weight and no state, and the host calls `take_back` once it has read that.
    """

    found_inf: torch.Tensor | None = None

    def __init__(self, groups: Groups, defaults: dict[str, Any], numerics: Numerics) -> None:
        super().__init__(groups, defaults)
        self._begin(numerics)

    def _begin(self, numerics: Numerics) -> None:
        """What torch does not copy of an optimizer."""
        self._numerics = numerics
        self._offsets: dict[torch.Tensor, tuple[int, ...]] = {}
        # The steps of parameters that are updated together, by the first of them: one tensor, and its views.
        self._counts: dict[torch.Tensor, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self.register_load_state_dict_post_hook(self._restore_formats)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "numerics": self._numerics}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or of loaded states, which have no numerics."""
        numerics = state.pop("numerics", None)
        super().__setstate__(state)
        if numerics is not None:
            self._begin(numerics)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The states of a group's parameters that have one number an element, at most two."""
        raise NotImplementedError

    def update(self, group: dict[str, Any], parts: Sequence[ParameterPart]) -> None:
        """Change parameters and states of the parts in place; states come in the order of `state_names`."""
        raise NotImplementedError

    @property
    def _step_supports_amp_scaling(self) -> bool:  # by this name torch asks its own
        """Whether `step` heeds `found_inf`."""
        return self._numerics.kernel != "foreach" and type(self) in (AdamW, SGD)

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

    def take_back(self) -> None:
        """Count the last step as not taken; its gradients are still there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] -= 1
                    if not state["step"]:
                        del self.state[parameter]

    def is_left_out(self) -> bool:
        """Whether `found_inf` says so, for kernels that cannot ask it on the device: the host waits."""
        return self.found_inf is not None and bool(self.found_inf)

    def advance(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Update parameters of a group that have gradients."""
        self.run(lambda some: self.update(group, some), self.next_parts(group, parameters))

    def run(self, kernel: Kernel, parts: Sequence[ParameterPart]) -> None:
        """Apply a kernel that takes each element by itself; what is kept in bf16 reaches it in fp32."""
        wide: list[ParameterPart] = []
        narrow: list[ParameterPart] = []
        for part in parts:
            is_narrow = torch.bfloat16 in [tensor.dtype for tensor in part.tensors]
            (narrow if is_narrow else wide).append(part)
        if wide:
            kernel(wide)
        if narrow:
            update_widened(narrow, kernel)

    def next_parts(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> list[ParameterPart]:
        """What this rank holds of parameters, their steps counted up: all at once, or a small model waits for it."""
        states, names = [self.state_of(group, parameter) for parameter in parameters], self.state_names(group)
        steps, parts = self._count_up(parameters[0], states), []
        for parameter, state, step in zip(parameters, states, steps, strict=True):
            held: list[torch.Tensor] = [state[name] for name in names]
            own, gradient = parameter, parameter.grad
            if gradient is None or isinstance(parameter, DTensor):
                own, gradient = held_by_rank(parameter), local_gradient(parameter)
                held = [held_by_rank(each) for each in held]
            offset = self._offset(parameter)
            parts.append(ParameterPart(own, gradient, tuple(held), int(step), state["step"], parameter.shape, offset))
        return parts

    def _count_up(self, first: torch.Tensor, states: Sequence[dict[str, Any]]) -> list[float]:
        """The steps of some parameters, `first` and others, one more than they were. Their tensors become views of one:
        to add to each by itself takes as long as an update of small parameters."""
        together, views = self._counts.get(first, (None, ()))
        counts = [state["step"] for state in states]
        if together is None or len(views) != len(counts) or any(map(operator.is_not, views, counts)):
            together = torch.stack(counts)  # other parameters than last time, or states that were loaded
            views = together.unbind()
            for state, view in zip(states, views, strict=True):
                state["step"] = view
            self._counts[first] = together, views
        found: list[float] = together.add_(1).tolist()
        return found

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
        weights with other gradients) would be combined wrongly, without an error. It knows no complex numbers.
        """
        if self._numerics.kernel == "foreach" or any(part.parameter.is_complex() for part in parts):
            return False
        known = self._numerics.kernel == "fused" or parts[0].parameter.device.type in FUSED_DEVICES
        return known and all(_lie_alike(part.tensors) for part in parts)

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


# --- AdamW, and SGD with momentum (Sutskever et al., ICML 2013)


class AdamW(LocalOptimizer):
    """A group has `lr`, `betas`, `eps` and `weight_decay`; the states are `exp_avg` and `exp_avg_sq`."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(self, group: dict[str, Any], parts: Sequence[ParameterPart]) -> None:
        fused = self.can_fuse(parts)
        if not fused and self.is_left_out():
            return
        first, second = group["betas"]
        numbers: dict[str, Any] = {"lr": group["lr"], "beta1": first, "beta2": second, "eps": group["eps"]}
        numbers |= {"weight_decay": group["weight_decay"], "amsgrad": False, "maximize": False}
        if not fused:
            counts = list(torch.tensor([part.step - 1.0 for part in parts]).unbind())  # it counts them up
            parameters, gradients, averages, squares = _columns(parts)
            complex_too = any(parameter.is_complex() for parameter in parameters)
            adamw(
                parameters, gradients, averages, squares, [], counts, foreach=True, has_complex=complex_too, **numbers
            )
            return
        # The kernel itself: what `adamw` does around it takes as long as all updates of a small model.
        for (device, _), alike in _group_alike(parts).items():
            counts = [part.step_tensor for part in alike]
            if device.type != "cpu":  # beside the parameters, by one copy
                counts = list(send([part.step for part in alike], torch.float32, device).unbind())
            parameters, gradients, averages, squares = _columns(alike)
            torch._fused_adamw_(
                parameters, gradients, averages, squares, [], counts, found_inf=self.found_inf, **numbers
            )


def _columns(parts: Sequence[ParameterPart]) -> list[list[torch.Tensor]]:
    """Parameters, gradients, and each state of them."""
    return [list(column) for column in zip(*(part.tensors for part in parts), strict=True)]


def _group_alike(
    parts: Sequence[ParameterPart],
) -> dict[tuple[torch.device, torch.dtype], list[ParameterPart]]:
    """Parts whose parameters are of one device and format, which one launch can take."""
    found: dict[tuple[torch.device, torch.dtype], list[ParameterPart]] = {}
    for part in parts:
        found.setdefault((part.parameter.device, part.parameter.dtype), []).append(part)
    return found


def _lie_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors of one shape have their elements in the same order in memory."""
    return all(tensor.is_contiguous() for tensor in tensors) or len({tensor.stride() for tensor in tensors}) == 1


class SGD(LocalOptimizer):
    """A group has `lr`, `momentum`, `nesterov` and `weight_decay`; with momentum there is a `momentum_buffer`."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, group: dict[str, Any], parts: Sequence[ParameterPart]) -> None:
        fused = self.can_fuse(parts)
        if not fused and self.is_left_out():
            return
        sgd(
            [part.parameter for part in parts],
            [part.gradient for part in parts],
            [part.states[0] if part.states else None for part in parts],
            foreach=not fused,
            fused=fused,
            found_inf=self.found_inf if fused else None,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )


def build_adamw8bit(groups: Groups, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """torchao's AdamW8bit (Dettmers et al., arXiv:2110.02861), with a learning rate that may be set to a number. Raises
    UserError without torchao."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f'optim.name = "adamw8bit" needs torchao, which cannot be imported: {error}\n'
            '  To do: pip install "shardway[float8]", or choose optim.name = "adamw" with '
            'optim.state_dtype = "bf16", which takes half the memory of fp32 states and needs nothing.'
        ) from None

    def make_rates_tensors(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Its update is compiled, and a number would be compiled into it again at every step of the schedule."""
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
    optimizer.register_step_pre_hook(make_rates_tensors)
    return optimizer


# --- groups of parameters


def decay_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Two parameter groups: matrices with weight decay, everything of fewer than two dims without."""
    return _split_by_decay([each for each in model.parameters() if each.requires_grad], weight_decay)


def _split_by_decay(parameters: Sequence[nn.Parameter], weight_decay: float) -> Groups:
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def muon_groups(model: nn.Module, weight_decay: float) -> tuple[list[nn.Parameter], Groups]:
    """The matrices of the model's blocks, and groups of everything else.

    A matrix has two dims, or three where the plan calls its module one of experts. Embeddings and the output layer
    are no such matrices, wherever they are, nor are the kernels of convolutions. Raises UserError for a model without
    a plan that has none.
    """
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    # A model may be a part of a whole one (a pipeline stage), which `find_plan` would refuse.
    own: ModelPlan | None = inner.plan() if callable(getattr(type(inner), "plan", None)) else None
    plan = own or ModelPlan()
    inside = {parameter for unit in find_units(inner, own) for parameter in unit.parameters()}
    matrices = set[nn.Parameter]()
    for name, module in inner.named_modules():
        called = canonical_name(name)
        is_expert = any(matches(called, pattern) for pattern in plan.experts)
        kinds = [split for pattern, split in plan.tensor.items() if matches(called, pattern)]
        is_table = isinstance(module, nn.Embedding) or "vocabulary" in kinds or "logits" in kinds
        for each in module.parameters(recurse=False):
            if each in inside and (each.dim() == 3 if is_expert else each.dim() == 2 and not is_table):
                matrices.add(each)
    if not matrices and own is None:
        raise UserError(
            f'optim.name = "muon" is for the matrices of a model\'s blocks, and {type(model).__name__} has none that '
            'are known.\n  To do: name the blocks in a plan() of the model, or choose optim.name = "adamw".'
        )
    trainable = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    others = [parameter for parameter in trainable if parameter not in matrices]
    return [parameter for parameter in trainable if parameter in matrices], _split_by_decay(others, weight_decay)


# --- bf16 weights and states, rounded stochastically

WORKING = 2**22
WORKING_ON_CPU = 2**18
"""Elements that are widened at once: bounds the working memory to about 100 MiB, or to what caches hold."""

_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))
_STEP = 0x9E3779B9
_STREAM = 0x85EBCA6B
_LOW = 0xFFFF
_LARGEST = 0x7FFF0000


def update_widened(parts: Sequence[ParameterPart], kernel: Kernel, working: int | None = None) -> None:
    """Run a kernel on fp32 copies of what parts hold in bf16, then round weights and states back.

    `working` changes memory and speed, never values.
    """
    on_cpu = parts[0].parameter.device.type == "cpu"
    for bucket in _fill_buckets(parts, working or (WORKING_ON_CPU if on_cpu else WORKING)):
        # For each tensor of a part: those of all parts, in fp32, and where they are copies the one they look into.
        wide: list[list[torch.Tensor]] = []
        flats: dict[int, torch.Tensor] = {}
        narrow = [list(column) for column in zip(*(part.tensors for part in bucket), strict=True)]
        for at, tensors in enumerate(narrow):
            if tensors[0].dtype is not torch.bfloat16:
                wide.append(tensors)
                continue
            sizes = [tensor.numel() for tensor in tensors]
            flat = flats[at] = torch.empty(sum(sizes), device=tensors[0].device)
            wide.append([piece.view(tensor.shape) for piece, tensor in zip(flat.split(sizes), tensors, strict=True)])
            torch._foreach_copy_(wide[-1], tensors)
        kernel([part.with_tensors(tensors) for part, tensors in zip(bucket, zip(*wide, strict=True), strict=True)])
        # Round and write back all but gradients; each draw of 32 bits serves two columns.
        noise = torch.empty(0)
        for place, at in enumerate(at for at in flats if at != 1):
            if place % 2 == 0:
                noise = torch.cat([noise_of(part, place // 2).view(-1) for part in bucket])
            round_stochastically(flats[at], noise >> (16 * (place % 2)) & _LOW)
            torch._foreach_copy_(narrow[at], wide[at])


def _fill_buckets(parts: Sequence[ParameterPart], working: int) -> Iterator[list[ParameterPart]]:
    """Parts whose tensors have the same formats, together, and as many as `working` elements have room for."""
    alike: dict[tuple[torch.dtype, ...], list[ParameterPart]] = {}
    for part in parts:
        alike.setdefault(tuple(tensor.dtype for tensor in part.tensors), []).append(part)
    for same in alike.values():
        bucket: list[ParameterPart] = []
        room = working
        for piece in (piece for part in same for piece in split_rows(part, working)):
            if bucket and piece.parameter.numel() > room:
                yield bucket
                bucket, room = [], working
            bucket.append(piece)
            room -= piece.parameter.numel()
        if bucket:
            yield bucket


def split_rows(part: ParameterPart, elements: int) -> Iterator[ParameterPart]:
    """The part in pieces of at most so many elements (one row, where a row is longer); none of an empty part."""
    if part.parameter.numel() <= elements:
        yield from [part] if part.parameter.numel() else []
        return
    length = part.parameter.shape[0]
    rows = max(1, elements * length // part.parameter.numel())
    for first in range(0, length, rows):
        piece = part.with_tensors([tensor[first : first + rows] for tensor in part.tensors])
        yield piece._replace(offset=(part.offset[0] + first, *part.offset[1:]))


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> None:
    """Cut fp32 values in place to what bf16 can hold, upwards in magnitude with the probability of what is cut off.

    `noise` holds uniform integers of 16 bits in int32. Infinity and NaN stay what they are.
    """
    bits = values.view(torch.int32)
    bits.clamp_(max=_LARGEST)  # CUDA's NaN is all ones: a carry would wrap it to zero
    bits.add_(noise).bitwise_and_(~_LOW)


def noise_of(part: ParameterPart, stream: int = 0) -> torch.Tensor:
    """32 random bits for each element of a part, int32 in its shape.

    The mixing function is "lowbias32" (Wellons, "Prospecting for Hash Functions", 2018) on index + step * odd.
    """
    extent, device = part.parameter.shape, part.parameter.device
    # Row-major indices of the elements in the whole parameter, modulo 2**32.
    state, stride = torch.zeros(extent, dtype=torch.int32, device=device), 1
    for dim in reversed(range(len(extent))):
        along = torch.arange(part.offset[dim], part.offset[dim] + extent[dim], device=device) * stride
        state += along.to(torch.int32).view(-1, *(1 for _ in extent[dim + 1 :]))
        stride *= part.shape[dim]
    state.add_(_signed(part.step * _STEP + stream * _STREAM))
    for shift, factor in _MIX:
        state.bitwise_xor_(_shift_right(state, shift)).mul_(_signed(factor))
    return state.bitwise_xor_(_shift_right(state, 16))


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift; torch shifts int32 arithmetically."""
    return (value >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned number modulo 2**32."""
    value &= 2**32 - 1
    return value - 2**32 if value >= 2**31 else value
