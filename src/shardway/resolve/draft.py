"""The input and the result of resolving, and the draft that rules work on.

Invariants:
- Input and result are frozen; no value is derived after this package.
- A rule can only derive an open key or refuse; it never sees or changes the user's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardway.errors import Problem
from shardway.hardware.device import DeviceFacts
from shardway.hfconfig import ModelFacts
from shardway.resolve.applies import applies
from shardway.runfile.load import DEFAULT, LoadedRunFile
from shardway.runfile.schema import RunFile
from shardway.runfile.write import render_run

if TYPE_CHECKING:
    from shardway.plan.machine import Machine
    from shardway.plan.shapes.measured import Shape


# --- circumstances, data facts, the resolved run

DERIVED = "derived: "
"""The start of the origin of a value that a rule has settled."""


@dataclass(frozen=True)
class Settled:
    """The value of a key that is "auto", and the reason."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Circumstances:
    """The facts of machine and launcher: ranks in all and per node, cores and accelerators of a node."""

    ranks: int = 1
    ranks_per_node: int = 1
    usable_cores: int = 1
    accelerators: int = 0
    site: str = "laptop"
    hf: ModelFacts | None = None
    """The facts of model.hf's config, if there is one."""
    machine: Machine | None = None
    """The accelerators of the run, as the planner sees them; None if unknown or unwanted."""
    shape: Shape | None = None
    """The layers of model.hf, if the planner supports its family."""
    own_model: bool = False
    """Whether a script brings its own model and data, so that [model] and [data] describe nothing."""
    local_disk: str = ""
    """Folder on each node's own disk from the site's profile; empty if it has none."""
    devices: tuple[DeviceFacts, ...] = ()
    """The abilities of the ranks' accelerators, each kind once; empty if unknown."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """Keys that follow the device -> values of earlier attempts of this run; empty for a new run."""
    settled: Mapping[str, Settled] = field(default_factory=dict)
    """Keys that follow the device -> values that the script with its own model has settled."""


def value_of(values: RunFile, dotted: str) -> Any:
    """The value of a key."""
    section, name = dotted.split(".")
    return getattr(getattr(values, section), name)


@dataclass(frozen=True)
class DataFacts:
    """Facts that only the opened data has."""

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
    """A run as it will happen. Frozen; `origins` has the origin of every key's value."""

    values: RunFile
    origins: Mapping[str, str]
    circumstances: Circumstances
    derived: Derived

    def is_derived(self, dotted: str) -> bool:
        """Whether a rule has settled a key."""
        return self.origins[dotted].startswith(DERIVED)

    def with_values(self, settled: Mapping[str, Settled]) -> Resolved:
        """The same run with other values for open keys."""
        values, origins = self.values, dict(self.origins)
        for dotted, each in settled.items():
            section, name = dotted.split(".")
            table = getattr(values, section).model_copy(update={name: each.value})
            values = values.model_copy(update={section: table})
            origins[dotted] = f"{DERIVED}{each.reason}"
        return replace(self, values=values, origins=MappingProxyType(origins))

    def render(self, keep: Callable[[str], bool] = lambda dotted: True) -> str:
        """The resolved run as a run file: the effective keys that pass `keep`, with their origins."""
        return render_run(self.values, self.origins, lambda dotted: applies(dotted, self.values) and keep(dotted))


# --- the draft


class Draft:
    """The state that rules work on: values by dotted key, origins, problems found so far."""

    def __init__(self, loaded: LoadedRunFile, circumstances: Circumstances) -> None:
        self.circumstances = circumstances
        self.problems: list[Problem] = []
        self._values = loaded.values
        self._origins = dict(loaded.origins)

    @property
    def values(self) -> RunFile:
        """All values as they stand now."""
        return self._values

    def get(self, dotted: str) -> Any:
        """The value of a key as it stands now."""
        section, name = dotted.split(".")
        return getattr(getattr(self._values, section), name)

    def is_set(self, dotted: str) -> bool:
        """Whether the user (or a rule) set the key."""
        return self.origin(dotted) != DEFAULT

    def is_open(self, dotted: str) -> bool:
        """Whether the key is not settled yet: it is not set, or it is "auto"."""
        return not self.is_set(dotted) or bool(self.get(dotted) == "auto")

    def is_derived(self, dotted: str) -> bool:
        """Whether a rule has settled the key."""
        return self.origin(dotted).startswith(DERIVED)

    def origin(self, dotted: str) -> str:
        """Where the value of a key comes from."""
        return self._origins[dotted]

    def derive(self, dotted: str, value: Any, reason: str) -> None:
        """Settle an open key."""
        section, name = dotted.split(".")
        table = getattr(self._values, section).model_copy(update={name: value})
        self._values = self._values.model_copy(update={section: table})
        self._origins[dotted] = f"{DERIVED}{reason}"

    def refuse(self, dotted: str, what: str, allowed: str = "", remedy: str = "") -> None:
        """Record a problem of a value."""
        self.problems.append(Problem(dotted, what, self.origin(dotted), allowed, remedy))

    def finish(self, derived: Derived) -> Resolved:
        """The outcome, after the last rule."""
        return Resolved(self._values, MappingProxyType(self._origins), self.circumstances, derived)


Rule = Callable[[Draft], None]
