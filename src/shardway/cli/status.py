"""`shardway status`: where runs stand.

Invariant: it only reads. This module must not import torch, nor interpret events: that is `shardway.watch`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardway.cli.options import JsonOption, RunArgument
from shardway.errors import UserError
from shardway.units import render_clock, render_count

if TYPE_CHECKING:
    from shardway.rundir.directory import RunDir
    from shardway.watch.summary import RunSummary


def status(path: RunArgument = None, as_json: JsonOption = False) -> None:
    """Say where a run stands, or each run of a folder."""
    from shardway.watch.summary import find_runs, summarise

    root = path or Path("runs")
    runs = find_runs(root)
    if not runs and not as_json:
        raise UserError(f"there is no run in {root}.\n  To do: name a run directory, or start a run: `shardway train`.")
    if len(runs) == 1:
        runs[0].check_format()
    readable = [run for run in runs if _is_readable(run)]
    summaries = [summarise(run) for run in readable]
    if as_json:
        facts = [summary.as_json() for summary in summaries]
        typer.echo(json.dumps(facts[0] if len(facts) == 1 and runs[0].path == root else facts, indent=1))
        return
    typer.echo("\n\n".join(_render(summary) for summary in summaries))


def _is_readable(run: RunDir) -> bool:
    """Whether this Shardway can read a run; one of many that it cannot is told, and the others are still shown."""
    try:
        run.check_format()
    except UserError as error:
        typer.echo(f"shardway: {error}", err=True)
        return False
    return True


def _render(summary: RunSummary) -> str:
    """One run in a few lines, what is unknown left out."""
    total = f"/{summary.total_steps}" if summary.total_steps else ""
    share = f" ({100 * summary.step / summary.total_steps:.0f} %)" if summary.total_steps else ""
    rate = summary.tokens_per_s if summary.unit == "tokens" else summary.samples_per_s
    save = summary.last_save
    lines = [
        f"{summary.path}  {summary.state}" + (f": {summary.reason}" if summary.reason else ""),
        f"  step        {summary.step}{total}{share}",
        _line("loss", summary.loss, "{:.4f}"),
        f"  validation  {_say_metrics(summary)}" if summary.validation else "",
        f"  speed       {render_count(rate)} {summary.unit}/s" if rate else "",
        f"  time left   {render_clock(summary.seconds_left)}" if summary.seconds_left else "",
        f"  last save   step {save.step}, {render_clock(time.time() - save.time)} ago" if save else "",
        f"  ranks       {summary.world} on {summary.device}" if summary.world else "",
        f"  attempts    {summary.attempts}" if summary.attempts > 1 else "",
        f"  writer      {summary.writer}" if summary.writer else "",
    ]
    return "\n".join(line for line in lines if line)


def _line(label: str, value: float | None, form: str) -> str:
    return f"  {label:<11} {form.format(value)}" if value is not None else ""


def _say_metrics(summary: RunSummary) -> str:
    from shardway.watch.words import render_validation

    return render_validation(summary.validation) if summary.validation else ""
