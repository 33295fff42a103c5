"""Metrics of a script, correct over ranks: values of `run.log` in training, and metric objects of a validation.

Invariant: the value over several ranks is that of one rank with all their samples: a mean is weighted by samples, the
state of a metric object is joined before it is computed. No rank waits for a value that another has not logged: values
wait until all ranks meet. This module must not write files.

A metric object is one of torchmetrics, or has its methods: `update(...)`, `compute()`, `reset()`, and `metric_state` if
there are several ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from shardway.data.batch_tree import is_pair, map_tensors
from shardway.errors import UserError
from shardway.ranks.start import Ranks
from shardway.train.loss import LossSum, fill_missing_targets

Values = dict[str, float]

METHODS = ("update", "compute", "reset")
"""The methods that make an object a metric."""


def is_metric(value: Any) -> bool:
    """Whether it is a metric object."""
    return all(callable(getattr(value, name, None)) for name in METHODS)


# --- run.log


_WAYS: dict[str, Callable[[Sequence[tuple[float, float]]], float]] = {
    "mean": lambda pairs: _mean(pairs),
    "sum": lambda pairs: math.fsum(value for value, _ in pairs),
    "min": lambda pairs: min(value for value, _ in pairs),
    "max": lambda pairs: max(value for value, _ in pairs),
}
"""How the values of several ranks, each with the rank's samples, become one."""


@dataclass(frozen=True)
class _Entry:
    """A value that this rank has logged: a number, a tensor of one element, or a copy of a metric object."""

    value: Any
    way: str
    samples: int


class MetricLog:
    """Values that a script has logged and that are not written down yet, by step and name.

    `write(step, values)` is called on rank 0.
    """

    def __init__(self, ranks: Ranks, write: Callable[[int, Values], None]) -> None:
        self._ranks, self._write = ranks, write
        self._waiting: dict[tuple[int, str], _Entry] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has something to write down."""
        return bool(self._waiting)

    def add(self, step: int, samples: int, values: Mapping[str, Any], way: str) -> None:
        """Add values of a step, for this rank's samples; the last value of a name counts.

        Raises UserError for what is not a number.
        """
        _check_values(values, way)
        for name, value in _list_items(values):
            self._waiting[step, name] = _Entry(_snapshot(value), way, samples)

    def drop_after(self, step: int) -> None:
        """Drop what was logged for later steps, which do not count."""
        self._waiting = {key: entry for key, entry in self._waiting.items() if key[0] <= step}

    def flush(self) -> None:
        """Write the waiting values of all ranks; called on all of them together."""
        own = {key: (_as_plain(entry.value), entry.way, entry.samples) for key, entry in self._waiting.items()}
        self._waiting = {}
        every = self._ranks.gather(own)
        if not self._ranks.is_first:
            return
        joined: dict[int, Values] = {}
        for key in sorted({key: None for each in every for key in each}):
            found = [each[key] for each in every if key in each]
            joined.setdefault(key[0], {}).update(_join_logged(key[1], found))
        for step, values in joined.items():
            self._write(step, values)


def _join_logged(name: str, found: Sequence[tuple[Any, str, int]]) -> Values:
    """One value of those of the ranks that have logged it."""
    metrics = [value for value, _, _ in found if is_metric(value)]
    if metrics:
        return _name_values(name, _join_metrics(name, metrics))
    return {name: _WAYS[found[0][1]]([(value, float(samples)) for value, _, samples in found])}


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean weighted by samples; a rank without any does not count."""
    counted = [(value, weight) for value, weight in pairs if weight]
    total = math.fsum(weight for _, weight in counted)
    return math.fsum(value * weight for value, weight in counted) / total if total else math.nan


def _check_values(values: Any, way: str) -> None:
    if way not in _WAYS:
        allowed = ", ".join(f'"{each}"' for each in _WAYS)
        raise UserError(f"run.log was given reduce = {way!r}.\n  Allowed: {allowed}.")
    wrong = [f"{name!r} ({type(value).__name__})" for name, value in _list_items(values) if not _is_loggable(value)]
    if wrong:
        raise UserError(
            f"run.log was given what is no number: {', '.join(wrong)}.\n"
            "  Allowed: numbers, tensors and arrays of one element, and metrics with update(), compute() and reset(), "
            "each under a name of text.\n  To do: log what you want to see of it, such as its mean."
        )


def _list_items(values: Any) -> Iterable[tuple[Any, Any]]:
    """Of a mapping, also of a collection of metrics, of which each is a metric by itself."""
    for name, value in values.items():
        if is_metric(value) and callable(getattr(value, "items", None)):
            yield from ((f"{name}_{key}", each) for key, each in value.items())
        else:
            yield name, value


def _is_loggable(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        elements = value.numel() if isinstance(value, torch.Tensor) else value.size
        is_real = not value.is_complex() if isinstance(value, torch.Tensor) else value.dtype.kind in "biuf"
        return elements == 1 and is_real
    return isinstance(value, int | float) or is_metric(value)


def _snapshot(value: Any) -> Any:
    """A copy of the current value; later changes by the script have no effect. The device is not waited for."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if is_metric(value) else value


def _as_plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if is_metric(value):
        return value.cpu() if hasattr(value, "cpu") else value
    return float(value)


# --- metrics of a validation


class OutputMetrics:
    """Copies of the metric objects of a validation, which get the model's output for each sample once.

    `device`: where outputs are; `counts`: whether this rank's outputs are not those of another rank as well.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, *, counts: bool) -> None:
        self._metrics = {name: _begin(metric, device) for name, metric in metrics.items()}
        self._counts, self._sees, self._has_seen = counts, False, False

    def begin_batch(self, data: Any, rows: int | None) -> None:
        """The next loss is that of this batch, of which `rows` samples count (None: all)."""
        self._sees = rows != 0
        if self._sees and rows is not None:
            _, counts = fill_missing_targets(data, pair=is_pair(data, rows))
            self._sees = counts is None or bool(counts)

    def watch(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function, wrapped: the metrics get its arguments, outputs and targets, or the `outputs` of its
        LossSum."""

        def watched(first: Any, second: Any) -> Any:
            loss = loss_fn(first, second)
            outputs = loss.outputs if isinstance(loss, LossSum) and loss.outputs is not None else None
            if outputs is None and isinstance(first, torch.nn.Module):
                raise UserError(
                    "run.validation(metrics=...) needs what the model gives, and the loss function takes the model "
                    "itself.\n  To do: let it return shardway.LossSum(total, count, outputs=(predictions, targets)), "
                    "which the metrics are updated with."
                )
            self._update(outputs if outputs is not None else (first, second))
            return loss

        return watched

    def _update(self, outputs: Sequence[Any]) -> None:
        whole = [map_tensors(_whole, each) for each in outputs]  # where they are slices, all ranks take part
        if not (self._sees and self._counts):
            return
        self._has_seen = True
        for metric in self._metrics.values():
            metric.update(*whole)

    def compute(self, ranks: Ranks) -> Values:
        """The values over all samples, the same on every rank; called on all of them together."""
        own = {name: _as_plain(metric) for name, metric in self._metrics.items()} if self._has_seen else {}
        every = [each for each in ranks.gather(own) if each]
        values: Values = {}
        for name in self._metrics if every else ():
            values |= _name_values(name, _join_metrics(name, [each[name] for each in every]))
        return values


def check_metrics(metrics: Any) -> dict[str, Any]:
    """The metrics that a script gave `run.validation`, by name. Raises UserError."""
    if not callable(getattr(metrics, "items", None)):
        raise UserError(
            f"run.validation(metrics=...) was given a {type(metrics).__name__}.\n"
            '  To do: name each metric: metrics={"f1": torchmetrics.F1Score(...)}.'
        )
    named = {str(name): metric for name, metric in _list_items(metrics)}
    wrong = [f"{name!r} ({type(metric).__name__})" for name, metric in named.items() if not is_metric(metric)]
    if wrong:
        raise UserError(
            f"run.validation(metrics=...) holds what is no metric: {', '.join(wrong)}.\n"
            "  Allowed: objects with update(outputs, targets), compute() and reset(), such as those of torchmetrics. "
            "To do: hand sums back by shardway.LossSum(total, count, metrics={...}) instead."
        )
    return named


def _begin(metric: Any, device: torch.device) -> Any:
    """An empty copy on a device; the script's own stays as it is."""
    own = copy.deepcopy(metric)
    own.reset()
    return own.to(device) if hasattr(own, "to") else own


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- metric objects of several ranks


def _join_metrics(name: str, metrics: Sequence[Any]) -> Any:
    """The value of a metric over all samples of its copies."""
    one = metrics[0]
    if len(metrics) == 1:
        one.distributed_available_fn = lambda: False  # nothing is to be had from other processes
        return one.compute()
    if not hasattr(one, "metric_state") or not _syncs_as_ever(one):
        raise UserError(
            f"{name!r} ({type(one).__name__}) has a state of its own on each rank, and how to join these is not known."
            "\n  Allowed with several ranks: metrics of torchmetrics that hold their state by add_state(). To do: hand "
            "sums back by shardway.LossSum(total, count, metrics={...}), or use one rank."
        )
    states = [each.metric_state for each in metrics]
    parts: dict[int, list[torch.Tensor]] = {}
    for state_name, state in one.metric_state.items():
        if not isinstance(state, list):
            parts[id(state)] = [each[state_name] for each in states]
            continue
        found = [part for each in states for part in each[state_name]]
        setattr(one, state_name, found[:1])
        parts.update({id(part): found for part in found[:1]})
    # The way by which torchmetrics joins processes, with what they have sent already.
    one.dist_sync_fn = lambda tensor, group=None: parts.get(id(tensor), [tensor])
    one.distributed_available_fn = lambda: True
    one._to_sync, one._computed = True, None  # as if it had been made to join processes, and never been computed
    return one.compute()


def _syncs_as_ever(metric: Any) -> bool:
    """Whether it joins states as declared in add_state(), not by communication of its own or through other metrics."""
    of = next((kind for kind in type(metric).__mro__ if "_sync_dist" in vars(kind)), None)
    within = (each for each in metric.modules() if each is not metric)
    return of is not None and of.__name__ == "Metric" and not any(is_metric(each) for each in within)


def _name_values(name: str, computed: Any) -> Values:
    """Numbers by name: one, or one for each element or key."""
    return {"_".join((name, *path)): value for path, value in _list_numbers(computed)}


def _list_numbers(computed: Any) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(computed, Mapping):
        for key, value in computed.items():
            yield from (((str(key), *path), number) for path, number in _list_numbers(value))
    elif isinstance(computed, list | tuple):
        for at, value in enumerate(computed):
            yield from (((str(at), *path), number) for path, number in _list_numbers(value))
    else:
        array = np.asarray(computed.detach().cpu() if isinstance(computed, torch.Tensor) else computed, dtype=float)
        if array.ndim == 0:
            yield (), float(array)
        for index in np.ndindex(array.shape) if array.ndim else ():
            yield tuple(str(each) for each in index), float(array[index])
