"""Field types of the run file: how the text of a unit becomes a typed value and back.

Invariant: what a field serialises to is accepted by the same field again. This module must not hold keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from shardway.units import (
    Cadence,
    Span,
    parse_cadence,
    parse_seconds,
    parse_span,
    render_cadence,
    render_seconds,
)

Auto = Literal["auto"]
Off = Literal["off"]


def _as_span(value: Any) -> Span:
    return value if isinstance(value, Span) else parse_span(_text_or_int(value, "steps"))


def _as_cadence(value: Any) -> Cadence:
    if isinstance(value, Span | float):
        return value
    return parse_cadence(_text_or_int(value, "steps"))


def _as_cadence_or_off(value: Any) -> Cadence | str:
    return "off" if value == "off" else _as_cadence(value)


def _as_span_or_off(value: Any) -> Span | str:
    return "off" if value == "off" else _as_span(value)


def _as_seconds(value: Any) -> float:
    return value if isinstance(value, float) else parse_seconds(str(value))


def _text_or_int(value: Any, unit: str) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f'{value!r} is neither a text such as "500 {unit}" nor a whole number of {unit}')
    return value


def _schema(examples: list[Any], pattern_hint: str) -> WithJsonSchema:
    return WithJsonSchema({"type": ["string", "integer"], "examples": examples, "description": pattern_hint})


SpanField = Annotated[
    Span,
    BeforeValidator(_as_span),
    PlainSerializer(str, return_type=str),
    _schema(["500 steps", "2e9 tokens", "3 epochs"], "a number of steps, samples, tokens or epochs"),
]
SpanOrOff = Annotated[
    Any,
    BeforeValidator(_as_span_or_off),
    PlainSerializer(str, return_type=str),
    _schema(["500 steps", "1 epochs", "off"], 'a number of steps, samples, tokens or epochs, or "off"'),
]
CadenceOrOff = Annotated[
    Any,
    BeforeValidator(_as_cadence_or_off),
    PlainSerializer(lambda v: v if v == "off" else render_cadence(v), return_type=str),
    _schema(["200 steps", "10min", "off"], 'an amount of training, a time, or "off"'),
]
SecondsField = Annotated[
    float,
    BeforeValidator(_as_seconds),
    PlainSerializer(render_seconds, return_type=str),
    _schema(["90s", "1h30m"], "a time with d, h, min, m, s or ms"),
]
