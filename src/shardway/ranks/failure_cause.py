"""The cause of a start that ended badly: the rank or node, and its error.

Invariant: the error is that of the rank that failed first by itself, not of one that lost contact with it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardway.errors import ERRORS_BY_NAME, Fenced, JobError, LostContact, NodeLost, ShardwayError, SiteError, UserError
from shardway.ranks.completion import LaunchOutcome, has_begun
from shardway.ranks.failure import RankFailure, explain_oom
from shardway.ranks.flight_records import explain_collectives, render_ranks
from shardway.ranks.hang import DetectedHang
from shardway.ranks.stacks import StackGroup, read_crash
from shardway.refusals import find_remedy
from shardway.rundir.attempts import BY_AGENT
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.rundir.file_io import why_refused
from shardway.rundir.lease import TAKEN_OVER


@dataclass(frozen=True)
class Blame:
    """The cause of a failure: an error, its reporter, and whether memory ran out."""

    error: ShardwayError
    by: str = BY_AGENT
    out_of_memory: bool = False


def find_blame(run: RunDir, ended: LaunchOutcome, marks: Mapping[int, int]) -> Blame:
    """The cause of a start that ended badly; events of a rank before its mark are of earlier starts."""
    if ended.lost:
        return Blame(_explain_lost(run, ended.lost))
    if (writer := run.find_writer()) is not None:
        return Blame(_explain_taken(run, ended.failures, writer))
    if ended.found is not None:
        return Blame(_explain_hang(run, ended.found, began=has_begun(run, marks)))
    return _explain(run, ended.failures, marks)


def _explain_lost(run: RunDir, lost: tuple[str, ...]) -> NodeLost:
    names, they = " and ".join(lost), "does" if len(lost) == 1 else "do"
    return NodeLost(
        f"{names} {they} not answer any more; the ranks of the other nodes were ended.\n"
        f"  To do: run the same command again: it goes on from {run.describe_base()}. If nodes are lost often, "
        "run.elastic lets a run go on with fewer."
    )


def _explain(run: RunDir, failures: tuple[RankFailure, ...], marks: Mapping[int, int]) -> Blame:
    """The error of the rank that caused the failure.

    That is the first rank if it was killed; else one with an error other than lost contact; else one that was killed. A
    rank may lose contact before the agent detects the dead one, and the agent ends the others by signals.
    """
    for_memory = next((failure for failure in failures if failure.for_memory), None)
    if for_memory is not None:
        return Blame(explain_oom(for_memory, run.describe_base()), out_of_memory=True)
    if failures[0].signal_name:
        return Blame(_killed(run, failures[0]))
    faults = {rank: fault for rank, mark in marks.items() if (fault := _last_fault(run, rank, mark)) is not None}
    own = {rank: fault for rank, fault in faults.items() if fault["kind"] != LostContact.__name__}
    killed = [failure for failure in failures if failure.signal_name and not failure.by_agent]
    if killed and not own:
        return Blame(_killed(run, killed[0]))
    for rank, fault in (own or faults).items():
        kind = ERRORS_BY_NAME.get(fault["kind"], JobError)
        agreed = len({fault["message"] for fault in faults.values()}) == 1
        prefix = "" if agreed else f"rank {rank}: "
        printed = next((failure.printed for failure in failures if failure.rank == rank), ())
        error = kind(f"{prefix}{fault['message']}{_where_output(printed) if kind.__name__ == 'Bug' else ''}")
        return Blame(error, f"rank {rank}", fault.get("out_of_memory") is True)
    return Blame(_unexplained(run, failures[0]))


def _explain_taken(run: RunDir, failures: tuple[RankFailure, ...], writer: str) -> ShardwayError:
    """All ranks of this start have ended and another run writes here; nothing is written into its record."""
    words = {failure: text for failure in failures if (text := _last_words(failure))}
    for failure, text in words.items():
        if failure.exit_code == UserError.exit_code:  # the other run was there before the ranks could begin
            return UserError(text)
    told = sorted(words.values(), key=lambda text: not text.startswith(TAKEN_OVER))
    return Fenced(
        told[0]
        if told
        else f"another run trains into {run.path}: {writer}. This one has ended and writes nothing more.\n"
        "  To do: nothing, if the other one is meant to go on; else stop that one, then run the same command again."
    )


def _explain_hang(run: RunDir, found: DetectedHang, *, began: bool) -> JobError:
    """What the agent detected, with the stacks of the ranks; written as a fault of the first of them if the run had
    begun."""
    hang, groups = found.hang, found.seen.groups
    told = explain_collectives(found.seen.collectives)
    message = f"{hang.message}: {told[0]}" if told else hang.message
    facts = {
        "rank": hang.ranks[0],
        "kind": "Hang",
        "exit_code": 4,
        "message": message,
        "stacks": [{"ranks": group.ranks, "frames": group.frames} for group in groups],
        "collectives": told,
    }
    if began:
        with contextlib.suppress(OSError, JobError), run.event_writer(hang.ranks[0]) as events:
            events.write("fault", **facts)
    further = "".join(
        f"\n  {each}" for each in (*told[1:], *(f"{render_ranks(one.ranks)}: {_place(one)}" for one in groups))
    )
    return JobError(
        f"{message}; all ranks were ended.{further}\n"
        "  To do: run the same command again: it goes on from the last checkpoint. If it was no hang, raise "
        "run.hang_timeout."
    )


def _place(group: StackGroup) -> str:
    """The innermost frames of a group of ranks, in one line."""
    return _line(group.frames) or "n/a"


def _line(frames: tuple[str, ...]) -> str:
    return " < ".join(frames[:3])


def _killed(run: RunDir, failure: RankFailure) -> JobError:
    if failure.crashed:
        return _crashed(run, failure)
    return JobError(
        f"rank {failure.rank} (process {failure.pid}) was ended by {failure.signal_name}; the other ranks were ended "
        f"with it.\n  To do: run the same command again: it goes on from {run.describe_base()}. If nobody sent "
        "that signal, the machine may have run out of memory (dmesg says so)."
    )


def _crashed(run: RunDir, failure: RankFailure) -> JobError:
    """A crash in native code, which cannot raise an error; with the Python frame that called it if it is known."""
    frames = _line(read_crash(failure.read_printed()))
    return JobError(
        f"rank {failure.rank} (process {failure.pid}) crashed in native code ({failure.signal_name})"
        f"{f', called from {frames}' if frames else ''}; the other ranks were ended with it.\n"
        f"  To do: run the same command again: it goes on from {run.describe_base()}. If it happens again, the library "
        f"that was called has a defect, or does not fit this machine.{_where_output(failure.printed)}"
    )


def _unexplained(run: RunDir, failure: RankFailure) -> ShardwayError:
    kinds: dict[int, type[ShardwayError]] = {kind.exit_code: kind for kind in (UserError, SiteError, JobError)}
    kind, words = kinds.get(failure.exit_code), _last_words(failure)
    if kind is not None and words:
        return kind(words)
    what = f"rank {failure.rank} ended with exit code {failure.exit_code}."
    if why := why_refused(run.path):
        return JobError(
            f"{what} It could not say why: nothing can be written into {run.path} ({why}).\n"
            f"  To do: {find_remedy(why)}; then run the same command again: it goes on from {run.describe_base()}."
        )
    return (kind or JobError)(f"{what}{_where_output(failure.printed)}")


def _last_words(failure: RankFailure) -> str:
    """The error that a rank printed last, if it had no events to write it into; empty for none."""
    _, *told = re.split(r"^shardway: ", failure.read_printed(), flags=re.MULTILINE)
    return told[-1].strip() if told else ""


def _where_output(printed: Sequence[Path]) -> str:
    return f"\n  What it printed is in {printed[-1]}" if printed else ""


def _last_fault(run: RunDir, rank: int, mark: int) -> Event | None:
    """The fault that a rank recorded in this start (events before `mark` are older), or reported before the run went
    on."""
    events = list(run.all_events(rank))[mark:]
    return next((event for event in reversed(events) if event["event"] == "fault"), None) or run.read_setup_fault(rank)
