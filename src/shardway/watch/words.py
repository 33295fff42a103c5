"""Phrases for a run and for each of its events (plain ASCII, one line each), and its progress as plain lines.

Invariants:
- Whatever an event holds, there is a line of plain text for it; reading never raises.
- An unknown value reads "n/a"; a string from an event stays on one line.
- Plain lines: the first and the last step of an attempt get one whatever the clock says; between them there is at most
  one step line every `every_s` seconds, fewer as the run grows longer if `longest_s` allows it. A step without a line
  costs next to nothing. This module neither prints nor sleeps.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from shardway.rundir.events import Event
from shardway.rundir.names import LOCAL, SkippedRange
from shardway.units import UNKNOWN, render_clock, render_count, render_plural
from shardway.watch.facts import (
    EndedEvent,
    Evaluation,
    Logged,
    SampledEvent,
    Save,
    Start,
    ValidatedEvent,
    number,
    read_ending,
    read_fault,
    read_sampled,
    read_save,
    read_start,
    text,
    whole,
)
from shardway.watch.progress import RunProgress, TimeAccount

ACCOUNT_WORDS = {
    "productive_s": "steps that hold",
    "lost_s": "steps undone or unfinished",
    "start_s": "start-up",
    "load_s": "loading a checkpoint",
    "data_s": "waiting for data",
    "save_s": "saving",
    "validation_s": "validation",
    "script_s": "the script's own",
    "end_s": "ending",
    "idle_s": "between attempts",
    "unaccounted_s": "not accounted for",
}
"""Row of an account -> its label."""

REMEDIES = {"data_s": ': data.workers = "auto", or more'}  # row of an account -> a remedy, where one is known
_SHOWN, _WORTH_A_REMEDY = 0.01, 0.05  # share of the time from which a row is named, and from which its remedy is


def one_line(text: str) -> str:
    """The string without line breaks and control characters."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))


def align_cells(rows: Sequence[Sequence[str]], *, to_the_right: bool = False) -> list[str]:
    """The rows of a table as lines, each column as wide as its longest cell; `to_the_right`: all but the first column
    end below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if to_the_right and place else str.ljust for place in range(len(widths))]
    lines = (zip(row, widths, sides, strict=True) for row in rows)
    return ["  ".join(side(cell, width) for cell, width, side in line).rstrip() for line in lines]


def pack_parts(parts: Sequence[str], width: int, indent: str = "  ") -> list[str]:
    """Parts side by side, two spaces apart, on as many lines as a width takes; one that is longer by itself is
    folded."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines += fold_line(f"{indent}{part}", width)
    return lines


_LABELLED = re.compile(r"  \S.{9} {2}(?=\S)")
"""A label of 12 characters before what is said of it."""


def fold_line(line: str, width: int) -> list[str]:
    """A line in several that fit a width, the later ones below its text: that of a label where it has one."""
    indent = len(line) - len(line.lstrip())
    below = 14 if _LABELLED.match(line) or indent >= 14 else indent + 2
    return textwrap.wrap(
        line, max(width, 20), subsequent_indent=" " * min(below, width // 2), break_on_hyphens=False
    ) or [line]


def render_loss(loss: float | None) -> str:
    """Four decimals, or four significant digits where that would hide a small loss."""
    if loss is None or not math.isfinite(loss):
        return UNKNOWN if loss is None else str(loss)
    return f"{loss:.4f}" if loss == 0 or abs(loss) >= 0.01 else f"{loss:.3e}"


def render_number(value: float | None, form: str) -> str:
    """A number in a format such as ".2e"."""
    return UNKNOWN if value is None else format(value, form)


def render_total(total: float | None) -> str:
    """Three significant digits and a suffix: 1264512 -> "1.26M"."""
    return UNKNOWN if total is None or not math.isfinite(total) else render_count(total)


def render_time(seconds: float | None) -> str:
    """2:41, or n/a."""
    return UNKNOWN if seconds is None or not math.isfinite(seconds) else render_clock(seconds)


def render_set_back(back_s: float) -> str:
    """ "dates in the events go back by 1:00:00 (a clock was set): ...", or ""."""
    if back_s <= 0:
        return ""
    return f"dates in the events go back by {render_time(back_s)} (a clock was set): times leave that out"


def render_events_end(end: int | None, step: int) -> str:
    """ "end at step 57, the status at 100: what came after is not recorded", or ""."""
    return "" if end is None else f"end at step {end:,}, the status at {step:,}: what came after is not recorded"


def render_size(size_bytes: float | None) -> str:
    """Three significant digits and a binary unit: 14889779 -> "14.2 MiB"."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return UNKNOWN
    power = next((power for power in (4, 3, 2, 1) if abs(size_bytes) >= 1024**power), 0)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    scaled = size_bytes / 1024**power
    return f"{scaled:.0f} {unit}" if power == 0 or scaled >= 100 else f"{scaled:.3g} {unit}"


def render_unit(start: Start | None) -> str:
    """The unit that a run's speed is measured in."""
    return "tokens/s" if start and start.counts_tokens else "samples/s"


def render_rate(progress: RunProgress) -> str:
    """Typical speed of the last steps: "51.2k tokens/s"."""
    unit = render_unit(progress.start)
    return f"{render_total(progress.typical(unit.replace('/', '_per_')))} {unit}"


def render_machine(start: Start) -> str:
    """ "1.26M parameters, 2 ranks on cpu"."""
    device = one_line(start.device) or UNKNOWN
    return f"{render_total(start.parameters)} parameters, {render_plural(start.world, 'rank')} on {device}"


def render_start(start: Start) -> str:
    """How an attempt begins: "resumed from step 500 (step-000000500)", or what the run is."""
    if start.step:
        base = f"resumed from step {start.step}" + (f" ({one_line(start.checkpoint)})" if start.checkpoint else "")
        return f"{base}, changed since: {one_line(', '.join(start.changes))}" if start.changes else base
    return f"started, {render_plural(start.total_steps, 'step')}"


def render_numerics(start: Start) -> str:
    """ "computes in fp32, without TF32, not compiled (a CPU)", each with its reason; "" where it was not recorded."""
    rows = [
        (_NUMERICS[key](value), origin.removeprefix("derived: "))
        for key, value, origin in start.numerics
        if key in _NUMERICS
    ]
    groups = [
        (reason, [words for words, _ in group]) for reason, group in itertools.groupby(rows, key=lambda row: row[1])
    ]
    return one_line(", ".join(f"{', '.join(words)} ({reason})" for reason, words in groups))


_NUMERICS: Mapping[str, Callable[[Any], str]] = {
    "precision.compute": lambda value: f"computes in {value}",
    "precision.tf32": lambda value: "with TF32" if value is True else "without TF32",
    "train.compile": lambda value: "not compiled" if value == "off" else f"{value} compiled",
}
"""Key -> the phrase for its value."""


def render_validation(validation: ValidatedEvent, metric: str = "loss") -> str:
    """ "loss 2.4012  1.830 bits/byte  98.51 % correct  f1 0.8125": a script's own metrics come last; among them the
    monitored one is first."""
    parts = [f"loss {render_loss(validation.loss)}"]
    if validation.bits_per_byte is not None:
        parts.append(f"{validation.bits_per_byte:.3f} bits/byte")
    if validation.accuracy is not None:
        parts.append(f"{validation.accuracy:.2%} correct")
    others = validation.others
    first = {metric: others[metric]} if metric in others else {}
    return "  ".join((*parts, *_render_named({**first, **others})))


def render_logged(logged: Logged) -> str:
    """ "accuracy 0.931  lag 12  at step 400"."""
    return "  ".join((*_render_named(logged.values), f"at step {logged.step}"))


def _render_named(values: Mapping[str, float]) -> list[str]:
    shown = [f"{one_line(name)} {value:.4g}" for name, value in list(values.items())[:_MOST_NAMED]]
    return [*shown, f"and {len(values) - _MOST_NAMED} more"] if len(values) > _MOST_NAMED else shown


_MOST_NAMED = 5  # how many of a script's values a line shows


def render_monitored(metric: str, value: float) -> str:
    """ "loss 2.4012", "f1 0.8125", "accuracy 98.51 %": the value that a validation is compared by."""
    return f"accuracy {value:.2%}" if metric == "accuracy" else f"{one_line(metric)} {render_loss(value)}"


def render_account(account: TimeAccount) -> str:
    """ "93 % of 1:02:41, then saving (4 %); start-up 0:38": the productive share of the time after start-up, the
    largest other row with a remedy if one is known, and start-up by itself."""
    running_s = account.wall_s - account.start_s
    is_shown = account.start_s > 0 and account.start_s >= _SHOWN * account.wall_s
    started = f"start-up {render_time(account.start_s)}" if is_shown else ""
    if running_s <= 0:
        return f"nothing yet; {started}" if started else f"{UNKNOWN} of {render_time(account.wall_s)}"
    words = f"{render_share(account.productive_s, running_s)} of {render_time(running_s)}"
    rest = {name: seconds for name, seconds in account.rows.items() if name not in ("productive_s", "start_s")}
    name, seconds = max(rest.items(), key=lambda row: row[1])
    if seconds >= _SHOWN * running_s:
        remedy = REMEDIES.get(name, "") if seconds >= _WORTH_A_REMEDY * running_s else ""
        words += f", then {ACCOUNT_WORDS[name]} ({render_share(seconds, running_s)}{remedy})"
    return f"{words}; {started}" if started else words


def render_share(part: float, whole: float) -> str:
    """ "93 %", with a decimal where the part is small or nearly all, or n/a."""
    if whole <= 0:
        return UNKNOWN
    percent = 100 * part / whole
    return f"{percent:.1f} %" if 0 < percent < 10 or 99 < percent < 100 else f"{percent:.0f} %"


def _quarantined(event: Mapping[str, Any]) -> str:
    name, reason, kept_as = text(event, "name"), text(event, "reason"), text(event, "kept_as")
    if not kept_as:
        return one_line(f"{name} on the disks of the nodes was not used and removed ({reason})")
    what = "undone" if kept_as.startswith("undone-") else "damaged"
    return one_line(f"{name} is {what} ({reason}) and kept as {kept_as}")


def render_skipped(left_out: SkippedRange) -> str:
    """ "8000 samples (positions 96000 to 104000), back to step 1200: a spike in steps 1298 to 1300"."""
    span = f"positions {left_out.start} to {left_out.end}"
    return one_line(f"{left_out.samples} samples ({span}), back to step {left_out.back_to}: {left_out.reason}")


def render_save(save: Save) -> str:
    """ "saved step-000000100  14.2 MiB in 0.3 s"; says so if it is on the nodes' own disks."""
    took = "" if save.seconds is None else f" in {save.seconds:.1f} s"
    where = " on the nodes" if save.tier == LOCAL else ""
    return f"saved {one_line(save.name)}{where}  {render_size(save.size_bytes)}{took}"


def _restarted(event: Mapping[str, Any]) -> str:
    step, failures = whole(event, "step"), whole(event, "failures")
    base = f"from step {step}" if step else "from the start"
    count = "" if failures in (None, 1) else f" ({failures} failures by now)"
    return one_line(f"starting again {base}{count}: {text(event, 'reason')}")


def render_ending(ending: EndedEvent) -> str:
    """ "stopped at step 120: SIGTERM"."""
    place = "" if ending.step is None else f" at step {ending.step}"
    return f"{ending.state}{place}" + (f": {one_line(ending.reason)}" if ending.reason else "")


def list_last_lines(
    directory: str,
    state: str,
    reason: str,
    *,
    report: str,
    nothing_done: bool,
    status: Mapping[str, Any],
    by_hand: bool,
) -> list[str]:
    """The lines below a run when its command or script ends: its directory, and how it continues. `report` is the page,
    or the command that makes it; `nothing_done`: the run was finished before, as its `status` states; `by_hand`: no job
    continues it."""
    lines = [f"run directory  {directory}", f"report         {report}"]
    if nothing_done:
        key = status.get("finished_by", "train.steps")
        hint = "" if "finished_early" in status else f" (to go on, ask for more with {key})"
        lines.insert(0, f"nothing to do: {one_line(reason)}{hint}")
    if state == "stopped" and by_hand:
        lines.append("to go on, run the same command again")
    return lines


# --- findings of the guard

Words = Callable[[Mapping[str, Any]], str]


def _rolled_back(event: Mapping[str, Any]) -> str:
    first, last = _count(event, "first"), _count(event, "last")
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    left_out = f"{_count(event, 'samples')} samples (positions {_count(event, 'start')} to {_count(event, 'end')})"
    return f"the run went back to here after a spike in {steps} and leaves out {left_out}"


GUARDED: Mapping[str, Words] = {
    "transient": lambda event: (
        f"passes repeated: {_numbers(event)} the first time, finite the second (a fault that has passed)"
    ),
    "step_skipped": lambda event: (
        f"no update: {_numbers(event)}; {_count(event, 'in_a_row')} skipped in a row, its samples are in the events"
    ),
    "corruption": lambda event: (
        f"the same passes gave different results on rank {_list(event, 'ranks')} ({_list(event, 'hosts')}): "
        f"{'two of three agreed' if event.get('decided') is True else 'all three differed'}"
    ),
    "replica_differs": lambda event: (
        f"copies of weights differ on rank {_list(event, 'ranks')} ({_list(event, 'hosts')})"
    ),
    "spike": lambda event: (
        f"spike: {'gradient norm' if event.get('of') == 'grad_norm' else text(event, 'of') or UNKNOWN} "
        f"{render_number(number(event, 'value'), '.4g')} is {render_number(number(event, 'deviations'), '.1f')} "
        "deviations above the last ones"
    ),
    "rolled_back": _rolled_back,
}
"""Name of an event -> its line."""


def render_guarded(event: Mapping[str, Any]) -> str:
    """The line of an event of the guard; "" for any other."""
    render = GUARDED.get(str(event.get("event")))
    return one_line(render(event)) if render is not None else ""


def _numbers(event: Mapping[str, Any]) -> str:
    """JSON has no form for a number that is not finite; it is null there."""
    loss, norm = number(event, "loss"), number(event, "grad_norm")
    shown = "not finite" if loss is None else render_loss(loss)
    return f"loss {shown}, gradient norm {'not finite' if norm is None else render_number(norm, '.3f')}"


def _count(event: Mapping[str, Any], key: str) -> str:
    found = whole(event, key)
    return UNKNOWN if found is None else str(found)


def _list(event: Mapping[str, Any], key: str) -> str:
    found = event.get(key)
    return ", ".join(str(each) for each in found) if isinstance(found, list) and found else UNKNOWN


# --- one line for each event


class Severity(Enum):
    """How much a line matters."""

    NEWS = auto()
    WARNING = auto()
    ERROR = auto()


class StepLabel(Enum):
    """The step that labels a line: the run's current one, the event's own, or none."""

    RUN = auto()
    EVENT = auto()
    NONE = auto()


@dataclass(frozen=True)
class EventText:
    """A line, how much it matters, and the step it belongs to."""

    words: str
    weight: Severity
    place: StepLabel


def _reason(before: str = "") -> Words:
    return lambda event: before + (one_line(text(event, "reason")) or UNKNOWN)


def _render_fault(event: Mapping[str, Any]) -> str:
    fault = read_fault(event)
    return f"fault {one_line(fault.kind)}: {one_line(fault.message)}"


MOST_SAMPLE = 200
"""Characters of a sample in a line."""


def render_sampled(sampled: SampledEvent) -> str:
    """The first prompt and how the model has continued it, and how many others there are, in one line."""
    if not sampled.samples:
        return "none"
    prompt, made = sampled.samples[0]
    made = made if len(made) <= MOST_SAMPLE else f"{made[:MOST_SAMPLE]}..."
    more = len(sampled.samples) - 1
    shown = " -> ".join(one_line(f'"{text}"') for text in (prompt, made))  # in quotes: spaces at the ends are kept
    return shown + (f" (and {more} more)" if more else "")


def render_evaluation(evaluation: Evaluation) -> str:
    """ "perplexity on data.txt: loss 2.4012, perplexity 11.0360", in one line."""
    numbers = [
        f"{one_line(name)} {render_number(value, '.4f')}"
        + (f" +- {render_number(evaluation.errors[name], '.4f')}" if name in evaluation.errors else "")
        for name, value in evaluation.results.items()
    ]
    return f"{one_line(evaluation.kind)} on {one_line(evaluation.data)}: {', '.join(numbers)}"


def render_extent(evaluation: Evaluation) -> str:
    """Of how much of the data a result is, by which results on the same data differ: "96 samples of 128 tokens"."""
    if evaluation.samples is not None:
        of = "" if evaluation.seq_len is None else f" of {render_plural(evaluation.seq_len, 'token')}"
        return f"{render_plural(evaluation.samples, 'sample')}{of}"
    return "" if evaluation.questions is None else render_plural(evaluation.questions, "question")


def _render_failed_save(event: Mapping[str, Any]) -> str:
    retry = render_time(number(event, "retry_s"))
    return f"not saved: {one_line(text(event, 'reason'))}; the next try is in {retry}"


_WARNING, _RUN, _NONE = Severity.WARNING, StepLabel.RUN, StepLabel.NONE
_KINDS: Mapping[str, tuple[Words, Severity, StepLabel]] = {
    "saved": (lambda event: render_save(read_save(event)), Severity.NEWS, _RUN),
    "save_failed": (_render_failed_save, _WARNING, _RUN),
    "save_skipped": (
        lambda event: f"no save: that of step {whole(event, 'saving') or 0} is still written",
        _WARNING,
        _RUN,
    ),
    "background_off": (_reason("saves are waited for: "), _WARNING, _NONE),
    "recorded_late": (_reason("events are written again; until now: "), _WARNING, _RUN),
    "checkpoint_quarantined": (_quarantined, _WARNING, _NONE),
    "local_checkpoints_ignored": (_reason("what the nodes have saved is left out: "), _WARNING, _NONE),
    "restarted": (_restarted, _WARNING, _NONE),
    "deadline": (_reason("stops in time: "), Severity.NEWS, _NONE),
    "validation_skipped": (_reason("no validation, which would not end in time: "), _WARNING, _RUN),
    "validation_stopped": (_reason("the validation was broken off: "), _WARNING, _RUN),
    "validation_failed": (_reason("the validation failed: "), _WARNING, _RUN),
    "sampled": (lambda event: f"sample  {render_sampled(read_sampled(event))}", Severity.NEWS, _RUN),
    "samples_failed": (_reason("no samples: "), _WARNING, _RUN),
    "passes_replayed": (_reason(), Severity.NEWS, _RUN),
    **dict.fromkeys(("tuned", "blend"), (_reason(), Severity.NEWS, _NONE)),
    "batch_ramp": (_reason(), Severity.NEWS, _NONE),
    "batch_changed": (_reason(), Severity.NEWS, _RUN),
    "loader": (_reason(), Severity.NEWS, _RUN),
    "data_slow": (_reason(), _WARNING, _RUN),
    "staged": (_reason(), Severity.NEWS, _RUN),
    "not_staged": (_reason(), _WARNING, _RUN),
    "blend_epochs": (_reason(), Severity.NEWS, _RUN),
    **dict.fromkeys(("data_damaged", "damage_counted"), (_reason(), _WARNING, _RUN)),
    "step_discarded": (lambda event: "the step after it had no data in time and does not count", _WARNING, _RUN),
    "profiled": (_reason(), Severity.NEWS, _RUN),
    "profile_failed": (_reason(), _WARNING, _RUN),
    "tracker_failed": (lambda event: f"the tracker {text(event, 'tracker')} {_reason()(event)}", _WARNING, _RUN),
    "fault": (_render_fault, Severity.ERROR, _NONE),
    **dict.fromkeys(("data_skipped", "skip_too_late", "loss_depends_on_cut"), (_reason(), _WARNING, _RUN)),
    **dict.fromkeys(
        ("gradients_by_hand", "data_order_noted", "data_split_by_rank", "script_noted"), (_reason(), _WARNING, _RUN)
    ),
    **dict.fromkeys(GUARDED, (render_guarded, _WARNING, StepLabel.EVENT)),
}


def describe(event: Event) -> EventText | None:
    """The line of an event; None for one that has no line of its own, such as a step."""
    if event["event"] not in _KINDS:
        return None
    words, weight, place = _KINDS[event["event"]]
    return EventText(words(event), weight, place)


# --- progress as plain lines, for output that is not a terminal

_SHARE = 0.02  # interval between step lines as a share of the attempt's time, within the two bounds


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
                start = read_start(event)
                self._began = self._next_line = self._clock()
                self._is_pending = False
                unit = "tokens" if start.counts_tokens else "samples"
                portion = start.tokens_per_step if start.counts_tokens else start.samples_per_step
                first = f"{render_start(start)}  {render_machine(start)}, {render_total(portion)} {unit} a step"
                return [first, *filter(None, [render_numerics(start)])]
            case "step":
                self._is_pending = True
                last = self._progress.step == self._progress.total_steps
                return self._flush() if last or self._clock() >= self._next_line else []
            case "validation":
                validation = self._progress.validations[-1]
                best = "  best so far" if validation is self._progress.best_validation else ""
                words = render_validation(validation, self._progress.monitor.metric)
                return [f"{self._place()}  validation  {words}{best}"]
            case "finished" | "stopped" | "failed":
                return [render_ending(read_ending(event))]
        line = describe(event)
        if line is None:
            return []
        own, run = f"step {whole(event, 'step') or 0}  ", f"{self._place()}  "
        return [{StepLabel.RUN: run, StepLabel.EVENT: own, StepLabel.NONE: ""}[line.place] + line.words]

    def _flush(self) -> list[str]:
        """The line of the last step, unless it was printed."""
        if not self._is_pending:
            return []
        self._is_pending, at, now = False, self._clock(), self._progress
        self._next_line = at + min(self._longest_s, max(self._every_s, _SHARE * (at - self._began)))
        rate = render_rate(now).rjust(len("51.2k ") + len(render_unit(now.start)))
        return [
            f"{self._place()}  loss {render_loss(now.loss):>7}  grad {render_number(now.last('grad_norm'), '.3f'):>6}"
            f"  lr {render_number(now.last('lr'), '.2e')}  {rate}  {render_time(now.seconds_left)} left"
        ]

    def _place(self) -> str:
        total = self._progress.total_steps
        if total is None:
            return f"step {self._progress.step}"
        return f"step {self._progress.step:>{len(str(total))}}/{total}"
