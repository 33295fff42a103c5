"""Batches that a thread of the rank reads before the loop asks for them.

Invariants:
- The batches, their order, and the place of an error among them are as without the thread.
- The thread begins with the first batch that is asked for, and ends with the iterator. It is never more than the asked
  number of batches ahead.
- What it reads draws no random numbers: the generators belong to the thread that trains.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import TypeVar

import torch

T = TypeVar("T")

_JOIN_S = 2.0
"""So long the end of the iterator waits for a read that is under way; a file system may hang."""


class _Failed:
    """An error of the batches, or their end (None)."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def read_ahead(batches: Iterator[T], count: int, device: torch.device) -> Iterator[T]:
    """The same batches, up to `count` of them read before they are asked for; `device` is the one that they are read
    for, on whose context a thread allocates page-locked memory."""
    answers: SimpleQueue[T | _Failed] = SimpleQueue()
    room, ended = threading.Semaphore(count), threading.Event()

    def read() -> None:
        with contextlib.closing(batches):  # type: ignore[type-var]
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                while room.acquire() and not ended.is_set():
                    answers.put(next(batches))
            except StopIteration:
                answers.put(_Failed(None))
            except BaseException as error:
                answers.put(_Failed(error))

    thread = threading.Thread(target=read, name="shardway-reads-ahead", daemon=True)
    thread.start()
    try:
        while True:
            answer = answers.get()
            if isinstance(answer, _Failed):
                if answer.error is None:
                    return
                raise answer.error
            room.release()
            yield answer
    finally:
        ended.set()
        room.release()
        thread.join(_JOIN_S)
