"""The tracer counts what enters each collective, whoever calls it, and notices when it has missed one."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pool import ranks
from traffic_tracer import CollectiveTracer, Sent

BOTH = (0, 1)
# torch 2.13 renamed them.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@ranks(2)
def test_each_kind_by_its_payload(rank: int) -> None:
    whole, part = torch.ones(6), torch.ones(3)
    with CollectiveTracer() as tracer:
        dist.all_reduce(whole.clone())
        ALL_GATHER(whole, part)
        REDUCE_SCATTER(part, whole)
        dist.all_to_all_single(torch.empty(6), whole)
        if rank == 0:
            dist.send(part, 1)
        else:
            dist.recv(part, 0)
    point = {Sent("send" if rank == 0 else "receive", BOTH): 12}
    counted = {"all_reduce": 24, "all_gather": 12, "reduce_scatter": 24, "all_to_all": 24}
    assert tracer.tally() == {**{Sent(kind, BOTH): size for kind, size in counted.items()}, **point}


@ranks(2)
def test_what_others_call_counts_too(rank: int) -> None:
    """DDP reduces from C++ while autograd runs, DTensor where an operator needs it."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    split = distribute_tensor(torch.ones(6), init_device_mesh("cpu", (2,)), [Shard(0)])
    with CollectiveTracer() as tracer:
        model(torch.ones(1, 4)).sum().backward()
        split.full_tensor()
    assert tracer.tally() == {Sent("all_reduce", BOTH): 4 * 10, Sent("all_gather", BOTH): 12}


@ranks(2)
def test_groups_of_one_rank_do_not_count(rank: int) -> None:
    alone = [dist.new_group([each]) for each in BOTH][rank]
    with CollectiveTracer() as tracer:
        dist.all_reduce(torch.ones(3), group=alone)
    assert tracer.tally() == {}


@ranks(2)
def test_a_collective_that_passes_by_is_noticed(rank: int) -> None:
    """A mode holds for its own thread."""
    beside = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)))
    with pytest.raises(AssertionError), CollectiveTracer():
        beside.start()
        beside.join()


@ranks(2)
def test_an_unknown_collective_is_refused(rank: int) -> None:
    with pytest.raises(NotImplementedError, match=r"c10d\.reduce_"), CollectiveTracer():
        dist.reduce(torch.ones(3), 0)
