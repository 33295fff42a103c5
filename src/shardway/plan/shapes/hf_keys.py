"""Reads keys of a config.json, and remembers every one that is missing or cannot be.

Invariant: reading goes on after a key that is wrong, so that all are told at once; `check` must be called before what
was read is used. This module must not know of families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardway.errors import Problem, check_no_problems
from shardway.plan.shapes.architecture import LARGEST


class Keys:
    """The keys of one config; several names of a key are those that versions of the library gave it."""

    def __init__(self, config: Mapping[str, Any], name: str, origin: str) -> None:
        self.config, self.name, self._origin = config, name, origin
        self.problems: list[Problem] = []

    def check(self) -> None:
        """Raise UserError with every key that is missing or cannot be."""
        check_no_problems(self._origin, self.problems)

    def refuse(self, key: str, what: str, allowed: str = "", remedy: str = "") -> None:
        """Remember a problem of a key."""
        self.problems.append(Problem(key, what, allowed=allowed, remedy=remedy))

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """A whole number; null is as good as missing. Without a default it must be there."""
        key, value = self._find(names)
        if value is None and default is not None:
            return default
        if type(value) is int and least <= value <= most:
            return value
        what = "is missing" if value is None else f"{value!r} is no size"
        self.refuse(key, what, f"a whole number, {least} to {most:,}", "correct the config.json")
        return 1

    def count(self, *names: str, default: int = 0) -> int:
        """A whole number that may be 0."""
        return self.size(*names, default=default, least=0)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.config.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(name, f"{value!r} is neither", "true, false")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        """A word."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, f"{value!r} is no text")
        return value if isinstance(value, str) else default

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, at least one."""
        value = self.config.get(name)
        if isinstance(value, list) and value and all(type(each) is int and 1 <= each <= LARGEST for each in value):
            return tuple(value)
        self.refuse(name, "is missing" if value is None else f"{value!r} is no list of sizes", "a list of sizes")
        return (1,)

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of numbers of layers; none where it is missing."""
        value = self.config.get(name) or []
        if isinstance(value, list) and all(type(each) is int for each in value):
            return tuple(value)
        self.refuse(name, f"{value!r} is no list of layers", "a list of numbers")
        return ()

    def words(self, name: str, count: int, allowed: Mapping[str, Any]) -> tuple[str, ...]:
        """A list of `count` words; none where it is missing."""
        value = self.config.get(name) or []
        if not isinstance(value, list) or (value and len(value) != count):
            self.refuse(name, f"{value!r} is no list of {count} words", f"{count} of {', '.join(allowed)}")
            return ()
        for unknown in sorted({str(each) for each in value if each not in allowed}):
            self.refuse(name, f'"{unknown}" is not known', ", ".join(allowed))
        return tuple(each for each in value if each in allowed)

    def table(self, name: str) -> Keys:
        """The keys of a table in the config; its problems are found with these."""
        value = self.config.get(name) or {}
        if not isinstance(value, Mapping):
            self.refuse(name, f"{value!r} is no table")
            value = {}
        inner = Keys(value, self.name, self._origin)
        inner.problems = self.problems
        return inner

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """The first of the names that is there, and its value."""
        for name in names:
            if self.config.get(name) is not None:
                return name, self.config[name]
        return names[0], None
