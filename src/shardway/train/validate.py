"""Metrics of a script, correct over ranks: validations on held-out data, metric objects, values of `run.log`.

Invariants:
- The value over several ranks is that of one rank with all their samples: a mean is weighted by samples, the state of a
  metric object is joined before it is computed. No rank waits for a value that another has not logged: values wait
  until all ranks meet.
- Every held-out sample counts once, whatever the number of ranks. All ranks run the same number of forward passes (a
  sharded model waits for all of them), also if a stop breaks a validation off; then there is no result. Training state
  is left as it was.
- Earlier validations are the same on all ranks: rank 0 reads them from the events that still hold.

A metric object is one of torchmetrics, or has its methods: `update(...)`, `compute()`, `reset()`, and `metric_state` if
there are several ranks.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardway.data.batch_tree import is_pair, map_tensors
from shardway.errors import UserError
from shardway.parallel.axes.replicate import average_buffers
from shardway.ranks.start import Ranks
from shardway.rundir.events import drop_undone
from shardway.train.loss import LossSum, fill_missing_targets
from shardway.train.passes import SUMS, Passes, evaluating, whole_tensor
from shardway.train.session import Session
from shardway.train.stops import ValidationBreaks
from shardway.units import LOSS, BestResult, Monitor
from shardway.watch.facts import read_validation

Values = dict[str, float]
LoggedValue = tuple[Any, str, int]
"""A value that a script has logged, how ranks join it, and this rank's samples."""


@dataclass(frozen=True)
class Validation:
    """What is validated on: a fresh pass over this rank's batches (as many on every rank, the last one perhaps without
    samples), and the loss. `rows`: this rank's samples in each of them, if known. `objects` are metrics with a state,
    by name.

    `results` are the metrics of each validation of the run by its step, the same on all ranks: the loop puts them in,
    also those of earlier attempts. `monitor` decides which of them is the best.
    """

    batches: Callable[[], Iterable[Any]]
    loss_fn: Callable[..., LossSum | torch.Tensor]
    bytes_per_token: float | None = None
    rows: Callable[[], Sequence[int]] | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    results: dict[int, Values] = field(default_factory=dict)
    monitor: Monitor = LOSS

    @property
    def step(self) -> int:
        """The step after which the last validation was made; 0 if there was none."""
        return max(self.results, default=0)

    @property
    def last(self) -> Values | None:
        """The metrics of the last validation, {"loss": ..., ...}; None before the first."""
        return self.results.get(self.step)

    @property
    def best(self) -> BestResult | None:
        """Step and metrics of the best validation so far, by `checkpoint.monitor`; None before there is one."""
        return self.monitor.find_best(self.results)


def recall_validations(session: Session, step: int) -> tuple[dict[int, Values], bool]:
    """The metrics of validations up to the step where the run resumes, by step; and whether the one after this step was
    made, or ended in an error, and would again. Called on all ranks together."""

    def read() -> tuple[dict[int, Values], bool]:
        results, tried, run = dict[int, Values](), False, session.directory
        for rank in run.ranks_with_events():
            names = ("started", "rolled_back", "validation", "validation_failed")
            for event in drop_undone(run.all_events(rank, names)):
                if event["event"] not in names[2:] or event.get("step", 0) > step:
                    continue
                tried = tried or event["step"] == step
                if event["event"] == "validation":
                    results[event["step"]] = read_validation(event).metrics
        return results, tried

    return session.ranks.ask_first(read)


@torch.no_grad()
def validate(
    model: nn.Module, validation: Validation, passes: Passes, ranks: Ranks, breaks: ValidationBreaks | None = None
) -> Values | None:
    """Mean loss in nats, accuracy or bits per byte if they apply, the sums over all samples that the loss names, and
    the values of metrics; None if it was broken off."""
    loss_fn, objects = validation.loss_fn, None
    if validation.objects:
        if passes.parallel.pipeline is not None:
            raise UserError(
                "run.validation(metrics=...) takes no metric objects in a pipeline (parallel.pp > 1), of which the "
                "last stage alone has outputs.\n"
                "  To do: hand sums back by shardway.LossSum(total, count, metrics={...}), or set parallel.pp = 1."
            )
        objects = OutputMetrics(validation.objects, ranks.device, counts=passes.parallel.answers_for_loss)
        loss_fn = objects.watch(loss_fn)
    average_buffers(model, passes.parallel.mesh)
    sums, named = torch.zeros(SUMS, dtype=torch.float64, device=ranks.device), dict[str, torch.Tensor]()
    any_missed = False
    rows = validation.rows() if validation.rows is not None else None
    batches = validation.batches()
    stream = breaks.over(batches, rows) if breaks is not None else ((data, False) for data in batches)
    next_rows = iter(rows) if rows is not None else itertools.repeat(None)
    # Closed here: an error that a notebook keeps would keep the stream open, with its loader processes.
    with evaluating(model), contextlib.closing(stream):  # type: ignore[type-var]
        for data, missed in stream:
            any_missed = any_missed or missed
            if breaks is not None and breaks.breaks_off(missed=any_missed):
                return None
            known = next(next_rows, None)
            if objects is not None:
                objects.begin_batch(data, known)
            of_batch, of_names = passes.evaluate(model, data, loss_fn, known)
            sums += of_batch
            for name, value in of_names.items():
                named[name] = named.get(name, 0) + value
    total, count, correct, answered, gave_up = ranks.sum(torch.cat([sums, sums.new_tensor([any_missed])])).tolist()
    if gave_up and breaks is not None and breaks.breaks_off(missed=any_missed, last=True):
        return None
    metrics = {"loss": total / count if count else math.nan}
    if answered:
        metrics["accuracy"] = correct / answered
    if validation.bytes_per_token:
        # Shannon: nats a token / ln 2 = bits a token, spread over the bytes that a token stands for.
        metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / validation.bytes_per_token
    computed = objects.compute(ranks) if objects is not None else {}
    _check_names(computed, "run.validation(metrics=...)")
    _check_names(named, "LossSum(metrics=...) of the loss function")
    every = ranks.gather({name: float(value) for name, value in named.items()})  # a rank may lack a name
    names = dict.fromkeys(name for each in every for name in each)
    return {**computed, **{name: math.fsum(each.get(name, 0.0) for each in every) for name in names}, **metrics}


_TAKEN = {"loss": "", "bits_per_byte": "", "accuracy": "LossSum(correct=...)", "step": "", "seconds": "", "time": ""}
"""Names that results and events have already -> what to use instead."""


def _check_names(names: Iterable[str], where: str) -> None:
    for name in names:
        if name in _TAKEN:
            raise UserError(
                f'{where} holds "{name}", a name that the results of a validation have already.\n'
                f"  To do: {_TAKEN[name] or 'choose another name'}."
            )


# --- metric objects of a validation


class OutputMetrics:
    """Copies of the metric objects of a validation, which get the model's output for each sample once.

    `device`: where outputs are; `counts`: whether this rank's outputs are not those of another rank as well.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, *, counts: bool) -> None:
        self._metrics: dict[str, Any] = {}
        for name, metric in metrics.items():  # the script's own stay as they are
            own = copy.deepcopy(metric)
            own.reset()
            self._metrics[name] = own.to(device) if hasattr(own, "to") else own
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
            given = outputs if outputs is not None else (first, second)
            whole = [map_tensors(whole_tensor, each) for each in given]  # where they are slices, all ranks take part
            if self._sees and self._counts:
                self._has_seen = True
                for metric in self._metrics.values():
                    metric.update(*whole)
            return loss

        return watched

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
    wrong = [f"{name!r} ({type(metric).__name__})" for name, metric in named.items() if not _is_metric(metric)]
    if wrong:
        raise UserError(
            f"run.validation(metrics=...) holds what is no metric: {', '.join(wrong)}.\n"
            "  Allowed: objects with update(outputs, targets), compute() and reset(), such as those of torchmetrics. "
            "To do: hand sums back by shardway.LossSum(total, count, metrics={...}) instead."
        )
    return named


def _is_metric(value: Any) -> bool:
    """Whether it has the methods that make an object a metric."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def _list_items(values: Any) -> Iterable[tuple[Any, Any]]:
    """Of a mapping, also of a collection of metrics, of which each is a metric by itself."""
    for name, value in values.items():
        if _is_metric(value) and callable(getattr(value, "items", None)):
            yield from ((f"{name}_{key}", each) for key, each in value.items())
        else:
            yield name, value


def _as_plain(value: Any) -> Any:
    """A metric on the CPU, to be sent; anything else as a number."""
    if _is_metric(value):
        return value.cpu() if hasattr(value, "cpu") else value
    if isinstance(value, np.ndarray):
        return float(value.item())
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def _join_metrics(name: str, metrics: Sequence[Any]) -> Any:
    """The value of a metric over all samples of its copies."""
    one = metrics[0]
    if len(metrics) == 1:
        one.distributed_available_fn = lambda: False  # nothing is to be had from other processes
        return one.compute()
    # It must join states as declared in add_state(), not by communication of its own or through other metrics.
    of = next((kind for kind in type(one).__mro__ if "_sync_dist" in vars(kind)), None)
    joins = hasattr(one, "metric_state") and of is not None and of.__name__ == "Metric"
    if not joins or any(_is_metric(each) for each in one.modules() if each is not one):
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


def _name_values(name: str, computed: Any) -> Values:
    """Numbers by name: one, or one for each element or key."""
    if isinstance(computed, list | tuple):
        computed = dict(enumerate(computed))
    if isinstance(computed, Mapping):
        named = (_name_values(f"{name}_{key}", value) for key, value in computed.items())
        return {each: number for values in named for each, number in values.items()}
    array = np.asarray(computed.detach().cpu() if isinstance(computed, torch.Tensor) else computed, dtype=float)
    return {"_".join((name, *map(str, index))): float(array[index]) for index in np.ndindex(array.shape)}


# --- run.log


def _mean(values: Sequence[float], samples: Sequence[int]) -> float:
    """The mean weighted by samples; a rank without any does not count."""
    counted = [(value, weight) for value, weight in zip(values, samples, strict=True) if weight]
    return math.fsum(value * weight for value, weight in counted) / sum(samples) if counted else math.nan


_WAYS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "mean": _mean,
    "sum": lambda values, samples: math.fsum(values),
    "min": lambda values, samples: min(values),
    "max": lambda values, samples: max(values),
}
"""How the values of several ranks, each with the rank's samples, become one."""


class MetricLog:
    """Values that a script has logged and that are not written down yet, by step and name.

    `write(step, values)` is called on rank 0.
    """

    def __init__(self, ranks: Ranks, write: Callable[[int, Values], None]) -> None:
        self._ranks, self._write = ranks, write
        self._waiting: dict[tuple[int, str], LoggedValue] = {}

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, step: int, samples: int, values: Mapping[str, Any], way: str) -> None:
        """Add values of a step, for this rank's samples; the last value of a name counts.

        Raises UserError for what is not a number.
        """
        if way not in _WAYS:
            allowed = ", ".join(f'"{each}"' for each in _WAYS)
            raise UserError(f"run.log was given reduce = {way!r}.\n  Allowed: {allowed}.")
        wrong = [f"{name!r} ({type(value).__name__})" for name, value in _list_items(values) if not _is_loggable(value)]
        wrong += [f"a value named {name!r} ({type(name).__name__})" for name in values if not isinstance(name, str)]
        if wrong:
            raise UserError(
                f"run.log was given what it does not take: {', '.join(wrong)}.\n"
                "  Allowed: numbers, tensors and arrays of one element, and metrics with update(), compute() and "
                "reset(), each under a name of text.\n  To do: log what you want to see of it, such as its mean."
            )
        for name, value in _list_items(values):
            # A copy: later changes by the script have no effect. The device is not waited for.
            if isinstance(value, torch.Tensor):
                value = value.detach().clone()
            elif _is_metric(value):
                value = copy.deepcopy(value)
            self._waiting[step, name] = value, way, samples

    def drop_after(self, step: int) -> None:
        """Drop what was logged for later steps, which do not count."""
        self._waiting = {key: entry for key, entry in self._waiting.items() if key[0] <= step}

    def flush(self) -> None:
        """Write the waiting values of all ranks; called on all of them together."""
        own = {key: (_as_plain(value), way, samples) for key, (value, way, samples) in self._waiting.items()}
        self._waiting = {}
        every = self._ranks.gather(own)
        if not self._ranks.is_first:
            return
        joined: dict[int, Values] = {}
        for step, name in sorted({key: None for each in every for key in each}):
            found = [each[step, name] for each in every if (step, name) in each]
            metrics = [value for value, _, _ in found if _is_metric(value)]
            if metrics:
                values = _name_values(name, _join_metrics(name, metrics))
            else:
                numbers, (way, *_), samples = zip(*found, strict=True)
                values = {name: _WAYS[way](numbers, samples)}
            joined.setdefault(step, {}).update(values)
        for step, values in joined.items():
            self._write(step, values)


def _is_loggable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, int | float) or _is_metric(value)
