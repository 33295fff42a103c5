"""All that a report shows of one run, gathered once: the page, `--json` and the proposal's table are views of it.

Invariants:
- A report can be made of any run directory, however little is in it or however the run died; nothing is raised for
  what telemetry or records hold.
- Sentences state what was measured, with numbers; what was not sampled is named with its reason.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardway.errors import JobError
from shardway.plain_arrays import find_arrays
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.telemetry.store import HostTelemetry, read_telemetry
from shardway.units import render_plural
from shardway.watch.advice.advise import advise, judge_gpus
from shardway.watch.advice.events import FoldedEvents
from shardway.watch.advice.findings import Advice
from shardway.watch.hosts import order_of_host, shorten_hosts
from shardway.watch.progress import RunProgress, RunSummary, summarise_progress
from shardway.watch.report.axis import TimeAxis, make_axis
from shardway.watch.report.curves import Figure, Mark, find_marks, make_figures
from shardway.watch.report.event_log import EventLog
from shardway.watch.report.hardware import (
    CoreTotals,
    GpuTotals,
    Panel,
    Traffic,
    list_missing,
    make_panels,
    total_cores,
    total_gpus,
    total_traffic,
)
from shardway.watch.report.lanes import render_value
from shardway.watch.report.predicted import Predicted, predict
from shardway.watch.report.ranks import RankTimes, find_rank_times
from shardway.watch.words import (
    one_line,
    render_account,
    render_events_end,
    render_set_back,
    render_share,
    render_time,
    render_total,
)

# --- attempts as jobs, of any command


@dataclass(frozen=True)
class JobAttempt:
    """One attempt by the records in its folder; times are Unix seconds, None where unknown. `command`: of a program
    that is not ours."""

    number: int
    job: str
    nodes: str
    submitted: float | None
    started: float | None
    ended: float | None
    state: str
    reason: str
    exit_code: int | None
    command: tuple[str, ...]

    @property
    def wall_s(self) -> float | None:
        if not self.started or not self.ended or self.ended < self.started:  # a clock was set back
            return None
        return self.ended - self.started


def read_jobs(run: RunDir) -> list[JobAttempt]:
    """The attempts that were submitted, oldest first."""
    try:
        return [_read_job(attempt) for attempt in run.attempts()]
    except JobError:
        return []


def _read_job(attempt: Attempt) -> JobAttempt:
    submission, started, result = attempt.read_submission(), attempt.read_started(), attempt.read_result()
    command: tuple[str, ...] = ()
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, AttributeError):
        words = json.loads(attempt.order_path.read_text(encoding="utf-8")).get("command")
        command = tuple(map(str, words)) if isinstance(words, list) else ()
    return JobAttempt(
        attempt.number,
        (started.job if started else "") or (submission.job if submission else ""),
        (started.nodes or started.host) if started else "",
        (submission.submitted or None) if submission else None,
        (started.started or None) if started else None,
        (result.ended or None) if result else None,
        str(result.state) if result else "running or unknown" if started else "not started",
        result.reason if result else "",
        result.exit_code if result else None,
        command,
    )


_TAIL_BYTES, _TAIL_LINES = 2**16, 40


def read_output_tail(run: RunDir) -> str:
    """The last lines that the newest job printed, or rank 0 where there was no job; "" where nothing is kept."""
    with contextlib.suppress(OSError, JobError):
        attempts = run.attempts()
        paths = [attempts[-1].job_log] if attempts else run.rank_output(0)[:1]
        for path in paths:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(
                "".join(c if c.isprintable() or c == "\t" else " " for c in line) for line in lines[-_TAIL_LINES:]
            )
    return ""


# --- keys


@dataclass(frozen=True)
class Settings:
    """The resolved run by section: keys that were set or derived, and those left at their default; `problem`: why it
    cannot be read."""

    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    problem: str = ""


def read_settings(run: RunDir) -> Settings:
    """The settings; an origin beside a value ("# default") sorts it, and one without counts as set."""
    try:
        resolved = run.read_resolved()
    except JobError as error:
        return Settings(problem=str(error))
    plain = _read_default_keys(run.resolved_path)
    loose = {key: value for key, value in resolved.items() if not isinstance(value, dict)}
    sections = ({"run file": loose} if loose else {}) | {k: v for k, v in resolved.items() if isinstance(v, dict)}
    chosen: dict[str, dict[str, Any]] = {}
    defaults: dict[str, dict[str, Any]] = {}
    for section, table in sections.items():
        for key, value in table.items():
            side = defaults if (section, key) in plain else chosen
            side.setdefault(section, {})[key] = value
    return Settings(chosen, defaults)


def _read_default_keys(path: Path) -> set[tuple[str, str]]:
    found, section = set(), ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                section = line.strip("[] ")
            elif line.rstrip().endswith(" # default"):
                found.add((section, line.partition("=")[0].strip()))
    return found


# --- all of it


@dataclass(frozen=True)
class ReportContent:
    """One run, read once. `axis` is None where nothing has a date; `still`: quantities that never moved, `missing`:
    those that were not sampled, with the reason."""

    run: RunDir
    progress: RunProgress
    summary: RunSummary
    log: EventLog
    axis: TimeAxis | None
    figures: list[Figure]
    marks: list[Mark]
    panels: list[Panel]
    still: list[str]
    gpus: list[GpuTotals]
    cores: CoreTotals | None
    nodes: dict[str, str]
    traffic: list[Traffic]
    missing: dict[str, str]
    advice: list[Advice]
    jobs: list[JobAttempt]
    ranks: RankTimes
    settings: Settings
    predicted: Predicted | None
    tail: str

    @property
    def is_foreign(self) -> bool:
        """Whether a program that is not ours ran: submitted, and without an event."""
        return bool(self.jobs) and not self.progress.attempts

    @property
    def restarts(self) -> list[Event]:
        """The events of ranks that started again within an attempt."""
        return [event for event in self.log.others if event["event"] == "restarted"]

    @property
    def wall_s(self) -> float:
        """Wall time of all attempts: by the jobs' records, else by the events or the samples."""
        if self.is_foreign and (known := [job.wall_s for job in self.jobs if job.wall_s]):
            return sum(known)
        return self.summary.wall_s or (self.axis.alive_s if self.axis and self.gpus else 0.0)

    @property
    def energy_kwh(self) -> float | None:
        known = [gpu.energy_kwh for gpu in self.gpus if gpu.energy_kwh is not None]
        return math.fsum(known) if known else None

    @property
    def gpu_hours(self) -> float | None:
        return sum(gpu.sampled_s for gpu in self.gpus) / 3600 if self.gpus else None

    def as_json(self) -> dict[str, Any]:
        """Plain data for strict JSON."""
        times = self.axis
        facts = {
            "summary": self.summary.as_json(),
            "verdict": [words for _, words in describe(self)],
            "gpus": [gpu.as_json() for gpu in self.gpus],
            "cores": asdict(self.cores) if self.cores else None,
            "advice": [each.as_json() for each in self.advice],
            "wall_s": self.wall_s,
            "gpu_hours": self.gpu_hours,
            "energy_kwh": self.energy_kwh,
            "jobs": [{**asdict(job), "wall_s": job.wall_s} for job in self.jobs],
            "ranks": [asdict(rank) for rank in self.ranks.ranks],
            "ranks_missing": self.ranks.missing,
            "traffic": [asdict(each) for each in self.traffic],
            "predicted": self.predicted.as_json() if self.predicted else None,
            "settings": {"set": self.settings.chosen, "defaults": self.settings.defaults},
            "not_sampled": self.missing,
            "nothing_happened": self.still,
            "faults": [asdict(fault) for attempt in self.progress.attempts for fault in attempt.faults],
            "output_tail": self.tail,
            "figures": [
                {
                    "name": figure.name,
                    "title": figure.title,
                    "unit": figure.unit,
                    "curves": [
                        {
                            "name": curve.name,
                            "time": [point.time for point in curve.points],
                            "step": [point.step for point in curve.points],
                            "value": [point.value for point in curve.points],
                        }
                        for curve in figure.curves
                    ],
                }
                for figure in self.figures
            ],
            "hardware": [_panel_facts(panel, times) for panel in self.panels if times is not None],
        }
        plain: dict[str, Any] = _finite(facts)
        return plain


def _panel_facts(panel: Panel, axis: TimeAxis) -> dict[str, Any]:
    np = find_arrays()

    edges = axis.time(np.linspace(0, 1, len(panel.middle) + 1))
    return {
        "name": panel.name,
        "title": panel.title,
        "unit": panel.unit,
        "rows": list(panel.rows),
        "row_means": panel.row_means.tolist(),
        "times": edges[:-1].tolist(),
        "least": panel.least.tolist(),
        "mean": panel.middle.tolist(),
        "most": panel.most.tolist(),
        "values": panel.means.tolist(),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float):
        return (
            float(f"{value:.9g}")
            if math.isfinite(value) and abs(value) < 1e8
            else value
            if math.isfinite(value)
            else None
        )
    return value if isinstance(value, int | str | None) else str(value)


def gather(run: RunDir) -> ReportContent:
    """Read everything. Raises JobError where status.json is damaged or the folder does not answer."""
    log, folded = EventLog(), FoldedEvents()
    for event in run.all_events():
        log.add(event)
        folded.update(event)
    progress = folded.progress
    summary = summarise_progress(run, progress)
    jobs = read_jobs(run)
    if jobs and not progress.attempts and summary.state == "new":  # a command, or a job that has not begun
        summary = replace(summary, state=jobs[-1].state, reason=jobs[-1].reason)
    hosts = [host for host in read_telemetry(run.telemetry_folder) if len(host.times)]
    hosts.sort(key=lambda host: order_of_host(host.host))
    axis = make_axis([*_find_spans(progress, jobs), *(span for host in hosts for span in _find_sampled(host))])
    panels, still = make_panels(hosts, axis) if axis and hosts else ([], [])
    return ReportContent(
        run=run,
        progress=progress,
        summary=summary,
        log=log,
        axis=axis,
        figures=make_figures(log, progress),
        marks=find_marks(log.others, progress),
        panels=panels,
        still=still,
        gpus=total_gpus(hosts, judge_gpus(hosts)),
        cores=total_cores(hosts),
        nodes=shorten_hosts(host.host for host in hosts),
        traffic=total_traffic(hosts),
        missing=list_missing(hosts),
        advice=advise(run, hosts, folded),
        jobs=jobs,
        ranks=find_rank_times(run, hosts, log, progress),
        settings=read_settings(run),
        predicted=predict(run, progress.attempts, log),
        tail=read_output_tail(run),
    )


def _find_spans(progress: RunProgress, jobs: Sequence[JobAttempt]) -> list[tuple[float, float]]:
    spans = [attempt.span for attempt in progress.attempts]
    return spans + [(job.started, job.ended) for job in jobs if job.started and job.ended]


def _find_sampled(host: HostTelemetry) -> list[tuple[float, float]]:
    np = find_arrays()

    apart = max(120.0, 10 * host.info.every_s)
    cuts = np.flatnonzero(np.diff(host.times) > apart) + 1
    return [(float(part[0]), float(part[-1])) for part in np.split(host.times, cuts)]


# --- the verdict in words

Mood = str  # "good", "bad", "unsure" or "": how a sentence is coloured


def describe(content: ReportContent) -> list[tuple[Mood, str]]:
    """The most important sentences first: how it ended, what is wrong, then how GPUs and cores were used and what the
    time went to."""
    more = [*_describe_gpus(content), *_describe_cores(content), *_describe_work(content)]
    return [_describe_end(content), *sorted(more, key=lambda each: ("bad", "unsure", "good", "").index(each[0]))]


def _describe_end(content: ReportContent) -> tuple[Mood, str]:
    summary = content.summary
    if content.is_foreign:
        last = content.jobs[-1]
        code = "" if last.exit_code is None else f", exit code {last.exit_code}"
        took = f" after {render_time(last.wall_s)}" if last.wall_s is not None else ""
        mood = "good" if last.state == "finished" else "bad" if last.exit_code else ""
        why = f": {one_line(last.reason)}" if last.reason else ""
        return mood, f"The command {_STATES.get(last.state, f'is {last.state}')}{took}{code}{why}."
    if summary.state == "new" and summary.reason:
        return "unsure", f"Whether the run has begun is not recorded: {one_line(summary.reason)}."
    done = f"{summary.step:,} of {summary.total_steps:,} steps" if summary.total_steps else f"{summary.step:,} steps"
    mood = {"finished": "good", "failed": "bad", "stopped": "unsure"}.get(summary.state, "")
    verb = _STATES.get(summary.state, f"is {summary.state}")
    if summary.state == "new" and not summary.attempts:
        return mood, "The run has not begun."
    why = f": {one_line(summary.reason).rstrip('.')}" if summary.reason and summary.state != "finished" else ""
    pace = f"{done} in {render_time(summary.wall_s)}, {render_plural(summary.attempts, 'attempt')}"
    return mood, f"The run {verb}{why}. {pace[0].upper()}{pace[1:]}." if why else f"The run {verb}: {pace}."


_STATES = {
    "finished": "has finished",
    "failed": "has failed",
    "stopped": "was stopped",
    "running": "is running",
    "new": "has not begun",
    "crashed": "has failed",
    "deadline": "ended with its wall-time",
    "out_of_memory": "ran out of memory",
}

_WORDS = {
    "idle": "did not work",
    "low": "had little work",
    "waiting": "waited for other ranks most of the time",
    "throttled": "had their clocks held back",
}


def _describe_gpus(content: ReportContent) -> list[tuple[Mood, str]]:
    gpus = content.gpus
    if not gpus:
        reason = next(iter(content.missing.values()), "")
        where = f" ({one_line(reason)})" if reason else ""
        return [("", f"No GPU was sampled{where}.")] if content.nodes or content.is_foreign else []
    found: list[tuple[Mood, str]] = []
    for host, short in content.nodes.items():
        here = [gpu for gpu in gpus if gpu.host == host]
        unused = [gpu for gpu in here if gpu.use_max is not None and gpu.use_max < 1]
        if unused:
            which = ", ".join(str(gpu.index) for gpu in unused)
            if len(unused) == len(here):
                words = f"No GPU of node {short} ran a kernel ({len(here)} of them)."
            else:
                words = f"{len(unused)} of {len(here)} GPUs on node {short} never ran a kernel (GPU {which})."
            found.append(("bad", words))
        for verdict, count in Counter(gpu.verdict for gpu in here if gpu not in unused).items():
            if verdict in _WORDS:
                which = ", ".join(str(gpu.index) for gpu in here if gpu.verdict == verdict and gpu not in unused)
                words = f"{count} of {len(here)} GPUs on node {short} {_WORDS[verdict]} (GPU {which})."
                if count == 1:
                    words = f"GPU {which} of node {short} {_WORDS[verdict].replace('their', 'its')}."
                found.append(("unsure" if verdict != "idle" else "bad", words))
    most = 6
    if len(found) > most:
        found = [*found[:most], ("bad", f"And {len(found) - most} more nodes or groups like these.")]
    uses = [gpu.use_mean for gpu in gpus if gpu.use_mean is not None]
    if uses:
        spread = f" ({min(uses):.0f} to {max(uses):.0f} %)" if len(uses) > 1 else ""
        who = "All GPUs were used: a" if not found else "A"
        what = f"{who} kernel ran {sum(uses) / len(uses):.0f} % of the time, the mean of {len(uses)} GPUs{spread}"
        parts = []
        for name, label in (("sm_mean", "multiprocessors had work"), ("tensor_mean", "tensor cores worked")):
            known = [value for gpu in gpus if (value := getattr(gpu, name)) is not None]
            parts += [f"their {label} {sum(known) / len(known):.0f} %"] if known else []
        found.append(("" if found else "good", f"{what}{'; ' + ', '.join(parts) if parts else ''}."))
    if content.energy_kwh is not None:
        sources = " and ".join(dict.fromkeys(gpu.energy_from for gpu in gpus if gpu.energy_from))
        hours = render_value(content.gpu_hours or 0.0)
        found.append(("", f"The GPUs took {content.energy_kwh:.3g} kWh in {hours} GPU-hours ({sources})."))
    return found


def _describe_cores(content: ReportContent) -> list[tuple[Mood, str]]:
    cores = content.cores
    if cores is None:
        return []
    of_all = f" of {cores.cores}" if cores.allowed < cores.cores else ""
    where = f" on {len(content.nodes)} nodes" if len(content.nodes) > 1 else ""
    words = f"The job may use {cores.allowed}{of_all} cores{where}, which were {cores.use:.0f} % busy"
    if cores.busy is not None and 0 < cores.busy < cores.allowed:
        words += f" ({cores.busy} of them more than half of the time)"
    if cores.load is None or cores.load < CROWDED:
        return [("", f"{words}.")]
    node = f" of {content.nodes[cores.crowded]}" if len(content.nodes) > 1 else ""
    return [("unsure", f"{words}: {cores.load:.1f} tasks wanted to run on each core{node}, so they waited.")]


CROWDED = 1.3  # tasks a core, on average, from which it is said that tasks wait for each other


def _describe_work(content: ReportContent) -> list[tuple[Mood, str]]:
    summary, found = content.summary, list[tuple[Mood, str]]()
    if words := render_events_end(summary.events_end, summary.step):
        found.append(("unsure", f"The events {words}."))
    if words := render_set_back(summary.clock_back_s):
        found.append(("unsure", f"{words[0].upper()}{words[1:]}, and figures show that time twice."))
    if content.restarts:
        why = one_line(str(content.restarts[-1].get("reason", ""))).rstrip(".")
        count = len(content.restarts)
        times = "once" if count == 1 else f"{count} times, the last time"
        found.append(("unsure", f"The ranks restarted {times}: {why}."))
    if (late := content.ranks.late) is not None:
        share, usual = (render_share(each, 1.0) for each in (late.outside_share or 0.0, content.ranks.usual_outside))
        place = f"Rank {late.rank} ({content.nodes.get(late.host, late.host)})"
        words = f"{place} spent {share} of its time outside of steps, the median rank {usual}: the others wait for it."
        found.append(("unsure", words))
    if summary.account is not None:
        found.append(("", f"Productive: {render_account(summary.account)}."))
    rate = summary.rate
    if rate:
        ranks = f", {render_total(rate / summary.world)} a rank" if summary.world and summary.world > 1 else ""
        found.append(("", f"{render_total(rate)} {summary.unit}/s at the end{ranks}."))
    return found
