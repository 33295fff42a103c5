"""What a rank that runs out of memory says: what it held, and what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pool import ranks
from runs import TINY, pool_ranks
from shardway.errors import JobError, LostContact
from shardway.ranks.start import is_out_of_memory
from shardway.resolve.request import ResolveRequest
from shardway.runfile.schema import ParallelSection, RecomputeSection, RunFile, TrainSection
from shardway.train.memory import REST, advise, count_held
from shardway.train.run import open_run, train_run
from trained import make_parallel

pytestmark = pytest.mark.usefixtures("warm_starts")

NO_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
ON_CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")


# --- what is held


def make_pair() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64, bias=False))


PAIR = 64 * 32 + 32 + 32 * 64
"""Its parameters."""


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()


def test_every_tensor_is_counted_once() -> None:
    model = make_pair()
    assert count_held(model, None, "cpu") == {"parameters": 4 * PAIR, "gradients": 0, "optimizer state": 0}
    optimizer = torch.optim.AdamW(model.parameters())
    train_once(model, optimizer)
    scalars = 3 * 4  # a count of steps for each parameter
    assert count_held(model, optimizer, "cpu") == {
        "parameters": 4 * PAIR,
        "gradients": 4 * PAIR,
        "optimizer state": 2 * 4 * PAIR + scalars,
    }


def test_what_is_elsewhere_is_not_counted() -> None:
    model = make_pair()
    assert set(count_held(model, None, "cuda").values()) == {0}
    assert set(count_held(model.to("meta"), None, "cpu").values()) == {0}
    assert set(count_held(None, None, "cpu").values()) == {0}


def test_tied_weights_are_held_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert count_held(model, None, "cpu")["parameters"] == 4 * 64


def test_eight_bit_states_are_counted_as_they_are_stored() -> None:
    states = pytest.importorskip("torchao.optim.subclass_8bit")
    model, elements = nn.Linear(256, 256, bias=False), 256 * 256
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"exp_avg": states.OptimState8bit.zeros((256, 256))}
    codes, scales, table = elements, 4 * (elements // 256), 4 * 256
    assert count_held(model, optimizer, "cpu")["optimizer state"] == codes + scales + table


@ranks(2)
def test_a_rank_counts_its_own_shards(rank: int) -> None:
    model = make_parallel(make_pair(), pool_ranks(), (1, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    train_once(model, optimizer)
    held = count_held(model, optimizer, "cpu")
    assert held["parameters"] == held["gradients"] == 4 * PAIR // 2


# --- what to do


def test_the_advice_is_about_what_is_largest() -> None:
    values = RunFile(train=TrainSection(micro_batch=8), parallel=ParallelSection(dp_shard=4))
    assert advise(REST, values, "cuda") == [
        "lower train.micro_batch (now 8)",
        'set recompute.mode = "full"',
        "share the states over more ranks with parallel.dp_shard (now 4)",
        "keep them in CPU memory with parallel.cpu_offload = true",
    ]
    assert advise("optimizer state", values, "cpu") == [
        "share the states over more ranks with parallel.dp_shard (now 4)",
        'halve the optimizer state with optim.state_dtype = "bf16"',
        "lower train.micro_batch (now 8)",
        'set recompute.mode = "full"',
    ]


def test_nothing_is_advised_that_the_run_does_already() -> None:
    values = RunFile(
        train=TrainSection(micro_batch=1),
        parallel=ParallelSection(dp_shard=4, cpu_offload=True),
        recompute=RecomputeSection(mode="full"),
    )
    assert advise(REST, values, "cuda") == ["share the states over more ranks with parallel.dp_shard (now 4)"]
    zero = RunFile(train=TrainSection(micro_batch=1, engine="deepspeed"), recompute=RecomputeSection(mode="full"))
    assert advise("parameters", zero, "cuda") == [
        "shard more of them with deepspeed.stage, or keep them elsewhere with deepspeed.offload_*"
    ]


# --- the error


@pytest.mark.parametrize("error", [NO_MEMORY, ON_CUDA, MemoryError("std::bad_alloc")])
def test_an_allocator_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = JobError("the checkpoint could not be saved")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


def test_other_errors_are_left_alone() -> None:
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(LostContact("another rank ran out of memory"))


Failing = Callable[..., Any]


def fail_with(error: Exception) -> Failing:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def told_by_open_run(folder: Path, error: Exception, where: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of a run of the door, in which one call of this process finds no memory."""
    monkeypatch.setattr(where, fail_with(error))
    words = (*TINY, "checkpoint.every=2 steps")
    with pytest.raises(JobError) as told, open_run(ResolveRequest(None, words, folder)) as run:
        train_run(run)
    return str(told.value)


@pytest.mark.usefixtures("quiet_threads")
@pytest.mark.parametrize(
    ("where", "steps"),
    [
        ("shardway.parallel.apply._materialise", 0),
        ("shardway.train.passes.call_loss", 0),
        ("shardway.checkpoint.writer.dcp.save", 2),
    ],
)
def test_wherever_memory_ends_it_is_told_what_held_it(
    where: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = told_by_open_run(tmp_path / "run", NO_MEMORY, where, monkeypatch)
    head, *held, remedy = message.splitlines()
    assert head == f"rank 0 ran out of memory on cpu after {steps} steps, when it asked for 4 GiB more."
    names = [line.rsplit("  ", 1)[0].strip() for line in held[1:]]
    expected = {REST} if where.endswith("_materialise") else {REST, "parameters"}
    assert set(names) == expected | ({"optimizer state"} if steps else set())
    assert names[0] == REST
    assert remedy.startswith("  To do: lower train.micro_batch (now 8); or set recompute.mode = ")


@pytest.mark.usefixtures("quiet_threads")
def test_it_is_written_down_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = told_by_open_run(tmp_path / "run", ON_CUDA, "shardway.train.passes.call_loss", monkeypatch)
    assert ", when it asked for 2.50 GiB more." in message
    assert '"kind": "JobError"' in (tmp_path / "run/events/rank-00000.jsonl").read_text()


@ranks(2)
def test_the_other_ranks_lose_contact_alone(rank: int) -> None:
    def work() -> None:
        if rank == 1:
            raise NO_MEMORY

    with pytest.raises(JobError) as told:
        pool_ranks().together(work)
    assert isinstance(told.value, LostContact) == (rank == 0)
    assert is_out_of_memory(told.value) == (rank == 1)


SCRIPT = """
    import resource, sys
    import psutil, torch
    from pathlib import Path
    from shardway.resolve.request import ResolveRequest
    from shardway.train.run import train
    torch.set_num_threads(1)
    words = sys.argv[2:]
    train(ResolveRequest(None, tuple(words), Path(sys.argv[1]) / "small"))  # all code is loaded
    room = psutil.Process().memory_info().vms + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    try:
        train(ResolveRequest(None, (*words, "data.seq_len=2048", "model.vocab=16384"), Path(sys.argv[1]) / "large"))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_machine_without_memory(tmp_path: Path) -> None:
    """Logits of 8 x 2048 x 16384 numbers take a GiB, where 256 MiB are left."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), *TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    message = done.stdout[done.stdout.index("JobError: ") :]
    assert message.startswith("JobError: rank 0 ran out of memory on cpu after 0 steps, when it asked for ")
    assert f"\n    {REST}" in message
    assert "To do: lower train.micro_batch (now 8)" in message
