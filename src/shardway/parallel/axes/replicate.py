"""Replication: every rank holds the whole model, gradients are averaged (DistributedDataParallel); PowerSGD's state.

Invariants:
- After `put_back` the hook compresses the same gradients to the same bits.
- All replicas start from the same weights and apply the same averaged gradient, which is summed in one order in every
  pass of every process (`fix_buckets`).

Of the state of torch's hook a backward pass replaces the tensors of errors, which are as large as the gradients, and
writes into those of the low-rank factors. So errors are kept by reference and the second factors as copies; the first
are computed from the second (Vogels et al., arXiv:1905.13727, algorithm 1).
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torch.nn.parallel import DistributedDataParallel

from shardway.compat import without_buffer_sync
from shardway.errors import UserError, list_some
from shardway.layout import SHARD
from shardway.parallel.mesh import Mesh
from shardway.runfile.schema import ParallelSection

# --- the state of PowerSGD


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


# --- DistributedDataParallel

T = TypeVar("T")

_LINK = "_shardway_copies"
"""Where a module keeps the way to its wrapper."""

SHOWN = 6
"""How many names a message lists."""


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


_TRAINED = "_shardway_trained"
"""Attribute of DDP: which parameters it was made to average."""


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


_CASTS = MappingProxyType({"fp16": fp16_compress_hook, "bf16": bf16_compress_hook})


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
        """DDP's, unless gradients are added up by hand."""
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


def check_all_used(copies: DistributedDataParallel) -> None:
    """Raise UserError for parameters that a backward pass gave no gradient.

    DDP waits for the whole bucket that such a parameter is in: its neighbours have not been averaged, and the next
    forward pass would fail.
    """
    if copies.static_graph:
        return
    idle = [name for name, p in copies.module.named_parameters() if p.requires_grad and p.grad is None]
    if not idle:
        return
    raise UserError(
        f"parameters of {type(copies.module).__name__} took no part in the loss: {list_some(idle, SHOWN)}. Replicas "
        "(parallel.dp_replicate) wait for the gradients of all.\n"
        "  To do: leave them out of the model, or call requires_grad_(False) on them before run.shard(model); where "
        "every step leaves out the same ones, set parallel.static_graph = true, or parallel.dp_shard = "
        f"{copies.process_group.size()} instead of parallel.dp_replicate."
    )


@dataclass(frozen=True)
class SummedGradients:
    """Parameters whose gradients were added up, and on how many ranks each had one; read once the device is done."""

    parameters: Sequence[nn.Parameter]
    counts: torch.Tensor

    def drop_missing(self) -> None:
        """A parameter without a gradient on any rank has none."""
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
            works.append(
                dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=group, async_op=True)
            )
            sent.append((grads, flat))
    for work in works:
        work.wait()
    for grads, flat in sent:
        torch._foreach_copy_(grads, _unflatten_dense_tensors(flat, grads))
    return SummedGradients(parameters, counts)


def broadcast_from_first(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank the weights and buffers that rank 0 has."""
    if mesh.devices is None:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        dense = tensor.detach().contiguous()  # gloo sends no strides
        dist.broadcast(_as_sent(dense), src=0)
        tensor.data.copy_(dense)


def _as_sent(dense: torch.Tensor) -> torch.Tensor:
    """The same memory in a format that every backend sends: as bytes, where it is one that some do not know."""
    return dense if dense.dtype in _SENT else dense.view(-1).view(torch.uint8)


_SENT = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


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
