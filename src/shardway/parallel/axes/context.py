"""The context axis: each rank holds a part of every sequence; attention is computed tile by tile and joined.

Invariants:
- Joining the tiles of all keys gives attention to all of them, and `attend_backward` with the joined output and
  logarithm gives each tile's share of the gradients (Dao et al., FlashAttention, arXiv:2205.14135, appendix B).
- Rank r of n holds chunks r and 2n-1-r of the 2n that a sequence is cut into, so that causal attention is the same work
  on every rank (Liu et al., Ring Attention, arXiv:2310.01889; the pairing as in Brandon et al., Striped Attention,
  arXiv:2311.09431, discusses); positions are exact.

Shapes: q [batch, heads, queries, width], k and v [batch, kv_heads, keys, width]; `log_sum` [batch, heads, queries].

With that pairing a rank's queries meet another rank's keys in one of three ways: its own causally; those of a rank
before it only in their first chunk, all of it; those of a rank after it only with its second chunk, all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardway.errors import Bug, UserError
from shardway.models.contract import ModelPlan, match_modules
from shardway.parallel.axes.collectives import gathered, scattered_sum

# --- attention tiles and how they are joined


@dataclass(frozen=True)
class AttentionTile:
    """Queries, keys and values of one tile; `causal` where query i sees keys 0 to i only."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool

    @property
    def repeats(self) -> int:
        """How many query heads share one key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def with_all_heads(self) -> AttentionTile:
        """The same tile with a key/value head for each query head."""
        if self.repeats == 1:
            return self
        k, v = (each.repeat_interleave(self.repeats, dim=1) for each in (self.k, self.v))
        return AttentionTile(self.q, k, v, self.causal)


@dataclass(frozen=True)
class TileGrads:
    """Gradients of one tile's queries, keys and values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attend(tile: AttentionTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [batch, heads, queries, width] and `log_sum` of a tile."""
    return _kernels(tile.q.device).forward(tile.with_all_heads())


def attend_backward(tile: AttentionTile, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> TileGrads:
    """The tile's share of the gradients; `grad`, `out` and `log_sum` are those of attention to all keys."""
    grads = _kernels(tile.q.device).backward(tile.with_all_heads(), grad, out, log_sum)
    if tile.repeats == 1:
        return grads
    return TileGrads(grads.q, *(each.unflatten(1, (-1, tile.repeats)).sum(2) for each in (grads.k, grads.v)))


def join(
    out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, more_log_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two sets of keys out of attention to each; in the number format of `log_sum`."""
    both = torch.logaddexp(log_sum, more_log_sum)
    weight, more_weight = (log_sum - both).exp()[..., None], (more_log_sum - both).exp()[..., None]
    return out * weight + more * more_weight, both


@dataclass(frozen=True)
class _Kernels:
    forward: Callable[[AttentionTile], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[AttentionTile, torch.Tensor, torch.Tensor, torch.Tensor], TileGrads]


def _forward_cpu(tile: AttentionTile) -> tuple[torch.Tensor, torch.Tensor]:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return run(tile.q, tile.k, tile.v, 0.0, tile.causal)


def _backward_cpu(tile: AttentionTile, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> TileGrads:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return TileGrads(*run(grad, tile.q, tile.k, tile.v, out, log_sum, 0.0, tile.causal))


def _forward_cuda(tile: AttentionTile) -> tuple[torch.Tensor, torch.Tensor]:
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(tile.q, tile.k, tile.v, 0.0, tile.causal)
    return out, log_sum


def _backward_cuda(tile: AttentionTile, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> TileGrads:
    run = torch.ops.aten._scaled_dot_product_flash_attention_backward
    queries, keys = tile.q.shape[2], tile.k.shape[2]
    unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # the random state of dropout, which is off
    grads = run(grad, tile.q, tile.k, tile.v, out, log_sum, None, None, queries, keys, 0.0, tile.causal, unused, unused)
    return TileGrads(*grads)


_KERNELS: Mapping[str, _Kernels] = MappingProxyType(
    {"cpu": _Kernels(_forward_cpu, _backward_cpu), "cuda": _Kernels(_forward_cuda, _backward_cuda)}
)


def _kernels(device: torch.device) -> _Kernels:
    if device.type not in _KERNELS:
        raise UserError(f"the context axis has no attention kernel for {device.type}; allowed: {', '.join(_KERNELS)}.")
    return _KERNELS[device.type]


# --- the context axis


@dataclass(frozen=True)
class Chunks:
    """Which chunks of a sequence a rank holds: `place` of `ranks`."""

    place: int
    ranks: int

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's chunks of [batch, seq, ...] -> [batch, seq / ranks, ...]. Raises UserError for a length that
        does not split."""
        if self.ranks == 1:
            return tensor
        if tensor.shape[1] % (2 * self.ranks):
            raise UserError(
                f"a sequence of {tensor.shape[1]} does not split into 2 x parallel.cp = {2 * self.ranks} equal chunks."
            )
        chunks = tensor.chunk(2 * self.ranks, dim=1)
        return torch.cat((chunks[self.place], chunks[-1 - self.place]), dim=1)

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """The positions in the whole sequence of this rank's `length` tokens."""
        return self.take(torch.arange(length * self.ranks, device=device)[None])[0]


def apply_context(model: nn.Module, plan: ModelPlan, group: dist.ProcessGroup, method: str) -> None:
    """Let the attention modules of a plan see the whole sequence. Raises UserError for a model that names none."""
    if not plan.attention or not plan.positions:
        raise UserError(
            f"parallel.cp splits the sequence, and the plan of {type(model).__name__} names no causal attention "
            "modules or no keyword for positions.\n  To do: add them to its plan, or set parallel.cp = 1."
        )
    for name, _ in match_modules(model, plan.attention):
        model.set_submodule(name, ContextAttention(group, method))


class ContextAttention(nn.Module):
    """Causal attention over sequences of which each rank of a group holds its chunks.

    (q, k, v), each [batch, heads, seq / ranks, width], k and v perhaps of fewer heads -> the shape of q.
    """

    def __init__(self, group: dist.ProcessGroup, method: str) -> None:
        super().__init__()
        self._group = group
        self._travel = _TRAVELS[method]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _Attention.apply(q, k, v, self._travel(self._group))


class _Travel:
    """How keys and values of all ranks arrive, and how gradients return."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.place = group.rank()
        self.ranks = group.size()

    def bring(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(rank, its tensor) of every rank, the own one first."""
        raise NotImplementedError

    def collect(self, grads: Iterator[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """The sum over ranks of the gradients of the own tensor; `grads` come in the order of `bring`."""
        raise NotImplementedError


class _Ring(_Travel):
    """Passed from rank to rank, each step while the previous one is computed."""

    def bring(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        held = own
        for step in range(self.ranks):
            last = step == self.ranks - 1
            arriving, works = (held, []) if last else self._pass_on(held)
            yield (self.place - step) % self.ranks, held
            for work in works:
                work.wait()
            held = arriving

    def collect(self, grads: Iterator[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """A gradient follows its tensor and is back one step after the last."""
        arriving: torch.Tensor | None = None
        works: list[dist.Work] = []
        for _, grad in grads:
            for work in works:
                work.wait()
            total = grad if arriving is None else grad + arriving
            arriving, works = self._pass_on(total)
        for work in works:
            work.wait()
        if arriving is None:
            raise Bug("there was nothing to collect")
        return arriving

    def _pass_on(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        arriving = torch.empty_like(tensor)
        after, before = (self.place + 1) % self.ranks, (self.place - 1) % self.ranks
        send = dist.P2POp(dist.isend, tensor.contiguous(), group=self.group, group_peer=after)
        receive = dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=before)
        return arriving, dist.batch_isend_irecv([send, receive])


class _Gather(_Travel):
    """Gathered at once: fewer messages, and memory for the keys and values of the whole sequence."""

    def bring(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        everyone = gathered(own[None], 0, self.group)
        for step in range(self.ranks):
            source = (self.place - step) % self.ranks
            yield source, everyone[source]

    def collect(self, grads: Iterator[tuple[int, torch.Tensor]]) -> torch.Tensor:
        by_source = [grad for _, grad in sorted(grads, key=lambda pair: pair[0])]
        return scattered_sum(torch.stack(by_source), 0, self.group)[0]


_TRAVELS: Mapping[str, Callable[[dist.ProcessGroup], _Travel]] = MappingProxyType({"ring": _Ring, "gather": _Gather})


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, travel: _Travel) -> torch.Tensor:
        out, log_sum = torch.empty(0), torch.empty(0)
        for source, keys_values in travel.bring(torch.stack((k, v))):
            meeting = _meet(source, travel.place, q.shape[2])
            more, more_log_sum = attend(meeting.tile(q, keys_values))
            if source == travel.place:  # the first to arrive, and the only one that all queries see
                # Copies: selective recompute keeps what an operator returned, and would see it change.
                out, log_sum = more.to(more_log_sum.dtype, copy=True), more_log_sum.clone()
                continue
            rows = meeting.queries
            out[:, :, rows], log_sum[:, :, rows] = join(out[:, :, rows], log_sum[:, :, rows], more, more_log_sum)
        result = out.to(q.dtype)
        ctx.travel = travel
        ctx.save_for_backward(q, k, v, result, log_sum)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        grad_q = torch.zeros_like(q, dtype=log_sum.dtype)

        def grads() -> Iterator[tuple[int, torch.Tensor]]:
            for source, keys_values in ctx.travel.bring(torch.stack((k, v))):
                meeting = _meet(source, ctx.travel.place, q.shape[2])
                rows = meeting.queries
                share = attend_backward(
                    meeting.tile(q, keys_values), grad[:, :, rows], out[:, :, rows], log_sum[:, :, rows]
                )
                grad_q[:, :, rows] += share.q
                # Summed over ranks in the format of log_sum, fp32 at least.
                grad_kv = torch.zeros_like(keys_values, dtype=log_sum.dtype)
                grad_kv[:, :, :, meeting.keys] = torch.stack((share.k, share.v)).to(log_sum.dtype)
                yield source, grad_kv

        grad_k, grad_v = ctx.travel.collect(grads()).to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


@dataclass(frozen=True)
class _Meeting:
    """Which of a rank's queries see which of another's keys."""

    queries: slice
    keys: slice
    causal: bool

    def tile(self, q: torch.Tensor, keys_values: torch.Tensor) -> AttentionTile:
        k, v = keys_values[:, :, :, self.keys]
        return AttentionTile(q[:, :, self.queries], k, v, self.causal)


def _meet(source: int, place: int, length: int) -> _Meeting:
    """See the module's docstring; `length` is that of a rank's two chunks."""
    everything = slice(0, length)
    if source == place:
        return _Meeting(everything, everything, causal=True)
    if source < place:
        return _Meeting(everything, slice(0, length // 2), causal=False)
    return _Meeting(slice(length // 2, length), everything, causal=False)
