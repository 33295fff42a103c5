"""`shardway submit`: hands a run to a scheduler, here or on a login node, once or until it is done; `shardway resume`;
`shardway stop`: ends a run after its current step, or kills its jobs.

Invariants:
- It returns as soon as the scheduler has taken the job.
- What --dry-run prints is the script that would be submitted, byte for byte except for the token in its name; with
  --lib, the functions that would lie beside it.
- Resuming is a submission like any other, of the request that the last attempt recorded.
- Nothing is killed without --now, and with it only after the user was shown what is lost.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.main import CommandWithProgram, read_program_words
from shardway.cli.options import DirOption, JsonOption, RunName, Words, print_json, read_request, report
from shardway.errors import UserError

if TYPE_CHECKING:
    from shardway.data.stage_forecast import StagingForecast
    from shardway.launch.hosts.base import Host
    from shardway.launch.submission.prepare import Prepared, SubmitRequest

COMMANDS = {"submit": CommandWithProgram}

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
    from shardway.launch.submission.prepare import SubmitRequest

    target, words = parse_target(on) if on else None, words or []
    for name, value in {"nodes": nodes, "walltime": walltime}.items():
        if value is None:
            continue
        if twice := next((word for word in words if word.partition("=")[0].strip() == f"site.{name}"), ""):
            raise UserError(f"--{name} {value} and {twice} say the same thing.\n  To do: leave one of them out.")
        words = [*words, f"site.{name}={json.dumps(value)}"]
    command = read_program_words(ctx)
    script = next((word for word in words if word.endswith((".py", ".sh")) and "=" not in word), "")
    if script and not command:  # it would be read as a run file
        starts = "python " if script.endswith(".py") else "bash "
        raise UserError(
            f"{script} is a program and no run file (.toml).\n"
            f"  To do: name it behind `--`: shardway submit ... -- {starts}{script}"
        )
    run = read_request(words, directory)
    if command and run.run_file is not None and run.run_file.suffix != ".toml":
        raise UserError(f"{run.run_file} stands before `--`, where a run file (.toml) and keys may stand.")
    if max_attempts and not until_done:
        raise UserError("--max-attempts says how long a chain may grow; it goes with --until-done.")
    site = target.site if target else ""
    request = SubmitRequest(run, site=site, command=command, until_done=until_done, max_attempts=max_attempts)
    _carry_out(request, find_host(target.host if target else ""), dry_run=dry_run, library=library, as_json=as_json)


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
        _carry_out(request, host, dry_run=dry_run, library=library, as_json=as_json)


def _carry_out(request: SubmitRequest, host: Host, *, dry_run: bool, library: bool, as_json: bool) -> None:
    """Submit a request and say how to watch it, or print its job script, or the functions of that."""
    if library and not dry_run:
        raise UserError("--lib prints the functions of a job script; it goes with --dry-run.")
    if dry_run:
        from shardway.launch.job_script import render_library
        from shardway.launch.submission.prepare import prepare

        prepared = prepare(request, host)
        for warning in (*prepared.warnings, *filter(None, [_forecast_staging(prepared, host)])):
            report(str(warning))
        typer.echo(render_library(prepared.job.scheduler) if library else prepared.script, nl=False)
        return
    from shardway.launch.script import quote
    from shardway.launch.submission.submit import Submitter, submit_run

    sent = submit_run(request, host, Submitter(host, tell=report))
    staging = _forecast_staging(sent.prepared, host)
    for warning in (*sent.prepared.warnings, *filter(None, [staging])):
        report(str(warning))
    if as_json:
        print_json({**sent.as_json(), **({"staging": staging.as_json()} if staging is not None else {})})
        return
    job, where = sent.prepared.job, f" on {sent.host}" if sent.host else ""
    found = " (it had got through before)" if sent.found else ""
    typer.echo(f"job            {sent.job}{where}, attempt {job.attempt}{found}")
    typer.echo(f"run directory  {job.run}")
    if job.around.code is not None:
        typer.echo(f"works in       {job.around.workdir}, for all attempts: what it writes there, the next one finds")
    reference = quote(sent.reference)
    typer.echo(f"to watch       shardway status {reference}   shardway logs -f {reference}")


def _forecast_staging(prepared: Prepared, host: Host) -> StagingForecast | None:
    """What the job copies to its nodes, as far as it is known here."""
    resolved = prepared.resolved
    if resolved is None or resolved.values.data.stage == "off":
        return None
    from shardway.data.stage_forecast import forecast_staging
    from shardway.resolve.draft import takes_of

    here, model = not host.name, resolved.values.model
    return forecast_staging(
        resolved.values,
        resolved.circumstances.ranks_per_node,
        takes_tokens=takes_of(model.kind) == "tokens" or bool(model.hf),
        chosen=not resolved.is_derived("data.stage"),
        data_here=here,
        disk_here=here and prepared.request.scheduler.this_machine,
    )


# --- the end of a run

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
        step = ledger.status.get("step")
        saved = f" (it is at step {step})" if step else ""
        typer.echo(WARNING.format(run=ledger.run.path, saved=saved), err=True)
        try:
            agrees = yes or typer.confirm("Kill them?", err=True)
        except typer.Abort:  # no answer is possible
            typer.echo(err=True)
            agrees = False
        if not agrees:
            raise UserError(
                f"{ledger.run.path}: nothing was killed.\n"
                "  To do: leave out --now, so that it saves and leaves in order, or add --yes where no terminal is."
            )
    done = stopper.cancel(ledger) if now else stopper.ask(ledger)
    ends = stopper.wait(ledger, wait) if wait else ()
    states = {str(standing.entry.number): standing.word for standing in ends}
    if as_json:
        asked, cancelled = ([entry.job for entry in entries] for entries in (done.asked, done.cancelled))
        print_json({"asked": asked, "cancelled": cancelled, "writer": done.writer, "states": states})
        return
    for line in done.list_lines(now=now, kills=kills) or [f"{run} has no job that waits or runs"]:
        typer.echo(line)
    for number, state in states.items():
        typer.echo(f"attempt {number}: {state}")
