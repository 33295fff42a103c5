"""What a rank holds in memory, and what to do when that is too much.

Invariant: counts bytes of tensors that exist, each once; what is not a parameter, gradient or optimizer state is the
rest. This module must not free or allocate tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.models.contract import held_by_rank
from shardway.ranks.start import Ranks
from shardway.runfile.schema import RunFile
from shardway.watch.words import render_size

REST = "activations and all else"


def explain_memory(
    error: BaseException,
    ranks: Ranks,
    values: RunFile,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
) -> str:
    """An error of an allocator, with what this rank holds after so many steps and what to do."""
    device, asked = ranks.device, ""
    cause: BaseException | None = error
    while cause is not None and not asked:  # how much was asked for, if an error in the chain states it
        if found := re.search(r"[Tt]ried to allocate ([\d.]+ [KMGT]iB)", str(cause)):
            asked = f", when it asked for {found[1]} more"
        elif found := re.search(r"tried to allocate (\d+) bytes", str(cause)):
            asked = f", when it asked for {render_size(int(found[1]))} more"
        cause = cause.__cause__
    held = count_held(nn.ModuleList(models), None, device.type)
    held["optimizer state"] = sum(count_held(None, each, device.type)["optimizer state"] for each in optimizers)
    on_cpu = device.type == "cpu"
    in_use = psutil.Process().memory_info().rss if on_cpu else torch.accelerator.memory_allocated(device)
    held[REST] = max(0, in_use - sum(held.values()))
    largest_first = sorted((name for name in held if held[name]), key=lambda name: -held[name])
    return "\n".join(
        [
            f"rank {ranks.rank} ran out of memory on {device} after {steps} steps{asked}.",
            "  What it held, the largest first:",
            *(f"    {name:<26}{render_size(held[name]):>10}" for name in largest_first),
            f"  To do: {'; or '.join(advise(largest_first[0], values, device.type))}.",
        ]
    )


def count_held(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, kind: str) -> dict[str, int]:
    """Bytes that this rank holds on devices of a kind ("cpu", "cuda"), by what they are for."""
    parameters = list(model.parameters()) if model is not None else []
    states = optimizer.state.values() if optimizer is not None else ()

    def count(values: Iterable[Any]) -> int:
        tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        return sum(_bytes_of(held_by_rank(tensor), kind) for tensor in tensors.values())

    return {
        "parameters": count(parameters),
        "gradients": count(p.grad for p in parameters),
        "optimizer state": count(value for state in states for value in state.values()),
    }


def _bytes_of(tensor: torch.Tensor, kind: str) -> int:
    """The bytes of a tensor; of one made of others (8-bit states), theirs."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_bytes_of(getattr(tensor, name), kind) for name in names)
    return tensor.numel() * tensor.element_size() if tensor.device.type == kind else 0


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
