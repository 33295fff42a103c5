"""What an event tells a person, in a line: the same words in the live view and in plain lines.

Invariant: as in `watch.words`: whatever an event holds, there is a line of plain text for it, and reading never raises.
This module must not know colours or widths, nor what was told before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from shardway.rundir.events import Event
from shardway.watch.facts import read_failed_save, read_fault, read_restart, read_save, read_set_aside, text, whole
from shardway.watch.guarded import GUARDED, render_guarded
from shardway.watch.words import (
    one_line,
    render_failed_save,
    render_fault,
    render_restart,
    render_save,
    render_set_aside,
)


class Severity(Enum):
    """How much a line matters."""

    NEWS = auto()
    WARNING = auto()
    ERROR = auto()


class StepLabel(Enum):
    """Which step a line belongs to: that at which the run is when it is told, that of the event, none."""

    RUN = auto()
    EVENT = auto()
    NONE = auto()


@dataclass(frozen=True)
class EventText:
    """A line, how much it matters, and the step it belongs to."""

    words: str
    weight: Severity
    place: StepLabel


Words = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class _Kind:
    words: Words
    weight: Severity = Severity.WARNING
    place: StepLabel = StepLabel.RUN


def _reason(before: str = "") -> Words:
    return lambda event: before + (one_line(text(event, "reason")) or "n/a")


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "saved": _Kind(lambda event: render_save(read_save(event)), Severity.NEWS),
        "save_failed": _Kind(lambda event: render_failed_save(read_failed_save(event))),
        "save_skipped": _Kind(lambda event: f"no save: that of step {whole(event, 'saving') or 0} is still written"),
        "background_off": _Kind(_reason("saves are waited for: "), place=StepLabel.NONE),
        "recorded_late": _Kind(_reason("events are written again; until now: ")),
        "checkpoint_quarantined": _Kind(lambda event: render_set_aside(read_set_aside(event)), place=StepLabel.NONE),
        "local_checkpoints_ignored": _Kind(_reason("what the nodes have saved is left out: "), place=StepLabel.NONE),
        "restarted": _Kind(lambda event: render_restart(read_restart(event)), place=StepLabel.NONE),
        "data_skipped": _Kind(_reason()),
        "skip_too_late": _Kind(_reason()),
        "deadline": _Kind(_reason("stops in time: "), Severity.NEWS, StepLabel.NONE),
        "validation_skipped": _Kind(_reason("no validation, which would not end in time: ")),
        "validation_stopped": _Kind(_reason("the validation was broken off: ")),
        "validation_failed": _Kind(_reason("the validation failed: ")),
        "loss_depends_on_cut": _Kind(_reason()),
        "gradients_by_hand": _Kind(_reason()),
        "data_order_noted": _Kind(_reason()),
        "step_discarded": _Kind(lambda event: "the step after it had no data in time and does not count"),
        "fault": _Kind(lambda event: render_fault(read_fault(event)), Severity.ERROR, StepLabel.NONE),
        **{name: _Kind(render_guarded, place=StepLabel.EVENT) for name in GUARDED},
    }
)


def describe(event: Event) -> EventText | None:
    """What an event tells; None for one that is no news of its own, such as a step."""
    kind = _KINDS.get(event["event"])
    return EventText(kind.words(event), kind.weight, kind.place) if kind is not None else None
