"""`shardway report`: writes report.html of a run again, from the current state of the run directory.

Invariant: nothing except the report is written.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shardway.cli.options import JsonOption, RunArgument, find_run
from shardway.errors import JobError
from shardway.refusals import find_remedy


def report(
    path: RunArgument = None,
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
    facts = {"report": str(run.report_path), "summary": summarise(run).as_json()}
    typer.echo(json.dumps(facts, indent=1) if as_json else str(run.report_path))
