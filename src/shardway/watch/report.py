"""The report of a run: one HTML file that a browser shows without a network.

Invariant: it can be made of any run directory, however little is in it or however the run died; what is missing is
said. This module must not write the file: `RunDir.write_report` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from itertools import accumulate
from typing import Any

from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.watch.facts import FaultEvent
from shardway.watch.figures import Figure, count_broken_losses, find_marks, make_figures
from shardway.watch.page import (
    SCRIPT,
    render_data,
    render_figure,
    render_page,
    render_pairs,
    render_table,
    render_tile,
)
from shardway.watch.predicted import Predicted, predict
from shardway.watch.progress import AttemptProgress, RunProgress, read_progress
from shardway.watch.spent import render_spent
from shardway.watch.summary import RunSummary, summarise_progress
from shardway.watch.words import (
    UNKNOWN,
    one_line,
    render_loss,
    render_monitored,
    render_plural,
    render_size,
    render_time,
    render_total,
)


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
    return render_page(f"{summary.name} - Shardway", body, _scripts(figures, progress) if figures else "")


def _scripts(figures: Sequence[Figure], progress: RunProgress) -> str:
    from plotly.offline import get_plotlyjs  # here, because it takes longer to import than all else together

    last = max((x for figure in figures for trace in figure.traces for x in trace["x"]), default=0)
    data = {
        "figures": [asdict(figure) for figure in figures],
        "marks": [asdict(mark) for mark in find_marks(progress)],
        "range": [0, max(1, last) * 1.01],
    }
    return f"<script>{get_plotlyjs()}</script>\n{render_data('data', data)}\n<script>{SCRIPT}</script>"


# --- the top


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
        render_tile("steps", f"{summary.step}", f"of {summary.total_steps or UNKNOWN}"),
        render_tile("loss, recent mean", render_loss(summary.smooth_loss), f"last step {render_loss(summary.loss)}"),
        *_validation_tile(summary),
        render_tile(f"{summary.unit}/s", render_total(rate), "median of the last steps"),
        render_tile("wall time", render_time(summary.wall_s), render_plural(summary.attempts, "attempt")),
        render_tile("checkpoints", f"{len(summary.checkpoints)}", saved),
        render_tile("parameters", render_total(summary.parameters)),
        render_tile("ranks", f"{summary.world or UNKNOWN}", f"on {summary.device or UNKNOWN}"),
    ]
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _validation_tile(summary: RunSummary) -> list[str]:
    best = summary.best_validation
    if best is None:
        return []
    place, value = f"best, at step {best.step}", best.metrics[summary.monitor]
    if summary.monitor not in ("loss", "bits_per_byte", "accuracy"):
        named = render_monitored(summary.monitor, value).removeprefix(f"{one_line(summary.monitor)} ")
        return [
            render_tile(f"validation {one_line(summary.monitor)}", named, f"loss {render_loss(best.loss)}, {place}")
        ]
    if best.bits_per_byte is not None:
        return [render_tile("validation bits/byte", f"{best.bits_per_byte:.3f}", place)]
    if best.accuracy is not None:
        return [render_tile("validation accuracy", f"{best.accuracy:.2%}", f"loss {render_loss(best.loss)}, {place}")]
    return [render_tile("validation loss", render_loss(best.loss), place)]


# --- curves


def _curves(figures: Sequence[Figure], progress: RunProgress, events: Sequence[Event]) -> str:
    if not figures:
        return '<h2>Curves</h2><p class="soft">No step has been recorded yet.</p>'
    frames = "".join(render_figure(each.name, each.title, wide=each.wide, log=each.log) for each in figures)
    return (
        f"<h2>Curves</h2>{_broken_losses(events)}{_key(progress)}"
        "<noscript><p>The curves need JavaScript; the tables below do not.</p></noscript>"
        f'<section class="curves">{frames}</section>'
    )


def _broken_losses(events: Sequence[Event]) -> str:
    count = count_broken_losses(events)
    return f"<p>The loss of {render_plural(count, 'step')} was not a finite number: a gap.</p>" if count else ""


def _key(progress: RunProgress) -> str:
    kinds = sorted({mark.kind for mark in find_marks(progress)}, reverse=True)
    marks = "".join(f'<i class="{kind}"></i>{kind}' for kind in kinds)
    return f'<p class="key">{marks}</p>' if marks else ""


# --- tables


def _attempts(progress: RunProgress) -> str:
    columns = ["attempt", "started", "steps", "ranks", "launcher", "device", "host", "torch", "Python", "time", "end"]
    numbers = accumulate(int(not attempt.again) for attempt in progress.attempts)
    rows = [_attempt_row(number, attempt) for number, attempt in zip(numbers, progress.attempts, strict=True)]
    table = render_table(columns, rows) if rows else '<p class="soft">It has not been started.</p>'
    return f"<h2>Attempts</h2>{table}"


def _attempt_row(number: int, attempt: AttemptProgress) -> list[str]:
    start, ending = attempt.start, attempt.ending
    end = f"{ending.state}: {ending.reason}" if ending and ending.reason else ending.state if ending else "open"
    return [
        f"{number}, again" if attempt.again else str(number),
        _render_date(start.time),
        f"{start.step} to {attempt.step}",
        str(start.world or UNKNOWN),
        start.launcher or UNKNOWN,
        start.device or UNKNOWN,
        start.host or UNKNOWN,
        start.torch or UNKNOWN,
        start.python or UNKNOWN,
        render_time(attempt.wall_s),
        end,
    ]


def _left_out(summary: RunSummary) -> str:
    """What the run left out of its data by itself; nothing where it left out nothing."""
    if not summary.left_out:
        return ""
    rows = [
        [_render_date(each.time), str(each.samples), f"{each.start} to {each.end}", str(each.back_to), each.reason]
        for each in summary.left_out
    ]
    columns = ["at", "samples", "positions", "back to step", "after"]
    return f"<h2>Left out after spikes</h2>{render_table(columns, rows)}"


def _predicted(found: Predicted | None) -> str:
    """The plan beside what was measured; nothing where there is no plan."""
    if found is None:
        return ""
    interval = f"{found.low:.3g} to {found.high:.3g} s"
    rows = [
        ["seconds of a step", f"{found.seconds:.3g}", f"{found.measured_seconds:.3g}", _more(found), interval],
        ["MFU, all scores counted", f"{found.mfu:.1%}", f"{found.measured_mfu:.1%}", "", ""],
    ]
    columns = ["of the last attempt", "predicted", "measured", "measured over predicted", "four of five lie within"]
    return f"<h2>Predicted and measured</h2>{render_table(columns, rows)}"


def _more(found: Predicted) -> str:
    held = "" if found.held else ", outside of the interval"
    return f"{found.measured_seconds / found.seconds - 1:+.0%}{held}"


def _faults(progress: RunProgress) -> str:
    faults = [fault for attempt in progress.attempts for fault in attempt.faults]
    if not faults:
        return ""
    return f"<h2>Faults</h2>{render_table(['step', 'time', 'kind', 'exit code', 'message'], map(_fault_row, faults))}"


def _fault_row(fault: FaultEvent) -> list[str]:
    step, code = (UNKNOWN if value is None else str(value) for value in (fault.step, fault.exit_code))
    return [step, _render_date(fault.time), fault.kind, code, fault.message]


def _resolved(run: RunDir) -> str:
    try:
        resolved = run.read_resolved()
    except JobError as error:
        return f"<h2>Resolved run</h2><p>{escape(str(error))}</p>"
    if not resolved:
        return '<h2>Resolved run</h2><p class="soft">There is no resolved run in this directory.</p>'
    loose = {key: value for key, value in resolved.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in resolved.items() if isinstance(value, dict)}
    tables = [_section("run file", loose)] if loose else []
    tables += [_section(name, section) for name, section in sections.items()]
    return f'<h2>Resolved run</h2><section class="tables">{"".join(tables)}</section>'


def _section(name: str, section: dict[str, Any]) -> str:
    return render_pairs(name, ((key, _render_value(value)) for key, value in section.items()))


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
    """Local time with its zone, or n/a where it is unknown or no date."""
    if not seconds:
        return UNKNOWN
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return UNKNOWN
