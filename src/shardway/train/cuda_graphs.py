"""Forward and backward passes replayed as CUDA graphs, where the host issues kernels more slowly than the device runs
them.

Invariants:
- A replay is the same kernels in the same order as the passes that it was captured from, on the batch that is copied
  into them and on the weights that the model has then. Afterwards gradients are where the optimizer looks for them.
- Nothing is captured that the host decides anew in each pass: seeds of dropout, tokens of an expert, a loss scale, what
  is computed again, messages between ranks, a script's own model or loss.
- A step whose micro-batches are not those of the graphs is run without them. If several in a row are not (the batch
  has grown), or a weight has moved in memory, they are captured again; what cannot be captured is run as before.
- Graphs are kept only where replays were shorter than the passes one by one, and where the device has memory for both:
  what a graph has is no longer there for an update or a validation.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardway.data.batch_tree import list_leaves, map_tensors
from shardway.parallel.apply import ParallelModel
from shardway.resolve.rules.formats import find_replay_obstacle
from shardway.runfile.schema import RunFile
from shardway.train.passes import SUMS, Loss, Micro

WARM_UP = 3
"""Steps that are not timed: in them kernels are compiled and chosen."""
TIMED = 3
HOST_BOUND = 0.7
"""Passes are captured if the host needs at least this part of the time that they take to issue them. More is possible
on a busy device too, since the host waits where about a thousand kernels are pending: hence `WORTH`."""
WORTH = 0.95
"""Graphs are kept if replays take at most this part of the time of passes one by one."""
MISFITS = 3
"""Steps in a row whose micro-batches are others than those of the graphs, after which they are captured again."""
MEMORY = 0.5
"""The part of a device's memory that passes may have taken at most, for a second set of it to fit."""

Timed = list[tuple[torch.cuda.Event, torch.cuda.Event]]


def find_obstacle(values: RunFile, parallel: ParallelModel, *, own_model: bool) -> str:
    """Why the passes of a run on a CUDA device are not replayed; "" where they may be."""
    if own_model:
        return "a script steps its own model"
    if parallel.call is not parallel.module or parallel.pipeline is not None or parallel.dropout is not None:
        return "the model is shared out or drops"
    return find_replay_obstacle(values)


@dataclass(frozen=True)
class _Captured:
    """The graphs of the first and of any further micro-batch, what they read and write, and where weights were then."""

    first: torch.cuda.CUDAGraph
    further: torch.cuda.CUDAGraph | None
    micro: Micro
    scale: float
    sums: torch.Tensor
    gradients: Sequence[tuple[nn.Parameter, torch.Tensor]]
    addresses: Sequence[int]

    def fits(self, micros: Sequence[Micro], scale: float) -> bool:
        one = len(micros) == 1 or self.further is not None
        return one and self.scale == scale and all(_is_alike(micro, self.micro) for micro in micros)


@dataclass
class GraphedPasses:
    """The passes of a run over `model` on its device. `note` is given what was found out, once. `is_profiled`: a
    profiler slows the host now, so nothing is timed and nothing new is captured."""

    model: nn.Module
    losses: Sequence[Loss]
    note: Callable[[str], None]
    is_profiled: bool = False
    _steps: int = 0
    _host: list[float] = field(default_factory=list)
    _one_by_one: Timed = field(default_factory=list)
    _replayed: Timed = field(default_factory=list)
    _captured: _Captured | None = None
    _is_kept: bool = False
    _is_off: bool = False
    _misfits: int = 0

    def run(
        self, micros: Sequence[Micro], loss_fn: Loss, scale: float, one: Callable[[Micro, torch.Tensor], None]
    ) -> torch.Tensor | None:
        """Run the passes of a step by graphs; the sums of its losses, or None: run them one by one, in `timing`. `one`
        adds the gradients of a micro-batch to those of the model, and its losses to sums."""
        if self._is_off or loss_fn not in self.losses or not self.model.training:
            return None
        if self.is_profiled and not self.is_replaying:
            return None
        if any(micro.weight != 1 or not _is_alike(micro, micros[0]) for micro in micros):
            return None
        if self._captured is not None and not self._captured.fits(micros, scale):
            self._misfits += 1
            if self._misfits < MISFITS:
                return None
            self._captured = None
        if self._captured is not None and self._captured.addresses != self._list_addresses():
            self._captured = None
        self._misfits = 0
        if self.is_profiled and self._captured is None:
            return None
        if self._captured is None and not (self._should_capture() and self._capture(micros, scale, one)):
            return None
        captured = self._captured
        if captured is None or not self._is_worth_it():
            return None
        with contextlib.nullcontext() if self._is_kept else _timed(self._replayed):
            for number, micro in enumerate(micros):
                for static, new in zip(_list_tensors(captured.micro), _list_tensors(micro), strict=True):
                    static.copy_(new, non_blocking=True)
                graph = captured.further if number and captured.further is not None else captured.first
                graph.replay()
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        return captured.sums.clone()

    @property
    def is_replaying(self) -> bool:
        """Whether graphs were found to be worth it, and are kept."""
        return self._is_kept and not self._is_off

    @cached_property
    def _tables(self) -> list[dict[str, Any]]:
        """Where modules keep parameters and buffers; found once, since each step looks at them."""
        return [table for each in self.model.modules() for table in (each._parameters, each._buffers) if table]

    def _list_addresses(self) -> list[int]:
        return [tensor.data_ptr() for table in self._tables for tensor in table.values() if tensor is not None]

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Around passes that are run one by one: how long the host issues them, and how long they take."""
        self._steps += not self.is_profiled
        if self.is_profiled or self._is_off or self._steps <= WARM_UP or len(self._host) == TIMED:
            yield
            return
        with _timed(self._one_by_one):
            started = time.perf_counter()
            yield
            self._host.append(time.perf_counter() - started)

    def _should_capture(self) -> bool:
        if len(self._host) < TIMED or not self._one_by_one[-1][1].query():
            return False
        total = torch.cuda.get_device_properties().total_memory
        fits = torch.cuda.max_memory_reserved() <= MEMORY * total
        self._is_off = not fits or statistics.median(self._host) < HOST_BOUND * _median_seconds(self._one_by_one)
        return not self._is_off

    def _is_worth_it(self) -> bool:
        """Whether to go on replaying; decided once some replays have been timed."""
        if self._is_kept or len(self._replayed) < TIMED or not self._replayed[-1][1].query():
            return True
        before, now = _median_seconds(self._one_by_one), _median_seconds(self._replayed)
        self._is_kept = now <= WORTH * before
        if self._is_kept:
            self.note(
                f"passes are replayed as CUDA graphs: {1e3 * now:.1f} ms a step, one by one {1e3 * before:.1f} ms"
            )
        else:
            self._is_off, self._captured = True, None
        return self._is_kept

    def _capture(self, micros: Sequence[Micro], scale: float, one: Callable[[Micro, torch.Tensor], None]) -> bool:
        """Whether the passes were captured; nothing is computed by that."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        micro = replace(micros[0], data=map_tensors(torch.clone, micros[0].data))
        sums = torch.zeros(SUMS, dtype=torch.float64, device=parameters[0].device)
        graphs: list[torch.cuda.CUDAGraph] = []
        stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
        for parameter in parameters:
            parameter.grad = None
        try:
            for _ in range(min(len(micros), 2)):
                graph = torch.cuda.CUDAGraph()
                # A thread of its own may copy the next batch meanwhile, which is no part of the graph.
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    if not graphs:
                        sums.zero_()
                    one(micro, sums)
                graphs.append(graph)
        except RuntimeError as error:
            self._is_off = True
            _end_capture(stream, pool)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.note(f"passes are not captured as CUDA graphs: {reason}")
            return False
        finally:
            gradients = [(each, each.grad) for each in parameters if each.grad is not None]
            for parameter in parameters:
                parameter.grad = None
        further = graphs[1] if len(graphs) > 1 else None
        self._captured = _Captured(graphs[0], further, micro, scale, sums, gradients, self._list_addresses())
        return True


def _end_capture(stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
    """Put back what torch leaves behind where CUDA has broken a capture off: its stream, and the pool that memory is
    taken from (pytorch/pytorch#180395)."""
    torch.cuda.set_stream(stream)
    for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with contextlib.suppress(RuntimeError, AttributeError):
            getattr(torch._C, end)(stream.device.index, pool)


@contextlib.contextmanager
def _timed(events: Timed) -> Iterator[None]:
    """Adds the events of the device before and after what runs inside."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    begin.record()
    yield
    end.record()
    events.append((begin, end))


def _median_seconds(events: Timed) -> float:
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in events)


def _list_tensors(micro: Micro) -> list[torch.Tensor]:
    return [leaf for leaf in list_leaves(micro.data) if isinstance(leaf, torch.Tensor)]


def _is_alike(micro: Micro, other: Micro) -> bool:
    tensors, others = _list_tensors(micro), _list_tensors(other)
    if (micro.rows, micro.weight, micro.pair, len(tensors)) != (other.rows, other.weight, other.pair, len(others)):
        return False
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(tensors, others, strict=True))
