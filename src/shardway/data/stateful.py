"""Iterable datasets with a state: `state_dict()` and `load_state_dict(state)`, in the form of torchdata's
StatefulDataLoader, of the dataset or of the iterator that it gives.

A state is taken between two batches. After it is loaded, the next sample is the one that would have come. It is kept as
bytes, since the dataset may go on changing the object that it returned.

Invariant: taking states costs a small part of the time of reading. This module must not depend on ranks or the disk.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from typing import Any, Protocol

_SHARE = 0.1
"""Fraction of the time that states may cost; if one takes long, the next batches have none."""


def has_state(thing: Any) -> bool:
    """Whether it has a state."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def read_state(thing: Any) -> bytes | None:
    """Its current state; None if it has none, or none yet."""
    if not has_state(thing):
        return None
    try:
        state = thing.state_dict()
        return None if state is None else pickle.dumps(state)
    except Exception:  # the dataset is run through then, which is reported
        return None


def load_state(thing: Any, state: bytes) -> None:
    """Load a state; errors pass through."""
    thing.load_state_dict(pickle.loads(state))


def rewind(thing: Any, begin: bytes | None) -> None:
    """Return to the beginning, unless it is there."""
    if begin is not None and read_state(thing) != begin:
        load_state(thing, begin)


@dataclass(frozen=True)
class StreamSnapshot:
    """The place of a stream of samples: `given` samples in all, `in_epoch` of them in `epoch`, and the state of its
    dataset (`of_iterator`: of the dataset's iterator)."""

    given: int
    epoch: int
    in_epoch: int
    of_iterator: bool
    state: bytes


class Stands(Protocol):
    """A stream with a state."""

    def snapshot(self) -> StreamSnapshot | None:
        """The current place; None if it has no state."""
        ...


@dataclass
class SnapshotPace:
    """How often a state may be taken."""

    _next: float = 0.0

    def take(self, stream: Stands) -> StreamSnapshot | None:
        """The current place of a stream; also None if the last one took too long."""
        started = time.perf_counter()
        if started < self._next:
            return None
        snapshot = stream.snapshot()
        ended = time.perf_counter()
        self._next = ended + (ended - started) * (1 / _SHARE - 1)
        return snapshot
