"""The report of a run: one HTML file that a browser shows without a network.

Invariants:
- A curve has at most about 2000 points however long the run was, and no value that strict JSON lacks. Thinning never
  hides an extreme: the minimum and the maximum of every bucket stay.
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
from shardway.watch.facts import measured, read_logged, whole
from shardway.watch.progress import (
    AttemptProgress,
    RunProgress,
    RunSummary,
    TimeAccount,
    read_progress,
    summarise_progress,
)
from shardway.watch.words import (
    ACCOUNT_WORDS,
    REMEDIES,
    UNKNOWN,
    one_line,
    render_loss,
    render_monitored,
    render_plural,
    render_share,
    render_size,
    render_time,
    render_total,
    render_unit,
)

# --- building blocks


def render_pairs(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A table of labels and values under a title."""
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in pairs)
    return f'<div class="card pairs"><h3>{escape(title)}</h3><table>{rows}</table></div>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return render_table("", columns, rows, plain=True)


# --- plan and measurement compared

FEWEST_STEPS = 10  # with fewer steps in an attempt a median means little: the first steps compile and warm up


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
    """For the last attempt, in steps without the first ones; None on a CPU, where no site names accelerators, and for
    a model without a plan."""
    starts = [number for number, event in enumerate(events) if event.get("event") == "started"]
    steps = [event for event in events[starts[-1] if starts else 0 :] if event.get("event") == "step"]
    rates = [event.get("samples_per_s") for event in steps]
    sound = [float(each) for each in rates if isinstance(each, int | float) and math.isfinite(each) and each > 0]
    if not attempts or attempts[-1].start.device.startswith("cpu") or len(sound) < FEWEST_STEPS:
        return None
    from shardway.plan.case import machine_of_site
    from shardway.plan.huggingface import read_shape
    from shardway.plan.planner import estimate
    from shardway.resolve.planned import case_of, shape_of_run
    from shardway.sites.load import load_site

    try:
        values = RunFile.model_validate(run.read_resolved())
        machine = machine_of_site(load_site(values.site.name))
        shape = shape_of_run(values, read_shape(values.model.hf) if values.model.hf else None)
        found = estimate(case_of(values, shape, machine=machine), machine)
    except (ShardwayError, ValidationError, ValueError, TypeError):
        return None
    step_s = values.train.batch.largest / median(sound[FEWEST_STEPS // 2 :])
    return Predicted(found.time.seconds, found.time.low, found.time.high, step_s, found.mfu(causal=False))


# --- figures, as the data that plotly.js draws

POINTS = 2000  # maximum points of one curve
SAVE_MARKS = 200  # maximum marks of saves
NAMED = 24  # maximum figures of a script's own values
Trace = dict[str, Any]


@dataclass(frozen=True)
class CurvePoint:
    """A value at a step; `value` may be NaN."""

    step: int
    value: float


@dataclass(frozen=True)
class Mark:
    """An event marked at a step: `kind` is "save", "resume" or "fault"."""

    kind: str
    step: int


@dataclass(frozen=True)
class Figure:
    """One figure: `wide` takes the whole row, `log` offers a logarithmic axis."""

    name: str
    title: str
    traces: list[Trace]
    wide: bool = False
    log: bool = False
    percent: bool = False


def make_figures(events: Sequence[Event], progress: RunProgress) -> list[Figure]:
    """Every figure that the events have data for, with one for each name that a script has logged or returned from a
    validation."""
    steps, validations = [event for event in events if event["event"] == "step"], progress.validations
    unit = render_unit(progress.start)
    loss = _step_traces(steps, "loss", "train", "train", smoothed=True)
    figures = [
        Figure("loss", "Loss", loss + _dots((each.step, each.loss) for each in validations), wide=True, log=True),
        Figure("bits", "Bits per byte", _dots((each.step, each.bits_per_byte) for each in validations)),
        Figure("accuracy", "Accuracy", _dots((each.step, each.accuracy) for each in validations), percent=True),
        Figure(
            "speed",
            f"Throughput ({unit})",
            _step_traces(steps, unit.replace("/", "_per_"), unit, "speed", smoothed=True),
        ),
        Figure("lr", "Learning rate", _step_traces(steps, "lr", "learning rate", "learning rate")),
        Figure(
            "grad",
            "Gradient norm",
            _step_traces(steps, "grad_norm", "gradient norm", "gradients", smoothed=True),
            log=True,
        ),
    ]
    logged = [read_logged(event) for event in events if event["event"] == "logged"]
    values = (*(each.values for each in logged), *(each.others for each in validations))
    for number, name in enumerate(list(dict.fromkeys(name for each in values for name in each))[:NAMED]):
        trained = [CurvePoint(each.step, each.values[name]) for each in logged if name in each.values]
        line = [_line("train", trained, "train")] if trained else []
        figures.append(
            Figure(f"named{number}", name, line + _dots((each.step, each.others.get(name)) for each in validations))
        )
    return [figure for figure in figures if figure.traces]


def find_marks(progress: RunProgress) -> list[Mark]:
    """Saves (an even selection if there are many), resumes and faults."""
    stride = -(-len(progress.saves) // SAVE_MARKS) or 1
    saves = [Mark("save", save.step) for save in progress.saves[::stride]]
    resumes = [Mark("resume", attempt.start.step) for attempt in progress.attempts[1:]]
    faults = [
        Mark("fault", attempt.step if fault.step is None else fault.step)
        for attempt in progress.attempts
        for fault in attempt.faults
    ]
    return saves + resumes + faults


def _step_traces(steps: Sequence[Event], key: str, name: str, concept: str, *, smoothed: bool = False) -> list[Trace]:
    """The values under `key` (a null is a gap, an absent key no point); if `smoothed`, drawn faintly behind their mean
    where there are enough of them."""
    found = ((whole(event, "step"), event) for event in steps if key in event)
    points = [CurvePoint(step, measured(event, key)) for step, event in found if step is not None]
    if not any(math.isfinite(point.value) for point in points):
        return []
    raw, half_window = _line(name, points, concept), min(100, len(steps) // 100)
    if not smoothed or half_window == 0:
        return [raw]
    mean = _line(f"mean of {2 * half_window + 1} steps", smooth(points, half_window), concept)
    return [{**raw, "faint": True}, mean]


def _line(name: str, points: Sequence[CurvePoint], concept: str, mode: str = "lines") -> Trace:
    drawn = thin(points, POINTS)
    values = [point.value if math.isfinite(point.value) else None for point in drawn]
    return {"name": name, "colour": colour_of(concept), "mode": mode, "x": [point.step for point in drawn], "y": values}


def _dots(values: Iterable[tuple[int, float | None]]) -> list[Trace]:
    """The values of validations, if there are any."""
    points = [CurvePoint(step, value) for step, value in values if value is not None]
    return [_line("validation", points, "validation", "lines+markers")] if points else []


def thin(points: Sequence[CurvePoint], limit: int) -> list[CurvePoint]:
    """At most `limit` + 2 points (limit even): first, last, and the extremes of limit/2 buckets. A bucket without a
    finite value leaves one NaN, so that a gap stays a gap."""
    if len(points) <= limit:
        return list(points)
    kept: list[CurvePoint] = []
    parts = limit // 2
    for part in range(parts):
        bucket = points[len(points) * part // parts : len(points) * (part + 1) // parts]
        finite = [point for point in bucket if math.isfinite(point.value)]
        extremes = {pick(finite, key=lambda point: point.value) for pick in (min, max)} if finite else ()
        kept += sorted(extremes, key=lambda point: point.step) or [CurvePoint(bucket[0].step, math.nan)]
    first = [points[0]] if kept[0].step != points[0].step else []
    last = [points[-1]] if kept[-1].step != points[-1].step else []
    return first + kept + last


def smooth(points: Sequence[CurvePoint], half_window: int) -> list[CurvePoint]:
    """At each finite point the mean of it and of `half_window` finite points on either side. Near the ends both sides
    shrink equally, so that the mean does not lag behind a slope. Points that are not finite are left out."""
    finite = [point for point in points if math.isfinite(point.value)]
    sums = list(accumulate((point.value for point in finite), initial=0.0))
    means = []
    for index, point in enumerate(finite):
        reach = min(half_window, index, len(finite) - 1 - index)
        means.append(CurvePoint(point.step, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)))
    return means


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

_MUCH_WAITING = 0.1  # share of the time from which it is said what to do

_CONCEPTS = {"productive_s": "train", "lost_s": "fault", "load_s": "resume"}
"""Row -> the concept whose colour it has; of the others, that of their name."""


def render_spent(account: TimeAccount | None) -> str:
    """The share of productive time, a bar, and a table of the rows that took any time."""
    if account is None:
        return f'<h2>{TITLE}</h2><p class="soft">It was not recorded.</p>'
    rows, bar = [], []
    for name, seconds in account.rows.items():
        if seconds > 0:
            share, note = render_share(seconds, account.wall_s), _NOTES.get(name, "")
            if name == "lost_s":
                again = f", {_render_seconds(account.repeated_s)} to do them again" if account.repeated_s else ""
                note = f"{render_plural(account.undone_steps, 'step')} undone{again}"
            elif name == "data_s" and seconds >= _MUCH_WAITING * account.wall_s:
                note += f"{REMEDIES[name]}; shardway data bench PATH shows which layer limits"
            rows.append([ACCOUNT_WORDS[name], _render_seconds(seconds), share, note])
            colour = colour_of(_CONCEPTS.get(name, name.removesuffix("_s")))
            bar.append(
                f'<i style="width:{100 * seconds / account.wall_s:.3f}%;background:var(--{colour})" '
                f'title="{escape(ACCOUNT_WORDS[name])} {share}"></i>'
            )
    share = render_share(account.productive_s, account.wall_s)
    return (
        f"<h2>{TITLE}</h2><p>{share} of {render_time(account.wall_s)} went into steps that hold: goodput, or effective "
        "training time ratio (ETTR, arXiv 2410.21680). Rank 0's time, over all attempts.</p>"
        f'<div class="shares">{"".join(bar)}</div>{_table(["rank 0", "time", "share", ""], rows)}'
    )


def _render_seconds(seconds: float) -> str:
    """3:25, or 4.2 s for short times."""
    return render_clock(seconds) if seconds >= 100 else f"{seconds:.1f} s"


# --- the whole report


def render_report(run: RunDir) -> str:
    """The report as HTML. Raises JobError where status.json is damaged."""
    progress = read_progress(run)
    summary, events = summarise_progress(run, progress), run.events()
    figures, marks = make_figures(events, progress), find_marks(progress)
    body = [
        _header(summary),
        _tiles(summary),
        _curves(figures, marks, events),
        _attempts(progress),
        _left_out(summary),
        _damaged(summary),
        render_spent(summary.account),
        _predicted(predict(run, progress.attempts, events)),
        _faults(progress),
        _resolved(run),
        _machine(progress),
    ]
    scripts, title = _scripts(figures, marks) if figures else "", f"{summary.name} - Shardway"
    return render_document(title, "\n".join(body), style="\n" + read_beside(__package__, "report.css"), scripts=scripts)


def _scripts(figures: Sequence[Figure], marks: Sequence[Mark]) -> str:
    from plotly.offline import get_plotlyjs  # here, because it takes longer to import than all else together

    last = max((x for figure in figures for trace in figure.traces for x in trace["x"]), default=0)
    data = {
        "figures": [asdict(figure) for figure in figures],
        "marks": [asdict(mark) for mark in marks],
        "colours": {kind: colour_of(kind) for kind in ("save", "resume", "fault")},
        "range": [0, max(1, last) * 1.01],
    }
    # "<" is escaped, so that data cannot close its element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<script>{get_plotlyjs()}</script>\n<script type="application/json" id="data">{text}</script>\n'
        f"<script>\n{read_beside(__package__, 'report.js')}</script>\n"
    )


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


def _curves(figures: Sequence[Figure], marks: Sequence[Mark], events: Sequence[Event]) -> str:
    if not figures:
        return '<h2>Curves</h2><p class="soft">No step has been recorded yet.</p>'
    count = sum(1 for each in events if each["event"] == "step" and not math.isfinite(measured(each, "loss")))
    broken = f"<p>The loss of {render_plural(count, 'step')} was not a finite number: a gap.</p>" if count else ""
    kinds = sorted({mark.kind for mark in marks}, reverse=True)
    key = "".join(f'<i style="color:var(--{colour_of(kind)})"></i>{kind}' for kind in kinds)
    key = f'<p class="marks">{key}</p>' if key else ""
    frames = []  # into which the script draws
    for figure in figures:
        name, kind = escape(figure.name), "card figure wide" if figure.wide else "card figure"
        button = f'<button data-log="{name}" aria-pressed="false">log axis</button>' if figure.log else ""
        frames.append(
            f'<div class="{kind}"><div class="bar"><h3>{escape(figure.title)}</h3>{button}</div>'
            f'<div class="plot" id="plot-{name}"></div></div>'
        )
    return (
        f"<h2>Curves</h2>{broken}{key}"
        "<noscript><p>The curves need JavaScript; the tables below do not.</p></noscript>"
        f'<section class="curves">{"".join(frames)}</section>'
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
    if not summary.left_out:
        return ""
    rows = [
        [_render_date(each.time), str(each.samples), f"{each.start} to {each.end}", str(each.back_to), each.reason]
        for each in summary.left_out
    ]
    columns = ["at", "samples", "positions", "back to step", "after"]
    return f"<h2>Left out after spikes</h2>{_table(columns, rows)}"


def _damaged(summary: RunSummary) -> str:
    return f"<h2>Damaged data</h2><p>{escape(one_line(summary.damaged))}</p>" if summary.damaged else ""


def _predicted(found: Predicted | None) -> str:
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
    if isinstance(value, list):
        return ", ".join(
            f"[{_render_value(each)}]" if isinstance(each, list) else _render_value(each) for each in value
        )
    return str(value) or '""'


def _render_date(seconds: float | None) -> str:
    """Local time with its zone, or n/a where it is unknown or not a date."""
    if not seconds:
        return UNKNOWN
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return UNKNOWN
