"""`shardway submit`: hands a run to a scheduler, here or on a login node, once or until it is done; `shardway resume`;
`shardway stop`: ends a run after its current step, or kills its jobs.

Invariants:
- It returns as soon as the scheduler has taken the job.
- What --dry-run prints is the script that would be submitted, byte for byte except for the token in its name; with
  --lib, the functions that would lie beside it; with --json, what it would cost, and a digest of all of it.
- Resuming is a submission like any other, of the request that the last attempt recorded.
- Nothing is killed without --now, and with it only after the user was shown what is lost.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.main import CommandWithProgram, read_program_words
from shardway.cli.options import (
    DirOption,
    JsonOption,
    RunName,
    Words,
    complete_site,
    fill_seconds,
    print_json,
    print_table,
    read_request,
    report,
)
from shardway.cli.then import (
    AfterOption,
    ThenOption,
    describe_place,
    describe_then,
    find_after,
    plan_before,
    plan_then,
    submit_before,
    submit_then,
)
from shardway.errors import JobError, UserError

if TYPE_CHECKING:
    from shardway.data.stage_forecast import StagingForecast
    from shardway.launch.hosts.base import Host
    from shardway.launch.serving.state import ServerAccess
    from shardway.launch.submission.budget import RunCost
    from shardway.launch.submission.prepare import Prepared, SubmitRequest
    from shardway.launch.submission.serve import ServeOptions, Serving
    from shardway.launch.submission.start_times import QueueStart
    from shardway.launch.submission.submit import SentSubmission

WAIT_S = 1800.0
"""How long `--wait` waits for a server where no seconds are named."""

_SECONDS = re.compile(r"\d+(\.\d+)?")


class CommandWithWait(CommandWithProgram):
    """`--wait` may stand alone, or have seconds after it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, fill_seconds(args, ("--wait",), _SECONDS, WAIT_S))


COMMANDS = {"submit": CommandWithWait}

MostOption = Annotated[int, typer.Option("--max-attempts", min=0, help="Most jobs of --until-done (0: no limit).")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the job script, and do nothing.")]
LibraryOption = Annotated[bool, typer.Option("--lib", help="With --dry-run: print lib.sh, the script's functions.")]
ServeOption = Annotated[
    str,
    typer.Option("--serve", metavar="SERVER", help="Start vllm, sglang or transformers for the MODEL that follows."),
]
ExposeOption = Annotated[
    bool, typer.Option("--expose", help="The server listens on all interfaces of its node, not on loopback alone.")
]
WaitOption = Annotated[
    float | None,
    typer.Option("--wait", metavar="[SECONDS]", min=0.1, help="Wait until the server is ready, then print its URL."),
]
_KEY = re.compile(r"[a-z_]+\.[A-Za-z_][\w.]*\s*=")
YesOption = Annotated[bool, typer.Option("--yes", help="Submit it though it may cost more than site.budget.")]
WhenOption = Annotated[
    bool, typer.Option("--when", help="Print when it would start in each queue, and submit nothing.")
]
SoonestOption = Annotated[bool, typer.Option("--soonest", help="Submit it to the queue that starts it first.")]
OnOption = Annotated[
    str,
    typer.Option(
        "--on", metavar="[USER@HOST:]SITE", help="The site (default: site.name).", autocompletion=complete_site
    ),
]


def submit(
    ctx: typer.Context,
    words: Words = None,
    on: OnOption = "",
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the job (site.nodes).")] = None,
    walltime: Annotated[str | None, typer.Option("--walltime", help="Wall-time of an attempt (site.walltime).")] = None,
    until_done: Annotated[bool, typer.Option("--until-done", help="Go on in further jobs until it is done.")] = False,
    max_attempts: MostOption = 0,
    directory: DirOption = None,
    then: ThenOption = None,
    after: AfterOption = "",
    serve: ServeOption = "",
    tp: Annotated[int, typer.Option("--tp", min=0, help="Tensor parallel degree of the server (0: what fits).")] = 0,
    port: Annotated[int, typer.Option("--port", min=0, help="Port of the server (0: a free one).")] = 0,
    model_name: Annotated[str, typer.Option("--model-name", help="What requests to the server call the model.")] = "",
    expose: ExposeOption = False,
    wait: WaitOption = None,
    when: WhenOption = False,
    soonest: SoonestOption = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    library: LibraryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a run file, or with `-- COMMAND...` any script that torchrun can run, or with --serve an inference
    server."""
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
    server = None
    if serve:
        from shardway.launch.submission.serve import ServeOptions

        if then:
            raise UserError(f"--then {then[0]!r}: a server is never finished; it runs until it is stopped.")
        server, words = _read_server(serve, words, ServeOptions(serve, "", port, tp, model_name, expose))
        command = (serve, *command)
    else:
        given = {"--tp": tp, "--port": port, "--model-name": model_name, "--expose": expose, "--wait": wait}
        if alone := ", ".join(name for name, value in given.items() if value):
            raise UserError(f"{alone}: for an inference server.\n  To do: name one: shardway submit --serve vllm MODEL")
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
    request = SubmitRequest(run, site, command, until_done, max_attempts, serve=server)
    host = find_host(target.host if target else "")
    if after:
        request = replace(request, follows=find_after(after, host))
    if when or soonest:
        from shardway.launch.submission.start_times import choose_soonest, list_starts, with_queue

        if when and soonest:
            raise UserError("--when submits nothing, and --soonest submits.\n  To do: leave one of them out.")
        rows = list_starts(request, host)
        if when:
            _print_starts(rows, as_json=as_json)
            return
        first = choose_soonest(rows)
        report(f"{first.queue or 'it'} starts it soonest: {first.words}")
        request = with_queue(request, first.queue)
    before, behind = _read_pipeline(request)
    _carry_out(
        *(request, host, [*behind, *(then or ())], before),
        dry_run=dry_run,
        library=library,
        as_json=as_json,
        wait_s=wait,
        agreed=yes,
    )


def _read_pipeline(request: SubmitRequest) -> tuple[Sequence[str], Sequence[str]]:
    """What the run file has before and after its training; nothing for a command or a server, and for a run file that
    cannot be read: that is reported with all other problems."""
    run = request.run_request
    is_named = run.run_file is not None or any(word.lstrip().startswith("pipeline.") for word in run.overrides)
    if request.command or request.serve or not is_named:
        return (), ()
    from shardway.runfile.load import load_run

    try:
        pipeline = load_run(run.run_file, run.overrides).values.pipeline
    except UserError:
        return (), ()
    return pipeline.before, pipeline.then


def _print_starts(rows: Sequence[QueueStart], *, as_json: bool) -> None:
    """The queues as a table, with the reasons of those without a time below it."""
    if as_json:
        print_json([row.as_json() for row in rows])
        return
    columns = ("queue", "starts", "limits", "chosen by")
    values = [(row.queue or "-", row.words, row.limits or "-", row.key or "-") for row in rows]
    print_table(columns, [dict(zip(columns, row, strict=True)) for row in values])
    for row in rows:
        for reason in row.list_reasons():
            typer.echo(f"{row.queue or 'it'}: {reason}")


def _read_server(name: str, words: list[str], options: ServeOptions) -> tuple[ServeOptions, list[str]]:
    """The server with its model, which is the first word that is no key, and the other words."""
    at = next((at for at, word in enumerate(words) if not _KEY.match(word)), None)
    if at is None:
        raise UserError(
            f"--serve {name}: no model is named.\n"
            "      allowed: a name of the hub, a folder, a run directory or one checkpoint of it\n"
            f"  To do: shardway submit --serve {name} MODEL"
        )
    rest = [*words[:at], *words[at + 1 :]]
    if more := next((word for word in rest if not _KEY.match(word)), ""):
        raise UserError(
            f"--serve {name}: two models are named, {words[at]} and {more}.\n"
            "  To do: leave one of them out; options of the server stand behind `--`."
        )
    return replace(options, model=words[at]), rest


def resume(
    run: RunName,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set anew.")] = None,
    until_done: Annotated[bool | None, typer.Option("--until-done/--once", help="As a chain, or once.")] = None,
    max_attempts: MostOption = 0,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    library: LibraryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run that was stopped, failed, or whose chain has ended."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.find import find_known
    from shardway.launch.submission.prepare import read_last_request
    from shardway.launch.sweep.record import find_sweep

    if (sweep := find_sweep(run)) is not None:
        from shardway.cli.sweep import resume_sweep

        if library:
            raise UserError(f"--lib: {run} is a sweep.\n  To do: name one of its runs.")
        resume_sweep(sweep, keys or (), until_done, max_attempts, dry_run=dry_run, as_json=as_json, agreed=yes)
        return
    known = find_known(run)
    host = find_host(known.host)
    with read_last_request(host, Path(known.run)) as last:
        run_request = replace(last.run_request, overrides=(*last.run_request.overrides, *(keys or [])))
        chain = last.until_done if until_done is None else until_done
        request = replace(
            last, run_request=run_request, until_done=chain, max_attempts=max_attempts or last.max_attempts
        )
        _carry_out(request, host, dry_run=dry_run, library=library, as_json=as_json, agreed=yes)


def _carry_out(
    request: SubmitRequest,
    host: Host,
    then: Sequence[str] = (),
    before: Sequence[str] = (),
    *,
    dry_run: bool,
    library: bool,
    as_json: bool,
    wait_s: float | None = None,
    agreed: bool = False,
) -> None:
    """Submit a request and say how to watch it, or print its job script, or the functions of that."""
    if library and not dry_run:
        raise UserError("--lib prints the functions of a job script; it goes with --dry-run.")
    steps, follows = plan_before(request, host, before)
    request = replace(request, follows=follows)
    followers = plan_then(request, host, then)
    if dry_run:
        from shardway.launch.job_script import render_library
        from shardway.launch.submission.budget import check_budget, estimate_cost
        from shardway.launch.submission.prepare import prepare

        prepared = prepare(request, host)
        if as_json and not library:
            from shardway.launch.submission.dry_run import describe_prepared

            before_and_after = [[describe_prepared(each.prepared, host) for each in row] for row in (steps, followers)]
            print_json(
                {**describe_prepared(prepared, host), **dict(zip(("before", "then"), before_and_after, strict=True))}
            )
            return
        for warning in (*prepared.warnings, *filter(None, [_forecast_staging(prepared, host)])):
            report(str(warning))
        for line in (*describe_then(steps, "first"), *describe_then(followers)):
            report(line)
        chain = [*(each.prepared for each in steps), prepared, *(each.prepared for each in followers)]
        for line in _describe_costs(chain):
            report(f"costs {line}")
        try:
            check_budget([estimate_cost(each) for each in chain], agreed=agreed)
        except UserError as error:
            report(f"without --dry-run it would be refused: {error}")
        typer.echo(render_library(prepared.job.scheduler) if library else prepared.script, nl=False)
        return
    from shardway.launch.script import quote
    from shardway.launch.submission.submit import Submitter, submit_run

    submitter = Submitter(host, tell=report)
    if steps:
        from shardway.launch.submission.budget import check_budget, estimate_cost
        from shardway.launch.submission.prepare import prepare

        # What is wrong with it, and what all of it costs, is reported before its steps are submitted.
        chain = [*(each.prepared for each in (*steps, *followers)), prepare(request, host, look=True)]
        check_budget([estimate_cost(each) for each in chain], agreed=agreed)
        agreed = True
    first = submit_before(steps, host, submitter)
    sent = submit_run(request, host, submitter, behind=[each.prepared for each in followers], agreed=agreed)
    behind = submit_then(followers, host, submitter, sent)
    staging = _forecast_staging(sent.prepared, host)
    for warning in (*sent.prepared.warnings, *filter(None, [staging])):
        report(str(warning))
    serving = sent.prepared.serving
    if as_json:
        access = _wait_for_server(sent, host, wait_s) if serving and wait_s else None
        more: dict[str, Any] = {"staging": staging.as_json()} if staging is not None else {}
        more |= {"before": [each.as_json() for each in first]} if before else {}
        more |= {"cost": [cost.as_json() for cost in _list_costs([each.prepared for each in (*first, sent, *behind)])]}
        more |= {"then": [each.as_json() for each in behind]} if then else {}
        more |= {"serving": access.as_json() if access else None} if serving else {}
        print_json({**sent.as_json(), **more})
        return
    job, where = sent.prepared.job, f" on {sent.host}" if sent.host else ""
    for each in first:
        typer.echo(f"first          {describe_place(each)}")
    found = " (it had got through before)" if sent.found else ""
    if sent.waits_for:
        typer.echo(f"waits for      {sent.waits_for}{where}, whose job submits it when it is finished")
    else:
        typer.echo(f"job            {sent.job}{where}, attempt {job.attempt}{found}")
    typer.echo(f"run directory  {job.run}")
    for line in _describe_costs([each.prepared for each in (*first, sent, *behind)]):
        typer.echo(f"costs          {line}")
    if job.around.code is not None:
        typer.echo(f"works in       {job.around.workdir}, for all attempts: what it writes there, the next one finds")
    for each in behind:
        typer.echo(f"then           {describe_place(each)}")
    reference = quote(sent.reference)
    if serving is not None:
        typer.echo(f"model          {serving.path}, tensor parallel {serving.tp}")
        typer.echo(f"reached by     {_describe_reach(serving)}")
    typer.echo(f"to watch       shardway status {shlex.quote(reference)}   shardway logs -f {shlex.quote(reference)}")
    if serving is not None and wait_s:
        for label, text in _wait_for_server(sent, host, wait_s).list_lines():
            typer.echo(f"{label:<15}{text}")
    if serving is not None:
        typer.echo(f"to end it      shardway stop {shlex.quote(reference)}")


def _list_costs(prepared: Sequence[Prepared]) -> list[RunCost]:
    from shardway.launch.submission.budget import estimate_cost

    return [estimate_cost(each) for each in prepared]


def _describe_costs(prepared: Sequence[Prepared]) -> Iterator[str]:
    """What each of these submissions may cost, a line each; nothing for this machine, unless it has a budget."""
    for each, cost in zip(prepared, _list_costs(prepared), strict=True):
        if cost.limit is not None or not each.request.scheduler.this_machine:
            budget = "" if cost.limit is None else f" (site.budget: {cost.limit:g})"
            yield f"at most {cost.describe()}{budget}"


def _describe_reach(serving: Serving) -> str:
    """From where the server can be reached."""
    keyed = serving.server is not None and serving.server.checks_keys
    place = "every interface of its node" if serving.options.expose else "the loopback address of its node alone"
    return f"{place}, {'with a key that the job makes' if keyed else 'without a key'}"


def _wait_for_server(sent: SentSubmission, host: Host, wait_s: float) -> ServerAccess:
    """The server once it is ready. Raises JobError where it has ended, or is not ready in time."""
    from shardway.launch.runs.job_status import read_ledger, read_standings
    from shardway.launch.schedulers.base import find_scheduler
    from shardway.launch.serving.state import ServerAccess, read_serving

    job, until = sent.prepared.job, time.monotonic() + wait_s
    pause_s = 2.0 if host.name else 0.2
    while True:
        state = read_serving(host, job.folder)
        if state is not None and state.state == "ready":
            return ServerAccess(state, host.name, find_scheduler(job.scheduler).this_machine)
        if state is not None and state.state == "ended":
            said = "".join(f"\n    {line}" for line in state.lines[-5:])
            raise JobError(f"{state.reason}{said}\n  To do: shardway logs {shlex.quote(sent.reference)}")
        ledger = read_ledger(host, job.run)
        if state is None and ledger.last is not None and ledger.last.result is not None:
            raise JobError(
                f"the job has ended: {ledger.last.result.reason}\n  To do: shardway logs {shlex.quote(sent.reference)}"
            )
        if time.monotonic() >= until:
            standings = read_standings(host, [ledger])[0]
            where = f"the server is {state.state}" if state else f"its job is {standings[-1].word}"
            name = shlex.quote(sent.reference)
            raise JobError(
                f"the server is not ready after {wait_s:g} s: {where}.\n"
                f"  It goes on. To do: shardway status {name}, or shardway stop {name}"
            )
        time.sleep(pause_s)


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
    from shardway.launch.runs.find import find_known, forget
    from shardway.launch.runs.followers import read_followers, withdraw
    from shardway.launch.runs.job_status import read_ledger
    from shardway.launch.runs.stop import Stopper
    from shardway.launch.sweep.record import find_sweep
    from shardway.rundir.directory import RunDir

    if (sweep := find_sweep(run)) is not None:
        from shardway.cli.sweep import stop_sweep

        def agrees(running: str) -> bool:
            return _may_kill(f"{run}: {running}", "", yes=yes)

        stop_sweep(sweep, now=now, agrees=agrees, wait_s=wait, as_json=as_json)
        return
    known = find_known(run)
    stopper = Stopper(find_host(known.host))
    if not known.host:
        RunDir(Path(known.run)).check_readable()
    ledger = read_ledger(stopper.host, Path(known.run))
    waiting = [each for each in read_followers(stopper.host, ledger.run.path) if each.waits]
    followed = withdraw(stopper.host, ledger)
    if followed is not None:
        ledger = read_ledger(stopper.host, ledger.run.path)
        if not ledger.entries and not ledger.status:
            forget(replace(known, run=str(Path(known.run).absolute()) if not known.host else known.run))
    kills = now and stopper.find_running(ledger) != ()
    if kills:
        step = ledger.status.get("step")
        saved = f" (it is at step {step})" if step else ""
        if not _may_kill(str(ledger.run.path), saved, yes=yes):
            raise UserError(
                f"{ledger.run.path}: nothing was killed.\n"
                "  To do: leave out --now, so that it saves and leaves in order, or add --yes where no terminal is."
            )
    done = stopper.cancel(ledger) if now else stopper.ask(ledger)
    ends = stopper.wait(ledger, wait) if wait else ()
    states = {str(standing.entry.number): standing.word for standing in ends}
    if as_json:
        asked, cancelled = ([entry.job for entry in entries] for entries in (done.asked, done.cancelled))
        behind = {"followed": str(followed or ""), "followers": [str(each.run) for each in waiting]}
        print_json({"asked": asked, "cancelled": cancelled, "writer": done.writer, "states": states, **behind})
        return
    lines = [f"taken out of what follows {followed}"] if followed is not None else []
    lines += done.list_lines(now=now, kills=kills)
    for line in lines or [f"{run} has no job that waits or runs"]:
        typer.echo(line)
    for each in waiting:
        name = shlex.quote(str(each.run))
        typer.echo(f"still listed, for when the run is finished: {each.run} (`shardway stop {name}` takes it out)")
    for number, state in states.items():
        typer.echo(f"attempt {number}: {state}")


def _may_kill(runs: str, saved: str, *, yes: bool) -> bool:
    """Whether the user agrees, having read what is lost."""
    typer.echo(WARNING.format(run=runs, saved=saved), err=True)
    try:
        return yes or typer.confirm("Kill them?", err=True)
    except typer.Abort:  # no answer is possible
        typer.echo(err=True)
        return False
