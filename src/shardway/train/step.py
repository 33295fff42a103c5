"""One optimizer step: passes, repeated where that is asked for, the exact mean over the global batch, clipping, the
update. It must not fetch data, write files or decide what comes next.

Invariants:
- After `put_back` the same passes on the same batch compute the same bits, except in the first backward pass of a
  process, by which DDP orders its buckets.
- All ranks run the passes equally often and decide the same. The gradients that are left belong to the numbers that are
  returned.
- The gradient that the optimizer sees is that of the mean loss over all targets that count in the global batch, however
  it was cut into ranks and micro-batches. All ranks return the same numbers.

Kept are the random generators of this rank, the buffers of the model (running statistics, counts of balanced experts)
and what PowerSGD remembers. Gradients are not kept: the caller drops them. What a script's own model or loss function
keeps in Python objects is not seen.

A transient fault (of memory, of a link, of an arithmetic unit) does not come twice; data, code and weights give the
same numbers again. Running a step again distinguishes them (Dixit et al., "Silent Data Corruptions at Scale",
arXiv:2102.11245).
"""

from __future__ import annotations

import hashlib
import math
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardway.checkpoint.state import needs_closure, parameters_of
from shardway.checkpoint.writer import repeated_dims
from shardway.data.batch_tree import list_leaves
from shardway.errors import UserError
from shardway.parallel.apply import ParallelModel
from shardway.parallel.axes.expert import balance
from shardway.parallel.axes.replicate import Compression, find_compression, own_squares, scale_gradients, send, sum_bits
from shardway.parallel.axes.tensor import sum_partial_gradients
from shardway.parallel.precision import compute_scales
from shardway.ranks.start import Ranks
from shardway.ranks.stop import VOID, Decision, StepRequests, read_decision
from shardway.train.loss import LossScale
from shardway.train.optim.base import LocalOptimizer
from shardway.train.passes import SUMS, Loss, Passes

# --- what the passes of a step change beside gradients, kept so that they can be repeated as if for the first time


class Generators:
    """The states of torch's (CPU and the current device), numpy's and Python's generators when this is made."""

    def __init__(self) -> None:
        self._cpu, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


class RngAndBufferSnapshot:
    """The state before the passes of a step: generators, buffers of some modules, and how often the tensors of the
    batch were written to, which torch counts, also through views of them."""

    @torch.no_grad()
    def __init__(self, owners: Sequence[nn.Module], compressions: Sequence[Compression], batch: Any) -> None:
        self._generators = Generators()
        self._buffers = [
            (owner, name, tensor, tensor.clone())
            for owner in owners
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]
        self._compressions = [each.remember() for each in compressions]
        self._batch = [(leaf, leaf._version) for leaf in list_leaves(batch) if isinstance(leaf, torch.Tensor)]

    def put_back(self) -> None:
        self._generators.put_back()
        self.put_back_model()

    @torch.no_grad()
    def put_back_model(self) -> None:
        """All but the generators: a step that is skipped has drawn its random numbers."""
        for owner, name, tensor, values in self._buffers:  # whether the pass changed or replaced the tensor
            _copy_once(tensor, values)
            owner._buffers[name] = tensor
        for compression in self._compressions:
            compression.put_back()

    def has_its_batch(self) -> bool:
        """Whether no pass wrote into the tensors of the batch."""
        return all(tensor._version == version for tensor, version in self._batch)


def _copy_once(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values of the same shape; an element that `expand` repeats is written once, as torch asks for."""
    for dim in repeated_dims(tensor):
        tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


class MutableParts:
    """The parts of models in training that passes may change; found once, since walking over a large model takes
    time."""

    def __init__(self, *parallels: ParallelModel) -> None:
        self._owners = [module for each in parallels for module in each.module.modules() if module._buffers]
        found = (find_compression(each.call) for each in parallels)
        self._compressions = [each for each in found if each is not None]

    def remember(self, batch: Any) -> RngAndBufferSnapshot:
        return RngAndBufferSnapshot(self._owners, self._compressions, batch)


# --- checks before an update: passes are repeated after numbers that are not finite, or to see the same numbers again


@dataclass(frozen=True)
class GuardChecks:
    """The checks before an update: `repeat` passes whose numbers are not finite, `probe` whether a second run of the
    passes gives the same bits."""

    repeat: bool
    probe: bool = False


class Tried:
    """The numbers of one run of the passes: this rank's, and the vector that is summed over all ranks."""

    def __init__(self, own: torch.Tensor, summed: torch.Tensor) -> None:
        self.own, self.summed = own, summed
        self._arriving: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def send_to_host(self) -> None:
        """Let the summed vector leave the device before what that is given next, so that its reader waits for nothing
        else."""
        if self.summed.is_cuda:
            here = torch.empty(self.summed.shape, dtype=self.summed.dtype, pin_memory=True)
            here.copy_(self.summed, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._arriving = here, arrived

    @cached_property
    def numbers(self) -> list[float]:
        """The summed vector, read once: the host waits for the device here."""
        vector = self.summed
        if self._arriving is not None:
            vector, arrived = self._arriving
            arrived.synchronize()
        found: list[float] = vector.tolist()
        return found


@dataclass(frozen=True)
class Corruption:
    """Two runs of the same passes differed: the ranks whose own numbers did, and their hosts.

    `decided`: a third run equals one of the two, and its gradients are the ones that are left.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    decided: bool


@dataclass(frozen=True)
class Watched:
    """The run of the passes that counts. `finite`: whether its numbers are (True if unchecked). `first`: the first run,
    if its numbers were not finite."""

    tried: Tried
    finite: bool = True
    repeated: bool = False
    first: Tried | None = None
    corruption: Corruption | None = None

    @property
    def is_refused(self) -> bool:
        """Whether these gradients must not change weights on any rank."""
        return not self.finite or (self.corruption is not None and not self.corruption.decided)


def is_finite(tried: Tried) -> bool:
    """Whether the numbers of a run of the passes over all ranks are finite."""
    total, targets, squares = tried.numbers[0], tried.numbers[1], tried.numbers[SUMS]
    return math.isfinite(squares) and (math.isfinite(total) or not targets)


# --- one optimizer step: passes, the exact mean over the global batch, clipping, the update


@dataclass(frozen=True)
class StepParts:
    """What a step works with; `clip` limits the norm of its gradient (None: no limit)."""

    passes: Passes
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    clip: float | None

    @cached_property
    def mutable_parts(self) -> MutableParts:
        return MutableParts(*self.passes.parallels, *self.passes.beside)

    def clear_gradients(self) -> None:
        """Drop all gradients, also those in models beside."""
        self.optimizer.zero_grad(set_to_none=True)
        for parallel in self.passes.beside:
            for parameter in parallel.module.parameters():
                parameter.grad = None

    @cached_property
    def needs_closure(self) -> bool:
        """Whether the optimizer evaluates the loss itself, as often as it needs."""
        return needs_closure(self.optimizer)

    def check_takes_closure(self) -> None:
        """Raise UserError where an optimizer that evaluates the loss itself cannot train."""
        name, pipeline = type(self.optimizer).__name__, self.passes.parallel.pipeline
        if not self.needs_closure:
            return
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            raise UserError(
                f"{name} looks at all parameters as one vector, and here they are shards or slices (parallel.dp_shard, "
                "tp, ep).\n  To do: use parallel.dp_replicate alone, or another optimizer."
            )
        if pipeline is not None or self.passes.precision.scales_loss:
            what = "a pipeline (parallel.pp)" if pipeline is not None else "a loss scale (fp16)"
            raise UserError(
                f"{name} evaluates the loss itself, as often as it wants, which {what} does not allow.\n"
                "  To do: use parallel.pp = 1 and a format without a loss scale, or another optimizer."
            )

    def parameters(self) -> list[nn.Parameter]:
        return parameters_of(self.optimizer)


@dataclass
class StepContext:
    """The context of a step: its position in the order of samples, this rank's requests, the loss scale (None: no
    fp16), the checks before the update (None: none), how many samples this rank has (None: from the tensors of its
    batch), and how many all ranks have together (None: as many as the largest step). `has_begun`: the step has begun
    to change the model for good."""

    position: int = 0
    requests: StepRequests = field(default_factory=StepRequests)
    loss_scale: LossScale | None = None
    watch: GuardChecks | None = None
    rows: int | None = None
    samples: int | None = None
    has_begun: bool = False


@dataclass(frozen=True)
class StepResult:
    """Numbers of a finished step, the same on every rank: mean loss, norm of its gradient before clipping, targets.

    If `decision.void`, a rank had no batch: nothing has changed, and the loss is NaN. `skipped`: no rank changed its
    weights, since fp16 gradients overflowed on some rank, since the checks in `watched` refused them, or since no
    target of the global batch counts.
    """

    loss: float
    grad_norm: float
    targets: float
    decision: Decision
    skipped: bool = False
    loss_scale: LossScale | None = None
    watched: Watched | None = None


def take_step(parts: StepParts, model: nn.Module, batch: Any, loss_fn: Loss, context: StepContext) -> StepResult:
    """Forward, backward and update for this rank's share of a global batch.

    The host waits for the device once, for the numbers of the passes. An optimizer that can leave an update out on the
    device is given the update before that, so the device has it to do while the host goes on; any other one after it.

    `batch` is a pair (inputs, targets), for which `loss_fn(model(inputs), targets)` is called, or any other tree (see
    `data.batch_tree`), for which `loss_fn(model, batch)` is. Raises JobError where an fp16 loss cannot be scaled,
    UserError where passes that shall be repeated cannot be, or a batch cannot be cut.
    """
    passes, scale = parts.passes, context.loss_scale
    factor = scale.scale if scale is not None else 1.0

    def run() -> Tried:
        """The gradients of this rank's share, and the numbers of all ranks: SUMS, squares of gradients, requests."""
        sums = passes.train(
            *(model, batch, loss_fn),
            position=context.position,
            loss_scale=factor,
            rows=context.rows,
            samples=context.samples,
        )
        for parallel in passes.parallels:
            if parallel.partial:
                sum_partial_gradients(parallel.module, parallel.partial, parallel.mesh.group("tp"))
        squares = own_squares(parts.parameters(), passes.parallel.mesh, sums.device)
        requests = send(context.requests.as_numbers(), torch.float64, sums.device)
        return Tried(sums, parts.ranks.sum(torch.cat([sums, squares[None], requests])))

    with parts.ranks.contact("during a step"):
        before = parts.mutable_parts.remember(batch)
        is_updated = False
        try:
            tried = run()
            if _can_queue(parts, context, tried):
                is_updated = _queue_update(parts, context, tried)
            watched = Watched(tried)
            if context.watch is not None and not is_updated:
                watched = _watch(parts, run, tried, context.watch, before)
        except BaseException:  # in a notebook the run may go on from here
            if not context.has_begun:
                before.put_back()
                parts.clear_gradients()
            raise
        context.has_begun = True
        numbers = watched.tried.numbers
        total, targets, squares = numbers[0], numbers[1], numbers[SUMS]
        decision = read_decision(numbers[SUMS + 1 :])
        refused = watched.is_refused or decision.void
        overflow = scale is not None and not math.isfinite(squares)
        per_target = _samples_per_target(parts, targets) / factor
        norm = math.sqrt(squares) * per_target
        # A mean over no targets has no gradient; momentum and weight decay would move the weights all the same.
        if not (overflow or refused or is_updated) and targets:
            scale_gradients(parts.parameters(), per_target * _clipping(parts, norm))
            if parts.needs_closure:
                _step_with_closure(parts, run, total / targets)
            else:
                parts.optimizer.step()
            is_updated = True
        if is_updated:
            for parallel in passes.parallels:
                compute_scales(parallel.module, passes.precision.float8)
        parts.clear_gradients()
        if passes.routers and not refused:
            balance(passes.routers, passes.parallel.mesh)
        if decision.void:
            before.put_back_model()
    return StepResult(
        loss=total / targets if targets and not decision.void else float("nan"),
        grad_norm=norm,
        targets=targets,
        decision=decision,
        skipped=overflow or refused or not targets,
        loss_scale=scale.after(overflow) if scale is not None and not decision.void else scale,
        watched=watched if context.watch is not None else None,
    )


QUEUED_ON = ("cuda",)
"""Devices that work while the host goes on."""


def _can_queue(parts: StepParts, context: StepContext, tried: Tried) -> bool:
    """Whether the update may be given to the device before its numbers are read: the optimizer is one of ours or of
    torch's that leaves it out there, as fused ones do for a gradient scaler, and gradients are scaled there with the
    bits that the host gives. An optimizer of another library may set the flag and mean something else by it."""
    optimizer = parts.optimizer
    is_known = isinstance(optimizer, LocalOptimizer) or type(optimizer).__module__.startswith("torch.optim.")
    can_leave_out = is_known and getattr(optimizer, "_step_supports_amp_scaling", False) and not parts.needs_closure
    is_plain = context.loss_scale is None and (context.watch is None or not context.watch.probe)
    if not (can_leave_out and is_plain and tried.summed.device.type in QUEUED_ON):
        return False
    gradients = [parameter.grad for parameter in parts.parameters() if parameter.grad is not None]
    return all(gradient.dtype is torch.float32 and not gradient.is_sparse for gradient in gradients)


@torch.no_grad()
def _queue_update(parts: StepParts, context: StepContext, tried: Tried) -> bool:
    """Give the device the update, which it leaves out by the numbers of the passes, and then read those.

    Returns whether it was made. The device computes what `take_step` computes, in the same order in float64.
    """
    tried.send_to_host()
    repeats = context.watch is not None and context.watch.repeat
    total, targets, squares, void = (tried.summed[at] for at in (0, 1, SUMS, SUMS + 1 + VOID))
    counts = targets > 0
    factor = torch.where(counts, parts.passes.batch_split.global_batch / targets, 0.0)
    if parts.clip is not None:
        factor = factor * (parts.clip / (squares.sqrt() * factor + 1e-6)).clamp(max=1.0)
    refused = ~counts | (void > 0)
    if repeats:
        refused |= ~(squares.isfinite() & total.isfinite())
    optimizer: Any = parts.optimizer
    optimizer.found_inf = refused.float()
    context.has_begun = True
    try:
        scale_gradients(parts.parameters(), factor)
        optimizer.step()
    finally:
        del optimizer.found_inf
    numbers = tried.numbers
    is_refused = read_decision(numbers[SUMS + 1 :]).void or not numbers[1] or (repeats and not is_finite(tried))
    if is_refused:
        context.has_begun = False
        if isinstance(optimizer, LocalOptimizer):
            optimizer.take_back()
    return not is_refused


def _step_with_closure(parts: StepParts, run: Callable[[], Tried], loss: float) -> None:
    """A step of an optimizer that evaluates loss and gradients itself: the first evaluation exists already."""
    losses = [loss]

    def evaluate() -> Any:
        if losses:
            return torch.tensor(losses.pop(), dtype=torch.float64)
        parts.clear_gradients()
        with torch.enable_grad():
            numbers = run().numbers
        total, targets, squares = numbers[0], numbers[1], numbers[SUMS]
        per_target = _samples_per_target(parts, targets)
        scale_gradients(parts.parameters(), per_target * _clipping(parts, math.sqrt(squares) * per_target))
        return torch.tensor(total / targets if targets else 0.0, dtype=torch.float64)

    parts.optimizer.step(evaluate)


def _clipping(parts: StepParts, norm: float) -> float:
    """The factor that brings gradients of this norm down to the limit."""
    return 1.0 if parts.clip is None else min(parts.clip / (norm + 1e-6), 1.0)


def _samples_per_target(parts: StepParts, targets: float) -> float:
    """What turns the gradient of a sum divided by the samples of the largest step into that of a mean over targets
    (exactly 1 where each sample of such a step is one target); 0 where no target counts."""
    return parts.passes.batch_split.global_batch / targets if targets > 0 else 0.0


def _watch(
    parts: StepParts, run: Callable[[], Tried], tried: Tried, watch: GuardChecks, before: RngAndBufferSnapshot
) -> Watched:
    """The passes that have given `tried`, repeated if `watch` asks for it; `before` is the state without them.

    Raises UserError if a probe cannot repeat them.
    """
    ranks = parts.ranks
    corruption: Corruption | None = None

    def can_repeat() -> bool:
        """Whether every rank still has its batch unchanged."""
        return all(ranks.gather(before.has_its_batch()))

    def again() -> Tried:
        """The passes once more, as if for the first time."""
        parts.clear_gradients()
        before.put_back()
        return run()

    def take_prints() -> list[tuple[str, str]]:
        """Of each rank a digest of its own numbers, and one of all numbers and the bits of its gradients."""
        gradients = [parameter.grad for parameter in parts.parameters() if parameter.grad is not None]
        numbers = tried.own.tolist(), [*tried.numbers, *sum_bits(gradients)]
        own, rest = (hashlib.blake2b(repr(each).encode(), digest_size=16).hexdigest() for each in numbers)
        return ranks.gather((own, rest))

    if watch.probe:
        if not can_repeat():
            raise UserError(
                "guard.probe_every runs the passes of a step twice, and the first run wrote into the tensors of its "
                "batch.\n"
                '  To do: let model and loss function work on copies of them, or set guard.probe_every = "off".'
            )
        prints = [take_prints()]
        tried = again()
        prints.append(take_prints())
        if prints[0] != prints[1]:  # two equal ones of three are right
            tried = again()
            decided = take_prints() in prints
            # The ranks whose own losses differ; if none do, those whose gradients do.
            pairs = list(enumerate(zip(*prints, strict=True)))
            named = [rank for rank, (a, b) in pairs if a[0] != b[0]] or [rank for rank, (a, b) in pairs if a != b]
            hosts = ranks.gather(socket.gethostname())
            corruption = Corruption(tuple(named), tuple(dict.fromkeys(hosts[rank] for rank in named)), decided)
    if not watch.repeat or is_finite(tried):
        watched = Watched(tried, corruption=corruption)
    elif not can_repeat():
        watched = Watched(tried, finite=False, first=tried, corruption=corruption)
    else:
        first, tried = tried, again()
        watched = Watched(tried, is_finite(tried), repeated=True, first=first, corruption=corruption)
    if watched.is_refused:
        before.put_back_model()
    return watched
