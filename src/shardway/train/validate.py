"""The loss on held-out data, and the earlier validations of the run.

Invariants:
- Every held-out sample counts once, whatever the number of ranks. All ranks run the same number of forward passes (a
  sharded model waits for all of them), also if a stop breaks a validation off; then there is no result. Training state
  is left as it was.
- Earlier validations are the same on all ranks: rank 0 reads them from the events that still hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shardway.best import LOSS, BestResult, Monitor
from shardway.errors import UserError
from shardway.parallel.axes.replicate import average_buffers
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.rundir.events import drop_undone
from shardway.train.loss import LossSum
from shardway.train.metrics import OutputMetrics
from shardway.train.passes import SUMS, Passes
from shardway.train.session import Session
from shardway.watch.facts import read_validation


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
    results: dict[int, dict[str, float]] = field(default_factory=dict)
    monitor: Monitor = LOSS

    def recall(self, results: Mapping[int, dict[str, float]]) -> None:
        """Hold these results and no others."""
        self.results.clear()
        self.results.update(results)

    @property
    def step(self) -> int:
        """The step after which the last validation was made; 0 if there was none."""
        return max(self.results, default=0)

    @property
    def last(self) -> dict[str, float] | None:
        """The metrics of the last validation, {"loss": ..., ...}; None before the first."""
        return self.results.get(self.step)

    @property
    def best(self) -> BestResult | None:
        """Step and metrics of the best validation so far, by `checkpoint.monitor`; None before there is one."""
        return self.monitor.find_best(self.results)


class Breaks(Protocol):
    """How a validation can be broken off before each batch."""

    def over(self, validation: Validation) -> Iterator[tuple[Any, bool]]:
        """The batches, and whether each is a dummy for one that this rank gave up waiting for."""
        ...

    def breaks_off(self, *, missed: bool, last: bool = False) -> bool:
        """Whether all ranks end the validation here; called on all of them before the same batches.

        `last`: after all of them, since some rank has missed one.
        """
        ...


class Undisturbed:
    """A validation that nothing ends."""

    def over(self, validation: Validation) -> Iterator[tuple[Any, bool]]:
        """All batches as they come."""
        return ((data, False) for data in validation.batches())

    def breaks_off(self, *, missed: bool, last: bool = False) -> bool:
        """Never."""
        return False


@torch.no_grad()
def validate(
    model: nn.Module, validation: Validation, passes: Passes, ranks: Ranks, breaks: Breaks | None = None
) -> dict[str, float] | None:
    """Mean loss in nats, accuracy or bits per byte if they apply, the sums over all samples that the loss names, and
    the values of metrics; None if it was broken off."""
    breaks, loss_fn, objects = breaks or Undisturbed(), validation.loss_fn, None
    if validation.objects:
        _check_no_pipeline(passes)
        objects = OutputMetrics(validation.objects, ranks.device, counts=passes.parallel.answers_for_loss)
        loss_fn = objects.watch(loss_fn)
    average_buffers(model, passes.parallel.mesh)
    sums, named = torch.zeros(SUMS, dtype=torch.float64, device=ranks.device), dict[str, torch.Tensor]()
    any_missed = False
    modes = {module: module.training for module in model.modules()}
    rows = iter(validation.rows()) if validation.rows is not None else itertools.repeat(None)
    model.eval()
    try:
        for data, missed in breaks.over(validation):
            any_missed = any_missed or missed
            if breaks.breaks_off(missed=any_missed):
                return None
            known = next(rows, None)
            if objects is not None:
                objects.begin_batch(data, known)
            found = passes.evaluate(model, data, loss_fn, known)
            sums += found.sums
            for name, value in found.metrics.items():
                named[name] = named.get(name, 0) + value
    finally:
        for module, training in modes.items():
            module.training = training
    total, count, correct, answered, gave_up = ranks.sum(torch.cat([sums, sums.new_tensor([any_missed])])).tolist()
    if gave_up and breaks.breaks_off(missed=any_missed, last=True):
        return None
    metrics = {"loss": total / count if count else math.nan}
    if answered:
        metrics["accuracy"] = correct / answered
    if validation.bytes_per_token:
        # Shannon: nats a token / ln 2 = bits a token, spread over the bytes that a token stands for.
        metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / validation.bytes_per_token
    computed = objects.compute(ranks) if objects is not None else {}
    _check_names(computed, "run.validation(metrics=...)")
    return {**computed, **_sum_named(ranks, named), **metrics}


def _check_no_pipeline(passes: Passes) -> None:
    if passes.parallel.pipeline is not None:
        raise UserError(
            "run.validation(metrics=...) takes no metric objects in a pipeline (parallel.pp > 1), of which the last "
            "stage alone has outputs.\n"
            "  To do: hand sums back by shardway.LossSum(total, count, metrics={...}), or set parallel.pp = 1."
        )


_TAKEN = {"loss": "", "bits_per_byte": "", "accuracy": "LossSum(correct=...)", "step": "", "seconds": "", "time": ""}
"""Names that results and events have already -> what to use instead."""


def _check_names(names: Iterable[str], where: str) -> None:
    for name in names:
        if name in _TAKEN:
            raise UserError(
                f'{where} holds "{name}", a name that the results of a validation have already.\n'
                f"  To do: {_TAKEN[name] or 'choose another name'}."
            )


def _sum_named(ranks: Ranks, own: dict[str, torch.Tensor]) -> dict[str, float]:
    """Sums by name over all ranks; a rank may lack a name. Raises UserError for a name that is taken."""
    _check_names(own, "LossSum(metrics=...) of the loss function")
    every = ranks.gather({name: float(value) for name, value in own.items()})
    names = dict.fromkeys(name for each in every for name in each)
    return {name: math.fsum(each.get(name, 0.0) for each in every) for name in names}


# --- earlier validations of the run


@dataclass(frozen=True)
class Validated:
    """`results`: metrics by step. `tried_last`: whether the validation after the step where the run resumes was made,
    or ended in an error, and would again."""

    results: Mapping[int, dict[str, float]] = field(default_factory=dict)
    tried_last: bool = False


def recall_validations(session: Session, step: int) -> Validated:
    """The validations up to the step where the run resumes; called on all ranks together."""
    return session.ranks.ask_first(lambda: _read(session.directory, step))


def _read(run: RunDir, step: int) -> Validated:
    results, tried = dict[int, dict[str, float]](), False
    for rank in run.ranks_with_events():
        names = ("started", "rolled_back", "validation", "validation_failed")
        for event in drop_undone(run.all_events(rank, names)):
            if event["event"] not in names[2:] or event.get("step", 0) > step:
                continue
            tried = tried or event["step"] == step
            if event["event"] == "validation":
                results[event["step"]] = read_validation(event).metrics
    return Validated(results, tried)
