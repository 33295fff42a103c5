"""Opens and closes what every run needs around its steps: ranks, grid, run directory, recorder, signals.

Invariant: nothing is written into a run directory before its lock is held, and a second writer is refused on all
ranks. On the clean path the process group is left in order; on the error path it is not, since a peer may be dead.
This module must not know models or data.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardway.checkpoint.load import peek_latest
from shardway.checkpoint.retention import remove_leftovers
from shardway.checkpoint.state import seed_all
from shardway.errors import Bug, JobError, ShardwayError, render_reason
from shardway.hardware.facts import render_machine
from shardway.hardware.probe import probe_machine
from shardway.parallel.formats.precision import Precision, read_precision
from shardway.parallel.mesh import Mesh, build_mesh
from shardway.parallel.switches import apply_backend_switches
from shardway.ranks.agent.page import open_page
from shardway.ranks.agent.patience import read_patience
from shardway.ranks.attempt import describe_error, find_attempt, tell_fault
from shardway.ranks.began import find_began
from shardway.ranks.launcher import Placement, find_placement
from shardway.ranks.leave import left_at_once
from shardway.ranks.lookout import Duties, Lookout
from shardway.ranks.monitor import open_monitor
from shardway.ranks.parent import find_agent, stop_with_parent
from shardway.ranks.progress import Progress
from shardway.ranks.signals import SignalWatch
from shardway.ranks.start import Ranks, StartOptions, is_out_of_memory, start_ranks
from shardway.resolve import DataFacts, Resolved, check_same_run, find_changes, resolve_with_data
from shardway.resolve.request import Request, Resolution, resolve_request
from shardway.rundir.attempts import SECOND_SIGNAL, Attempt, Ending
from shardway.rundir.directory import RunDir
from shardway.rundir.lease import Tenure
from shardway.rundir.local import find_local_run
from shardway.rundir.refusal import refusals
from shardway.rundir.run_id import ensure_run_id, find_run_id
from shardway.runfile.load import DEFAULT
from shardway.train.ending import End
from shardway.train.engines import ENGINES
from shardway.train.last_words import KILLED, Speaker
from shardway.train.record import Recorder


@dataclass
class Session:
    """One rank's view of a run.

    `resolution` is completed when the data is open; `own_model` tells a script that brings its own model and data
    from a run that its run file describes whole. `at_end` is unwound when the session ends, well or badly. `attempt` is
    None where no job script started this rank; `agent` the process that did, 0 where that need not outlive it.
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
    tenure: Tenure | None = None
    agent: int = 0
    lookout: Lookout = field(default_factory=lambda: Lookout(SignalWatch(), Duties()))
    noted: set[str] = field(default_factory=set)

    @property
    def resolved(self) -> Resolved:
        """The run as it is resolved so far."""
        return self.resolution.resolved

    @property
    def directory(self) -> RunDir:
        """Where the run writes, and by which right."""
        return replace(self.resolution.directory, tenure=self.tenure)

    def leaves_alone(self, dotted: str) -> bool:
        """Whether a default must not touch a script that owns its model: what it did not ask for does not happen."""
        return self.own_model and self.resolved.origins[dotted] == DEFAULT

    def note_once(self, event: str, text: str) -> None:
        """Say something once to a person who reads the output of rank 0, and write it down."""
        if text not in self.noted and self.ranks.is_first:
            logging.getLogger("shardway").warning(text)
            self.recorder.event(event, step=self.recorder.step_done, reason=text)
        self.noted.add(text)

    def settle(self, facts: DataFacts, keep: Callable[[str], bool] = lambda dotted: True) -> None:
        """Complete the resolved run with what the opened data says, and write down the keys that `keep` wants.

        Raises UserError on every rank where the run does not fit the data or what was trained here before.
        """
        resolved = resolve_with_data(self.resolved, facts)
        self.resolution = replace(self.resolution, resolved=resolved)
        keeps_local = resolved.values.checkpoint.local_every != "off"
        local = keeps_local and any(self.ranks.gather(self.ranks.together(self._has_local)))
        self.ranks.together(lambda: self._write_request(keep, local=local) if self.ranks.is_first else None)
        self.settled = True

    def _has_local(self) -> bool:
        """Whether there is a checkpoint of this run on the disk of this node. Raises UserError."""
        local = find_local_run(self.resolved.values.checkpoint.local_dir, find_run_id(self.directory.path))
        return bool(local.steps())

    def _write_request(self, keep: Callable[[str], bool], *, local: bool) -> None:
        self.directory.confirm_writer()
        saved = self.directory.read_resolved() if local or self.directory.checkpoint_steps() else {}
        check_same_run(saved, self.resolved, str(self.directory.path))
        self.changes = find_changes(saved, self.resolved)
        with refusals(self.directory.path):
            self.directory.write_request(self.resolution.loaded.text, self.resolved.render(keep))


@contextlib.contextmanager
def open_session(request: Request, environ: Mapping[str, str]) -> Iterator[Session]:
    """Resolve the request, join the ranks, take the run directory. Raises ShardwayError on every rank alike."""
    attempt = find_attempt(environ)
    placement = find_placement(environ)
    agent = find_agent(environ) if placement.has_agent else 0
    if agent:
        stop_with_parent()
    with _failure_told(attempt, placement):
        monitor = open_monitor(placement)
        page = open_page(environ, placement.local_rank) if monitor is None else monitor
        progress = Progress(page, began=find_began(attempt, environ))
        ranks, resolution = _join(_placed(request, attempt), placement)
        if monitor is not None:
            monitor.watch(read_patience(resolution.resolved.values.run))
        with left_at_once(ranks.world), hold_session(resolution, ranks, attempt, progress) as session:
            session.agent = agent
            yield session
    ranks.end()


def _placed(request: Request, attempt: Attempt | None) -> Request:
    """A script in a job trains into the run directory of its job, where a stop is asked for, unless it sets another."""
    return replace(request, directory=attempt.run_path) if attempt is not None and request.own_model else request


def _join(request: Request, placement: Placement) -> tuple[Ranks, Resolution]:
    resolution = resolve_request(request, placement.world, placement.local_world)
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
    values = resolution.resolved.values
    precision, progress = read_precision(values.precision), progress or Progress()
    apply_backend_switches(values, ranks.device)
    with contextlib.ExitStack() as stack:
        directory = _take_directory(resolution, ranks, attempt, stack)
        told = _find_told(attempt, ranks.placement)
        recorder = Recorder(directory, ranks, every_rank=values.data.record_ids, attempt=told, progress=progress)
        stack.callback(recorder.close)
        mesh = build_mesh(ranks, values.parallel)
        seed_all(values.train.seed, ranks.rank)
        signals = stack.enter_context(SignalWatch())
        with _failure_told(attempt, ranks.placement, lambda: recorder.step_done), _faults_recorded(recorder):
            own_model = resolution.request.own_model
            session = Session(resolution, ranks, mesh, precision, recorder, signals, own_model, at_end=stack)
            session.attempt, session.progress, session.tenure = attempt, progress, directory.tenure
            session.lookout = stack.enter_context(_lookout(session))
            yield session


def _lookout(session: Session) -> Lookout:
    """The thread that ends this rank where a stop takes longer than it may."""
    signals, rank, resolved = session.signals, session.ranks.rank, session.resolved
    limit, origin = resolved.values.run.stop_timeout, resolved.origins["run.stop_timeout"]
    speaker = Speaker(session.directory, rank, limit, origin, session.progress, session.attempt)
    return Lookout(signals, speaker.duties(lambda: signals.received is not None))


def _take_directory(
    resolution: Resolution, ranks: Ranks, attempt: Attempt | None, stack: contextlib.ExitStack
) -> RunDir:
    """Take the run directory on rank 0; as each rank may write into it."""
    job = attempt.path.name if attempt is not None else ""
    held = ranks.together(lambda: _hold_directory(resolution, job, stack) if ranks.is_first else resolution.directory)
    epoch = ranks.gather(held.epoch)[0]
    return held if ranks.is_first else held.beside(epoch)


def _hold_directory(resolution: Resolution, job: str, stack: contextlib.ExitStack) -> RunDir:
    """Make the directory, hold its lock, end what an earlier holder has begun, check that it can be continued."""
    directory = resolution.directory
    directory.check_no_strangers()
    existed = directory.exists()
    if existed:
        directory.check_format()
    directory.create()
    lock = directory.writer_lock(job)
    lock.acquire(logging.getLogger("shardway").warning)
    stack.callback(lock.release)
    if resolution.request.fresh and existed:
        lock.release()
        directory.set_aside()
        directory.create()
        lock.acquire()
    held = replace(directory, tenure=lock.lease)
    held.fence_saves()
    remove_leftovers(held)
    newest = peek_latest(held)
    ensure_run_id(held.path, newest.run if newest is not None else "")
    return held


@contextlib.contextmanager
def _faults_recorded(recorder: Recorder) -> Iterator[None]:
    """Write down what ends this rank; recording is best effort here, the error itself matters more."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(JobError):
            recorder.end("stopped", End(Ending.STOPPED, SECOND_SIGNAL), KILLED)
        raise
    except Exception as error:
        fault = describe_error(error, out_of_memory=is_out_of_memory(error))
        memory = {"out_of_memory": True} if fault.out_of_memory else {}
        kind = fault.kind if isinstance(error, ShardwayError) else Bug.__name__
        says_when = isinstance(error, ShardwayError) or fault.out_of_memory
        message = fault.message if says_when else _dated(fault.message, recorder.step_done)
        with contextlib.suppress(JobError):
            recorder.fault(kind=kind, exit_code=fault.exit_code, message=message, **memory)
            recorder.failed(render_reason(message))
        raise


def _dated(message: str, step: int) -> str:
    """A message whose first line says after which step it came."""
    first, *rest = message.splitlines() or [""]
    return "\n".join((f"{first} (after step {step})", *rest))


def _find_told(attempt: Attempt | None, placement: Placement) -> Attempt | None:
    """The attempt whose end its ranks tell; not where an agent of ours does, which may start them again."""
    return None if placement.launcher == "shardway" else attempt


@contextlib.contextmanager
def _failure_told(
    attempt: Attempt | None, placement: Placement, find_step: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Tell the job what ended this rank, unless the ranks start again; an agent of ours does that itself."""
    told = None if placement.launcher == "shardway" or placement.starts_again else attempt
    try:
        yield
    except Exception as error:
        tell_fault(
            told, f"rank {placement.rank}", describe_error(error, out_of_memory=is_out_of_memory(error)), find_step()
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
