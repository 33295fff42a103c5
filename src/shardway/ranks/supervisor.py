"""Starts the ranks of a run, again after a failure, and records how the run ended (decision 0032).

Invariant: however the ranks end, the run directory records it, and so does their job, if there is one. Nothing is
trained or printed here: lines for a person go to `NodeGroup.report`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, Protocol

from shardway.errors import Fenced, JobError, LateStop, ShardwayError, SiteError, UserError, render_reason
from shardway.ranks.completion import LaunchOutcome, find_end, has_begun, has_come_to_its_end, name_trouble
from shardway.ranks.cores import VARIABLE as MASKS
from shardway.ranks.failure import (
    RepeatedFailure,
    RestartDecision,
    decide,
    describe_error,
    find_attempt,
    report_end,
    report_fault,
    sign_failure,
)
from shardway.ranks.failure_cause import Blame, find_blame
from shardway.ranks.hang import Hang, HangTimeout, read_hang_timeout, watched
from shardway.ranks.local import LocalLaunch, run_local
from shardway.ranks.stop import STOP_SIGNALS, Decision, find_stop_signal
from shardway.ranks.warm_standby import AUTO_AFTER_S, WarmStandby
from shardway.resolve.request import Resolution, ResolveRequest
from shardway.rundir.attempts import BY_AGENT, BY_SIGNAL, SECOND_SIGNAL, Attempt, Ending, Result
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import answers, list_missing, why_refused
from shardway.rundir.lineage import LOCAL, read_line
from shardway.rundir.names import find_local_run, find_run_id
from shardway.runfile.schema import RunSection
from shardway.units import render_seconds

Report = Callable[[str], None]
"""Takes a line for the person that started the ranks."""

ASKED = "a signal asked for a stop"
AWAY_S, LOOK_EVERY_S = 600.0, 1.0
"""How long a start of the ranks waits for an unreachable file system: its failover takes minutes."""

_STOPS = tuple(number.name for number in STOP_SIGNALS)
"""Signals that end a rank before it handles them; later it obeys them."""


class NodeGroup(Protocol):
    """Starts the ranks: on this machine alone, or together with other nodes (`ranks.nodes`)."""

    @property
    def ranks(self) -> int:
        """The largest number of ranks."""

    @property
    def report(self) -> Report:
        """Where lines for a person go."""

    def start(self, run: RunDir, launch: LocalLaunch, patience: HangTimeout | None) -> LaunchOutcome:
        """Run the ranks to their end. Raises LateStop, KeyboardInterrupt, and the error that keeps them from
        starting."""

    def why_not_again(self) -> str:
        """Why the ranks cannot start once more; empty if they can."""


@dataclass(frozen=True)
class Alone:
    """All ranks are on this machine."""

    ranks: int
    reserve: WarmStandby
    report: Report

    def start(self, run: RunDir, launch: LocalLaunch, patience: HangTimeout | None) -> LaunchOutcome:
        """Run the ranks to their end. Raises LateStop, KeyboardInterrupt."""
        with watched(launch.ranks, patience, report_wakes(self.report)) as watch:

            def look(failed: bool) -> bool:
                self.reserve.look(watch.slowest, ends=failed)
                return False

            launch = replace(launch, heartbeats=watch.folder)
            failures = run_local(launch, lambda: ask_to_stop(run, self.report), look, self.reserve.start)
        return LaunchOutcome(tuple(failures), watch.found)

    def why_not_again(self) -> str:
        """Always empty."""
        return ""


def open_reserve(settings: RunSection) -> WarmStandby:
    """The warm standbys that a run file requests; none if ranks do not restart."""
    if settings.spares == "off" or settings.max_restarts == 0:
        return WarmStandby(None)
    if settings.spares == "auto":
        return WarmStandby(AUTO_AFTER_S)
    return WarmStandby(float(settings.spares), bounded=False)


def build_launch(resolution: Resolution, ranks: int) -> LocalLaunch:
    """What `ranks` ranks of this machine run, and where their output goes."""
    run, settings = resolution.directory, resolution.resolved.values.run
    return LocalLaunch(
        ranks=ranks,
        module="shardway.cli.rank",
        arguments=[pack_request(_as_rank(resolution))],
        log_folder=run.log_folder,
        threads=int(settings.threads),
        stop_path=run.stop_path,
        stop_timeout_s=settings.stop_timeout,
    )


def _as_rank(resolution: Resolution) -> ResolveRequest:
    """The request of a rank. It is not `fresh`: the agent has already moved an earlier run aside, and the ranks' output
    must stay. Threads are explicit, since a rank that is bound to its own cores cannot derive that it need not share
    them."""
    request, threads = resolution.request, int(resolution.resolved.values.run.threads)
    further = (f"run.threads={threads}",) if MASKS in os.environ else ()
    return replace(request, fresh=False, overrides=(*request.overrides, *further))


def train_local(resolution: Resolution, launch: LocalLaunch, crew: NodeGroup) -> dict[str, Any]:
    """Train on the ranks of a node group, again after a failure if `ranks.failure` allows it.

    Raises the error of the rank that failed first in the last start.
    """
    with _as_it_was(resolution.directory, fresh=resolution.request.fresh):
        return _train_local(resolution, launch, crew)


@contextlib.contextmanager
def _as_it_was(run: RunDir, *, fresh: bool) -> Iterator[None]:
    """Make the run directory, with an earlier run moved aside for a `fresh` one. If the ranks are refused before the
    run goes on, the directory is restored; their output is in the error."""
    aside = run.set_aside() if fresh else None
    made = list_missing(run.path)
    marks = {0: sum(1 for _ in run.all_events(0))}
    run.create(empty=True)
    logs = run.list_log_folders()

    def put_back() -> None:
        if has_begun(run, marks) or run.find_writer() is not None:
            return
        run.remove_log_folders(run.list_log_folders() - logs)
        for folder in made:
            with contextlib.suppress(OSError):  # another process has put something there meanwhile
                folder.rmdir()
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.rename(run.path.resolve())

    try:
        yield
        put_back()  # a finished run has nothing to do
    except (UserError, SiteError):
        put_back()
        raise
    finally:
        run.clear_setup_faults()


def _train_local(resolution: Resolution, launch: LocalLaunch, crew: NodeGroup) -> dict[str, Any]:
    run, attempt = resolution.directory, find_attempt(os.environ)
    settings = resolution.resolved.values.run
    patience = read_hang_timeout(settings)
    most = None if settings.max_restarts == "auto" else int(settings.max_restarts)
    failures: list[RepeatedFailure] = []
    marks = {0: sum(1 for _ in run.all_events(0))}
    try:
        while find_stop_signal() is None and (blame := _run_once(run, launch, patience, crew)) is not None:
            failures.append(_describe(resolution, blame.error))
            began = has_begun(run, marks)
            verdict = decide(failures, most)
            if verdict.restart and (why := crew.why_not_again() or _why_refused(run)):
                verdict = RestartDecision(False, why)
            if run.stop_requested() or isinstance(blame.error, LateStop) or not verdict.restart:
                _give_up(run, attempt, blame, failures, verdict, crew.report, began=began)
            if began:
                report_restart(run, blame.error, len(failures), failures[-1].saved_step)
            else:
                crew.report(f"the ranks start again: {render_reason(str(blame.error))}")
        if find_stop_signal() is not None:
            _end_early(run, attempt, crew.report)
    except KeyboardInterrupt:
        run.clear_stop()  # no rank is left to obey it, and the next start must not
        if has_begun(run, marks):
            _mark_ended(run, "stopped", SECOND_SIGNAL, crew.report)
        if attempt is not None:
            report_end(attempt, Result(Ending.STOPPED, SECOND_SIGNAL, run.read_step(), exit_code=130, by=BY_AGENT))
        raise
    if attempt is not None:
        _report_good_end(run, attempt)
    return _read_outcome(run, failures)


def _read_outcome(run: RunDir, failures: list[RepeatedFailure]) -> dict[str, Any]:
    status = run.read_status()
    return {
        "directory": str(run.path),
        "state": status.get("state", ""),
        "reason": status.get("reason", ""),
        "step": status.get("step", 0),
        "restarts": len(failures),
    }


def _report_good_end(run: RunDir, attempt: Attempt) -> None:
    """Report the end of ranks that do not start again, from the last event of rank 0."""
    last = next((event for event in reversed(run.last_events(0)) if event["event"] in ("stopped", "finished")), None)
    if last is not None and (ending := last.get("ending")) in set(Ending):
        failure = str(last.get("failure", ""))
        report_end(attempt, Result(Ending(ending), str(last["reason"]), run.read_step(), 0, failure, by="rank 0"))


def _end_early(run: RunDir, attempt: Attempt | None, report: Report) -> None:
    """Record a stop that no rank could obey: none existed yet, or they did not handle signals yet."""
    run.create()
    end = find_end(Decision(ASKED), run.stop_reason() if run.stop_requested() else None)
    run.clear_stop()
    _mark_ended(run, "stopped", end.reason, report, where_missing=True)
    if attempt is not None:
        report_end(attempt, Result(end.state, end.reason, run.read_step(), failure=end.failure, by=BY_AGENT))


def _why_refused(run: RunDir) -> str:
    """Why ranks cannot write into the run directory, so that they would only fail again; empty if they can."""
    why = why_refused(run.path)
    return f"nothing can be written into {run.path} now ({why})" if why else ""


def _run_once(run: RunDir, launch: LocalLaunch, patience: HangTimeout | None, crew: NodeGroup) -> Blame | None:
    """Run the ranks to their end; the cause if the start ended badly, else None."""
    marks = {rank: sum(1 for _ in run.all_events(rank)) for rank in range(crew.ranks)}
    run.clear_setup_faults()
    try:
        ended, error = crew.start(run, launch, patience), None
    except (UserError, SiteError) as refusal:
        return Blame(refusal)
    except LateStop as late:
        ended, error = LaunchOutcome(), late
    if ended.called_off:
        _end_early(run, find_attempt(os.environ), crew.report)
        return None
    if ended.is_well and error is None:
        return None
    _await_answer(run, crew.report)
    if has_come_to_its_end(run, marks[0], ended):
        crew.report(f"{name_trouble(ended)} after the run had come to its end; nothing of it is lost")
        return None
    if error is not None:
        return Blame(error)
    ends_early = bool(ended.failures) and ended.failures[0].signal_name in _STOPS and run.stop_requested()
    if ends_early and run.find_writer() is None:
        _end_early(run, find_attempt(os.environ), crew.report)
        return None
    return find_blame(run, ended, marks)


def _await_answer(run: RunDir, report: Report) -> None:
    """Wait while the file system of failed ranks is unreachable, which may be the cause. Ends when it answers, after
    `AWAY_S`, or when a signal asks for a stop; then the ranks' records are read and they restart."""
    if answers(run.path):
        return
    report(f"the file system of {run.path} is away; waiting {render_seconds(AWAY_S)} for it")
    until = time.monotonic() + AWAY_S
    while not answers(run.path) and time.monotonic() < until and find_stop_signal() is None:
        time.sleep(LOOK_EVERY_S)


def report_wakes(report: Report) -> Callable[[Hang], None]:
    """What reports that stopped ranks were continued."""
    return lambda hang: report(f"{hang.message}, and was told to go on")


def _describe(resolution: Resolution, error: ShardwayError) -> RepeatedFailure:
    run, base = resolution.directory, read_line(resolution.directory.path).last
    shared = max(run.checkpoint_steps(), default=0)
    saved = max((shared, *_list_local_steps(resolution)))
    hopeless = isinstance(error, UserError | SiteError | Fenced)
    from_nodes = base is not None and saved > shared and (base.tier, base.from_step) == (LOCAL, saved)
    return RepeatedFailure(sign_failure(describe_error(error)), saved, hopeless, from_nodes)


def _list_local_steps(resolution: Resolution) -> list[int]:
    """Steps that were saved on this node's disk, if the run saves there."""
    section, run_id = resolution.resolved.values.checkpoint, find_run_id(resolution.directory.path)
    if section.local_every == "off" or not run_id:
        return []
    with contextlib.suppress(UserError):  # reported by the ranks
        return find_local_run(section.local_dir, run_id).steps()
    return []


def _give_up(
    run: RunDir,
    attempt: Attempt | None,
    blame: Blame,
    failures: list[RepeatedFailure],
    verdict: RestartDecision,
    report: Report,
    *,
    began: bool,
) -> NoReturn:
    error = blame.error
    if len(failures) > 1 or verdict.reason:
        times = "once" if len(failures) == 1 else f"{len(failures)} times"
        again = f"; it is not started again: {verdict.reason}" if verdict.reason else ""
        error = type(error)(f"{error}\n  The ranks were started {times}{again}.")
    if run.find_writer() is None:  # else another run writes there
        if attempt is None:
            run.clear_stop()  # no rank is left to obey it, and the next start must not; a job script reads it first
        if began:
            _mark_ended(run, "failed", render_reason(str(error)), report)
    fault = describe_error(error, out_of_memory=blame.out_of_memory)
    report_fault(attempt, blame.by, fault, run.read_step(), wait_s=0.0)
    raise error


def report_restart(run: RunDir, error: ShardwayError, failures: int, saved_step: int | None = None) -> None:
    """Write into the events of rank 0, which has ended, that the ranks start again.

    `saved_step`: the newest checkpoint, if it may be elsewhere than in the run directory.
    """
    saved = max(run.checkpoint_steps(), default=0) if saved_step is None else saved_step
    with contextlib.suppress(OSError, JobError), run.event_writer(0) as events:
        reason = render_reason(str(error))
        events.write("restarted", step=saved, reason=reason, failures=failures, agent=os.getpid())


def pack_request(request: ResolveRequest) -> str:
    """A request as one word of a command line."""
    return json.dumps(asdict(request), default=str)


def ask_to_stop(run: RunDir, report: Report) -> None:
    """Ask the ranks by the stop file, and report it. Raises UserError if the file cannot be written."""
    report("stopping after this step and saving; once more to end at once")
    if not run.stop_requested():  # a job script that was warned has written the reason
        run.request_stop(f"{BY_SIGNAL} asked for a stop")


def _mark_ended(run: RunDir, state: str, reason: str, report: Report, *, where_missing: bool = False) -> None:
    """Record the end in place of a rank 0 that was killed, or that lost contact and could not see the reason."""
    status = run.read_status()
    if status.get("state") in ("running", "failed") or (where_missing and not status):
        try:
            run.change_state(status, state, reason)
        except OSError as error:  # the reason itself is reported in any case
            report(f"{run.path} could not be told how the run ended: {error.strerror}")
