"""The context axis: each rank holds a part of every sequence; attention is computed tile by tile and joined.

Invariants:
- Joining the tiles of all keys gives attention to all of them, and the backward pass of a tile with the joined output
  and logarithm gives its share of the gradients (Dao et al., FlashAttention, arXiv:2205.14135, appendix B).
- Rank r of n holds chunks r and 2n-1-r of the 2n that a sequence is cut into, so that causal attention is the same work
  on every rank (Liu et al., Ring Attention, arXiv:2310.01889; the pairing as in Brandon et al., Striped Attention,
  arXiv:2311.09431, discusses); positions are exact.

Shapes: q [batch, heads, queries, width], k and v [batch, kv_heads, keys, width]; `log_sum` [batch, heads, queries].

Of packed documents each rank knows for every token of all ranks where its document begins in the sequence; a query sees
keys with the same beginning. A query that sees none of a tile gets `log_sum` of the least number, and so the weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardway.errors import Bug, UserError
from shardway.models.contract import ModelPlan, match_modules
from shardway.models.documents import DocumentMarks
from shardway.parallel.axes.collectives import gathered, scattered_sum


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
    for module in model.modules():
        if isinstance(module, DocumentMarks):
            module.of_part = partial(find_beginnings, group)


def find_beginnings(group: dist.ProcessGroup, positions: torch.Tensor) -> torch.Tensor:
    """Where in its sequence the document of each token begins: `positions` of this rank [batch, seq / ranks], counted
    within documents -> int64 [ranks, batch, seq / ranks] of all ranks."""
    places = Chunks(group.rank(), group.size()).positions(positions.shape[1], positions.device)
    return gathered((places - positions)[None], 0, group)


class ContextAttention(nn.Module):
    """Causal attention over sequences of which each rank of a group holds its chunks.

    (q, k, v), each [batch, heads, seq / ranks, width], k and v perhaps of fewer heads -> the shape of q. `marks` of
    `find_beginnings`: within documents.
    """

    def __init__(self, group: dist.ProcessGroup, method: str) -> None:
        super().__init__()
        self._group = group
        self._travel = {"ring": _Ring, "gather": _Gather}[method]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, marks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _Attention.apply(q, k, v, self._travel(self._group), marks)


# --- how keys and values of all ranks arrive: `bring` gives (rank, its tensor) of every rank, the own one first; and
# how gradients return: `collect` takes those of each rank's tensor in that order and gives the own one's sum over ranks


class _Ring:
    """Passed from rank to rank, each step while the previous one is computed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.place, self.ranks = group, group.rank(), group.size()

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
            arriving, works = self._pass_on(grad if arriving is None else grad + arriving)
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


class _Gather(_Ring):
    """Gathered at once: fewer messages, and memory for the keys and values of the whole sequence."""

    def bring(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        everyone = gathered(own[None], 0, self.group)
        for step in range(self.ranks):
            source = (self.place - step) % self.ranks
            yield source, everyone[source]

    def collect(self, grads: Iterator[tuple[int, torch.Tensor]]) -> torch.Tensor:
        by_source = [grad for _, grad in sorted(grads, key=lambda pair: pair[0])]
        return scattered_sum(torch.stack(by_source), 0, self.group)[0]


# --- attention of a rank's queries to every rank's keys


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, travel: _Ring, marks: torch.Tensor | None
    ) -> torch.Tensor:
        out, log_sum = torch.empty(0), torch.empty(0)
        for source, keys_values in travel.bring(torch.stack((k, v))):
            rows, keys, causal = _meet(source, travel.place, q.shape[2])
            seen_k, seen_v = keys_values[:, :, :, keys]
            bias = _hide(marks, travel.place, source, rows, keys, causal, q)
            more, more_log_sum = _attend(q[:, :, rows], seen_k, seen_v, causal, bias)
            if source == travel.place:  # the first to arrive, and the only one that all queries see
                # Copies: selective recompute keeps what an operator returned, and would see it change.
                out, log_sum = more.to(more_log_sum.dtype, copy=True), more_log_sum.clone()
                continue
            # Attention to both sets of keys out of attention to each, in the number format of log_sum.
            before, after = log_sum[:, :, rows], torch.logaddexp(log_sum[:, :, rows], more_log_sum)
            weight, more_weight = (before - after).exp()[..., None], (more_log_sum - after).exp()[..., None]
            out[:, :, rows] = out[:, :, rows] * weight + more * more_weight
            log_sum[:, :, rows] = after
        result = out.to(q.dtype)
        ctx.travel, ctx.marks = travel, marks
        ctx.save_for_backward(q, k, v, result, log_sum)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        grad_q = torch.zeros_like(q, dtype=log_sum.dtype)

        def grads() -> Iterator[tuple[int, torch.Tensor]]:
            for source, keys_values in ctx.travel.bring(torch.stack((k, v))):
                rows, keys, causal = _meet(source, ctx.travel.place, q.shape[2])
                seen_k, seen_v = keys_values[:, :, :, keys]
                d_out, seen_out, seen_log_sum = (each[:, :, rows] for each in (grad, out, log_sum))
                bias = _hide(ctx.marks, ctx.travel.place, source, rows, keys, causal, q)
                seen = q[:, :, rows], seen_k, seen_v
                share = _attend_backward(*seen, causal, d_out, seen_out, seen_log_sum, bias)
                grad_q[:, :, rows] += share[0]
                # Summed over ranks in the format of log_sum, fp32 at least.
                grad_kv = torch.zeros_like(keys_values, dtype=log_sum.dtype)
                grad_kv[:, :, :, keys] = torch.stack(share[1:]).to(log_sum.dtype)
                yield source, grad_kv

        grad_k, grad_v = ctx.travel.collect(grads()).to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


def _meet(source: int, place: int, length: int) -> tuple[slice, slice, bool]:
    """Which of a rank's queries see which of another's keys, and whether causally; `length` is that of two chunks.

    Its own causally; those of a rank before it only in their first chunk, all of it; those of a rank after it only with
    its second chunk, all of them.
    """
    everything = slice(0, length)
    if source == place:
        return everything, everything, True
    if source < place:
        return everything, slice(0, length // 2), False
    return slice(length // 2, length), everything, False


def _hide(
    marks: torch.Tensor | None, place: int, source: int, rows: slice, keys: slice, causal: bool, q: torch.Tensor
) -> torch.Tensor | None:
    """What is added to the scores of a tile of packed documents, [batch, 1, queries, keys] in the format of `q`: 0, or
    the least number where a query does not see a key. None: documents are not packed."""
    if marks is None:
        return None
    seen = marks[place][:, rows, None] == marks[source][:, None, keys]
    seen = seen.tril() if causal else seen
    width = seen.shape[-1]
    # Kernels of CUDA devices read rows of a multiple of 8 numbers.
    bias = torch.zeros((*seen.shape[:-1], -(-width // 8) * 8), dtype=q.dtype, device=q.device)[..., :width]
    return bias.masked_fill_(~seen, torch.finfo(q.dtype).min)[:, None]


_ALIGNED = 32
"""The kernel that takes a bias on CUDA devices has `log_sum` of a multiple of so many queries."""


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [batch, heads, queries, width] and `log_sum` of a tile; causal: query i sees keys 0 to i only. A `bias`
    says all that is seen."""
    k, v = _repeat_heads(q, k, v)
    if q.device.type == "cpu":
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return run(q, k, v, 0.0, causal and bias is None, attn_mask=bias)
    if q.device.type not in ("cuda", "meta"):
        raise UserError(f"the context axis has no attention kernel for {q.device.type}; allowed: cpu, cuda.")
    if bias is None:
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, log_sum
    bias = bias.expand(-1, q.shape[1], -1, -1)
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)
    return out, log_sum[:, :, : q.shape[2]]


def _attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    grad: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tile's share of the gradients of q, k and v; `grad`, `out` and `log_sum` are those of attention to all keys."""
    repeats = q.shape[1] // k.shape[1]
    k, v = _repeat_heads(q, k, v)
    if q.device.type == "cpu":
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad_q, grad_k, grad_v = run(grad, q, k, v, out, log_sum, 0.0, causal and bias is None, attn_mask=bias)
    else:
        unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # the random state of dropout, which is off
        if bias is None:
            run = torch.ops.aten._scaled_dot_product_flash_attention_backward
            lengths = (None, None, q.shape[2], k.shape[2])
            grad_q, grad_k, grad_v = run(grad, q, k, v, out, log_sum, *lengths, 0.0, causal, unused, unused)
        else:
            run = torch.ops.aten._scaled_dot_product_efficient_attention_backward
            bias, log_sum = bias.expand(-1, q.shape[1], -1, -1), F.pad(log_sum, (0, -log_sum.shape[2] % _ALIGNED))
            wanted = (True, True, True, False)
            grad_q, grad_k, grad_v, _ = run(grad, q, k, v, bias, out, log_sum, unused[0], unused[1], 0.0, wanted)
    if repeats > 1:
        grad_k, grad_v = (each.unflatten(1, (-1, repeats)).sum(2) for each in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def _repeat_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    repeats = q.shape[1] // k.shape[1]
    return (k, v) if repeats == 1 else (k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1))
