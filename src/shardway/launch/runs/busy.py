"""Whether a run is free for another start: no job of it waits or runs, and nobody trains it by hand.

Invariant: a refusal names who is at it, and a scheduler that does not answer keeps nobody from training by hand: the
lease of the run directory stays the last word. This module must not change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardway.errors import UserError
from shardway.launch.hosts.base import Host
from shardway.launch.runs.job_status import JobStatus, describe_active, read_standing
from shardway.launch.runs.ledger import Ledger, read_ledger


def check_free_for_job(host: Host, ledger: Ledger, tell: Callable[[str], None]) -> None:
    """Raise UserError where a job of this run waits or runs, or may do so for all that is known, or where somebody
    trains it by hand, as far as its directory is seen from this machine.

    `tell` is told where a holder has to be watched: one that was killed on another host looks alive for a while.
    """
    run = ledger.run
    if active := describe_active(read_standing(host, ledger)):
        raise _refuse_for_jobs(run.path, active)
    writer = None if host.name else run.find_writer(by_hand=True)
    if writer is None:
        return
    try:
        run.writer_lock().await_free(tell)
    except UserError as error:
        raise UserError(
            f"{run.path} is trained by hand now, by {writer}.\n"
            "  A job would find it taken when it starts. To do: let it come to its end, or end it first with "
            f"`shardway stop {run.path} --wait 600`."
        ) from error


def check_free_for_hand(host: Host, run: Path, tell: Callable[[str], None]) -> None:
    """Raise UserError where a job of this run waits or runs; `tell` is told of jobs of which nobody knows."""
    active = [standing for standing in read_standing(host, read_ledger(host, run)) if standing.is_active]
    known = [standing for standing in active if not _is_unknown(standing)]
    if known:
        raise _refuse_for_jobs(run, describe_active(known))
    if active:
        tell(f"whether {_list_jobs(active)} of {run} still waits or runs is not known here; it is trained all the same")


def _is_unknown(standing: JobStatus) -> bool:
    return standing.word == "unknown"


def _list_jobs(standings: Sequence[JobStatus]) -> str:
    return ", ".join(f"job {standing.entry.job}" for standing in standings)


def _refuse_for_jobs(run: Path, active: str) -> UserError:
    return UserError(
        f"{run} has {active}.\n"
        "  Two at one run would be in each other's way. To do: let it go on (`shardway status` shows it), or end it "
        f"first with `shardway stop {run}`."
    )
