"""N local ranks: starts them through the agent and turns how they ended into an outcome or an error.

Invariant: the error that is raised is that of the rank which failed first on its own account, not of those that lost
contact with it. This module must not train.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from dataclasses import asdict, replace
from typing import Any, NoReturn

from shardway.errors import (
    ERRORS_BY_NAME,
    Fenced,
    JobError,
    LateStop,
    LostContact,
    ShardwayError,
    SiteError,
    UserError,
    render_reason,
)
from shardway.hardware.cgroup import count_oom_kills
from shardway.ranks.agent.hang import Hang
from shardway.ranks.agent.patience import Patience
from shardway.ranks.agent.policy import Failure, Verdict, decide
from shardway.ranks.agent.stacks import Group
from shardway.ranks.agent.watch import Found, watched
from shardway.ranks.attempt import describe_error, find_attempt, sign_failure, tell_end, tell_fault
from shardway.ranks.local import LocalLaunch, RankFailure, run_local
from shardway.ranks.oom import explain_oom
from shardway.ranks.signals import STOP_SIGNALS, find_received
from shardway.resolve.request import Request, Resolution
from shardway.rundir.attempts import BY_SIGNAL, SECOND_SIGNAL, Attempt, Ending, Result
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.rundir.lease import TAKEN_OVER
from shardway.runfile.machine import RunSection

ASKED = "a signal asked for a stop"
BY = "shardway train"
_STOPS = tuple(number.name for number in STOP_SIGNALS)
"""What ends a rank that does not listen yet; one that does, obeys."""


def train_local(resolution: Resolution, ranks: int) -> dict[str, Any]:
    """Train on `ranks` local ranks, again after a failure where `ranks.agent.policy` says so.

    Raises the error of the rank that failed first, that of the last time.
    """
    run, request, attempt = resolution.directory, resolution.request, find_attempt(os.environ)
    if request.fresh:  # here, so that what the ranks print does not move with the old run
        run.set_aside()
        request = replace(request, fresh=False)
    run.create(empty=True)
    launch = LocalLaunch(
        ranks=ranks,
        module="shardway.cli.rank",
        arguments=[pack_request(request)],
        log_folder=run.log_folder,
        threads=int(resolution.resolved.values.run.threads),
        stop_path=run.stop_path,
        stop_timeout_s=resolution.resolved.values.run.stop_timeout,
    )
    settings = resolution.resolved.values.run
    patience = _read_patience(settings)
    # In a job the next attempt goes on; what a rank has said of this one is its result.
    most = 0 if attempt is not None else None if settings.restarts == "auto" else int(settings.restarts)
    failures: list[Failure] = []
    try:
        while find_received() is None and (error := _run_once(run, launch, patience)) is not None:
            failures.append(_describe(run, error))
            verdict = decide(failures, most)
            if run.stop_requested() or isinstance(error, LateStop) or not verdict.restart:
                _give_up(run, attempt, error, failures, verdict)
            _tell_restart(run, error, failures)
        if find_received() is not None:
            _end_early(run, attempt)
    except KeyboardInterrupt:
        run.clear_stop()  # nobody is left to obey it, and the next start must not
        _mark_ended(run, "stopped", SECOND_SIGNAL)
        if attempt is not None:
            tell_end(attempt, Result(Ending.STOPPED, SECOND_SIGNAL, run.read_step(), exit_code=130, by=BY))
        raise
    return _read_outcome(run, failures)


def _read_outcome(run: RunDir, failures: list[Failure]) -> dict[str, Any]:
    status = run.read_status()
    return {
        "directory": str(run.path),
        "state": status.get("state", ""),
        "reason": status.get("reason", ""),
        "step": status.get("step", 0),
        "restarts": len(failures),
    }


def _end_early(run: RunDir, attempt: Attempt | None) -> None:
    """A stop that no rank could obey: none was there yet, or they began and did not listen yet."""
    run.create()
    run.clear_stop()
    _mark_ended(run, "stopped", ASKED, where_missing=True)
    if attempt is not None:
        tell_end(attempt, Result(Ending.STOPPED, ASKED, run.read_step(), failure=BY_SIGNAL, by=BY))


def _read_patience(settings: RunSection) -> Patience | None:
    """None where nobody shall look for hangs."""
    limit = settings.hang_timeout
    if limit == "off":
        return None
    return Patience(settings.start_timeout, None if limit == "auto" else float(limit))


def _run_once(run: RunDir, launch: LocalLaunch, patience: Patience | None) -> ShardwayError | None:
    """Run the ranks to their end; the error of the rank that failed first, or None."""
    marks = {rank: sum(1 for _ in run.all_events(rank)) for rank in range(launch.ranks)}
    oom_kills = count_oom_kills()
    with watched(launch.ranks, patience, _tell_wake) as watch:
        try:
            failures = run_local(replace(launch, pages=watch.folder), on_stop=lambda: _ask_to_stop(run))
        except LateStop as error:
            return error
    if (failures or watch.found is not None) and (writer := run.find_writer()) is not None:
        return _explain_taken(run, failures, writer)
    if failures and failures[0].signal_name in _STOPS and run.stop_requested():
        _end_early(run, find_attempt(os.environ))
        return None
    if watch.found is not None:
        return _explain_hang(run, watch.found)
    oom = explain_oom(failures, oom_kills, run.describe_base()) if failures else None
    return oom or (_explain(run, failures, marks) if failures else None)


def _tell_wake(hang: Hang) -> None:
    print(f"{hang.message}, and was told to go on", file=sys.stderr)


def _describe(run: RunDir, error: ShardwayError) -> Failure:
    saved = run.checkpoint_steps()
    hopeless = isinstance(error, UserError | SiteError | Fenced)
    return Failure(sign_failure(describe_error(error)), saved[-1] if saved else 0, hopeless)


def _give_up(
    run: RunDir, attempt: Attempt | None, error: ShardwayError, failures: list[Failure], verdict: Verdict
) -> NoReturn:
    if len(failures) > 1:
        again = f"; it is not started again: {verdict.reason}" if verdict.reason else ""
        error = type(error)(f"{error}\n  The ranks were started {len(failures)} times{again}.")
    if run.find_writer() is None:  # else it is another run's to say how it goes
        if attempt is None:
            run.clear_stop()  # nobody is left to obey it, and the next start must not; a job script reads it first
        _mark_ended(run, "failed", render_reason(str(error)))
    tell_fault(attempt, BY, describe_error(error), run.read_step())
    raise error


def _tell_restart(run: RunDir, error: ShardwayError, failures: list[Failure]) -> None:
    """In the events of rank 0, which is gone by now, for whoever reads or shows the run."""
    with run.event_writer(0) as events, contextlib.suppress(OSError):
        events.write(
            "restarted", step=failures[-1].saved_step, reason=render_reason(str(error)), failures=len(failures)
        )


def pack_request(request: Request) -> str:
    """A request as one word of a command line."""
    return json.dumps(asdict(request), default=str)


def _ask_to_stop(run: RunDir) -> None:
    if not run.stop_requested():  # a job script that was warned has written why
        run.request_stop(ASKED)
    print("stopping after this step and saving; once more to end at once", file=sys.stderr)


def _explain(run: RunDir, failures: list[RankFailure], marks: dict[int, int]) -> ShardwayError:
    """The error of the rank that is to blame.

    That is the first one where it was killed, else one with an error that is no lost contact, else one that was
    killed: a rank may lose contact before the agent sees who died, and the agent ends the others by signals.
    """
    if failures[0].signal_name:
        return _killed(run, failures[0])
    faults = {rank: fault for rank, mark in marks.items() if (fault := _last_fault(run, rank, mark)) is not None}
    own = {rank: fault for rank, fault in faults.items() if fault["kind"] != LostContact.__name__}
    killed = [failure for failure in failures if failure.signal_name]
    if killed and not own:
        return _killed(run, killed[0])
    for rank, fault in (own or faults).items():
        kind = ERRORS_BY_NAME.get(fault["kind"], JobError)
        agreed = len({fault["message"] for fault in faults.values()}) == 1
        prefix = "" if agreed else f"rank {rank}: "
        return kind(f"{prefix}{fault['message']}{_where_output(run, rank) if kind.__name__ == 'Bug' else ''}")
    return _unexplained(run, failures[0])


def _explain_taken(run: RunDir, failures: list[RankFailure], writer: str) -> ShardwayError:
    """All ranks of this start are gone and somebody writes here: another run, in whose record nothing is written."""
    words = {failure: text for failure in failures if (text := _last_words(run, failure.rank))}
    for failure, text in words.items():
        if failure.exit_code == UserError.exit_code:  # it was there before the ranks could begin
            return UserError(text)
    told = sorted(words.values(), key=lambda text: not text.startswith(TAKEN_OVER))
    return Fenced(
        told[0]
        if told
        else f"another run trains into {run.path}: {writer}. This one has ended and writes nothing more.\n"
        "  To do: nothing, if the other one is meant to go on; else stop that one, then run the same command again."
    )


def _explain_hang(run: RunDir, found: Found) -> JobError:
    """What the agent saw, with where the ranks were; recorded as a fault of the first of them."""
    hang, places = found.hang, [f"ranks {_numbers(group)}: {_place(group)}" for group in found.groups]
    told = "".join(f"\n  {place}" for place in places)
    stacks = [{"ranks": group.ranks, "frames": group.frames} for group in found.groups]
    with run.event_writer(hang.ranks[0]) as events, contextlib.suppress(OSError):
        events.write("fault", rank=hang.ranks[0], kind="Hang", exit_code=4, message=hang.message, stacks=stacks)
    return JobError(
        f"{hang.message}, so all ranks were ended.{told}\n"
        "  To do: run the same command again: it goes on from the last checkpoint. If it was no hang, raise "
        "run.hang_timeout."
    )


def _numbers(group: Group) -> str:
    return ", ".join(map(str, group.ranks))


def _place(group: Group) -> str:
    """The innermost frames of a group of ranks, in a line."""
    return " < ".join(group.frames[:3]) or "n/a"


def _killed(run: RunDir, failure: RankFailure) -> JobError:
    return JobError(
        f"rank {failure.rank} (process {failure.pid}) was ended by {failure.signal_name}; the other ranks were ended "
        f"with it.\n  To do: run the same command again: it goes on from {run.describe_base()}. If nobody sent "
        "that signal, the machine may have run out of memory (dmesg says so)."
    )


def _unexplained(run: RunDir, failure: RankFailure) -> ShardwayError:
    kinds: dict[int, type[ShardwayError]] = {kind.exit_code: kind for kind in (UserError, SiteError, JobError)}
    kind, words = kinds.get(failure.exit_code), _last_words(run, failure.rank)
    if kind is not None and words:
        return kind(words)
    what = f"rank {failure.rank} ended with exit code {failure.exit_code}."
    return (kind or JobError)(f"{what}{_where_output(run, failure.rank)}")


def _last_words(run: RunDir, rank: int) -> str:
    """The error that a rank printed last, where it had no events to write it into; empty for none."""
    printed = "".join(path.read_text(encoding="utf-8", errors="replace") for path in run.rank_output(rank))
    _, *told = re.split(r"^shardway: ", printed, flags=re.MULTILINE)
    return told[-1].strip() if told else ""


def _where_output(run: RunDir, rank: int) -> str:
    files = run.rank_output(rank)
    return f"\n  What it printed is in {files[-1]}" if files else ""


def _last_fault(run: RunDir, rank: int, mark: int) -> Event | None:
    """The fault that a rank wrote in this start (events before `mark` are older)."""
    events = list(run.all_events(rank))[mark:]
    return next((event for event in reversed(events) if event["event"] == "fault"), None)


def _mark_ended(run: RunDir, state: str, reason: str, *, where_missing: bool = False) -> None:
    """A rank 0 that was killed could not say so itself, and one that lost contact could not know why."""
    status = run.read_status()
    if status.get("state") in ("running", "failed") or (where_missing and not status):
        run.change_state(status, state, reason)
