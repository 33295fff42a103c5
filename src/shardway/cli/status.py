"""`shardway status`: the state of runs, here and on the hosts they were submitted to; `shardway logs`: what a run says,
from its events, or the output of one of its ranks; `shardway report`: report.html of one, written again.

Invariant: without torch; nothing except a report is written, and a run may be writing meanwhile. Events and a
scheduler's answers are interpreted in `shardway.watch` and `shardway.launch`.
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
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli import options
from shardway.cli.options import JsonOption, complete_run, find_run, print_json
from shardway.errors import JobError, ShardwayError, UserError, legible
from shardway.refusals import find_remedy
from shardway.units import render_clock, render_count

if TYPE_CHECKING:
    from shardway.launch.runs.find import Known
    from shardway.launch.runs.job_status import JobStatus, Ledger
    from shardway.rundir.directory import RunDir
    from shardway.rundir.events import Event
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
    from shardway.launch.runs.find import Known, find_all, find_known, is_run, list_runs, render_known

    names_one = run is not None and (is_run(Path(run)) or not os.path.isdir(run))
    if run is None:
        chosen = find_all(Path("runs"))
    else:
        chosen = [find_known(run)] if names_one else [Known(str(entry)) for entry in list_runs(Path(run))]
    if not chosen and not as_json:
        typer.echo(f"no run in {run or 'runs'} yet; start one with `shardway train` or `shardway submit`")
        return
    from shardway.launch.runs.job_status import attempts_as_json, render_attempts

    hosts = groupby(sorted(chosen, key=lambda known: known.host), key=lambda known: known.host)
    shown = [entry for _, group in hosts for entry in _look([*group], alone=len(chosen) == 1)]
    if not as_json:
        texts = []
        for each in shown:
            if each.summary:
                head = _summary_lines(each.summary, each.statuses)
            else:  # it has not begun here, or is on another host: what status.json and its jobs say
                known, jobs = each.ledger.status, each.statuses
                word = next((job.word for job in [*(job for job in jobs if job.is_active), *jobs[-1:]]), "new")
                total = f"/{known['total_steps']}" if known.get("total_steps") else ""
                head = [f"{render_known(each.known)}  {known.get('state') or word}"]
                head += [f"  step        {known['step']}{total}"] if "step" in known else []
            texts.append("\n".join([*head, *render_attempts(each.statuses)]))
        typer.echo(legible("\n\n".join(texts)))
        return
    facts = []
    for each in shown:
        said = each.summary.as_json() if each.summary else {**each.ledger.status, "path": each.known.run}
        host = {"host": each.known.host} if each.known.host else {}
        facts.append({**said, **host, "jobs": attempts_as_json(each.statuses)})
    print_json(facts[0] if names_one and len(facts) == 1 else facts)


def _look(group: Sequence[Known], *, alone: bool) -> list[_ShownRun]:
    """The runs of one host, queried in a few exchanges. An unreachable host is reported, and the others are shown."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.job_status import read_ledgers, read_standings
    from shardway.rundir.directory import RunDir

    readable, shown = [], list[_ShownRun]()
    for known in group:
        with _describe(alone=alone):
            if not known.host:  # whether this version and this user can read it
                RunDir(Path(known.run)).check_format()
                RunDir(Path(known.run)).check_readable()
            readable.append(known)
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
    from shardway.rundir.attempts import FAILURES, Ending
    from shardway.watch.progress import GONE, summarise

    if not ledger.run.exists():
        return None
    summary = summarise(ledger.run)
    active = next((attempt for attempt in attempts if attempt.is_active), None)
    if active is not None and summary.state != "running":
        return replace(summary, state=active.word, reason="")
    for attempt in reversed(attempts):
        result, entry = attempt.result, attempt.entry
        if result is None or result.state is Ending.NOT_NEEDED:
            continue
        # The last attempt with work to do.
        if summary.reason == GONE:
            return replace(summary, reason=result.reason)
        sent = entry.submission.submitted if entry.submission else 0.0
        began = entry.started.started if entry.started else sent
        if summary.state != "finished" and result.state in FAILURES and began > (summary.updated or 0.0):
            return replace(summary, state="failed", reason=result.reason)  # of its ranks none wrote an event
        break
    return summary


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
    from shardway.launch.runs.find import Known, find_known, is_run, list_runs
    from shardway.rundir.directory import RunDir

    folder = Path(run or "runs")
    if run is not None and (is_run(folder) or not os.path.isdir(folder)):
        known = find_known(run)
    else:  # the only one of a folder
        runs = list_runs(folder)
        known = Known(str(runs[0] if len(runs) == 1 else find_run(folder).path))
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
        chosen = of_jobs.choose_attempt(read_ledger(host, directory.path), attempt).attempt
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


# --- the report of a run


def report(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN_DIR]",
            help="A run directory, or a folder of them (default: runs).",
            autocompletion=complete_run,
        ),
    ] = None,
    as_json: JsonOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say where it would be written.")] = False,
) -> None:
    """Write the report of a run and print its path."""
    from shardway.watch.progress import summarise
    from shardway.watch.report import render_report

    run = find_run(path)
    run.check_format()
    if not dry_run:
        try:
            run.write_report(render_report(run))
        except OSError as error:
            raise JobError(
                f"{run.report_path} cannot be written: {error.strerror}.\n  To do: {find_remedy(error)}."
            ) from None
    if as_json:
        print_json({"report": str(run.report_path), "summary": summarise(run).as_json()})
    else:
        typer.echo(str(run.report_path))
