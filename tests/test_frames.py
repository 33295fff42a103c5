"""How many of Shardway's own frames lie between a user's journey and what it ends in.

A journey begins at a function and ends at a call of something that is not ours (bytes written, weights updated). Its
frames are those on the stack at that call whose code is below `src/shardway`: methods, lambdas, closures, generators
and context managers alike, both ends included. Frames of torch and of Python's library between them do not count. Of
work in a thread the frames are a sum: those of the thread, and those on the stack where it was started.

Traced with `sys.setprofile`, and `threading.setprofile` for threads that start meanwhile, on the default run file with
a small model and a few steps.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import shardway
from runs import lone_rank, train_tiny
from shardway.checkpoint.local_tier import replicate_checkpoint
from shardway.checkpoint.manager import AsyncSave
from shardway.checkpoint.writer import write_checkpoint
from shardway.train.loop import Loop
from shardway.train.run import LiveRun
from shardway.train.step import take_step

HOME = str(Path(shardway.__file__).parent)
BEHIND = "checkpoint.background=true"
QUICK = ("train.steps=4", "optim.warmup=0 steps", "checkpoint.every=2 steps", "train.validate_every=off")


def own_frames(frame: FrameType | None) -> Iterator[CodeType]:
    """The code of Shardway's frames on a stack, the innermost first."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(HOME):
            yield frame.f_code
        frame = frame.f_back


def is_shard_written(frame: FrameType, event: str, arg: Any) -> bool:
    """Whether this is a write into the file of a rank's tensors."""
    file = getattr(arg, "__self__", None) if event == "c_call" else None
    return (
        isinstance(file, io.FileIO | io.BufferedWriter) and arg.__name__ == "write" and str(file.name).endswith(".bin")
    )


def is_step_of_optimizer(frame: FrameType, event: str, arg: Any) -> bool:
    """Whether this is the call of an optimizer's `step`, inside of what torch puts around it."""
    own = frame.f_locals.get("self") if event == "call" and frame.f_code.co_name == "step" else None
    return isinstance(own, torch.optim.Optimizer)


@dataclass
class Tracer:
    """The stacks at which something happened, from the function that its journey begins at."""

    begin: CodeType
    through: CodeType
    is_end: Callable[[FrameType, str, Any], bool]
    found: list[list[str]] = field(default_factory=list)
    starts: dict[threading.Thread, list[CodeType]] = field(default_factory=dict)

    def look(self, frame: FrameType, event: str, arg: Any) -> None:
        """The profile function."""
        if event == "call" and frame.f_code is threading.Thread.start.__code__:
            self.starts[frame.f_locals["self"]] = [*own_frames(frame), *self._above()]
        elif self.is_end(frame, event, arg):
            stack = [*own_frames(frame), *self._above()]
            if self.begin in stack and self.through in stack:
                codes = stack[: stack.index(self.begin) + 1]
                self.found.append([f"{Path(code.co_filename).stem}.{code.co_qualname}" for code in reversed(codes)])

    def _above(self) -> list[CodeType]:
        """The frames from which this thread was started."""
        return self.starts.get(threading.current_thread(), [])


def train(*words: str) -> Callable[[Path], object]:
    """A run of a few steps."""
    return lambda folder: train_tiny(folder / "run", lone_rank(), *QUICK, *words)


def train_on_node(folder: Path) -> None:
    """A run that saves on the disk of its node, and copies from there."""
    words = ("checkpoint.local_every=1 steps", f"checkpoint.local_dir={folder / 'disk'}")

    def settle(run: LiveRun, step: int) -> None:
        """So that no save is left out."""
        run._loop._checkpoints.settle()  # type: ignore[union-attr]

    train_tiny(folder / "run", lone_rank(), *QUICK, BEHIND, *words, before_step=settle)


@dataclass(frozen=True)
class Journey:
    """What makes it, the functions that it begins at and leads through, how its ends are recognized, and the most of
    its frames."""

    make: Callable[[Path], object]
    begin: Callable[..., Any]
    through: Callable[..., Any]
    is_end: Callable[[FrameType, str, Any], bool]
    most: int


STEP, UPDATE = LiveRun.step, is_step_of_optimizer
SAVE, BYTES = Loop.batches, is_shard_written
JOURNEYS = {
    "loop to bytes, waited for": Journey(train(), SAVE, write_checkpoint, BYTES, 10),
    "loop to bytes, in the background": Journey(train(BEHIND), SAVE, AsyncSave.run, BYTES, 10),
    "loop to bytes, on a node": Journey(train_on_node, SAVE, write_checkpoint, BYTES, 10),
    "loop to bytes, copied from a node": Journey(train_on_node, SAVE, replicate_checkpoint, BYTES, 10),
    "step to update": Journey(train(), STEP, take_step, UPDATE, 6),
    "step to update, bf16": Journey(train("optim.state_dtype=bf16"), STEP, take_step, UPDATE, 6),
}


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_journey_is_short(name: str, tmp_path: Path) -> None:
    journey = JOURNEYS[name]
    tracer = Tracer(journey.begin.__code__, journey.through.__code__, journey.is_end)
    threading.setprofile(tracer.look)
    sys.setprofile(tracer.look)
    try:
        journey.make(tmp_path)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert tracer.found, "the journey was not made"
    longest = max(tracer.found, key=len)
    assert len(longest) <= journey.most, f"{len(longest)} frames:\n  " + "\n  ".join(longest)
