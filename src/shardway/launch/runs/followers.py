"""What follows a run: runs that are prepared and get a job when that one is finished.

    runs/my/followers/NAME   the attempt that follows, a file each, appears whole
    FOLLOWER/attempts/0001/handover   a folder: the claim of what hands it to the scheduler

Invariants:
- A follower is handed over once: by the job that finishes the run (`submit_followers` in launch/shell/lib.sh), or by
  the command that adds or repairs it, whichever makes the folder `handover` first.
- A job writes its result before it reads the list, and a command reads the result after it has written the list, so
  that one of the two sees the other.
- Nothing waits for itself, directly or through others.

Where jobs may not submit jobs, a follower has a job at once, which waits for the last job of the run, however that
ends: the last link of a chain is cancelled where an earlier one has finished the work, so that success of a job means
nothing. The follower's script looks at the run when it starts (`check_followed`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shardway.errors import UserError
from shardway.launch.hosts.base import Host
from shardway.launch.job import Job
from shardway.launch.runs.job_status import JobStatus, Ledger, read_ledger, read_ledgers, read_standing, read_standings
from shardway.rundir.attempts import Attempt, Ending
from shardway.rundir.directory import RunDir

HANDOVER_S = 120.0
"""A claim of a handover that is older, without a job, is one whose claimant was killed."""


def is_finished(ledger: Ledger) -> bool:
    """Whether the work of a run is done, by its newest attempt that had any; `state_of_run` of lib.sh is the same."""
    for entry in reversed(ledger.entries):
        if entry.result is None or not entry.result.ran_nothing:
            return entry.result is not None and entry.result.state is Ending.FINISHED
    return ledger.status.get("state") == "finished"


# --- the list


def list_follower(host: Host, run: Path, attempt: Attempt, token: str) -> None:
    """Add an attempt to what follows a run. Raises UserError where the file system refuses."""
    text = json.dumps({"format": 1, "attempt": str(attempt.path)}, indent=1, ensure_ascii=False) + "\n"
    host.write_files({_entry_path(run, attempt, token): text})


def unlist_follower(host: Host, run: Path, attempt: Attempt, token: str) -> None:
    """Take an attempt out of what follows a run; the folder goes with the last one."""
    entry = _entry_path(run, attempt, token)
    host.run_many([("rm", "-f", str(entry)), ("rmdir", str(entry.parent))])


def _entry_path(run: Path, attempt: Attempt, token: str) -> PurePosixPath:
    """Followers of one name differ in their token, however their paths are written."""
    return PurePosixPath(RunDir(run).followers_folder / f"{attempt.path.parents[1].name}-{attempt.path.name}-{token}")


@dataclass(frozen=True)
class Follower:
    """A run that follows another one, and its attempt there; `status` is None where that is gone."""

    attempt: Attempt
    status: JobStatus | None

    @property
    def run(self) -> Path:
        return self.attempt.run_path

    @property
    def waits(self) -> bool:
        """Whether it has no job yet."""
        return self.status is not None and self.status.word == "waits"

    def render(self) -> str:
        """The run, its state and its job."""
        status = self.status
        job = f" as job {status.entry.job}" if status is not None and status.entry.job else ""
        return f"{self.run}  {status.word if status is not None else 'gone'}{job}"

    def as_json(self) -> dict[str, Any]:
        status = self.status
        state, job = (status.word, status.entry.job) if status is not None else ("gone", "")
        return {"run": str(self.run), "attempt": self.attempt.number, "state": state, "job": job}


def read_followers(host: Host, run: Path) -> list[Follower]:
    """What follows a run, in the order of names, as it stands now; a damaged file is passed over."""
    folder = RunDir(run).followers_folder
    names = sorted(host.run(("ls", "-1", str(folder))).out.split("\n"))
    texts = host.read_files([PurePosixPath(folder / name) for name in names if name])
    attempts = [attempt for text in texts.values() for attempt in _parse_entry(text)]
    runs = list(dict.fromkeys(attempt.run_path for attempt in attempts))
    ledgers = read_ledgers(host, runs) if runs else []
    rows = dict(zip(runs, read_standings(host, ledgers), strict=True)) if runs else {}
    return [
        Follower(attempt, next((each for each in rows[attempt.run_path] if each.entry.attempt == attempt), None))
        for attempt in attempts
    ]


def _parse_entry(text: str) -> Iterator[Attempt]:
    try:
        path = Path(json.loads(text)["attempt"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    if path.name.isdecimal() and path.is_absolute():
        yield Attempt(path)


# --- a new follower's place


@dataclass(frozen=True)
class PlaceInRow:
    """How a run gets its job: from the end of another run (`is_listed`), else at once, perhaps to start after the job
    `after`."""

    is_listed: bool = False
    after: str = ""


def find_place(host: Host, job: Job) -> PlaceInRow:
    """How a follower gets its job. Raises UserError where the run that it follows cannot hand it over."""
    run = job.follows or job.run
    _check_no_cycle(host, job.run, run)
    ledger = read_ledger(host, run)
    if not ledger.entries and not ledger.status:
        where = f" on {host.name}" if host.name else ""
        raise UserError(f"there is no run {run}{where} to follow.\n  To do: submit that one first, or name another.")
    if is_finished(ledger):
        return PlaceInRow()
    last = ledger.last
    if last is None:
        raise UserError(
            f"{run} was trained by hand and is not finished, so no job of it could submit what follows.\n"
            f"  To do: `shardway resume {shlex.quote(str(run))}` makes it a job; or submit this one when it is "
            "finished."
        )
    if last.submission is not None and last.submission.scheduler != job.scheduler:
        raise UserError(
            f"{run} is a run of {last.submission.scheduler}, whose jobs cannot submit one of {job.scheduler}.\n"
            "  To do: choose the same site (--on) for both, or submit this one when that is finished."
        )
    active = [standing for standing in read_standing(host, ledger) if standing.is_active]
    if job.chain.ahead:
        if not active:
            raise UserError(
                f"jobs of {job.site} may not submit jobs, and {run} has none that waits or runs.\n"
                f"  To do: `shardway resume {shlex.quote(str(run))}` first, then submit this one behind it."
            )
        return PlaceInRow(after=active[-1].entry.job)
    library = PurePosixPath(last.attempt.job_library)
    text = host.read_files([library]).get(library, "")
    if active and text and "submit_followers" not in text:
        raise UserError(
            f"the jobs of {run} were submitted by an earlier Shardway, and submit nothing when it is finished.\n"
            "  To do: submit this one when it is finished."
        )
    return PlaceInRow(is_listed=True)


def _check_no_cycle(host: Host, own: Path, run: Path) -> None:
    row = [own]
    while True:
        if run in row:
            ring = " -> ".join(map(str, (*row, run)))
            what = "itself" if len(row) == 1 else f"a run that waits for it ({ring})"
            raise UserError(f"{own} would follow {what}, and never start.\n  To do: name another run with --after.")
        row.append(run)
        last = read_ledger(host, run).last
        if last is None or not last.is_unsent or last.submission is None or not last.submission.follows:
            return
        run = Path(last.submission.follows)


# --- one that waits


def find_followed(ledger: Ledger) -> Path | None:
    """The run that the newest attempt waits for, without a job; None where it does not."""
    last = ledger.last
    waits = last is not None and last.is_unsent and last.submission is not None and last.submission.follows
    return Path(waits) if waits else None


def explain_waiting(host: Host, ledger: Ledger) -> tuple[str, str]:
    """Why a follower has no job yet, and what mends it where something went wrong ("" where it only waits)."""
    run, last = find_followed(ledger), ledger.last
    if run is None or last is None:
        return "", ""
    token = last.submission.token if last.submission is not None else ""
    entry, again = _entry_path(run, last.attempt, token), f"shardway resume {shlex.quote(str(ledger.run.path))}"
    young = ("find", str(last.attempt.handover), "-maxdepth", "0", "-mmin", f"-{round(HANDOVER_S / 60)}")
    claimed, recent = host.run_many([("test", "-d", str(last.attempt.handover)), young])
    if claimed.ok:
        if recent.ok and recent.out:
            return f"{run} hands it over just now", ""
        return "what handed it over was ended before the job was noted", again
    followed = read_ledger(host, run)
    if not host.read_files([entry]):
        return f"{run} does not list it: its submission was interrupted", again
    if is_finished(followed):
        return f"{run} is finished, and its job ended before it handed this over", again
    standings = read_standing(host, followed)
    if not any(standing.is_active for standing in standings) and find_followed(followed) is None:
        ended = next((each.result for each in reversed(standings) if each.result is not None), None)
        how = f": {ended.state}, {ended.reason}" if ended is not None else ""
        return f"waits for {run}, which has no job now{how} (shardway resume {shlex.quote(str(run))})", ""
    return f"waits for {run}", ""


def check_not_waiting(host: Host, ledger: Ledger) -> None:
    """Raise UserError if the newest attempt waits for another run, and nothing was interrupted."""
    run, last = find_followed(ledger), ledger.last
    if run is None or last is None:
        return
    why, remedy = explain_waiting(host, ledger)
    if not remedy:
        raise UserError(
            f"attempt {last.number} of {ledger.run.path} is prepared already: {why}.\n"
            "  Nothing was submitted. To do: let it wait, or take it out with "
            f"`shardway stop {shlex.quote(str(ledger.run.path))}`."
        )


def withdraw(host: Host, ledger: Ledger) -> Path | None:
    """Take a waiting follower out of the list; returns the run that it followed, None where it waits for none or is
    being handed over."""
    run, last = find_followed(ledger), ledger.last
    if run is None or last is None:
        return None
    claimed = host.run(("mkdir", str(last.attempt.handover))).ok
    if not claimed and not explain_waiting(host, ledger)[1]:
        return None
    unlist_follower(host, run, last.attempt, last.submission.token if last.submission else "")
    around = [("rmdir", str(folder)) for folder in (last.attempt.path.parent, last.attempt.run_path)]
    host.run_many([("rm", "-rf", str(last.attempt.path)), *around])
    return run


# --- what status shows


@dataclass(frozen=True)
class RowOfRuns:
    """The neighbours of a run: the one that it waits for (None for none), with why and a remedy, and what follows."""

    followed: Path | None
    why: str
    remedy: str
    followers: tuple[Follower, ...]

    def list_lines(self) -> list[str]:
        """As lines below the attempts."""
        is_news = self.why and self.why != f"waits for {self.followed}"
        lines = [f"      {self.why}"] if is_news else []
        lines += [f"      to do: {self.remedy}"] if self.remedy else []
        return [*lines, *(f"  then        {follower.render()}" for follower in self.followers)]

    def as_json(self) -> dict[str, Any]:
        return {
            "waits_for": str(self.followed or ""),
            "waits_why": self.why,
            "waits_remedy": self.remedy,
            "followers": [follower.as_json() for follower in self.followers],
        }


def read_row(host: Host, ledger: Ledger) -> RowOfRuns:
    """What a run waits for and what follows it."""
    why, remedy = explain_waiting(host, ledger)
    return RowOfRuns(find_followed(ledger), why, remedy, tuple(read_followers(host, ledger.run.path)))
