"""Turns what pydantic found wrong into sentences for the person who wrote the run file.

Invariant: every problem names the key, the value, where the value came from and what is allowed; an unknown key is
answered with its nearest match. This module must not raise.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from shardway.errors import Problem
from shardway.runfile.peers import find_peers
from shardway.runfile.schema import all_keys, sections

_WORDS = {
    "int_type": ("is not a whole number", "a whole number"),
    "float_type": ("is not a number", "a number"),
    "bool_type": ("is neither true nor false", "true or false"),
    "string_type": ("is not a text", "a text in quotes"),
    "list_type": ("is not a list", "a list such as [1, 2]"),
    "finite_number": ("is not a finite number", "a finite number"),
}


def find_problems(errors: Sequence[ErrorDetails], origins: Mapping[str, str], default_origin: str) -> list[Problem]:
    """One problem a key, in the order in which pydantic met them."""
    problems: dict[str, Problem] = {}
    for error in errors:
        location = [str(part) for part in error["loc"]]
        dotted = ".".join(location[:2])
        origin = origins.get(dotted) or _origin_of_section(location[0], origins) or default_origin
        problem = _problem(error, dotted, origin)
        before = problems.get(dotted)
        problems[dotted] = problem if before is None else _merge(before, problem)
    return list(problems.values())


def _origin_of_section(section: str, origins: Mapping[str, str]) -> str:
    """Where the first key of a section stands, for a problem with the section as a whole."""
    return next((origin for name, origin in origins.items() if name.split(".")[0] == section), "")


def _problem(error: ErrorDetails, dotted: str, origin: str) -> Problem:
    if error["type"] == "extra_forbidden":
        return unknown_key(dotted, origin)
    if error["type"] == "model_type":
        names = ", ".join(sections()[dotted].model_fields)
        return Problem(dotted, f"{error['input']!r} is not a section", origin, f"a table [{dotted}] with {names}")
    what, allowed = _describe(error)
    return Problem(dotted, what, origin, allowed)


def unknown_key(dotted: str, origin: str) -> Problem:
    """The problem of a key that does not exist, with its nearest match."""
    section, _, name = dotted.partition(".")
    known = list(sections()[section].model_fields) if section in sections() and name else [*sections(), "format"]
    near = difflib.get_close_matches(name or section, known, n=1, cutoff=0.6)
    elsewhere = [other for other in all_keys() if name and other.split(".")[1] == name]
    if not name:
        elsewhere = [other for other in all_keys() if other.split(".")[1] == section]
        near = [] if elsewhere else near
    guess = f"{section}.{near[0]}" if near and name else near[0] if near else next(iter(elsewhere), "")
    kind = "key" if name else "section"
    remedy = f"did you mean {guess}?" if guess else ""
    if rows := find_peers(dotted) or find_peers(name or section):
        remedy = "; ".join(row.render() for row in rows[:2])
    return Problem(
        where=dotted,
        what=f"there is no {kind} of this name",
        origin=origin,
        allowed=f"in [{section}]: {', '.join(known)}" if name and section in sections() else ", ".join(known),
        remedy=remedy,
    )


def _describe(error: ErrorDetails) -> tuple[str, str]:
    value, context = error["input"], error.get("ctx", {})
    kind = error["type"]
    if kind == "literal_error":
        return f"{_show(value)} is not one of the choices", str(context["expected"]).replace("'", '"')
    if kind == "value_error":
        sentence, _, allowed = str(context["error"]).partition("; allowed: ")
        return sentence, allowed
    if kind in ("greater_than_equal", "greater_than"):
        bound = context.get("ge", context.get("gt"))
        return f"{_show(value)} is too small", f"{'at least' if 'ge' in context else 'more than'} {render_bound(bound)}"
    if kind in ("less_than_equal", "less_than"):
        bound = context.get("le", context.get("lt"))
        return f"{_show(value)} is too large", f"{'at most' if 'le' in context else 'less than'} {render_bound(bound)}"
    if kind == "string_pattern_mismatch":
        return f"{_show(value)} is not the name of a folder", "a text without / that is more than dots"
    if kind == "string_too_short":
        return f"{_show(value)} is too short", f"a text of at least {context['min_length']} character"
    if kind in ("too_short", "too_long"):
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"{_show(value)} has {context['actual_length']} entries", f"{bound} entries"
    what, allowed = _WORDS.get(kind, (error["msg"], ""))
    return f"{_show(value)} {what}" if allowed else what, allowed


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, list | dict) else str(value)


def render_bound(bound: Any) -> str:
    """A bound as a person writes it: 1.0 -> "1"."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _merge(first: Problem, second: Problem) -> Problem:
    """One problem of a key whose type is a choice: what one branch says is allowed, or what the other says."""
    both = [text for text in dict.fromkeys((first.allowed, second.allowed)) if text]
    return Problem(first.where, first.what, first.origin, " or ".join(both), first.remedy)
