"""`shardway sweep --search optuna`: submits runs in batches, waits for them, and lets Optuna choose the next values.

It stays in the foreground; the runs are jobs and go on without it. Optuna keeps nothing of its own: its study is made
again from the record and from the results of the runs, so the same command goes on after any end of this one.

Invariants:
- A batch is recorded before it is submitted; no value is chosen while a run of the batch before it has a job.
- A run that fails counts as a failed trial, and is not started again by the search.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardway.cli.options import print_json, report
from shardway.cli.sweep import send_members
from shardway.errors import UserError

if TYPE_CHECKING:
    from shardway.launch.hosts.base import Host
    from shardway.launch.sweep.axes import Axis, Values
    from shardway.launch.sweep.progress import MemberStatus
    from shardway.launch.sweep.record import SweepRecord
    from shardway.units import Monitor

BATCH = 4
"""How many runs are chosen at once without --max-parallel."""

POLLS_S = (1.0, 2.0, 5.0, 15.0)
"""Pauses between two looks at the runs of a batch; the last one stays."""


def run_study(
    axes: Sequence[Axis],
    known: SweepRecord | None,
    wanted: SweepRecord,
    host: Host,
    folder: Path,
    trials: int,
    metric: str,
    *,
    dry_run: bool,
    as_json: bool,
    agreed: bool,
) -> None:
    """Submit batches until there are so many trials and all have ended. Raises UserError where it cannot go on."""
    from shardway.hfconfig import import_extra
    from shardway.launch.sweep.record import merge_sweeps
    from shardway.units import parse_monitor

    if host.name:
        raise UserError(
            f"--search optuna reads the results of runs, and those on {host.name} are not here.\n"
            "  To do: run the same command there, in a terminal that stays (tmux)."
        )
    try:
        monitor = parse_monitor(metric or "loss")
    except ValueError as error:
        raise UserError(f"--metric {metric}: {error}") from None
    optuna = import_extra("optuna", "sweep")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if known is not None and dict(known.axes) != dict(wanted.axes):
        raise UserError(
            f"{folder} holds a search of other axes: {' '.join(f'{key}={text}' for key, text in known.axes.items())}.\n"
            "  To do: name this one (run.name=NAME, --dir FOLDER)."
        )
    record = merge_sweeps(known, replace(wanted, members=known.members if known else ()), folder)
    batch = record.at_once or BATCH
    if dry_run:
        chosen = choose_values(optuna, axes, record, {}, monitor, min(batch, trials))
        typer.echo(f"{trials} runs in batches of {batch} in {folder}; the first:")
        for values in chosen:
            typer.echo("  " + " ".join(f"{key}={text}" for key, text in values.items()))
        return
    try:
        record = _search(optuna, axes, known, record, host, folder, monitor, trials, batch, agreed=agreed)
    except KeyboardInterrupt:
        report("the runs that were submitted go on; the same command goes on with the search")
        raise
    results = read_values(folder, record, monitor)
    best = monitor.find_best({index: {monitor.metric: value} for index, value in enumerate(results.values())})
    name = list(results)[best.step] if best is not None else None
    if as_json:
        members = [
            {"name": each.name, "values": dict(each.values), "value": results.get(each.name)} for each in record.members
        ]
        print_json({"sweep": str(folder), "metric": str(monitor), "best": name, "members": members})
        return
    typer.echo(f"finished       {len(record.members)} runs in {folder}; shardway status {shlex.quote(str(folder))}")
    member = record.find_member(name) if name is not None else None
    if member is not None:
        words = " ".join(f"{key}={text}" for key, text in member.values.items())
        typer.echo(f"best           {member.name}: {words} ({monitor.metric} {results[member.name]:.4g})")


def _search(
    optuna: Any,
    axes: Sequence[Axis],
    known: SweepRecord | None,
    record: SweepRecord,
    host: Host,
    folder: Path,
    monitor: Monitor,
    trials: int,
    batch: int,
    *,
    agreed: bool,
) -> SweepRecord:
    from shardway.launch.submission.array import prepare_array
    from shardway.launch.submission.budget import check_budget, estimate_cost
    from shardway.launch.sweep.progress import list_new, read_members
    from shardway.launch.sweep.record import name_members

    while True:
        members = read_members(host, folder, record)
        new = list_new(folder, record, members)
        if not new:
            _await_members(host, folder, record, members)
            if len(record.members) >= trials:
                return record
            results = read_values(folder, record, monitor)
            count = min(batch, trials - len(record.members))
            chosen = choose_values(optuna, axes, record, results, monitor, count)
            more = name_members(chosen, first=len(record.members))
            record = replace(record, members=(*record.members, *more))
            new = [record.make_request(folder, member) for member in more]
        prepared = prepare_array(new, host, look=True)
        left = trials - len(record.members) + len(new)
        check_budget([estimate_cost(prepared[0], runs=left)], agreed=agreed)  # of all batches, before the first
        sent = send_members(record, known, host, folder, new, prepared, agreed=True)
        agreed = True
        known = record
        jobs = ", ".join(f"{each.prepared.job.run.name} (job {each.job})" for each in sent)
        report(f"{record.name}: submitted {jobs}")


def _await_members(host: Host, folder: Path, record: SweepRecord, members: Sequence[MemberStatus]) -> None:
    from shardway.launch.sweep.progress import describe_members, read_members

    polls = iter(POLLS_S)
    said = ""
    while any(each.is_active for each in members):
        if (now := describe_members(members)) != said:
            report(f"{record.name}: {now}")
            said = now
        time.sleep(next(polls, POLLS_S[-1]))
        members = read_members(host, folder, record)


def read_values(folder: Path, record: SweepRecord, monitor: Monitor) -> dict[str, float]:
    """The value of each member that has one, by its name: the best validation, or the loss in training where the run
    has no validation."""
    from shardway.rundir.directory import RunDir
    from shardway.watch.progress import read_progress

    values = {}
    for member in record.members:
        run = RunDir(folder / member.name)
        if not run.exists():
            continue
        progress = read_progress(run)
        found = progress.find_value(monitor)
        if found is not None:
            values[member.name] = found[0]
        elif monitor.metric == "loss" and progress.smooth_loss is not None:
            values[member.name] = progress.smooth_loss
    return values


def choose_values(
    optuna: Any,
    axes: Sequence[Axis],
    record: SweepRecord,
    results: dict[str, float],
    monitor: Monitor,
    count: int,
) -> list[Values]:
    """So many new members, by what the earlier ones have reached."""
    spaces = {axis.key: _describe_axis(optuna, axis) for axis in axes}
    sampler = optuna.samplers.TPESampler(seed=record.seed + len(record.members), constant_liar=True)
    study = optuna.create_study(direction="maximize" if monitor.highest else "minimize", sampler=sampler)
    for member in record.members:
        params = {axis.key: _read_value(axis, member.values[axis.key]) for axis in axes}
        value = results.get(member.name)
        state = optuna.trial.TrialState.COMPLETE if value is not None else optuna.trial.TrialState.FAIL
        study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, value=value, state=state))
    asked = [study.ask(spaces).params for _ in range(count)]
    return [{axis.key: _render_value(params[axis.key]) for axis in axes} for params in asked]


def _describe_axis(optuna: Any, axis: Axis) -> Any:
    if axis.values:
        return optuna.distributions.CategoricalDistribution(axis.values)
    if axis.is_whole:
        return optuna.distributions.IntDistribution(round(axis.low), round(axis.high), log=axis.is_log)
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.is_log)


def _read_value(axis: Axis, text: str) -> Any:
    if axis.values:
        return text
    return int(text) if axis.is_whole else min(max(float(text), axis.low), axis.high)


def _render_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
