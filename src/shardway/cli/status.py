"""`shardway status`: the state of runs, one in full or several as a table, here and on the hosts that they went to;
`shardway logs`: what a run says, from its events, or the output of one of its ranks.

Invariant: without torch; nothing is written, and a run may be writing meanwhile. Events and a scheduler's
answers are interpreted in `shardway.watch` and `shardway.launch`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from shardway.cli import options
from shardway.cli.options import JsonOption, complete_run, fill_seconds, find_run, print_json
from shardway.errors import ShardwayError, UserError, legible
from shardway.rundir.file_io import is_there
from shardway.units import render_clock, render_count

if TYPE_CHECKING:
    from shardway.launch.runs.find import Known
    from shardway.launch.runs.followers import RowOfRuns
    from shardway.launch.runs.job_status import JobStatus, Ledger
    from shardway.launch.serving.state import ServerAccess
    from shardway.launch.sweep.progress import MemberResult
    from shardway.launch.sweep.record import FoundSweep
    from shardway.rundir.directory import RunDir
    from shardway.rundir.events import Event, EventFollower
    from shardway.units import Monitor
    from shardway.watch.advice.events import FoldedEvents
    from shardway.watch.advice.findings import Advice, GpuVerdict
    from shardway.watch.progress import RunSummary
    from shardway.watch.top_hardware import HardwareTail, HardwareUse

RunWord = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run directory, a folder of them, HOST:DIRECTORY, a run's name, or the id of its job (default: all).",
        autocompletion=complete_run,
    ),
]
RunWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Run directories, folders of them, HOST:DIRECTORY, names of runs, or ids of jobs (default: all).",
        show_default=False,
        autocompletion=complete_run,
    ),
]

WATCH_S = 5.0
"""How long `--watch` waits between two looks."""

ASK_S = 15.0
"""Schedulers and other hosts are asked at most this often while a status is watched."""

_MOST_WATCH_S = 3600.0
_OLD_S = 7 * 24 * 3600.0
"""Runs of other folders that ended this long ago are left out of a table of all runs."""

_SECONDS = re.compile(r"\d+(\.\d+)?s?")


class CommandWithWatch(TyperCommand):
    """`--watch` may stand alone, or have seconds after it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, fill_seconds(args, ("--watch", "-w"), _SECONDS, WATCH_S))


COMMANDS = {"status": CommandWithWatch}


@dataclass(frozen=True)
class _ShownRun:
    """One run: its summary where its directory is on this machine, its attempts where it was submitted."""

    known: Known
    ledger: Ledger
    statuses: Sequence[JobStatus]
    summary: RunSummary | None = None
    hardware: HardwareUse | None = None
    folded: FoldedEvents | None = None
    row: RowOfRuns | None = None
    access: ServerAccess | None = None

    @property
    def job(self) -> JobStatus | None:
        """The attempt that it is known by."""
        from shardway.launch.runs.job_status import find_current

        return find_current(self.statuses)

    @property
    def state(self) -> str:
        """In one word. Without a summary it has not begun here, or is on another host: what status.json and its jobs
        say."""
        if self.summary is not None and (self.summary.state != "new" or self.job is None):
            return self.summary.state
        return str(self.ledger.status.get("state") or (self.job.word if self.job else "new"))

    @property
    def is_active(self) -> bool:
        return self.state == "running" or any(job.is_active for job in self.statuses)

    @property
    def gpus_asked(self) -> int | None:
        """Those that its job asked for, else its ranks on accelerators."""
        from shardway.watch.top_hardware import count_gpus

        submission = self.job.entry.submission if self.job else None
        asked = count_gpus(submission.asked) if submission else None
        if asked is None and self.summary is not None and self.summary.device.startswith("cuda"):
            return self.summary.world
        return asked

    @property
    def began(self) -> float | None:
        """When its first attempt was submitted or started (Unix seconds)."""
        entries = [job.entry for job in self.statuses]
        times = [entry.submission.submitted for entry in entries if entry.submission]
        times += [entry.started.started for entry in entries if entry.started]
        times += [self.summary.started] if self.summary and self.summary.started else []
        return min(filter(None, times), default=None)

    @property
    def updated(self) -> float:
        """When it last gave a sign of life (Unix seconds); 0 where that is not known."""
        times = [job.result.ended for job in self.statuses if job.result] + [self.began or 0.0]
        return max([*times, (self.summary.updated if self.summary else None) or 0.0])


def status(
    run: RunWords = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Every known run, here and on other hosts.")] = False,
    watch: Annotated[
        str | None,
        typer.Option(
            "--watch",
            "-w",
            metavar="[SECONDS]",
            help=f"Look again every SECONDS (default: {WATCH_S:g}) until it has ended, or Ctrl-C.",
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", help='Of a sweep: what its best run is chosen by, such as "max accuracy".')
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Say where runs stand: one in full, several as a table, a sweep with its values and its best."""
    words = run or []
    if all_runs and words:
        raise UserError(f"--all and {words[0]} say two things.\n  To do: leave one of them out.")
    if metric and _find_sweep(words) is None:
        raise UserError(f"--metric {metric}: it chooses the best run of a sweep.\n  To do: name one sweep alone.")
    if watch is not None:
        _watch(words, _read_interval(watch, words), all_runs=all_runs, as_json=as_json, metric=metric)
        return
    chosen, is_one = _choose(words)
    if not chosen and not as_json:
        typer.echo(
            f"no run in {words[0] if words else 'runs'} yet; start one with `shardway train` or `shardway submit`"
        )
        return
    shown = _Look().look(chosen)
    if as_json:
        print_json(_as_facts(shown, words, is_one=is_one, metric=metric))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    typer.echo(legible(_render(shown, words, all_runs=all_runs, width=width, metric=metric)))


def _find_sweep(words: Sequence[str]) -> FoundSweep | None:
    """The one sweep that is named, alone."""
    from shardway.launch.sweep.record import find_sweep

    return find_sweep(words[0]) if len(words) == 1 else None


def _find_access(known: Known, ledger: Ledger) -> ServerAccess | None:
    """How the server of a run's last attempt is reached; None for a run that serves nothing. One whose job has ended
    without a word has ended too."""
    from shardway.launch.hosts import find_host
    from shardway.launch.schedulers.base import find_scheduler
    from shardway.launch.serving.state import ServerAccess, read_serving

    last = ledger.last
    if last is None or last.submission is None or (not known.host and not is_there(last.attempt.serving_path)):
        return None
    serving = read_serving(find_host(known.host), last.attempt)
    if serving is None:
        return None
    if last.result is not None and serving.state != "ended":
        serving = replace(serving, state="ended", healthy=False, reason=last.result.reason)
    return ServerAccess(serving, known.host, find_scheduler(last.submission.scheduler).this_machine)


def _read_interval(text: str, words: Sequence[str]) -> float:
    """The seconds of `--watch`. Raises UserError for what may be meant for a job."""
    if not _SECONDS.fullmatch(text):
        raise UserError(f"--watch {text}: it is no number of seconds.\n      allowed: such as --watch, --watch 2")
    seconds = float(text.rstrip("s"))
    if not 0.5 <= seconds <= _MOST_WATCH_S:
        hint = "" if words else f"\n  If {text} is a job, name it first: shardway status {text} --watch"
        raise UserError(
            f"--watch {text}: it would look every {text} seconds.\n      allowed: 0.5 to {_MOST_WATCH_S:g}{hint}"
        )
    return seconds


def _choose(words: Sequence[str]) -> tuple[list[Known], bool]:
    """The runs that are meant, each once, and whether one run was named and not a folder. Raises UserError."""
    from shardway.launch.runs.find import Known, find_all, find_known, find_run_around, is_folder_of_runs, list_runs
    from shardway.launch.sweep.record import find_sweep

    if not words:
        return find_all(Path("runs")), False
    chosen: list[Known] = []
    named = 0
    for word in words:
        if (sweep := find_sweep(word)) is not None:
            chosen += [Known(str(sweep.folder / each.name), sweep.host.name) for each in sweep.record.members]
            continue
        if not is_folder_of_runs(word):
            named += 1
            chosen.append(find_known(word))
            continue
        found = list_runs(Path(word))
        if not found and (around := find_run_around(Path(word))) is not None:
            named += 1
            found = [around]
        chosen += [Known(str(entry)) for entry in found]
    return list(dict.fromkeys(chosen)), len(words) == named == 1


def _as_facts(shown: Sequence[_ShownRun], words: Sequence[str], *, is_one: bool, metric: str = "") -> Any:
    from shardway.launch.runs.job_status import attempts_as_json

    if (sweep := _find_sweep(words)) is not None:
        return _SweepTable.make(sweep, shown, metric).as_json(_as_facts(shown, (), is_one=False))
    facts = []
    for each in shown:
        said = each.summary.as_json() if each.summary else {**each.ledger.status, "path": each.known.run}
        host = {"host": each.known.host} if each.known.host else {}
        use = each.hardware
        hardware = {
            "gpus_asked": each.gpus_asked,
            "gpus_used": use.used if use else None,
            "use_percent": use.use_mean if use else None,
            "cpu_percent": use.cpu_percent if use else None,
            "sampled": use.newest if use else None,
        }
        facts.append({**said, **host, "jobs": attempts_as_json(each.statuses), "hardware": hardware})
    if not (is_one and len(facts) == 1):
        return facts
    verdicts, advice = _judge(shown[0])
    row = shown[0].row
    return {
        **facts[0],
        **(row.as_json() if row is not None else {}),
        **({"serving": shown[0].access.as_json()} if shown[0].access else {}),
        "gpus": [verdict.as_json() for verdict in verdicts],
        "advice": [each.as_json() for each in advice],
    }


class _Look:
    """Looks at runs, once or again and again: events are read on from the last look, schedulers and other hosts are
    asked every ASK_S seconds."""

    def __init__(self) -> None:
        self._folded: dict[Path, tuple[FoldedEvents, EventFollower]] = {}
        self._hardware: dict[Path, HardwareTail] = {}
        self._rows: dict[Known, tuple[float, RowOfRuns | None]] = {}
        self._asked: dict[str, tuple[float, list[Ledger], list[list[JobStatus]]]] = {}

    def look(self, chosen: Sequence[Known], *, alone: bool | None = None) -> list[_ShownRun]:
        """The runs, those of one host together; of several, one that cannot be read is reported, and left out."""
        alone = len(chosen) == 1 if alone is None else alone
        hosts = groupby(sorted(chosen, key=lambda known: known.host), key=lambda known: known.host)
        return [entry for _, group in hosts for entry in self._look_at_host([*group], alone=alone)]

    def _look_at_host(self, group: Sequence[Known], *, alone: bool) -> list[_ShownRun]:
        """The runs of one host, queried in a few exchanges. An unreachable host is reported, and the others are
        shown."""
        from shardway.rundir.directory import RunDir

        readable, shown = [], list[_ShownRun]()
        for known in group:
            with _describe(alone=alone):
                if not known.host:  # whether this version and this user can read it
                    RunDir(Path(known.run)).check_format()
                    RunDir(Path(known.run)).check_readable()
                readable.append(known)
        with _describe(alone=alone):
            ledgers, statuses = self._ask(group[0].host, readable)
            for known, ledger, attempts in zip(readable, ledgers, statuses, strict=True):
                if alone or not known.host or attempts or ledger.status:  # elsewhere, one that is gone is no news
                    with _describe(alone=alone):
                        summary = None if known.host else self._summarise(ledger, attempts)
                        hardware = None if known.host else self._find_hardware(ledger.run)
                        folded, _ = self._folded.get(ledger.run.path, (None, None))
                        row = self._look_at_row(known, ledger) if alone else None
                        access = _find_access(known, ledger) if alone else None
                        shown.append(_ShownRun(known, ledger, attempts, summary, hardware, folded, row, access))
        return shown

    def _ask(self, name: str, runs: Sequence[Known]) -> tuple[list[Ledger], list[list[JobStatus]]]:
        """The records of runs on a host, and what its schedulers say."""
        from shardway.launch.hosts import find_host
        from shardway.launch.runs.job_status import read_ledgers, read_standings

        asked, ledgers, statuses = self._asked.get(name, (-math.inf, [], []))
        is_recent = time.monotonic() - asked < ASK_S
        paths = [Path(known.run) for known in runs]
        if is_recent and name and [ledger.run.path for ledger in ledgers] == paths:
            return ledgers, statuses
        host = find_host(name)
        now = read_ledgers(host, paths)
        if is_recent and [(each.run, each.entries) for each in now] == [(each.run, each.entries) for each in ledgers]:
            return now, statuses
        statuses = read_standings(host, now)
        self._asked[name] = time.monotonic(), now, statuses
        return now, statuses

    def _look_at_row(self, known: Known, ledger: Ledger) -> RowOfRuns:
        """What the run waits for and what follows it."""
        from shardway.launch.hosts import find_host
        from shardway.launch.runs.followers import read_row

        asked, row = self._rows.get(known, (-math.inf, None))
        if row is None or not known.host or time.monotonic() - asked >= ASK_S:
            row = read_row(find_host(known.host), ledger)
            self._rows[known] = time.monotonic(), row
        return row

    def _summarise(self, ledger: Ledger, attempts: Sequence[JobStatus]) -> RunSummary | None:
        """What the run recorded; its state is that of a job that continues it, or that has a reason the ranks could not
        record."""
        from shardway.rundir.attempts import FAILURES
        from shardway.watch.advice.events import FoldedEvents
        from shardway.watch.progress import GONE, summarise_progress

        if not ledger.run.exists():
            return None
        folded, events = self._folded.get(ledger.run.path) or (FoldedEvents(), ledger.run.follow_events())
        for event in events.new_events() if ledger.run.path in self._folded else events.catch_up():
            folded.update(event)
        if folded.progress.attempts:
            self._folded[ledger.run.path] = folded, events
        summary = summarise_progress(ledger.run, folded.progress)
        active = next((attempt for attempt in attempts if attempt.is_active), None)
        if active is not None and summary.state != "running":
            return replace(summary, state=active.word, reason="")
        for attempt in reversed(attempts):
            result, entry = attempt.result, attempt.entry
            if result is None or result.ran_nothing:
                continue
            # The last attempt with work to do.
            if summary.reason == GONE:
                return replace(summary, reason=result.reason)
            sent = entry.submission.submitted if entry.submission else 0.0
            began = entry.started.started if entry.started else sent
            holds = summary.state in ("finished", "running")
            if not holds and result.state in FAILURES and began > (summary.updated or 0.0):
                return replace(summary, state="failed", reason=result.reason)  # of its ranks none wrote an event
            break
        return summary

    def _find_hardware(self, run: RunDir) -> HardwareUse | None:
        if run.path not in self._hardware:
            if not is_there(run.telemetry_folder):
                return None
            from shardway.watch.top_hardware import HardwareTail

            self._hardware[run.path] = HardwareTail(run.telemetry_folder)
        return self._hardware[run.path].refresh()


@contextmanager
def _describe(*, alone: bool) -> Iterator[None]:
    """With several runs, report one that cannot be read and show the others."""
    try:
        yield
    except ShardwayError as error:
        if alone:
            raise
        typer.echo(legible(f"shardway: {error}"), err=True)


# --- again and again


def _watch(words: Sequence[str], every_s: float, *, all_runs: bool, as_json: bool, metric: str) -> None:
    """Show the status until every run has ended, or Ctrl-C: redrawn on a terminal, as blocks elsewhere."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    redraws = console.is_terminal and not as_json and not console.is_dumb_terminal
    width = console.width if console.is_terminal else None
    texts = _list_texts(words, all_runs=all_runs, as_json=as_json, width=width, metric=metric)
    try:
        if not redraws:
            for text, goes_on in texts:
                typer.echo(text)
                if goes_on:
                    time.sleep(every_s)
            return
        with Live(console=console, auto_refresh=False, vertical_overflow="crop", redirect_stderr=True) as live:
            for text, goes_on in texts:
                now = time.strftime("%H:%M:%S")
                head = f"{now}, every {every_s:g} s, Ctrl-C ends\n\n" if goes_on else ""
                shown = _fit_height(head + text, console.height)
                live.update(Text(shown, no_wrap=True, overflow="ellipsis"), refresh=True)
                if goes_on:
                    time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _fit_height(text: str, rows: int) -> str:
    """The first lines of a text that a screen has room for; the last one counts those that are left out."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) < rows:
        return text
    kept = lines[: max(1, rows - 2)]
    return "\n".join([*kept, f"and {len(lines) - len(kept)} more lines"])


def _list_texts(
    words: Sequence[str], *, all_runs: bool, as_json: bool, width: int | None, metric: str = ""
) -> Iterator[tuple[str, bool]]:
    """The status at each look, and whether another is to follow. The first look raises what stands in the way; of a
    later one that is shown, and looked past."""
    look, is_first = _Look(), True
    while True:
        try:
            chosen, is_one = _choose(words)
            shown = look.look(chosen)
            if as_json:
                text = json.dumps(_as_facts(shown, words, is_one=is_one, metric=metric))
            else:
                text = (
                    _render(shown, words, all_runs=all_runs, width=width, metric=metric)
                    if chosen
                    else f"no run in {(words or ['runs'])[0]} yet"
                )
                text = f"{legible(text)}\n" if len(chosen) == 1 else legible(text)
            goes_on = any(each.is_active for each in shown)
        except ShardwayError as error:
            if is_first:
                raise
            text, goes_on = "\n".join(_fold(legible(f"shardway: {error}").split("\n"), width)), True
        is_first = False
        yield text, goes_on
        if not goes_on:
            return


# --- as text


def _render(
    shown: Sequence[_ShownRun], words: Sequence[str], *, all_runs: bool, width: int | None, metric: str = ""
) -> str:
    """One run in full, several as a table; `width`: of the terminal, in which every line then fits."""
    if (sweep := _find_sweep(words)) is not None:
        return "\n".join(_fold(_SweepTable.make(sweep, shown, metric).list_lines(), width))
    if len(shown) == 1:
        # what is to be pasted is not folded
        access = shown[0].access.list_lines() if shown[0].access else []
        served = [f"  {label:<12}{text}" for label, text in access]
        return "\n".join([*_fold(_render_in_full(shown[0]), width), *served])
    old = [] if all_runs or words else [each for each in shown if _is_old(each)]
    table = _render_table([each for each in shown if each not in old], width) if len(old) < len(shown) else []
    ends = [f"{len(old)} more ended over a week ago (--all)"] if old else []
    return "\n".join([*table, *ends])


def _fold(lines: Sequence[str], width: int | None) -> Sequence[str]:
    from shardway.watch.words import fold_line

    return lines if width is None else [part for line in lines for part in fold_line(line, width)]


def _is_old(run: _ShownRun) -> bool:
    """Whether it is of another folder and ended a while ago."""
    is_elsewhere = bool(run.known.host) or Path(run.known.run).is_absolute()
    return is_elsewhere and not run.is_active and time.time() - run.updated > _OLD_S


def _render_in_full(each: _ShownRun) -> list[str]:
    from shardway.launch.runs.find import render_known
    from shardway.launch.runs.job_status import render_attempts

    if each.summary:
        head = _summary_lines(each.summary, each.statuses)
    else:  # it has not begun here, or is on another host
        known = each.ledger.status
        total = f"/{known['total_steps']}" if known.get("total_steps") else ""
        head = [f"{render_known(each.known)}  {each.state}"]
        head += [f"  step        {known['step']}{total}"] if "step" in known else []
    row = each.row.list_lines() if each.row is not None else []
    return [*head, *_hardware_lines(each), *render_attempts(each.statuses), *row]


_MOST_ADVICE = 3


def _judge(each: _ShownRun) -> tuple[Sequence[GpuVerdict], Sequence[Advice]]:
    """The verdict of each accelerator in the newest start, and what is advised."""
    if each.known.host:
        return [], []
    from shardway.telemetry.store import read_telemetry
    from shardway.watch.advice.advise import advise, judge_gpus

    run = each.ledger.run
    hosts = read_telemetry(run.telemetry_folder) if each.hardware is not None else []
    return judge_gpus(hosts), advise(run, hosts, each.folded)


def _hardware_lines(each: _ShownRun) -> list[str]:
    """Use, the verdict of each accelerator, and the first pieces of advice."""
    from shardway.watch.words import one_line

    verdicts, advice = _judge(each)
    lines = []
    if (use := each.hardware) is not None:
        from shardway.watch.top_hardware import render_use

        ago = time.time() - use.newest
        when = "" if not each.is_active else f", {render_clock(ago)} ago" if ago > 60 else " now"
        words = render_use(use, each.gpus_asked)
        lines += [f"  hardware    {words}{when}"] if words else []
    lines += [f"  gpus        {_render_verdicts(verdicts)}"] if verdicts else []
    for piece in advice[:_MOST_ADVICE]:
        lines.append(f"  advice      {one_line(piece.evidence)}")
        lines.append(f"              to do: {one_line(piece.do)}")
    more = len(advice) - _MOST_ADVICE
    return (
        [*lines, f"              and {more} more: shardway report {shlex.quote(each.known.run)}"] if more > 0 else lines
    )


_MOST_NAMED = 4


def _render_verdicts(verdicts: Sequence[GpuVerdict]) -> str:
    """ "6 used (mean 91 %), 2 idle (n2:0, n2:1)": those that are not well used are named, and of several starts the
    one that they are about."""
    from shardway.watch.advice.findings import describe_coverage

    parts = []
    for word in dict.fromkeys(("used", *(verdict.verdict for verdict in verdicts))):
        group = [verdict for verdict in verdicts if verdict.verdict == word]
        if not group:
            continue
        uses = [verdict.use_mean for verdict in group if verdict.use_mean is not None]
        about = [f"mean {sum(uses) / len(uses):.0f} %"] if uses and word != "idle" else []
        if word != "used":
            names = [f"{verdict.host}:{verdict.index}" for verdict in group]
            about += names[:_MOST_NAMED] + (
                [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
            )
        parts.append(f"{len(group)} {word}" + (f" ({', '.join(about)})" if about else ""))
    judged = describe_coverage(verdicts)
    return ", ".join(parts) + (f"; {judged}" if judged else "")


_COLUMNS = ("run", "state", "step", "loss", "speed", "left", "gpus", "job", "age", "note")
_NOTE = 60  # characters of a note


_NARROW = {"loss": "loss {}", "left": "{} left", "gpus": "GPUs {}", "job": "job {}"}
"""How a cell reads without the name of its column."""


def _render_table(shown: Sequence[_ShownRun], width: int | None) -> list[str]:
    """A line a run; a column without any value is left out. Where that is too wide, notes stand below their runs; where
    it still is, a run is a few lines."""
    from shardway.watch.words import align_cells, fold_line, one_line, pack_parts

    rows = [{name: one_line(cell) for name, cell in _find_cells(each).items()} for each in shown]
    columns = [name for name in _COLUMNS if name in ("run", "state") or any(row[name] for row in rows)]

    def align(names: Sequence[str]) -> list[str]:
        return align_cells([[name.upper() for name in names], *([row[name] for name in names] for row in rows)])

    table = align(columns)
    if width is None or max(map(len, table)) <= width:
        return table
    head, *table = align([name for name in columns if name != "note"])
    notes = [fold_line(f"    {row['note']}", width) if row["note"] else [] for row in rows]
    if max(map(len, (head, *table))) <= width:
        return [head, *(line for run, note in zip(table, notes, strict=True) for line in (run, *note))]
    lines = []
    for row, note in zip(rows, notes, strict=True):
        cells = [_NARROW.get(name, "{}").format(row[name]) for name in columns[2:] if name != "note" and row[name]]
        lines += [*pack_parts([row["run"], row["state"]], width, ""), *pack_parts(cells, width), *note]
    return lines


def _find_cells(each: _ShownRun) -> dict[str, str]:
    """The cells of a run's line; "" where something is not known."""
    from shardway.launch.runs.find import render_known
    from shardway.watch.top_runs import render_age
    from shardway.watch.words import render_loss

    summary, known, use, job = each.summary, each.ledger.status, each.hardware, each.job
    step = summary.step if summary else known.get("step")
    total = summary.total_steps if summary else known.get("total_steps")
    rate = summary.rate if summary is not None else None
    gpus = ""
    if use is not None and use.gpus:
        total_gpus = max(each.gpus_asked or 0, len(use.gpus))
        gpus = f"{use.used}/{total_gpus}" + (f" {use.use_mean:.0f}%" if math.isfinite(use.use_mean) else "")
    elif each.gpus_asked:
        gpus = f"?/{each.gpus_asked}"
    reason = summary.reason if summary and summary.reason and summary.state == each.state else ""
    if not reason and job is not None:
        why = job.why.sentence if job.why is not None and not (job.result and job.why.code == "completed") else ""
        reason = why or (job.result.reason if job.result else "") or job.silence
    note = "" if each.state in ("running", "finished") else reason
    return {
        "run": render_known(each.known),
        "state": each.state,
        "step": "" if step is None or (not step and not total) else f"{step}/{total}" if total else str(step),
        "loss": render_loss(summary.loss) if summary and summary.loss is not None else "",
        "speed": f"{render_count(rate)} {'tok' if summary and summary.unit == 'tokens' else 'smp'}/s" if rate else "",
        "left": render_clock(summary.seconds_left) if summary and summary.seconds_left else "",
        "gpus": gpus,
        "job": job.entry.job if job else "",
        "age": render_age(time.time() - each.began) if each.began else "",
        "note": note if len(note) <= _NOTE else f"{note[: _NOTE - 3]}...",
    }


@dataclass(frozen=True)
class _SweepTable:
    """The runs of a sweep by the names of its members, and the best of them by a metric."""

    sweep: FoundSweep
    runs: Mapping[str, _ShownRun]
    monitor: Monitor
    results: Sequence[MemberResult]
    by_validation: bool

    @classmethod
    def make(cls, sweep: FoundSweep, shown: Sequence[_ShownRun], metric: str) -> _SweepTable:
        """`metric`: as `checkpoint.monitor` has it; "" for that of the runs. Where none has a validation, the loss in
        training stands in for theirs. Raises UserError for no metric."""
        from shardway.launch.sweep.progress import MemberResult
        from shardway.units import LOSS, parse_monitor

        runs = {Path(each.known.run).name: each for each in shown}
        progress = {name: each.folded.progress for name, each in runs.items() if each.folded}
        own = [each.monitor for each in progress.values() if each.attempts]
        try:
            monitor = parse_monitor(metric) if metric else own[0] if own else LOSS
        except ValueError as error:
            raise UserError(f"--metric {metric}: {error}") from None
        found = {name: each.find_value(monitor) for name, each in progress.items()}
        results = [MemberResult(name, *value) for name, value in found.items() if value is not None]
        by_validation = bool(results)
        if not results and monitor.metric == "loss":
            results = [MemberResult(name, each.smooth_loss, each.step) for name, each in progress.items()]
        return cls(sweep, runs, monitor, results, by_validation)

    @property
    def best(self) -> MemberResult | None:
        """The best member; None where none has a value."""
        from shardway.launch.sweep.progress import find_best

        return find_best(self.results, self.monitor)

    def list_lines(self) -> list[str]:
        """The table, and what it comes to."""
        from shardway.launch.sweep.progress import list_cells, shorten_keys
        from shardway.watch.words import align_cells, one_line, render_loss

        record, best, name = self.sweep.record, self.best, f"best {self.monitor.metric}"
        rows = {member: _find_cells(each) for member, each in self.runs.items()}
        for each in self.results if self.by_validation else ():
            rows[each.name][name] = render_loss(each.value)
        columns = ("state", "step", "loss", name, "left", "job", "note")
        table = list_cells(record, rows, columns, best.name if best else "")
        states = [each.state for each in self.runs.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines = [*align_cells([[one_line(cell) for cell in cells] for cells in table]), "", f"{record.name}  {counts}"]
        if best is not None:
            member, short = record.find_member(best.name), shorten_keys(record.keys)
            values = ", ".join(f"{short[key]} {text}" for key, text in (member.values if member else {}).items())
            source = "" if self.by_validation else " in training: there is no validation yet"
            reached = f"{self.monitor.metric} {render_loss(best.value)} at step {best.step}{source}"
            lines.append(f"best  {best.name} ({values}): {reached}")
        unfinished = [each for each in self.runs.values() if not each.is_active and each.state != "finished"]
        if unfinished:
            lines.append(
                f"to do: shardway resume {shlex.quote(str(self.sweep.folder))} ({len(unfinished)} are not finished)"
            )
        return lines

    def as_json(self, facts: Sequence[Any]) -> dict[str, Any]:
        """As plain data; `facts`: of the runs."""
        values = {each.name: each for each in self.results}
        known = {
            Path(name).name: each
            for name, each in zip((each.known.run for each in self.runs.values()), facts, strict=True)
        }
        best, record = self.best, self.sweep.record
        members = [
            {
                "name": member.name,
                "values": dict(member.values),
                "state": self.runs[member.name].state if member.name in self.runs else "unknown",
                "value": values[member.name].value if member.name in values else None,
                **({"run": known[member.name]} if member.name in known else {}),
            }
            for member in record.members
        ]
        return {
            "sweep": str(self.sweep.folder),
            "search": record.search,
            "metric": str(self.monitor),
            "by_validation": self.by_validation,
            "best": best.name if best is not None else None,
            "members": members,
        }


def _summary_lines(summary: RunSummary, statuses: Sequence[JobStatus]) -> list[str]:
    """`statuses`: the attempts that stand below, those that wait or never began with them."""
    from shardway.watch import words

    total = f"/{summary.total_steps}" if summary.total_steps else ""
    share = f" ({100 * summary.step / summary.total_steps:.0f} %)" if summary.total_steps else ""
    rate = summary.rate
    save, ignored = summary.last_save, summary.local_checkpoints_ignored
    validation = words.render_validation(summary.validation, summary.monitor) if summary.validation else ""
    events = words.render_events_end(summary.events_end, summary.step)
    clock = words.render_set_back(summary.clock_back_s)
    lines = [
        f"{summary.path}  {summary.state}" + (f": {summary.reason}" if summary.reason else ""),
        f"  step        {summary.step}{total}{share}",
        f"  events      {events}" if events else "",
        f"  loss        {summary.loss:.4f}" if summary.loss is not None else "",
        f"  validation  {validation}" if validation else "",
        _describe_best(summary),
        f"  logged      {words.render_logged(summary.logged)}" if summary.logged else "",
        f"  sample      {words.render_sampled(summary.sampled)} (step {summary.sampled.step})"
        if summary.sampled
        else "",
        *(
            f"  evaluated   {words.render_evaluation(each)} "
            f"({', '.join(filter(None, (f'step {each.step}', words.render_extent(each))))})"
            for each in summary.evaluations[-3:]
        ),
        f"  speed       {render_count(rate)} {summary.unit}/s" if rate else "",
        f"  time left   {render_clock(summary.seconds_left)}" if summary.seconds_left else "",
        f"  last save   step {save.step}, {render_clock(time.time() - save.time)} ago" if save else "",
        f"  productive  {words.render_account(summary.account)}" if summary.account else "",
        f"  clock       {clock}" if clock else "",
        *(f"  left out    {words.render_skipped(each)}" for each in summary.left_out),
        f"  damaged     {summary.damaged}" if summary.damaged else "",
        f"  nodes       what they have saved is left out: two starts from step {ignored} failed" if ignored else "",
        f"  ranks       {summary.world} on {summary.device}" if summary.world else "",
        _describe_attempts(summary.attempts, len(statuses)),
        f"  restarts    {summary.restarts} (the ranks started again in their attempt)" if summary.restarts else "",
        _describe_jobs_to_go(summary, statuses),
        f"  writer      {summary.writer}" if summary.writer else "",
    ]
    return [line for line in lines if line]


def _describe_best(summary: RunSummary) -> str:
    """The best validation, and the best checkpoint where that is another one."""
    from shardway.watch.words import render_monitored

    best, kept = summary.best_validation, summary.best_checkpoint
    if best is None:
        return ""
    words = f"  best        {render_monitored(summary.monitor, best.metrics[summary.monitor])} at step {best.step}"
    if kept is None or kept.step == best.step:
        return f"{words}, {'kept' if kept else 'not kept'}"
    return f"{words}, not kept; of those that are, step {kept.step} is the best"


def _describe_attempts(begun: int, known: int) -> str:
    if max(begun, known) < 2:
        return ""
    return f"  attempts    {known}, of which {begun} began to train" if known > begun else f"  attempts    {begun}"


def _describe_jobs_to_go(summary: RunSummary, statuses: Sequence[JobStatus]) -> str:
    """How many more jobs a chain takes whose jobs end with their wall-time, and whether that is well spent."""
    from shardway.rundir.attempts import Ending

    by_clock = any(job.result is not None and job.result.state is Ending.DEADLINE for job in statuses)
    left = (summary.total_steps or 0) - summary.step
    if summary.state == "failed" or not (by_clock and summary.step and summary.attempts and left > 0):
        return ""
    jobs = math.ceil(left * summary.attempts / summary.step)
    account = summary.account
    wasteful = account is not None and account.start_s > account.productive_s
    remedy = "; starting takes more of them than training: raise site.walltime" if wasteful else ""
    return f"  to go       some {jobs} more such jobs{remedy}"


# --- what a run says


def logs(
    run: RunWord = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Whose events or output (default: 0; all).")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    output: Annotated[bool, typer.Option("--output", help="What the rank itself printed, not its events.")] = False,
    job: Annotated[bool, typer.Option("--job", help="What a job of the run printed.")] = False,
    node: Annotated[int | None, typer.Option("--node", min=0, help="Of a job: what this node's ranks printed.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Of a job: which (default: newest).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the events of a run as lines, or what its jobs printed."""
    from shardway.launch.runs.find import Known, find_named, is_folder_of_runs, list_runs
    from shardway.rundir.directory import RunDir

    folder = Path(run or "runs")
    if run is not None and not is_folder_of_runs(folder):
        named = find_named(run)
        known, of_id = named.known, named.attempt
    else:  # the only one of a folder
        runs = list_runs(folder)
        known, of_id = Known(str(runs[0] if len(runs) == 1 else find_run(folder).path)), None
    directory = RunDir(Path(known.run))
    if not known.host:
        directory.check_format()
    of_job = job or node is not None or attempt is not None or bool(known.host)
    if not (of_job or output or as_json or directory.ranks_with_events()):
        from shardway.launch.runs.logs import trains_a_run_file

        # A run that has no events yet is shown by its job, unless that will write some and is waited for.
        of_job = bool(directory.attempts()) and not (follow and trains_a_run_file(directory))
    if of_job:
        from shardway.launch.hosts import find_host
        from shardway.launch.runs import logs as of_jobs
        from shardway.launch.runs.job_status import read_ledger

        host = find_host(known.host)
        chosen = of_jobs.choose_attempt(read_ledger(host, directory.path), attempt or of_id).attempt
        lines = (
            of_jobs.follow_output(host, chosen, node, options.report)
            if follow
            else of_jobs.read_output(host, chosen, node)
        )
        lines = lines if rank is None else of_jobs.only_rank(lines, rank)
    elif output:
        files = directory.rank_output(rank or 0)
        if not files:
            raise UserError(
                f"there is no captured output of rank {rank or 0} in {directory.path}.\n"
                "  Output is captured of ranks that `shardway train --nproc N` starts; others print where they started."
            )
        typer.echo("".join(path.read_text(encoding="utf-8", errors="replace") for path in files), nl=False)
        return
    elif follow:
        lines = _follow_job(directory, rank or 0, as_json)
    else:
        lines = _event_lines(directory, rank or 0, False, as_json)
    for line in lines:
        typer.echo(line)


def _follow_job(run: RunDir, rank: int, as_json: bool) -> Iterator[str]:
    """The events of a job from its begin on; where it ended without one, what it printed says more."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.logs import Beginning, read_output

    host = find_host("")
    why = Beginning(host, run).wait(rank)
    attempts = run.attempts()
    try:
        if run.ranks_with_events() or not attempts or as_json:
            yield from _event_lines(run, rank, True, as_json)
        else:
            yield from read_output(host, attempts[-1], None)
    finally:
        if why:
            options.report(why)


def _event_lines(run: RunDir, rank: int, follow: bool, as_json: bool) -> Iterator[str]:
    from shardway.watch.words import PlainLines

    if rank not in run.ranks_with_events():
        known = ", ".join(map(str, run.ranks_with_events())) or "none yet"
        raise UserError(f"rank {rank} has no events in {run.path}; ranks with events: {known}.")
    lines = PlainLines(every_s=0.0)
    for event in _follow_events(run, rank) if follow else run.events(rank):
        yield from [json.dumps(event)] if as_json else lines.lines(event)


def _follow_events(run: RunDir, rank: int) -> Iterator[Event]:
    """Events until no process writes any more, or the lock's holder died without releasing it, which is reported."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.logs import LeftLock

    left, why = LeftLock(find_host(""), run), ""

    def is_over() -> bool:
        nonlocal why
        why = "" if run.find_writer() is None else left.look()
        return why != "" or run.find_writer() is None

    left.put_off()
    for event in run.follow_events(rank).follow(until=is_over):
        left.put_off()
        yield event
    if why:
        options.report(why)
