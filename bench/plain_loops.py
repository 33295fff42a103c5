"""Training loops as people write them with PyTorch alone, and ours, on the same model, weights and samples.

Each function takes a `turns.Task` and yields the loss of each step. The model, its sizes and the optimizer's numbers
are those of a resolved run; batches are gathered from its data by the numbers that our own order gives, so that every
loop sees the same samples. Hand-written loops clip by the global norm and read their loss, as ours does; they agree on
nothing, record nothing and reduce no metrics.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardway.data.open import open_described
from shardway.data.order import SampleOrder, position_share
from shardway.data.sources.base import DataSource
from shardway.models.build import build_model
from shardway.resolve import DataFacts, resolve_with_data
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.runfile.schema import RunFile
from shardway.train.loss import token_cross_entropy
from shardway.train.optim.base import decay_groups
from shardway.train.optim.kinds import build_optimizer
from shardway.train.run import open_run
from turns import Task

QUIET = (
    "run.device=cpu",
    "run.threads=1",
    "train.steps=1000000",
    "train.validate_every=off",
    "checkpoint.every=off",
    "optim.schedule=constant",
    "optim.warmup=0 steps",
    "model.tied=false",
    "precision.compute=fp32",
    "precision.tf32=false",
    "train.compile=off",
)
"""What every loop of a comparison is given; a step is a step and nothing else."""


@dataclass(frozen=True)
class Case:
    """What a hand-written loop works with."""

    values: RunFile
    source: DataSource
    task: Task

    def build_model(self) -> nn.Module:
        """The model with its initial weights, whole on this rank."""
        model = build_model(
            self.values.model, vocab=self.source.facts.vocab, sample_shape=self.source.facts.sample_shape
        )
        model.to_empty(device="cpu")
        model.init_weights(self.values.train.seed)  # type: ignore[operator]
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with the numbers of the run file; fused, torch's fastest."""
        optim = self.values.optim
        groups = decay_groups(model, optim.weight_decay)
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=True)

    def batches(self, parts: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(inputs, targets) of this rank, where `parts` ranks share each batch."""
        size, rank = self.values.train.batch.largest, self.task.rank if parts > 1 else 0
        order = SampleOrder(len(self.source), self.values.train.seed, self.values.data.shuffle)
        share = torch.tensor(position_share(size, rank, parts)).numpy()
        for step in itertools.count():
            rows = self.source.batch(order.ids(step * size + share))
            yield torch.from_numpy(rows["inputs"]), torch.from_numpy(rows["targets"])


def join_ranks() -> None:
    """The group of all ranks, unless they have one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def open_case(task: Task) -> Case:
    """The run of a task, resolved as ours is."""
    resolved = resolve_request(ResolveRequest(None, (*QUIET, *task.words)), task.ranks, task.ranks).resolved
    source = open_described(resolved.values).train
    facts = DataFacts(len(source), source.tokens_per_sample, source.facts.vocab)
    return Case(resolve_with_data(resolved, facts).values, source, task)


def ours(task: Task, *layout: str) -> Iterator[float]:
    """Our loop, whole: events, status, agreement of the ranks, exact normalisation."""
    request = ResolveRequest(None, (*QUIET, *task.words, *layout), Path(task.folder))
    with open_run(request) as run:
        values = run.resolved.values
        source = open_described(values).train
        run.session.settle(DataFacts(len(source), source.tokens_per_sample, source.facts.vocab))
        values = run.resolved.values
        model = run.shard(build_model(values.model, vocab=source.facts.vocab, sample_shape=source.facts.sample_shape))
        run.optimizer(lambda parameters: build_optimizer(values.optim, model, values.optim.lr), model)
        for batch in run.steps(run.loader(source)):
            yield run.step(model, batch, token_cross_entropy)


def our_ddp(task: Task) -> Iterator[float]:
    """Copies."""
    return ours(task, f"parallel.dp_replicate={task.ranks}")


def our_fsdp2(task: Task) -> Iterator[float]:
    """Shards."""
    return ours(task, f"parallel.dp_shard={task.ranks}")


def our_tp(task: Task) -> Iterator[float]:
    """Split matrices, with the sequence split between them and the logits split in the loss."""
    return ours(task, f"parallel.tp={task.ranks}")


def plain_ddp(task: Task) -> Iterator[float]:
    """DistributedDataParallel."""
    case = open_case(task)
    join_ranks()
    model = DistributedDataParallel(case.build_model(), gradient_as_bucket_view=True)
    yield from train(case, model, case.batches(task.ranks))


def plain_fsdp2(task: Task) -> Iterator[float]:
    """`fully_shard` of each block and of the rest."""
    case = open_case(task)
    join_ranks()
    model = case.build_model()
    for block in model.blocks.children():  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    yield from train(case, model, case.batches(task.ranks))


def plain_tp(task: Task) -> Iterator[float]:
    """`parallelize_module` with the styles of torch's tutorial on tensor parallelism."""
    case = open_case(task)
    join_ranks()
    model = case.build_model()
    mesh = init_device_mesh("cpu", (task.ranks,))
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.blocks.children():  # type: ignore[union-attr]
        parallelize_module(block, mesh, block_styles())
    with loss_parallel():
        yield from train(case, model, case.batches(1))


def block_styles() -> dict[str, ParallelStyle]:
    """How the modules of one block split; what enters a sum is gathered, what leaves it is scattered."""
    attention = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    return {
        "attention_norm": SequenceParallel(),
        "attention": attention,
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"ffn.{name}": ColwiseParallel() for name in ("gate", "up")},
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def train(case: Case, model: nn.Module, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[float]:
    """The loop of a tutorial: forward, backward, clip, update."""
    optimizer, clip = case.build_optimizer(model), float(case.values.optim.clip)
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()
