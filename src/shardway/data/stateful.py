"""Data that say where they stand: `state_dict()` and `load_state_dict(state)`, as torchdata's StatefulDataLoader asks
for them, of an iterable dataset or of the iterator that it gives.

A state is taken between two batches and belongs to what was given by then; the next sample after it was loaded is the
one that would have come. It is kept as bytes: the dataset goes on changing what it has handed out.

Invariant: taking states costs a small part of the time of reading. This module must not know ranks nor the disk.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from typing import Any, Protocol

_SHARE = 0.1
"""Part of the time that states may cost; where one takes long, further batches go without."""


def has_state(thing: Any) -> bool:
    """Whether it says where it stands."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def read_state(thing: Any) -> bytes | None:
    """Where it stands now; None where it does not say, or not yet."""
    if not has_state(thing):
        return None
    try:
        state = thing.state_dict()
        return None if state is None else pickle.dumps(state)
    except Exception:  # it is run through then, which is said
        return None


def load_state(thing: Any, state: bytes) -> None:
    """Let it stand there; its errors pass."""
    thing.load_state_dict(pickle.loads(state))


def rewind(thing: Any, begin: bytes | None) -> None:
    """Let it stand where it began, unless it does."""
    if begin is not None and read_state(thing) != begin:
        load_state(thing, begin)


@dataclass(frozen=True)
class StreamSnapshot:
    """Where a stream of samples stood: `given` samples in all, `in_epoch` of them in `epoch`, and the state of its
    dataset (`of_iterator`: of the dataset's iterator)."""

    given: int
    epoch: int
    in_epoch: int
    of_iterator: bool
    state: bytes


class Stands(Protocol):
    """A stream that says where it stands."""

    def snapshot(self) -> StreamSnapshot | None:
        """None where it does not."""
        ...


@dataclass
class SnapshotPace:
    """When a state may be taken once more."""

    _next: float = 0.0

    def take(self, stream: Stands) -> StreamSnapshot | None:
        """Where a stream stands now; None as well where the last one was too dear."""
        started = time.perf_counter()
        if started < self._next:
            return None
        snapshot = stream.snapshot()
        ended = time.perf_counter()
        self._next = ended + (ended - started) * (1 / _SHARE - 1)
        return snapshot
