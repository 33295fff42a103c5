"""Field types of the run file: how the text of a unit becomes a typed value and back.

Invariants:
- What a field serialises to is accepted by the same field again, unchanged.
- `read_skips` reports all problems at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from shardway.best import Monitor, parse_monitor
from shardway.plugins import is_registered, list_names
from shardway.units import (
    Cadence,
    Span,
    parse_bytes,
    parse_cadence,
    parse_seconds,
    parse_span,
    render_bytes,
    render_cadence,
    render_seconds,
)

# --- the spans of data.skip

MOST = 10**18
"""The largest position: sums of it and of a batch still fit in 64 bits."""

ALLOWED = f"pairs [from, to] of integers, from less than to, 0 to {MOST}, such as [[120000, 121000]]"


def read_skips(value: Any) -> list[list[int]]:
    """Pairs [from, to], in order, those that overlap or touch as one. Raises ValueError with all that is wrong."""
    entries = value if isinstance(value, list) else [value]
    wrong = [what for entry in entries if (what := _find_wrong(entry))]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}; allowed: {ALLOWED}")
    merged: list[list[int]] = []
    for start, end in sorted(entries):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged


def _find_wrong(entry: Any) -> str:
    if not isinstance(entry, list) or len(entry) != 2:
        return f"{entry!r} is no pair"
    if any(isinstance(number, bool) or not isinstance(number, int) for number in entry):
        return f"{entry!r} holds what is no integer"
    start, end = entry
    if start < 0 or end > MOST:
        return f"{entry!r} reaches out of the order"
    return "" if start < end else f"{entry!r} ends where or before it begins"


# --- field types

Auto = Literal["auto"]
Off = Literal["off"]


INTERVAL = 'more than 0, or "off"'


def _as_span(value: Any) -> Span:
    return value if isinstance(value, Span) else parse_span(_text_or_steps(value))


def _as_span_or_off(value: Any) -> Span | str:
    return "off" if value == "off" else _check_interval(_as_span(value))


def _as_save_cadence(value: Any) -> Cadence | str:
    return value if value in ("auto", "off") else _check_interval(parse_cadence(_text_or_steps(value)))


def _check_interval(cadence: Any) -> Any:
    """An interval of nothing would be a silent "at every step"."""
    if (cadence.amount if isinstance(cadence, Span) else cadence) <= 0:
        raise ValueError(f"{render_cadence(cadence)} is no interval; allowed: {INTERVAL}")
    return cadence


def _as_seconds(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError(f'{_show(value)} is not a string; allowed: a time in quotes with its unit, such as "90s"')
    seconds = parse_seconds(value)
    if seconds <= 0:
        raise ValueError(f'"{value}" is no time to wait; allowed: more than 0s')
    return seconds


def _as_monitor(value: Any) -> Monitor:
    if isinstance(value, Monitor):
        return value
    if not isinstance(value, str):
        raise ValueError(f'{_show(value)} is not a string; allowed: a metric such as "loss" or "max f1"')
    return parse_monitor(value)


def _as_bytes(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f'{_show(value)} is not a string; allowed: a size in quotes with its unit, such as "25MiB"')
    count = parse_bytes(value)
    if count <= 0:
        raise ValueError(f'"{value}" is no size; allowed: more than 0B')
    return count


def _as_settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{_show(value)} is not a table; allowed: a table, such as {{a = 1}}")
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(
            "the table holds what JSON has no form for; allowed: strings, finite numbers, true, false, lists, tables"
        ) from None
    return value


def _text_or_steps(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(
            f'{_show(value)} is neither a string nor an integer; allowed: a string such as "500 steps", or an '
            "integer number of steps"
        )
    return value


def _as_elastic(value: Any) -> list[int] | str:
    """Fewest and most, or "off"."""
    whole = isinstance(value, list | tuple) and all(isinstance(each, int) and each is not True for each in value)
    if value != "off" and not (whole and len(value) == 2 and 1 <= value[0] <= value[1]):
        raise ValueError(f'{_show(value)} is no range of nodes; allowed: [fewest, most], such as [2, 4], or "off"')
    return "off" if value == "off" else list(value)


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _schema(kinds: list[str], examples: list[Any], hint: str) -> WithJsonSchema:
    return WithJsonSchema({"type": kinds, "examples": examples, "description": hint})


_AMOUNT, _TEXT = ["string", "integer"], ["string"]

SpanField = Annotated[
    Span,
    BeforeValidator(_as_span),
    PlainSerializer(str, return_type=str),
    _schema(_AMOUNT, ["500 steps", "2e9 tokens", "3 epochs"], "a number of steps, samples, tokens or epochs"),
]
SpanOrOff = Annotated[
    Any,
    BeforeValidator(_as_span_or_off),
    PlainSerializer(str, return_type=str),
    _schema(_AMOUNT, ["500 steps", "1 epochs", "off"], 'a number of steps, samples, tokens or epochs, or "off"'),
]
SaveCadence = Annotated[
    Any,
    BeforeValidator(_as_save_cadence),
    PlainSerializer(lambda v: v if v in ("auto", "off") else render_cadence(v), return_type=str),
    _schema(_AMOUNT, ["200 steps", "10min", "auto", "off"], 'an amount of training, a time, "auto" or "off"'),
]
SecondsField = Annotated[
    float,
    BeforeValidator(_as_seconds),
    PlainSerializer(render_seconds, return_type=str),
    _schema(_TEXT, ["90s", "1h30m"], "a time with d, h, min, m, s or ms"),
]
MonitorField = Annotated[
    Monitor,
    BeforeValidator(_as_monitor),
    PlainSerializer(str, return_type=str),
    _schema(_TEXT, ["loss", "accuracy", "max f1", "min rmse"], "a metric, with max or min where that is not known"),
]
BytesField = Annotated[
    int,
    BeforeValidator(_as_bytes),
    PlainSerializer(render_bytes, return_type=str),
    _schema(_TEXT, ["25MiB", "1GB"], "a size with B, kB, MB, GB, KiB, MiB or GiB"),
]
SkipsField = Annotated[
    list[list[int]],
    BeforeValidator(read_skips),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2},
            "description": "pairs [from, to] of integers, from less than to",
        }
    ),
]


@dataclass(frozen=True)
class PluginName:
    """Marks a string as a name that is registered in a group of `shardway.plugins`, or one of `others`.

    The JSON Schema and messages list the names that are registered on this machine, our own first.
    """

    group: str
    others: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"type": "string", "enum": [*self.others, *list_names(self.group)]}

    def _check(self, value: Any) -> str:
        """As the choices of a Literal are checked, whose message is the same."""
        if isinstance(value, str) and (value in self.others or is_registered(self.group, value)):
            return value
        *names, last = (f"'{name}'" for name in (*self.others, *list_names(self.group)))
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}" if names else last})


def _check_once(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)} names one twice; allowed: each once")
    return names


TrackersField = Annotated[list[Annotated[str, PluginName("trackers")]], AfterValidator(_check_once)]
SettingsField = Annotated[
    dict[str, Any],
    BeforeValidator(_as_settings),
    WithJsonSchema({"type": "object", "description": "a table of what JSON can hold"}),
]
ElasticField = Annotated[
    list[int] | Off,
    BeforeValidator(_as_elastic),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 1},
                    "minItems": 2,
                    "maxItems": 2,
                    "description": "the fewest and the most, not less than the fewest",
                },
                {"const": "off", "type": "string"},
            ]
        }
    ),
]
