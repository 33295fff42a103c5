"""Gradient work by hand: a script computes its loss and steps its optimizer, and `run.backward` stands between.

Invariant: `run.backward` adds the gradient of the mean over the global batch to `.grad`, whatever the layout. A call
that does not count adds nothing, so the script's optimizer leaves its weights alone. Gradients that no update has used
yet are part of a checkpoint. This module must not run a forward pass or update weights.

Each call computes its gradients apart: those that exist are put aside and added afterwards. So a call can be undone, a
mean over targets needs no count beforehand, and sums over ranks never count a gradient twice. Replicas add up their
gradients after the backward pass, not in the hooks of DDP: a script may call any methods of its model, any number of
times, and leave out any parameters (decision 0040).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from shardway.checkpoint.file_format import TensorTable
from shardway.checkpoint.state import CheckpointState, Tensors, make_room, needs_closure, parameters_of
from shardway.data.batch_tree import count_rows, is_pair
from shardway.data.loader import Batch
from shardway.errors import UserError
from shardway.layout import needs_sharding
from shardway.models.contract import find_routers, held_by_rank
from shardway.parallel.axes.expert import balance
from shardway.parallel.axes.replicate import ReplicatedModule, own_squares, scale_gradients, send, sum_gradients
from shardway.parallel.axes.tensor import sum_partial_gradients
from shardway.parallel.precision import compute_scales
from shardway.ranks.stop import read_decision
from shardway.train.engines import Engine, OpenStep, TakenStep, explained
from shardway.train.held import HeldModel, HeldOptimizer, Holdings
from shardway.train.loss import LossSum, fill_missing_targets
from shardway.train.passes import SUMS, let_go
from shardway.train.session import Session
from shardway.train.step import (
    MutableParts,
    RngAndBufferSnapshot,
    StepContext,
    StepResult,
    Tried,
    Watched,
    is_finite,
)

PART = "kept-gradients"
"""The prefix in a checkpoint of the names of gradients that no update has used yet."""

PATIENCE = 100
"""Batches without an update after which a warning states that the script makes none."""

Gradients = Mapping[nn.Parameter, torch.Tensor | None]


@dataclass(frozen=True)
class BackwardCall:
    """A call of `run.backward`: the models whose gradients count, and the script's arguments.

    `samples`: the number of samples that the loss is the mean of (None: this rank's whole share). `engine` is that of
    the first optimizer of the models, `name` the name of the loss.
    """

    engine: Engine
    name: str
    models: tuple[HeldModel, ...]
    loss: LossSum | torch.Tensor
    samples: int | None = None
    retain_graph: bool = False


class GradientsByHand(CheckpointState):
    """The state of `run.backward` and `run.clip` on one rank between their calls; a checkpoint holds it."""

    def __init__(self, session: Session, held: Holdings, engines: Mapping[int, Engine]) -> None:
        self._session, self._held, self._engines = session, held, engines
        self._names = {each: name for model in held.models for name, each in model.parameters()}
        """Every parameter of the run: shards where it has shards. A forward pass puts gathered weights in a module."""
        self._of_model = {model.name: [each for _, each in model.parameters()] for model in held.models}
        self._is_used = False
        self._unused: set[nn.Parameter] = set()
        """Parameters whose gradient no update has used yet."""
        self._used: dict[nn.Parameter, tuple[int, int]] = {}
        """Parameters whose gradient an update has used, and which gradient that was."""
        self._keeps_used = False
        """Whether the script has let gradients accumulate that an update had used."""
        self._at_begin: dict[nn.Parameter, torch.Tensor | None] = {}
        """Unused gradients at the beginning of the batch, for parameters that a call has given one since."""
        self._refused: set[nn.Parameter] = set()
        self._open_names: set[str] = set()
        """Losses whose gradients no update has used since the batch began."""
        self._before: RngAndBufferSnapshot | None = None
        self._is_void = False
        """Whether the current batch does not count."""
        self._steps_alone, self._under_autocast, self._without_update = False, False, 0
        for model in held.models:
            if isinstance(model.parallel.call, ReplicatedModule):
                model.parallel.call.by_hand = True

    # --- around a batch

    def begin(self, batch: Batch, position: int) -> None:
        """A batch goes to the script; `position` is its beginning in the order of samples."""
        self._at_begin, self._refused, self._open_names = {}, set(), set()
        self._is_void, self._under_autocast = False, False
        for engine in self._engines.values():
            weight = 1.0 if len(batch.ids) else 0.0
            passes = engine.passes
            passes.scale_routers(weight / passes.batch_split.global_batch)
        for model in self._held.models:
            if model.parallel.dropout is not None:
                model.parallel.dropout.start(self._first_passes.first_sample(position, batch.samples), stride=1)
        # A script with only run.step need not pay for a copy of its buffers.
        self._before = None if self._steps_alone else self._mutable_parts.remember(None)

    def close(self, step: OpenStep, number: int) -> None:
        """The batch of step `number` is done, and counts."""
        self._steps_alone = not step.by_hand
        if self._steps_alone:
            return
        if self._routers and not any(each.result.skipped for each in step.taken):
            balance(self._routers, self._first_passes.parallel.mesh)
        if not self._under_autocast and self._session.precision.autocast_dtype is not None:
            self._note(
                f'precision.compute = "{self._session.resolved.values.precision.compute}" holds within `with '
                "run.autocast():` alone where a script computes its loss itself, and it was not used.\n"
                "  To do: put the forward pass and the loss into `with run.autocast():`."
            )
        self._without_update += 1
        if self._without_update == PATIENCE:
            self._note(
                f"run.backward was called for {PATIENCE} batches up to step {number}, and no optimizer has made an "
                "update: gradients add up.\n  To do: call optimizer.step() and optimizer.zero_grad() after it."
            )

    # --- run.backward

    def take(
        self, step: OpenStep, call: BackwardCall, lr: float, context: StepContext, freeze: Callable[[], None]
    ) -> float:
        """The loss of a call for the current batch; `freeze` keeps what a checkpoint holds of the script."""
        if self._is_void:
            return math.nan
        result = self._run_backward(call, context, step.batch)
        last = step.taken[-1] if step.taken else None
        if last is not None and last.name == call.name and call.name in self._open_names:
            # Two calls of one batch whose gradients one update uses: their losses add up.
            earlier = last.result
            joined = replace(
                result,
                loss=earlier.loss + result.loss,
                targets=earlier.targets,
                decision=earlier.decision.also(result.decision),
                skipped=earlier.skipped or result.skipped,
                watched=earlier.watched if earlier.skipped else result.watched,
            )
            step.taken[-1] = replace(last, result=joined)
        else:
            step.taken.append(TakenStep(call.name, lr, result, by_hand=True))
        self._open_names.add(call.name)
        if result.decision.void:
            freeze()  # with the earlier gradients; what the script does next does not count
            self._is_void = True
            self._unused.clear()
            for each in self._names:
                each.grad = None
        return result.loss

    def _run_backward(self, call: BackwardCall, context: StepContext, batch: Batch) -> StepResult:
        """The gradients of a loss that the script has computed from its share of a batch, and the numbers that all
        ranks agree on.

        The host waits for the device once. Raises UserError if gradients cannot be computed.
        """
        self._begin_use()
        passes, ranks = call.engine.passes, self._session.ranks
        rows = count_rows(batch.data, context.rows) if context.rows is not None else 0  # a dummy batch
        loss, weight = _read_loss(call, batch, rows)
        # The parameters of the models, and further ones that their optimizers update.
        counted = {each: None for model in call.models for each in self._of_model[model.name]}
        for held in self._held.optimizers:
            if not counted.keys().isdisjoint(own := held.parameters()):
                counted |= dict.fromkeys(own)
        parameters = list(counted)
        aside = {each: each.grad for each in self._names}
        for each in aside:
            each.grad = None
        try:
            with ranks.contact("during a backward pass"), explained(call.models[0].parallel.module):
                with _silenced(loss.total) if not rows or call.samples == 0 else contextlib.nullcontext():
                    sums = passes.backward_by_hand(loss, weight, retain_graph=call.retain_graph)
                # Partial gradients add up over the tensor axis, and all gradients over replicas.
                for model in self._held.models:
                    parallel = model.parallel
                    if parallel.partial and not counted.keys().isdisjoint(self._of_model[model.name]):
                        sum_partial_gradients(parallel.module, parallel.partial, parallel.mesh.group("tp"))
                summed = None
                if self._replica_group is not None:
                    bucket = self._session.resolved.values.parallel.bucket
                    trained = [each for each in parameters if each.requires_grad]
                    summed = sum_gradients(trained, self._replica_group, bucket)
                squares = own_squares(parameters, passes.parallel.mesh, sums.device)
                requests = send(context.requests.as_numbers(), torch.float64, sums.device)
                tried = Tried(sums, ranks.sum(torch.cat([sums, squares[None], requests])))
                total, targets = tried.numbers[:2]
        except BaseException:
            self._put_back(aside, buffers=False)
            raise
        if summed is not None:
            summed.drop_missing()
        decision, watches = read_decision(tried.numbers[SUMS + 1 :]), context.watch is not None
        finite = not watches or is_finite(tried)
        per_target = passes.batch_split.global_batch / targets if targets > 0 else 0.0
        norm = math.sqrt(tried.numbers[SUMS]) * per_target
        if decision.void:
            self._put_back(aside, buffers=True)
        elif not finite or self._refused & counted.keys():
            self._refuse(parameters, aside, repeats=not finite)
        else:
            scale_gradients(parameters, per_target)
            if self._join(counted, aside, may_refuse=watches):
                norm = self._norm_of(parameters)
        return StepResult(
            loss=total / targets if targets and not decision.void else math.nan,
            grad_norm=norm,
            targets=targets,
            decision=decision,
            skipped=decision.void or not finite,
            watched=Watched(tried, finite, first=None if finite else tried) if watches else None,
        )

    def _put_back(self, aside: Gradients, *, buffers: bool) -> None:
        for each, grad in aside.items():
            each.grad = grad
        if buffers and self._before is not None:
            self._before.put_back_model()

    def _refuse(self, parameters: Sequence[nn.Parameter], aside: Gradients, *, repeats: bool) -> None:
        """Drop the gradients of this batch, also those of earlier calls."""
        owed = {each: self._at_begin.get(each, aside[each]) if self._owes(each) else None for each in parameters}
        self._put_back(aside, buffers=repeats)
        for each, grad in owed.items():
            each.grad = grad
            if grad is None:
                self._unused.discard(each)
        self._refused.update(parameters)

    @torch.no_grad()
    def _join(self, counted: Mapping[nn.Parameter, None], aside: Gradients, *, may_refuse: bool) -> bool:
        """Add earlier gradients to those of this call; returns whether there were any. What a later call of the batch
        may refuse is kept as it was."""
        joined, taken = False, [each for each in counted if each.grad is not None]
        for each, grad in aside.items():
            if each not in counted:
                each.grad = grad
                continue
            used = self._used.pop(each, None)
            if grad is not None and used == _key(grad):
                self._keeps_used = True
                self._note(
                    "the gradients that an update had used were still there, and run.backward adds to them.\n"
                    "  To do: call optimizer.zero_grad() after optimizer.step(), unless that is what is meant."
                )
            if may_refuse:
                self._at_begin.setdefault(each, grad if self._owes(each) else None)
            if grad is None:
                continue
            joined = True
            if each.grad is None:
                each.grad = grad
            elif each.grad.is_sparse or grad.is_sparse:
                each.grad = each.grad + grad
            else:
                held_by_rank(each.grad).add_(held_by_rank(grad))
        self._unused.update(taken)
        return joined

    def _owes(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of a parameter still counts."""
        return parameter in self._unused or (self._keeps_used and self._is_used)

    def _norm_of(self, parameters: Sequence[nn.Parameter]) -> float:
        ranks, mesh = self._session.ranks, self._first_passes.parallel.mesh
        return math.sqrt(float(ranks.sum(own_squares(parameters, mesh, ranks.device))))

    # --- run.clip, run.autocast, and updates of the script's optimizers

    @torch.no_grad()
    def clip(self, target: Any, max_norm: float) -> float:
        """Scale gradients so that their norm over all ranks and shards is at most `max_norm`; returns the norm before.

        `target`: a model, an optimizer, or parameters. NaN if the step does not count.
        """
        found: list[Any] = [target] if isinstance(target, torch.Tensor) else []
        if isinstance(target, torch.optim.Optimizer):
            found = list(parameters_of(target))
        elif isinstance(target, nn.Module):
            held = self._held.find_model(target)
            found = list(self._of_model[held.name] if held is not None else target.parameters())
        else:
            if isinstance(target, Iterable) and not found:
                found = list(target)
            if not found or not all(isinstance(each, torch.Tensor) for each in found):
                raise UserError(
                    f"run.clip was given a {type(target).__name__}.\n"
                    "  Allowed: a model, an optimizer, or parameters. To do: run.clip(model, 1.0)."
                )
        if self._is_void:
            return math.nan
        norm = self._norm_of(found)
        scale_gradients(found, min(max_norm / (norm + 1e-6), 1.0) if not math.isnan(norm) else math.nan)
        return norm

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Around a forward pass and its loss: autocast to the format of precision.compute, and logits in parts."""
        self._under_autocast = True
        splits = any(model.parallel.splits_logits for model in self._held.models)
        parts = loss_parallel() if splits else contextlib.nullcontext()
        with self._session.precision.autocast(self._session.ranks.device), parts:
            yield

    def _begin_use(self) -> None:
        """At the first call. Raises UserError for settings that only work with run.step."""
        if self._is_used:
            return
        session, values, degree = self._session, self._session.resolved.values, self._first_passes.parallel.mesh.degree
        engine, compress, split = values.train.engine, values.parallel.compress, self._first_passes.batch_split
        kinds = [type(each.optimizer).__name__ for each in self._held.optimizers if needs_closure(each.optimizer)]
        reasons = {
            f"a pipeline (parallel.pp = {degree('pp')}) runs forward and backward passes in turn": degree("pp") > 1,
            f"a rank computes a part of each sequence alone (parallel.cp = {degree('cp')}), which run.step cuts": (
                degree("cp") > 1
            ),
            f'train.engine = "{engine}" takes gradients in its own way': engine != "torch",
            'precision.compute = "fp16" scales the loss and looks for overflows': session.precision.scales_loss,
            f'parallel.compress = "{compress}" is a part of DDP, and gradients by hand are added up whole': (
                compress != "none" and degree("dp_replicate") > 1
            ),
            f"{next(iter(kinds), '')} evaluates the loss itself, as often as it wants": bool(kinds),
            "guard.probe_every runs the passes of a step twice": values.guard.probe_every != "off",
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise UserError(
                f"run.backward cannot be used here: {'; '.join(found)}.\n"
                "  To do: use run.step(model, batch, loss_fn), or set what is named here to something else."
            )
        self._is_used = True
        for held in self._held.optimizers:
            self._watch_updates(held)
        if split.accumulation > 1:
            self._note(
                f"run.backward takes this rank's share of a batch whole: train.micro_batch = {split.micro_batch} "
                f"({session.resolved.origins['train.micro_batch']}) cuts nothing here.\n"
                "  To do: where memory is short, cut the batch in the script and call run.backward(loss, samples=n) "
                "for each part, or use run.step."
            )

    def _watch_updates(self, held: HeldOptimizer) -> None:
        passes, session = self._engines[id(held.optimizer)].passes, self._session

        def before(*_: Any) -> None:
            """Clip before an update if the run file sets optim.clip."""
            clip = session.resolved.values.optim.clip
            unset = clip == "off" or session.leaves_alone("optim.clip")
            if not unset and not self._unused.isdisjoint(held.parameters()):
                self.clip(held.optimizer, float(clip))

        def after(*_: Any) -> None:
            self._without_update = 0
            self._open_names.clear()
            for model in self._held.models:
                let_go(model.parallel)  # weights gathered without a backward pass are outdated
            own = held.parameters()
            if self._unused.isdisjoint(own):
                self._refused.difference_update(own)
                return
            for each in own:
                if each in self._unused and each.grad is not None:
                    self._used[each] = _key(each.grad)
                self._unused.discard(each)
                self._refused.discard(each)
                self._at_begin.pop(each, None)
            for parallel in passes.parallels:
                compute_scales(parallel.module, passes.precision.float8)

        held.optimizer.register_step_pre_hook(before)
        held.optimizer.register_step_post_hook(after)

    # --- what a checkpoint holds

    def collect(self) -> Tensors:
        """The gradients that no update has used; of ranks that do not lead, only their shards."""
        leads = self._session.ranks.is_first
        grads = {name: each.grad for each, name in self._names.items() if each.grad is not None and self._owes(each)}
        own = {name: grad.detach() for name, grad in grads.items() if leads or isinstance(grad, DTensor)}
        return {PART: own} if own else {}

    def template(self, table: TensorTable) -> Tensors:
        room = make_room(table, f"{PART}.", {name: each for each, name in self._names.items()})
        return {PART: room} if room else {}

    def install(self, tensors: Tensors) -> None:
        saved = tensors.get(PART, {})
        self._used.clear()
        self._unused.clear()
        for each, name in self._names.items():
            if name in saved:
                each.grad = saved[name].detach().to(each.device)
                self._unused.add(each)
            elif self._is_used:
                each.grad = None

    # --- parts

    @cached_property
    def _first_passes(self) -> Any:
        return next(iter(self._engines.values())).passes

    @cached_property
    def _mutable_parts(self) -> MutableParts:
        return MutableParts(*(model.parallel for model in self._held.models))

    @cached_property
    def _routers(self) -> list[Any]:
        return [router for model in self._held.models for router in find_routers(model.parallel.module)]

    @cached_property
    def _replica_group(self) -> Any:
        """The ranks that hold copies of all weights and add up gradients here; None if FSDP2 does so, or there are no
        copies."""
        mesh = self._first_passes.parallel.mesh
        copied = mesh.degree("dp_replicate") > 1 and not needs_sharding(mesh.layout)
        return mesh.group("dp_replicate") if copied else None

    def _note(self, text: str) -> None:
        self._session.note_once("gradients_by_hand", text)


def _key(grad: torch.Tensor) -> tuple[int, int]:
    """The identity of a gradient, and how often it was written to."""
    return id(grad), int(held_by_rank(grad)._version)


def _read_loss(call: BackwardCall, batch: Batch, rows: int) -> tuple[LossSum, float]:
    """The loss of this rank as a sum and its count, and whether it counts. Raises UserError."""
    loss, samples = call.loss, call.samples
    number = loss.total if isinstance(loss, LossSum) else loss
    if not isinstance(number, torch.Tensor) or number.ndim:
        what = f"a tensor of shape {list(number.shape)}" if isinstance(number, torch.Tensor) else type(number).__name__
        raise UserError(
            f"run.backward was given {what} as the loss.\n"
            "  Allowed: a tensor without dimensions, the mean over the samples of this rank, or a shardway.LossSum of "
            "such a tensor. To do: run.backward(losses.mean())."
        )
    weight = float(rows > 0)

    def silent() -> torch.Tensor:
        """A loss that does not count, also if it is NaN; its backward pass keeps ranks in step."""
        return torch.where(torch.zeros_like(number, dtype=torch.bool), number, torch.zeros_like(number))

    if isinstance(loss, LossSum):
        if samples is not None:
            raise UserError(
                "run.backward was given a LossSum and samples, and a LossSum has its own count.\n"
                "  To do: leave samples out; where the batch is cut, count the targets of this rank's whole share in "
                "each part."
            )
        return loss if weight else replace(loss, total=silent()), weight
    if samples is not None and (not isinstance(samples, int) or samples < 0 or (rows and samples > rows)):
        raise UserError(
            f"run.backward was given samples={samples!r}, and this rank has {rows} samples of the batch.\n"
            "  Allowed: the number of samples that the loss is the mean over, at most those."
        )
    if not weight or samples == 0:
        return LossSum(silent(), rows), weight
    total = loss * (rows if samples is None else samples)
    if samples is None:
        _, counts = fill_missing_targets(batch.data, pair=is_pair(batch.data, rows))
        if counts is not None:  # a mean over no targets at all is no number
            return LossSum(torch.where(counts, total, torch.zeros_like(total)), rows * counts), weight
    return LossSum(total, rows), weight


@contextlib.contextmanager
def _silenced(loss: torch.Tensor) -> Iterator[None]:
    """In this context every gradient of this loss is 0, also if a derivative on the way is NaN."""
    found, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions]
    leaves = [node for node in found if node.name().endswith("AccumulateGrad")]
    hooks = [leaf.register_prehook(lambda grads: tuple(map(torch.zeros_like, grads))) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
