"""Forward and backward passes replayed as CUDA graphs, where the host issues kernels more slowly than the device runs
them.

Invariants:
- A replay is the same kernels in the same order as the passes that it was captured from, on the batch that is copied
  into them and on the weights that the model has then. Afterwards gradients are where the optimizer looks for them.
- Nothing is captured that the host decides anew in each pass: seeds of dropout, tokens of an expert, a loss scale, what
  is computed again, messages between ranks, a script's own model or loss.
- A step whose micro-batches are not those of the graphs (a last one of an epoch) is run without them. If a weight has
  moved in memory, they are captured again; what cannot be captured is run as before.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

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
"""Passes are captured if the host needs at least this part of the time that they take to issue them."""


def find_obstacle(values: RunFile, parallel: ParallelModel, device: torch.device, *, own_model: bool) -> str:
    """Why the passes of a run are not replayed; "" where they may be."""
    if device.type != "cuda":
        return f"a {device.type} has no CUDA graphs"
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
    """The passes of a run over `model` on its device. `note` is called with what was found, once."""

    model: nn.Module
    losses: Sequence[Loss]
    note: Callable[[str], None]
    _steps: int = 0
    _timed: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _captured: _Captured | None = None
    _is_off: bool = False

    def run(
        self, micros: Sequence[Micro], loss_fn: Loss, scale: float, one: Callable[[Micro, torch.Tensor], None]
    ) -> torch.Tensor | None:
        """Run the passes of a step by graphs; the sums of its losses, or None: run them one by one, in `timing`. `one`
        adds the gradients of a micro-batch to those of the model, and its losses to sums."""
        if self._is_off or not self._may_capture(micros, loss_fn):
            return None
        if self._captured is not None and self._captured.addresses != _list_addresses(self.model):
            self._captured = None
        if self._captured is None and not self._capture(micros, scale, one):
            return None
        captured = self._captured
        if captured is None or not captured.fits(micros, scale):
            return None
        for number, micro in enumerate(micros):
            for static, new in zip(_list_tensors(captured.micro), _list_tensors(micro), strict=True):
                static.copy_(new, non_blocking=True)
            graph = captured.further if number and captured.further is not None else captured.first
            graph.replay()
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        return captured.sums.clone()

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Around passes that are run one by one: how long the host issues them, and how long they take."""
        self._steps += 1
        if self._is_off or self._captured is not None or self._steps <= WARM_UP or len(self._timed) == TIMED:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        begin.record()
        started = time.perf_counter()
        yield
        host = time.perf_counter() - started
        end.record()
        self._timed.append((host, begin, end))

    def _may_capture(self, micros: Sequence[Micro], loss_fn: Loss) -> bool:
        whole = loss_fn in self.losses and self.model.training and all(micro.weight == 1 for micro in micros)
        if not whole or self._captured is not None or len(self._timed) < TIMED:
            return whole and self._captured is not None
        if not self._timed[-1][2].query():
            return False
        host = statistics.median(seconds for seconds, _, _ in self._timed)
        taken = statistics.median(begin.elapsed_time(end) / 1e3 for _, begin, end in self._timed)
        self._is_off = host < HOST_BOUND * taken
        return not self._is_off

    def _capture(self, micros: Sequence[Micro], scale: float, one: Callable[[Micro, torch.Tensor], None]) -> bool:
        """Whether the passes were captured; nothing is computed by that."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        micro = replace(micros[0], data=map_tensors(torch.clone, micros[0].data))
        sums = torch.zeros(SUMS, dtype=torch.float64, device=parameters[0].device)
        graphs: list[torch.cuda.CUDAGraph] = []
        stream = torch.cuda.current_stream()
        for parameter in parameters:
            parameter.grad = None
        try:
            for _ in range(min(len(micros), 2)):
                graph = torch.cuda.CUDAGraph()
                pool = graphs[0].pool() if graphs else None
                # A thread of its own may copy the next batch meanwhile, which is no part of the graph.
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    if not graphs:
                        sums.zero_()
                    one(micro, sums)
                graphs.append(graph)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # which a capture that broke off leaves behind
            self._is_off = True
            self.note(f"passes are not captured as CUDA graphs: {str(error).splitlines()[0]}")
            return False
        finally:
            gradients = [(each, each.grad) for each in parameters if each.grad is not None]
            for parameter in parameters:
                parameter.grad = None
        further = graphs[1] if len(graphs) > 1 else None
        addresses = _list_addresses(self.model)
        self._captured = _Captured(graphs[0], further, micro, scale, sums, gradients, addresses)
        host = statistics.median(seconds for seconds, _, _ in self._timed)
        self.note(f"passes are replayed as CUDA graphs: the host needed {1e3 * host:.1f} ms to issue them")
        return True


def _list_addresses(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


def _list_tensors(micro: Micro) -> list[torch.Tensor]:
    return [leaf for leaf in list_leaves(micro.data) if isinstance(leaf, torch.Tensor)]


def _is_alike(micro: Micro, other: Micro) -> bool:
    tensors, others = _list_tensors(micro), _list_tensors(other)
    if (micro.rows, micro.weight, micro.pair, len(tensors)) != (other.rows, other.weight, other.pair, len(others)):
        return False
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(tensors, others, strict=True))
