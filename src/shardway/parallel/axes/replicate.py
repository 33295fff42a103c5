"""Replication: every rank holds the whole model and gradients are averaged (DistributedDataParallel); gradients over
passes and ranks; and whether replicas are still alike.

Invariants:
- All replicas start from the same weights and apply the same averaged gradient, which is summed in one order in every
  pass of every process (`fix_buckets`). After the last micro-batch every gradient is the mean over ranks of the sums
  over micro-batches.
- Each element of each gradient is counted once over all ranks, whatever axes its parameter is split over (decision
  0010).
- After `put_back` PowerSGD's hook compresses the same gradients to the same bits.
- Equal bits give equal checksums on every device and in every order, and one flipped bit another sum. All ranks come to
  the same list of differences, and what travels is a few numbers a rank while there are none.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.compat import without_buffer_sync
from shardway.errors import UserError, list_some
from shardway.layout import SHARD
from shardway.models.contract import canonical_name, held_by_rank
from shardway.parallel.mesh import Mesh, Part
from shardway.ranks.start import Ranks
from shardway.runfile.schema import ParallelSection

# --- DistributedDataParallel

T = TypeVar("T")

_LINK = "_shardway_copies"
"""Where a module keeps the way to its wrapper."""

_TRAINED = "_shardway_trained"
"""Attribute of DDP: which parameters it was made to average."""

_CASTS = MappingProxyType({"fp16": fp16_compress_hook, "bf16": bf16_compress_hook})


def replicate(model: nn.Module, mesh: Mesh, parallel: ParallelSection) -> nn.Module:
    """Wrap a materialised model so that its backward pass averages gradients over dp_replicate.

    Buffers are not broadcast in every forward pass: `average_buffers` brings them together when they are read.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return _wrap(model, mesh, parallel, init_sync=True)


def follow_frozen(copies: nn.Module, model: nn.Module, mesh: Mesh, parallel: ParallelSection) -> None:
    """Let the copies of a model average the gradients of what is trained now, where a script has frozen a part of it,
    or has let a part be trained, since they were made; on all ranks together.

    DDP would wait for ever for the gradient of a part that was frozen (and not average its neighbours meanwhile), and
    never average that of a part that was not to be trained. Raises UserError where this is not possible.
    """
    now = _list_trained(model)
    if now == copies.__dict__.get(_TRAINED, ()):
        return
    name = type(model).__name__
    if not isinstance(copies, DistributedDataParallel):
        if not any(now):
            return
        raise UserError(
            f"all parameters of {name} were frozen when run.shard was given it, and some are to be trained now; its "
            "replicas (parallel.dp_replicate) would not average their gradients.\n"
            "  To do: call run.shard(model) first and freeze parameters after it."
        )
    if parallel.compress == "powersgd":
        raise UserError(
            f'the script has changed which parameters of {name} are trained, and parallel.compress = "powersgd" keeps '
            "what it has left out of the gradients of those before.\n"
            "  To do: freeze before run.shard(model), or set another parallel.compress."
        )
    if not any(now):
        copies.__dict__[_TRAINED] = now  # nothing waits for a gradient: no pass reaches the reducer
        return
    made = _wrap(model, mesh, parallel, init_sync=False)
    made.train(copies.training)
    made.by_hand = isinstance(copies, ReplicatedModule) and copies.by_hand
    copies.__dict__.clear()
    copies.__dict__.update(made.__dict__)


def _list_trained(model: nn.Module) -> tuple[bool, ...]:
    return tuple([parameter.requires_grad for parameter in model.parameters()])


def _wrap(model: nn.Module, mesh: Mesh, parallel: ParallelSection, *, init_sync: bool) -> ReplicatedModule:
    group = mesh.group("dp_replicate")
    syncs = all(tensor.dtype in _SENT for tensor in (*model.parameters(), *model.buffers()))
    if init_sync and not syncs:
        broadcast_from_first(model, mesh)
    copies = ReplicatedModule(
        model,
        process_group=group,
        bucket_cap_mb=max(1, parallel.bucket // 2**20),
        gradient_as_bucket_view=True,
        static_graph=parallel.static_graph,
        init_sync=init_sync and syncs,
        **without_buffer_sync(),
    )
    fix_buckets(copies)
    # What a script copies (an average of weights does so) is the model, not what averages its gradients.
    copies.__dict__["__deepcopy__"] = partial(copy.deepcopy, model)
    copies.__dict__[_TRAINED] = _list_trained(model)
    if parallel.compress == "powersgd":
        # What a step leaves out is added to the next; that remainder is not saved, so a resumed run starts without.
        state = PowerSGDState(group, matrix_approximation_rank=parallel.powersgd_rank, start_powerSGD_iter=2)
        copies.register_comm_hook(state, powerSGD_hook)
    elif parallel.compress != "none":
        copies.register_comm_hook(group, _CASTS[parallel.compress])
    return copies


def fix_buckets(copies: ReplicatedModule) -> None:
    """Give DDP the buckets of all its passes before the first one; on all ranks together.

    Where in a message a gradient stands decides in which order more than two ranks add it up. DDP fills its buckets
    anew after the first backward pass of a process, in the order in which that pass has made the gradients: the step
    after a resume would have other bits than the same step of a run that went through. Here they are filled once, from
    the last parameter of the module to the first, as a backward pass mostly makes them (Li et al., arXiv:2006.15704,
    section 3.2.3), so that sums still overlap with it.
    """
    copies.reducer._push_all_rebuilt_params()
    copies.reducer._rebuild_buckets()


class ReplicatedModule(DistributedDataParallel):
    """DDP that can put any work with the module into its forward pass, so that gradients are averaged whichever of the
    module's methods the work calls."""

    inside = False
    """Whether the module runs within the forward pass of this wrapper now."""
    by_hand = False
    """Whether a call goes past this wrapper: then gradients are added up by `sum_gradients`."""
    _work: Callable[[], Any] | None = None

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]

    @contextlib.contextmanager
    def averaging(self) -> Iterator[None]:
        """Meanwhile calls go through the wrapper, whatever `by_hand` says."""
        by_hand, self.by_hand = self.by_hand, False
        try:
            yield
        finally:
            self.by_hand = by_hand

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.by_hand and self._work is None and torch.is_grad_enabled():
            return self.module(*inputs, **named)
        return super().forward(*inputs, **named)

    def run(self, work: Callable[[], T]) -> T:
        """`work()` in place of the module's forward pass."""
        self._work = work
        result: T = self()
        return result

    def _run_ddp_forward(self, *inputs: Any, **named: Any) -> Any:
        work, self._work = self._work, None
        self.inside = True
        try:
            if work is None:
                return super()._run_ddp_forward(*inputs, **named)
            with self._inside_ddp_forward():
                return work()
        finally:
            self.inside = False


# --- what a script gets of replicas


def give_back(copies: ReplicatedModule) -> nn.Module:
    """What a script gets of replicas: its own module, whose calls go through the wrapper.

    The wrapper itself where the module's class cannot be extended (a compiled or scripted one).
    """
    module: nn.Module = copies.module
    if find_copies(module) is copies:
        return module
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules:
        return copies
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    try:
        module.__class__ = type(kind.__name__, (_Replicated, kind), names)
    except TypeError:
        return copies
    module.__dict__[_LINK] = _Link(copies)
    return module


def find_copies(module: object) -> ReplicatedModule | None:
    """The wrapper of a replicated module, or that wrapper itself; None for any other module."""
    if isinstance(module, ReplicatedModule):
        return module
    link = getattr(module, "__dict__", {}).get(_LINK)
    return link.copies if isinstance(link, _Link) else None


class _Link:
    """From a replicated module to its wrapper; a copy of the module has none."""

    def __init__(self, copies: ReplicatedModule | None) -> None:
        self.copies = copies

    def __deepcopy__(self, memo: dict[int, Any]) -> _Link:
        return _Link(None)

    def __reduce__(self) -> tuple[type[_Link], tuple[None]]:
        return _Link, (None,)


class _Replicated:
    """A user's class, extended: a call that needs gradients goes through the wrapper; everything else is its own."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        copies = find_copies(self)
        if copies is None or copies.inside or copies.by_hand or not torch.is_grad_enabled():
            return super().__call__(*inputs, **named)  # type: ignore[misc]
        return copies(*inputs, **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and pickled as the module that it was."""
        made = super().__reduce_ex__(protocol)
        if not isinstance(made, tuple) or made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        rest = made[2:]
        if rest and isinstance(rest[0], dict):
            rest = ({name: value for name, value in rest[0].items() if name != _LINK}, *rest[1:])
        return (_make_plain, (type(self).__mro__[2], *made[1][1:]), *rest)


def _make_plain(kind: type[nn.Module], *arguments: Any) -> nn.Module:
    """As `copyreg.__newobj__`, which pickle wants the class of the object itself for."""
    return kind.__new__(kind, *arguments)


# --- the state of PowerSGD


@dataclass(frozen=True)
class CompressionBefore:
    """The state of PowerSGD at one moment.

    A backward pass replaces the tensors of errors, which are as large as the gradients, and writes into those of the
    low-rank factors. So errors are kept by reference and the second factors as copies; the first are computed from the
    second (Vogels et al., arXiv:1905.13727, algorithm 1).
    """

    state: PowerSGDState
    errors: Mapping[Any, torch.Tensor]
    first: Mapping[Any, torch.Tensor]
    second: Mapping[Any, torch.Tensor]
    iteration: int
    random: Any

    def put_back(self) -> None:
        self.state.error_dict, self.state.p_memory_dict = dict(self.errors), dict(self.first)
        self.state.q_memory_dict = {bucket: tensor.clone() for bucket, tensor in self.second.items()}
        self.state.iter = self.iteration
        self.state.rng.set_state(self.random)


@dataclass(frozen=True)
class Compression:
    """The compression of a model's copies."""

    state: PowerSGDState

    def remember(self) -> CompressionBefore:
        state = self.state
        second = {bucket: tensor.clone() for bucket, tensor in state.q_memory_dict.items()}
        errors, first = dict(state.error_dict), dict(state.p_memory_dict)
        return CompressionBefore(state, errors, first, second, state.iter, state.rng.get_state())


def find_compression(call: nn.Module) -> Compression | None:
    """That of a model as it is called, where it has one that remembers."""
    hooks = call._comm_hooks if isinstance(call, DistributedDataParallel) else []
    return next((Compression(state) for _, state in hooks if isinstance(state, PowerSGDState)), None)


# --- gradients over several passes and all ranks


@contextlib.contextmanager
def accumulating(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around one micro-batch: hold back what need not travel before the last one.

    Replicas average once, at the end; with a static graph after every micro-batch, since DDP fails where it may not
    average in the one that shows it the graph, and averages of averages are the same. Shards scatter after every
    micro-batch, so that a rank never holds the whole gradient, and only the averaging over hybrid replicas waits for
    the end. Raises UserError for parameters of a replica that the last backward pass gave no gradient: DDP waits for
    the whole bucket that such a parameter is in, so its neighbours have not been averaged, and the next forward pass
    would fail.
    """
    copies = find_copies(model)
    if copies is None:
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
        yield
        return
    waits = not last and not copies.static_graph
    with copies.averaging(), copies.no_sync() if waits else contextlib.nullcontext():
        yield
    if not last or copies.static_graph:
        return
    if any(p.requires_grad and p.grad is None for p in copies._module_parameters):  # walks through no modules
        idle = [name for name, p in copies.module.named_parameters() if p.requires_grad and p.grad is None]
        raise UserError(
            f"parameters of {type(copies.module).__name__} took no part in the loss: {list_some(idle, 6)}. Replicas "
            "(parallel.dp_replicate) wait for the gradients of all.\n"
            "  To do: leave them out of the model, or call requires_grad_(False) on them before run.shard(model); "
            "where every step leaves out the same ones, set parallel.static_graph = true, or parallel.dp_shard = "
            f"{copies.process_group.size()} instead of parallel.dp_replicate."
        )


@dataclass(frozen=True)
class SummedGradients:
    """Parameters whose gradients were added up, and on how many ranks each had one; read once the device is done."""

    parameters: Sequence[nn.Parameter]
    counts: torch.Tensor

    def drop_missing(self) -> None:
        for parameter, count in zip(self.parameters, self.counts.tolist(), strict=True):
            if not count:
                parameter.grad = None


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int) -> SummedGradients:
    """Add up the gradients of replicas, in messages of at most `bucket_bytes`. A rank without one adds nothing."""
    device = parameters[0].device if parameters else torch.device("cpu")
    counts = torch.tensor([float(each.grad is not None) for each in parameters], device=device)
    works = [dist.all_reduce(counts, group=group, async_op=True)] if parameters else []
    sent: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    for dtype in sorted({each.dtype for each in parameters}, key=str):
        same = [each for each in parameters if each.dtype == dtype]
        for each in same:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        for grads in _take_tensors([each.grad for each in same], bucket_bytes):
            flat = _flatten_dense_tensors(grads)
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            works.append(dist.all_reduce(real, group=group, async_op=True))
            sent.append((grads, flat))
    for work in works:
        work.wait()
    for grads, flat in sent:
        torch._foreach_copy_(grads, _unflatten_dense_tensors(flat, grads))
    return SummedGradients(parameters, counts)


@torch.no_grad()
def own_squares(parameters: Sequence[nn.Parameter], mesh: Mesh, device: torch.device) -> torch.Tensor:
    """The sum of squares, float64 and 0-dim, of the gradient elements that this rank answers for.

    Summed over all ranks it is the square of the global norm.
    """
    held = [held_by_rank(p.grad) for p in parameters if p.grad is not None and mesh.answers_for(p)]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Of a sparse gradient (one rank alone has them) the numbers that are there, each row once.
    grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in held]
    norms = list(torch._foreach_norm(grads))
    if {norm.device for norm in norms} != {device}:
        norms = [norm.to(device) for norm in norms]
    return torch.stack(norms).double().square().sum()


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: float | torch.Tensor) -> None:
    """Multiply every gradient by a factor: a number, or one on the device (0-dim) where gradients are fp32."""
    if isinstance(factor, torch.Tensor):
        factor = factor.float()  # as a number is rounded; kernels of one launch take only their own format
    elif factor == 1.0:
        return  # a pass over all gradients less
    held = [held_by_rank(p.grad) for p in parameters if p.grad is not None]
    grads = [grad._values() if grad.is_sparse else grad for grad in held]
    for kind in {(grad.device, grad.dtype) for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if (grad.device, grad.dtype) == kind], factor)


def send(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of one dim on `device`, for which the host does not wait: a plain copy, from memory that may be swapped,
    would wait until the device has done all that it was asked for. torch keeps the memory until it has arrived."""
    here = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


# --- weights and buffers over ranks

_SENT = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
"""Formats that every backend sends."""


def broadcast_from_first(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank the weights and buffers that rank 0 has, in other formats as bytes."""
    if mesh.devices is None:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        dense = tensor.detach().contiguous()  # gloo sends no strides
        dist.broadcast(dense if dense.dtype in _SENT else dense.view(-1).view(torch.uint8), src=0)
        tensor.data.copy_(dense)


@torch.no_grad()
def average_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Set floating-point buffers (running statistics) to their mean over the ranks, before they are read or saved.

    During training each rank's batch norm sees its own micro-batches alone; without this, validation would depend
    on which rank it runs on. The mean is taken in float64, where that of equal numbers is the number itself, so that
    a table of constants stays as it is.
    """
    dims = [dim for dim in ("dp_replicate", SHARD) if mesh.degree(dim) > 1]
    if mesh.devices is None or not dims:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            total = buffer.double().contiguous()
            for dim in dims:
                dist.all_reduce(total, group=mesh.group(dim))
            buffer.copy_(total / math.prod(mesh.degree(dim) for dim in dims))


# --- whether replicas are alike. Copies that start alike and take the same updates stay alike bit for bit, over
# dp_replicate and over every axis on which a parameter is whole; a difference means that a rank has computed, moved or
# kept something wrong. Checksums are compared, not tensors: the sum of the elements, read as integers of their own
# width, modulo 2**64. Several changes can cancel each other, by chance about as seldom as one in 2**32


@dataclass(frozen=True)
class ReplicaDifference:
    """A parameter whose copies differ, and the ranks whose copies are not those of the majority.

    Without a majority (`decided` False) these are all ranks that should have held the same.
    """

    parameter: str
    ranks: tuple[int, ...]
    decided: bool


def compare_replicas(model: nn.Module, mesh: Mesh, ranks: Ranks) -> list[ReplicaDifference]:
    """The parameters of a model (of this rank's stages) that are not alike where they should be; on all ranks."""
    named = [(canonical_name(name), parameter) for name, parameter in model.named_parameters()]
    own: dict[Part, dict[str, int]] = {}
    for (name, parameter), value in zip(named, sum_bits(parameter for _, parameter in named), strict=True):
        own.setdefault(mesh.part_held(parameter), {})[name] = value
    digests = ranks.gather({part: _digest(sums) for part, sums in own.items()})
    if not any(len({each[part] for each in digests if part in each}) > 1 for each in digests for part in each):
        return []
    holders: dict[tuple[str, Part], dict[int, list[int]]] = {}
    for rank, parts in enumerate(ranks.gather(own)):
        for part, sums in parts.items():
            for name, value in sums.items():
                holders.setdefault((name, part), {}).setdefault(value, []).append(rank)
    found = []
    for (name, _), by_value in sorted(holders.items(), key=lambda item: item[0]):
        if len(by_value) > 1:
            camps = list(by_value.values())  # ranks that agree; a camp with more than half of all ranks is right
            everyone = sorted(rank for camp in camps for rank in camp)
            right = next((camp for camp in camps if 2 * len(camp) > len(everyone)), [])
            wrong = tuple(rank for rank in everyone if rank not in right)
            found.append(ReplicaDifference(name, wrong, decided=bool(right)))
    return found


def _digest(sums: Mapping[str, int]) -> str:
    return hashlib.blake2b(repr(sorted(sums.items())).encode(), digest_size=16).hexdigest()


@torch.no_grad()
def sum_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """One number for each tensor, of the part that this rank holds."""
    sums = []
    for tensor in tensors:
        parts = [_as_integers(part).sum(dtype=torch.int64) for part in _plain(held_by_rank(tensor))]
        sums.append(torch.stack(parts).sum() if len(parts) > 1 else parts[0])
    found = [0] * len(sums)
    for device in {each.device for each in sums}:  # one read for each device
        own = [place for place, each in enumerate(sums) if each.device == device]
        for place, value in zip(own, torch.stack([sums[place] for place in own]).tolist(), strict=True):
            found[place] = value
    return found


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or those that one of a library's own class is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if inner is not None:
            yield from _plain(inner)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()])
