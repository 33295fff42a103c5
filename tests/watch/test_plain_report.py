"""A report that is made without numpy has what one with numpy has."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from report_runs import load_bench

from shardway.rundir.directory import RunDir
from shardway.watch.report.compare import find_pace
from shardway.watch.report.content import gather
from shardway.watch.report.page import render_report


def list_differences(wanted: Any, found: Any, place: str = "") -> list[str]:
    """The places at which two JSON values differ by more than what float32 keeps."""
    if isinstance(wanted, dict) and isinstance(found, dict) and wanted.keys() == found.keys():
        return [each for key in wanted for each in list_differences(wanted[key], found[key], f"{place}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [each for number, pair in pairs for each in list_differences(*pair, f"{place}[{number}]")]
    same = found == pytest.approx(wanted, rel=1e-5, abs=1e-9) if isinstance(wanted, float) else found == wanted
    return [] if same else [f"{place}: {wanted} {found}"]


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Minutes of four GPUs."""
    run: RunDir = load_bench().write_run(
        tmp_path_factory.mktemp("plain") / "run", hours=0.2, nodes=1, step_s=6.0, every_s=15.0
    )
    return run


def test_a_report_without_numpy_is_the_same(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, page = gather(run).as_json(), render_report(run)
    assert wanted["gpus"]
    assert wanted["hardware"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "numpy", None)
        found, plain = gather(run).as_json(), render_report(run)
    assert list_differences(wanted, found) == []
    assert re.sub(r"base64,[^)\"]*|[0-9.]+", "", plain) == re.sub(r"base64,[^)\"]*|[0-9.]+", "", page)


def test_the_pace_of_a_comparison_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.5 + 0.01 * (number * 7 % 11) for number in range(200)]
    wanted = find_pace(times)
    monkeypatch.setitem(sys.modules, "numpy", None)
    found = find_pace(times)
    assert wanted is not None
    assert found is not None
    assert found.mean_s == wanted.mean_s
    assert (found.low_s, found.high_s) == pytest.approx((wanted.low_s, wanted.high_s), rel=2e-3)  # other draws
