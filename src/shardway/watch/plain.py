"""A run's progress as plain lines, for output that is not a terminal.

Invariant: the first and the last step of an attempt get a line whatever the clock says; between them there is at most
one step line every `every_s` seconds, fewer as the run grows longer if `longest_s` allows it. A step without a line
costs next to nothing. This module neither prints nor sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shardway.rundir.events import Event
from shardway.watch.facts import ValidatedEvent, read_ending, read_start, whole
from shardway.watch.progress import RunProgress
from shardway.watch.words import (
    StepLabel,
    describe,
    render_ending,
    render_loss,
    render_machine,
    render_number,
    render_numerics,
    render_rate,
    render_start,
    render_time,
    render_total,
    render_unit,
    render_validation,
)

_SHARE = 0.02
"""Interval between step lines as a share of the attempt's time, within the two bounds."""


class PlainLines:
    """Turns events into lines; each line is about one thing and starts with the step where there is one."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = 5.0,
        validations: Sequence[ValidatedEvent] = (),
        longest_s: float = 5.0,
    ) -> None:
        self._clock = clock
        self._every_s, self._longest_s = every_s, max(every_s, longest_s)
        self._progress = RunProgress(validations)
        self._began = self._next_line = clock()
        self._is_pending = False

    def lines(self, event: Event) -> list[str]:
        """The lines for this event: none for most steps."""
        ends = event["event"] in ("finished", "stopped", "failed", "restarted", "rolled_back")
        before = self._flush() if ends else []
        self._progress.update(event)
        return before + self._lines(event)

    def _lines(self, event: Event) -> list[str]:
        match event["event"]:
            case "started":
                return self._start(event)
            case "step":
                return self._step()
            case "validation":
                return [f"{self._place()}  validation  {self._validation()}"]
            case "finished" | "stopped" | "failed":
                return [render_ending(read_ending(event))]
        return self._news(event)

    def _news(self, event: Event) -> list[str]:
        line = describe(event)
        if line is None:
            return []
        places = {
            StepLabel.RUN: f"{self._place()}  ",
            StepLabel.EVENT: f"step {whole(event, 'step') or 0}  ",
            StepLabel.NONE: "",
        }
        return [places[line.place] + line.words]

    def _start(self, event: Event) -> list[str]:
        start = read_start(event)
        self._began = self._next_line = self._clock()
        self._is_pending = False
        unit = "tokens" if start.counts_tokens else "samples"
        portion = start.tokens_per_step if start.counts_tokens else start.samples_per_step
        first = f"{render_start(start)}  {render_machine(start)}, {render_total(portion)} {unit} a step"
        return [first, *filter(None, [render_numerics(start)])]

    def _step(self) -> list[str]:
        self._is_pending = True
        last = self._progress.step == self._progress.total_steps
        return self._flush() if last or self._clock() >= self._next_line else []

    def _flush(self) -> list[str]:
        """The line of the last step, unless it was printed."""
        if not self._is_pending:
            return []
        self._is_pending, now = False, self._clock()
        self._next_line = now + min(self._longest_s, max(self._every_s, _SHARE * (now - self._began)))
        return [self._step_line()]

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
        return render_validation(validation, self._progress.monitor.metric) + best
