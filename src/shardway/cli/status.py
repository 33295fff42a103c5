"""`shardway status`: the state of runs, here and on the hosts they were submitted to.

Invariant: it only reads, without torch. Events and a scheduler's answers are interpreted in `shardway.watch` and
`shardway.launch`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.options import JsonOption, complete_run
from shardway.errors import ShardwayError, legible
from shardway.units import render_clock, render_count

if TYPE_CHECKING:
    from shardway.launch.runs.find import Known
    from shardway.launch.runs.job_status import JobStatus, Ledger
    from shardway.watch.progress import RunSummary

RunWord = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run directory, a folder of them, HOST:DIRECTORY, or a run's name (default: all).",
        autocompletion=complete_run,
    ),
]


@dataclass(frozen=True)
class _ShownRun:
    """One run: its summary where its directory is on this machine, its attempts where it was submitted."""

    known: Known
    ledger: Ledger
    statuses: Sequence[JobStatus]
    summary: RunSummary | None = None


def status(run: RunWord = None, as_json: JsonOption = False) -> None:
    """Say where a run stands, or each run of a folder and each that was submitted."""
    from shardway.launch.runs.find import is_run

    chosen = _choose(run)
    if not chosen and not as_json:
        typer.echo(f"no run in {run or 'runs'} yet; start one with `shardway train` or `shardway submit`")
        return
    shown = [entry for group in _by_host(chosen) for entry in _look(group, alone=len(chosen) == 1)]
    if as_json:
        facts = [_as_json(entry) for entry in shown]
        alone = run is not None and len(facts) == 1 and (is_run(Path(run)) or not os.path.isdir(run))
        typer.echo(json.dumps(facts[0] if alone else facts, indent=1))
        return
    typer.echo(legible("\n\n".join(_render(entry) for entry in shown)))


def _choose(word: str | None) -> list[Known]:
    """One run, those of a folder, or by default those of ./runs and all submitted ones."""
    from shardway.launch.runs.find import Known, find_all, find_known, is_run, list_runs

    if word is None:
        return find_all(Path("runs"))
    path = Path(word)
    if is_run(path) or not os.path.isdir(path):
        return [find_known(word)]
    return [Known(str(entry)) for entry in list_runs(path)]


def _by_host(chosen: Sequence[Known]) -> list[list[Known]]:
    ordered = sorted(chosen, key=lambda known: known.host)
    return [list(group) for _, group in groupby(ordered, key=lambda known: known.host)]


def _look(group: Sequence[Known], *, alone: bool) -> list[_ShownRun]:
    """The runs of one host, queried in a few exchanges. An unreachable host is reported, and the others are shown."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.job_status import read_ledgers, read_standings

    shown: list[_ShownRun] = []
    readable = [known for known in group if known.host or _is_readable(Path(known.run), alone=alone)]
    host = find_host(group[0].host)
    with _describe(alone=alone):
        ledgers = read_ledgers(host, [Path(known.run) for known in readable])
        statuses = read_standings(host, ledgers)
        for known, ledger, attempts in zip(readable, ledgers, statuses, strict=True):
            if alone or not known.host or attempts or ledger.status:  # elsewhere, one that is gone is no news
                with _describe(alone=alone):
                    summary = None if known.host else _summarise(ledger, attempts)
                    shown.append(_ShownRun(known, ledger, attempts, summary))
    return shown


@contextmanager
def _describe(*, alone: bool) -> Iterator[None]:
    """With several runs, report one that cannot be read and show the others."""
    try:
        yield
    except ShardwayError as error:
        if alone:
            raise
        typer.echo(legible(f"shardway: {error}"), err=True)


def _summarise(ledger: Ledger, attempts: Sequence[JobStatus]) -> RunSummary | None:
    """What the run recorded; its state is that of a job that continues it, or that has a reason the ranks could not
    record."""
    from shardway.watch.progress import GONE, summarise

    if not ledger.run.exists():
        return None
    summary, last = summarise(ledger.run), _find_last_end(attempts)
    active = next((attempt for attempt in attempts if attempt.is_active), None)
    if active is not None and summary.state != "running":
        return replace(summary, state=active.word, reason="")
    if last is not None and summary.reason == GONE:
        return replace(summary, reason=last.reason)
    if summary.state != "finished" and last is not None and last.failed and last.began > (summary.updated or 0.0):
        return replace(summary, state="failed", reason=last.reason)  # of its ranks none wrote an event
    return summary


@dataclass(frozen=True)
class _LastEnd:
    """How the last attempt with work to do ended; `began` in Unix seconds."""

    failed: bool
    reason: str
    began: float


def _find_last_end(attempts: Sequence[JobStatus]) -> _LastEnd | None:
    """The end of the last attempt that did not find the run complete."""
    from shardway.rundir.attempts import FAILURES, Ending

    for attempt in reversed(attempts):
        result, entry = attempt.result, attempt.entry
        if result is not None and result.state is not Ending.NOT_NEEDED:
            sent = entry.submission.submitted if entry.submission else 0.0
            return _LastEnd(result.state in FAILURES, result.reason, entry.started.started if entry.started else sent)
    return None


def _is_readable(path: Path, *, alone: bool) -> bool:
    """Whether this version and this user can read a run."""
    from shardway.rundir.directory import RunDir

    with _describe(alone=alone):
        RunDir(path).check_format()
        RunDir(path).check_readable()
        return True
    return False


def _as_json(shown: _ShownRun) -> dict[str, Any]:
    from shardway.launch.runs.job_status import attempts_as_json

    facts = shown.summary.as_json() if shown.summary else {**shown.ledger.status, "path": shown.known.run}
    jobs = {"host": shown.known.host} if shown.known.host else {}
    return {**facts, **jobs, "jobs": attempts_as_json(shown.statuses)}


def _render(shown: _ShownRun) -> str:
    """One run in a few lines, without what is unknown."""
    from shardway.launch.runs.job_status import render_attempts

    head = _summary_lines(shown.summary, shown.statuses) if shown.summary else _bare_lines(shown)
    return "\n".join([*head, *render_attempts(shown.statuses)])


def _bare_lines(shown: _ShownRun) -> list[str]:
    """The lines from status.json for a run that has not begun here, or is on another host."""
    from shardway.launch.runs.find import render_known

    status = shown.ledger.status
    active = [job for job in shown.statuses if job.is_active]
    word = next((job.word for job in [*active, *shown.statuses[-1:]]), "new")
    state = str(status.get("state") or word)
    total = f"/{status['total_steps']}" if status.get("total_steps") else ""
    lines = [f"{render_known(shown.known)}  {state}"]
    return [*lines, f"  step        {status['step']}{total}"] if "step" in status else lines


def _summary_lines(summary: RunSummary, statuses: Sequence[JobStatus]) -> list[str]:
    """`statuses`: the attempts that stand below, those that wait or never began with them."""
    from shardway.watch.words import render_account, render_logged, render_skipped, render_validation

    total = f"/{summary.total_steps}" if summary.total_steps else ""
    share = f" ({100 * summary.step / summary.total_steps:.0f} %)" if summary.total_steps else ""
    rate = summary.tokens_per_s if summary.unit == "tokens" else summary.samples_per_s
    save, ignored = summary.last_save, summary.local_checkpoints_ignored
    validation = render_validation(summary.validation, summary.monitor) if summary.validation else ""
    lines = [
        f"{summary.path}  {summary.state}" + (f": {summary.reason}" if summary.reason else ""),
        f"  step        {summary.step}{total}{share}",
        f"  loss        {summary.loss:.4f}" if summary.loss is not None else "",
        f"  validation  {validation}" if validation else "",
        _describe_best(summary),
        f"  logged      {render_logged(summary.logged)}" if summary.logged else "",
        f"  speed       {render_count(rate)} {summary.unit}/s" if rate else "",
        f"  time left   {render_clock(summary.seconds_left)}" if summary.seconds_left else "",
        f"  last save   step {save.step}, {render_clock(time.time() - save.time)} ago" if save else "",
        f"  productive  {render_account(summary.account)}" if summary.account else "",
        *(f"  left out    {render_skipped(each)}" for each in summary.left_out),
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
