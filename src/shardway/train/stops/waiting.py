"""Waits for batches that a stop may end, and what stands in for a batch that did not come.

The rank that waits for its data keeps all others waiting in a collective, so it cannot simply leave: it goes on with a
stand-in and the wish that what is computed from it shall not count.

Invariant: without a wish to stop a wait is as long as it takes, and batches are what they were. A stand-in has the
shapes of the batches before it. This module must not decide that a run stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from shardway.data.batch_tree import map_tensors
from shardway.data.loader import Batch
from shardway.errors import Bug
from shardway.ranks.signals import BrokenOff, SignalWatch
from shardway.ranks.stop_watchdog import StopWatchdog
from shardway.train.snapshot import Generators, find_generators

T = TypeVar("T")


@dataclass(frozen=True)
class Fetched(Generic[T]):
    """What a wait has given: a value, or none since the stream ended or a stop ended the wait (`missed`)."""

    value: T | None = None
    missed: bool = False


@dataclass(frozen=True)
class Waits:
    """The waits of one rank; `is_asked` (called in any thread) says whether it knows of a wish to stop."""

    signals: SignalWatch
    lookout: StopWatchdog
    is_asked: Callable[[], bool]

    def fetch(self, stream: Iterator[T], *, breakable: bool = True) -> Fetched[T]:
        """The next of a stream. A stream whose wait was ended has ended too."""
        self.lookout.begin_wait(self.is_asked)
        try:
            try:
                self.signals.breakable = breakable
                return Fetched(next(stream))
            finally:
                self.signals.breakable = False
                self.lookout.end_wait()
        except BrokenOff:
            return Fetched(missed=True)
        except StopIteration:
            return Fetched()


@dataclass(frozen=True)
class Shapes:
    """The tensors of a batch without their values, on no device; None where they have no shapes to speak of."""

    tree: Any
    device: torch.device

    def make(self, rows: int | None = None) -> Any:
        """Such a batch of zeros, with so many samples (None: as many)."""

        def zeros(tensor: torch.Tensor) -> torch.Tensor:
            shape = tensor.shape if rows is None or not tensor.dim() else (rows, *tensor.shape[1:])
            return torch.zeros(shape, dtype=tensor.dtype, device=self.device)

        return map_tensors(zeros, self.tree)


def read_shapes(data: Any, device: torch.device) -> Shapes | None:
    """The shapes of a batch; None where torch has no empty tensor of such a kind."""
    try:
        return Shapes(map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), data), device)
    except (RuntimeError, NotImplementedError):
        return None


class TrainingStream:
    """The batches of training, from the one at which this process begins.

    `agree_first(ready)` is asked once, on all ranks together, when each has its first batch or gave up: whether the run
    stops before its first step. `can_void`: whether a step may be taken with a stand-in. `draws`: whether reading a
    batch may draw random numbers in this process.
    """

    def __init__(
        self,
        stream: Iterator[Batch],
        waits: Waits,
        device: torch.device,
        agree_first: Callable[[bool], bool],
        *,
        can_void: bool,
        draws: bool = True,
    ) -> None:
        self._draws = draws
        self._stream, self._waits, self._device, self._agree_first = stream, waits, device, agree_first
        self._begun = False
        self._shapes: Shapes | None = None
        self._position = 0
        self._before: Generators | None = None
        self._can_void = can_void
        self.missed = False

    def next(self) -> Batch | None:
        """The next batch, or a stand-in where it is `missed`; None where all ranks stop before their first step."""
        self._before = find_generators() if self._draws else None
        can_stand_in = self._shapes is not None and self._can_void
        fetched = self._waits.fetch(self._stream, breakable=can_stand_in or not self._begun)
        batch = fetched.value
        if batch is None and not fetched.missed:
            raise Bug("the stream of training batches has ended")
        if not self._begun:
            self._begun = True
            if self._agree_first(batch is not None):
                return None
            self._shapes = read_shapes(batch.data, self._device) if batch is not None else None
        if batch is not None:
            self._position = batch.next_position
            return batch
        self.missed = True
        return self._stand_in()

    def put_back(self) -> None:
        """What reading the last batch has drawn at random is drawn again by whoever reads it next."""
        if self._before is not None:
            self._before.put_back()

    def close(self) -> None:
        """End the reading."""
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()

    def _stand_in(self) -> Batch:
        data = self._shapes.make() if self._shapes is not None else None
        return Batch(data, np.array([], np.int64), self._position, self._position)


def with_stand_ins(
    stream: Iterator[Any], waits: Waits, device: torch.device, rows: Sequence[int] | None
) -> Iterator[tuple[Any, bool]]:
    """The batches of a validation, and whether each is a stand-in: from the first that was missed on, all are.

    `rows`: the samples of each batch that there will be; None: not known, so that no wait is ended.
    """
    shapes: Shapes | None = None
    number = 0
    while True:
        fetched = waits.fetch(stream, breakable=rows is not None and (shapes is not None or not number))
        if fetched.value is None:
            break
        shapes = shapes or read_shapes(fetched.value, device)
        yield fetched.value, False
        number += 1
    if fetched.missed:
        for count in (rows or ())[number:]:
            yield (shapes.make(max(count, 1)) if shapes is not None else None), True
