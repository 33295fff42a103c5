from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from page_checks import figure_of
from watch_events import event, started, step, write_events

from shardway.rundir.directory import RunDir
from shardway.watch.progress import read_progress, summarise
from shardway.watch.report import render_report
from shardway.watch.report.curves import POINTS, find_marks
from shardway.watch.words import render_logged, render_validation

NASTY = '</script><b>&"'


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "demo")
    run.create()
    return run


def _whole_run() -> list[dict[str, Any]]:
    return [
        started(machine={"CPU": f"cores {NASTY}"}),
        *(step(number, number * 0.1) for number in range(1, 31)),
        event("validation", 20, 2.0, loss=2.0, bits_per_byte=2.885, seconds=0.2),
        event("saved", 20, 2.1, name="step-000000020", bytes=2048, seconds=0.1),
        event("fault", 30, 3.1, kind="JobError", message=f"rank 1 died {NASTY}", exit_code=4),
        event("failed", 30, 3.2, reason=f"rank 1 died {NASTY}"),
        started(step=20, at=60.0, device=f"cpu {NASTY}"),
        step(21, 61.0),
        event("finished", 21, 61.5, reason="all steps done"),
    ]


def test_every_section_and_no_raw_text(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, _whole_run())
    run.checkpoint_path(20).mkdir()
    ramp = "[train]\nglobal_batch = [[0, 8], [200, 16]]\n"
    model = "[model]\ntied = true\nhf = ''\nchannels = [16, 32]\n"
    run.write_request("", f"format = 1\n{model}[data]\npath = '{NASTY}'\n{ramp}")
    run.write_status(state="finished", step=21, total_steps=1000, reason=f"done {NASTY}")
    html = render_report(run)
    page = html
    for heading in ("Over time", "Attempts", "Faults", "Resolved run", "Machine"):
        assert f"<h2>{heading}</h2>" in page
    for title in ("Loss", "Bits per byte", "Throughput", "Learning rate", "Gradient norm"):
        assert f"<h3>{title}</h3>" in page
    for row in (
        "<td>failed: rank 1 died &lt;/script&gt;&lt;b&gt;&amp;&quot;</td>",
        "<td>20 to 21</td>",
        "<th>path</th><td>&lt;/script&gt;&lt;b&gt;&amp;&quot;</td>",
        "<th>channels</th><td>16, 32</td>",
        "<th>global_batch</th><td>[0, 8], [200, 16]</td>",
        "<th>tied</th><td>true</td>",
        "<th>hf</th><td>&quot;&quot;</td>",
        "<th>CPU</th><td>",
        "done &lt;/script&gt;",
        "<span>validation bits/byte</span><b>2.885</b>",
        "<span>wall time</span><b>0:05</b><span>2 attempts</span>",
        "<span>checkpoints</span><b>1</b>",
    ):
        assert row in page
    assert NASTY not in page
    assert "<b>&amp;" not in page


def test_one_file_that_fetches_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, _whole_run())
    html = render_report(run)
    assert "default-src 'none'" in html
    assert re.findall(r"""(?:src|href)="(?!data:|#)|url\(|@import|https?://""", html) == ["http://"]  # the name of SVG


def test_curves_and_marks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, _whole_run())
    html = render_report(run)
    train, validation = figure_of(html, "loss")["traces"]
    assert (train["step"][-3:], train["y"][0], train["y"][-2]) == ([30, 21, 21], 5.0, None)
    assert (validation["step"], validation["y"]) == ([20], [2.0])
    for kind in ("save", "validation", "resume", "fault"):
        assert html.count(f'<i class="event {kind}"') == 1
    assert "fault at step 30: JobError: rank 1 died &lt;/script&gt;" in html


def test_long_curves_are_thinned_and_smoothed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step(number, number * 0.1, loss=99.0 if number == 4321 else 1.0) for number in range(1, 6001)]
    saves = [event("saved", number, number * 0.1, name="", bytes=1) for number in range(10, 6001, 10)]
    write_events(monkeypatch, run, [started(total_steps=6000), *steps, *saves])
    raw, mean = figure_of(render_report(run), "loss")["traces"]
    assert len(raw["x"]) <= POINTS + 2
    assert (raw["step"][0], raw["step"][-1], max(raw["y"]), raw["faint"]) == (1, 6000, 99.0, True)
    assert mean["name"] == "mean of 121 steps"
    assert max(mean["y"]) == pytest.approx((120 + 99.0) / 121, rel=1e-5)
    assert len(find_marks(list(run.all_events()), read_progress(run))) == 200


@pytest.mark.parametrize("broken", [None, math.nan, math.inf])
def test_broken_losses_are_gaps_and_counted(run: RunDir, monkeypatch: pytest.MonkeyPatch, broken: float | None) -> None:
    write_events(monkeypatch, run, [started(), step(1, 1.0), step(2, 2.0, loss=broken), step(3, 3.0)])
    html = render_report(run)
    assert figure_of(html, "loss")["traces"][0]["y"] == [5.0, None, 2.5]
    assert "The loss of 1 step was not a finite number" in html


def test_run_that_never_stepped(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, [started()])
    html = render_report(run)
    assert "No step has been recorded yet." in html
    assert "Resolved run" not in html, "a section without content is left out"
    assert "<script" not in html


def test_run_without_any_event(run: RunDir) -> None:
    html = render_report(run)
    assert '<span class="state new">new</span>' in html
    assert "The run has not begun." in html
    assert "<h2>Attempts" not in html
    assert "<h2>Machine" not in html


def test_damaged_resolved_run_is_said(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, [started(), step(1, 1.0)])
    run.resolved_path.write_text("[model")
    assert "resolved.toml is damaged" in render_report(run)


def test_accuracy_and_samples(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    images = started(tokens_per_step=32, samples_per_step=32, bytes_per_token=None)
    checked = event("validation", 1, 1.1, loss=0.05, accuracy=0.985)
    write_events(monkeypatch, run, [images, step(1, 1.0), checked])
    html = render_report(run)
    assert "<span>validation accuracy</span><b>98.50%</b>" in html
    assert figure_of(html, "accuracy")["traces"][0]["y"] == [98.5]
    assert figure_of(html, "speed")["unit"] == "samples/s"
    assert figure_of(html, "speed")["traces"][0]["y"] == [400.25]


def test_values_that_a_script_names(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = [event("logged", number, number, values={"a <b>": 0.5 * number, "lag": None}) for number in (1, 2)]
    checked = event("validation", 2, 2.1, loss=0.05, f1=0.75)
    write_events(monkeypatch, run, [started(), step(1, 1.0), logged[0], step(2, 2.0), logged[1], checked])
    html = render_report(run)
    assert "a <b>" not in re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert figure_of(html, "named0")["title"] == "a <b>"
    assert figure_of(html, "named0")["traces"][0]["y"] == [0.5, 1.0]
    assert figure_of(html, "named1")["traces"][0]["y"] == [None, None]
    assert figure_of(html, "named2")["traces"][0]["y"] == [0.75]
    summary = summarise(run)
    assert summary.logged is not None
    assert render_logged(summary.logged) == "a <b> 1  lag nan  at step 2"
    assert render_validation(summary.validation) == "loss 0.0500  f1 0.75"  # type: ignore[arg-type]


def test_the_same_events_give_the_same_report(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, [started(), step(1, 1.0)])
    assert render_report(run) == render_report(run)


def test_where_the_time_went(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"start": 20.0, "step": 20.0}
    events = [
        started(at=20.0, spent={"start": 20.0}),
        *(step(number, 20.0 + number) for number in range(1, 21)),
        event("stopped", 20, 40.0, spent=first),
        started(step=15, at=140.0, spent={"start": 20.0}),
        event("finished", 20, 150.0, spent={"start": 20.0, "repeat": 5.0, "validate": 5.0}),
    ]
    write_events(monkeypatch, run, events)
    page = render_report(run)
    assert "<h2>Where the time went</h2><p>13 % of 2:30 went into steps that hold: goodput" in page
    assert "arXiv 2410.21680" in page
    for row in (
        "<td>steps that hold</td><td>20.0 s</td><td>13 %</td><td>each step counted once</td>",
        "<td>steps undone or unfinished</td><td>5.0 s</td><td>3.3 %</td>"
        "<td>5 steps undone, 5.0 s to do them again</td>",
        "<td>start-up</td><td>40.0 s</td><td>27 %</td>",
        "<td>between attempts</td><td>80.0 s</td><td>53 %</td>",
    ):
        assert row in page
    assert "<td>saving</td>" not in page
    widths = [float(width) for width in re.findall(r'<i style="width:([0-9.]+)%;background', page)]
    assert sum(widths) == pytest.approx(100, abs=0.01)
    assert max(widths) == pytest.approx(100 * 80 / 150, abs=0.001)
    colours = re.findall(r"width:[0-9.]+%;background:var\(--(\w+)\)", page)
    assert all(f"--{colour}:" in page for colour in colours)


def test_times_that_were_not_recorded_are_said_to_be_missing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, [started(), step(1, 1.0)])
    page = render_report(run)
    assert '<h2>Where the time went</h2><p class="soft">It was not recorded.</p>' in page
