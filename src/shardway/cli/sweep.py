"""`shardway sweep`: many runs from one run file, submitted as an array of jobs; and what `stop` and `resume` do with
the folder of a sweep.

Invariants:
- Every run is prepared and checked before the first is submitted; a refused sweep leaves nothing behind.
- The same command again submits what is missing and nothing twice.
- A run of a sweep is a run like any other: each verb takes its directory.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.main import CommandWithProgram, read_program_words
from shardway.cli.options import DirOption, JsonOption, Words, print_json, print_line, read_request, report
from shardway.cli.submit import DryRunOption, MostOption, OnOption, YesOption
from shardway.cli.then import AfterOption, find_after
from shardway.errors import ShardwayError, UserError, legible

if TYPE_CHECKING:
    from shardway.launch.hosts.base import Host
    from shardway.launch.runs.stop import StopReport
    from shardway.launch.submission.prepare import Prepared, SubmitRequest
    from shardway.launch.submission.submit import SentSubmission
    from shardway.launch.sweep.axes import AxisWords, Values
    from shardway.launch.sweep.record import FoundSweep, SweepRecord

COMMANDS = {"sweep": CommandWithProgram}

ParallelOption = Annotated[
    int, typer.Option("--max-parallel", metavar="N", min=0, help="Most jobs that run at one time (0: no limit).")
]


def sweep(
    ctx: typer.Context,
    words: Words = None,
    on: OnOption = "",
    at_once: ParallelOption = 0,
    search: Annotated[str, typer.Option("--search", help="grid, list, random or optuna.")] = "",
    rows: Annotated[
        Path | None, typer.Option("--rows", metavar="FILE", help="The runs of --search list: a CSV or TOML file.")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=0, help="How many runs random and optuna make.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of --search random and optuna.")] = 0,
    metric: Annotated[str, typer.Option("--metric", help="What optuna makes best (default: loss).")] = "",
    until_done: Annotated[bool, typer.Option("--until-done", help="Each run goes on until it is done.")] = False,
    max_attempts: MostOption = 0,
    directory: DirOption = None,
    after: AfterOption = "",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit many runs of one run file as an array: KEY=A,B and KEY=0..4 vary, all other keys are shared."""
    from shardway.launch.hosts import find_host, parse_target
    from shardway.launch.sweep.axes import read_axes
    from shardway.launch.sweep.record import merge_sweeps, read_sweep

    if read_program_words(ctx):
        raise UserError(
            "a sweep is of a run file, whose keys it varies; a command behind `--` has none.\n"
            "  To do: a loop over `shardway submit run.name=NAME -- COMMAND`, or `shardway.submit` in Python."
        )
    search = _choose_search(search, rows, trials, metric)
    axes = read_axes(words or [], search=search)
    target = parse_target(on) if on else None
    host = find_host(target.host if target else "")
    folder, wanted = _plan(axes, host, directory, search, rows, trials, seed)
    follows = find_after(after, host) if after else None
    if max_attempts and not until_done:
        raise UserError("--max-attempts says how long a chain may grow; it goes with --until-done.")
    wanted = replace(
        wanted,
        site=target.site if target else "",
        until_done=until_done,
        max_attempts=max_attempts,
        at_once=at_once,
        follows=str(follows or ""),
    )
    known = read_sweep(host, folder)
    _check_is_no_run(host, folder)
    if search == "optuna":
        from shardway.cli.sweep_search import run_study

        run_study(axes.axes, known, wanted, host, folder, trials, metric, dry_run=dry_run, as_json=as_json, agreed=yes)
        return
    record = merge_sweeps(known, wanted, folder)
    _carry_out(record, known, host, folder, dry_run=dry_run, as_json=as_json, agreed=yes)


def _choose_search(search: str, rows: Path | None, trials: int, metric: str) -> str:
    """The search that the options mean. Raises UserError where they contradict each other."""
    from shardway.launch.sweep.axes import SEARCHES

    search = search or ("list" if rows else "random" if trials else "grid")
    if search not in SEARCHES:
        raise UserError(f"--search {search}: it is not known.\n  Allowed: {', '.join(SEARCHES)}.")
    draws = search in ("random", "optuna")
    if rows and search != "list":
        raise UserError(f"--rows {rows} goes with --search list, and not with {search}.")
    if search == "list" and rows is None:
        raise UserError("--search list: no file is named.\n  To do: add --rows FILE, a CSV whose head has the keys.")
    if draws != bool(trials):
        what = (
            f"--trials {trials} goes with --search random or optuna" if trials else f"--search {search} needs --trials"
        )
        raise UserError(f"{what}.\n  To do: such as --search random --trials 20.")
    if metric and search != "optuna":
        raise UserError("--metric goes with --search optuna; `shardway status` has one of its own.")
    return search


def _plan(
    axes: AxisWords, host: Host, directory: Path | None, search: str, rows: Path | None, trials: int, seed: int
) -> tuple[Path, SweepRecord]:
    """The folder of a sweep on its host, and the sweep as it is asked for. Raises UserError."""
    from shardway.launch.sweep.axes import draw_random, list_grid, read_rows
    from shardway.launch.sweep.record import SweepRecord, hash_text, name_members
    from shardway.runfile.load import load_run

    values: list[Values] = []
    if rows is not None:
        if axes.axes:
            raise UserError(f"{axes.axes[0].key}={axes.axes[0].text}: with --rows the file has the values of each run.")
        values = read_rows(rows)
    elif not axes.axes:
        raise UserError(
            "no key varies, so this is one run.\n"
            "  To do: name values, such as optim.lr=1e-3,3e-3 or train.seed=0..4; for one run: shardway submit."
        )
    elif search == "random":
        values = draw_random(axes.axes, trials, seed)
    elif search == "grid":
        values = list_grid(axes.axes)
    request = read_request([*axes.shared], directory)
    loaded = load_run(request.run_file, request.overrides)
    if loaded.values.pipeline.before or loaded.values.pipeline.then:
        raise UserError(
            "a sweep runs the training alone, and the run file has a [pipeline].\n"
            "  To do: add 'pipeline.before=[]' and 'pipeline.then=[]'; what prepares the data is a run of its own, and "
            "`--after` names it."
        )
    name = loaded.values.run.name
    name = loaded.file_name if name == "auto" else name
    where = directory if directory is not None else Path(loaded.values.run.root) / name
    folder = Path(str(host.expand(str(where))))
    run_file = request.run_file.absolute() if request.run_file else None
    return folder, SweepRecord(
        name=folder.name,
        search=search,
        run_file=str(run_file or ""),
        base=hash_text(run_file),
        shared=request.overrides,
        axes={axis.key: axis.text for axis in axes.axes},
        members=name_members(values),
        here=str(Path.cwd()),
        seed=seed,
        created=time.time(),
    )


def _check_is_no_run(host: Host, folder: Path) -> None:
    from shardway.launch.runs.job_status import read_ledger

    ledger = read_ledger(host, folder)
    if ledger.entries or ledger.status:
        raise UserError(
            f"{folder} is a run, and no folder for many.\n  To do: name the sweep (run.name=NAME, --dir FOLDER)."
        )


# --- submitting


def _carry_out(
    record: SweepRecord,
    known: SweepRecord | None,
    host: Host,
    folder: Path,
    *,
    dry_run: bool,
    as_json: bool,
    agreed: bool,
) -> None:
    """Submit the members of a sweep that were not yet, or print what would be."""
    from shardway.launch.submission.array import ArrayRequest, prepare_array, render_arrays
    from shardway.launch.sweep.progress import describe_members, list_new, read_members

    members = read_members(host, folder, record) if known is not None else []
    requests = list_new(folder, record, members) if known is not None else make_requests(folder, record)
    if not requests:
        begun = [each for each in members if not (each.is_active or each.is_finished)]
        remedy = (
            f"`shardway resume {shlex.quote(str(folder))}` goes on with those that are not finished"
            if begun
            else "nothing is left to do"
        )
        raise UserError(
            f"{folder}: all {len(record.members)} runs of this sweep were submitted before "
            f"({describe_members(members)}).\n  Nothing was submitted. To do: {remedy}."
        )
    prepared = prepare_array(requests, host, look=not dry_run)
    warnings = list(dict.fromkeys(warning for each in prepared for warning in each.warnings))
    if dry_run:
        asked = ArrayRequest(requests, folder, record.name, record.at_once)
        facts = describe_plan(record, requests)
        for warning in warnings:
            report(warning)
        if as_json:
            print_json({"sweep": str(folder), "members": facts, "scripts": [*render_arrays(asked, prepared)]})
            return
        for line in render_plan(record, requests):
            print_line(legible(line))
        typer.echo("\n".join(render_arrays(asked, prepared)), nl=False)
        return
    sent = send_members(record, known, host, folder, requests, prepared, agreed=agreed)
    for warning in warnings:
        report(warning)
    if as_json:
        print_json(describe_sent(record, host, folder, sent))
        return
    print_sent(record, host, folder, sent, already=len(record.members) - len(requests))


def make_requests(folder: Path, record: SweepRecord) -> list[SubmitRequest]:
    """The submissions of all members."""
    return [record.make_request(folder, member) for member in record.members]


def send_members(
    record: SweepRecord,
    known: SweepRecord | None,
    host: Host,
    folder: Path,
    requests: Sequence[SubmitRequest],
    prepared: Sequence[Prepared],
    *,
    agreed: bool,
) -> list[SentSubmission]:
    """Write the record, then submit these members, whatever they cost if the person has `agreed` to it. A record of
    which nothing was submitted is taken away."""
    from shardway.launch.submission.array import ArrayRequest, submit_array
    from shardway.launch.submission.submit import Submitter
    from shardway.launch.sweep.progress import read_members
    from shardway.launch.sweep.record import remove_sweep, write_sweep

    write_sweep(host, folder, record)
    asked = ArrayRequest(requests, folder, record.name, record.at_once)
    try:
        return submit_array(asked, host, Submitter(host, tell=report), prepared, agreed=agreed)
    except BaseException:
        try:
            left = [each for each in read_members(host, folder, record) if each.ledger.entries]
            if not left and known is None:
                remove_sweep(host, folder)
            elif not left and known is not None:
                write_sweep(host, folder, known)
        except ShardwayError:
            pass  # it stays, and says what the folder is
        raise


def describe_plan(record: SweepRecord, requests: Sequence[SubmitRequest]) -> list[dict[str, Any]]:
    """The members that would be submitted, as plain data."""
    names = {Path(request.run_request.directory or "").name for request in requests}
    return [{"name": member.name, "values": dict(member.values)} for member in record.members if member.name in names]


def render_plan(record: SweepRecord, requests: Sequence[SubmitRequest]) -> list[str]:
    """The same as the lines of a table."""
    from shardway.launch.sweep.progress import list_cells
    from shardway.watch.words import align_cells

    names = {Path(request.run_request.directory or "").name for request in requests}
    kept = replace(record, members=tuple(member for member in record.members if member.name in names))
    return align_cells(list_cells(kept, {}, (), ""))


def describe_sent(record: SweepRecord, host: Host, folder: Path, sent: Sequence[SentSubmission]) -> dict[str, Any]:
    """A submission as plain data."""
    by_run = {str(each.prepared.job.run): each for each in sent}
    members = [
        {
            "name": member.name,
            "values": dict(member.values),
            "run": str(folder / member.name),
            "job": by_run[run].job if (run := str(folder / member.name)) in by_run else "",
        }
        for member in record.members
    ]
    return {"sweep": str(folder), "host": host.name, "max_parallel": record.at_once, "members": members}


def print_sent(record: SweepRecord, host: Host, folder: Path, sent: Sequence[SentSubmission], already: int = 0) -> None:
    """What was submitted, and how to watch it."""
    from shardway.launch.script import quote

    where = f" on {host.name}" if host.name else ""
    jobs = [each.job for each in sent]
    limit = f", at most {record.at_once} at once" if record.at_once else ""
    typer.echo(f"jobs           {jobs[0]}{f' to {jobs[-1]}' if len(jobs) > 1 else ''}{where}{limit}")
    typer.echo(f"runs           {len(sent)} in {folder}" + (f", and {already} submitted before" if already else ""))
    name = quote(f"{host.name}:{folder}" if host.name else str(folder))
    typer.echo(f"to watch       shardway status {name}   shardway logs -f {name}/{sent[0].prepared.job.run.name}")
    typer.echo(f"to end it      shardway stop {name}")


# --- the folder of a sweep as the argument of other verbs


def stop_sweep(found: FoundSweep, *, now: bool, agrees: Callable[[str], bool], wait_s: float, as_json: bool) -> None:
    """Stop all runs of a sweep: those that wait leave the queue, those that run save and end, or are killed `now`."""
    from shardway.launch.runs.stop import Stopper
    from shardway.launch.sweep.progress import read_members

    host, folder = found.host, found.folder
    stopper, members = Stopper(host), read_members(host, folder, found.record)
    active = [each for each in members if each.is_active]
    running = [each for each in active if any(status.word == "running" for status in each.statuses)]
    if now and running and not agrees(", ".join(each.member.name for each in running)):
        raise UserError(
            f"{folder}: nothing was killed.\n"
            "  To do: leave out --now, so that its runs save and leave in order, or add --yes where no terminal is."
        )
    done = stopper.stop_many([(each.ledger, each.statuses) for each in active], now=now)
    ends = {}
    until = time.monotonic() + wait_s
    for each in active if wait_s else ():
        last = stopper.wait(each.ledger, max(0.0, until - time.monotonic()))
        ends[each.member.name] = last[-1].word if last else "new"
    if as_json:
        asked, cancelled = ([entry.job for entry in entries] for entries in (done.asked, done.cancelled))
        print_json({"sweep": str(folder), "asked": asked, "cancelled": cancelled, "states": ends})
        return
    for line in _describe_stops(done, now=now) or [f"{folder} has no run that waits or runs"]:
        typer.echo(line)
    for name, state in ends.items():
        typer.echo(f"{name}: {state}")


def _describe_stops(done: StopReport, *, now: bool) -> list[str]:
    verb = "killed" if now else "asked to stop after the current step"
    groups = ((verb, done.asked), ("taken out of the queue", done.cancelled))
    return [
        f"{what}: {', '.join(f'{entry.attempt.run_path.name} (job {entry.job})' for entry in entries)}"
        for what, entries in groups
        if entries
    ]


def resume_sweep(
    found: FoundSweep,
    keys: Sequence[str],
    until_done: bool | None,
    max_attempts: int,
    *,
    dry_run: bool,
    as_json: bool,
    agreed: bool,
) -> None:
    """Submit the runs of a sweep that have no job and are not finished, again as an array."""
    from shardway.launch.submission.array import ArrayRequest, prepare_array, render_arrays
    from shardway.launch.sweep.progress import describe_members, read_members, read_unfinished

    host, folder, record = found.host, found.folder, found.record
    members = read_members(host, folder, record)
    with read_unfinished(host, folder, record, members, keys) as known:
        requests = [
            replace(
                request,
                until_done=request.until_done if until_done is None else until_done,
                max_attempts=max_attempts or request.max_attempts,
            )
            for request in known
        ]
        if not requests:
            raise UserError(
                f"{folder}: none of its {len(members)} runs has to go on ({describe_members(members)}).\n"
                "  Nothing was submitted. To do: nothing."
            )
        prepared = prepare_array(requests, host, look=not dry_run)
        for warning in dict.fromkeys(warning for each in prepared for warning in each.warnings):
            report(warning)
        if dry_run:
            asked = ArrayRequest(requests, folder, record.name, record.at_once)
            typer.echo("\n".join(render_arrays(asked, prepared)), nl=False)
            return
        sent = send_members(record, record, host, folder, requests, prepared, agreed=agreed)
    if as_json:
        print_json(describe_sent(record, host, folder, sent))
        return
    print_sent(record, host, folder, sent, already=len(record.members) - len(requests))
