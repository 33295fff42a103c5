"""A save that is written by a thread of its own while training goes on.

Invariant: one flight writes one checkpoint, by the same functions as a save that is waited for; its outcome is known
once and changes nothing by itself. The thread never keeps a process alive that wants to end. This module must not
start a second flight beside a first, nor write events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardway.checkpoint.save import SavedCheckpoint
from shardway.ranks.start import Ranks


@dataclass(frozen=True)
class AsyncSave:
    """How a flight ended: what was saved (None: there was nothing to save), or what went wrong.

    `ended` is a time of `time.perf_counter`.
    """

    saved: SavedCheckpoint | None
    error: BaseException | None
    ended: float


class Flight:
    """A save under way: `write` runs in the thread, on all ranks together, over ranks that were set apart."""

    def __init__(self, step: int, ranks: Ranks, write: Callable[[], SavedCheckpoint | None]) -> None:
        self.step = step
        self._device = ranks.device
        self._write = write
        self._landing: AsyncSave | None = None
        self._thread = threading.Thread(target=self._fly, name=f"save of step {step}", daemon=True)
        self._thread.start()

    @property
    def landing(self) -> AsyncSave | None:
        """How it ended; None while it is under way."""
        return self._landing

    @property
    def has_landed(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._landing is not None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended, or for so many seconds; whether it has."""
        self._thread.join(timeout_s)
        return self._landing is not None

    def _fly(self) -> None:
        saved: SavedCheckpoint | None = None
        error: BaseException | None = None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread's device is the first, which is another rank's
            saved = self._write()
        except BaseException as caught:  # told by the thread of training, which decides what it means
            error = caught
        self._landing = AsyncSave(saved, error, time.perf_counter())
