"""The report of a run: one HTML file that a browser shows without a network.

Invariants:
- Every text passes `html.escape`, data cannot close its script element, and nothing is fetched.
- A report can be made of any run directory, however little is in it or however the run died; missing parts are named.
- A run whose site, model or numbers are not enough for a plan has no comparison with one; nothing is raised. Memory is
  not compared, since events do not record its peak.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import accumulate
from statistics import median
from typing import Any

from pydantic import ValidationError

from shardway.drawing import colour_of, read_beside, render_document, render_table, render_tiles
from shardway.errors import JobError, ShardwayError
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.runfile.schema import RunFile
from shardway.units import render_clock
from shardway.watch.account import TimeAccount
from shardway.watch.curve import Figure, count_broken_losses, find_marks, make_figures
from shardway.watch.progress import AttemptProgress, RunProgress, RunSummary, read_progress, summarise_progress
from shardway.watch.words import (
    ACCOUNT_WORDS,
    UNKNOWN,
    one_line,
    render_loss,
    render_monitored,
    render_plural,
    render_share,
    render_size,
    render_time,
    render_total,
)

# --- building blocks


def render_data(name: str, data: Any) -> str:
    """Data for the page's script, as JSON that cannot close the script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def render_pairs(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A table of labels and values under a title."""
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in pairs)
    return f'<div class="card pairs"><h3>{escape(title)}</h3><table>{rows}</table></div>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return render_table("", columns, rows, plain=True)


# --- plan and measurement compared

FEWEST_STEPS = 10
"""With fewer steps in an attempt a median means little: the first steps compile and warm up."""


@dataclass(frozen=True)
class Predicted:
    """Seconds a step: planned, the planned interval that holds four of five measured steps, and measured; MFU with all
    attention scores counted."""

    seconds: float
    low: float
    high: float
    measured_seconds: float
    mfu: float

    @property
    def measured_mfu(self) -> float:
        """MFU: the same FLOPs in the measured time."""
        return self.mfu * self.seconds / self.measured_seconds

    @property
    def held(self) -> bool:
        """Whether the measured step lies in the interval."""
        return self.low <= self.measured_seconds <= self.high


def predict(run: RunDir, attempts: Sequence[AttemptProgress], events: Sequence[Event]) -> Predicted | None:
    """For the last attempt; None on a CPU, where no site names accelerators, and for a model without a plan."""
    rate = _median_rate(events)
    if not attempts or attempts[-1].start.device.startswith("cpu") or rate is None:
        return None
    try:
        return _price(RunFile.model_validate(run.read_resolved()), rate)
    except (ShardwayError, ValidationError, ValueError, TypeError):
        return None


def _median_rate(events: Sequence[Event]) -> float | None:
    """Samples a second in the steps since the last start, without the first ones."""
    starts = [number for number, event in enumerate(events) if event.get("event") == "started"]
    steps = [event for event in events[starts[-1] if starts else 0 :] if event.get("event") == "step"]
    rates = [event.get("samples_per_s") for event in steps]
    sound = [float(each) for each in rates if isinstance(each, int | float) and math.isfinite(each) and each > 0]
    return median(sound[FEWEST_STEPS // 2 :]) if len(sound) >= FEWEST_STEPS else None


def _price(values: RunFile, rate: float) -> Predicted:
    from shardway.plan.case import machine_of_site
    from shardway.plan.huggingface import read_shape
    from shardway.plan.planner import estimate
    from shardway.resolve.planned import case_of, shape_of_run
    from shardway.sites.load import load_site

    machine = machine_of_site(load_site(values.site.name))
    shape = shape_of_run(values, read_shape(values.model.hf) if values.model.hf else None)
    found = estimate(case_of(values, shape), machine)
    measured = values.train.global_batch / rate
    return Predicted(found.time.seconds, found.time.low, found.time.high, measured, found.mfu(causal=False))


# --- time account

TITLE = "Where the time went"

_NOTES = {
    "productive_s": "each step counted once",
    "start_s": "from the beginning of the process, or of its job, to the look for a checkpoint",
    "data_s": "from the end of a step to the next batch, the record of the step in it",
    "script_s": "between a batch and its step, and after it",
    "idle_s": "from the last sign of life of one attempt to the beginning of the next: queue, restart",
    "unaccounted_s": "after the last record of an attempt that was killed, or of the one that runs",
}

_CONCEPTS = {
    "productive_s": "train",
    "lost_s": "fault",
    "start_s": "start",
    "load_s": "resume",
    "data_s": "data",
    "save_s": "save",
    "validation_s": "validation",
    "script_s": "script",
    "end_s": "end",
    "idle_s": "idle",
    "unaccounted_s": "unaccounted",
}
"""Row -> the concept whose colour it has."""


def render_spent(account: TimeAccount | None) -> str:
    """The share of productive time, a bar, and a table of the rows that took any time."""
    if account is None:
        return f'<h2>{TITLE}</h2><p class="soft">It was not recorded.</p>'
    shown = {name: seconds for name, seconds in account.rows.items() if seconds > 0}
    rows = [
        [ACCOUNT_WORDS[name], _render_seconds(seconds), render_share(seconds, account.wall_s), _note(name, account)]
        for name, seconds in shown.items()
    ]
    share = render_share(account.productive_s, account.wall_s)
    return (
        f"<h2>{TITLE}</h2><p>{share} of {render_time(account.wall_s)} went into steps that hold: goodput, or effective "
        "training time ratio (ETTR, arXiv 2410.21680). Rank 0's time, over all attempts.</p>"
        f"{_bar(shown, account.wall_s)}{_table(['rank 0', 'time', 'share', ''], rows)}"
    )


def _bar(rows: dict[str, float], wall_s: float) -> str:
    parts = "".join(
        f'<i style="width:{100 * seconds / wall_s:.3f}%;background:var(--{colour_of(_CONCEPTS[name])})" '
        f'title="{escape(ACCOUNT_WORDS[name])} {render_share(seconds, wall_s)}"></i>'
        for name, seconds in rows.items()
    )
    return f'<div class="shares">{parts}</div>'


def _note(name: str, account: TimeAccount) -> str:
    if name != "lost_s":
        return _NOTES.get(name, "")
    again = f", {_render_seconds(account.repeated_s)} to do them again" if account.repeated_s else ""
    return f"{render_plural(account.undone_steps, 'step')} undone{again}"


def _render_seconds(seconds: float) -> str:
    """3:25, or 4.2 s for short times."""
    return render_clock(seconds) if seconds >= 100 else f"{seconds:.1f} s"


# --- the whole report


def render_report(run: RunDir) -> str:
    """The report as HTML. Raises JobError where status.json is damaged."""
    progress = read_progress(run)
    summary, events = summarise_progress(run, progress), run.events()
    figures = make_figures(events, progress)
    body = "\n".join(
        [
            _header(summary),
            _tiles(summary),
            _curves(figures, progress, events),
            _attempts(progress),
            _left_out(summary),
            render_spent(summary.account),
            _predicted(predict(run, progress.attempts, events)),
            _faults(progress),
            _resolved(run),
            _machine(progress),
        ]
    )
    scripts = _scripts(figures, progress) if figures else ""
    return render_document(
        f"{summary.name} - Shardway", body, style="\n" + read_beside(__package__, "report.css"), scripts=scripts
    )


def _scripts(figures: Sequence[Figure], progress: RunProgress) -> str:
    from plotly.offline import get_plotlyjs  # here, because it takes longer to import than all else together

    last = max((x for figure in figures for trace in figure.traces for x in trace["x"]), default=0)
    data = {
        "figures": [asdict(figure) for figure in figures],
        "marks": [asdict(mark) for mark in find_marks(progress)],
        "colours": {kind: colour_of(kind) for kind in ("save", "resume", "fault")},
        "range": [0, max(1, last) * 1.01],
    }
    script = read_beside(__package__, "report.js")
    return f"<script>{get_plotlyjs()}</script>\n{render_data('data', data)}\n<script>\n{script}</script>\n"


# --- head of the page


def _header(summary: RunSummary) -> str:
    reason = f"<p>{escape(one_line(summary.reason))}</p>" if summary.reason else ""
    return (
        f'<header><h1>{escape(summary.name)}<span class="state {escape(summary.state)}">{escape(summary.state)}'
        f'</span></h1>{reason}<p class="soft">{escape(str(summary.path))} · started '
        f"{_render_date(summary.started)} · last event {_render_date(summary.updated)}</p></header>"
    )


def _tiles(summary: RunSummary) -> str:
    rate = summary.tokens_per_s if summary.unit == "tokens" else summary.samples_per_s
    saved = f"last at step {summary.checkpoints[-1]}" if summary.checkpoints else "none kept"
    saved += f", best at step {summary.best_checkpoint.step}" if summary.best_checkpoint else ""
    tiles = [
        ("steps", f"{summary.step}", f"of {summary.total_steps or UNKNOWN}"),
        ("loss, recent mean", render_loss(summary.smooth_loss), f"last step {render_loss(summary.loss)}"),
        *_validation_tile(summary),
        (f"{summary.unit}/s", render_total(rate), "median of the last steps"),
        ("wall time", render_time(summary.wall_s), render_plural(summary.attempts, "attempt")),
        ("checkpoints", f"{len(summary.checkpoints)}", saved),
        ("parameters", render_total(summary.parameters)),
        ("ranks", f"{summary.world or UNKNOWN}", f"on {summary.device or UNKNOWN}"),
    ]
    return render_tiles(tiles)


def _validation_tile(summary: RunSummary) -> list[tuple[str, ...]]:
    best = summary.best_validation
    if best is None:
        return []
    place, value = f"best, at step {best.step}", best.metrics[summary.monitor]
    if summary.monitor not in ("loss", "bits_per_byte", "accuracy"):
        named = render_monitored(summary.monitor, value).removeprefix(f"{one_line(summary.monitor)} ")
        return [(f"validation {one_line(summary.monitor)}", named, f"loss {render_loss(best.loss)}, {place}")]
    if best.bits_per_byte is not None:
        return [("validation bits/byte", f"{best.bits_per_byte:.3f}", place)]
    if best.accuracy is not None:
        return [("validation accuracy", f"{best.accuracy:.2%}", f"loss {render_loss(best.loss)}, {place}")]
    return [("validation loss", render_loss(best.loss), place)]


# --- curves


def _curves(figures: Sequence[Figure], progress: RunProgress, events: Sequence[Event]) -> str:
    if not figures:
        return '<h2>Curves</h2><p class="soft">No step has been recorded yet.</p>'
    count = count_broken_losses(events)
    broken = f"<p>The loss of {render_plural(count, 'step')} was not a finite number: a gap.</p>" if count else ""
    kinds = sorted({mark.kind for mark in find_marks(progress)}, reverse=True)
    marks = "".join(f'<i style="color:var(--{colour_of(kind)})"></i>{kind}' for kind in kinds)
    key = f'<p class="marks">{marks}</p>' if marks else ""
    frames = "".join(_frame(each) for each in figures)
    return (
        f"<h2>Curves</h2>{broken}{key}"
        "<noscript><p>The curves need JavaScript; the tables below do not.</p></noscript>"
        f'<section class="curves">{frames}</section>'
    )


def _frame(figure: Figure) -> str:
    """The frame into which the script draws a figure."""
    name, kind = escape(figure.name), "card figure wide" if figure.wide else "card figure"
    button = f'<button data-log="{name}" aria-pressed="false">log axis</button>' if figure.log else ""
    return (
        f'<div class="{kind}"><div class="bar"><h3>{escape(figure.title)}</h3>{button}</div>'
        f'<div class="plot" id="plot-{name}"></div></div>'
    )


# --- tables


def _attempts(progress: RunProgress) -> str:
    columns = ["attempt", "started", "steps", "ranks", "launcher", "device", "host", "torch", "Python", "time", "end"]
    rows = []
    numbers = accumulate(int(not attempt.again) for attempt in progress.attempts)
    for number, attempt in zip(numbers, progress.attempts, strict=True):
        start, ending = attempt.start, attempt.ending
        end = f"{ending.state}: {ending.reason}" if ending and ending.reason else ending.state if ending else "open"
        machine = (start.launcher, start.device, start.host, start.torch, start.python)
        rows.append(
            [
                f"{number}, again" if attempt.again else str(number),
                _render_date(start.time),
                f"{start.step} to {attempt.step}",
                *(str(each or UNKNOWN) for each in (start.world, *machine)),
                render_time(attempt.wall_s),
                end,
            ]
        )
    table = _table(columns, rows) if rows else '<p class="soft">It has not been started.</p>'
    return f"<h2>Attempts</h2>{table}"


def _left_out(summary: RunSummary) -> str:
    """The samples that the run skipped by itself; empty where there are none."""
    if not summary.left_out:
        return ""
    rows = [
        [_render_date(each.time), str(each.samples), f"{each.start} to {each.end}", str(each.back_to), each.reason]
        for each in summary.left_out
    ]
    columns = ["at", "samples", "positions", "back to step", "after"]
    return f"<h2>Left out after spikes</h2>{_table(columns, rows)}"


def _predicted(found: Predicted | None) -> str:
    """The plan beside the measurement; empty where there is no plan."""
    if found is None:
        return ""
    interval, held = f"{found.low:.3g} to {found.high:.3g} s", "" if found.held else ", outside of the interval"
    more = f"{found.measured_seconds / found.seconds - 1:+.0%}{held}"
    rows = [
        ["seconds of a step", f"{found.seconds:.3g}", f"{found.measured_seconds:.3g}", more, interval],
        ["MFU, all scores counted", f"{found.mfu:.1%}", f"{found.measured_mfu:.1%}", "", ""],
    ]
    columns = ["of the last attempt", "predicted", "measured", "measured over predicted", "four of five lie within"]
    return f"<h2>Predicted and measured</h2>{_table(columns, rows)}"


def _faults(progress: RunProgress) -> str:
    rows = []
    for fault in (fault for attempt in progress.attempts for fault in attempt.faults):
        step, code = (UNKNOWN if value is None else str(value) for value in (fault.step, fault.exit_code))
        rows.append([step, _render_date(fault.time), fault.kind, code, fault.message])
    return f"<h2>Faults</h2>{_table(['step', 'time', 'kind', 'exit code', 'message'], rows)}" if rows else ""


def _resolved(run: RunDir) -> str:
    try:
        resolved = run.read_resolved()
    except JobError as error:
        return f"<h2>Resolved run</h2><p>{escape(str(error))}</p>"
    if not resolved:
        return '<h2>Resolved run</h2><p class="soft">There is no resolved run in this directory.</p>'
    loose = {key: value for key, value in resolved.items() if not isinstance(value, dict)}
    sections = {"run file": loose} if loose else {}
    sections |= {key: value for key, value in resolved.items() if isinstance(value, dict)}
    tables = (
        render_pairs(name, ((key, _render_value(value)) for key, value in section.items()))
        for name, section in sections.items()
    )
    return f'<h2>Resolved run</h2><section class="tables">{"".join(tables)}</section>'


def _machine(progress: RunProgress) -> str:
    start = progress.start
    if start is None or not start.machine:
        return '<h2>Machine</h2><p class="soft">Nothing was recorded about the machine.</p>'
    saves = progress.saves
    size = [("last checkpoint", render_size(saves[-1].size_bytes))] if saves else []
    return f"<h2>Machine</h2>{render_pairs(start.host or 'host', [*start.machine.items(), *size])}"


def _render_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(_render_value, value)) if isinstance(value, list) else str(value) or '""'


def _render_date(seconds: float | None) -> str:
    """Local time with its zone, or n/a where it is unknown or not a date."""
    if not seconds:
        return UNKNOWN
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return UNKNOWN
