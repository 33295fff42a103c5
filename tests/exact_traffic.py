"""Bytes that one rank hands to collectives in one optimizer step of the reference transformer, by kind and dim.

Invariant: the payload of a message is what enters the collective on this rank: the tensor of an all-reduce, this
rank's part of an all-gather, the whole input of a reduce-scatter, all rows of an all-to-all (those that stay too), the
tensor of a send; of a receive what arrives. Every term equals, to the byte, what is counted on ranks of the CPU
(docs/communication.md). This module must not know how long a message takes.

Not counted: what happens before the second step (shapes between pipeline stages, DDP's order of buckets), between
steps (validation, checkpoints), and in groups of one rank. Recompute is "none", `reshard_after_forward` no number,
gradients are not compressed, and the optimizer updates each element by itself.

Sources: replicas and shards: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7; tensor: Shoeybi et al.,
Megatron-LM, arXiv:1909.08053, section 3; with the sequence split: Korthikanti et al., arXiv:2205.05198, section 4.2.2;
context: Liu et al., Ring Attention, arXiv:2310.01889, section 3; experts: Lepikhin et al., GShard, arXiv:2006.16668,
section 3.2; bytes on the wire: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from exact_weights import WeightShape, held_elements, rank_stages, transformer_weights, weights_of_rank
from shardway.errors import Bug
from shardway.layout import EXPERT_SHARD, SHARD, Layout, layout_of, needs_sharding
from shardway.runfile.schema import ModelSection, ParallelSection

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"]

WORLD = "world"
"""The dim of all ranks together."""

STEP_NUMBERS = 13
"""Numbers that all ranks add up once a step, in float64: sums of losses and counts, squares of gradients, requests."""

WIDE_BYTES = 8
LOSS_BYTES = 4
LOSS_REDUCTIONS = 3
"""Of a cross-entropy whose logits are split: the largest logit, the sum of exponentials, the target's logit."""


@dataclass(frozen=True)
class StepWork:
    """What a rank works through in a step: `micro_batches` of `rows` samples; a pipeline takes `per_pass` of them at
    a time, and its stages have `blocks` blocks each (else one entry, of all).

    Bytes of one number: of activations (in every collective of theirs), of weights as they are gathered, of kept
    weights and their gradients, and of sharded gradients as they are summed.
    """

    model: ModelSection
    seq_len: int
    rows: int
    blocks: tuple[int, ...]
    micro_batches: int = 1
    per_pass: int = 1
    activation_bytes: int = 4
    gathered_bytes: int = 4
    weight_bytes: int = 4
    reduce_bytes: int = 4


@dataclass(frozen=True)
class Message:
    """All messages of one sort in one step, with their payload together.

    That of an all-to-all of tokens is the mean over the ranks of a group: which rank gets how many is the router's
    choice.
    """

    kind: Kind
    dim: str
    what: str
    payload_bytes: int


def estimate_traffic(work: StepWork, parallel: ParallelSection, rank: int = 0) -> tuple[Message, ...]:
    """The messages of a rank in one step of a resolved layout; those without a byte are left out."""
    view = _RankView(work, parallel, layout_of(parallel), rank)
    found = [message for term in TERMS.values() for message in term(view)]
    return tuple(each for each in found if each.payload_bytes and view.ranks_of(each.dim) > 1)


def estimate_sent_bytes(message: Message, ranks: int) -> float:
    """What a rank puts on the wire for a message in a group of `ranks`, with ring algorithms."""
    share = (ranks - 1) / ranks
    factors: dict[Kind, float] = {
        "all_reduce": 2 * share,
        "all_gather": ranks - 1,
        "reduce_scatter": share,
        "all_to_all": share,
        "send": 1,
        "receive": 0,
    }
    return message.payload_bytes * factors[message.kind]


@dataclass(frozen=True)
class _RankView:
    """A step as one rank sees it, and the quantities that several terms use."""

    work: StepWork
    parallel: ParallelSection
    layout: Layout
    rank: int

    def ranks_of(self, dim: str) -> int:
        return self.layout.world if dim == WORLD else self.layout.degree(dim)

    def degree(self, axis: str) -> int:
        return self.layout.degree(axis)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return rank_stages(self.parallel, self.rank)

    @cached_property
    def last_stage(self) -> int:
        return len(self.work.blocks) - 1

    @cached_property
    def weights(self) -> Sequence[WeightShape]:
        return weights_of_rank(transformer_weights(self.work.model), self.parallel, self.work.blocks, self.rank)

    @cached_property
    def blocks(self) -> int:
        return sum(self.work.blocks[stage] for stage in self.stages)

    @cached_property
    def mixed_blocks(self) -> int:
        return len({weight.block for weight in self.weights if weight.expert})

    @property
    def passes(self) -> int:
        """How often the states are used whole and their gradients summed: a pipeline does so once a pass."""
        pipelined = self.parallel.pp > 1
        return self.work.micro_batches // self.work.per_pass if pipelined else self.work.micro_batches

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank; those of the tensor axis have the same."""
        return self.work.rows * self.work.seq_len // self.degree("cp")

    @property
    def stream_bytes(self) -> int:
        """The residual stream of a micro-batch."""
        return self.tokens * self.work.model.dim * self.work.activation_bytes

    def times(self, payload_bytes: int) -> int:
        """The payload of every micro-batch together."""
        return self.work.micro_batches * payload_bytes


def _whole_step(view: _RankView) -> Iterator[Message]:
    yield Message("all_reduce", WORLD, "loss, norm and requests of the step", STEP_NUMBERS * WIDE_BYTES)


def _replicas(view: _RankView) -> Iterator[Message]:
    """DDP: each gradient once a step, after the last micro-batch."""
    if not needs_sharding(view.layout):
        elements = sum(held_elements(weight, view.layout, view.rank) for weight in view.weights)
        yield Message("all_reduce", "dp_replicate", "gradients", elements * view.work.weight_bytes)


def _shards(view: _RankView) -> Iterator[Message]:
    """FSDP2: blocks are gathered for the forward pass and, unless they were kept, again for the backward pass; what is
    outside of them once. Gradients are scattered each time, and added up over copies once a step."""
    if not needs_sharding(view.layout):
        return
    for dim in (SHARD, EXPERT_SHARD):
        weights = [weight for weight in view.weights if weight.shard_axis(view.layout) == dim]
        blocks = _padded(view, [weight for weight in weights if weight.block is not None])
        ends = _padded(view, [weight for weight in weights if weight.block is None])
        gathers = 2 if _is_freed(view.parallel) else 1
        gathered = (gathers * blocks + ends) * view.passes * view.work.gathered_bytes
        summed = (blocks + ends) * view.work.reduce_bytes
        whose = "weights" if dim == SHARD else "weights of experts"
        yield Message("all_gather", dim, whose, gathered)
        yield Message("reduce_scatter", dim, f"gradients of {whose}", summed * view.layout.degree(dim) * view.passes)
        yield Message("all_reduce", "dp_replicate", f"gradients of shards of {whose}", summed * _copies_sums(view))


def _padded(view: _RankView, weights: Sequence[WeightShape]) -> int:
    return sum(weight.shard_elements(view.layout) for weight in weights)


def _is_freed(parallel: ParallelSection) -> bool:
    """Whether blocks are freed after the forward pass; "auto" does so without a pipeline."""
    chosen = parallel.reshard_after_forward
    if not isinstance(chosen, bool) and chosen != "auto":
        raise Bug(f"there is no formula for parallel.reshard_after_forward = {chosen}")
    return parallel.pp == 1 if chosen == "auto" else chosen


def _copies_sums(view: _RankView) -> int:
    """How often a step adds gradients up over copies of the shards: at its end, or of each pass of a pipeline."""
    return view.passes if view.parallel.pp > 1 else 1


def _tensor(view: _RankView) -> Iterator[Message]:
    """Two regions a block, each entered and left once forwards and once backwards; the embedding is left, the output
    layer entered."""
    if view.degree("tp") == 1:
        return
    crossings = 4 * view.blocks + (0 in view.stages) + (view.last_stage in view.stages)
    if view.parallel.tp_sequence:
        # To enter is to gather, to leave is to scatter a sum; backwards it is the other way round.
        yield Message("all_gather", "tp", "activations", view.times(crossings * view.stream_bytes // view.degree("tp")))
        yield Message("reduce_scatter", "tp", "activations", view.times(crossings * view.stream_bytes))
    else:
        yield Message("all_reduce", "tp", "activations", view.times(crossings * view.stream_bytes))
    partial = [w for w in view.weights if w.split_dim(view.layout) is None and _is_partial(view.parallel, w)]
    elements = sum(held_elements(weight, view.layout, view.rank) for weight in partial)
    yield Message("all_reduce", "tp", "gradients of weights that are not split", elements * view.work.weight_bytes)


def _is_partial(parallel: ParallelSection, weight: WeightShape) -> bool:
    """Whether a weight that every tensor rank has whole has a gradient that is a part of a sum on each."""
    return parallel.tp_sequence or weight.in_region


def _loss(view: _RankView) -> Iterator[Message]:
    """With split logits three numbers a token are added up, else the logits are gathered."""
    if view.degree("tp") == 1 or view.last_stage not in view.stages:
        return
    if view.parallel.tp_loss:
        yield Message("all_reduce", "tp", "cross-entropy", view.times(LOSS_REDUCTIONS * view.tokens * LOSS_BYTES))
    else:
        features = int(view.work.model.vocab) // view.degree("tp")
        yield Message("all_gather", "tp", "logits", view.times(view.tokens * features * view.work.activation_bytes))


def _context(view: _RankView) -> Iterator[Message]:
    """Keys and values of the other ranks forwards and again backwards; then their gradients, in fp32 at least, go home:
    in a ring one step more than the keys came, since each starts at another rank than it ends."""
    ranks = view.degree("cp")
    if ranks == 1:
        return
    numbers = view.times(view.blocks * 2 * view.tokens * _kv_features(view))
    payload, gradients = numbers * view.work.activation_bytes, numbers * max(4, view.work.activation_bytes)
    if view.parallel.cp_method == "ring":
        ways: tuple[Kind, ...] = ("send", "receive")
        for kind in ways:
            yield Message(kind, "cp", "keys and values", 2 * (ranks - 1) * payload)
            yield Message(kind, "cp", "gradients of keys and values", ranks * gradients)
    else:
        yield Message("all_gather", "cp", "keys and values", 2 * payload)
        yield Message("reduce_scatter", "cp", "gradients of keys and values", ranks * gradients)


def _kv_features(view: _RankView) -> int:
    """Features of all key heads (and as many of value heads) that a rank computes with."""
    model, tp = view.work.model, view.degree("tp")
    if model.kv_rank:
        return model.heads // tp * (int(model.head_dim) + int(model.rope_head_dim))
    return max(int(model.kv_heads) // tp, 1) * int(model.head_dim)


def _experts(view: _RankView) -> Iterator[Message]:
    """To the experts and back, forwards and backwards; how many tokens come is told first."""
    model = view.work.model
    layers = view.mixed_blocks
    tokens = view.tokens * model.experts_per_token * model.dim * view.work.activation_bytes
    yield Message("all_to_all", "ep", "counts of tokens", view.times(layers * model.experts * WIDE_BYTES))
    yield Message("all_to_all", "ep", "tokens", view.times(layers * 4 * tokens))


def _balance(view: _RankView) -> Iterator[Message]:
    """How many tokens each expert got, added up over all data."""
    model = view.work.model
    loads = view.mixed_blocks * model.experts * WIDE_BYTES
    for dim in ("dp_replicate", SHARD):
        yield Message("all_reduce", dim, "loads of experts", loads)
    if model.balance == "loss":
        yield Message("all_reduce", "cp", "loads of a sequence", view.times(loads * view.work.rows))


def _pipeline(view: _RankView) -> Iterator[Message]:
    """The residual stream of each micro-batch over each boundary to another rank, and its gradient back."""
    if view.degree("pp") == 1:
        return
    split = view.degree("tp") if view.parallel.tp_sequence else 1
    payload = view.times(view.stream_bytes // split)
    after = sum(stage < view.last_stage and stage + 1 not in view.stages for stage in view.stages)
    before = sum(stage > 0 and stage - 1 not in view.stages for stage in view.stages)
    yield Message("send", "pp", "activations", after * payload)
    yield Message("receive", "pp", "activations", before * payload)
    yield Message("send", "pp", "gradients of activations", before * payload)
    yield Message("receive", "pp", "gradients of activations", after * payload)


TERMS: Mapping[str, Callable[[_RankView], Iterator[Message]]] = MappingProxyType(
    {
        "step": _whole_step,
        "replicas": _replicas,
        "shards": _shards,
        "tensor": _tensor,
        "loss": _loss,
        "context": _context,
        "experts": _experts,
        "balance": _balance,
        "pipeline": _pipeline,
    }
)
"""What is sent for which reason; a layout's traffic is the sum of them."""
