"""How long an activity may take, from how long it took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.ranks.hang import ActivitySpan, HangTimeout, read_hang_timeout
from shardway.runfile.schema import RunSection
from shardway.telemetry.activity import Activity

STEP, SAVE = ActivitySpan(Activity.STEP), ActivitySpan(Activity.SAVE)


def learnt(span: ActivitySpan, *seconds: float) -> HangTimeout:
    hang_timeout = HangTimeout(start_s=600.0)
    for each in seconds:
        hang_timeout.observe(span, each)
    return hang_timeout


def test_three_times_the_99th_percentile_and_five_seconds() -> None:
    times = [float(i) for i in range(1, 201)]
    assert learnt(STEP, *times).limit_s(STEP, stopped=False) == 3 * 198.0 + 5.0


def test_what_waits_for_files_gets_a_minute_more() -> None:
    assert learnt(SAVE, 2.0, 2.0, 2.0).limit_s(SAVE, stopped=False) == 3 * 2.0 + 5.0 + 60.0


def test_a_process_that_is_stopped_waits_for_no_file() -> None:
    assert learnt(SAVE, 2.0, 2.0, 2.0).limit_s(SAVE, stopped=True) == 3 * 2.0 + 5.0
    assert HangTimeout(600.0).limit_s(SAVE, stopped=True) == 5.0


def test_what_is_unknown_has_the_timeout_of_a_start() -> None:
    hang_timeout = learnt(STEP, 1.0, 1.0)
    assert hang_timeout.limit_s(STEP, stopped=False) == 600.0
    hang_timeout.observe(STEP, 1.0)
    assert hang_timeout.limit_s(STEP, stopped=False) == 8.0
    assert hang_timeout.limit_s(ActivitySpan(Activity.START), stopped=False) == 600.0


def test_the_first_step_teaches_nothing_and_is_not_judged_by_others() -> None:
    hang_timeout = learnt(ActivitySpan(Activity.STEP, is_first=True), 90.0, 90.0, 90.0)
    assert hang_timeout.usual_s(Activity.STEP) is None
    hang_timeout = learnt(STEP, 1.0, 1.0, 1.0)
    assert hang_timeout.limit_s(ActivitySpan(Activity.STEP, is_first=True), stopped=False) == 600.0


def test_a_step_that_is_repeated_is_a_step() -> None:
    hang_timeout = learnt(ActivitySpan(Activity.REPEAT), 1.0, 1.0, 1.0)
    assert hang_timeout.limit_s(STEP, stopped=False) == 8.0
    assert hang_timeout.usual_s(Activity.STEP) == 1.0


@pytest.mark.parametrize("activity", [Activity.STEP, Activity.DATA, Activity.SAVE, Activity.VALIDATE])
def test_a_fixed_limit_is_kept(activity: Activity) -> None:
    hang_timeout = HangTimeout(600.0, fixed_s=30.0)
    for _ in range(5):
        hang_timeout.observe(ActivitySpan(activity), 100.0)
    assert hang_timeout.limit_s(ActivitySpan(activity), stopped=False) == 30.0
    assert hang_timeout.limit_s(ActivitySpan(Activity.START), stopped=False) == 600.0


@given(st.lists(st.floats(0, 1e5), max_size=50), st.sampled_from(list(Activity)), st.booleans())
def test_never_less_than_the_margin(times: list[float], activity: Activity, stopped: bool) -> None:
    assert learnt(ActivitySpan(activity), *times).limit_s(ActivitySpan(activity), stopped=stopped) >= 5.0


def test_a_run_file_sets_the_timeout() -> None:
    limits = {}
    for word in ("4s", "auto"):
        hang_timeout = read_hang_timeout(RunSection(hang_timeout=word, start_timeout="100s"))
        assert hang_timeout is not None
        limits[word] = [
            hang_timeout.limit_s(ActivitySpan(each), stopped=False) for each in (Activity.LOAD, Activity.STEP)
        ]
    assert limits == {"4s": [100.0, 4.0], "auto": [100.0, 100.0]}
    assert read_hang_timeout(RunSection(hang_timeout="off")) is None
