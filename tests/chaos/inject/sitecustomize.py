"""Imported by every Python that has this folder on its path; what its variables say happens to a rank.

A FILE that is there already means that it has been, or that it is over.

A process that nobody gave a rank is rank 0.

SHARDWAY_TEST_HANG = RANK:STEP:FILE: it hangs once, as a library in C would make it.
SHARDWAY_TEST_STALL = RANK:BATCH:FILE: it waits for a batch of training that does not come.
SHARDWAY_TEST_SLOW = SECONDS[:FILE]: each batch of a validation takes so much longer, and FILE-RANK is there once one
does; SHARDWAY_TEST_PACE = SECONDS: of training.
SHARDWAY_TEST_RETRY = SECONDS: after so long a save that failed is tried again.
SHARDWAY_TEST_KILL = RANK:PHASE:STEP:FILE: it is killed in that phase of the first save from STEP on, or gets what
SHARDWAY_TEST_STRIKE = SIGNAL names.
SHARDWAY_TEST_HARM = RANK:KIND:POSITION:FILE: from that position in the samples on its loss is not finite once (nan) or
always (nans), a bit of its weights flips (flip), it takes all memory (hog, or device-hog: what its
device lets it have), a kernel never ends (spin) or fails (assert), or its loss function raises (raise).
SHARDWAY_TEST_JUMP = FILE: `time.time` is later by what FILE holds, from the moment that it is there; no other clock is.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any


def _hang(folder: Path, rank: str, step: int, mark: Path) -> None:
    """Once this rank has done so many steps, take Python's lock and keep it."""
    from shardway.ranks.heartbeat import heartbeat_path, read_heartbeat

    while (entry := read_heartbeat(heartbeat_path(folder, int(rank)))) is None or entry.step < step:
        time.sleep(0.002)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    library = ctypes.PyDLL(None)  # unlike CDLL, does not give the lock back
    while True:
        library.sleep(3600)


_wish = os.environ.get("SHARDWAY_TEST_HANG", "").split(":", 2)
_folder = os.environ.get("SHARDWAY_PROGRESS", "")
if len(_wish) == 3 and _folder and os.environ.get("RANK") == _wish[0]:
    threading.Thread(target=_hang, args=(Path(_folder), _wish[0], int(_wish[1]), Path(_wish[2])), daemon=True).start()


class _Changed(importlib.abc.MetaPathFinder):
    """Changes modules once they were imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_changed(module: Any) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_changed  # type: ignore[method-assign]
        return spec


def _stall(batch: int, mark: Path) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        fetch = module.StepLoader.batches

        def batches(*arguments: Any, **named: Any) -> Any:
            for number, each in enumerate(fetch(*arguments, **named)):
                if number == batch and not mark.exists():
                    mark.touch()
                    time.sleep(3600)
                yield each

        module.StepLoader.batches = batches

    return change


def _slow(seconds: float, mark: str = "") -> Callable[[Any], None]:
    def change(module: Any) -> None:
        evaluate = module.Passes.evaluate

        def slowly(*arguments: Any) -> Any:
            if mark:
                Path(f"{mark}-{_rank}").touch()
            time.sleep(seconds)
            return evaluate(*arguments)

        module.Passes.evaluate = slowly

    return change


def _pace(seconds: float) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        fetch = module.StepLoader.batches

        def batches(*arguments: Any, **named: Any) -> Any:
            for each in fetch(*arguments, **named):
                time.sleep(seconds)
                yield each

        module.StepLoader.batches = batches

    return change


def _retry(seconds: float) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        assert module.RETRY_S
        module.RETRY_S = seconds

    return change


def _both(first: Callable[[Any], None] | None, second: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        if first is not None:
            first(module)
        second(module)

    return change


def _strike() -> None:
    number = signal.Signals[os.environ.get("SHARDWAY_TEST_STRIKE", "SIGKILL")]
    os.kill(os.getpid(), number)
    if number is signal.SIGKILL:
        time.sleep(3600)


class _Save:
    """Which save is struck: the first from a step on; `strike` leaves a mark that says which, and kills."""

    def __init__(self, least: int, mark: Path) -> None:
        self._least, self._mark, self.step, self.calls = least, mark, 0, 0

    def begin(self, step: int) -> None:
        self.step = step if step >= self._least and not self._mark.exists() else 0
        self.calls = 0

    def strike(self, calls: int = 1) -> None:
        """At the call of that number since the save began."""
        self.calls += 1
        if self.step and self.calls == calls:
            whole = self._mark.with_suffix(".new")
            whole.write_text(str(self.step))
            whole.rename(self._mark)
            _strike()


def _before(module: Any, name: str, act: Callable[..., None]) -> None:
    """Call `act` with the same arguments before a function of a module or a method of a class."""
    work = getattr(module, name)

    def changed(*arguments: Any, **named: Any) -> Any:
        act(*arguments, **named)
        return work(*arguments, **named)

    setattr(module, name, changed)


def _kill_in_save(save: _Save, phase: str) -> dict[str, Callable[[Any], None]]:
    """The modules that a phase of a save is in, and what is changed in them."""

    def change_save(module: Any) -> None:
        collect, commit = module.collect_content, module._commit

        def collect_content(ranks: Any, state: Any, step: int, numbers: Any) -> Any:
            save.begin(step)
            content = collect(ranks, state, step, numbers)
            if phase == "collected":
                save.strike()
            return content

        def commit_and_die(partial: Any, final: Any, manifest: Any, confirm: Any) -> None:
            commit(partial, final, manifest, lambda: (confirm(), save.strike() if phase == "unnamed" else None))

        module.collect_content, module._commit = collect_content, commit_and_die
        if phase == "named":  # the last that is made durable is the folder that holds the checkpoint
            _before(module, "fsync_folder", lambda path: save.strike() if path.name == "checkpoints" else None)
        if phase == "writing":
            _before(module.ChecksumWriter, "update", lambda *arguments: save.strike(5))

    changes = {"shardway.checkpoint.writer": change_save}
    if phase == "staging":
        changes["shardway.checkpoint.manager"] = lambda module: _before(
            module.Staging, "_buffer", lambda *arguments: save.strike(5)
        )
    if phase == "copying":
        del changes["shardway.checkpoint.writer"]  # what is copied is known by itself

        def change_copy(module: Any) -> None:
            _before(
                module, "replicate_checkpoint", lambda source, target, ranks, saved: save.begin(saved.manifest.step)
            )

            class Striking(module.ChecksumWriter):  # type: ignore[misc, name-defined]
                """Of what is copied."""

                def update(self, block: Any) -> None:
                    save.strike()
                    super().update(block)

            module.ChecksumWriter = Striking

        changes["shardway.checkpoint.local_tier"] = change_copy
    return changes


def _hog(model: Any) -> None:
    """Take memory until the kernel ends this; 4 GiB at most, should nobody limit it."""
    held = [bytearray(os.urandom(1 << 20)) * 16 for _ in range(256)]
    raise MemoryError(f"nobody has limited it: {len(held)} pieces")


def _flip(model: Any) -> None:
    """One bit in one number of the weights of this rank."""
    import torch

    weights = next(each for each in model.parameters() if each.ndim == 2)
    weights.detach().view(torch.int32).flatten()[3] ^= 1 << 20


def _hog_device(model: Any) -> None:
    """Take what the allocator may have, which is little from now on."""
    import torch

    torch.cuda.set_per_process_memory_fraction(0.02)
    held = []
    while True:
        held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))


def _spin(model: Any) -> None:
    """A kernel that is busy for ten minutes at 2 GHz."""
    import torch

    torch.cuda._sleep(1 << 40)


def _assert(model: Any) -> None:
    """A kernel reads beyond the end of a tensor, as with labels that are larger than the vocabulary."""
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]


def _fail(model: Any) -> None:
    raise ValueError("these labels are of another data set")


def _harm(kind: str, position: int, mark: Path) -> Callable[[Any], None]:
    acts = {"hog": _hog, "flip": _flip, "device-hog": _hog_device, "spin": _spin, "assert": _assert}

    def change(module: Any) -> None:
        take = module.take_step

        def take_step(parts: Any, model: Any, batch: Any, loss_fn: Any, moment: Any) -> Any:
            if moment.position < position or mark.exists():
                return take(parts, model, batch, loss_fn, moment)

            def bad_loss(*arguments: Any) -> Any:
                if kind == "raise":
                    _fail(model)
                found = loss_fn(*arguments)
                if kind == "nan" and mark.exists():
                    return found
                if kind == "nan":
                    mark.touch()
                return replace(found, total=found.total * float("nan"))

            if kind in acts:
                mark.touch()
                acts[kind](model)
                return take(parts, model, batch, loss_fn, moment)
            return take(parts, model, batch, bad_loss, moment)

        module.take_step = take_step

    return change


def _jump(path: str) -> None:
    real = time.time

    def jumped() -> float:
        try:
            with open(path) as file:
                return real() + float(file.read())
        except FileNotFoundError:
            return real()

    time.time = jumped


_rank = os.environ.get("RANK", "0")
_changes: dict[str, Callable[[Any], None]] = {}
_stalls = os.environ.get("SHARDWAY_TEST_STALL", "").split(":", 2)
if len(_stalls) == 3 and _rank == _stalls[0]:
    _changes["shardway.data.loader"] = _stall(int(_stalls[1]), Path(_stalls[2]))
_slows = os.environ.get("SHARDWAY_TEST_SLOW", "").partition(":")
if _slows[0]:
    _changes["shardway.train.passes"] = _slow(float(_slows[0]), _slows[2])
if os.environ.get("SHARDWAY_TEST_PACE"):
    _changes["shardway.data.loader"] = _pace(float(os.environ["SHARDWAY_TEST_PACE"]))
if os.environ.get("SHARDWAY_TEST_RETRY"):
    _changes["shardway.checkpoint.manager"] = _retry(float(os.environ["SHARDWAY_TEST_RETRY"]))
_kills = os.environ.get("SHARDWAY_TEST_KILL", "").split(":", 3)
if len(_kills) == 4 and _rank == _kills[0]:
    for _name, _change in _kill_in_save(_Save(int(_kills[2]), Path(_kills[3])), _kills[1]).items():
        _changes[_name] = _both(_changes.get(_name), _change)
_harms = os.environ.get("SHARDWAY_TEST_HARM", "").split(":", 3)
if len(_harms) == 4 and _rank == _harms[0]:
    _changes["shardway.train.step"] = _harm(_harms[1], int(_harms[2]), Path(_harms[3]))
if os.environ.get("SHARDWAY_TEST_JUMP"):
    _jump(os.environ["SHARDWAY_TEST_JUMP"])
if _changes:
    sys.meta_path.insert(0, _Changed(_changes))
