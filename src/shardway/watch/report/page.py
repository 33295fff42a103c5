"""The report of a run: one HTML file that a browser shows without a network.

Invariants:
- Every text passes `html.escape`, data cannot close its script element, and nothing is fetched.
- What is missing is named, and a section without content is left out.
- The verdict comes first, then what to change, then evidence: figures over time (`shardway.watch.report.lanes`) and
  tables.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate
from typing import Any

from shardway.drawing import colour_of, read_beside, render_document, render_table, render_tiles
from shardway.plain_arrays import find_arrays
from shardway.rundir.directory import RunDir
from shardway.units import UNKNOWN, render_clock, render_plural
from shardway.watch.facts import number
from shardway.watch.progress import RunSummary, TimeAccount
from shardway.watch.report.content import ReportContent, describe, gather
from shardway.watch.report.hardware import GROUPS
from shardway.watch.report.lanes import render_curves, render_events, render_panel, render_value, script_data
from shardway.watch.report.predicted import Predicted
from shardway.watch.report.proposal import COLUMNS, list_gpu_rows
from shardway.watch.report.results import render_evaluations, render_samples
from shardway.watch.words import (
    ACCOUNT_WORDS,
    REMEDIES,
    one_line,
    render_loss,
    render_monitored,
    render_share,
    render_size,
    render_time,
    render_total,
)


def render_report(run: RunDir) -> str:
    """The report as HTML. Raises JobError where status.json is damaged."""
    return render_content(gather(run))


def render_content(content: ReportContent) -> str:
    """The page of what was gathered."""
    summary = content.summary
    tail, is_bad = _tail(content), describe(content)[0][0] == "bad"
    sections = [
        _advice(content),
        tail if is_bad else "",
        _timeline(content),
        render_evaluations(content.summary.evaluations),
        render_samples(content.log.others),
        render_spent(summary.account) if content.progress.attempts else "",
        _gpus(content),
        _ranks(content),
        _traffic(content),
        _predicted(content.predicted),
        _faults(content),
        _attempts(content),
        _jobs(content),
        _left_out(summary),
        f"<h2>Damaged data</h2><p>{escape(one_line(summary.damaged))}</p>" if summary.damaged else "",
        _settings(content),
        _machine(content),
        "" if is_bad else tail,
    ]
    body = [_header(content), _tiles(content), *_link(section for section in sections if section)]
    scripts = ""
    if content.axis is not None and (content.figures or content.panels):
        scripts = render_script(script_data(content.axis, content.figures, content.panels))
    title = f"{summary.name} - Shardway"
    return render_document(
        title, "\n".join(part for part in body if part), style=render_report_style(), scripts=scripts
    )


def _link(sections: Iterable[str]) -> list[str]:
    """The sections, with a line of links to them before the first."""
    linked, links = [], []
    for place, section in enumerate(sections):
        title = section.removeprefix("<h2>").partition("</h2>")[0]
        links.append(f'<a href="#part{place}">{title}</a>')
        linked.append(f'<i id="part{place}"></i>{section}')
    return [f'<nav class="soft">{" · ".join(links)}</nav>', *linked] if len(links) > 3 else linked


def render_report_style() -> str:
    """The rules that a report adds to the sheet."""
    return "\n" + read_beside(__package__, "report.css")


def render_script(data: dict[str, Any]) -> str:
    """The script with its data."""
    # "<" is escaped, so that data cannot close its element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<script type="application/json" id="data">{text}</script>\n'
        f"<script>\n{read_beside(__package__, 'report.js')}</script>\n"
    )


def render_pairs(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A table of labels and values under a title."""
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in pairs)
    return f'<div class="card pairs"><h3>{escape(title)}</h3><table>{rows}</table></div>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return render_table("", columns, rows, plain=True)


# --- head of the page


def _header(content: ReportContent) -> str:
    summary = content.summary
    state = content.jobs[-1].state if content.is_foreign else summary.state
    command = " ".join(content.jobs[-1].command) if content.jobs else ""
    command = f"<p><code>{escape(one_line(command))}</code></p>" if command else ""
    sentences = describe(content)
    words = "".join(f'<p class="verdict {mood}">{escape(each)}</p>' for mood, each in sentences if mood)
    rest = " ".join(each for mood, each in sentences if not mood)
    words += f"<p>{escape(rest)}</p>" if rest else ""
    began = summary.started or (content.axis.start if content.axis else None)
    last = summary.updated or (content.axis.end if content.axis else None)
    facts = [
        str(content.run.path.absolute()),
        f"started {_render_date(began)}",
        f"last sign of life {_render_date(last)}",
    ]
    facts += ["times are h:min:s"]
    facts[:0] = [one_line(summary.reason)] if summary.reason and summary.state == "finished" else []
    return (
        f'<header><h1>{escape(summary.name)}<span class="state {escape(state.split()[0])}">{escape(state)}'
        f'</span></h1>{words}{command}<p class="soft">{escape(" · ".join(facts))}</p></header>'
    )


def _tiles(content: ReportContent) -> str:
    summary = content.summary
    hardware = _hardware_tiles(content)
    if content.is_foreign:
        wall = ("wall time", render_time(content.wall_s), render_plural(len(content.jobs), "attempt"))
        return render_tiles([*hardware, wall])
    rate = summary.rate
    saved = f"last at step {summary.checkpoints[-1]:,}" if summary.checkpoints else "none kept"
    saved += f", best at step {summary.best_checkpoint.step:,}" if summary.best_checkpoint else ""
    tiles: list[tuple[str, ...]] = [
        ("steps", f"{summary.step:,}", f"of {summary.total_steps:,}" if summary.total_steps else ""),
        ("loss, recent mean", render_loss(summary.smooth_loss), f"last step {render_loss(summary.loss)}"),
        *_validation_tile(summary),
        (f"{summary.unit}/s", render_total(rate), "median of the last steps") if rate else (),
        *hardware,
        ("wall time", render_time(summary.wall_s), render_plural(summary.attempts, "attempt")),
        ("checkpoints", f"{len(summary.checkpoints)}", saved),
        ("parameters", render_total(summary.parameters)) if summary.parameters else (),
        ("ranks", f"{summary.world}", f"on {summary.device}") if summary.world else (),
    ]
    return render_tiles(filter(None, tiles))


def _hardware_tiles(content: ReportContent) -> list[tuple[str, ...]]:
    tiles: list[tuple[str, ...]] = []
    if content.gpus:
        uses = [gpu.use_mean for gpu in content.gpus if gpu.use_mean is not None]
        mean = f"{sum(uses) / len(uses):.0f} %" if uses else UNKNOWN
        tiles.append(
            ("GPU use", mean, f"mean of {len(content.gpus)} GPUs on {render_plural(len(content.nodes), 'node')}")
        )
        if content.energy_kwh is not None:
            hours = render_value(content.gpu_hours or 0.0)
            tiles.append(("energy of the GPUs", f"{content.energy_kwh:.3g} kWh", f"{hours} GPU-hours"))
    elif content.cores is not None:
        cores = content.cores
        tiles.append(("core use", f"{cores.use:.0f} %", f"mean of {cores.allowed} cores"))
    return tiles


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


def _advice(content: ReportContent) -> str:
    if not content.advice:
        return ""
    cards = []
    for each in content.advice:
        at_most = []
        if each.ceiling_ms is not None and math.isfinite(each.ceiling_ms):
            at_most.append(f"{each.ceiling_ms:.3g} ms a step")
        if each.ceiling_percent is not None and math.isfinite(each.ceiling_percent):
            at_most.append(f"{each.ceiling_percent:.0f} %")
        gain = f'<p class="soft">At most {" or ".join(at_most)} to gain.</p>' if at_most else ""
        cards.append(
            f'<li class="card tip {escape(each.severity)}"><p><b>{escape(each.evidence)}</b></p>'
            f"<p>To do: {escape(each.do)}</p>"
            f'<p class="soft">To check: {escape(each.check)} <code>{escape(each.rule)}</code></p>{gain}</li>'
        )
    note = '<p class="soft">The most important first. Gains are upper bounds of one change each; they overlap.</p>'
    return f'<h2>What to change</h2>{note}<ol class="tips">{"".join(cards)}</ol>'


# --- over time


def _timeline(content: ReportContent) -> str:
    axis = content.axis
    np = find_arrays()

    none = "" if content.log.steps or content.is_foreign else '<p class="soft">No step has been recorded yet.</p>'
    if axis is None or not (content.figures or content.panels):
        return f"<h2>Over time</h2>{none}" if none else ""
    count = int((~np.isfinite(content.log.column("loss"))).sum())
    broken = f"<p>The loss of {render_plural(count, 'step')} was not a finite number: a gap.</p>" if count else ""
    curves = [(figure.is_main, render_curves(figure, axis, content.marks)) for figure in content.figures]
    lanes = render_events(axis, content.marks) + _group("Training", curves)
    for group in GROUPS:
        maps = [(each.is_main, each) for each in content.panels if each.group == group]
        lanes += _group(group, [(is_main, render_panel(each, axis, content.marks)) for is_main, each in maps])
    notes = []
    if content.still:
        notes.append(f"Left out, because nothing happened: {', '.join(content.still)}.")
    if content.missing:
        reasons = "; ".join(f"{name}: {one_line(why)}" for name, why in list(content.missing.items())[:8])
        notes.append(f"Not sampled: {reasons}.")
    below = f'<p class="soft">{escape(" ".join(notes))}</p>' if notes else ""
    return (
        '<h2>Over time</h2><p class="soft">All figures share one axis: wall time since the start. Lines across them '
        f"are resumes and faults.</p>{none}{broken}{lanes}{below}"
    )


def _group(title: str, lanes: Sequence[tuple[bool, str]]) -> str:
    """Lanes under a title, those that are not main ones folded."""
    if not lanes:
        return ""
    main, more = ("".join(lane for is_main, lane in lanes if is_main is wanted) for wanted in (True, False))
    count = sum(not is_main for is_main, _ in lanes)
    words = f"{render_plural(count, 'more figure')}: {title[0].lower() + title[1:] if title[1:2].islower() else title}"
    folded = f'<details class="print"><summary>{escape(words)}</summary>{more}</details>' if more else ""
    return f'<h3 class="group">{escape(title)}</h3>{main}{folded}'


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


# --- tables


def _attempts(content: ReportContent) -> str:
    progress, restarts = content.progress, iter(content.restarts)
    columns = ["attempt", "started", "steps", "ranks", "launcher", "device", "host", "torch", "Python", "time", "end"]
    rows = []
    counts = accumulate(int(not attempt.again) for attempt in progress.attempts)
    goes_on = [attempt.again for attempt in progress.attempts][1:] + [False] * bool(progress.attempts)
    is_alive = content.summary.state == "running"
    for count, attempt, restarted in zip(counts, progress.attempts, goes_on, strict=True):
        start, ending = attempt.start, attempt.ending
        end = f"{ending.state}: {ending.reason}" if ending and ending.reason else ending.state if ending else ""
        if not ending:
            end = "goes on" if is_alive and attempt is progress.attempts[-1] else "no end was recorded (killed?)"
        if restarted and (event := next(restarts, None)) is not None:
            end = f"restarted: {event.get('reason', '')}"
        machine = (start.launcher, start.device, start.host, start.torch, start.python)
        rows.append(
            [
                f"{count}, again" if attempt.again else str(count),
                _render_date(start.time),
                f"{start.step} to {attempt.step}",
                *(str(each or UNKNOWN) for each in (start.world, *machine)),
                render_time(attempt.wall_s),
                end,
            ]
        )
    return f"<h2>Attempts</h2>{_table(columns, rows)}" if rows else ""


def _left_out(summary: RunSummary) -> str:
    if not summary.left_out:
        return ""
    rows = [
        [_render_date(each.time), str(each.samples), f"{each.start} to {each.end}", str(each.back_to), each.reason]
        for each in summary.left_out
    ]
    columns = ["at", "samples", "positions", "back to step", "after"]
    return f"<h2>Left out after spikes</h2>{_table(columns, rows)}"


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


def _faults(content: ReportContent) -> str:
    progress = content.progress
    rows = [
        [
            str(event.get("step", UNKNOWN)),
            _render_date(number(event, "time")),
            "restart",
            "",
            str(event.get("reason", "")),
        ]
        for event in content.restarts
    ]
    for fault in (fault for attempt in progress.attempts for fault in attempt.faults):
        step, code = (UNKNOWN if value is None else str(value) for value in (fault.step, fault.exit_code))
        rows.append([step, _render_date(fault.time), fault.kind, code, fault.message])
    return f"<h2>Faults</h2>{_table(['step', 'time', 'kind', 'exit code', 'message'], rows)}" if rows else ""


def _gpus(content: ReportContent) -> str:
    if not content.gpus:
        return ""
    judged = next((gpu for gpu in content.gpus if gpu.start is not None and (gpu.starts or 1) > 1), None)
    about = f"verdict of start {judged.start} of {judged.starts}" if judged else "verdict"
    title = "All columns but the verdict are over all starts" if judged else ""
    columns, rows = ("node", "GPU", about, *COLUMNS[2:]), [*_gpu_rows(content)]
    table = render_table(title, columns, rows, words={2})
    if len(rows) > MOST_GPU_ROWS:
        odd = [row for row in rows if row[2] != "used"][:MOST_GPU_ROWS]
        first = render_table("Those that are not well used", columns, odd, words={2}) if odd else ""
        table = f'{first}<details class="print"><summary>All {len(rows)} GPUs</summary>{table}</details>'
    spreads = [row for name, unit, scale in _SPREADS if (row := _spread(content, name, unit, scale))]
    heads = ("over the GPUs", "lowest", "mean", "highest", "highest less lowest, of the mean")
    spread = render_table("How evenly the GPUs worked", heads, spreads) if spreads else ""
    return f"<h2>GPUs</h2>{table}{spread}"


MOST_GPU_ROWS = 32  # of more GPUs, those that are not well used are shown openly


def _gpu_rows(content: ReportContent) -> Iterable[tuple[str, ...]]:
    for gpu, row in zip(content.gpus, list_gpu_rows(content.gpus), strict=True):
        yield (content.nodes.get(gpu.host, gpu.host), row[1], gpu.verdict, *row[2:])


_SPREADS = (
    ("use_mean", "%", 1.0),
    ("sm_mean", "%", 1.0),
    ("memory_max_bytes", "GiB", 2.0**-30),
    ("power_mean_w", "W", 1.0),
    ("energy_kwh", "kWh", 1.0),
)
_LABELS = {
    "use_mean": "mean use",
    "sm_mean": "mean SM activity",
    "memory_max_bytes": "most memory",
    "power_mean_w": "mean power",
    "energy_kwh": "energy",
}


def _spread(content: ReportContent, name: str, unit: str, scale: float) -> tuple[str, ...]:
    known = [(value * scale, gpu) for gpu in content.gpus if (value := getattr(gpu, name)) is not None]
    if len(known) < 2:
        return ()
    low, high = min(known, key=lambda each: each[0]), max(known, key=lambda each: each[0])
    mean = math.fsum(value for value, _ in known) / len(known)
    share = f"{100 * (high[0] - low[0]) / mean:.0f} %" if mean > 0 else ""
    ends = (f"{render_value(value)} {unit} ({content.nodes[gpu.host]}:{gpu.index})" for value, gpu in (low, high))
    first, last = ends
    return _LABELS[name], first, f"{render_value(mean)} {unit}", last, share


def _ranks(content: ReportContent) -> str:
    times = content.ranks
    if not times.ranks:
        return f'<h2>Ranks</h2><p class="soft">Step times by rank: n/a, {escape(times.missing)}.</p>' * bool(
            times.missing
        )
    words = (
        "All ranks end a step together. So a rank that is late shows in its time outside of steps: the others wait "
        "inside theirs. How evenly the GPUs worked is shown above."
    )
    shown = sorted(times.ranks, key=lambda each: each.slowness, reverse=True)[:MOST_RANK_ROWS]
    rows = [
        (
            f"rank {each.rank}",
            content.nodes.get(each.host, UNKNOWN),
            *(UNKNOWN if share is None else render_share(share, 1.0) for share in (each.data_share, each.script_share)),
            UNKNOWN if each.step_share is None else render_share(each.step_share, 1.0),
            *(
                UNKNOWN if each_s is None else _render_step(each_s)
                for each_s in (each.step_s, each.median_s, each.slow_s)
            ),
        )
        for each in shown
    ]
    more = len(times.ranks) - len(rows)
    columns = (
        *("rank", "node", "waits for data", "in its script", "in steps"),
        *("in a step, mean", "in a step, median", "95 of 100 below"),
    )
    keep = [at for at in range(len(columns)) if at < 2 or any(row[at] not in (UNKNOWN, "0 %") for row in rows)]
    table = render_table(
        "Most time outside of steps first",
        [columns[at] for at in keep],
        [[row[at] for at in keep] for row in rows],
        words={1},
    )
    notes: list[str] = []
    notes += [f"Not shown: {more} ranks with less time outside of steps."] if more > 0 else []
    notes += ["Shares are of looks at the ranks, one a sample, between start and end."] if times.ranks[0].looks else []
    below = f'<p class="soft">{escape(" ".join(notes))}</p>' if notes else ""
    return f'<h2>Ranks</h2><p class="soft">{words}</p>{table}{below}'


MOST_RANK_ROWS = 16


def _render_step(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _traffic(content: ReportContent) -> str:
    """Of all nodes, by kind; a rate is the largest of one node, which is named."""
    if not content.traffic:
        return ""
    rows = []
    for what in dict.fromkeys(each.what for each in content.traffic):
        here = [each for each in content.traffic if each.what == what]
        ins, outs = max(here, key=lambda each: each.read_most), max(here, key=lambda each: each.write_most)
        rows.append(
            (
                what,
                render_size(math.fsum(each.read_bytes for each in here)),
                render_size(math.fsum(each.written_bytes for each in here)),
                f"{render_size(ins.read_most)}/s ({content.nodes.get(ins.host, ins.host)})",
                f"{render_size(outs.write_most)}/s ({content.nodes.get(outs.host, outs.host)})",
            )
        )
    columns = ("of all nodes", "read or in", "written or out", "fastest in of a node", "fastest out of a node")
    return f"<h2>Files and network</h2>{render_table('', columns, rows)}"


def _jobs(content: ReportContent) -> str:
    if not content.jobs:
        return ""
    rows = [
        (
            str(job.number),
            job.job or UNKNOWN,
            job.nodes or UNKNOWN,
            _render_date(job.started),
            render_time(job.wall_s),
            job.state,
            UNKNOWN if job.exit_code is None else str(job.exit_code),
            job.reason,
        )
        for job in content.jobs
    ]
    columns = ("attempt", "job", "nodes", "started", "wall time", "state", "exit code", "reason")
    return f"<h2>Jobs</h2>{_table(columns, rows)}"


def _settings(content: ReportContent) -> str:
    title, settings = "<h2>Resolved run</h2>", content.settings
    if settings.problem:
        return f"{title}<p>{escape(settings.problem)}</p>"
    if not settings.chosen and not settings.defaults:
        return ""
    count = sum(map(len, settings.defaults.values()))
    folded = (
        f"<details><summary>{render_plural(count, 'key')} at default</summary>{_sections(settings.defaults)}</details>"
    )
    return f"{title}{_sections(settings.chosen)}{folded if count else ''}"


def _sections(sections: dict[str, dict[str, Any]]) -> str:
    tables = (
        render_pairs(name, ((key, render_setting(value)) for key, value in section.items()))
        for name, section in sections.items()
    )
    return f'<section class="tables">{"".join(tables)}</section>'


def _machine(content: ReportContent) -> str:
    start, saves = content.progress.start, content.progress.saves
    if start is None or not start.machine:
        return ""
    size = [("last checkpoint", render_size(saves[-1].size_bytes))] if saves else []
    tuned = [("train.tune", str(event.get("reason", ""))) for event in content.log.others if event["event"] == "tuned"][
        -1:
    ]
    return f"<h2>Machine</h2>{render_pairs(start.host or 'host', [*start.machine.items(), *size, *tuned])}"


def _tail(content: ReportContent) -> str:
    if not content.tail:
        return ""
    is_open = " open" if content.is_foreign or content.summary.state == "failed" else ""
    text = f'<div class="tail"><pre>{escape(content.tail)}</pre></div>'
    return f"<h2>Output</h2><details{is_open}><summary>The last lines</summary>{text}</details>"


def render_setting(value: Any) -> str:
    """A value of a run file, without quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(
            f"[{render_setting(each)}]" if isinstance(each, list) else render_setting(each) for each in value
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
