"""The one place that decides when a run is saved, where, in the background or not, and which checkpoints stay.

Invariants:
- A staged copy never changes while it is in use, and has the bits, shapes, strides and placements of its source.
  Buffers are made once and reused: filling memory that was touched before is several times as fast.
- One AsyncSave writes one checkpoint, by the same functions as a blocking save. Its outcome is reported once and has no
  effect by itself. The thread never keeps alive a process that is about to end.
- Background saves and copies run one at a time and begin on all ranks in the same order, after every rank's last one
  has ended. What is written is the state at the moment when the save began.
- A copy begins once every rank's part of its source is complete; if that failed, there is none.
- A save that fails during the run costs nothing but the time until the next try, which is soon, whatever the interval;
  at the end of the run it is an error. The last save goes into the run directory, and so does what is due there while
  the disks of the nodes take nothing.
- An older checkpoint is removed only after a newer one was read back and equals what was in memory when it was saved.
  The last complete checkpoint is never removed, nor is anything that Shardway did not make.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.checkpoint.catalog import verify_checkpoint
from shardway.checkpoint.file_format import Damaged
from shardway.checkpoint.state import CheckpointState, Tensors
from shardway.checkpoint.writer import (
    CheckpointFolder,
    SavedCheckpoint,
    collect_content,
    is_saved,
    shared_place,
    write_checkpoint,
)
from shardway.errors import Fenced, JobError, LostContact, render_reason
from shardway.hardware.limits import read_memory_left
from shardway.parallel.mesh import set_apart
from shardway.plan.economy import daly_interval
from shardway.ranks.start import Ranks, is_out_of_memory
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import remove_folder
from shardway.rundir.names import LOCAL, SHARED, step_name
from shardway.watch.words import render_size

if TYPE_CHECKING:
    from shardway.checkpoint.local_tier import LocalTier, SavedRun

# --- saves in a background thread


class AsyncSave(threading.Thread):
    """A save under way: `write` runs in this thread, on all ranks together, over process groups of its own, and `then`
    after it if there was something to save.

    `tier` is where it goes. `started` is when the run stopped for it (perf_counter), `stall_s` for how many seconds.
    Once it `has_ended`: `saved` (None: there was nothing to save) or `error`, at the time `ended`.
    """

    tier, started, stall_s = SHARED, 0.0, 0.0

    def __init__(
        self,
        step: int,
        ranks: Ranks,
        write: Callable[[], SavedCheckpoint | None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=f"save of step {step}", daemon=True)
        self.step = step
        self._device, self._write, self._then = ranks.device, write, then
        self.saved: SavedCheckpoint | None = None
        self.error: BaseException | None = None
        self.ended = 0.0
        self.has_ended = False

    def run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread's device is the first, which is another rank's
            saved = self._write()
            if saved is not None:
                self._then()
            self.saved = saved
        except BaseException as caught:  # reported by the training thread
            self.error = caught
        self.ended = time.perf_counter()
        self.has_ended = True

    def wait(self) -> SavedCheckpoint | None:
        """What was saved, once it has ended; None if nothing was."""
        self.join()
        return self.saved


# --- the copy of a state in host memory

MOST_OF_MEMORY = 0.8  # the part of the free host memory that copies may take: written files are cached in the rest


class Staging:
    """The host buffers of one rank, by the place of a tensor in its state, each with the strides of the tensor it was
    made for (they differ from its own if that tensor has gaps)."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}

    def missing_bytes(self, tensors: Tensors) -> int:
        """Bytes of this rank's tensors that have no buffer yet."""
        found = ((place, tensor) for place, tensor in _plain_tensors(tensors) if not self._fits(place, tensor))
        return sum(tensor.numel() * tensor.element_size() for _, tensor in found)

    def reserve(self, tensors: Tensors) -> None:
        """Make the buffers that are missing, and touch them. Raises what torch raises if memory runs out."""
        for place, tensor in _plain_tensors(tensors):
            self._buffer(place, tensor)

    def stage(self, tensors: Tensors) -> Tensors:
        """The state as it is now: tensors as copies on the CPU, sharded ones with the same mesh and placements. Only
        this rank's parts are copied. The copy of an earlier call is overwritten."""
        staged: Tensors = self._stage(tensors, "")
        if any(tensor.is_cuda for _, tensor in _plain_tensors(tensors)):
            torch.cuda.current_stream().synchronize()
        return staged

    def _stage(self, value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {name: self._stage(each, f"{place}/{name}") for name, each in value.items()}
        if not isinstance(value, torch.Tensor):
            return deepcopy(value)
        if not is_traceable_wrapper_subclass(value):
            return self._buffer(place, value).copy_(value.detach(), non_blocking=True)
        names, context = value.__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        inner = {n: self._stage(p, f"{place}.{n}") if isinstance(p, torch.Tensor) else p for n, p in parts.items()}
        return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())

    def _buffer(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self._fits(place, tensor):
            self._buffers.pop(place, None)
            empty = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
            self._buffers[place] = empty.zero_(), tensor.stride()
        return self._buffers[place][0]

    def _fits(self, place: str, tensor: torch.Tensor) -> bool:
        memory, stride = self._buffers.get(place, (None, ()))
        wanted = (tensor.shape, tensor.dtype, tensor.stride())
        return memory is not None and (memory.shape, memory.dtype, stride) == wanted


def has_room(wanted_bytes: int, root: Path = Path("/")) -> bool:
    """Whether the host, and this process's control group, have this much memory left for copies."""
    return wanted_bytes <= MOST_OF_MEMORY * read_memory_left(root)


def _plain_tensors(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every plain tensor of this rank in a nested state, also inside sharded ones, with its place."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _plain_tensors(each, f"{place}/{name}")
    elif isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, torch.Tensor):
        yield place, value


# --- the retention policy


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints stay: the `newest` (at least 1), those whose step is a multiple of `every`, and the `best` ones
    by validation."""

    newest: int
    every: int | None = None
    best: int = 0

    def find_best(self, steps: Sequence[int], ranking: Sequence[int]) -> list[int]:
        """Of some steps, those kept for their validation; `ranking` has all validated ones, the best first."""
        there = frozenset(steps)
        return [step for step in ranking if step in there][: self.best]

    def find_doomed(self, steps: Sequence[int], ranking: Sequence[int] = ()) -> list[int]:
        """Of the saved steps, oldest first, those that may be removed."""
        best = self.find_best(steps, ranking)
        return [s for s in steps[: -self.newest] if (self.every is None or s % self.every) and s not in best]


def prune_checkpoints(
    directory: RunDir, ranks: Ranks, keep: RetentionPolicy, newest: int, ranking: Sequence[int] = ()
) -> None:
    """Remove what no rule keeps, after the checkpoint of step `newest` was read back; on all ranks together. Raises
    JobError on every rank if it is not what was saved, or if another run has taken over; then nothing is removed."""
    doomed = ranks.ask_first(lambda: keep.find_doomed(directory.checkpoint_steps(), ranking))
    if not doomed:
        return

    def read_back() -> None:
        # Of the next node if there is one: the cache of a rank's own node would hide errors of the disk.
        share = (ranks.rank + ranks.placement.local_world) % ranks.world
        try:
            verify_checkpoint(directory, newest, share, ranks.world)
        except Damaged as damage:
            raise JobError(f"{damage}\n  It was read back after it was saved. Older checkpoints were kept.") from None

    def remove_all() -> None:
        directory.confirm_writer()
        for step in doomed:
            # Renamed first, so that a half-deleted folder is never taken for a checkpoint.
            partial_path = directory.partial_checkpoint_path(step)
            remove_folder(partial_path)
            with contextlib.suppress(OSError):  # tried again after the next save
                directory.checkpoint_path(step).rename(partial_path)
            remove_folder(partial_path)

    ranks.together(read_back)
    ranks.together(lambda: remove_all() if ranks.is_first else None)


def remove_leftovers(directory: RunDir) -> None:
    """Remove what interrupted saves have left; called on rank 0 while it holds the writer's lock."""
    for unfinished in directory.partial_checkpoints():
        remove_folder(unfinished)


# --- saves by the clock


@dataclass(frozen=True)
class LeastCost:
    """The interval at which saves and the work lost in failures cost least together (Daly 2006; `plan.economy`).

    `mtbf_s` is the mean time between failures of the whole job, in seconds. `shortest_s` holds until a save was
    measured, and is the least; `longest_s` is for jobs that hardly ever fail, since users stop them too; `most_share`
    bounds the share of the time that goes into saves.
    """

    mtbf_s: float
    shortest_s: float = 120.0
    longest_s: float = 1800.0
    most_share: float = 0.05

    def interval_s(self, save_s: float | None) -> float:
        """Seconds from one save to the next, if the run stands still for `save_s` at each (None: unknown)."""
        if save_s is None:
            return self.shortest_s
        least = max(self.shortest_s, save_s / self.most_share)
        return max(least, min(daly_interval(save_s, self.mtbf_s), self.longest_s))


RETRY_S = 30.0
"""Seconds from a failed save to the next try: a file system that was busy or full for a moment works again, and one
that stays full costs few tries."""


class Cadence:
    """The clock of one folder; `every_s` None if only numbers of steps ask for saves. The interval `is_measured` if it
    follows from what saves take."""

    def __init__(self, every_s: float | LeastCost | None, clock: Callable[[], float]) -> None:
        self._every_s, self._clock = every_s, clock
        self._tried_at = clock()
        self._stall_s: float | None = None
        self.has_failed = False
        self.is_measured = isinstance(every_s, LeastCost)

    @property
    def interval_s(self) -> float | None:
        """Seconds from one save to the next; None if the clock asks for none."""
        return self._every_s.interval_s(self._stall_s) if isinstance(self._every_s, LeastCost) else self._every_s

    def is_due(self) -> bool:
        """Whether a save is due: by the interval, or some seconds after a failed one."""
        since, interval_s = self._clock() - self._tried_at, self.interval_s
        return (interval_s is not None and since >= interval_s) or (self.has_failed and since >= RETRY_S)

    def try_now(self, *, failed: bool = False) -> None:
        """A save begins, or has failed now."""
        self._tried_at = self._clock()
        self.has_failed |= failed

    def succeed(self, stall_s: float) -> None:
        """A save is complete; the run stood still for it so many seconds."""
        self.has_failed, self._stall_s = False, stall_s


@dataclass(frozen=True)
class LocalPlan:
    """How often to save on the disks of the nodes (in steps, or seconds of the clock), and in which folder there."""

    every: int | None
    every_s: float | LeastCost | None
    folder: str


# --- when and where a run is saved

LEAVE_S = 30.0
"""Seconds that a rank with an error waits for a save under way: the other ranks, if alive, write their parts
meanwhile."""


@dataclass(frozen=True)
class SavePoint:
    """What is saved: the state, its step, the run's counters. `last`: nothing comes after it. `in_doubt`: it may be
    undone, so no older one is removed for it. `shared` and `local`: the tiers whose cadence asks for this step. `best`:
    its validation is one of the best, so it is never left out. `ranking`: the validated steps, the best first."""

    state: CheckpointState
    step: int
    numbers: Mapping[str, Any]
    last: bool
    in_doubt: bool = False
    shared: bool = True
    local: bool = False
    best: bool = False
    ranking: tuple[int, ...] = ()


class CheckpointManager:
    """Saves on all ranks together; only rank 0's clock counts.

    `on_saved` gets the seconds that each save into the run directory took from its beginning until it was complete,
    whether the run stood still meanwhile or not. With a `tier`, saves go to the disks of the nodes, and from there to
    the run directory if that is due. All methods but `is_due` and `poll` are called on all ranks together.
    """

    def __init__(
        self,
        run: SavedRun,
        every_s: float | LeastCost | None,
        keep: RetentionPolicy,
        on_saved: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
        tier: tuple[LocalTier, float | LeastCost | None] | None = None,
    ) -> None:
        self._run = run
        self._keep = keep
        self._on_saved = on_saved
        self._cadences = {SHARED: Cadence(every_s, clock), LOCAL: Cadence(tier[1] if tier else None, clock)}
        self._tier = tier[0] if tier is not None else None
        self._staging = Staging()
        self._apart: Ranks | None = None
        """The ranks over a group of their own, on which staged saves are written; made at the first of them."""
        self._can_stage = run.resolved.values.checkpoint.background
        self._saving: AsyncSave | None = None
        self._copying: AsyncSave | None = None
        """What is under way on this rank, or not reported yet: a save, and a copy from the disks of the nodes."""
        self._last_saving, self._last_copying = 0, 0
        self._owed = False
        """Whether a save into the run directory was due while nodes wrote to their disks: it comes right after."""
        run.at_end.push(self._leave)

    def is_due(self) -> bool:
        """Whether rank 0 asks for a save: by the clock, or since the last failed; never while one is under way."""
        return self._run.ranks.is_first and self._saving is None and any(self._due().values())

    def save(self, point: SavePoint) -> None:
        """Save, or begin to; nothing where this step is saved already, or while an earlier save is under way. Raises
        JobError on every rank where it fails and nothing comes after it, or where memory ran out."""
        started, step, ranks = time.perf_counter(), point.step, self._run.ranks
        if point.best and not point.last:  # perhaps it is on its way into the run directory
            if self._tier is None and self._last_saving == step and self._is_saving():
                return
            if self._tier is not None and self._last_copying == step and self._is_copying():
                return
        if point.last or point.best:
            self.settle()
        elif self._is_saving():
            self._run.recorder.event("save_skipped", step=step, saving=self._last_saving)
            self._owed = self._owed or (point.shared and self._tier is not None)
            return
        self.poll()
        place, copies = self._route(point)
        if place is None:
            return
        cadence = self._cadences[place.tier]
        with self._failures_noted(step, place.tier, last=point.last):
            in_background = not point.last and self._takes(point.state)
            if is_saved(place, ranks, step):
                cadence.has_failed = False
            else:
                numbers = {**point.numbers, **(self._tier.as_numbers() if self._tier is not None else {})}
                content = collect_content(ranks, point.state, step, numbers)
                source: AsyncSave | SavedCheckpoint
                if in_background:
                    apart = self._apart or ranks
                    staged = replace(content, tensors=self._staging.stage(content.tensors))
                    write = partial(write_checkpoint, place, apart, staged)
                    self._last_saving = step
                    source = AsyncSave(step, apart, write, partial(self._prune_after, place, point, apart))
                    source.tier, source.started, source.stall_s = place.tier, started, time.perf_counter() - started
                    source.start()
                    self._saving = source
                else:
                    source = write_checkpoint(place, ranks, content)
                    seconds = time.perf_counter() - started
                    self._note_saved(step, place.tier, source, seconds, seconds)
                    self._prune_after(place, point, ranks)
                if copies and self._tier is not None:
                    copy = self._make_copy(self._tier, place, point, source, started)
                    copy.start()
                    self._copying = copy
            cadence.try_now()

    def poll(self) -> None:
        """Report saves that have ended. Raises the errors that end a run; other failures are tried again later."""
        if self._saving is not None and self._saving.has_ended:
            save, self._saving = self._saving, None
            self._report(save)
        if self._copying is not None and self._copying.has_ended and self._tier is not None:
            copy, self._copying, self._tier.copied = self._copying, None, None
            self._report(copy)
            if copy.saved is None and copy.error is None:  # what it was to be copied from has failed
                self._cadences[SHARED].try_now(failed=True)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for saves under way, and report them."""
        for save in (self._saving, self._copying):
            if save is not None:
                save.join(timeout_s)
        self.poll()

    def prune(self, ranking: tuple[int, ...], *, in_doubt: bool) -> None:
        """Remove checkpoints that the last validation made superfluous, unless it may be undone; no save is under
        way."""
        if not self._keep.best or in_doubt:
            return
        steps = self._run.ranks.ask_first(self._run.directory.checkpoint_steps)
        if steps:
            prune_checkpoints(self._run.directory, self._run.ranks, self._keep, steps[-1], ranking)

    def finish(self) -> None:
        """The run is finished and saved: remove its files on the disks of the nodes."""
        self.settle()
        if self._tier is not None:
            self._tier.remove()

    # --- what is under way, on all ranks together

    def _is_saving(self) -> bool:
        save = self._saving
        return self._apart is not None and any(self._run.ranks.gather(save is not None and not save.has_ended))

    def _is_copying(self) -> bool:
        return any(self._run.ranks.gather(self._copying is not None and not self._copying.has_ended))

    def _takes(self, state: CheckpointState) -> bool:
        """Whether this state is written in the background. At the first such save, make the buffers and the group, or
        find that the memory of some host does not suffice."""
        if not self._can_stage or state.count_file_bytes():
            return False
        if self._apart is None:
            ranks, tensors = self._run.ranks, state.collect()
            needed = self._staging.missing_bytes(tensors)
            has_memory = has_room(needed * ranks.placement.local_world)
            if has_memory:
                try:
                    self._staging.reserve(tensors)
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    has_memory = False
            self._can_stage = all(ranks.gather(has_memory))
            if self._can_stage:
                self._apart = set_apart(ranks)
            else:
                self._staging = Staging()
                reason = f"a copy of the state takes {render_size(needed)} a rank, which some host lacks"
                self._run.recorder.event("background_off", reason=reason)
        return self._can_stage

    # --- where to

    def _due(self) -> dict[str, bool]:
        """By this rank's clock; what is being copied is not due again."""
        due = {tier: cadence.is_due() for tier, cadence in self._cadences.items()}
        return {**due, SHARED: (due[SHARED] or self._owed) and self._copying is None}

    def _route(self, point: SavePoint) -> tuple[CheckpointFolder | None, bool]:
        """Where to save (None: nowhere), and whether it is copied on from there; the same on all ranks."""
        ranks, shared = self._run.ranks, shared_place(self._run.directory, self._run.ranks)
        if point.last or self._tier is None:
            return shared, False
        if point.best and is_saved(shared, ranks, point.step):
            return None, False
        due = ranks.ask_first(self._due)
        wants_shared, wants_local = point.shared or point.best or due[SHARED], point.local or due[LOCAL]
        self._owed = False
        if wants_shared and self._is_copying():
            saving = self._copying.step if self._copying is not None else None
            self._run.recorder.event("save_skipped", step=point.step, saving=saving)
            wants_shared = False
        self.poll()  # a copy that has ended on all ranks may have ended since
        local = self._tier.place
        can_copy = not self._cadences[LOCAL].has_failed and self._run.resolved.values.checkpoint.background
        if wants_shared and not (can_copy and not is_saved(local, ranks, point.step)):
            return shared, False
        return (local if wants_local or wants_shared else None), wants_shared

    def _make_copy(
        self,
        tier: LocalTier,
        place: CheckpointFolder,
        point: SavePoint,
        source: AsyncSave | SavedCheckpoint,
        started: float,
    ) -> AsyncSave:
        """What copies to the run directory in a thread what is written to the disks of the nodes, once it is."""
        from shardway.checkpoint.local_tier import replicate_checkpoint  # where there is a tier

        apart, target = tier.apart(), shared_place(self._run.directory, self._run.ranks)

        def copy() -> SavedCheckpoint | None:
            saved = source.wait() if isinstance(source, AsyncSave) else source
            return replicate_checkpoint(place, target, apart, saved) if saved is not None else None

        self._cadences[SHARED].try_now()
        tier.copied = self._last_copying = point.step
        made = AsyncSave(point.step, apart, copy, partial(self._prune_after, target, point, apart))
        made.started = started
        made.stall_s = source.stall_s if isinstance(source, AsyncSave) else time.perf_counter() - started
        return made

    def _prune_after(self, place: CheckpointFolder, point: SavePoint, ranks: Ranks) -> None:
        """A save is complete: older ones may be removed, unless it may be undone."""
        if place.tier == LOCAL and self._tier is not None:
            self._tier.prune(point.step, ranks)
        elif not point.in_doubt:
            prune_checkpoints(self._run.directory, ranks, self._keep, point.step, point.ranking)

    # --- what is reported

    def _report(self, save: AsyncSave) -> None:
        with self._failures_noted(save.step, save.tier):
            if save.error is not None:
                raise save.error
        if save.saved is not None:
            self._note_saved(save.step, save.tier, save.saved, save.ended - save.started, save.stall_s)

    def _note_saved(self, step: int, tier: str, saved: SavedCheckpoint, seconds: float, stall_s: float) -> None:
        recorder, cadence = self._run.recorder, self._cadences[tier]
        cadence.succeed(stall_s)
        size, name = saved.manifest.total_bytes, step_name(step)
        facts = {"name": name, "bytes": size, "seconds": seconds, "stall_s": stall_s}
        if cadence.is_measured:
            facts["next_in_s"] = cadence.interval_s
        recorder.event("saved", step=step, tier=tier, **facts)
        if tier == LOCAL:
            recorder.status(local_step=step, save_failed="")
            return
        recorder.status(saved_step=step, save_seconds=seconds, save_failed="")
        self._on_saved(seconds)

    @contextlib.contextmanager
    def _failures_noted(self, step: int, tier: str, *, last: bool = False) -> Iterator[None]:
        """A save that fails during the run is reported, and tried again later."""
        try:
            yield
        except (LostContact, Fenced):
            raise
        except JobError as error:
            if self._run.signals.killed:  # torch's writer makes an error of the interrupt
                raise KeyboardInterrupt("a second Ctrl-C") from None
            if last or is_out_of_memory(error):
                raise
            self._cadences[tier].try_now(failed=True)
            reason = render_reason(str(error))
            self._run.recorder.event("save_failed", step=step, tier=tier, reason=reason, retry_s=RETRY_S)
            self._run.recorder.status(save_failed=reason)

    def _leave(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """However the run ends, let a save under way complete; with a limit if other ranks may be gone."""
        if kind is None:
            self.settle()
        elif issubclass(kind, Exception):
            with contextlib.suppress(Exception):  # the error that ends the run matters more
                self.settle(LEAVE_S)
