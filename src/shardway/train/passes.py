"""Forward and backward passes of this rank's share of a batch, of one model or of several.

Invariants:
- Afterwards gradients hold the sum over this rank's samples of their losses, divided by the samples of the global
  batch. The sums of `SUMS` are returned; only the rank that answers for a loss has numbers other than 0.
- Several models: the gradients of all models that the optimizer updates are those of one model made of them. A model
  beside them is run and keeps no gradients.

Each micro-batch is divided by the number of samples of the global batch, which all ranks have. The factor from samples
to targets comes later, since it needs every rank's share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from shardway.data.batch_tree import LengthGroups, PackedInputs, count_rows, cut_rows, fill_empty, is_pair, map_tensors
from shardway.data.order import position_share
from shardway.errors import UserError
from shardway.models.contract import Balancing, find_routers
from shardway.parallel.apply import ParallelModel
from shardway.parallel.axes.context import Chunks
from shardway.parallel.axes.pipeline import Pipeline
from shardway.parallel.axes.replicate import accumulating, find_copies
from shardway.parallel.precision import Precision
from shardway.train.loss import LossSum, as_sum, compiling_losses, fill_missing_targets

Loss = Callable[..., LossSum | torch.Tensor]

Evaluated = tuple[torch.Tensor, dict[str, torch.Tensor]]

SUMS = 4
"""Sum of losses, targets that count, right answers, targets with a right or wrong answer."""


@dataclass(frozen=True)
class BatchSplit:
    """How a rank's share is cut: that of the largest step, with `global_batch` samples over all ranks, into
    `accumulation` parts of at most `micro_batch` samples; a pipeline takes `per_pass` of them at a time."""

    global_batch: int
    micro_batch: int
    accumulation: int
    per_pass: int = 1

    def count_parts(self, samples: int | None, ranks: int) -> int:
        """The parts of each rank's share of a step with so many samples over all ranks (None: the largest), the same
        on all of `ranks` data ranks."""
        if samples is None or samples == self.global_batch:
            return self.accumulation
        parts = -(-samples // (ranks * self.micro_batch))
        return -(-parts // self.per_pass) * self.per_pass


@dataclass(frozen=True)
class Micro:
    """A part of a rank's share. Weight 0 marks one that only keeps this rank in step with the others.

    `pair`: whether it is (inputs, targets).
    """

    data: Any
    rows: int
    weight: float
    start: int = 0
    pair: bool = False


class Replays(Protocol):
    """What may run the passes of a step in another way than one by one (`train.cuda_graphs`)."""

    def run(
        self, micros: Sequence[Micro], loss_fn: Loss, scale: float, one: Callable[[Micro, torch.Tensor], None]
    ) -> torch.Tensor | None:
        """The sums of a step's losses; None: its passes are to be run one by one, in `timing`. `one` adds the gradients
        of a micro-batch to those of the model, and its losses to sums."""

    def timing(self) -> contextlib.AbstractContextManager[None]:
        """Around passes that are run one by one."""


@dataclass(frozen=True)
class Passes:
    """What runs a model on this rank's share of a batch. `further`: models beside `parallel` that are updated with it;
    `beside`: those that are only run. `compiles`: whether the run compiles what it can."""

    parallel: ParallelModel
    batch_split: BatchSplit
    precision: Precision
    device: torch.device
    further: tuple[ParallelModel, ...] = ()
    beside: tuple[ParallelModel, ...] = ()
    compiles: bool = False
    replays: Replays | None = None

    @property
    def parallels(self) -> tuple[ParallelModel, ...]:
        """All models whose parameters these passes give gradients that count."""
        return (self.parallel, *self.further)

    @cached_property
    def sum_losses(self) -> list[Loss]:
        """The last called loss function, if it returns a LossSum."""
        return []

    @cached_property
    def routers(self) -> list[Balancing]:
        """The modules that balance experts, on this rank."""
        return [router for parallel in self.parallels for router in find_routers(parallel.module)]

    def train(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Loss,
        *,
        position: int = 0,
        loss_scale: float = 1.0,
        rows: int | None = None,
        samples: int | None = None,
    ) -> torch.Tensor:
        """Accumulate gradients, multiplied by `loss_scale`; returns [SUMS] of this rank.

        `position`: where this batch begins in the order of samples. `rows`: how many samples it was made of (None: from
        its tensors). `samples`: those of all ranks together (None: as many as the largest step has).
        """
        batch = take_chunks(self.parallel.chunks, batch)
        scale = loss_scale * self.count_averaged(model) / self.batch_split.global_batch
        parts = self.batch_split.count_parts(samples, self.parallel.mesh.data_ranks)
        sample = self.first_sample(position, samples)
        with self._split_logits():
            if self.parallel.pipeline is not None:
                return self._through_pipeline(self.parallel.pipeline, batch, loss_fn, scale, sample, rows, parts)[0]
            micros = list(cut(batch, parts, rows))
            if self.replays is None:
                sums = self._one_by_one(model, micros, loss_fn, scale, sample)
            else:
                found = self.replays.run(micros, loss_fn, scale, partial(self._one, model, loss_fn, scale))
                if found is None:
                    with self.replays.timing():
                        found = self._one_by_one(model, micros, loss_fn, scale, sample)
                sums = found
        # FSDP frees the weights of a model after its backward pass; one without would use outdated weights.
        for parallel in (*self.further, *self.beside):
            let_go(parallel)
        return self._answered(sums)

    def _one_by_one(
        self, model: nn.Module, micros: Sequence[Micro], loss_fn: Loss, scale: float, sample: int
    ) -> torch.Tensor:
        """`sample`: the number of this rank's first sample."""
        sums = self._zeros()
        for number, micro in enumerate(micros, start=1):
            self.scale_routers(micro.weight * scale)
            if self.parallel.dropout is not None:
                self.parallel.dropout.start(sample + micro.start)
            with self.around(model, last=number == len(micros)):
                self._one(model, loss_fn, scale, micro, sums)
        return sums

    def scale_routers(self, scale: float) -> None:
        """Set on routers the factor of the sum over tokens of the main loss: 0 for rows that do not count.

        All ranks of the tensor axis route the same tokens, and their gradients are summed: each answers for its part.
        """
        for router in self.routers:
            router.gradient_scale = scale / self.parallel.mesh.degree("tp")

    def _one(self, model: nn.Module, loss_fn: Loss, scale: float, micro: Micro, sums: torch.Tensor) -> None:
        loss = self._forward(model, micro, loss_fn)
        self.backward(loss.total * (micro.weight * scale))
        self._add(sums, loss, micro.weight)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Any, loss_fn: Loss, rows: int | None = None) -> Evaluated:
        """Forward passes alone, on this rank: [SUMS], and the sums that the loss names. A batch without rows is run as
        well, and does not count."""
        batch = take_chunks(self.parallel.chunks, batch)
        with self._split_logits():
            if self.parallel.pipeline is not None:
                return self._through_pipeline(self.parallel.pipeline, batch, loss_fn, None, rows=rows)
            (micro,) = cut(batch, 1, rows)
            return self._add_up([(self._forward(model, micro, loss_fn), micro.weight)])

    @torch.no_grad()
    def predict(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """What the model gives for inputs that all ranks have alike, in the number formats of training; no axis may
        cut the model or its inputs into parts."""
        with self.precision.autocast(self.device):
            found: torch.Tensor = model(inputs)
        return found

    def count_averaged(self, model: nn.Module) -> int:
        """The number of ranks that gradients are averaged over: DDP does so, all else in torch sums."""
        if self.further or self.beside:
            wrapped = any(isinstance(each.call, DistributedDataParallel) for each in self.parallels)
        else:
            wrapped = find_copies(model) is not None
        return self.parallel.mesh.data_ranks if wrapped else 1

    @contextlib.contextmanager
    def around(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Around the passes of one micro-batch: each model that is updated delays communication until the last one;
        those beside send nothing."""
        calls = [each.call for each in self.parallels] if self.further or self.beside else [model]
        with contextlib.ExitStack() as stack:
            for call in calls:
                stack.enter_context(accumulating(call, last=last))
            for each in self.beside:
                if isinstance(each.call, DistributedDataParallel) and not each.call.static_graph:
                    stack.enter_context(each.call.no_sync())
            yield

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def backward_by_hand(self, loss: LossSum, weight: float, *, retain_graph: bool) -> torch.Tensor:
        """Gradients of a loss that a script has computed from this rank's share; [SUMS] of this rank.

        No rank averages here: gradients over ranks are to be summed.
        """
        sums = self._zeros()
        with self._split_logits():
            (loss.total * (weight / self.batch_split.global_batch)).backward(retain_graph=retain_graph)
        self._add(sums, loss, weight)
        return self._answered(sums)

    def _forward(self, model: nn.Module, micro: Micro, loss_fn: Loss) -> LossSum:
        """The loss of a micro-batch; zero if it is a mean over no targets, which would be NaN."""
        needs_filling = loss_fn not in self.sum_losses
        data, counts = fill_missing_targets(micro.data, pair=micro.pair) if needs_filling else (micro.data, None)
        with self._computing():
            loss = call_loss(loss_fn, model, data, pair=micro.pair)
            self.sum_losses[:] = [loss_fn] if isinstance(loss, LossSum) else []
            loss = as_sum(loss, micro.rows)
        return loss if counts is None else loss.counted(counts)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Around a forward pass and its loss."""
        with self.precision.autocast(self.device), compiling_losses(self.compiles):
            yield

    @torch.no_grad()
    def measure(
        self, model: nn.Module, batch: Any, loss_fn: Loss, parts: Sequence[tuple[int, int]], rows: int | None = None
    ) -> list[tuple[float, float]]:
        """The loss of some parts of a batch, each a span of rows, as sum and count; no pipeline."""
        batch = take_chunks(self.parallel.chunks, batch)
        count = count_rows(batch, rows)
        pair, sums = is_pair(batch, count), []
        with self._split_logits():
            for start, end in parts:
                part = map_tensors(torch.clone, cut_rows(batch, count, start, end))  # a model may write into it
                micro = Micro(part, end - start, 1.0, start, pair)
                found = self._zeros()
                self._add(found, self._forward(model, micro, loss_fn), 1.0)
                sums.append(found)
        return [(float(found[0]), float(found[1])) for found in sums]

    def _through_pipeline(
        self,
        pipeline: Pipeline,
        batch: Any,
        loss_fn: Loss,
        scale: float | None,
        sample: int = 0,
        rows: int | None = None,
        parts: int = 0,
    ) -> Evaluated:
        """All micro-batches in passes of equal shape; `scale` None runs no backward pass. `sample`: the number of this
        rank's first sample; `parts`: micro-batches of training."""
        filled = fill_empty(batch)
        is_two = isinstance(filled, tuple | list) and len(filled) == 2
        if not is_two or not all(isinstance(each, torch.Tensor | PackedInputs) for each in filled):
            raise UserError(
                "a pipeline (parallel.pp > 1) needs batches of two tensors, (inputs, targets), not a "
                f"{type(filled).__name__}.\n  To do: let the dataset give such pairs, or set parallel.pp = 1."
            )
        inputs, targets = filled
        size, per_pass = self.batch_split.micro_batch, self.batch_split.per_pass
        rows = len(targets) if rows != 0 else 0
        # In training every rank runs as many passes, whatever its rows: the states are shared over the ranks.
        passes = parts // per_pass if scale is not None else -(-max(rows, 1) // (per_pass * size))

        def loss_of(start: int, output: torch.Tensor, number: int) -> torch.Tensor:
            first = start + number * size
            kept = max(0, min(rows - first, size))
            data = targets[first : first + kept] if kept else targets[:1]
            with self._computing():
                loss = as_sum(loss_fn(output[: max(kept, 1)], data), max(kept, 1))
            # torch asks for the shapes of a first pass with the same call: a number is counted once.
            weights[start // size + number] = (loss, float(kept > 0))
            return loss.total * (float(kept > 0) * (scale or 0.0))

        weights: dict[int, tuple[LossSum, float]] = {}
        taken = per_pass * size
        for start in range(0, passes * taken, taken):
            part = map_tensors(partial(_take_padded, start, taken), inputs)
            tokens, named = (part.tokens, part.named) if isinstance(part, PackedInputs) else (part, {})
            run = partial(pipeline.run, tokens, per_pass, partial(loss_of, start), named=named)
            if scale is not None and pipeline.is_new_to(tokens, per_pass, training=True):
                self._rehearse(run)
            self.scale_routers(scale or 0.0)
            if self.parallel.dropout is not None:
                self.parallel.dropout.start(sample + start, size)
            run(training=scale is not None)
        return self._add_up(weights.values())

    def _rehearse(self, run: Callable[..., None]) -> None:
        """A first pass without effect: torch runs a new schedule once more to find shapes, which must not count for
        routers and batch norms or replace a micro-batch for dropout.

        All ranks of a pipeline take part, whether their stages have any of these or not.
        """
        self.scale_routers(0.0)
        buffers = [(buffer, buffer.clone()) for buffer in self.parallel.module.buffers()]
        with torch.random.fork_rng():
            run(training=True)
        for buffer, before in buffers:
            buffer.copy_(before)
        for parameter in self.parallel.module.parameters():
            parameter.grad = None

    def first_sample(self, position: int, samples: int | None = None) -> int:
        """A number that this rank's first sample has and no other of the run: the next batch begins at least as many
        positions later as this one has samples over all ranks (None: the most), also if positions are skipped."""
        mesh, size = self.parallel.mesh, self.batch_split.global_batch if samples is None else samples
        return position + position_share(size, mesh.data_rank, mesh.data_ranks).start

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(SUMS, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def _add(self, sums: torch.Tensor, loss: LossSum, weight: float) -> None:
        if not weight:
            return
        sums[0] += whole_tensor(loss.total.detach()) * weight
        sums[1] += loss.count * weight
        if loss.correct is not None:
            sums[2] += whole_tensor(loss.correct) * weight
            sums[3] += loss.count * weight

    @torch.no_grad()
    def _add_up(self, losses: Iterable[tuple[LossSum, float]]) -> Evaluated:
        sums, metrics = self._zeros(), dict[str, torch.Tensor]()
        for loss, weight in losses:
            self._add(sums, loss, weight)
            for name, value in loss.metrics.items():
                found = torch.as_tensor(value, device=self.device).detach()
                own = weight and self.parallel.answers_for_loss
                metrics[name] = metrics.get(name, 0) + (
                    whole_tensor(found).double() if own else found.new_zeros(()).double()
                )
        return self._answered(sums), metrics

    def _answered(self, sums: torch.Tensor) -> torch.Tensor:
        return sums if self.parallel.answers_for_loss else torch.zeros_like(sums)

    def _split_logits(self) -> contextlib.AbstractContextManager[object]:
        return loss_parallel() if self.parallel.splits_logits else contextlib.nullcontext()


def take_chunks(chunks: Chunks, batch: Any) -> Any:
    """This rank's chunks of every tensor [batch, seq, ...] of a tree, if the sequence is split."""
    if chunks.ranks == 1:
        return batch
    return map_tensors(lambda tensor: chunks.take(tensor) if tensor.dim() > 1 else tensor, batch)


def call_loss(loss_fn: Loss, model: nn.Module, data: Any, *, pair: bool) -> LossSum | torch.Tensor:
    """The loss of one batch: of a pair (inputs, targets), or of any other argument of the loss function."""
    if pair:
        inputs, targets = data
        if isinstance(inputs, PackedInputs):
            return loss_fn(model(inputs.tokens, **inputs.named), targets)
        return loss_fn(model(inputs), targets)
    copies = find_copies(model)
    if copies is None:
        return loss_fn(model, data)
    if not torch.is_grad_enabled():
        return loss_fn(copies.module, data)

    def run() -> tuple[Any, ...] | torch.Tensor:
        """The loss as tensors that DDP finds in what a forward pass returns, whichever methods it calls."""
        loss = loss_fn(copies.module, data)
        return (loss.total, loss.count, loss.correct, loss.metrics) if isinstance(loss, LossSum) else loss

    found = copies.run(run)
    return LossSum(*found) if isinstance(found, tuple) else found


def cut(batch: Any, parts: int, known: int | None = None) -> Iterator[Micro]:
    """A rank's share in `parts` nearly equal micro-batches; a part without rows repeats a row with weight 0.

    `known` as of `count_rows`; where it is 0, the batch is one row that does not count.
    """
    rows = count_rows(batch, known)
    if isinstance(batch, LengthGroups):
        yield from _take_groups(batch, parts, rows)
        return
    pair = is_pair(batch, rows)
    if not rows:
        yield from [Micro(fill_empty(batch), 1, 0.0, 0, pair)] * parts
        return
    if parts == 1:
        yield Micro(batch, rows, 1.0, 0, pair)
        return
    for part in range(parts):
        start, end = rows * part // parts, rows * (part + 1) // parts
        weight = 1.0 if end > start else 0.0
        start, end = (start, end) if weight else (0, 1)
        yield Micro(cut_rows(batch, rows, start, end), end - start, weight, start, pair)


def _take_groups(groups: LengthGroups, parts: int, rows: int) -> Iterator[Micro]:
    """A micro-batch for each of the first `rows` groups, which are at most `parts`; then the first one with weight 0.
    Raises UserError for more groups."""
    if rows > parts:
        raise UserError(
            f"{rows} groups of documents are to be run in {parts} passes, and a pass takes one (data.group_tokens).\n"
            "  To do: set train.micro_batch = 1."
        )
    for part in range(parts):
        number = part if part < rows else 0
        yield Micro(groups[number], len(groups[number][1]), float(part < rows), number, pair=True)


def _take_padded(start: int, rows: int, source: torch.Tensor) -> torch.Tensor:
    """`rows` rows of `source` from `start` on, behind its end repetitions of its first: every micro-batch of a pipeline
    has one shape."""
    found = source[start : start + rows]
    missing = rows - len(found)
    return found if missing == 0 else torch.cat((found, source[:1].expand(missing, *source.shape[1:])))


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """A DTensor as the plain tensor that its ranks share."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """In this context the models evaluate; afterwards each module has its own mode again."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def let_go(parallel: ParallelModel) -> None:
    """Let FSDP free the weights that a forward pass alone has gathered: a script that reads or freezes parameters
    between two steps expects its shards."""
    for module in parallel.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
