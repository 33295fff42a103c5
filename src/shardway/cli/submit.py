"""`shardway submit`: hands a run to a scheduler, here or on a login node, once or until it is done; `shardway resume`.

Invariants:
- It returns as soon as the scheduler has taken the job.
- What --dry-run prints is the script that would be submitted, byte for byte except for the token in its name; with
  --lib, the functions that would lie beside it.
- Resuming is a submission like any other, of the request that the last attempt recorded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.main import read_program_words
from shardway.cli.options import DirOption, JsonOption, RunName, Words, read_request, report
from shardway.errors import UserError

if TYPE_CHECKING:
    from shardway.launch.hosts.base import Host
    from shardway.launch.submission.prepare import Prepared, SubmitRequest
    from shardway.launch.submission.submit import SentSubmission

MostOption = Annotated[int, typer.Option("--max-attempts", min=0, help="Most jobs of --until-done (0: no limit).")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the job script, and do nothing.")]
LibraryOption = Annotated[bool, typer.Option("--lib", help="With --dry-run: print lib.sh, the script's functions.")]
OnOption = Annotated[str, typer.Option("--on", metavar="[USER@HOST:]SITE", help="The site (default: site.name).")]


def submit(
    ctx: typer.Context,
    words: Words = None,
    on: OnOption = "",
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the job (site.nodes).")] = None,
    walltime: Annotated[str | None, typer.Option("--walltime", help="Wall-time of an attempt (site.walltime).")] = None,
    until_done: Annotated[bool, typer.Option("--until-done", help="Go on in further jobs until it is done.")] = False,
    max_attempts: MostOption = 0,
    directory: DirOption = None,
    dry_run: DryRunOption = False,
    library: LibraryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a run file, or with `-- COMMAND...` any script that torchrun can run."""
    from shardway.launch.hosts import find_host, parse_target

    target = parse_target(on) if on else None
    words = [*(words or []), *_set(words or [], nodes, walltime)]
    request = _read_submission(ctx, words, target.site if target else "", directory)
    if max_attempts and not until_done:
        raise UserError("--max-attempts says how long a chain may grow; it goes with --until-done.")
    request = replace(request, until_done=until_done, max_attempts=max_attempts)
    carry_out(request, find_host(target.host if target else ""), dry_run=dry_run, library=library, as_json=as_json)


def resume(
    run: RunName,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set anew.")] = None,
    until_done: Annotated[bool | None, typer.Option("--until-done/--once", help="As a chain, or once.")] = None,
    max_attempts: MostOption = 0,
    dry_run: DryRunOption = False,
    library: LibraryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run that was stopped, failed, or whose chain has ended."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.find import find_known
    from shardway.launch.submission.prepare import read_last_request

    known = find_known(run)
    host = find_host(known.host)
    with read_last_request(host, Path(known.run)) as last:
        run_request = replace(last.run_request, overrides=(*last.run_request.overrides, *(keys or [])))
        chain = last.until_done if until_done is None else until_done
        request = replace(
            last, run_request=run_request, until_done=chain, max_attempts=max_attempts or last.max_attempts
        )
        carry_out(request, host, dry_run=dry_run, library=library, as_json=as_json)


def carry_out(request: SubmitRequest, host: Host, *, dry_run: bool, library: bool, as_json: bool) -> None:
    """Submit a request and report the result, or print its job script, or the functions of that."""
    if library and not dry_run:
        raise UserError("--lib prints the functions of a job script; it goes with --dry-run.")
    if not dry_run:
        from shardway.launch.submission.submit import Submitter, submit_run

        _print_sent(submit_run(request, host, Submitter(host, tell=report)), as_json)
        return
    from shardway.launch.job_script import render_library
    from shardway.launch.submission.prepare import prepare

    prepared = prepare(request, host)
    _warn(prepared)
    typer.echo(render_library(prepared.job.scheduler) if library else prepared.script, nl=False)


def _read_submission(ctx: typer.Context, words: list[str], site: str, directory: Path | None) -> SubmitRequest:
    """The request in the words of the command line. Raises UserError for a program in place of a run file."""
    from shardway.launch.submission.prepare import SubmitRequest

    command = read_program_words(ctx)
    _check_no_program(words, command)
    run_request = read_request(words, directory)
    if command and run_request.run_file is not None and run_request.run_file.suffix != ".toml":
        raise UserError(f"{run_request.run_file} stands before `--`, where a run file (.toml) and keys may stand.")
    return SubmitRequest(run_request, site=site, command=command)


def _check_no_program(words: list[str], command: tuple[str, ...]) -> None:
    """Raise UserError for a user's program, which belongs after `--` and would be read as a run file."""
    script = next((word for word in words if word.endswith((".py", ".sh")) and "=" not in word), "")
    if script and not command:
        starts = "python " if script.endswith(".py") else "bash "
        raise UserError(
            f"{script} is a program and no run file (.toml).\n"
            f"  To do: name it behind `--`: shardway submit ... -- {starts}{script}"
        )


def _set(words: list[str], nodes: int | None, walltime: str | None) -> list[str]:
    """Options of the verb as keys of the run file. Raises UserError where the words set one of these too."""
    options = {"nodes": nodes, "walltime": walltime}
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        twice = next((word for word in words if word.partition("=")[0].strip() == f"site.{name}"), "")
        if twice:
            raise UserError(f"--{name} {value} and {twice} say the same thing.\n  To do: leave one of them out.")
    return [f"site.{name}={json.dumps(value)}" for name, value in given.items()]


def _warn(prepared: Prepared) -> None:
    """Print the warnings on stderr."""
    for warning in prepared.warnings:
        report(warning)


def _print_sent(sent: SentSubmission, as_json: bool) -> None:
    """Print what was submitted and how to watch it."""
    from shardway.launch.script import quote

    _warn(sent.prepared)
    if as_json:
        typer.echo(json.dumps(sent.as_json(), indent=1))
        return
    job, where = sent.prepared.job, f" on {sent.host}" if sent.host else ""
    found = " (it had got through before)" if sent.found else ""
    typer.echo(f"job            {sent.job}{where}, attempt {job.attempt}{found}")
    typer.echo(f"run directory  {job.run}")
    if job.around.code is not None:
        typer.echo(f"works in       {job.around.workdir}, for all attempts: what it writes there, the next one finds")
    reference = quote(sent.reference)
    typer.echo(f"to watch       shardway status {reference}   shardway logs -f {reference}")
