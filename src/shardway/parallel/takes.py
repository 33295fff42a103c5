"""What of a model torch's wrappers do not take, told before anything is done with it.

Invariant: all that is wrong is told at once, each with the module or tensor and what to do. This module must not change
the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from shardway.errors import Problem, check_no_problems

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule)


def check_takes(model: nn.Module, ranks: int) -> None:
    """Raise UserError where a model cannot be made parallel over so many ranks, whatever the layout."""
    problems = [*_list_wrappers(model), *_list_lazy(model)]
    if not problems:
        problems = [*_list_tensors(model), *(_list_sparse_gradients(model) if ranks > 1 else ())]
    check_no_problems(f"what run.shard was given, a {type(model).__name__}", problems)


def _list_wrappers(model: nn.Module) -> Iterator[Problem]:
    for name, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            kind = next(each for each in _WRAPPERS if isinstance(module, each)).__name__
            remedy = "hand run.shard the model itself; `parallel` of the run file says how it is shared"
            yield Problem(name or "the model", f"is in the hands of torch's {kind} already", remedy=remedy)
            return
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            remedy = "hand run.shard the model as it was before; `parallel` of the run file says how it is split"
            yield Problem(name, "is a DTensor already", remedy=remedy)
            return


def _list_lazy(model: nn.Module) -> Iterator[Problem]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            remedy = "call the model once with a batch before run.shard(model)"
            yield Problem(name, "of a lazy module has no shape yet", remedy=remedy)


def _list_tensors(model: nn.Module) -> Iterator[Problem]:
    if next(model.parameters(), None) is None:
        remedy = "call it as it is, without run.shard; it is nothing that an optimizer could train"
        yield Problem("the model", "has no parameters", remedy=remedy)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            remedy = "keep its indices and values as buffers, or register it with persistent=False after run.shard"
            yield Problem(
                name, f"has the layout {layout}, which is neither sent between ranks nor saved", remedy=remedy
            )


def _list_sparse_gradients(model: nn.Module) -> Iterator[Problem]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            what = "sparse=True: gradients with indices are not added up over ranks"
            yield Problem(name or "the model", what, remedy="set sparse=False, or train it on one rank")
