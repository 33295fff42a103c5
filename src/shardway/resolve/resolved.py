"""What resolving takes and gives: circumstances, data facts, and the resolved run.

Invariant: all of it is frozen; nobody derives a value after this room. This module must not hold rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardway.hfconfig import ModelFacts
from shardway.resolve.applies import applies
from shardway.runfile.schema import RunFile
from shardway.runfile.write import render_run

if TYPE_CHECKING:  # what is planned loads the planner itself
    from shardway.plan.machine import Machine
    from shardway.plan.shapes.measured import Shape


@dataclass(frozen=True)
class Circumstances:
    """What the machine and the launcher say: ranks in all and on a node, cores and accelerators of a node."""

    ranks: int = 1
    ranks_per_node: int = 1
    usable_cores: int = 1
    accelerators: int = 0
    site: str = "laptop"
    hf: ModelFacts | None = None
    """What the config of model.hf says, where there is one."""
    machine: Machine | None = None
    """The accelerators that the run is for, as the planner sees them; None where none is known or none is wanted."""
    shape: Shape | None = None
    """The layers of model.hf, where the planner knows its family."""
    own_model: bool = False
    """Whether a script brings its own model and data, so that [model] and [data] describe nothing."""
    local_disk: str = ""
    """Folder on each node's own disk, as the site's profile says; empty where it says none."""


@dataclass(frozen=True)
class DataFacts:
    """What only the opened data can say."""

    samples: int
    tokens_per_sample: int
    vocab: int | None


@dataclass(frozen=True)
class Derived:
    """Numbers that follow from the keys and are no keys themselves."""

    replicas: int
    accumulation: int
    peak_lr: float
    per_pass: int = 1
    total_steps: int = 0
    warmup_steps: int = 0
    decay_steps: int = 0


@dataclass(frozen=True)
class Resolved:
    """A run as it will happen. Frozen; `origins` says of every key where its value came from."""

    values: RunFile
    origins: Mapping[str, str]
    circumstances: Circumstances
    derived: Derived

    def render(self, keep: Callable[[str], bool] = lambda dotted: True) -> str:
        """The resolved run as a run file: the keys that have an effect and that `keep` wants, with their origins."""
        return render_run(self.values, self.origins, lambda dotted: applies(dotted, self.values) and keep(dotted))
