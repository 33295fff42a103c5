"""A run's progress as plain lines, for output that is not a terminal.

Invariant: the first and the last step of an attempt get a line whatever the clock says; between them at most one
step line every `every_s` seconds. This module must not print nor sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shardway.rundir.events import Event
from shardway.watch.facts import (
    read_ending,
    read_failed_save,
    read_fault,
    read_restart,
    read_save,
    read_set_aside,
    read_start,
    text,
    whole,
)
from shardway.watch.guarded import GUARDED, render_guarded
from shardway.watch.progress import Progress
from shardway.watch.words import (
    one_line,
    render_ending,
    render_failed_save,
    render_fault,
    render_loss,
    render_machine,
    render_number,
    render_rate,
    render_restart,
    render_save,
    render_set_aside,
    render_start,
    render_time,
    render_total,
    render_unit,
    render_validation,
)


class PlainLines:
    """Turns events into lines; each tells of one thing and starts with the step where there is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, every_s: float = 5.0) -> None:
        self._clock = clock
        self._every_s = every_s
        self._progress = Progress()
        self._next_line = clock()
        self._untold: str | None = None

    def lines(self, event: Event) -> list[str]:
        """The lines that this event is worth: none for most steps."""
        self._progress.update(event)
        match event["event"]:
            case "started":
                return self._start(event)
            case "step":
                return self._step()
            case "validation":
                return [f"{self._place()}  validation  {self._validation()}"]
            case "saved":
                return [f"{self._place()}  {render_save(read_save(event))}"]
            case "save_failed":
                return [f"{self._place()}  {render_failed_save(read_failed_save(event))}"]
            case "background_off":
                return [f"saves are waited for: {text(event, 'reason')}"]
            case "recorded_late":
                return [f"{self._place()}  events are written again; until now: {text(event, 'reason')}"]
            case "set_aside":
                return [render_set_aside(read_set_aside(event))]
            case "restarted":
                return [*self._flush(), render_restart(read_restart(event))]
            case "data_skipped" | "skip_too_late":
                return [f"{self._place()}  {one_line(text(event, 'reason'))}"]
            case "deadline":
                return [f"stops in time: {one_line(text(event, 'reason'))}"]
            case "validation_skipped":
                reason = one_line(text(event, "reason"))
                return [f"{self._place()}  no validation, which would not end in time: {reason}"]
            case "validation_stopped":
                return [f"{self._place()}  the validation was broken off: {one_line(text(event, 'reason'))}"]
            case "step_voided":
                return [f"{self._place()}  the step after it had no data in time and does not count"]
            case name if name in GUARDED:
                return [f"step {whole(event, 'step') or 0}  {render_guarded(event)}"]
            case "fault":
                return [render_fault(read_fault(event))]
            case "finished" | "stopped" | "failed":
                return [*self._flush(), render_ending(read_ending(event))]
        return []

    def _start(self, event: Event) -> list[str]:
        start = read_start(event)
        self._next_line = self._clock()
        self._untold = None
        unit = "tokens" if start.counts_tokens else "samples"
        portion = start.tokens_per_step if start.counts_tokens else start.samples_per_step
        return [f"{render_start(start)}  {render_machine(start)}, {render_total(portion)} {unit} a step"]

    def _step(self) -> list[str]:
        self._untold = self._step_line()
        last = self._progress.step == self._progress.total_steps
        return self._flush() if last or self._clock() >= self._next_line else []

    def _flush(self) -> list[str]:
        """The line of the last step, unless it was told."""
        if self._untold is None:
            return []
        line, self._untold = self._untold, None
        self._next_line = self._clock() + self._every_s
        return [line]

    def _place(self) -> str:
        total = self._progress.total_steps
        if total is None:
            return f"step {self._progress.step}"
        return f"step {self._progress.step:>{len(str(total))}}/{total}"

    def _step_line(self) -> str:
        now = self._progress
        rate = render_rate(now).rjust(len("51.2k ") + len(render_unit(now.start)))
        return (
            f"{self._place()}  loss {render_loss(now.loss):>7}  grad {render_number(now.last('grad_norm'), '.3f'):>6}"
            f"  lr {render_number(now.last('lr'), '.2e')}  {rate}  {render_time(now.seconds_left)} left"
        )

    def _validation(self) -> str:
        validation = self._progress.validations[-1]
        best = "  best so far" if validation is self._progress.best_validation else ""
        return render_validation(validation) + best
