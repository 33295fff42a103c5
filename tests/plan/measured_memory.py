"""What a rank of a tiny run holds while it trains: its states, and what forward passes keep for backward passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kept_tensors import KeptTensors
from shardway.train.memory import count_held
from shardway.train.run import LiveRun, train_run


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank: of its states after a step, and the most that forward passes kept."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def states(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer


def measure(run: LiveRun) -> Measured:
    """Train the run and look at it: gradients when the optimizer takes them, the rest afterwards."""
    kept, gradients, take = KeptTensors(), [], run.step

    def step(*arguments: Any) -> float:
        parallel = run._held.models[0].parallel
        for model in [each.module for each in parallel.pipeline.stages] if parallel.pipeline else [parallel.module]:  # type: ignore[union-attr]
            kept.watch(model)
        run._held.optimizers[0].optimizer.register_step_pre_hook(lambda *_: gradients.append(held(run)["gradients"]))
        return take(*arguments)

    run.step = step  # type: ignore[method-assign]
    with kept.counting():
        train_run(run)
    states = held(run)
    return Measured(states["parameters"], gradients[-1], states["optimizer state"], kept.peak)


def held(run: LiveRun) -> Mapping[str, int]:
    return count_held(run._held.models[0].parallel.module, run._held.optimizers[0].optimizer, "cpu")
