"""`shardway stop`: ends a run after its current step, or kills its jobs.

Invariant: nothing is killed without --now, and with it only after the user was shown what is lost. No scheduler is
named here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption, RunName
from shardway.errors import UserError

if TYPE_CHECKING:
    from shardway.launch.runs.job_status import Ledger, LedgerEntry
    from shardway.launch.runs.stop import Stopper, StopReport

WARNING = """\
{run}: killing its jobs may lose what was trained since the last checkpoint{saved}: ranks
have no more time to save than the scheduler gives between SIGTERM and SIGKILL. Ranks that are killed inside a
collective may hang in the driver until the node is reset; without --now the run saves and leaves in order."""


def stop(
    run: RunName,
    now: Annotated[bool, typer.Option("--now", help="Kill the jobs, after a warning.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask (with --now).")] = False,
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait until it has ended.")] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Stop a run: its ranks finish their step and save, and what waits in the queue is taken out."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.find import find_known
    from shardway.launch.runs.job_status import read_ledger
    from shardway.launch.runs.stop import Stopper
    from shardway.rundir.directory import RunDir

    known = find_known(run)
    stopper = Stopper(find_host(known.host))
    if not known.host:
        RunDir(Path(known.run)).check_readable()
    ledger = read_ledger(stopper.host, Path(known.run))
    kills = now and stopper.find_running(ledger) != ()
    if kills:
        _warn(ledger, yes)
    done = stopper.cancel(ledger) if now else stopper.ask(ledger)
    states = _wait(stopper, ledger, wait) if wait else {}
    if as_json:
        asked, cancelled = ([entry.job for entry in entries] for entries in (done.asked, done.cancelled))
        facts = {"asked": asked, "cancelled": cancelled, "writer": done.writer, "states": states}
        typer.echo(json.dumps(facts, indent=1))
        return
    for line in _render(done, run, states, now=now, kills=kills):
        typer.echo(line)


def _warn(ledger: Ledger, yes: bool) -> None:
    step = ledger.status.get("step")
    saved = f" (it is at step {step})" if step else ""
    typer.echo(WARNING.format(run=ledger.run.path, saved=saved), err=True)
    if not yes and not _agrees():
        raise UserError(
            f"{ledger.run.path}: nothing was killed.\n"
            "  To do: leave out --now, so that it saves and leaves in order, or add --yes where no terminal is."
        )


def _agrees() -> bool:
    try:
        return typer.confirm("Kill them?", err=True)
    except typer.Abort:  # no answer is possible
        typer.echo(err=True)
        return False


def _wait(stopper: Stopper, ledger: Ledger, seconds: float) -> dict[str, str]:
    return {str(standing.entry.number): standing.word for standing in stopper.wait(ledger, seconds)}


def _render(done: StopReport, run: str, states: dict[str, str], *, now: bool, kills: bool) -> list[str]:
    lines = []
    if done.asked:
        lines.append(f"asked to stop after its current step: {_jobs(done.asked)}")
    if done.cancelled:
        lines.append(f"{'killed' if kills else 'taken out of the queue'}: {_jobs(done.cancelled)}")
    if done.writer:
        what = "no job, so not killed (Ctrl-C twice ends it)" if now else "asked to stop after its current step"
        lines.append(f"{what}: {done.writer}")
    if done.unwritten:
        lines.append(f"asked by a signal: {done.unwritten}")
    if not lines:
        lines.append(f"{run} has no job that waits or runs")
    return [*lines, *(f"attempt {number}: {state}" for number, state in states.items())]


def _jobs(entries: tuple[LedgerEntry, ...]) -> str:
    return ", ".join(f"job {entry.job} (attempt {entry.number})" for entry in entries)
