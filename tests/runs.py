"""Whole tiny runs on ranks that are there already: those of the pool, or this process alone.

    @ranks(2)
    def test_it(rank: int, tmp_path: Path) -> None:
        train_tiny(tmp_path, pool_ranks(), "parallel.dp_shard=2", "parallel.dp_replicate=1")
        assert len(read_steps(tmp_path)) == 20

Invariant: a run here walks the way of `shardway train` from the resolved run on; only the start of the ranks and the
report are left out. A run of 20 steps takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardway.ranks.launcher import Placement
from shardway.ranks.start import Ranks
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.train.run import LiveRun, RunOutcome, train_run
from shardway.train.session import hold_session

COMMON = (
    "data.kind=synthetic",
    "data.samples=96",
    "train.steps=20",
    "train.global_batch=8",
    "train.validate_every=off",
    "optim.warmup=4 steps",
    "checkpoint.every=off",
    "checkpoint.background=false",
    "run.device=cpu",
    "run.threads=1",
)
TINY = (
    *COMMON,
    "model.dim=16",
    "model.layers=2",
    "model.heads=2",
    "model.ffn_dim=32",
    "model.vocab=32",
    "data.seq_len=12",
)
TINY_IMAGES = (*COMMON, "model.kind=convnet", "model.channels=[4]", "model.classes=4", "data.shape=[1, 8, 8]")
"""Overrides that make the default run one of a fraction of a second; what a test sets after them wins.

Which checkpoints such a run leaves must not depend on how soon one is written: a save that is due too soon is left out.
"""


def place(rank: int, world: int, launcher: str = "torchrun", port: int = 0) -> Placement:
    """A rank's place where all ranks are on this machine."""
    return Placement(rank, world, rank, world, 0, 1, "127.0.0.1", port, launcher)


def pool_ranks() -> Ranks:
    """The ranks of the pool that this process is in."""
    return Ranks(place(dist.get_rank(), dist.get_world_size()), torch.device("cpu"), grouped=True)


def lone_rank() -> Ranks:
    """A process that nothing launched, whatever group it is in."""
    return Ranks(place(0, 1, "none"), torch.device("cpu"), grouped=False)


def layout(replicate: int, shard: int) -> tuple[str, str]:
    """The overrides of a layout."""
    return f"parallel.dp_replicate={replicate}", f"parallel.dp_shard={shard}"


@contextlib.contextmanager
def open_tiny(
    directory: Path,
    ranks: Ranks,
    *overrides: str,
    base: Sequence[str] = TINY,
    fresh: bool = False,
    attempt: Attempt | None = None,
) -> Iterator[LiveRun]:
    """A tiny run, open on these ranks; in a job, where there is an attempt."""
    request = ResolveRequest(None, (*base, *overrides), directory, fresh)
    with hold_session(resolve_request(request, ranks.world, ranks.world), ranks, attempt) as session:
        run = LiveRun(session)
        yield run
        run.close()


def train_tiny(
    directory: Path,
    ranks: Ranks,
    *overrides: str,
    base: Sequence[str] = TINY,
    before_step: Callable[[LiveRun, int], None] | None = None,
    attempt: Attempt | None = None,
) -> RunOutcome:
    """Train a tiny run until it is finished or stopped; `before_step` is told each step (1 is the first) to come."""
    with open_tiny(directory, ranks, *overrides, base=base, attempt=attempt) as run:
        if before_step is not None:
            tell_steps(run, before_step)
        return train_run(run)


def tell_steps(run: LiveRun, before_step: Callable[[LiveRun, int], None]) -> None:
    """Tell `before_step` of each step of an open run."""
    take = run.step

    def step(*arguments: Any) -> float:
        before_step(run, run._loop.counters.step + 1)  # type: ignore[union-attr]
        return take(*arguments)

    run.step = step  # type: ignore[method-assign]


class Died(Exception):
    """What ends a run in the middle of a step, as a death would."""


def die_at(last: int) -> Callable[[LiveRun, int], None]:
    """For `before_step`: end all ranks before the step after `last`."""

    def look(run: LiveRun, step: int) -> None:
        if step > last:
            raise Died

    return look


def train_line(
    folder: Path,
    on: Ranks,
    data: Any,
    loss: Callable[..., Any],
    *words: str,
    base: Sequence[str],
    steps: Any,
    last: int | None,
    **loader: Any,
) -> list[float]:
    """The losses of a script with a linear model of four inputs; all ranks die after step `last`."""
    losses = []
    with open_tiny(folder, on, *words, base=base) as run:
        if last is not None:
            tell_steps(run, die_at(last))
        torch.manual_seed(3)
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        for batch in run.steps(run.loader(data, **loader), steps):
            losses.append(run.step(model, batch, loss))
    return losses


@dataclass
class Signalled:
    """Stands in for a SignalWatch that has received a signal."""

    received: str | None = "SIGTERM"
    killed: bool = False


def signal_at(last: int, rank: int = 0) -> Callable[[LiveRun, int], None]:
    """For `before_step`: one rank is signalled during step `last`."""

    def look(run: LiveRun, step: int) -> None:
        if step == last and run.session.ranks.rank == rank:
            run.session.signals = Signalled()  # type: ignore[assignment]

    return look


def train_alone(rank: int, directory: Path, *overrides: str, base: Sequence[str] = TINY, once: bool = False) -> None:
    """The same run without other ranks, on rank 0 of the pool while the others wait; `once`: where the directory is
    not there yet."""
    if rank == 0 and not (once and directory.exists()):
        train_tiny(directory, lone_rank(), *overrides, base=base)
    dist.barrier()


def read_steps(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The step events of a rank that still hold."""
    return [event for event in RunDir(directory).events(rank) if event["event"] == "step"]


def read_column(directory: Path, name: str = "loss") -> list[Any]:
    """One number of every step, in order."""
    return [event[name] for event in read_steps(directory)]


def read_named(directory: Path, name: str) -> list[dict[str, Any]]:
    """Rank 0's events of one name, undone ones too."""
    return [event for event in RunDir(directory).all_events() if event["event"] == name]


def used_samples(directory: Path) -> dict[int, list[int]]:
    """Step -> the samples of all ranks, in the order of the ranks, from every event that still holds."""
    used: dict[int, list[int]] = {}
    for rank in RunDir(directory).ranks_with_events():
        for event in read_steps(directory, rank):
            used.setdefault(event["step"], []).extend(event["ids"])
    return used


def used_by_step(directory: Path) -> list[list[int]]:
    """The samples of each step, over all ranks that took part in it, in the order of the global batch."""
    return [ids for _, ids in sorted(used_samples(directory).items())]


def worst_difference(these: Sequence[float], those: Sequence[float]) -> float:
    """The largest relative difference between two curves of one length."""
    return max(abs(a - b) / abs(b) for a, b in zip(these, those, strict=True))
