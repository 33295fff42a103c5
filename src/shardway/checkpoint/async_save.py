"""Saves in a background thread: a copy of the state in host memory is written while training goes on.

Invariants:
- One AsyncSave writes one checkpoint, by the same functions as a blocking save. Its outcome is reported once and has no
  effect by itself. The thread never keeps alive a process that is about to end.
- A staged copy never changes while it is in use, and has the bits, shapes, strides and placements of its source.
  Buffers are made once and reused: filling memory that was touched before is several times as fast.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.checkpoint.state import Tensors
from shardway.checkpoint.writer import SavedCheckpoint
from shardway.hardware.limits import read_memory_left
from shardway.ranks.start import Ranks
from shardway.rundir.lineage import SHARED


class AsyncSave(threading.Thread):
    """A save under way: `write` runs in this thread, on all ranks together, over process groups of its own, and `then`
    after it if there was something to save.

    `tier` is where it goes. `started` is when the run stopped for it (perf_counter), `stall_s` for how many seconds.
    Once it `has_ended`: `saved` (None: there was nothing to save) or `error`, at the time `ended`.
    """

    tier, started, stall_s = SHARED, 0.0, 0.0

    def __init__(
        self,
        step: int,
        ranks: Ranks,
        write: Callable[[], SavedCheckpoint | None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=f"save of step {step}", daemon=True)
        self.step = step
        self._device, self._write, self._then = ranks.device, write, then
        self.saved: SavedCheckpoint | None = None
        self.error: BaseException | None = None
        self.ended = 0.0
        self.has_ended = False

    def run(self) -> None:
        """The work of the thread."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread's device is the first, which is another rank's
            saved = self._write()
            if saved is not None:
                self._then()
            self.saved = saved
        except BaseException as caught:  # reported by the training thread
            self.error = caught
        self.ended = time.perf_counter()
        self.has_ended = True

    def wait(self) -> SavedCheckpoint | None:
        """What was saved, once it has ended; None if nothing was."""
        self.join()
        return self.saved


# --- the copy of a state in host memory

MOST_OF_MEMORY = 0.8
"""The part of the free host memory that copies may take: written files are cached in the rest."""


@dataclass(frozen=True)
class _HostBuffer:
    """Host memory, and the strides of the tensor it was made for (they differ if that tensor has gaps)."""

    memory: torch.Tensor
    source_stride: tuple[int, ...]


class Staging:
    """The host buffers of one rank, by the place of a tensor in its state."""

    def __init__(self) -> None:
        self._buffers: dict[str, _HostBuffer] = {}

    def missing_bytes(self, tensors: Tensors) -> int:
        """Bytes of this rank's tensors that have no buffer yet."""
        found = ((place, tensor) for place, tensor in _plain_tensors(tensors, "") if not self._fits(place, tensor))
        return sum(tensor.numel() * tensor.element_size() for _, tensor in found)

    def reserve(self, tensors: Tensors) -> None:
        """Make the buffers that are missing, and touch them. Raises what torch raises if memory runs out."""
        for place, tensor in _plain_tensors(tensors, ""):
            self._buffer(place, tensor)

    def stage(self, tensors: Tensors) -> Tensors:
        """The state as it is now: tensors as copies on the CPU, sharded ones with the same mesh and placements.

        Only this rank's parts are copied. The copy of an earlier call is overwritten.
        """
        staged = {name: self._stage(value, f"/{name}") for name, value in tensors.items()}
        if any(tensor.is_cuda for _, tensor in _plain_tensors(tensors, "")):
            torch.cuda.current_stream().synchronize()
        return staged

    def _stage(self, value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {name: self._stage(each, f"{place}/{name}") for name, each in value.items()}
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if not is_traceable_wrapper_subclass(value):
            return self._buffer(place, value).copy_(value.detach(), non_blocking=True)
        names, context = value.__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        inner = {
            name: self._stage(part, f"{place}.{name}") if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())

    def _buffer(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self._fits(place, tensor):
            self._buffers.pop(place, None)
            empty = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
            self._buffers[place] = _HostBuffer(empty.zero_(), tensor.stride())
        return self._buffers[place].memory

    def _fits(self, place: str, tensor: torch.Tensor) -> bool:
        held = self._buffers.get(place)
        wanted = (tensor.shape, tensor.dtype, tensor.stride())
        return held is not None and (held.memory.shape, held.memory.dtype, held.source_stride) == wanted


def has_room(wanted_bytes: int, root: Path = Path("/")) -> bool:
    """Whether the host, and this process's control group, have this much memory left for copies."""
    return wanted_bytes <= MOST_OF_MEMORY * read_memory_left(root)


def _plain_tensors(tensors: Tensors, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every plain tensor of this rank, also inside sharded ones, with its place."""
    for name, value in tensors.items():
        here = f"{place}/{name}"
        if isinstance(value, dict):
            yield from _plain_tensors(value, here)
        elif isinstance(value, torch.Tensor):
            yield from _parts(value, here)


def _parts(tensor: torch.Tensor, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if not is_traceable_wrapper_subclass(tensor):
        yield place, tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        if isinstance(part := getattr(tensor, name), torch.Tensor):
            yield from _parts(part, f"{place}.{name}")
