"""A draft on which the rules of layouts are tried with other values.

Invariant: the draft behind it is never changed, and what a rule says here is what it would say of a run file with these
values. This module must not choose values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardway.resolve.draft import Draft
from shardway.runfile.schema import RunFile, all_keys


def list_values(draft: Draft) -> dict[str, Any]:
    """Every key of a draft with its value."""
    return {dotted: draft.get(dotted) for dotted in all_keys()}


class TrialDraft(Draft):
    """A draft where `tried` stands before its own values; `own` are these, so that a search lists them once for the
    thousands of trials that it makes."""

    def __init__(self, draft: Draft, ranks: int, tried: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.circumstances = replace(draft.circumstances, ranks=ranks)
        self.problems = []
        self._draft, self._tried, self._table = draft, set(tried), {**own, **tried}

    @property
    def values(self) -> RunFile:
        """All values as they stand now."""
        values = self._draft.values
        for dotted in sorted(self._tried):
            section, name = dotted.split(".")
            table = getattr(values, section).model_copy(update={name: self._table[dotted]})
            values = values.model_copy(update={section: table})
        return values

    def get(self, dotted: str) -> Any:
        """The value that is tried, or that of the draft."""
        return self._table[dotted]

    def is_set(self, dotted: str) -> bool:
        """Whether a value is tried, or stands in the draft."""
        return dotted in self._tried or self._draft.is_set(dotted)

    def derive(self, dotted: str, value: Any, reason: str) -> None:
        """Try what a rule settles."""
        self._tried.add(dotted)
        self._table[dotted] = value

    def origin(self, dotted: str) -> str:
        """That of the draft."""
        return self._draft.origin(dotted)

    def passes(self, rules: Sequence[Callable[[Draft], None]]) -> bool:
        """Whether no rule refuses anything; the first that does is the last that is asked."""
        for rule in rules:
            rule(self)
            if self.problems:
                return False
        return True
