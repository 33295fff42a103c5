"""From a table that was read from a file to a dataclass, with every value of the type that the dataclass says.

Invariant: what it gives has no value of another type, and no number that is not finite. This module must not read files
nor know what a field means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_WRONG = object()


def read_fields(kind: type[T], table: Any) -> T | None:
    """The dataclass in a table: keys that it does not know, and values of another type, count as not there.

    None where that leaves out a field without a default, or `table` is no table.
    """
    if not isinstance(table, Mapping):
        return None
    hints, found = get_type_hints(kind), {}
    for each in fields(kind):  # type: ignore[arg-type]
        value = _read(hints[each.name], table[each.name]) if each.name in table else _WRONG
        if value is not _WRONG:
            found[each.name] = value
        elif each.default is MISSING and each.default_factory is MISSING:
            return None
    return kind(**found)


def check_sections(resolved: dict[str, Any]) -> dict[str, Any]:
    """The same tables. Raises ValueError where something else than the format is none."""
    for name, section in resolved.items():
        if name != "format" and not isinstance(section, dict):
            raise ValueError(f"{name} is no section")
    return resolved


def _read(hint: Any, value: Any) -> Any:
    """The value as that type, or _WRONG."""
    origin = get_origin(hint)
    if origin is tuple:
        entries = [_read(get_args(hint)[0], entry) for entry in value] if isinstance(value, list) else [_WRONG]
        return _WRONG if _WRONG in entries else tuple(entries)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return value if isinstance(value, Mapping) else _WRONG
    options = get_args(hint) if origin is not None else (hint,)
    return next((read for option in options if (read := _read_plain(option, value)) is not _WRONG), _WRONG)


def _read_plain(kind: type, value: Any) -> Any:
    """The value as a text, number, truth value or nothing, or _WRONG. A whole number also stands for a float."""
    if kind is NoneType:
        return value if value is None else _WRONG
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else _WRONG
    if kind is float and isinstance(value, int | float):
        return _finite(value)
    if issubclass(kind, str):
        return value if isinstance(value, str) and _is_text(value) else _WRONG
    return value if isinstance(value, kind) else _WRONG


def _finite(value: float) -> Any:
    try:
        number = float(value)
    except OverflowError:
        return _WRONG
    return number if math.isfinite(number) else _WRONG


def _is_text(value: str) -> bool:
    """Whether it can be printed and handed to a program: no lone surrogate, no NUL."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value
