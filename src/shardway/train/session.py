"""Opens and closes what every run needs around its steps: ranks, grid, run directory, recorder, signals, formats.

Invariants:
- All ranks resolve the same values. Settings of a script hold before any default, and what a user sets holds for every
  model; nothing is decided here about a model that a run file describes.
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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardway.checkpoint.manager import remove_leftovers
from shardway.checkpoint.reader import peek_latest
from shardway.checkpoint.state import seed_all, seed_untouched
from shardway.data.damage import DamageFound
from shardway.data.waiting import WorkerChoice
from shardway.errors import Bug, JobError, ShardwayError, UserError, render_reason
from shardway.hardware.catalogue import DeviceFacts, facts_of_cuda
from shardway.hardware.limits import TaskLimit, explain_limit, read_task_limit, settle_temporary
from shardway.hardware.probe import probe_machine, render_machine
from shardway.models.contract import find_plan
from shardway.parallel.blocks import apply_backend_switches, drops, set_compile_cache, tf32_put_back
from shardway.parallel.mesh import Mesh, build_mesh
from shardway.parallel.precision import Precision, autocast_model, left_to_model, read_precision
from shardway.ranks.failure import (
    AttemptEnd,
    AttemptShare,
    RankFault,
    describe_error,
    failure_reported,
    find_attempt,
)
from shardway.ranks.hang import read_hang_timeout
from shardway.ranks.heartbeat import Progress, find_process_start, open_heartbeat
from shardway.ranks.launcher import FT_LAUNCHER, Placement, find_placement
from shardway.ranks.start import Ranks, StartOptions, find_script_threads, is_out_of_memory, start_ranks
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
from shardway.resolve.draft import DERIVED, Resolved, Settled, value_of
from shardway.resolve.request import Resolution, ResolveRequest, check_variables, read_before, resolve_loaded
from shardway.resolve.rules.formats import COMPILE, COMPUTE, DROPS, KEYS, TF32
from shardway.rundir.attempts import SECOND_SIGNAL, VARIABLE, Attempt, Ending
from shardway.rundir.directory import OWN_NAMES, RunDir
from shardway.rundir.file_io import list_missing, list_names, refusals
from shardway.rundir.lease import HeldLease
from shardway.rundir.names import ensure_run_id, find_local_run, find_run_id
from shardway.rundir.notify import find_lacks, notify
from shardway.runfile.load import DEFAULT, load_run
from shardway.runfile.schema import NotifySection
from shardway.telemetry.start import SampledRun, sampled
from shardway.train.engines import ENGINES
from shardway.train.record import KILLED, ExitReport, Recorder
from shardway.watch.trackers.base import TrackerThread, check_trackers

if TYPE_CHECKING:
    from shardway.train.staging import StagedWindows

# --- one rank's view of a run


@dataclass
class Session:
    """One rank's view of a run.

    `resolution` is completed when the data is open; `own_model` marks a script that brings its own model and data,
    rather than a run that its run file describes fully. `at_end` is unwound when the session ends, with or without an
    error. `attempt` is None if no job script started this rank; `agent` is the process that did, 0 if it need not
    outlive it. `hold` is of rank 0; on every rank: `run_id`, whether the run `starts_over` (`begin` sets an earlier one
    aside), and what `begin` is `to_write`. `task_limit` limits processes and threads, as it was before any rank had
    loader processes; `temporary` is what is wrong with the folder for temporary files ("": nothing).
    """

    resolution: Resolution
    ranks: Ranks
    mesh: Mesh
    precision: Precision
    recorder: Recorder
    signals: SignalWatch
    own_model: bool = False
    settled: bool = False
    facts: DataFacts | None = None
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
    temporary: str = ""
    reading: WorkerChoice | None = None
    """The loader processes that data.workers = "auto" has chosen on this rank, once it has."""
    damage: DamageFound = field(default_factory=DamageFound)
    """The damaged samples that this rank has left out."""
    tuned: dict[str, Any] | None = None
    """What the event `tuned` says, if train.tune has measured."""
    windows: StagedWindows | None = None
    """What stages the data while the run trains, if some node does."""

    @property
    def resolved(self) -> Resolved:
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
            self.record_reason(event, text)

    def record_reason(self, event: str, text: str) -> None:
        """An event with a reason, after the last step that is done; rank 0 writes it."""
        self.recorder.event(event, step=self.recorder.step_done, reason=text)

    def take_default(self, dotted: str, value: Any, origin: str) -> None:
        """A value for a key that is not set; what the data have completed stays completed."""
        resolution = self.resolution.with_default(dotted, value, origin)
        if resolution is not self.resolution and self.facts is not None:
            resolution = replace(resolution, resolved=resolve_with_data(resolution.resolved, self.facts))
        self.resolution = resolution

    def settle(self, facts: DataFacts, keep: Callable[[str], bool] = lambda dotted: True) -> None:
        """Complete the resolved run with the facts of the open data; `begin` writes down the keys that `keep` selects.

        Raises UserError on every rank if the run does not fit the data or what was trained here before.
        """
        self.resolution, self.facts = replace(self.resolution, resolved=resolve_with_data(self.resolved, facts)), facts
        section, local = self.resolved.values.checkpoint, False
        if section.local_every != "off":  # there may be a checkpoint of this run on the disk of some node
            here = self.ranks.together(lambda: bool(find_local_run(section.local_dir, self.run_id).steps()))
            local = any(self.ranks.gather(here))

        def check_request() -> None:
            if self.ranks.is_first:
                self.directory.confirm_writer()
                saved = self.directory.read_resolved() if local or self.list_saved() else {}
                check_same_run(saved, self.resolved, str(self.directory.path))
                self.changes = find_changes(saved, self.resolved)

        self.ranks.together(check_request)
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
        held = self.ranks.together(lambda: hold.begin(self.to_write) if hold is not None else None)
        epoch = self.ranks.gather(held.epoch if held is not None else 0)[0]
        if self.starts_over:
            self.lease = (held if held is not None else self.resolution.directory.beside(epoch)).lease
        self.starts_over = False
        self.recorder.open(self.directory)
        values, placement = self.resolved.values, self.ranks.placement
        if values.run.telemetry != "off" and placement.local_rank == 0 and placement.launcher != "shardway":
            self.at_end.enter_context(sampled(self._describe_sampled(values.run.telemetry)))
        if values.track.to and self.ranks.is_first:
            configuration = values.model_dump(mode="json")
            thread = TrackerThread(self.directory, values.track.to, values.track.settings, configuration)
            self.recorder.trackers = thread

    def _describe_sampled(self, every_s: float) -> SampledRun:
        """How this node is sampled where no agent of ours does it: with its other ranks, which have the same parent."""
        placement, attempt = self.ranks.placement, self.attempt
        marker = "" if attempt is None else f"{VARIABLE}={os.environ.get(VARIABLE, '')}"
        return SampledRun.of_attempt(
            attempt.path if attempt is not None else None,
            self.directory.telemetry_folder,
            every_s,
            os.getppid() if placement.local_world > 1 else os.getpid(),
            os.environ,
            node=placement.node or 0,
            marker=marker,
        )


# --- opening a run


@contextlib.contextmanager
def open_session(request: ResolveRequest, environ: Mapping[str, str]) -> Iterator[Session]:
    """Resolve the request, join the ranks, take the run directory. Raises ShardwayError on every rank alike."""
    attempt, placement = find_attempt(environ), find_placement(environ)
    if attempt is not None and placement.rank == 0:
        attempt.note_began()
    agent = find_agent(environ) if placement.has_agent else 0
    if agent:
        stop_with_parent()
    if attempt is not None and request.own_model:  # where a stop is asked for; a directory that is set holds before it
        request = replace(request, directory=attempt.run_path)
    with failure_reported(_share_of(attempt, placement), describe=_describe_error):
        monitor = None
        if placement.launcher == FT_LAUNCHER:
            from shardway.ranks.ft_launcher_client import open_monitor

            monitor = open_monitor()
        page = open_heartbeat(environ, placement.local_rank) if monitor is None else monitor
        progress = Progress(page, process_start=find_process_start(attempt, environ))
        loaded = load_run(request.run_file, request.overrides)
        if request.own_model and (threads := find_script_threads()) is not None:
            loaded = loaded.with_default("run.threads", threads, "torch.get_num_threads() before shardway.start")
        resolution = resolve_loaded(request, loaded, placement.world, placement.local_world)
        check_variables(resolution.loaded)
        values = resolution.resolved.values
        run, engine = values.run, ENGINES[values.train.engine]
        engine.check_installed()
        limits = run.start_timeout, run.collective_timeout
        options = StartOptions(run.device, int(run.threads), *limits, group_alone=engine.needs_group)
        ranks = start_ranks(placement, options)
        if monitor is not None:
            monitor.watch(read_hang_timeout(run))
        with left_at_once(ranks.world), hold_session(resolution, ranks, attempt, progress) as session:
            session.agent = agent
            yield session
    ranks.end()


@contextlib.contextmanager
def hold_session(
    resolution: Resolution, ranks: Ranks, attempt: Attempt | None = None, progress: Progress | None = None
) -> Iterator[Session]:
    """The session of a resolved run on ranks that have started; they are left as they are when it ends."""
    progress, task_limit, temporary = progress or Progress(), read_task_limit(), settle_temporary()
    own_model = resolution.request.own_model
    with contextlib.ExitStack() as stack:

        def take() -> DirectoryHold | None:
            if not ranks.is_first:
                return None
            track = resolution.resolved.values.track
            if track.to:
                check_trackers(track.to, track.settings, os.environ)
            job = attempt.path.name if attempt is not None else ""
            hold = DirectoryHold(resolution.directory, job, fresh=resolution.request.fresh)
            stack.callback(hold.end)
            if not hold.starts_over:
                with refusals(resolution.directory.path):
                    hold.before = read_before(resolution.directory, resolution.resolved.values)
            return hold

        hold = ranks.together(take)
        held = (hold.directory.epoch, hold.run_id, hold.starts_over, hold.before) if hold is not None else None
        reports = ranks.gather((held, look_here(resolution, ranks.device)))
        epoch, run_id, starts_over, before = reports[0][0] or (0, "", False, {})
        resolution = agree(resolution, [report for _, report in reports], before)
        resolved, values = resolution.resolved, resolution.resolved.values
        stack.enter_context(tf32_put_back(ranks.device))
        leaves_tf32 = TF32 in resolved.circumstances.settled and resolved.is_derived(TF32)
        apply_backend_switches(values, ranks.device, leaves_tf32=leaves_tf32)
        directory = hold.directory if hold is not None else resolution.directory.beside(epoch)
        # An agent of Shardway reports the end of an attempt itself: it may start the ranks again.
        reported = None if ranks.placement.launcher == "shardway" else attempt
        every_rank = values.data.record_ids
        recorder = Recorder(directory, ranks, every_rank=every_rank, attempt=reported, progress=progress)
        if ranks.is_first and (values.notify.mail or values.notify.webhook):
            for lack in find_lacks(values.notify, os.environ):
                logging.getLogger("shardway").warning(lack)
            stack.callback(_notify_owner, recorder, directory, ranks.placement, values.notify, attempt)
        stack.callback(recorder.close)
        mesh = build_mesh(ranks, values.parallel)
        seeds = seed_untouched if own_model and resolved.origins["train.seed"] == DEFAULT else seed_all
        seeds(values.train.seed, ranks.rank)
        # In a notebook a signal is for its cell or its kernel, which go on when this run has ended.
        signals = stack.enter_context(SignalWatch(STOP_SIGNALS if find_shell() is None else (BREAK,)))
        share = _share_of(attempt, ranks.placement, lambda: recorder.step_done)
        with failure_reported(share, describe=_describe_error), _faults_recorded(recorder, own_model=own_model):
            session = Session(
                resolution=resolution,
                ranks=ranks,
                mesh=mesh,
                precision=read_precision(values.precision),
                recorder=recorder,
                signals=signals,
                own_model=own_model,
                at_end=stack,
                attempt=attempt,
                progress=progress,
                lease=directory.lease,
                hold=hold,
                run_id=run_id,
                starts_over=starts_over,
                task_limit=task_limit,
                temporary=temporary,
            )
            last_report = ExitReport(
                session.directory,
                ranks.rank,
                values.run.stop_timeout,
                resolved.origins["run.stop_timeout"],
                progress,
                attempt,
                may_write=lambda: recorder.is_open,
            )
            session.stop_watchdog = stack.enter_context(last_report.watchdog(signals))
            yield session


def _notify_owner(
    recorder: Recorder, directory: RunDir, placement: Placement, section: NotifySection, attempt: Attempt | None
) -> None:
    """Send how the run ended; of ranks that an agent of ours may start again, not that they failed, and of an attempt
    whose time is over, nothing where the next one is queued."""
    if recorder.ended is None:
        return
    state, end = recorder.ended
    if state == "failed" and placement.launcher == "shardway":
        return
    if end.state in (Ending.DEADLINE, Ending.PREEMPTED) and attempt is not None:
        following = directory.attempt(attempt.number + 1).read_submission()
        if following is not None and following.job:
            return
    kind = "failure" if state == "failed" else "end"
    for failure in notify(directory, section, kind, state, end.reason):
        logging.getLogger("shardway").warning(failure)


@contextlib.contextmanager
def _faults_recorded(recorder: Recorder, *, own_model: bool) -> Iterator[None]:
    """Write down what ends this rank; recording is best effort here, the error itself matters more."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(JobError):
            recorder.end("stopped", AttemptEnd(Ending.STOPPED, SECOND_SIGNAL), KILLED)
        raise
    except Exception as error:
        named: Exception = error
        if not isinstance(error, ShardwayError) and (why := explain_limit(error)):
            named = JobError(why)  # a limit of this machine was reached; the ranks may start again
        fault = describe_error(named, out_of_memory=is_out_of_memory(error))
        memory = {"out_of_memory": True} if fault.out_of_memory else {}
        kind, message = fault.kind if isinstance(named, ShardwayError) else Bug.__name__, fault.message
        if not isinstance(error, ShardwayError) and not fault.out_of_memory:
            first, *rest = message.splitlines() or [""]
            message = "\n".join((f"{first} (after step {recorder.step_done})", *rest))
        facts = {"kind": kind, "exit_code": fault.exit_code, "message": message, **memory}
        with contextlib.suppress(JobError):
            recorder.fault(**facts)
            if recorder.is_open:
                recorder.failed(render_reason(message))
        if named is error:
            raise
        if own_model:  # if a script opens too many files, its traceback shows it
            error.add_note(str(named))
            raise
        raise named from error


def _share_of(attempt: Attempt | None, placement: Placement, find_step: Callable[[], int] = lambda: 0) -> AttemptShare:
    """What a rank has to report: nothing if the ranks start again, or if an agent of ours does it."""
    reports = placement.launcher != "shardway" and not placement.starts_again
    return AttemptShare(attempt if reports else None, f"rank {placement.rank}", find_step)


def _describe_error(error: Exception) -> RankFault:
    return describe_error(error, out_of_memory=is_out_of_memory(error))


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


# --- rank 0's hold of a run directory


class DirectoryHold:
    """One process's right to write a run directory.

    `starts_over`: there is an earlier run that `begin` sets aside. `run_id` is the id of the run, also before it is
    written; `before` the settings that it computed with so far (`resolve.request.read_before`).
    """

    def __init__(self, directory: RunDir, job: str, *, fresh: bool) -> None:
        """Take the right to write a directory, make it if it is missing, and check that its run can be continued.

        Raises UserError if another run holds it, or if it is not a run's or of a newer format; JobError if no
        checkpoint can be read.
        """
        directory.check_no_strangers()
        existed = directory.exists()
        if existed:
            directory.check_format()
        # Folders that are made here, innermost first.
        self._made = list_missing(directory.checkpoints) if existed else list_missing(directory.path)
        self.directory, self._lock = directory, directory.writer_lock(job)
        self.starts_over, self.run_id = fresh and existed, ""
        self.before: Mapping[str, Any] = {}
        self._fenced: list[tuple[Path, Path]] = []
        self._begun = False
        try:
            directory.create(empty=not existed)
            self._lock.acquire(logging.getLogger("shardway").warning)
            self.directory = replace(directory, lease=self._lock.lease)
            self._fenced = self.directory.fence_saves()
            if not self.starts_over:  # the id that the directory has, else that of its checkpoints
                newest = peek_latest(self.directory)
                self.run_id = find_run_id(directory.path) or (newest.run if newest is not None else "")
            self.run_id = self.run_id or uuid.uuid4().hex
        except BaseException:
            self.end()
            raise

    def begin(self, to_write: Sequence[Callable[[RunDir], None]]) -> RunDir:
        """The run begins: set an earlier one aside if it starts over, and write the request.

        Returns the directory, with the right that is held from now on. Raises JobError, UserError, Fenced.
        """
        self.directory.confirm_writer()
        if self.starts_over:
            self._lock.withdraw()
            self.directory.set_aside()
            self.directory.create()
            self._lock.acquire()
            self.directory = replace(self.directory, lease=self._lock.lease)
        self._begun = True
        self.directory.create()
        self._lock.prune()
        remove_leftovers(self.directory)
        ensure_run_id(self.directory.path, self.run_id)
        with refusals(self.directory.path):
            for write in to_write:
                write(self.directory)
        return self.directory

    def end(self) -> None:
        """Release the right; what was written before `begin` is removed, unless a script has put files of its own
        here."""
        if not self._begun:
            with contextlib.suppress(Exception):
                if not self.directory.exists() and set(list_names(self.directory.path)) - OWN_NAMES:
                    self._begun = True  # it is a run directory from now on, so that the next start takes it
                    self.directory.create()
        if self._begun:
            self._lock.release()
            return
        self.directory.unfence_saves(self._fenced)
        self._lock.withdraw()
        for folder in self._made:
            with contextlib.suppress(OSError):  # another process has written there meanwhile
                folder.rmdir()


# --- number formats and compilation: what the device, the script and its models say


@dataclass(frozen=True)
class RankReport:
    """The report of one rank on its device (None: a CPU), and on what its script has set in torch."""

    device: DeviceFacts | None
    script: Mapping[str, Settled]


def look_here(resolution: Resolution, device: torch.device) -> RankReport:
    """The report of this rank, before it changes any setting of torch."""
    facts, resolved = _look_at(device), resolution.resolved
    if facts is not None and not facts.no_compiler and resolved.values.train.compile == "blocks":
        try:
            set_compile_cache(resolved.values.train.compile_cache)
        except UserError as error:
            if resolved.is_derived(COMPILE):
                facts = replace(facts, no_compiler=render_reason(str(error)))
    script = {}
    if resolution.request.own_model:
        if torch.is_autocast_enabled(device.type):
            script[COMPUTE] = Settled("fp32", "the script has an autocast of its own")
        if device.type == "cuda" and (tf32 := read_tf32_of_script()) is not None:
            script[TF32] = tf32
    return RankReport(facts, script)


def _look_at(device: torch.device) -> DeviceFacts | None:
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return replace(facts_of_cuda(name, None), kind="rocm", has_tf32=False)
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return facts_of_cuda(name, torch.cuda.get_device_capability(device), native)


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


def resolve_for_model(session: Session, model: nn.Module, *, is_first: bool) -> tuple[Precision, str]:
    """The formats of a model and its `train.compile`. The needs of a script's first model are settled for the run; a
    further one that needs something else has it for itself, which is reported."""
    if session.settled and not session.own_model:
        return session.precision, session.resolved.values.train.compile
    settled = _fit_to_model(session.resolved, model)
    own = session.resolved.with_values(settled)
    values, precision = own.values, read_precision(own.values.precision)
    plain = values.train.engine == "torch" and values.parallel.pp == 1 and values.precision.weights == "fp32"
    if plain and own.is_derived(COMPUTE) and values.precision.compute == "bf16":
        # Default bf16 ends with the forward pass: a loss written for fp32 may not be computable under autocast.
        precision = left_to_model(precision)
    if is_first:  # the model is made for these values, so they are fixed for later resolving
        known = {
            key: Settled(value_of(values, key), own.origins[key].removeprefix(DERIVED))
            for key in KEYS
            if own.is_derived(key)
        }
        circumstances = replace(own.circumstances, settled=known)
        session.resolution = replace(session.resolution, resolved=replace(own, circumstances=circumstances))
        session.precision = precision
    for key, each in settled.items() if session.ranks.is_first and not is_first else ():
        # No event: nothing is written before the run goes on.
        reported = f"{type(model).__name__} alone has {key} = {each.value}: {each.reason}."
        logging.getLogger("shardway").warning(reported)
    return precision, values.train.compile


def _fit_to_model(resolved: Resolved, model: nn.Module) -> dict[str, Settled]:
    """Keys that are left to the device and that the model sets otherwise, with the reason."""
    settled, values, kind = {}, resolved.values, type(model).__name__
    narrows = values.precision.compute not in ("fp32", "auto") and values.precision.weights == "fp32"
    if resolved.is_derived(COMPUTE) and narrows:
        odd = ((name, str(each.dtype)) for name, each in model.named_parameters() if each.dtype != torch.float32)
        own = [f"parameters in {dtype.removeprefix('torch.')} ({name})" for name, dtype in odd]
        own += [f"complex buffers ({name})" for name, each in model.named_buffers() if each.is_complex()]
        if own:
            settled[COMPUTE] = Settled("fp32", f"{kind} has {own[0]} and is computed in its own formats")
    if resolved.is_derived(COMPILE) and values.train.compile == "blocks" and values.recompute.mode != "budget":
        plan = find_plan(model)
        if plan is None or not plan.blocks:
            settled[COMPILE] = Settled("off", f"{kind} has no plan() that names its blocks")
        elif drops(model):
            settled[COMPILE] = Settled("off", DROPS)
    return settled


def keep_formats(session: Session, model: nn.Module, precision: Precision) -> None:
    """Let a model that has formats of its own for products keep them until the run ends."""
    if precision.model_dtype is not None:
        session.at_end.callback(autocast_model(model, session.ranks.device, precision.model_dtype))


@contextlib.contextmanager
def format_named(resolved: Resolved, precision: Precision) -> Iterator[None]:
    """Add to an error of a step that its format is a default, which may be the cause."""
    try:
        yield
    except RuntimeError as error:
        if precision.model_dtype is not None and not is_out_of_memory(error):
            error.add_note(
                f"precision.compute is {resolved.values.precision.compute} here by default "
                f"({resolved.origins[COMPUTE].removeprefix(DERIVED)}). If the model cannot be computed so: "
                "set precision.compute=fp32."
            )
        raise
