"""How ranks fail: reports in the attempt, the outcome of a start, its root cause, and whether the ranks start again.

Invariants:
- Of the ranks of one attempt, the one whose own error ended it reports the end; a rank that only lost contact with
  another gives that one time to report first. The root cause is likewise the rank that failed first by itself.
- Memory counts as the cause only if the control group of the ranks has counted such a kill.
- A user's request for a stop wins over the clock, so that the next attempt of a chain is held.
- Unfinished work never counts as complete: an end without a save, an end that another run recorded, and a stop that
  only a lost agent requested do not count. When rank 0 records an end, everything is saved: a rank that fails after
  that, during its shutdown, does no harm, and restarted ranks would train on after a stop.
- A run that makes progress starts again however often it fails; one that makes none stops after a few failures. What
  the user has to change is never tried again. Progress is a checkpoint that is newer than all before. A checkpoint on
  the disks of the nodes may be the fault itself, so a run does not end before it has started from another one.
- No torch.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from shardway.errors import (
    ERRORS_BY_NAME,
    Bug,
    Fenced,
    JobError,
    LostContact,
    NodeLost,
    ShardwayError,
    SiteError,
    UserError,
    render_reason,
)
from shardway.hardware.limits import count_oom_kills, read_cgroup_limits
from shardway.ranks.evidence import NO_EVIDENCE, HangEvidence, explain_collectives, read_crash, render_ranks
from shardway.ranks.hang import Hang
from shardway.ranks.stop import Decision, find_stop_signal
from shardway.refusals import find_remedy
from shardway.rundir.attempts import BY_AGENT, BY_SIGNAL, SECOND_SIGNAL, VARIABLE, Attempt, Ending, Result
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.rundir.file_io import why_refused
from shardway.rundir.lease import TAKEN_OVER
from shardway.units import format_bytes

# --- reports in the attempt that a job script has started

CAUSE_WAIT_S = 5.0  # how long a rank that lost contact waits for the report of the rank at fault
_VARYING = (
    (re.compile(r"""[^\s,;:'"()\[\]]*/[^\s,;:'"()\[\]]*"""), "PATH"),
    (re.compile(r"0x[0-9a-fA-F]+|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b"), "#"),
    (re.compile(r"\d+(?:[.,_]\d+)*(?:[eE][+-]?\d+)?"), "#"),
)
"""What is another in the same failure of another attempt: paths, addresses, numbers."""


@dataclass(frozen=True)
class RankFault:
    """What ended a rank: the name of the error's class, its message, and the exit code that the rank ends with."""

    kind: str
    message: str
    exit_code: int
    out_of_memory: bool = False


def find_attempt(environ: Mapping[str, str]) -> Attempt | None:
    """The attempt that a job script started this process for; None without one. Raises SiteError if its folder does not
    exist: the reports of the ranks would be lost."""
    path = environ.get(VARIABLE, "")
    if path and not Path(path).is_dir():
        raise SiteError(
            f"{VARIABLE} names {path}, and there is no such folder on {socket.gethostname()}.\n"
            "  It is where a job says how it went. To do: make the run directory visible on every node and in the "
            "container, or unset the variable where no job is meant."
        )
    return Attempt(Path(path)) if path else None


def describe_error(error: BaseException, *, out_of_memory: bool = False) -> RankFault:
    """An error as a fault; one that is not Shardway's own counts as a defect."""
    name = type(error).__name__
    if isinstance(error, ShardwayError):
        return RankFault(name, str(error), error.exit_code, out_of_memory)
    return RankFault(name, f"{name}: {error}" if str(error) else name, Bug.exit_code, out_of_memory)


def sign_failure(fault: RankFault) -> str:
    """A line that is the same for the same failure of another attempt. The message of lost contact varies with the
    transport, so only its first words are kept."""
    line = next((line.strip() for line in fault.message.splitlines() if line.strip()), "")
    line = "" if line == fault.kind else line.removeprefix(f"{fault.kind}: ")
    if fault.kind == LostContact.__name__:
        line = line.partition(":")[0]
    for pattern, stand_in in _VARYING:
        line = pattern.sub(stand_in, line)
    return f"{fault.kind}: {' '.join(line.split())}"[:200].rstrip(": ")


def report_fault(
    attempt: Attempt | None, by: str, fault: RankFault, step: int = 0, wait_s: float = CAUSE_WAIT_S
) -> bool:
    """Write that the attempt crashed, ran out of memory or lost a node, unless its end is already written. A rank that
    lost contact first waits `wait_s` for the report of another rank. Returns whether this report counts; also False if
    the file system refuses it, since the error itself matters more."""
    if attempt is None:
        return False
    state, until = Ending.CRASHED, time.monotonic() + wait_s
    if fault.kind == LostContact.__name__:
        while attempt.read_result() is None and time.monotonic() < until:
            time.sleep(0.05)
        if attempt.read_result() is not None:
            return False
    if fault.kind == NodeLost.__name__:
        state = Ending.NODE_FAILURE
    if fault.out_of_memory:
        state = Ending.OUT_OF_MEMORY
    result = Result(state, render_reason(fault.message), step, fault.exit_code, sign_failure(fault), by=by)
    try:
        return report_end(attempt, result)
    except OSError:
        return False


def report_end(attempt: Attempt, result: Result) -> bool:
    """Write how the attempt ended, with its job, this host and the time; returns whether this report counts."""
    started = attempt.read_started()
    job = started.job if started is not None else ""
    return attempt.write_result(replace(result, job=job, host=socket.gethostname(), ended=time.time()))


@dataclass
class AttemptShare:
    """The attempt whose end an error of this process is (None: no job waits for a report, another process reports it,
    or the ranks start again), and what the report says beside the error: the reporter and the last step."""

    attempt: Attempt | None
    by: str = BY_AGENT
    find_step: Callable[[], int] = lambda: 0


@contextlib.contextmanager
def failure_reported(
    share: AttemptShare,
    exits: tuple[type[Exception], ...] = (),
    describe: Callable[[Exception], RankFault] = describe_error,
) -> Iterator[None]:
    """Report to the job an error that ends this process: a library that is not there on one node, for instance, for
    which the other nodes wait. `exits`: exceptions that end the process as intended."""
    try:
        yield
    except exits:
        raise
    except Exception as error:
        report_fault(share.attempt, share.by, describe(error), share.find_step())
        raise


# --- how a stop ends an attempt


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ends, and why in a sentence. `failure`: BY_SIGNAL if a signal was obeyed, which only the scheduler
    can interpret."""

    state: Ending
    reason: str
    failure: str = ""


def find_end(decision: Decision, stop_file: str | None, deadline: str = "") -> AttemptEnd:
    """The end that all ranks have agreed on, in the words of rank 0. `stop_file` is the content of the stop file (None:
    there is none), `deadline` the description of the clock."""
    if stop_file is not None:
        if stop_file.startswith(f"{BY_SIGNAL} "):
            return AttemptEnd(Ending.STOPPED, f"a {stop_file}", BY_SIGNAL)
        # The first word is from a job script that the scheduler has warned.
        first, *rest = re.split(r"[\s:,]+", stop_file.strip(), maxsplit=1)
        state = {"deadline": Ending.DEADLINE, "preempted": Ending.PREEMPTED}.get(first.lower())
        if state is not None:
            return AttemptEnd(state, "".join(rest) or stop_file)
        return AttemptEnd(Ending.STOPPED, stop_file or decision.stop_reason)
    if decision.deadline:
        return AttemptEnd(Ending.DEADLINE, deadline or decision.stop_reason)
    return AttemptEnd(Ending.STOPPED, decision.stop_reason, BY_SIGNAL)


# --- failed ranks as their agent sees them


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended badly: its exit code (negative for a signal) and the files with its output. `by_agent`: others
    had failed, and the agent ended it. `for_memory`: the kernel ended it, since memory ran out."""

    rank: int
    pid: int
    exit_code: int
    printed: tuple[Path, ...] = ()
    by_agent: bool = False
    for_memory: bool = False

    @property
    def signal_name(self) -> str | None:
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else None

    def read_printed(self) -> str:
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in self.printed)

    def last_error(self) -> str:
        """The error that the rank printed last, if it had no events to write it into; empty for none."""
        _, *errors = re.split(r"^shardway: ", self.read_printed(), flags=re.MULTILINE)
        return errors[-1].strip() if errors else ""


def mark_oom(failures: Sequence[RankFailure], before: int | None, root: Path = Path("/")) -> list[RankFailure]:
    """The same failures, with a mark on the first killed rank if the kernel has killed it for lack of memory. `before`
    is the result of `count_oom_kills` when the ranks started; `root` stands for "/"."""
    killed = next((each for each in failures if each.signal_name == "SIGKILL" and not each.by_agent), None)
    now = count_oom_kills(root)
    if killed is None or before is None or now is None or now <= before:
        return list(failures)
    return [replace(each, for_memory=True) if each is killed else each for each in failures]


@dataclass(frozen=True)
class LaunchOutcome:
    """How one start of the ranks ended, on one node or on all. `failures`: ranks that ended badly, the causes first.
    `evidence`: gathered from the ranks when one of any node hung. `late`: a stop took too long. `interrupted`: a second
    signal ended it at once. `lost`: names of lost nodes. `called_off`: a stop was requested before all nodes were
    present."""

    failures: tuple[RankFailure, ...] = ()
    hang: Hang | None = None
    evidence: HangEvidence = NO_EVIDENCE
    late: bool = False
    interrupted: bool = False
    lost: tuple[str, ...] = ()
    called_off: bool = False

    @property
    def is_well(self) -> bool:
        return not (self.failures or self.hang or self.late or self.interrupted or self.lost)

    def describe(self) -> str:
        if self.hang is not None:
            return self.hang.message
        if self.lost:
            return f"{' and '.join(self.lost)} did not answer any more"
        if not self.failures:
            return "a rank did not leave in time, so all were ended"
        first = self.failures[0]
        how = f"was ended by {first.signal_name}" if first.signal_name else f"left with exit code {first.exit_code}"
        return f"rank {first.rank} (process {first.pid}) {how}"


def count_events(run: RunDir, rank: int = 0) -> int:
    """The mark of a start: the events that a rank had before it."""
    return sum(1 for _ in run.all_events(rank))


def has_begun(run: RunDir, mark: int) -> bool:
    """Whether the run went on after this mark of rank 0; before that, the run is unchanged."""
    return any(event["event"] == "started" for event in islice(run.all_events(0), mark, None))


def has_come_to_its_end(run: RunDir, mark: int, outcome: LaunchOutcome) -> bool:
    """Whether rank 0 has recorded an end of its own in the start whose events begin at `mark`."""
    new = islice(run.all_events(0), mark, None)
    events = [event for event in new if event["event"] in ("started", "stopped", "finished")]
    if sum(event["event"] == "started" for event in events) > 1 or run.find_writer() is not None:
        return False  # another run has taken over
    end = next((event for event in reversed(events) if event["event"] != "started"), None)
    if end is None or end.get("reason") == SECOND_SIGNAL:  # a second signal saves nothing
        return False
    # Ranks that lose their agent ask for a stop, and the others may go on without their node.
    by_orphans = end["event"] == "stopped" and end.get("failure") == BY_SIGNAL and find_stop_signal() is None
    return not (outcome.lost and by_orphans)


# --- the root cause of a start that ended badly


@dataclass(frozen=True)
class RootCause:
    """The cause of a failure: an error, its reporter, and whether memory ran out."""

    error: ShardwayError
    by: str = BY_AGENT
    out_of_memory: bool = False


def find_root_cause(run: RunDir, outcome: LaunchOutcome, marks: Mapping[int, int]) -> RootCause:
    """The cause of a start that ended badly; events of a rank before its mark are of earlier starts. Without a lost
    node, another writer or a hang it is the rank that failed first: the first one if it was killed; else one with an
    error other than lost contact; else one that was killed. A rank may lose contact before the agent detects the dead
    one, and the agent ends the others by signals."""
    failures = outcome.failures
    if outcome.lost:
        names, they = " and ".join(outcome.lost), "does" if len(outcome.lost) == 1 else "do"
        message = (
            f"{names} {they} not answer any more; the ranks of the other nodes were ended.\n"
            f"  To do: run the same command again: it goes on from {run.describe_base()}. If nodes are lost often, "
            "run.elastic lets a run go on with fewer."
        )
        return RootCause(NodeLost(message))
    if (writer := run.find_writer()) is not None:
        return RootCause(_explain_taken_over(run, failures, writer))
    if outcome.hang is not None:
        return RootCause(_explain_hang(run, outcome.hang, outcome.evidence, began=has_begun(run, marks[0])))
    for_memory = next((failure for failure in failures if failure.for_memory), None)
    if for_memory is not None:
        return RootCause(explain_oom(for_memory, run.describe_base()), out_of_memory=True)
    if failures[0].signal_name:
        return RootCause(_explain_killed(run, failures[0]))
    faults: dict[int, Event] = {}
    for rank, mark in marks.items():  # recorded after this mark, or reported before the run went on
        new = [event for event in islice(run.all_events(rank), mark, None) if event["event"] == "fault"]
        if (fault := new[-1] if new else run.read_setup_fault(rank)) is not None:
            faults[rank] = fault
    own = {rank: fault for rank, fault in faults.items() if fault["kind"] != LostContact.__name__}
    killed = [failure for failure in failures if failure.signal_name and not failure.by_agent]
    if killed and not own:
        return RootCause(_explain_killed(run, killed[0]))
    if not faults:
        return RootCause(_explain_exit_code(run, failures[0]))
    rank, fault = next(iter((own or faults).items()))
    kind = ERRORS_BY_NAME.get(fault["kind"], JobError)
    prefix = "" if len({each["message"] for each in faults.values()}) == 1 else f"rank {rank}: "
    printed = next((failure.printed for failure in failures if failure.rank == rank), ())
    where = _name_output(printed) if kind is Bug else ""
    return RootCause(kind(f"{prefix}{fault['message']}{where}"), f"rank {rank}", fault.get("out_of_memory") is True)


def explain_oom(killed: RankFailure, base: str, root: Path = Path("/")) -> JobError:
    """The error of a rank that was killed for lack of memory; `base` names the checkpoint from which the run
    continues."""
    limit = read_cgroup_limits(root).memory_bytes
    bound = f", which may have {format_bytes(limit)}," if limit is not None and limit < 1 << 60 else ""
    return JobError(
        f"the memory of this control group{bound} ran out, so the kernel ended rank {killed.rank} (process "
        f"{killed.pid}) by SIGKILL; the other ranks were ended with it.\n"
        "  To do: run the same command again with more memory, or with less of it in use (a smaller train.micro_batch, "
        f"fewer data.workers, checkpoint.background = false): it goes on from {base}."
    )


def _explain_taken_over(run: RunDir, failures: tuple[RankFailure, ...], writer: str) -> ShardwayError:
    """All ranks of this start have ended and another run writes here; nothing is written into its record."""
    errors = {failure: text for failure in failures if (text := failure.last_error())}
    for failure, text in errors.items():
        if failure.exit_code == UserError.exit_code:  # the other run was there before the ranks could begin
            return UserError(text)
    unnamed = (
        f"another run trains into {run.path}: {writer}. This one has ended and writes nothing more.\n"
        "  To do: nothing, if the other one is meant to go on; else stop that one, then run the same command again."
    )
    return Fenced(min(errors.values(), key=lambda text: not text.startswith(TAKEN_OVER), default=unnamed))


def _explain_hang(run: RunDir, hang: Hang, evidence: HangEvidence, *, began: bool) -> JobError:
    """What the agent detected, with the stacks of the ranks; written as a fault of the first of them if the run had
    begun."""
    sentences = explain_collectives(evidence)
    message = ": ".join((hang.message, *sentences[:1]))
    facts = {
        "rank": hang.ranks[0],
        "kind": "Hang",
        "exit_code": 4,
        "message": message,
        "stacks": [{"ranks": group.ranks, "frames": group.frames} for group in evidence.groups],
        "collectives": sentences,
    }
    if began:
        with contextlib.suppress(OSError, JobError), run.event_writer(hang.ranks[0]) as events:
            events.write("fault", **facts)
    places = [f"{render_ranks(group.ranks)}: {' < '.join(group.frames[:3]) or 'n/a'}" for group in evidence.groups]
    further = "".join(f"\n  {each}" for each in (*sentences[1:], *places))
    return JobError(
        f"{message}; all ranks were ended.{further}\n"
        "  To do: run the same command again: it goes on from the last checkpoint. If it was no hang, raise "
        "run.hang_timeout."
    )


def _explain_killed(run: RunDir, failure: RankFailure) -> JobError:
    who, base = f"rank {failure.rank} (process {failure.pid})", run.describe_base()
    if failure.signal_name not in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        return JobError(
            f"{who} was ended by {failure.signal_name}; the other ranks were ended "
            f"with it.\n  To do: run the same command again: it goes on from {base}. If that signal was not sent "
            "on purpose, the machine may have run out of memory (dmesg says so)."
        )
    # Native code cannot raise an error: the crash is shown with the Python frame that called it, if that is known.
    frames = " < ".join(read_crash(failure.read_printed())[:3])
    return JobError(
        f"{who} crashed in native code ({failure.signal_name})"
        f"{f', called from {frames}' if frames else ''}; the other ranks were ended with it.\n"
        f"  To do: run the same command again: it goes on from {base}. If it happens again, the library "
        f"that was called has a defect, or does not fit this machine.{_name_output(failure.printed)}"
    )


def _explain_exit_code(run: RunDir, failure: RankFailure) -> ShardwayError:
    """A rank that recorded no fault: by what it printed, else by its exit code."""
    kinds: dict[int, type[ShardwayError]] = {kind.exit_code: kind for kind in (UserError, SiteError, JobError)}
    kind, printed = kinds.get(failure.exit_code), failure.last_error()
    if kind is not None and printed:
        return kind(printed)
    what = f"rank {failure.rank} ended with exit code {failure.exit_code}."
    if why := why_refused(run.path):
        return JobError(
            f"{what} It could not say why: nothing can be written into {run.path} ({why}).\n"
            f"  To do: {find_remedy(why)}; then run the same command again: it goes on from {run.describe_base()}."
        )
    return (kind or JobError)(f"{what}{_name_output(failure.printed)}")


def _name_output(printed: Sequence[Path]) -> str:
    return f"\n  What it printed is in {printed[-1]}" if printed else ""


# --- whether the ranks start again: a pure function of the failures so far

WITHOUT_PROGRESS = 3
"""So many failures in a row between two checkpoints end the run, whatever they are; two, if they are the same."""

FROM_NODES = 2
"""So many starts from one checkpoint on the disks of the nodes may fail; the next start ignores those disks."""


@dataclass(frozen=True)
class RepeatedFailure:
    """A failure of the ranks: a line that is the same for the same failure, and the newest complete checkpoint's step.
    `hopeless`: the user has to change something first, such as the run file. `from_nodes`: the ranks had started from
    that checkpoint, and it existed only on the disks of the nodes."""

    signature: str
    saved_step: int
    hopeless: bool = False
    from_nodes: bool = False


@dataclass(frozen=True)
class RestartDecision:
    """Whether the ranks start again; if not, why."""

    restart: bool
    reason: str = ""  # why not


def decide(failures: Sequence[RepeatedFailure], most: int | None = None) -> RestartDecision:
    """Whether to restart after these failures, the newest last; `most` restarts are allowed (None: any number)."""
    newest = failures[-1]
    if newest.hopeless:
        return RestartDecision(False)
    if most is not None and len(failures) > most:
        return RestartDecision(False, "" if most == 0 else f"run.max_restarts allows {most}")
    stuck = [failure for failure in failures if failure.saved_step >= newest.saved_step]
    where = f"with step {newest.saved_step} as the last that was saved" if newest.saved_step else "with nothing saved"
    from_nodes = [failure for failure in stuck if failure.from_nodes]
    if newest.from_nodes and len(from_nodes) <= FROM_NODES:
        return RestartDecision(True)  # it may be that checkpoint: the third start does not begin from it
    if [failure.signature for failure in stuck].count(newest.signature) >= 2:
        return RestartDecision(False, f"the same failure came twice {where}")
    if len(stuck) - min(len(from_nodes), FROM_NODES) >= WITHOUT_PROGRESS:
        return RestartDecision(False, f"{len(stuck)} failures came one after another {where}")
    return RestartDecision(True)
