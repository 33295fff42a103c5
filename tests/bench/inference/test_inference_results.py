"""The arithmetic of inference results, against numpy and against sums written out; rows in a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.bench.inference.load import draw_arrivals, draw_lengths, draw_prompts, draw_words
from shardway.bench.inference.results import (
    FIELDS,
    ONE_BATCH,
    SERVE,
    THROUGHPUT,
    BatchTimes,
    BenchConditions,
    ServedRequest,
    append_row,
    count_most_at_once,
    interpolate,
    keeps_limits,
    make_row,
    measure_one_batch,
    measure_requests,
    measure_throughput,
)

SECONDS = st.floats(1e-4, 1e3)
CONDITIONS = BenchConditions("scripted", "scripted delays", "none")


@st.composite
def requests(draw: st.DrawFn) -> ServedRequest:
    """A request that succeeded or failed, with any gaps."""
    sent = draw(st.floats(0, 100))
    if draw(st.booleans()) and draw(st.booleans()):
        return ServedRequest(sent, error="HTTP 500")
    gaps = draw(st.lists(SECONDS, min_size=1, max_size=8))
    arrivals = np.cumsum([sent, *gaps])[1:]
    per_piece = draw(st.integers(1, 3))
    return ServedRequest(sent, tuple(arrivals.tolist()), draw(st.integers(1, 99)), len(gaps) * per_piece)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert interpolate(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


def test_there_is_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        interpolate((), 50)


@given(st.lists(requests(), max_size=12), SECONDS)
def test_latencies_and_rates_are_those_of_the_definitions(served: list[ServedRequest], duration: float) -> None:
    found = measure_requests(served, duration, percents=(50, 75))
    done = [each for each in served if not each.error]
    expected = {
        "ttft": [each.arrivals_s[0] - each.sent_s for each in done],
        "e2el": [each.arrivals_s[-1] - each.sent_s for each in done],
        "tpot": [
            (each.arrivals_s[-1] - each.arrivals_s[0]) / (each.output_tokens - 1)
            for each in done
            if each.output_tokens > 1
        ],
        "itl": [gap for each in done for gap in np.diff(each.arrivals_s).tolist()],
    }
    for name, values in expected.items():
        for part, compute in (
            ("mean", np.mean),
            ("median", np.median),
            ("std", np.std),
            ("p75", lambda each: np.percentile(each, 75)),
            ("p99", lambda each: np.percentile(each, 99)),
        ):
            figure = found[f"{part}_{name}_ms"]
            if values:
                assert figure == pytest.approx(1e3 * compute(values), rel=1e-6, abs=1e-6), (part, name)
            else:
                assert figure is None
    assert (found["completed"], found["failed"]) == (len(done), len(served) - len(done))
    assert found["request_throughput"] == pytest.approx(len(done) / duration)
    assert found["output_throughput"] == pytest.approx(sum(each.output_tokens for each in done) / duration)
    assert found["total_token_throughput"] == pytest.approx(found["input_throughput"] + found["output_throughput"])


@given(st.lists(requests(), min_size=1, max_size=12), SECONDS, SECONDS)
def test_goodput_counts_what_keeps_every_limit(served: list[ServedRequest], first_ms: float, whole_ms: float) -> None:
    limits = {"ttft": first_ms, "e2el": whole_ms}
    found = measure_requests(served, 2.0, limits)
    good = [
        each
        for each in served
        if not each.error
        and (each.arrivals_s[0] - each.sent_s) * 1e3 <= first_ms
        and (each.arrivals_s[-1] - each.sent_s) * 1e3 <= whole_ms
    ]
    assert found["request_goodput"] == pytest.approx(len(good) / 2)
    assert found["slo_attainment"] == pytest.approx(len(good) / len(served))


def test_one_token_has_no_tpot_and_keeps_a_limit_of_it() -> None:
    single = ServedRequest(0.0, (0.5,), 10, 1)
    found = measure_requests([single], 1.0, {"tpot": 1.0})
    assert (found["mean_tpot_ms"], found["mean_itl_ms"], found["request_goodput"]) == (None, None, 1.0)
    assert keeps_limits(single, {"tpot": 0.001})
    assert not keeps_limits(single, {"ttft": 499.0})


def test_without_a_success_latencies_are_unknown_and_rates_are_0() -> None:
    found = measure_requests([ServedRequest(0.0, error="x")], 4.0)
    assert (found["completed"], found["failed"], found["request_throughput"]) == (0, 1, 0)
    assert {value for name, value in found.items() if name.endswith("_ms")} == {None}
    assert found["request_goodput"] is None  # no limit was given


@given(st.lists(requests(), max_size=10))
def test_the_most_at_once_is_that_of_some_moment(served: list[ServedRequest]) -> None:
    done = [each for each in served if each.arrivals_s]
    at_starts = [sum(other.sent_s <= each.sent_s < other.arrivals_s[-1] for other in done) for each in done]
    assert count_most_at_once(served) == max(at_starts, default=0)


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 20), SECONDS, st.data())
def test_a_static_batch_has_the_figures_of_sglang(
    batch: int, read: int, write: int, prefill: float, data: st.DataObject
) -> None:
    steps = data.draw(st.lists(SECONDS, min_size=write - 1, max_size=write - 1))
    found = measure_one_batch(batch, read, write, BatchTimes(prefill, tuple(steps)))
    total = prefill + sum(steps)
    assert found["prefill_throughput"] == pytest.approx(read * batch / prefill)
    assert found["total_latency"] == pytest.approx(total)
    assert found["overall_throughput"] == pytest.approx((read + write) * batch / total)
    if write == 1:
        assert (found["median_decode_latency"], found["median_decode_throughput"]) == (None, None)
    else:
        assert found["median_decode_latency"] == pytest.approx(np.median(steps))
        assert found["median_decode_throughput"] == pytest.approx(batch / np.median(steps))


def test_every_kind_has_its_fields() -> None:
    served = [ServedRequest(0.0, (1.0, 2.0), 5, 2)]
    batch = measure_one_batch(1, 4, 2, BatchTimes(1.0, (0.5,)))
    service = {**measure_requests(served, 2.0), "request_rate": "inf", "max_concurrency": None}
    for kind, figures in ((ONE_BATCH, batch), (THROUGHPUT, measure_throughput(served, 2.0)), (SERVE, service)):
        assert set(FIELDS[kind]) <= set(figures)
        row = make_row(kind, CONDITIONS, figures)
        assert (row["format"], row["kind"]) == (1, kind)
        assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_rows_are_appended_and_a_line_that_was_cut_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    append_row(path, {"a": 1})
    append_row(path, {"a": "é"})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": "é"}]
    path.write_text('{"a": 1}\n{"a": ')
    append_row(path, {"a": 3})
    assert path.read_text().splitlines() == ['{"a": 1}', '{"a": ', '{"a": 3}']


# --- what is sent


def test_draws_follow_the_seed_and_their_bounds() -> None:
    lengths = draw_lengths(200, 100, 0.25, 7)
    assert lengths == draw_lengths(200, 100, 0.25, 7) != draw_lengths(200, 100, 0.25, 8)
    assert (min(lengths) >= 25, max(lengths) <= 100, len(set(lengths)) > 20) == (True, True, True)
    assert set(draw_lengths(9, 100, 1.0, 7)) == {100}
    prompts = draw_prompts(lengths, 50, 7)
    assert [len(each) for each in prompts] == lengths
    assert {token for each in prompts for token in each} == set(range(50))
    assert [len(each.split()) for each in draw_words([3, 8], 1)] == [3, 8]


def test_arrivals_have_the_rate_and_the_spread_that_is_asked_for() -> None:
    assert draw_arrivals(4, math.inf, 1.0, 0) == [0.0] * 4
    for burstiness in (0.5, 1.0, 4.0):
        gaps = np.diff(draw_arrivals(20_001, 10.0, burstiness, 3))
        assert gaps.min() >= 0
        assert np.mean(gaps) == pytest.approx(0.1, rel=0.05)
        assert np.std(gaps) == pytest.approx(0.1 / math.sqrt(burstiness), rel=0.05)
    assert draw_arrivals(5, 3.0, 1.0, 3)[0] == 0.0
