"""`shardway report`: report.html of a run, written again, or the table for a proposal; `shardway compare`: several runs
beside one another.

Invariant: without torch; nothing except a page is written, and a run may be writing meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption, complete_run, explained_write, find_run, print_json
from shardway.errors import JobError, UserError, legible

if TYPE_CHECKING:
    from shardway.rundir.directory import RunDir


def _find(word: str | None) -> RunDir:
    """The run on this machine that a word means: a directory, the only run of a folder, a name or a job's id."""
    run = find_run(None if word is None else Path(word))
    run.check_format()
    run.check_readable()
    return run


def _write(path: Path, html: str, run: RunDir | None = None) -> None:
    with explained_write(path, "write the page elsewhere: --page FILE"):
        if run is not None:
            run.write_report(html)
        else:
            path.write_text(html, encoding="utf-8")


def report(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|JOB]",
            help="A run directory, a folder with one, a run's name, or a job's id (default: runs).",
            autocompletion=complete_run,
        ),
    ] = None,
    proposal: Annotated[
        bool, typer.Option("--proposal", help="Print the table that a proposal for compute time needs.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Write it there, such as for a run of others.")
    ] = None,
    as_json: JsonOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say where it would be written.")] = False,
) -> None:
    """Write the report of a run and print its path."""
    directory = _find(run)
    path = page or directory.report_path
    if dry_run and not (as_json or proposal):
        typer.echo(str(path))
        return
    from shardway.watch.report.content import gather
    from shardway.watch.report.page import render_content
    from shardway.watch.report.proposal import proposal_facts, render_proposal

    content = gather(directory)
    if proposal:
        if as_json:
            print_json(proposal_facts(content))
        else:
            typer.echo(legible(render_proposal(content)))
        return
    written: str | None = str(path)
    if not dry_run:
        try:
            _write(path, render_content(content), None if page else directory)
        except JobError as error:  # the facts of a run of others can be read all the same
            if page or not as_json:
                raise
            written = None
            typer.echo(f"shardway: {error}", err=True)
    if as_json:
        print_json({"report": written, **content.as_json()})
    else:
        typer.echo(written)


def _list_members(word: str) -> list[str]:
    """The runs of a sweep that have begun; any other word as it is."""
    from shardway.launch.sweep.record import find_sweep
    from shardway.rundir.directory import RunDir

    found = find_sweep(word)
    if found is None:
        return [word]
    if found.host.name:
        raise UserError(f"{word} is on another host, {found.host.name}.\n  To do: run the same command there.")
    begun = [found.folder / member.name for member in found.record.members]
    begun = [path for path in begun if RunDir(path).exists()]
    if len(begun) < 2:
        raise UserError(f"{word}: {len(begun)} of its {len(found.record.members)} runs have begun.\n  To do: wait.")
    return [str(path) for path in begun]


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Runs, as for report, or a sweep; the first is the base.",
            autocompletion=complete_run,
        ),
    ],
    page: Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write their curves as HTML.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs, or those of a sweep: keys that differ, losses, pace with its interval."""
    runs = [name for word in runs for name in _list_members(word)]
    if len(runs) < 2:
        raise UserError(
            f"one run ({runs[0]}) cannot be compared.\n  To do: name two or more: `shardway compare RUN RUN`."
        )
    from shardway.watch.report.compare import compare as compare_runs
    from shardway.watch.report.compare import render_comparison, render_comparison_page
    from shardway.watch.report.content import gather

    found = compare_runs([gather(_find(word)) for word in runs])
    if not as_json:  # before the page, which may have no place
        typer.echo(legible(render_comparison(found)))
    if page is not None:
        _write(page, render_comparison_page(found))
    if as_json:
        print_json({**found.as_json(), "page": str(page) if page else None})
    elif page is not None:
        typer.echo(f"\ncurves  {page}")
