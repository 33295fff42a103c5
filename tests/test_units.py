"""Text with units: what is rendered is read back, what is no amount is refused with a whole sentence."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardway.batch_ramp import BatchRamp
from shardway.units import (
    SPAN_UNITS,
    Cadence,
    Scale,
    Span,
    format_bytes,
    parse_bytes,
    parse_cadence,
    parse_seconds,
    parse_span,
    render_bytes,
    render_cadence,
    render_clock,
    render_count,
    render_seconds,
)

AMOUNTS = st.one_of(st.integers(0, 2**53).map(float), st.floats(0.0, 2.0**53, allow_subnormal=False))
SPANS = st.one_of(
    st.builds(Span, st.integers(0, 2**53).map(float), st.just("steps")),
    st.builds(Span, AMOUNTS, st.sampled_from(SPAN_UNITS[1:])),
)
SECONDS = st.one_of(
    st.floats(0.0, 3e8), st.integers(0, 3 * 10**8).map(float), st.integers(0, 10**6).map(lambda count: count * 1e-3)
)


# --- what is rendered is read back


@given(st.integers(0, 2**80))
@example(9_007_199_254_740_993)  # 2**53 + 1, which no float holds
def test_bytes_survive(count: int) -> None:
    assert parse_bytes(render_bytes(count)) == count


@given(SECONDS)
@example(0.95)
@example(1.9)
def test_seconds_survive(seconds: float) -> None:
    assert parse_seconds(render_seconds(seconds)) == seconds


@given(SPANS)
def test_spans_survive(span: Span) -> None:
    assert parse_span(str(span)) == span


@given(st.one_of(SPANS, SECONDS))
def test_cadences_survive(cadence: Cadence) -> None:
    assert parse_cadence(render_cadence(cadence)) == cadence


# --- what is read


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("0", 0),
        ("64GiB", 64 * 2**30),
        ("64 GiB", 64 * 2**30),
        (" 1.5 GB ", 1_500_000_000),
        ("0.1 GB", 100_000_000),
        ("1_000 kB", 1_000_000),
        ("2KB", 2000),
        ("1e3B", 1000),
        ("2PiB", 2**51),
        ("1TiB", 2**40),
        ("3TB", 3 * 10**12),
        ("5PB", 5 * 10**15),
        ("7MiB", 7 * 2**20),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("1h30m", 5400.0),
        ("1h 30min", 5400.0),
        ("2d", 172800.0),
        ("500ms", 0.5),
        ("1.5h", 5400.0),
        ("1m1s", 61.0),
        ("0s", 0.0),
    ],
)
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("value", "span"),
    [
        (500, Span(500.0, "steps")),
        ("500", Span(500.0, "steps")),
        ("500 steps", Span(500.0, "steps")),
        ("1 step", Span(1.0, "steps")),
        ("1 epoch", Span(1.0, "epochs")),
        ("0.5 epochs", Span(0.5, "epochs")),
        ("2e9 tokens", Span(2e9, "tokens")),
        ("0.5M tokens", Span(5e5, "tokens")),
        ("1 T tokens", Span(1e12, "tokens")),
        ("60_000 samples", Span(6e4, "samples")),
        ("2k steps", Span(2000.0, "steps")),
    ],
)
def test_spans(value: str | int, span: Span) -> None:
    assert parse_span(value) == span


@pytest.mark.parametrize(
    ("value", "cadence"),
    [("10min", 600.0), ("200 steps", Span(200.0, "steps")), (7, Span(7.0, "steps")), ("3", Span(3.0, "steps"))],
)
def test_cadences(value: str | int, cadence: Cadence) -> None:
    assert parse_cadence(value) == cadence


# --- what is shown


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0B"), (1000, "1kB"), (1024, "1KiB"), (2**30 + 1, "1073741825B")),
        *((64 * 2**30, "64GiB"), (2**60, "1024PiB"), (480 * 10**9, "480GB"), (500 * 2**10, "500KiB")),
    ],
)
def test_bytes_in_their_shortest_form(count: int, text: str) -> None:
    assert render_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((480 * 10**9, "480GB"), (9000 * 2**20, "9000MiB"), (123_457, "123457B")),
        *((515_000 * 2**20, "515000MiB (about 502.9GiB)"), (2**30 + 1, "1073741825B (about 1GiB)")),
    ],
)
def test_a_size_that_is_a_long_number_is_told_in_gib_as_well(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "250ms"),
        (1.5, "1500ms"),
        (5400.0, "1h30m"),
        (90.0, "1m30s"),
        (86400.0, "1d"),
        (0.0, "0ms"),
        (1e-5, "1e-05s"),
    ],
)
def test_seconds_in_their_shortest_form(seconds: float, text: str) -> None:
    assert render_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (65, "1:05"), (3599.6, "1:00:00"), (3725, "1:02:05"), (90061, "25:01:01"), (-3, "0:00")],
)
def test_clock(seconds: float, text: str) -> None:
    assert render_clock(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (999, "999"),
        (999.4, "999"),
        (999.6, "1k"),
        (1000, "1k"),
        (51234.5, "51.2k"),
        (999_499, "999k"),
        (999_999, "1M"),
        (1e6, "1M"),
        (2e9, "2B"),
        (3.21e12, "3.21T"),
        (1.5e15, "1500T"),
        (-1234, "-1.23k"),
    ],
)
def test_counts_have_three_figures(count: float, text: str) -> None:
    assert render_count(count) == text


@given(st.floats(-1e15, 1e15))
def test_a_shown_count_is_near(count: float) -> None:
    text = render_count(count)
    size = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert math.isclose(float(text.rstrip("kMBT")) * size, count, rel_tol=0.005, abs_tol=1e-300)


# --- spans in steps

SCALE = Scale(batch=BatchRamp.of(32), tokens_per_sample=128, samples_per_epoch=1000)


@pytest.mark.parametrize(
    ("span", "steps"),
    [
        (Span(7, "steps"), 7),
        (Span(64, "samples"), 2),
        (Span(65, "samples"), 3),
        (Span(4096, "tokens"), 1),
        (Span(4097, "tokens"), 2),
        (Span(1, "epochs"), 32),
        (Span(0, "tokens"), 0),
        (Span(0.001, "epochs"), 1),
    ],
)
def test_a_span_in_steps_covers_it(span: Span, steps: int) -> None:
    assert span.in_steps(SCALE) == steps


@given(st.integers(0, 10**9), st.integers(1, 10**4), st.integers(1, 10**4))
def test_steps_of_samples_are_the_fewest_that_cover_them(samples: int, batch: int, epoch: int) -> None:
    steps = Span(samples, "samples").in_steps(Scale(BatchRamp.of(batch), 1, epoch))
    assert steps * batch >= samples > (steps - 1) * batch


# --- what is refused


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1 gib", "1Gib", "1.GiB", ".5GiB", "1GiB1MiB", "1__0", "nan", "0x10"]
)
def test_no_size(text: str) -> None:
    with pytest.raises(ValueError) as told:
        parse_bytes(text)
    units = "B, KiB, MiB, GiB, TiB, PiB, kB, KB, MB, GB, TB, PB"
    assert str(told.value) == f'"{text}" is not a size; allowed: a number and one of {units}'


@pytest.mark.parametrize("text", ["", "90", "1h30", "-1s", "s", "1 week", "1hour", "inf", "1:30"])
def test_no_time(text: str) -> None:
    with pytest.raises(ValueError) as told:
        parse_seconds(text)
    assert str(told.value) == (f'"{text}" is not a time; allowed: numbers with d, h, min, m, s or ms, such as "1h30m"')


@pytest.mark.parametrize("value", ["", "steps", "five steps", "-5 steps", -5, "5 stepss", "5steps", "5 bytes", "5 k"])
def test_no_span(value: str | int) -> None:
    with pytest.raises(ValueError) as told:
        parse_span(value)
    shown = f"{value} steps" if isinstance(value, int) else value
    assert str(told.value).replace(f'"{shown}"', f'"{value}"') == (
        f'"{value}" is not an amount of training; allowed: a number of steps, samples, tokens, epochs, '
        'such as "500 steps"'
    )


@pytest.mark.parametrize("text", ["1.5 steps", "0.5", "1e-1 steps"])
def test_a_part_of_a_step(text: str) -> None:
    with pytest.raises(ValueError) as told:
        parse_span(text)
    assert str(told.value) == f'"{text}" is not a whole number of steps'


@pytest.mark.parametrize("text", ["", "soon", "5 minutes", "every step"])
def test_no_cadence(text: str) -> None:
    with pytest.raises(ValueError) as told:
        parse_cadence(text)
    assert str(told.value) == (
        f'"{text}" is neither an amount of training ("200 steps", "1 epochs") nor a time ("10min")'
    )


@pytest.mark.parametrize("text", ["1e999 steps", "1e999 tokens", "1e400T tokens"])
def test_an_infinite_span(text: str) -> None:
    with pytest.raises(ValueError) as told:
        parse_span(text)
    assert str(told.value) == f'"{text}" is too large; allowed: up to 9007199254740992 {text.split()[-1]}'


def test_an_infinite_time() -> None:
    with pytest.raises(ValueError) as told:
        parse_seconds("1e999s")
    assert str(told.value) == '"1e999s" is too long; allowed: up to 3650d'


def test_an_infinite_size() -> None:
    with pytest.raises(ValueError) as told:
        parse_bytes("1e999GiB")
    assert str(told.value) == '"1e999GiB" is too large; allowed: up to 1073741824PiB'


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_bytes, parse_seconds, parse_span, parse_cadence):
        try:
            value = parse(text)
        except ValueError as error:
            assert text in str(error)
        else:
            assert isinstance(value, int | float | Span)
