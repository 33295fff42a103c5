"""Pages in a browser: no error of a script, nothing wider than the window, values under the pointer, paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import load_bench, write_foreign

from chromium import BROWSER, NO_BROWSER, Browser, browser, check_page
from shardway.rundir.directory import RunDir
from shardway.watch.report import render_report
from shardway.watch.report.compare import compare, render_comparison_page
from shardway.watch.report.content import gather

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason=NO_BROWSER)]


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind: a run of an hour, a foreign command, a run without anything, a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    hour = load_bench().write_run(folder / "hour", hours=1.0, nodes=2, gpus=4)
    empty = RunDir(folder / "empty")
    empty.create()
    found = {
        "hour": render_report(hour),
        "foreign": render_report(write_foreign(folder / "foreign")),
        "empty": render_report(empty),
        "comparison": render_comparison_page(compare([gather(hour), gather(hour)])),
    }
    for name, text in found.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in found}


@pytest.mark.parametrize("name", ["hour", "foreign", "empty", "comparison"])
def test_a_page_is_sound_at_every_width_in_both_themes(opened: Browser, pages: dict[str, Path], name: str) -> None:
    check_page(opened, pages[name])


def test_values_stand_under_the_pointer_and_the_scale_changes(opened: Browser, pages: dict[str, Path]) -> None:
    opened.problems.clear()
    opened.show(pages["hour"], 1280, "light")
    words = opened.point_at(".plot[data-map=use]", 0.25, 0.999)
    assert re.search(r"0:1\d:\d\d after the start", words)
    assert "n2:3: 0 %" in words
    assert "step" in opened.point_at(".plot[data-figure=loss]", 0.8, 0.5)
    assert "lowest 0 (n2:3)" in opened.point_at(".plot[data-strip=use]", 0.25, 0.5)
    before = opened.evaluate("document.querySelector('#lane-loss .curve').getAttribute('d')")
    for changed in (True, False):
        opened.evaluate("document.querySelector('button[data-log=loss]').click()")
        after = opened.evaluate("document.querySelector('#lane-loss .curve').getAttribute('d')")
        assert len(after) > 200
        assert (after[:400] != before[:400]) is changed or not changed
    assert opened.problems == []
