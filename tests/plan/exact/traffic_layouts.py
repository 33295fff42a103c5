"""The layouts whose traffic is counted on ranks, one fixed small transformer in each, and how a step is traced."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exact_traffic import WORLD, Message, StepWork, estimate_traffic
from runs import COMMON, open_tiny, pool_ranks
from shardway.layout import layout_of
from shardway.resolve import Resolved
from shardway.train.run import train_run
from traffic_tracer import CollectiveTracer, Sent

BASE = (
    *COMMON,
    "train.steps=3",
    "optim.warmup=1 steps",
    "model.dim=16",
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=32",
    "model.vocab=32",
    "model.tied=false",
    "data.seq_len=16",
    "parallel.dp_replicate=1",
)
TRACED_STEP = 3
"""The first step makes what later ones use, DDP orders its buckets in the second."""


@dataclass(frozen=True)
class Case:
    """A layout: how many ranks, and the words that choose it."""

    ranks: int
    words: tuple[str, ...]


def case(ranks: int, *words: str) -> Case:
    """`parallel.` is understood where a word names no section."""
    return Case(ranks, tuple(word if "." in word.split("=")[0] else f"parallel.{word}" for word in words))


CASES: Mapping[str, Case] = {
    "replicate (DDP)": case(2, "dp_replicate=2"),
    "replicate, 2 micro-batches": case(2, "dp_replicate=2", "train.micro_batch=2"),
    "shard, reshard always": case(2, "dp_shard=2"),
    "shard, reshard never": case(2, "dp_shard=2", "reshard_after_forward=false"),
    "shard, 2 micro-batches": case(2, "dp_shard=2", "train.micro_batch=2"),
    "shard, sizes that do not divide": case(3, "dp_shard=3", "train.global_batch=9"),
    "hybrid": case(4, "dp_replicate=2", "dp_shard=2"),
    "hybrid, 2 micro-batches": case(4, "dp_replicate=2", "dp_shard=2", "train.micro_batch=1"),
    "tensor, sequence split": case(2, "tp=2"),
    "tensor": case(2, "tp=2", "tp_sequence=false"),
    "tensor, logits gathered": case(2, "tp=2", "tp_loss=false"),
    "tensor 4 with 2 key/value heads": case(4, "tp=4"),
    "tensor, norms and biases": case(2, "tp=2", "tp_sequence=false", "model.qk_norm=true", "model.bias=true"),
    "tensor x shard": case(4, "tp=2", "dp_shard=2"),
    "tensor x replicate": case(4, "tp=2", "dp_replicate=2"),
    "pipeline, 1F1B": case(2, "pp=2", "pp_split=[2, 2]", "train.micro_batch=2"),
    "pipeline, interleaved": case(2, "pp=2", "pp_schedule=interleaved", "pp_split=[1, 1, 1, 1]", "train.micro_batch=2"),
    "pipeline, ZBV": case(2, "pp=2", "pp_schedule=zbv", "pp_split=[1, 1, 1, 1]", "train.micro_batch=2"),
    "pipeline x shard, 2 passes": case(
        4, "pp=2", "dp_shard=2", "pp_split=[2, 2]", "pp_micro_batches=2", "train.micro_batch=1"
    ),
    "pipeline x tensor": case(4, "pp=2", "tp=2", "pp_split=[2, 2]", "train.micro_batch=4"),
    "pipeline x shard": case(4, "pp=2", "dp_shard=2", "pp_split=[2, 2]", "train.micro_batch=2"),
    "pipeline x replicate": case(4, "pp=2", "dp_replicate=2", "pp_split=[2, 2]", "train.micro_batch=2"),
    "context, ring": case(2, "cp=2"),
    "context, gather": case(2, "cp=2", "cp_method=gather"),
    "context 4, ring": case(4, "cp=4"),
    "context x tensor": case(4, "cp=2", "tp=2"),
    "experts": case(2, "dp_shard=2", "ep=2", "model.experts=4"),
    "experts x shard": case(4, "dp_shard=4", "ep=2", "model.experts=4", "model.dense_layers=1"),
    "as many experts as ep, x shard": case(4, "dp_shard=4", "ep=2", "model.experts=2"),
    "experts x context, balanced by loss": case(
        4, "dp_shard=2", "cp=2", "ep=4", "model.experts=4", "model.balance=loss", "model.shared_experts=1"
    ),
    "experts x tensor": case(4, "dp_shard=2", "ep=2", "tp=2", "model.experts=4"),
}


@dataclass(frozen=True)
class Report:
    """One rank's step: bytes that were counted by kind and group, and what the formulas say of them."""

    tally: Mapping[Sent, int]
    messages: tuple[tuple[Sent, Message], ...]

    def expected(self) -> dict[Sent, int]:
        """The messages in the form of the tally."""
        total = Counter[Sent]()
        for sent, message in self.messages:
            total[sent] += message.payload_bytes
        return dict(total)


def report_step(name: str, directory: Path) -> Report:
    """Train the case for some steps on the ranks of the pool, and count what the last of them sends."""
    tracer = CollectiveTracer()
    with open_tiny(directory, pool_ranks(), *CASES[name].words, base=BASE) as run:
        take = run.step

        def step(*arguments: Any) -> float:
            traced = run._loop.counters.step + 1 == TRACED_STEP  # type: ignore[union-attr]
            with tracer if traced else contextlib.nullcontext():
                return take(*arguments)

        run.step = step  # type: ignore[method-assign]
        train_run(run)
        return Report(tracer.tally(), _expect(run.resolved, run.session.ranks.rank))


def _expect(resolved: Resolved, rank: int) -> tuple[tuple[Sent, Message], ...]:
    layout = layout_of(resolved.values.parallel)
    everyone = tuple(range(layout.world))
    messages = estimate_traffic(work_of(resolved), resolved.values.parallel, rank)
    groups = (everyone if each.dim == WORLD else layout.peers(rank, each.dim) for each in messages)
    return tuple((Sent(each.kind, ranks), each) for each, ranks in zip(messages, groups, strict=True))


def work_of(resolved: Resolved) -> StepWork:
    """The work of a step of a resolved run in fp32."""
    values, derived = resolved.values, resolved.derived
    return StepWork(
        model=values.model,
        seq_len=values.data.seq_len,
        rows=int(values.train.micro_batch),
        blocks=tuple(values.parallel.pp_split) or (values.model.layers,),
        micro_batches=derived.accumulation,
        per_pass=derived.per_pass,
    )
