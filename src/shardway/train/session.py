"""Opens and closes what every run needs around its steps: ranks, grid, run directory, recorder, signals, device
defaults.

Invariants:
- All ranks resolve the same values, and settings of a script hold before any default.
- Until `begin`, a run directory is as earlier runs left it, so a refused run changes nothing: what the hold itself has
  written (a lease, a new folder) is removed again. From `begin` on the directory is this run's. A second writer is
  refused on all ranks.
- After a run without error the process group is destroyed in order; after an error it is not, since a peer may be dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardway.checkpoint.manager import remove_leftovers
from shardway.checkpoint.reader import peek_latest
from shardway.checkpoint.state import seed_all
from shardway.errors import Bug, JobError, ShardwayError, UserError, render_reason
from shardway.hardware.catalogue import DeviceFacts, facts_of_cuda
from shardway.hardware.limits import TaskLimit, explain_limit, read_task_limit, settle_temporary
from shardway.hardware.probe import probe_machine, render_machine
from shardway.parallel.blocks import apply_backend_switches, set_compile_cache, tf32_put_back
from shardway.parallel.mesh import Mesh, build_mesh
from shardway.parallel.precision import Precision, read_precision
from shardway.ranks.failure import AttemptEnd, describe_error, find_attempt, report_fault
from shardway.ranks.ft_launcher_client import open_monitor
from shardway.ranks.hang import read_hang_timeout
from shardway.ranks.heartbeat import Progress, find_process_start, open_heartbeat
from shardway.ranks.launcher import Placement, find_placement
from shardway.ranks.start import Ranks, StartOptions, is_out_of_memory, start_ranks
from shardway.ranks.stop import (
    BREAK,
    STOP_SIGNALS,
    SignalWatch,
    StopWatchdog,
    find_agent,
    find_shell,
    left_at_once,
    stop_with_parent,
)
from shardway.resolve import DataFacts, check_same_run, find_changes, resolve_with_data
from shardway.resolve.draft import Resolved, Settled, value_of
from shardway.resolve.request import Resolution, ResolveRequest, check_variables, read_before, resolve_request
from shardway.resolve.rules.formats import COMPILE, COMPUTE, KEYS, TF32
from shardway.rundir.attempts import SECOND_SIGNAL, Attempt, Ending
from shardway.rundir.directory import OWN_NAMES, RunDir
from shardway.rundir.file_io import list_missing, list_names, refusals
from shardway.rundir.lease import HeldLease, WriterLock
from shardway.rundir.names import ensure_run_id, find_local_run, find_run_id
from shardway.runfile.load import DEFAULT
from shardway.train.attempt_end import KILLED, ExitReport
from shardway.train.engines import ENGINES
from shardway.train.record import Recorder
from shardway.watch.trackers.base import TrackerThread

# --- defaults of the device, settings of a script


@dataclass(frozen=True)
class RankReport:
    """The report of one rank on its device (None: a CPU), and on what its script has set in torch."""

    device: DeviceFacts | None
    script: Mapping[str, Settled]


def look_here(resolution: Resolution, device: torch.device) -> RankReport:
    """The report of this rank, before it changes any setting of torch."""
    facts = _look_at(device)
    if facts is not None and not facts.no_compiler and resolution.resolved.values.train.compile == "blocks":
        try:
            set_compile_cache(resolution.resolved.values.train.compile_cache)
        except UserError as error:
            if resolution.resolved.is_derived(COMPILE):
                facts = replace(facts, no_compiler=render_reason(str(error)))
    return RankReport(facts, _read_script(device) if resolution.request.own_model else {})


def _look_at(device: torch.device) -> DeviceFacts | None:
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return replace(facts_of_cuda(name, None), kind="rocm", has_tf32=False)
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return facts_of_cuda(name, torch.cuda.get_device_capability(device), native)


def _read_script(device: torch.device) -> dict[str, Settled]:
    """Settings that a script has made by torch's own switches before it opened its run."""
    settled = {}
    if torch.is_autocast_enabled(device.type):
        settled[COMPUTE] = Settled("fp32", "the script has an autocast of its own")
    if device.type == "cuda" and (tf32 := read_tf32_of_script()) is not None:
        settled[TF32] = tf32
    return settled


def read_tf32_of_script() -> Settled | None:
    """Whether fp32 products run in TF32, if torch's switches are not at their defaults; None if they are."""
    reason = "the script has set torch's own switches"
    try:
        precision = torch.get_float32_matmul_precision()
        if precision == "highest" and torch.backends.cudnn.allow_tf32:
            return None
    except RuntimeError:  # the newer of torch's two interfaces is in use: the older one refuses to answer
        return Settled(torch.backends.cuda.matmul.fp32_precision == "tf32", reason)
    return Settled(precision != "highest", f'{reason} (torch.get_float32_matmul_precision() is "{precision}")')


def agree(resolution: Resolution, reports: Sequence[RankReport], before: Mapping[str, Any]) -> Resolution:
    """The resolution of all ranks, from all their reports and from what rank 0 finds in the directory."""
    facts = resolution.resolved.circumstances
    devices = tuple(dict.fromkeys(report.device for report in reports if report.device is not None))
    script = {key: settled for report in reversed(reports) for key, settled in report.script.items()}
    if (facts.devices, facts.before, facts.settled) == (devices, before, script):
        return resolution
    return resolution.under(devices=devices, before=before, settled=script)


def describe_numerics(resolved: Resolved) -> dict[str, list[Any]]:
    """Key -> [value, origin] of number formats and compilation, for the event that begins an attempt."""
    return {key: [value_of(resolved.values, key), resolved.origins[key]] for key in KEYS}


# --- rank 0's hold of a run directory


@dataclass
class DirectoryHold:
    """One process's right to write a run directory.

    `starts_over`: there is an earlier run that `begin` sets aside. `run_id` is the id of the run, also before it is
    written; `before` the settings that it computed with so far (`resolve.request.read_before`). `made` are the folders
    made here, innermost first.
    """

    directory: RunDir
    lock: WriterLock
    starts_over: bool
    run_id: str = ""
    before: Mapping[str, Any] = field(default_factory=dict)
    made: tuple[Path, ...] = ()
    fenced: list[tuple[Path, Path]] = field(default_factory=list)
    begun: bool = False

    def begin(self, write: Callable[[RunDir], None]) -> RunDir:
        """The run begins: set an earlier one aside if it starts over, and `write` the request.

        Returns the directory, with the right that is held from now on. Raises JobError, UserError, Fenced.
        """
        self.directory.confirm_writer()
        if self.starts_over:
            self.lock.withdraw()
            self.directory.set_aside()
            self.directory.create()
            self.lock.acquire()
            self.directory = replace(self.directory, lease=self.lock.lease)
        self.begun = True
        self.directory.create()
        self.lock.prune()
        remove_leftovers(self.directory)
        ensure_run_id(self.directory.path, self.run_id)
        with refusals(self.directory.path):
            write(self.directory)
        return self.directory

    def end(self) -> None:
        """Release the right; what was written before `begin` is removed, unless a script has put files of its own
        here."""
        if not self.begun and self._holds_strangers():
            with contextlib.suppress(Exception):  # it is a run directory from now on, so that the next start takes it
                self.directory.create()
            self.begun = True
        if self.begun:
            self.lock.release()
            return
        self.directory.unfence_saves(self.fenced)
        self.lock.withdraw()
        for folder in self.made:
            with contextlib.suppress(OSError):  # another process has written there meanwhile
                folder.rmdir()

    def _holds_strangers(self) -> bool:
        """Whether a directory that was no run before holds what this run did not make."""
        with contextlib.suppress(Exception):
            return not self.directory.exists() and bool(set(list_names(self.directory.path)) - OWN_NAMES)
        return False


def take_directory(directory: RunDir, job: str, *, fresh: bool) -> DirectoryHold:
    """Take the right to write a directory, make it if it is missing, and check that its run can be continued.

    Raises UserError if another run holds it, or if it is not a run's or of a newer format; JobError if no checkpoint
    can be read.
    """
    directory.check_no_strangers()
    existed = directory.exists()
    if existed:
        directory.check_format()
    made = list_missing(directory.path)
    lock = directory.writer_lock(job)
    hold = DirectoryHold(directory, lock, fresh and existed, made=made)
    try:
        directory.create(empty=not existed)
        lock.acquire(logging.getLogger("shardway").warning)
        hold.directory = replace(directory, lease=lock.lease)
        hold.fenced = hold.directory.fence_saves()
        hold.run_id = _know_id(hold)
    except BaseException:
        hold.end()
        raise
    return hold


def _know_id(hold: DirectoryHold) -> str:
    """The id of the run: that of the directory, else of its checkpoints, else a new one."""
    if hold.starts_over:
        return uuid.uuid4().hex
    newest = peek_latest(hold.directory)
    known = newest.run if newest is not None else ""
    return find_run_id(hold.directory.path) or known or uuid.uuid4().hex


# --- what every run needs around its steps


@dataclass
class Session:
    """One rank's view of a run.

    `resolution` is completed when the data is open; `own_model` marks a script that brings its own model and data,
    rather than a run that its run file describes fully. `at_end` is unwound when the session ends, with or without an
    error. `attempt` is None if no job script started this rank; `agent` is the process that did, 0 if it need not
    outlive it. `hold` is of rank 0; on every rank: `run_id`, whether the run `starts_over` (`begin` sets an earlier one
    aside), and what `begin` is `to_write`.
    """

    resolution: Resolution
    ranks: Ranks
    mesh: Mesh
    precision: Precision
    recorder: Recorder
    signals: SignalWatch
    own_model: bool = False
    settled: bool = False
    changes: dict[str, list[Any]] = field(default_factory=dict)
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    attempt: Attempt | None = None
    progress: Progress = field(default_factory=Progress)
    lease: HeldLease | None = None
    hold: DirectoryHold | None = None
    run_id: str = ""
    starts_over: bool = False
    to_write: list[Callable[[RunDir], None]] = field(default_factory=list)
    agent: int = 0
    stop_watchdog: StopWatchdog = field(default_factory=lambda: StopWatchdog(SignalWatch()))
    noted: set[str] = field(default_factory=set)
    task_limit: TaskLimit | None = None
    """What limits processes and threads here, as it was before any rank had loader processes."""
    temporary: str = ""
    """What is wrong with the folder for temporary files; "" if nothing."""

    @property
    def resolved(self) -> Resolved:
        """The run as it is resolved so far."""
        return self.resolution.resolved

    @property
    def directory(self) -> RunDir:
        """Where the run writes, and with which right."""
        return replace(self.resolution.directory, lease=self.lease)

    def leaves_alone(self, dotted: str) -> bool:
        """Whether a default must not touch a script that owns its model, since the script did not ask for it."""
        return self.own_model and self.resolved.origins[dotted] == DEFAULT

    def note_once(self, event: str, text: str) -> None:
        """Show something once to the user on rank 0, and write it down."""
        is_new = text not in self.noted
        self.noted.add(text)
        if is_new and self.ranks.is_first:
            logging.getLogger("shardway").warning(text)
            self.recorder.event(event, step=self.recorder.step_done, reason=text)

    def settle(self, facts: DataFacts, keep: Callable[[str], bool] = lambda dotted: True) -> None:
        """Complete the resolved run with the facts of the open data; `begin` writes down the keys that `keep` selects.

        Raises UserError on every rank if the run does not fit the data or what was trained here before.
        """
        resolved = resolve_with_data(self.resolved, facts)
        self.resolution = replace(self.resolution, resolved=resolved)
        keeps_local = resolved.values.checkpoint.local_every != "off"
        local = keeps_local and any(self.ranks.gather(self.ranks.together(self._has_local)))
        self.ranks.together(lambda: self._check_request(local=local) if self.ranks.is_first else None)
        self.to_write.append(lambda run: run.write_request(self.resolution.loaded.text, self.resolved.render(keep)))
        self.settled = True

    def list_saved(self) -> list[int]:
        """Steps that the run can resume from in its directory, oldest first; none if it starts over."""
        return [] if self.starts_over else self.directory.checkpoint_steps()

    def begin(self) -> None:
        """The run begins, on all ranks together: from here on it writes into its directory. A second call does
        nothing."""
        if self.recorder.is_open:
            return
        hold = self.hold
        held = self.ranks.together(lambda: hold.begin(self._write_all) if hold is not None else None)
        epoch = self.ranks.gather(held.epoch if held is not None else 0)[0]
        if self.starts_over:
            self.lease = (held if held is not None else self.resolution.directory.beside(epoch)).lease
        self.starts_over = False
        self.recorder.open(self.directory)
        values = self.resolved.values
        if values.track.to and self.ranks.is_first:
            configuration = values.model_dump(mode="json")
            thread = TrackerThread(self.directory, values.track.to, values.track.settings, configuration)
            self.recorder.trackers = thread

    def _write_all(self, run: RunDir) -> None:
        for write in self.to_write:
            write(run)

    def _has_local(self) -> bool:
        """Whether there is a checkpoint of this run on the disk of this node. Raises UserError."""
        return bool(find_local_run(self.resolved.values.checkpoint.local_dir, self.run_id).steps())

    def _check_request(self, *, local: bool) -> None:
        self.directory.confirm_writer()
        saved = self.directory.read_resolved() if local or self.list_saved() else {}
        check_same_run(saved, self.resolved, str(self.directory.path))
        self.changes = find_changes(saved, self.resolved)


@contextlib.contextmanager
def open_session(request: ResolveRequest, environ: Mapping[str, str]) -> Iterator[Session]:
    """Resolve the request, join the ranks, take the run directory. Raises ShardwayError on every rank alike."""
    attempt = find_attempt(environ)
    placement = find_placement(environ)
    if attempt is not None and placement.rank == 0:
        attempt.note_began()
    agent = find_agent(environ) if placement.has_agent else 0
    if agent:
        stop_with_parent()
    with _failure_reported(attempt, placement):
        monitor = open_monitor(placement)
        page = open_heartbeat(environ, placement.local_rank) if monitor is None else monitor
        progress = Progress(page, process_start=find_process_start(attempt, environ))
        ranks, resolution = _join(_placed(request, attempt), placement)
        if monitor is not None:
            monitor.watch(read_hang_timeout(resolution.resolved.values.run))
        with left_at_once(ranks.world), hold_session(resolution, ranks, attempt, progress) as session:
            session.agent = agent
            yield session
    ranks.end()


def _placed(request: ResolveRequest, attempt: Attempt | None) -> ResolveRequest:
    """A script in a job trains into the run directory of its job, where a stop is asked for, unless it sets another."""
    return replace(request, directory=attempt.run_path) if attempt is not None and request.own_model else request


def _join(request: ResolveRequest, placement: Placement) -> tuple[Ranks, Resolution]:
    resolution = resolve_request(request, placement.world, placement.local_world)
    check_variables(resolution.loaded)
    run, engine = resolution.resolved.values.run, ENGINES[resolution.resolved.values.train.engine]
    engine.check_installed()
    options = StartOptions(
        run.device, int(run.threads), run.start_timeout, run.collective_timeout, group_alone=engine.needs_group
    )
    return start_ranks(placement, options), resolution


@contextlib.contextmanager
def hold_session(
    resolution: Resolution, ranks: Ranks, attempt: Attempt | None = None, progress: Progress | None = None
) -> Iterator[Session]:
    """The session of a resolved run on ranks that have started; they are left as they are when it ends."""
    progress, task_limit, temporary = progress or Progress(), read_task_limit(), settle_temporary()
    with contextlib.ExitStack() as stack:
        hold = _hold_directory(resolution, ranks, attempt, stack)
        held = (hold.directory.epoch, hold.run_id, hold.starts_over, hold.before) if hold is not None else _NOT_HELD
        reports = ranks.gather((held, look_here(resolution, ranks.device)))
        (epoch, run_id, starts_over, before), _ = reports[0]
        resolution = agree(resolution, [report for _, report in reports], before)
        values = resolution.resolved.values
        precision = read_precision(values.precision)
        stack.enter_context(tf32_put_back(ranks.device))
        leaves_tf32 = TF32 in resolution.resolved.circumstances.settled and resolution.resolved.is_derived(TF32)
        apply_backend_switches(values, ranks.device, leaves_tf32=leaves_tf32)
        directory = hold.directory if hold is not None else resolution.directory.beside(epoch)
        reported = _reporting_attempt(attempt, ranks.placement)
        every_rank = values.data.record_ids
        recorder = Recorder(directory, ranks, every_rank=every_rank, attempt=reported, progress=progress)
        stack.callback(recorder.close)
        mesh = build_mesh(ranks, values.parallel)
        seed_all(values.train.seed, ranks.rank)
        # In a notebook a signal is for its cell or its kernel, which go on when this run has ended.
        signals = stack.enter_context(SignalWatch(STOP_SIGNALS if find_shell() is None else (BREAK,)))
        own_model = resolution.request.own_model
        reporting = _failure_reported(attempt, ranks.placement, lambda: recorder.step_done)
        with reporting, _faults_recorded(recorder, own_model=own_model):
            session = Session(resolution, ranks, mesh, precision, recorder, signals, own_model, at_end=stack)
            session.attempt, session.progress, session.lease = attempt, progress, directory.lease
            session.hold, session.run_id, session.starts_over = hold, run_id, starts_over
            session.task_limit, session.temporary = task_limit, temporary
            session.stop_watchdog = stack.enter_context(_watch_stop(session))
            yield session


def _watch_stop(session: Session) -> StopWatchdog:
    """The thread that ends this rank if a stop takes longer than allowed."""
    resolved = session.resolved
    return ExitReport(
        session.directory,
        session.ranks.rank,
        resolved.values.run.stop_timeout,
        resolved.origins["run.stop_timeout"],
        session.progress,
        session.attempt,
        may_write=lambda: session.recorder.is_open,
    ).watchdog(session.signals)


def _hold_directory(
    resolution: Resolution, ranks: Ranks, attempt: Attempt | None, stack: contextlib.ExitStack
) -> DirectoryHold | None:
    """Take the run directory on rank 0; None on the others. Raises on every rank alike."""
    job = attempt.path.name if attempt is not None else ""

    def take() -> DirectoryHold | None:
        if not ranks.is_first:
            return None
        hold = take_directory(resolution.directory, job, fresh=resolution.request.fresh)
        stack.callback(hold.end)
        if not hold.starts_over:
            with refusals(resolution.directory.path):
                hold.before = read_before(resolution.directory, resolution.resolved.values)
        return hold

    return ranks.together(take)


_NOT_HELD: tuple[int, str, bool, Mapping[str, Any]] = (0, "", False, {})
"""The values of a rank that does not hold the run directory."""


@contextlib.contextmanager
def _faults_recorded(recorder: Recorder, *, own_model: bool) -> Iterator[None]:
    """Write down what ends this rank; recording is best effort here, the error itself matters more.

    What ends it before the run begins is not part of the run: only an agent of Shardway gets it.
    """
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(JobError):
            recorder.end("stopped", AttemptEnd(Ending.STOPPED, SECOND_SIGNAL), KILLED)
        raise
    except Exception as error:
        named = _named(error)
        fault = describe_error(named, out_of_memory=is_out_of_memory(error))
        memory = {"out_of_memory": True} if fault.out_of_memory else {}
        kind = fault.kind if isinstance(named, ShardwayError) else Bug.__name__
        says_when = isinstance(error, ShardwayError) or fault.out_of_memory
        message = fault.message if says_when else _dated(fault.message, recorder.step_done)
        facts = {"kind": kind, "exit_code": fault.exit_code, "message": message, **memory}
        with contextlib.suppress(JobError):
            if recorder.is_open:
                recorder.fault(**facts)
                recorder.failed(render_reason(message))
            else:
                recorder.setup_fault(**facts)
        if named is error:
            raise
        if own_model:  # if a script opens too many files, its traceback shows it
            error.add_note(str(named))
            raise
        raise named from error


def _named(error: Exception) -> Exception:
    """The error, or what it says of a limit of this machine that was reached; the ranks may start again."""
    why = "" if isinstance(error, ShardwayError) else explain_limit(error)
    return JobError(why) if why else error


def _dated(message: str, step: int) -> str:
    """A message whose first line says after which step it came."""
    first, *rest = message.splitlines() or [""]
    return "\n".join((f"{first} (after step {step})", *rest))


def _reporting_attempt(attempt: Attempt | None, placement: Placement) -> Attempt | None:
    """The attempt whose end its ranks report; None if an agent of Shardway does, which may start them again."""
    return None if placement.launcher == "shardway" else attempt


@contextlib.contextmanager
def _failure_reported(
    attempt: Attempt | None, placement: Placement, find_step: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Tell the job what ended this rank, unless the ranks start again; an agent of ours does that itself."""
    reported = None if placement.launcher == "shardway" or placement.starts_again else attempt
    try:
        yield
    except Exception as error:
        report_fault(
            reported,
            f"rank {placement.rank}",
            describe_error(error, out_of_memory=is_out_of_memory(error)),
            find_step(),
        )
        raise


def machine_facts(ranks: Ranks) -> dict[str, Any]:
    """What a started event says of where the run is."""
    machine = {fact.label: fact.value for fact in render_machine(probe_machine())}
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "world": ranks.world,
        "launcher": ranks.placement.launcher,
        "device": str(ranks.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": sys.argv,
        "machine": {**machine, "torch": torch.__version__},
    }
