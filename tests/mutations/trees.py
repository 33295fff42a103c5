"""Changes what a TOML or JSON text says and keeps its form: one node of the tree, then the text is written again.

Invariant: what cannot be read is left as it is. This module must not know the keys of any file.
"""

from __future__ import annotations

import copy
import json
import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any


@dataclass(frozen=True)
class Raw:
    """Text that stands in a file as it is, since no value of Python is written so."""

    text: str


DEEP = 5_000
"""Far beyond what Python's own parsers follow."""

NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 10**400, -0.5, 1e308, 1e-320, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", " ", "x", "0", "-1", "auto", "off", "nan", "1e999 steps", "\0", "a\0b", "\n", "\x1b[2J", "\x7f", "../../x"),
    *(
        "x" * 100_000,
        "9" * 5_000,
        "\u202e\U0001d518",
        "%s %d {0}",
        "<script>",
        "/dev/zero",
        "~",
        "$HOME",
        "-rf",
        "None",
    ),
)
OTHERS = (True, False, [], {}, [[]], [None], [1, "x"], {"x": 1}, {"": {}}, [0] * 3)


def change_json(data: bytes, dice: random.Random) -> bytes:
    """One node of a JSON text."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    odd = (*NUMBERS, *TEXTS, *OTHERS, None, Raw("[" * DEEP + "]" * DEEP), Raw("9" * 5_000), Raw('"\\ud800"'))
    changed = _change(tree, dice, (*odd, Raw("1e400"), Raw('{"x": 1, "x": 2}')))
    return write_json(changed).encode("utf-8", "surrogatepass")


def change_json_line(data: bytes, dice: random.Random) -> bytes:
    """One node of one line of JSON."""
    lines = data.splitlines()
    if not lines:
        return data
    number = dice.randrange(len(lines))
    lines[number] = change_json(lines[number], dice)
    return b"".join(line + b"\n" for line in lines)


def change_toml(data: bytes, dice: random.Random) -> bytes:
    """One node of a TOML text."""
    try:
        tree = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        return data
    odd = (*NUMBERS, *TEXTS, *OTHERS, date(2026, 1, 2), time(1, 2), datetime(2026, 1, 2))
    changed = _change(tree, dice, (*odd, Raw("[" * DEEP + "]" * DEEP), Raw("9" * 5_000), Raw("0x" + "f" * 500)))
    return write_toml(changed).encode("utf-8", "surrogatepass")


# --- the change


def _change(tree: Any, dice: random.Random, odd: tuple[Any, ...]) -> Any:
    """The tree with one of its nodes replaced, removed, renamed, doubled or moved; `tree` itself is changed."""
    places = list(_places(tree))
    if not places:
        return dice.choice(odd)
    holder, key = dice.choice(places)
    ways: list[Callable[[], None]] = [
        *[lambda: _set(holder, key, dice.choice(odd))] * 4,
        lambda: _set(holder, key, _alike(holder[key], dice)),
        lambda: holder.pop(key),
        lambda: _rename(holder, key, dice),
        lambda: _exchange((holder, key), dice.choice(places)),
    ]
    dice.choice(ways)()
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key) in a tree."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    return [place for key in keys for place in ((tree, key), *_places(tree[key]))]


def _set(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def _alike(value: Any, dice: random.Random) -> Any:
    """A value of the same type, a little different."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return dice.choice((value + 1, -value, value * 1000, value / 2, str(value)))
    if isinstance(value, str):
        return dice.choice((value[:-1], f"{value} ", value.upper(), value[::-1], f"{value}é"))
    if isinstance(value, list):
        return dice.choice((value * 2, value[::-1], value[:1], [value]))
    return {"": value}


def _rename(holder: Any, key: Any, dice: random.Random) -> None:
    if isinstance(holder, dict):
        value = holder.pop(key)
        odd = (f"{key}s", str(key)[:-1], str(key).upper(), "", "a.b", "\0", "x" * 10_000, "name", "\u202e", "__class__")
        holder[dice.choice(odd)] = value
    else:
        holder.insert(key, holder[key])


def _exchange(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Two values change places, each as a copy: one may lie in the other."""
    (holder, key), (there, name) = one, other
    first, second = copy.deepcopy(holder[key]), copy.deepcopy(there[name])
    there[name] = first
    holder[key] = second


# --- writing


def write_json(node: Any) -> str:
    """JSON, with what only some parsers take (NaN), and lone surrogates as escapes."""
    if isinstance(node, Raw):
        return node.text
    if isinstance(node, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {write_json(value)}" for key, value in node.items()) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(write_json, node)) + "]"
    return json.dumps(node)


def write_toml(tree: Any) -> str:
    """TOML with a [table] for each table at the top."""
    if not isinstance(tree, dict):
        return f"value = {_toml(tree)}\n"
    loose = [f"{_toml_key(key)} = {_toml(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            loose += ["", f"[{_toml_key(name)}]"]
            loose += [f"{_toml_key(key)} = {_toml(value)}" for key, value in table.items()]
    return "\n".join(loose) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float):
        return repr(value)
    return _toml_text(value) if isinstance(value, str) else json.dumps(value)


def _toml_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _toml_text(key)
