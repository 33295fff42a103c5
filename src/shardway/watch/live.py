"""Live view of a run in a terminal: one panel, redrawn; other outputs use `PlainLines`.

Invariant: a render reads no file and costs little, since it shares its cores with the training; everything shown was
folded when its event came. This module does not print; the owner of the terminal does.
"""

from __future__ import annotations

import math
import shlex
import textwrap
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from shardway.rundir.events import Event
from shardway.watch.advice.events import FoldedEvents
from shardway.watch.advice.findings import Advice
from shardway.watch.facts import ValidatedEvent, measured, read_ending, read_start
from shardway.watch.progress import RunProgress
from shardway.watch.top_hardware import HardwareUse, render_use
from shardway.watch.words import (
    Severity,
    describe,
    one_line,
    render_ending,
    render_guarded,
    render_loss,
    render_machine,
    render_number,
    render_numerics,
    render_rate,
    render_sampled,
    render_size,
    render_start,
    render_time,
    render_validation,
)

_MESSAGES = 4
Words = tuple[str, str]  # text and its style, as `rich.text.Text.assemble` takes them
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-:=+*#"
_STYLES = {Severity.NEWS: "", Severity.WARNING: "yellow", Severity.ERROR: "red"}
_STATE_STYLES = {"starting": "dim", "running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red"}


class GrowingCurve:
    """Means of equally many consecutive values, at most `capacity` (even); when full, neighbours are joined."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._stride = 1
        self._means: list[tuple[int, float]] = []
        self._pending: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Append a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self._means.append((step, fmean(self._pending)))
            self._pending.clear()
        if len(self._means) == self._capacity:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(step, (left + right) / 2) for (_, left), (step, right) in pairs]
            self._stride *= 2

    def undo_after(self, step: int) -> None:
        self._means = [mean for mean in self._means if mean[0] <= step]
        self._pending.clear()

    def columns(self, width: int) -> list[float]:
        """The curve as at most `width` means of equal parts, oldest first."""
        values = [value for _, value in self._means]
        parts = min(width, len(values))
        ends = [len(values) * part // parts for part in range(parts + 1)] if parts else []
        return [fmean(values[first:end]) for first, end in pairwise(ends)]


class Sparkline:
    """A curve as one row of blocks, as wide as the room allows, up to `width`."""

    def __init__(self, curve: GrowingCurve, width: int = 40, style: str = "cyan") -> None:
        self._curve = curve
        self._width = width
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = _ASCII_BLOCKS if options.ascii_only else _BLOCKS
        values = self._curve.columns(min(self._width, options.max_width))
        low, high = min(values, default=0.0), max(values, default=0.0)
        scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
        row = "".join(blocks[round((value - low) * scale)] for value in values)
        yield Segment(row, Style.parse(self._style))


class LiveRow:
    """One line: fixed text, a part that fills the room left, fixed text. A table would take three times as long."""

    def __init__(self, before: Text, flexible: RenderableType, after: Text) -> None:
        self._before = before
        self._flexible = flexible
        self._after = after

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(1, options.max_width - self._before.cell_len - self._after.cell_len)
        yield from self._before.render(console)
        yield from console.render_lines(self._flexible, options.update(width=room, height=1), pad=True)[0]
        yield from self._after.render(console)
        yield Segment.line()


_LABEL = 12  # columns of a label
_ADVICE_LINES = 2  # of each part of a piece of advice


class LiveAdvice:
    """The first piece of advice: what was found, what to change and how to check it, two lines each at most."""

    def __init__(self, advice: Advice, more: int) -> None:
        rest = f" ({more} more: shardway status)" if more else ""
        self._parts = (
            ("advice", advice.evidence, "yellow"),
            ("", f"to do: {advice.do}", "default"),
            ("", f"check: {advice.check}{rest}", "dim"),
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(20, options.max_width - _LABEL)
        dots = " ..." if options.ascii_only else " …"
        for label, words, style in self._parts:
            lines = textwrap.wrap(one_line(words), room, max_lines=_ADVICE_LINES, placeholder=dots)
            for line in lines:
                yield Text.assemble((f"{label:<{_LABEL}}", "dim"), (line, style), no_wrap=True, overflow="ellipsis")
                label = ""


class LiveView:
    """Folds events and renders the state of the run; `clock` gives Unix seconds, `validations` are those of attempts
    before. `folded`: its events, for others that read them too."""

    def __init__(
        self,
        name: str,
        directory: str,
        clock: Callable[[], float] = time.time,
        validations: Sequence[ValidatedEvent] = (),
    ) -> None:
        self._name = one_line(name)
        self._directory = one_line(directory)
        self._clock = clock
        self.folded = FoldedEvents(RunProgress(validations))
        self._progress = self.folded.progress
        self._losses = GrowingCurve()
        self._messages: deque[Text] = deque(maxlen=_MESSAGES)
        self._hardware: list[Words] = []
        self._advice: LiveAdvice | None = None

    def update(self, event: Event) -> None:
        self.folded.update(event)
        match event["event"]:
            case "step":
                self._losses.add(self._progress.step, measured(event, "loss"))
            case "started":
                self._losses.undo_after(self._progress.step)
                start = read_start(event)
                for words in filter(None, (render_start(start), render_numerics(start))):
                    self._report(words, event)
            case "finished" | "stopped" | "failed":
                self._report(render_ending(read_ending(event)), event, _STATE_STYLES[event["event"]])
            case "rolled_back":
                self._losses.undo_after(self._progress.step)
                self._report(render_guarded(event), event, _STYLES[Severity.WARNING])
            case _ if (line := describe(event)) is not None:
                self._report(line.words, event, _STYLES[line.weight])

    def note(self, text: str) -> None:
        """Show a message that is not an event: "stopping after this step"."""
        self._report(one_line(text), {"event": "note", "time": self._clock()}, "yellow")

    def show_hardware(self, use: HardwareUse | None) -> None:
        """From now on show this use of accelerators and cores; it has a line once there is something to show."""
        if use is None or not (words := render_use(use)):
            return
        unused = len(use.gpus) - use.used
        self._hardware = [(words, "")]
        if unused:
            self._hardware.append((f"  {unused} not used: shardway status {shlex.quote(self._directory)}", "yellow"))

    def show_advice(self, advice: Sequence[Advice]) -> None:
        """From now on show the first of these, or none."""
        self._advice = LiveAdvice(advice[0], len(advice) - 1) if advice else None

    def render(self) -> RenderableType:
        """The view at this moment; call it for every refresh."""
        now, start = self._progress, self._progress.start
        state = now.ending.state if now.ending else "running" if now.attempts else "starting"
        style = _STATE_STYLES[state]
        machine = render_machine(start) if start else "waiting for the ranks to start"
        header = Text(f"{machine}  ·  {self._directory}", "dim", no_wrap=True, overflow="ellipsis")
        share = now.step / now.total_steps if now.total_steps else 0.0
        bar = ProgressBar(total=now.total_steps or 1, completed=now.step, complete_style=style, finished_style="green")
        reached = Text.assemble((f"  {now.step}/{now.total_steps or '?'}", "bold"), f"  {share:4.0%}")
        blank = [Text() for _ in range(_MESSAGES - len(self._messages))]
        rows = (header, Text(), LiveRow(Text(), bar, reached), Text(), self._facts(), Text())
        return Panel(
            Group(*rows, *self._messages, *blank),
            title=Text(self._name, "bold"),
            title_align="left",
            subtitle=Text(state, style),
            subtitle_align="right",
            border_style="dim",
            padding=(0, 1),
        )

    def _report(self, text: str, event: Event, style: str = "") -> None:
        start = self._progress.start
        since = max(0.0, event.get("time", 0.0) - start.time) if start else 0.0
        words = Text(f"{render_time(since):>7}  ", "dim", no_wrap=True, overflow="ellipsis")
        self._messages.append(words.append(text, style or "default"))

    def _facts(self) -> RenderableType:
        smooth, last = render_loss(self._progress.smooth_loss), render_loss(self._progress.loss)
        words = _fact("loss", (f"{smooth:<7}", "bold"), (f"  last {last:<7}  ", "dim"))
        return Group(
            LiveRow(words, Sparkline(self._losses), Text()),
            _fact("validation", *self._validation()),
            *([_fact("sample", (render_sampled(self._progress.sampled), ""))] if self._progress.sampled else []),
            _fact("speed", *self._speed()),
            _fact("time", *self._time()),
            _fact("last save", *self._save()),
            *([_fact("hardware", *self._hardware)] if self._hardware else []),
            *([self._advice] if self._advice else []),
        )

    def _validation(self) -> list[Words]:
        validations, best = self._progress.validations, self._progress.best_validation
        metric = self._progress.monitor.metric
        if not validations:
            return [("none yet", "dim")]
        words = [(f"{render_validation(validations[-1], metric)}  at step {validations[-1].step}", "")]
        if validations[-1] is best:
            return [*words, ("  ★ best", "green")]
        return [*words, (f"  best {render_validation(best, metric)} at step {best.step}", "dim")] if best else words

    def _speed(self) -> list[Words]:
        if not self._progress.recent:
            return [("none yet", "dim")]
        seconds = render_number(self._progress.typical("seconds"), ".3g")
        return [(render_rate(self._progress), ""), (f"  {seconds} s/step", "dim")]

    def _time(self) -> list[Words]:
        attempt, elapsed_s = self._progress.attempt, None
        if attempt is not None:
            since_s = 0.0 if attempt.ending else max(0.0, self._clock() - attempt.last_time)
            elapsed_s = attempt.wall_s + since_s
        left = "" if self._progress.ending else f"{render_time(self._progress.seconds_left)} left  "
        return [(left, ""), (f"{render_time(elapsed_s)} elapsed", "dim")]

    def _save(self) -> list[Words]:
        if not self._progress.saves:
            return [("none yet", "dim")]
        save = self._progress.saves[-1]
        ago = render_time(max(0.0, self._clock() - save.time))
        return [(f"step {save.step}, {ago} ago", ""), (f"  {render_size(save.size_bytes)}", "dim")]


def _fact(label: str, *words: Words) -> Text:
    return Text.assemble((f"{label:<{_LABEL}}", "dim"), *words, no_wrap=True, overflow="ellipsis")
