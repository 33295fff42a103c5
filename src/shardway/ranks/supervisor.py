"""Starts the ranks of a run, again after a failure, and records how the run ended (decision 0032).

Invariant: however the ranks end, the run directory records it, and so does their job, if there is one. Nothing is
trained or printed here: lines for a person go to the `report` of the node group.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from shardway.errors import Fenced, JobError, LateStop, ShardwayError, SiteError, UserError, render_reason
from shardway.ranks.evidence import NO_EVIDENCE
from shardway.ranks.failure import (
    LaunchOutcome,
    RepeatedFailure,
    RootCause,
    count_events,
    decide,
    describe_error,
    find_attempt,
    find_end,
    find_root_cause,
    has_begun,
    has_come_to_its_end,
    report_end,
    report_fault,
    sign_failure,
)
from shardway.ranks.hang import Hang, HangTimeout, HeartbeatWatch, read_hang_timeout, watched
from shardway.ranks.heartbeat import CPU_MASKS
from shardway.ranks.local import AUTO_AFTER_S, LocalLaunch, WarmStandby, run_local
from shardway.ranks.stop import STOP_SIGNALS, Decision, find_stop_signal
from shardway.resolve.request import Resolution, ResolveRequest
from shardway.rundir.attempts import BY_AGENT, BY_SIGNAL, SECOND_SIGNAL, Attempt, Ending, Result
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import answers, list_missing, why_refused
from shardway.rundir.names import LOCAL, find_local_run, find_run_id, read_line
from shardway.rundir.notify import notify
from shardway.runfile.schema import RunSection
from shardway.telemetry.start import SampledRun, sampled
from shardway.units import render_seconds

Report = Callable[[str], None]  # takes a line for the person that started the ranks
AWAY_S, LOOK_EVERY_S = 600.0, 1.0
"""How long a start of the ranks waits for an unreachable file system: its failover takes minutes."""

_STOPS = tuple(number.name for number in STOP_SIGNALS)
"""Signals that end a rank before it handles them; later it obeys them."""


# --- the ranks of this node


def open_standby(settings: RunSection) -> WarmStandby:
    """The warm standbys that a run file requests; none if ranks do not restart."""
    if settings.spares == "off" or settings.max_restarts == 0:
        return WarmStandby(None)
    if settings.spares == "auto":
        return WarmStandby(AUTO_AFTER_S)
    return WarmStandby(float(settings.spares), bounded=False)


def build_launch(resolution: Resolution, ranks: int) -> LocalLaunch:
    """What `ranks` ranks of this machine run, and where their output goes. Their request is not `fresh`: the agent has
    already moved an earlier run aside, and the ranks' output must stay. Threads are explicit, since a rank that is
    bound to its own cores cannot derive that it need not share them."""
    run, settings = resolution.directory, resolution.resolved.values.run
    request, threads = resolution.request, int(settings.threads)
    further = (f"run.threads={threads}",) if CPU_MASKS in os.environ else ()
    return LocalLaunch(
        ranks=ranks,
        module="shardway.cli.rank",
        arguments=[pack_request(replace(request, fresh=False, overrides=(*request.overrides, *further)))],
        log_folder=run.log_folder,
        threads=threads,
        stop_path=run.stop_path,
        stop_timeout_s=settings.stop_timeout,
        telemetry_s=None if settings.telemetry == "off" else settings.telemetry,
    )


def pack_request(request: ResolveRequest) -> str:
    """A request as one word of a command line."""
    return json.dumps(asdict(request), default=str)


def run_on_node(
    run: RunDir,
    launch: LocalLaunch,
    hang_timeout: HangTimeout | None,
    standby: WarmStandby,
    report: Report,
    exchange: Callable[[HeartbeatWatch, bool], bool] = lambda watch, failed: False,
    share_s: float = 0.0,
) -> LaunchOutcome:
    """Run the ranks of this node to their end; what is reported and returned names them by global numbers. Raises
    LateStop, KeyboardInterrupt. `exchange` is called repeatedly with the watch and whether a rank has failed, and
    returns whether the ranks must end because of another node. `share_s` is that of the watch."""
    place = launch.assignment
    first, world = (0, launch.ranks) if place is None else (place.first, place.world)

    def globally(hang: Hang) -> Hang:
        return replace(hang.shift(first), all_alike=hang.all_alike and launch.ranks == world)

    def report_resumed(hang: Hang) -> None:
        report(f"{globally(hang).message}, and was resumed")

    is_watched = watched(launch.ranks, hang_timeout, report_resumed, share_s)
    with is_watched as watch, sampled(_describe_sampled(run, launch, watch)):

        def look(failed: bool) -> bool:
            is_over = exchange(watch, failed)
            standby.look(watch.slowest, ends=failed or is_over)
            return is_over

        launch = replace(launch, heartbeats=watch.folder)
        failures = run_local(launch, lambda: ask_to_stop(run, report), look, standby.start)
    # Only now: until its thread has ended, the watch may still gather evidence.
    found, evidence = watch.found, watch.seen or NO_EVIDENCE
    return LaunchOutcome(tuple(failures), globally(found) if found is not None else None, evidence.shift(first))


def _describe_sampled(run: RunDir, launch: LocalLaunch, watch: HeartbeatWatch) -> SampledRun | None:
    """How this node and its ranks are sampled while they run; None if they are not."""
    if launch.telemetry_s is None:
        return None
    attempt, place = find_attempt(os.environ), launch.assignment
    return SampledRun.of_attempt(
        attempt.path if attempt is not None else None,
        run.telemetry_folder,
        launch.telemetry_s,
        os.getpid(),
        os.environ,
        node=place.node if place is not None else 0,
        events=run.events_path(0),
        heartbeats=watch.folder,
        first=place.first if place is not None else 0,
        ranks=launch.ranks,
    )


def ask_to_stop(run: RunDir, report: Report) -> None:
    """Ask the ranks by the stop file, and report it. Raises UserError if the file cannot be written."""
    report("stopping after this step and saving; once more to end at once")
    if not run.stop_requested():  # a job script that was warned has written the reason
        run.request_stop(f"{BY_SIGNAL} asked for a stop")


@dataclass(frozen=True)
class NodeGroup:
    """Starts the ranks, all on this machine; `ranks.nodes.MultiNode` those of several. `ranks`: the largest number."""

    ranks: int
    standby: WarmStandby
    report: Report

    def start(self, run: RunDir, launch: LocalLaunch, hang_timeout: HangTimeout | None) -> LaunchOutcome:
        """Run the ranks to their end. Raises LateStop, KeyboardInterrupt, and the error that keeps them from
        starting."""
        return run_on_node(run, launch, hang_timeout, self.standby, self.report)

    def why_not_again(self) -> str:
        """Why the ranks cannot start once more; empty if they can."""
        return ""


# --- starts, until the ranks end well or must not start again


def train_local(resolution: Resolution, launch: LocalLaunch, group: NodeGroup) -> dict[str, Any]:
    """Train on the ranks of a node group, again after a failure if `ranks.failure` allows it. Raises the error of the
    rank that failed first in the last start."""
    run, attempt = resolution.directory, find_attempt(os.environ)
    settings, failures = resolution.resolved.values.run, list[RepeatedFailure]()
    hang_timeout = read_hang_timeout(settings)
    most = None if settings.max_restarts == "auto" else int(settings.max_restarts)
    with _restored_if_refused(run, fresh=resolution.request.fresh) as mark:
        try:
            while (
                find_stop_signal() is None and (cause := _run_once(resolution, launch, hang_timeout, group)) is not None
            ):
                failures.append(_describe_failure(resolution, cause.error))
                began, decision = has_begun(run, mark), decide(failures, most)
                why_not = _why_not_again(run, group) if decision.restart else decision.reason
                is_last = not decision.restart or bool(why_not)
                if is_last or run.stop_requested() or isinstance(cause.error, LateStop):
                    if began:
                        notify_owner(resolution, "failure", str(cause.error), group.report)
                    _give_up(run, cause, len(failures), why_not, attempt, began=began, report=group.report)
                if began:
                    report_restart(run, cause.error, len(failures), failures[-1].saved_step)
                else:
                    group.report(f"the ranks start again: {render_reason(str(cause.error))}")
            if find_stop_signal() is not None:
                _end_early(run, group.report)
        except KeyboardInterrupt:
            run.clear_stop()  # no rank is left to obey it, and the next start must not
            if has_begun(run, mark):
                _mark_ended(run, "stopped", SECOND_SIGNAL, group.report)
            if attempt is not None:
                result = Result(Ending.STOPPED, SECOND_SIGNAL, run.read_step(), exit_code=130, by=BY_AGENT)
                report_end(attempt, result)
            raise
        if attempt is not None:  # the end of ranks that do not start again, from the last event of rank 0
            ends = [event for event in run.last_events(0) if event["event"] in ("stopped", "finished")]
            if ends and (ending := ends[-1].get("ending")) in set(Ending):
                reason, failure = str(ends[-1]["reason"]), str(ends[-1].get("failure", ""))
                report_end(attempt, Result(Ending(ending), reason, run.read_step(), 0, failure, by="rank 0"))
        status = run.read_status()
        return {
            "directory": str(run.path),
            "state": status.get("state", ""),
            "reason": status.get("reason", ""),
            "step": status.get("step", 0),
            "restarts": len(failures),
        }


def _why_not_again(run: RunDir, group: NodeGroup) -> str:
    """Why the ranks would only fail again; empty if they may start once more."""
    why_not = group.why_not_again()
    if not why_not and (refusal := why_refused(run.path)):
        why_not = f"nothing can be written into {run.path} now ({refusal})"
    return why_not


def _give_up(
    run: RunDir,
    cause: RootCause,
    starts: int,
    why_not: str,
    attempt: Attempt | None,
    *,
    began: bool,
    report: Report,
) -> NoReturn:
    """Record that the ranks do not start again, and raise the error of the last start."""
    error = cause.error
    if starts > 1 or why_not:
        times = "once" if starts == 1 else f"{starts} times"
        again = f"; it is not started again: {why_not}" if why_not else ""
        error = type(error)(f"{error}\n  The ranks were started {times}{again}.")
    if run.find_writer() is None:  # else another run writes there
        if attempt is None:  # no rank is left to obey it; a job script reads it first
            run.clear_stop()
        if began:
            _mark_ended(run, "failed", render_reason(str(error)), report)
    fault = describe_error(error, out_of_memory=cause.out_of_memory)
    report_fault(attempt, cause.by, fault, run.read_step(), wait_s=0.0)
    raise error


@contextlib.contextmanager
def _restored_if_refused(run: RunDir, *, fresh: bool) -> Iterator[int]:
    """Make the run directory, with an earlier run moved aside for a `fresh` one; yields the mark of rank 0 (see
    `has_begun`). If the ranks are refused before the run goes on, the directory is restored; their output is in the
    error."""
    aside = run.set_aside() if fresh else None
    made = list_missing(run.path)
    mark = count_events(run)
    run.create(empty=True)
    logs = run.list_log_folders()

    def restore() -> None:
        if has_begun(run, mark) or run.find_writer() is not None:
            return
        run.remove_log_folders(run.list_log_folders() - logs)
        for folder in made:
            with contextlib.suppress(OSError):  # another process has put something there meanwhile
                folder.rmdir()
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.rename(run.path.resolve())

    try:
        yield mark
        restore()  # a finished run has nothing to do
    except (UserError, SiteError):
        restore()
        raise
    finally:
        run.clear_setup_faults()


def notify_owner(resolution: Resolution, kind: str, reason: str, report: Report) -> None:
    """Send an event of the run to its owner, as [notify] asks for."""
    for failure in notify(resolution.directory, resolution.resolved.values.notify, kind, "failed", reason):
        report(failure)


def _run_once(
    resolution: Resolution, launch: LocalLaunch, hang_timeout: HangTimeout | None, group: NodeGroup
) -> RootCause | None:
    run = resolution.directory
    marks = {rank: count_events(run, rank) for rank in range(group.ranks)}
    run.clear_setup_faults()
    late: LateStop | None = None
    try:
        outcome = group.start(run, launch, hang_timeout)
    except (UserError, SiteError) as refusal:
        return RootCause(refusal)
    except LateStop as error:
        outcome, late = LaunchOutcome(), error
    if outcome.called_off:
        _end_early(run, group.report)
        return None
    if outcome.hang is not None:
        notify_owner(resolution, "no_progress", outcome.hang.message, group.report)
    if outcome.is_well and late is None:
        return None
    if not answers(run.path):  # which may be the cause; once it answers, the ranks' records are read and they restart
        group.report(f"the file system of {run.path} is away; waiting {render_seconds(AWAY_S)} for it")
        until = time.monotonic() + AWAY_S
        while not answers(run.path) and time.monotonic() < until and find_stop_signal() is None:
            time.sleep(LOOK_EVERY_S)
    if has_come_to_its_end(run, marks[0], outcome):
        group.report(f"{outcome.describe()} after the run had come to its end; nothing of it is lost")
        return None
    if late is not None:
        return RootCause(late)
    ends_early = bool(outcome.failures) and outcome.failures[0].signal_name in _STOPS and run.stop_requested()
    if ends_early and run.find_writer() is None:
        _end_early(run, group.report)
        return None
    return find_root_cause(run, outcome, marks)


def _describe_failure(resolution: Resolution, error: ShardwayError) -> RepeatedFailure:
    """The failure with the newest step that was saved, in the run directory or on this node's disk."""
    run, base = resolution.directory, read_line(resolution.directory.path).last
    section, run_id = resolution.resolved.values.checkpoint, find_run_id(run.path)
    saved = shared = max(run.checkpoint_steps(), default=0)
    if section.local_every != "off" and run_id:
        with contextlib.suppress(UserError):  # reported by the ranks
            saved = max((shared, *find_local_run(section.local_dir, run_id).steps()))
    from_nodes = base is not None and saved > shared and (base.tier, base.from_step) == (LOCAL, saved)
    hopeless = isinstance(error, UserError | SiteError | Fenced)
    return RepeatedFailure(sign_failure(describe_error(error)), saved, hopeless, from_nodes)


def report_restart(run: RunDir, error: ShardwayError, failures: int, saved_step: int | None = None) -> None:
    """Write into the events of rank 0, which has ended, that the ranks start again. `saved_step`: the newest
    checkpoint, if it may be elsewhere than in the run directory."""
    saved = max(run.checkpoint_steps(), default=0) if saved_step is None else saved_step
    with contextlib.suppress(OSError, JobError), run.event_writer(0) as events:
        reason = render_reason(str(error))
        events.write("restarted", step=saved, reason=reason, failures=failures, agent=os.getpid())


# --- how the run ended, in its status and in its attempt


def _end_early(run: RunDir, report: Report) -> None:
    """Record a stop that no rank could obey: none existed yet, or they did not handle signals yet."""
    run.create()
    end = find_end(Decision("a signal asked for a stop"), run.stop_reason() if run.stop_requested() else None)
    run.clear_stop()
    _mark_ended(run, "stopped", end.reason, report, where_missing=True)
    if (attempt := find_attempt(os.environ)) is not None:
        report_end(attempt, Result(end.state, end.reason, run.read_step(), failure=end.failure, by=BY_AGENT))


def _mark_ended(run: RunDir, state: str, reason: str, report: Report, *, where_missing: bool = False) -> None:
    """Record the end in place of a rank 0 that was killed, or that lost contact and could not see the reason."""
    status = run.read_status()
    if status.get("state") in ("running", "failed") or (where_missing and not status):
        try:
            run.change_state(status, state, reason)
        except OSError as error:  # the reason itself is reported in any case
            report(f"{run.path} does not record how the run ended: {error.strerror}")
