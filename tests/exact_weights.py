"""The weights of the reference transformer, and what of each one rank holds in a layout.

Invariant: names, shapes and the ways in which weights split are those that `shardway.models.transformer` builds and
`shardway.parallel` applies, which a test compares. This module must not hold a number format: it counts elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardway.errors import Bug
from shardway.layout import EXPERT_SHARD, SHARD, Layout, layout_of, needs_sharding, stages_of_rank
from shardway.runfile.schema import ModelSection, ParallelSection


@dataclass(frozen=True)
class WeightShape:
    """One parameter. `block` is the number of the block that it is in; None before or after the blocks.

    `split` is the dim that the tensor axis splits (None: whole on every rank), `kv_heads` the key/value heads that
    cannot be split further, `in_region` whether each tensor rank uses it for a part of a sum, `expert` whether dim 0
    numbers experts.
    """

    name: str
    shape: tuple[int, ...]
    block: int | None = None
    split: int | None = None
    kv_heads: int | None = None
    in_region: bool = False
    expert: bool = False

    @property
    def elements(self) -> int:
        """Numbers in the whole of it."""
        return math.prod(self.shape)

    def split_dim(self, layout: Layout) -> int | None:
        """The dim that the tensor axis splits: none where it would cut a key/value head."""
        tp = layout.degree("tp")
        return None if tp == 1 or (self.kv_heads is not None and self.kv_heads % tp) else self.split

    def shape_before_sharding(self, layout: Layout) -> tuple[int, ...]:
        """What the tensor and expert axes leave a rank of it, before FSDP2 shares that out."""
        shape, dim = list(self.shape), self.split_dim(layout)
        if dim is not None:
            shape[dim] //= layout.degree("tp")
        if self.expert:
            shape[0] //= layout.ep
        return tuple(shape)

    def shard_axis(self, layout: Layout) -> str:
        """The dim of the mesh that shares it out: experts live on a grid of their own once ep splits them."""
        return EXPERT_SHARD if self.expert and layout.ep > 1 else SHARD

    def shard_elements(self, layout: Layout, place: int | None = None) -> int:
        """What the rank at `place` of that dim holds; None: what each is padded to, and sends.

        FSDP2 cuts dim 0 as `torch.chunk` does: equal parts, rounded up, of which the last ranks may get less. Experts
        that are fewer than ranks are cut along their last dim.
        """
        size, *rest = self.shape_before_sharding(layout)
        ranks = layout.degree(self.shard_axis(layout))
        if self.expert and layout.ep > 1 and size < ranks:
            return math.prod((size, *rest)) // ranks
        part = -(-size // ranks)
        rows = part if place is None else max(0, min(part, size - place * part))
        return rows * math.prod(rest)


def transformer_weights(model: ModelSection) -> tuple[WeightShape, ...]:
    """All weights of a resolved `model.kind = "transformer"`. Raises Bug for another kind or what is not resolved."""
    if model.kind != "transformer" or "auto" in (model.vocab, model.kv_heads, model.head_dim, model.ffn_dim):
        raise Bug(f"the weights of an unresolved or other model were asked for: {model.kind}")
    return tuple(_list_weights(model))


def weights_of_rank(
    weights: Sequence[WeightShape], parallel: ParallelSection, blocks: Sequence[int], rank: int
) -> tuple[WeightShape, ...]:
    """Those that are on a rank: all of them, or those of its pipeline stages, of which `blocks` gives the sizes."""
    stages = rank_stages(parallel, rank)
    held = {block for stage in stages for block in range(sum(blocks[:stage]), sum(blocks[: stage + 1]))}
    ends = {"embedding": 0, "position_embedding": 0}
    last = len(blocks) - 1
    return tuple(
        weight
        for weight in weights
        if (weight.block in held if weight.block is not None else ends.get(weight.name.split(".")[0], last) in stages)
    )


def rank_stages(parallel: ParallelSection, rank: int) -> tuple[int, ...]:
    """The pipeline stages of a rank; (0,) without a pipeline. Raises Bug where their number is not resolved."""
    if parallel.pp == 1:
        return (0,)
    if parallel.pp_stages_per_rank == "auto":
        raise Bug("parallel.pp_stages_per_rank is not resolved")
    place = layout_of(parallel).coordinate(rank, "pp")
    return stages_of_rank(place, parallel.pp, parallel.pp_stages_per_rank, parallel.pp_schedule)


def held_elements(weight: WeightShape, layout: Layout, rank: int) -> int:
    """What a rank of the weight's pipeline stage holds of it at rest."""
    if not needs_sharding(layout):
        return math.prod(weight.shape_before_sharding(layout))
    return weight.shard_elements(layout, layout.coordinate(rank, weight.shard_axis(layout)))


def allotted_elements(weight: WeightShape, layout: Layout) -> int:
    """The same with what shards are padded to, for which every rank has memory."""
    if not needs_sharding(layout):
        return math.prod(weight.shape_before_sharding(layout))
    return weight.shard_elements(layout)


def _list_weights(model: ModelSection) -> Iterator[WeightShape]:
    vocab, dim = int(model.vocab), model.dim
    yield WeightShape("embedding.weight", (vocab, dim), split=0)
    if model.positions == "learned":
        yield WeightShape("position_embedding.weight", (int(model.max_positions), dim))
    for block in range(model.layers):
        mixed = model.experts > 0 and block >= model.dense_layers
        yield from _norm(model, f"blocks.{block}.attention_norm", block)
        yield from _latent(model, block) if model.kv_rank else _attention(model, block)
        yield from _norm(model, f"blocks.{block}.ffn_norm", block)
        yield from _mixture(model, block) if mixed else _feed_forward(model, block)
    yield from _norm(model, "norm", None)
    if not model.tied:
        yield WeightShape("head.weight", (vocab, dim), split=0)


def _norm(model: ModelSection, name: str, block: int | None) -> Iterator[WeightShape]:
    yield WeightShape(f"{name}.weight", (model.dim,), block)
    if model.norm == "layernorm" and model.bias:
        yield WeightShape(f"{name}.bias", (model.dim,), block)


def _linear(
    name: str, block: int, shape: tuple[int, int], split: int | None, biased: bool = False, kv_heads: int | None = None
) -> Iterator[WeightShape]:
    """A linear layer in a region; its bias splits with its output features."""
    yield WeightShape(f"{name}.weight", shape, block, split, kv_heads, in_region=True)
    if biased:
        yield WeightShape(f"{name}.bias", shape[:1], block, 0 if split == 0 else None, kv_heads, in_region=True)


def _attention(model: ModelSection, block: int) -> Iterator[WeightShape]:
    name, width, kv_heads = f"blocks.{block}.attention", int(model.head_dim), int(model.kv_heads)
    biased = model.bias or model.qkv_bias
    yield from _linear(f"{name}.wq", block, (model.heads * width, model.dim), 0, biased)
    for leaf in ("wk", "wv"):
        yield from _linear(f"{name}.{leaf}", block, (kv_heads * width, model.dim), 0, biased, kv_heads)
    if model.qk_norm:
        for leaf in ("q_norm", "k_norm"):
            yield WeightShape(f"{name}.{leaf}.weight", (width,), block, in_region=True)
    yield from _linear(f"{name}.wo", block, (model.dim, model.heads * width), 1, model.bias)


def _latent(model: ModelSection, block: int) -> Iterator[WeightShape]:
    name, width, rotary = f"blocks.{block}.attention", int(model.head_dim), int(model.rope_head_dim)
    values = int(model.value_head_dim)
    if model.q_rank:
        yield from _linear(f"{name}.q_down", block, (model.q_rank, model.dim), None)
        yield WeightShape(f"{name}.q_norm.weight", (model.q_rank,), block, in_region=True)
    yield from _linear(f"{name}.wq", block, (model.heads * (width + rotary), model.q_rank or model.dim), 0)
    yield from _linear(f"{name}.kv_down", block, (model.kv_rank + rotary, model.dim), None)
    yield WeightShape(f"{name}.kv_norm.weight", (model.kv_rank,), block, in_region=True)
    yield from _linear(f"{name}.kv_up", block, (model.heads * (width + values), model.kv_rank), 0)
    yield from _linear(f"{name}.wo", block, (model.dim, model.heads * values), 1)


def _feed_forward(model: ModelSection, block: int) -> Iterator[WeightShape]:
    name, hidden = f"blocks.{block}.ffn", int(model.ffn_dim)
    for leaf in ("gate", "up") if model.activation == "swiglu" else ("up",):
        yield from _linear(f"{name}.{leaf}", block, (hidden, model.dim), 0, model.bias)
    yield from _linear(f"{name}.down", block, (model.dim, hidden), 1, model.bias)


def _mixture(model: ModelSection, block: int) -> Iterator[WeightShape]:
    name, dim, hidden = f"blocks.{block}.ffn", model.dim, int(model.expert_dim)
    yield WeightShape(f"{name}.router.weight", (model.experts, dim), block, in_region=True)
    for leaf, shape, split in (("gate", (hidden, dim), 1), ("up", (hidden, dim), 1), ("down", (dim, hidden), 2)):
        yield WeightShape(f"{name}.experts.{leaf}", (model.experts, *shape), block, split, in_region=True, expert=True)
    wide = model.shared_experts * hidden
    if wide:
        yield WeightShape(f"{name}.shared.gate", (wide, dim), block, 0, in_region=True)
        yield WeightShape(f"{name}.shared.up", (wide, dim), block, 0, in_region=True)
        yield WeightShape(f"{name}.shared.down", (dim, wide), block, 1, in_region=True)
