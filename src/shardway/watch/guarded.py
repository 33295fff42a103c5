"""What the guard of a run has seen, in one line each.

Invariant: as in `watch.words`: whatever an event holds, there is a line of plain text for it, and reading never raises.
This module must not know colours or widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardway.watch.facts import number, text, whole
from shardway.watch.words import one_line, render_loss, render_number


def _transient(event: Mapping[str, Any]) -> str:
    return f"passes repeated: {_numbers(event)} the first time, finite the second (a fault that has passed)"


def _step_skipped(event: Mapping[str, Any]) -> str:
    return f"no update: {_numbers(event)}; {_count(event, 'in_a_row')} skipped in a row, its samples are in the events"


def _corruption(event: Mapping[str, Any]) -> str:
    outcome = "two of three agreed" if event.get("decided") is True else "all three differed"
    return (
        f"the same passes gave different results on rank {_list(event, 'ranks')} ({_list(event, 'hosts')}): {outcome}"
    )


def _replica_differs(event: Mapping[str, Any]) -> str:
    return f"copies of weights differ on rank {_list(event, 'ranks')} ({_list(event, 'hosts')})"


def _spike(event: Mapping[str, Any]) -> str:
    what = "gradient norm" if text(event, "of") == "grad_norm" else text(event, "of") or "n/a"
    value, deviations = render_number(number(event, "value"), ".4g"), render_number(number(event, "deviations"), ".1f")
    return f"spike: {what} {value} is {deviations} deviations above the last ones"


def _rolled_back(event: Mapping[str, Any]) -> str:
    first, last = _count(event, "first"), _count(event, "last")
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    left_out = f"{_count(event, 'samples')} samples (positions {_count(event, 'start')} to {_count(event, 'end')})"
    return f"the run went back to here after a spike in {steps} and leaves out {left_out}"


GUARDED: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {
        "transient": _transient,
        "step_skipped": _step_skipped,
        "corruption": _corruption,
        "replica_differs": _replica_differs,
        "spike": _spike,
        "rolled_back": _rolled_back,
    }
)
"""Name of an event -> its line."""


def render_guarded(event: Mapping[str, Any]) -> str:
    """The line of an event of the guard; "" for any other."""
    render = GUARDED.get(str(event.get("event")))
    return one_line(render(event)) if render is not None else ""


def _numbers(event: Mapping[str, Any]) -> str:
    """JSON has no form for a number that is not finite: it is null."""
    loss, norm = number(event, "loss"), number(event, "grad_norm")
    shown = "not finite" if loss is None else render_loss(loss)
    return f"loss {shown}, gradient norm {'not finite' if norm is None else render_number(norm, '.3f')}"


def _count(event: Mapping[str, Any], key: str) -> str:
    found = whole(event, key)
    return "n/a" if found is None else str(found)


def _list(event: Mapping[str, Any], key: str) -> str:
    found = event.get(key)
    return ", ".join(str(each) for each in found) if isinstance(found, list) and found else "n/a"
