"""What a rank holds in memory, and what to do when that is too much.

Invariant: counts bytes of tensors that exist, each once; what is not a parameter, gradient or optimizer state is the
rest. This module must not free or allocate tensors.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.errors import JobError
from shardway.models.contract import held_by_rank
from shardway.ranks.start import Ranks, is_out_of_memory
from shardway.runfile.schema import RunFile
from shardway.watch.words import render_size

REST = "activations and all else"


@dataclass(frozen=True)
class Holder:
    """A rank and what it holds: the models and optimizers made so far, and the number of finished steps."""

    ranks: Ranks
    values: RunFile
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    steps: int


def count_held(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, kind: str) -> dict[str, int]:
    """Bytes that this rank holds on devices of a kind ("cpu", "cuda"), by what they are for."""
    parameters = list(model.parameters()) if model is not None else []
    states = optimizer.state.values() if optimizer is not None else ()
    return {
        "parameters": _count_bytes(parameters, kind),
        "gradients": _count_bytes((p.grad for p in parameters), kind),
        "optimizer state": _count_bytes((value for state in states for value in state.values()), kind),
    }


def advise(largest: str, values: RunFile, kind: str) -> list[str]:
    """What makes the largest contributor smaller, as settings that this run does not have yet."""
    parallel, train = values.parallel, values.train
    activations = [
        (int(train.micro_batch) > 1, f"lower train.micro_batch (now {train.micro_batch})"),
        (values.recompute.mode != "full", 'set recompute.mode = "full"'),
    ]
    states = [
        (True, f"share the states over more ranks with parallel.dp_shard (now {parallel.dp_shard})"),
        (kind != "cpu" and not parallel.cpu_offload, "keep them in CPU memory with parallel.cpu_offload = true"),
        (values.optim.state_dtype == "fp32", 'halve the optimizer state with optim.state_dtype = "bf16"'),
    ]
    if train.engine == "deepspeed":
        states = [(True, "shard more of them with deepspeed.stage, or keep them elsewhere with deepspeed.offload_*")]
    ordered = activations + states[:2] if largest == REST else states + activations
    return [words for applies, words in ordered if applies]


@contextlib.contextmanager
def memory_explained(find_holder: Callable[[], Holder]) -> Iterator[None]:
    """Turn an error of an allocator into a JobError that states what this rank holds, and what to do."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise JobError(_explain(error, find_holder())) from error


def _explain(error: BaseException, holder: Holder) -> str:
    device = holder.ranks.device
    held = count_held(nn.ModuleList(holder.models), None, device.type)
    states = [count_held(None, each, device.type)["optimizer state"] for each in holder.optimizers]
    held["optimizer state"] = sum(states)
    held[REST] = max(0, _count_in_use(device) - sum(held.values()))
    largest_first = sorted((name for name in held if held[name]), key=lambda name: -held[name])
    remedies = advise(largest_first[0], holder.values, device.type)
    return "\n".join(
        [
            f"rank {holder.ranks.rank} ran out of memory on {device} after {holder.steps} steps{_asked(error)}.",
            "  What it held, the largest first:",
            *(f"    {name:<26}{render_size(held[name]):>10}" for name in largest_first),
            f"  To do: {'; or '.join(remedies)}.",
        ]
    )


def _asked(error: BaseException) -> str:
    """How much the allocator was asked for, if an error in the chain states it."""
    cause: BaseException | None = error
    while cause is not None:
        if found := re.search(r"[Tt]ried to allocate ([\d.]+ [KMGT]iB)", str(cause)):
            return f", when it asked for {found[1]} more"
        if found := re.search(r"tried to allocate (\d+) bytes", str(cause)):
            return f", when it asked for {render_size(int(found[1]))} more"
        cause = cause.__cause__
    return ""


def _count_in_use(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def _count_bytes(values: Iterable[Any], kind: str) -> int:
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
    return sum(_bytes_of(held_by_rank(tensor), kind) for tensor in tensors.values())


def _bytes_of(tensor: torch.Tensor, kind: str) -> int:
    """The bytes of a tensor; of one made of others (8-bit states), theirs."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_bytes_of(getattr(tensor, name), kind) for name in names)
    return tensor.numel() * tensor.element_size() if tensor.device.type == kind else 0
