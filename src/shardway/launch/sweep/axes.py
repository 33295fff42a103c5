"""The values of the members of a sweep: from words such as `optim.lr=1e-3,3e-3 train.seed=0..4`, or from the rows of a
file, to one list of `KEY=VALUE` words a member.

Invariants:
- A comma separates values only outside of quotes and brackets, so that `data.mix=[1, 2]` is one value.
- The same words give the same members in the same order; random ones follow from their seed alone.
- A value stays the text that a person wrote; the run file's own rules read it.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardway.errors import UserError
from shardway.runfile.load import render_value

MOST_MEMBERS = 1000
"""Slurm's default MaxArraySize is 1001."""

DRAWS_A_MEMBER = 50
"""How often random values are drawn a member until they are new."""

SEARCHES = ("grid", "list", "random", "optuna")

_INTEGERS = re.compile(r"(?P<first>[+-]?\d+)\.\.(?P<last>[+-]?\d+)")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"(?P<log>log:)?(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})")
_KEY = re.compile(r"\s*(?P<key>[A-Za-z_]\w*\.[\w.]+)\s*=(?P<text>.*)", re.DOTALL)
_NAMED_BY_FOLDER = ("run.name", "run.root")

Values = Mapping[str, str]
"""The keys of one member that others have other values of, and their texts."""


@dataclass(frozen=True)
class Axis:
    """One key with the values that it takes, or with the bounds between which they are drawn."""

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    text: str = ""

    def draw(self, source: random.Random) -> str:
        """One value, each as likely as any other; of a logarithmic range, each order of magnitude."""
        if self.values:
            return source.choice(self.values)
        if self.is_whole:
            return str(source.randint(round(self.low), round(self.high)))
        if self.is_log:
            drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = source.uniform(self.low, self.high)
        return f"{drawn:.6g}"


@dataclass(frozen=True)
class AxisWords:
    """Words of a command line: those that vary, and those that all members share (the run file among them)."""

    axes: tuple[Axis, ...]
    shared: tuple[str, ...]


def split_values(text: str) -> list[str]:
    """The parts between commas that are in no quotes and no brackets."""
    parts, depth, quote, begin = list[str](), 0, "", 0
    for at, char in enumerate(text):
        if quote:
            is_escaped = quote == '"' and at and text[at - 1] == "\\"
            quote = "" if char == quote and not is_escaped else quote
        elif char in "\"'" and (depth or not text[begin:at].strip()):  # else an apostrophe inside of a word
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    return [*parts, text[begin:].strip()]


def read_axes(words: Sequence[str], *, search: str = "grid") -> AxisWords:
    """The axes among the words of a command. Raises UserError for one that cannot be one."""
    axes, shared = list[Axis](), list[str]()
    for word in words:
        found = _KEY.fullmatch(word)
        axis = _read_axis(found["key"], found["text"].strip(), search) if found else None
        if axis is None:
            shared.append(word)
            continue
        if axis.key in _NAMED_BY_FOLDER:
            raise UserError(
                f"{word}: {axis.key} cannot differ between the runs of a sweep, which lie in one folder.\n"
                "  To do: leave it out, or name the sweep with one value."
            )
        axes.append(axis)
    keys = [axis.key for axis in axes] + [word.partition("=")[0].strip() for word in shared if _KEY.fullmatch(word)]
    twice = next((key for key in keys if keys.count(key) > 1), "")
    if twice:
        raise UserError(f"{twice} is set twice.\n  To do: leave one of the two out.")
    return AxisWords(tuple(axes), tuple(shared))


def _read_axis(key: str, text: str, search: str) -> Axis | None:
    """None for a single value."""
    parts = split_values(text)
    if len(parts) > 1:
        if "" in parts:
            raise UserError(
                f"{key}={text}: a value between the commas is empty.\n"
                f"  To do: leave the comma out; a text with commas stands in quotes: {key}='\"a, b\"'."
            )
        values = [value for part in parts for value in _list_integers(key, part) or [part]]
        if ranged := next((part for part in parts if ".." in part and not _list_integers(key, part)), ""):
            raise UserError(f"{key}={text}: {ranged} is a range of numbers, and cannot be one of several values.")
        twice = next((value for value in values if values.count(value) > 1), "")
        if twice:
            raise UserError(f"{key}={text}: {twice} is there twice.\n  To do: leave one out.")
        return Axis(key, tuple(values), text=text)
    draws = search in ("random", "optuna")
    if not draws and (whole := _list_integers(key, text)):
        return Axis(key, tuple(whole), text=text)
    bounds = _RANGE.fullmatch(text)
    if bounds is None:
        return None
    if not draws:
        raise UserError(
            f"{key}={text}: a range of numbers has no steps.\n"
            "  Allowed: values (1e-3,3e-3), whole numbers (0..4), or a range with --search random or optuna.\n"
            f"  To do: shardway sweep ... {key}={text} --search random --trials 10"
        )
    low, high, is_log = float(bounds["low"]), float(bounds["high"]), bool(bounds["log"])
    if not low < high or (is_log and low <= 0):
        allowed = "a first number above 0 and below the second" if is_log else "a first number below the second"
        raise UserError(f"{key}={text}: the bounds are no range.\n  Allowed: {allowed}.")
    is_whole = _INTEGERS.fullmatch(text) is not None
    return Axis(key, low=low, high=high, is_log=is_log, is_whole=is_whole, text=text)


def _list_integers(key: str, text: str) -> list[str]:
    """The whole numbers of a range such as `0..4`, both ends among them; none for any other text."""
    found = _INTEGERS.fullmatch(text)
    if found is None:
        return []
    first, last = int(found["first"]), int(found["last"])
    if first > last:
        raise UserError(f"{key}={text}: the range ends before it begins.\n  To do: {key}={last}..{first}")
    if last - first >= MOST_MEMBERS:
        raise UserError(f"{key}={text}: these are {last - first + 1} values.\n  Allowed: at most {MOST_MEMBERS}.")
    return [str(number) for number in range(first, last + 1)]


# --- members


def list_grid(axes: Sequence[Axis]) -> list[Values]:
    """Every combination, the last axis the fastest. Raises UserError for too many."""
    count = math.prod(len(axis.values) for axis in axes)
    _check_count(count)
    return [
        dict(zip((axis.key for axis in axes), values, strict=True))
        for values in itertools.product(*(axis.values for axis in axes))
    ]


def draw_random(axes: Sequence[Axis], trials: int, seed: int) -> list[Values]:
    """So many members, no two alike, drawn one after the other; more trials add members and change none. Raises
    UserError where there are not so many."""
    _check_count(trials)
    source, drawn = random.Random(seed), list[Values]()
    for _ in range(DRAWS_A_MEMBER * trials):
        values = {axis.key: axis.draw(source) for axis in axes}
        drawn += [values] if values not in drawn else []
        if len(drawn) == trials:
            return drawn
    raise UserError(
        f"--trials {trials}: the axes have fewer combinations; {len(drawn)} were found.\n"
        "  To do: ask for fewer, or leave out --search random and run all of them."
    )


def read_rows(path: Path) -> list[Values]:
    """The members in a file: a CSV whose head has the keys (an empty cell sets nothing), or a TOML file with a table
    `[[member]]` each. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise UserError(f"--rows {path}: it cannot be read: {why}.") from None
    rows = list(_read_toml(path, text) if path.suffix == ".toml" else _read_csv(path, text))
    if not rows:
        raise UserError(f"--rows {path}: it has no row with a value.")
    _check_count(len(rows))
    keys = {key for row in rows for key in row}
    for key in sorted(keys):
        if not re.fullmatch(r"[A-Za-z_]\w*\.[\w.]+", key) or key in _NAMED_BY_FOLDER:
            raise UserError(
                f"--rows {path}: {key!r} is no key that members of a sweep may set.\n"
                "  Allowed: section.key, such as optim.lr."
            )
    same = next((number for number, row in enumerate(rows) if row in rows[:number]), None)
    if same is not None:
        raise UserError(f"--rows {path}: row {same + 1} sets the same as row {rows.index(rows[same]) + 1}.")
    return rows


def _read_csv(path: Path, text: str) -> Iterator[Values]:
    table = list(csv.reader(text.splitlines()))
    head = [name.strip() for name in table[0]] if table else []
    if repeated := ", ".join(repr(name) for name in dict.fromkeys(head) if head.count(name) > 1):
        raise UserError(
            f"--rows {path}, line 1: several columns have the same name: {repeated}.\n"
            "  Allowed: one column for each key.\n"
            "  To do: leave out the others of that name, or correct their names."
        )
    for number, cells in enumerate(table[1:], 2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(head):
            raise UserError(
                f"--rows {path}, line {number}: {len(cells)} cells below {len(head)} keys.\n"
                "  To do: put a value with commas in double quotes."
            )
        yield {key: cell.strip() for key, cell in zip(head, cells, strict=True) if cell.strip()}


def _read_toml(path: Path, text: str) -> Iterator[Values]:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--rows {path}: it is not valid TOML: {error}.") from None
    members = found.get("member")
    if list(found) != ["member"] or not isinstance(members, list):
        raise UserError(
            f"--rows {path}: it has no [[member]], or other tables.\n  Allowed: [[member]] alone, a table each."
        )
    for member in members:
        yield {key: render_value(value) for key, value in _flatten(member).items()}


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """section.key -> value, of quoted keys and of tables."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        nested = isinstance(value, dict) and "." not in name
        found |= {f"{name}.{key}": each for key, each in value.items()} if nested else {name: value}
    return found


def _check_count(count: int) -> None:
    if not 1 <= count <= MOST_MEMBERS:
        raise UserError(
            f"these are {count} runs.\n  Allowed: 1 to {MOST_MEMBERS} in one sweep.\n"
            "  To do: leave values out, or draw some with --search random --trials N."
        )


def render_words(values: Values) -> tuple[str, ...]:
    """The words of a command line that set a member's values."""
    return tuple(f"{key}={text}" for key, text in values.items())
