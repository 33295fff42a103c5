"""The state that rules work on.

Invariant: a rule can only derive what was left open or refuse; it never sees or changes the user's file. This
module must not hold rules.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from shardway.errors import Problem
from shardway.resolve.resolved import DERIVED, Circumstances, Derived, Resolved
from shardway.runfile.load import DEFAULT, LoadedRunFile
from shardway.runfile.schema import RunFile


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
        """Whether nobody has settled the key: it is not set, or it is "auto"."""
        return not self.is_set(dotted) or bool(self.get(dotted) == "auto")

    def is_derived(self, dotted: str) -> bool:
        """Whether a rule has settled the key."""
        return self.origin(dotted).startswith(DERIVED)

    def origin(self, dotted: str) -> str:
        """Where the value of a key comes from."""
        return self._origins[dotted]

    def derive(self, dotted: str, value: Any, reason: str) -> None:
        """Settle a key that was left open."""
        section, name = dotted.split(".")
        table = getattr(self._values, section).model_copy(update={name: value})
        self._values = self._values.model_copy(update={section: table})
        self._origins[dotted] = f"{DERIVED}{reason}"

    def refuse(self, dotted: str, what: str, allowed: str = "", remedy: str = "") -> None:
        """Record that a value cannot be."""
        self.problems.append(Problem(dotted, what, self.origin(dotted), allowed, remedy))

    def finish(self, derived: Derived) -> Resolved:
        """The outcome, once no rule has anything left to say."""
        return Resolved(self._values, MappingProxyType(self._origins), self.circumstances, derived)


Rule = Callable[[Draft], None]
