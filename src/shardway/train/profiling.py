"""Captures of a run: a profiler around some of its steps, whose traces are written into `traces/` of its directory.

Steps are captured where `train.profile` names them, or after `touch RUN/profile`. torch's profiler is always used in
the same way: one step of warm-up whose events are dropped, shapes recorded, no Python stacks, and each step named by
its number in the run (`ProfilerStep#51`), from the fetch of its batch to the end of its update.

All ranks are captured in memory, since a rank that was captured alone would be slower than its peers, and rank 0 and
the slowest rank write their traces. The slowest is the rank that waits least for the others: in each collective of
these steps ranks wait until the last one is there, so the sum of a rank's times in collectives (NCCL's kernels, Gloo's
calls) is the smaller the later the rank comes, whatever makes it late.

Invariants:
- A capture changes no number of the run: it draws nothing, and passes that are not replayed as CUDA graphs yet are not
  timed or captured as graphs meanwhile.
- Ranks begin and end a capture after the same steps: the run file names them, or rank 0 saw the file and all ranks read
  that from the sum of requests, as they do for a stop.
- A profiler that fails is an event, on whichever rank; every rank takes part in the same exchanges all the same.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardway.errors import render_reason
from shardway.models.contract import held_by_rank
from shardway.rundir.directory import RunDir
from shardway.runfile.capture import CaptureRange, parse_capture_request
from shardway.telemetry.activity import Activity
from shardway.train.cuda_graphs import GraphedPasses
from shardway.train.session import Session
from shardway.units import render_seconds
from shardway.watch.words import render_size

STEPS_BEFORE = 20  # steps whose median time is what captured steps are compared with
SETTLING = 3  # steps of an attempt that are not among them: kernels are compiled and memory is found
COMPRESSION = 4  # of gzip: a tenth of the size, at some 50 MB/s

WAITING = ("ncclDevKernel", "ncclKernel", "gloo:")
"""What names of events begin with that last from a rank's arrival at a collective to its end."""

FINISHED = "the steps that train.profile names are captured"


@dataclass(frozen=True)
class RankCapture:
    """What one rank has captured: its time in collectives (None: there were none), and what failed ("": nothing)."""

    waited_s: float | None
    failure: str = ""


@dataclass(frozen=True)
class WrittenTrace:
    """The file that a rank has written ("": none), its bytes, the seconds that it took, and what failed."""

    name: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    failure: str = ""


class TraceCapture:
    """One capture on this rank: the profiler of the steps `first` to `last`, after that of the warm-up before them."""

    def __init__(self, first: int, last: int, device: str, about: Callable[[], dict[str, Any]]) -> None:
        """Begin with the warm-up: the next step is `first` - 1. `about` is what the trace states of its run."""
        self._first, self._last, self._about = first, last, about
        self._profiler: Any = None
        self.failure = ""
        self.is_ready = False
        self._try(lambda: self._start(device))

    def _start(self, device: str) -> None:
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        first, last = self._first, self._last

        def action(step: int) -> ProfilerAction:
            if step < first:
                return ProfilerAction.WARMUP
            if step > last:
                return ProfilerAction.NONE
            return ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.RECORD

        def ready(_: Any) -> None:
            self.is_ready = True

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        profiler = profile(
            activities=activities, schedule=action, on_trace_ready=ready, record_shapes=True, with_stack=False
        )
        profiler.step_num = first - 1
        profiler.start()
        self._profiler = profiler

    def next_step(self) -> None:
        """The next step begins."""
        if self._profiler is not None:
            self._try(self._profiler.step)

    def stop(self) -> None:
        """The last step has ended; a second call does nothing."""
        if self._profiler is None or self.is_ready:
            return

        def end() -> None:
            for name, value in self._about().items():
                self._profiler.add_metadata(name, str(value))
            self._profiler.__exit__(None, None, None)

        self._try(end)

    def waited_s(self) -> float | None:
        """The seconds of this rank in collectives; None without any."""
        if self._profiler is None or not self.is_ready:
            return None
        events = self._profiler.profiler.kineto_results.events()
        spans = [event.duration_ns() for event in events if event.name().startswith(WAITING)]
        return sum(spans) / 1e9 if spans else None

    def write(self, run: RunDir, rank: int, last: int) -> WrittenTrace:
        """Write the trace, whose last step is `last`. Raises what the profiler or the file system raises."""
        started = time.perf_counter()
        run.traces.mkdir(exist_ok=True)
        path = run.trace_path(self._first, last, rank)
        plain, packed = run.trace_parts(path)
        try:
            self._profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=COMPRESSION) as target:
                shutil.copyfileobj(source, target, 2**20)
            packed.rename(path)
        finally:
            for left in (plain, packed):
                left.unlink(missing_ok=True)
        return WrittenTrace(path.name, path.stat().st_size, time.perf_counter() - started)

    def _try(self, work: Callable[[], object]) -> None:
        """Do what may fail; a profiler that has failed is left, and ended as far as it can be."""
        try:
            work()
        except Exception as error:  # whatever a profiler of torch or of a vendor raises
            self.failure = self.failure or render_reason(f"{type(error).__name__}: {error}")
            failed, self._profiler = self._profiler, None
            if failed is not None:
                with contextlib.suppress(Exception):
                    failed.stop()


class Profiling:
    """The captures of one attempt, on one rank. `asked`: the range of the run file, None for none; `replays`: what
    replays passes as CUDA graphs, if something does. `file_obeyed` is called when the file has been read. `updated`
    lists what optimizers update."""

    def __init__(
        self,
        session: Session,
        asked: CaptureRange | None,
        replays: Sequence[GraphedPasses],
        file_obeyed: Callable[[], None],
        updated: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._session, self._asked, self._replays, self._file_obeyed = session, asked, replays, file_obeyed
        self._updated = updated
        self._capture: TraceCapture | None = None
        self._range: CaptureRange | None = None
        self._before: deque[float] = deque(maxlen=STEPS_BEFORE)
        self._inside: list[float] = []
        self._taken = 0  # steps of this attempt
        self._step, self._is_stale = 0, False
        self.has_finished = False
        """Whether the run ends here, since the range asked for that."""
        session.at_end.callback(self._abandon)

    def begin_step(self, step: int) -> None:
        """The step after `step` begins, on all ranks."""
        if self._range is not None:
            if self._capture is not None:
                self._capture.next_step()
        elif self._asked is not None and step + 2 >= self._asked.first:
            asked, self._asked = self._asked, None
            if step + 2 <= asked.last:
                self._begin(replace(asked, first=step + 2))
            else:
                self._fail(step, f"no trace of {asked}: the attempt began at step {step}, and one step is a warm-up")

    def end_step(self, step: int, seconds: float, *, file_seen: bool) -> bool:
        """A step has ended, on all ranks, of which one has seen the file; returns whether the run is to finish here."""
        self._taken += 1
        self._step = step
        if self._range is not None:
            if step >= self._range.first:
                self._inside.append(seconds)
            if step >= self._range.last:
                self.has_finished = self._range.finishes
                self._finish(step)
        else:
            if self._taken > SETTLING:
                self._before.append(seconds)
            if file_seen and not self._is_stale:
                self._obey_file(step)
        return self.has_finished

    def close(self, step: int) -> None:
        """The loop ends, on all ranks: what is captured by then is written."""
        if self._range is not None:
            self._range = replace(self._range, last=step)
            if self._inside:
                self._finish(step)
            else:
                self._abandon()
                self._fail(step, "no trace: the run ended before the first step that was to be captured")

    # --- parts

    def _obey_file(self, step: int) -> None:
        """Read the file on rank 0, take it away, and begin what it asks for."""
        session = self._session
        own = self._read_file() if session.ranks.is_first else (0, None, "", False)
        steps, rank, wrong, self._is_stale = session.ranks.gather(own)[0]
        self._file_obeyed()
        if wrong:
            self._fail(step, wrong)
        if steps:
            self._begin(CaptureRange(step + 2, step + 1 + steps, rank))

    def _read_file(self) -> tuple[int, int | None, str, bool]:
        """Steps (0: nothing is captured) and rank that the file asks for, what is wrong with it, and whether it could
        not be taken away, so that it is not obeyed a second time."""
        run, world = self._session.directory, self._session.ranks.world
        try:
            text = run.take_profile_request()
        except FileNotFoundError:
            return 0, None, "", False
        except OSError as error:
            return 0, None, f"no trace: {run.profile_path} cannot be taken away: {error.strerror}", True
        try:
            steps, rank = parse_capture_request(text)
        except ValueError as error:
            return 0, None, f"no trace: {run.profile_path}: {error}", False
        if rank is not None and rank >= world:
            return 0, None, f"no trace: {run.profile_path} names rank {rank}; allowed: 0 to {world - 1}", False
        return steps, rank, "", False

    def _begin(self, range_: CaptureRange) -> None:
        session, self._range, self._inside = self._session, range_, []
        for each in self._replays:
            each.is_profiled = True
        if range_.rank is None or range_.rank == session.ranks.rank:
            self._capture = TraceCapture(range_.first, range_.last, session.ranks.device.type, self._describe)

    def _finish(self, step: int) -> None:
        """End the capture and write what rank 0 and the slowest rank have; in one exchange before and one after it."""
        session, range_, capture = self._session, self._range, self._capture
        if range_ is None:
            return
        ranks, activity = session.ranks, session.progress.activity
        session.progress.enter(Activity.SAVE, step)
        own = RankCapture(None)
        if capture is not None:
            capture.stop()
            waited = None
            with contextlib.suppress(Exception):
                waited = capture.waited_s()
            own = RankCapture(waited, capture.failure or ("" if capture.is_ready else "it gave no trace"))
        found: list[RankCapture] = ranks.gather(own)
        slowest = find_slowest(found)
        chosen = {0, slowest} if range_.rank is None else {range_.rank}
        written = WrittenTrace()
        if capture is not None and ranks.rank in chosen and not own.failure:
            try:
                written = capture.write(session.directory, ranks.rank, range_.last)
            except Exception as error:  # a full disk, or what the profiler raises
                written = WrittenTrace(failure=f"{type(error).__name__}: {error}")
        traces: list[WrittenTrace] = ranks.gather(written)
        self._abandon()
        failures = {
            rank: each.failure or found[rank].failure
            for rank, each in enumerate(traces)
            if rank in chosen and (each.failure or found[rank].failure)
        }
        if any(each.name for each in traces):
            self._report(step, range_, slowest if range_.rank is None and ranks.world > 1 else None, traces)
        for rank, failure in failures.items():
            self._fail(step, f"no trace of rank {rank}: {render_reason(failure)}")
        session.progress.enter(activity, step)

    def _report(self, step: int, range_: CaptureRange, slowest: int | None, traces: Sequence[WrittenTrace]) -> None:
        before = statistics.median(self._before) if self._before else None
        inside, folder = statistics.median(self._inside), self._session.directory.traces.name
        files = [f"{folder}/{each.name}" for each in traces if each.name]
        size, seconds = sum(each.size_bytes for each in traces), max(each.seconds for each in traces)
        about = f", rank {slowest} waits least for the others" if slowest is not None else ""
        slower = f" ({inside / before:.2f} times that of the {len(self._before)} steps before)" if before else ""
        reason = (
            f"a trace of steps {range_.first}-{range_.last} is in {' and '.join(files)}{about}; captured steps took "
            f"{render_seconds(_rounded(inside))}{slower}, writing {render_seconds(_rounded(seconds))} and "
            f"{render_size(size)}"
        )
        facts = {
            "first": range_.first,
            "last": range_.last,
            "files": files,
            "slowest": slowest,
            "step_seconds": inside,
            "before_seconds": before,
            "bytes": size,
            "seconds": seconds,
        }
        if any(each.is_replaying for each in self._replays):
            reason += "; passes were replayed as CUDA graphs, so that it has their kernels without operators and shapes"
            facts["replayed"] = True
        self._session.recorder.event("profiled", step=step, **facts, reason=reason)

    def _fail(self, step: int, reason: str) -> None:
        if self._session.ranks.is_first:
            self._session.recorder.event("profile_failed", step=step, reason=render_reason(reason))

    def _describe(self) -> dict[str, Any]:
        """Facts of the run for the trace, without names of places or persons."""
        session, values = self._session, self._session.resolved.values
        degrees = {axis: session.mesh.degree(axis) for axis in ("dp_replicate", "pp", "dp_shard", "cp", "tp", "ep")}
        updated = [held_by_rank(each) for each in self._updated()]
        return {
            "shardway_rank": session.ranks.rank,
            "shardway_updated": sum(each.numel() for each in updated),
            "shardway_updated_bytes": sum(each.numel() * each.element_size() for each in updated),
            "shardway_world": session.ranks.world,
            "shardway_layout": " ".join(f"{axis}={degree}" for axis, degree in degrees.items()),
            "shardway_compile": values.train.compile,
            "shardway_replays": any(each.is_replaying for each in self._replays),
            "shardway_step_seconds_before": statistics.median(self._before) if self._before else "n/a",
        }

    def _abandon(self) -> None:
        """Leave a capture without a trace, as at the end of the session."""
        capture, self._capture, self._range = self._capture, None, None
        for each in self._replays:
            each.is_profiled = False
        if capture is not None:
            capture.stop()


def find_slowest(found: Sequence[RankCapture]) -> int:
    """The rank that waits least for the others; 0 where no rank waits in collectives."""
    waited = {rank: each.waited_s for rank, each in enumerate(found) if each.waited_s is not None}
    return min(waited, key=lambda rank: waited[rank]) if waited else 0


def _rounded(seconds: float) -> float:
    """Seconds with two digits that matter."""
    return float(f"{seconds:.2g}")


def list_traces(run: RunDir) -> list[Path]:
    """The traces of a run, oldest first."""
    with contextlib.suppress(OSError):
        found = [path for path in run.traces.iterdir() if path.name.endswith(".json.gz") and path.name[0] != "."]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)
    return []
