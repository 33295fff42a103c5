"""A report's views: of a foreign command, as data, the proposal's table, several runs compared."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from page_checks import figure_of, page_data
from report_runs import load_bench, write_foreign
from watch_events import event, started, step, write_events

from shardway.rundir.directory import RunDir
from shardway.watch.report import render_report
from shardway.watch.report.compare import (
    PaceRatio,
    compare,
    find_pace,
    find_ratio,
    list_step_times,
    render_comparison,
    render_comparison_page,
    render_verdict,
)
from shardway.watch.report.content import describe, gather, read_settings
from shardway.watch.report.event_log import EventLog
from shardway.watch.report.proposal import proposal_facts, render_proposal


def test_a_foreign_command_that_left_a_gpu_idle(tmp_path: Path) -> None:
    run = write_foreign(tmp_path / "mine")
    content = gather(run)
    words = [sentence for _, sentence in describe(content)]
    assert words[0] == "The command has failed after 5:00, exit code 3: exit code 3 </script>."
    assert "1 of 2 GPUs on node n1 never ran a kernel (GPU 1)." in words
    page = render_report(run)
    assert "1 of 2 GPUs on node n1 never ran a kernel (GPU 1)." in page
    assert "<td>123_4</td>" in page
    assert "GPM is &lt;denied&gt;" in page
    assert "Traceback &lt;/pre&gt;&lt;script&gt;" in page
    assert "python train.py &lt;b&gt;" in page
    assert page.count("</script>") == page.count("<script") == 2
    assert [each["name"] for each in page_data(page)["maps"]] == ["use", "memory", "power", "cpu"]
    facts = content.as_json()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert [(gpu["host"], gpu["index"], gpu["use_mean"], gpu["verdict"]) for gpu in facts["gpus"]] == [
        ("n1", 0, 90.0, "used"),
        ("n1", 1, 0.0, "idle"),
    ]
    assert all({"rule", "evidence", "ceiling_ms", "do"} <= each.keys() for each in facts["advice"])
    assert (facts["summary"]["state"], facts["summary"]["reason"]) == ("crashed", "exit code 3 </script>")
    assert facts["wall_s"] == 300
    assert facts["energy_kwh"] == pytest.approx(300 * 432 / 3.6e6)


def test_the_table_for_a_proposal(tmp_path: Path) -> None:
    content = gather(write_foreign(tmp_path / "mine"))
    facts = proposal_facts(content)
    assert (facts["nodes"], facts["gpu_models"], facts["jobs"]) == (1, ["H100"], ["123_4"])
    assert (facts["gpu_hours"], facts["use_mean"]) == (pytest.approx(600 / 3600), 45.0)
    lines = render_proposal(content).splitlines()
    assert "energy      0.036 kWh (GPUs alone: power integrated over the samples)" in lines
    assert " ".join(lines[-2].split()) == "n1 0 90 % 90 % n/a 16.0 GiB 16.0 GiB 360 W 360 W 0.030 kWh"
    empty = RunDir(tmp_path / "empty")
    empty.create()
    assert "No GPU was sampled" in render_proposal(gather(empty))


def test_keys_at_their_defaults_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "a")
    write_events(monkeypatch, run, [started(), step(1, 1.0)])
    text = 'format = 1\n[optim]\nlr = 0.1    # --set\nname = "x # default"  # mine.toml\nbeta = 0.9  # default\n'
    run.write_request("", text)
    settings = read_settings(run)
    assert settings.chosen["optim"] == {"lr": 0.1, "name": "x # default"}
    assert settings.defaults == {"optim": {"beta": 0.9}}
    shown, _, folded = render_report(run).partition("<summary>1 key at default</summary>")
    assert "<th>lr</th>" in shown
    assert "<th>beta</th>" in folded


def test_attempts_leave_a_gap_and_marks_stand_at_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "a")
    first = [started(), *(step(number, 10.0 * number) for number in range(1, 101))]
    again = [started(step=50, at=50_000.0), *(step(number, 49_510.0 + 10 * number) for number in range(51, 101))]
    write_events(monkeypatch, run, [*first, event("fault", 100, 1001.0, kind="JobError", message="gone"), *again])
    page = render_report(run)
    assert page.count("<td>no end was recorded (killed?)</td>") == 2
    assert ">51.2k</b>" in page  # the end of a curve is no longer than its place on a phone
    trace = figure_of(page, "loss")["traces"][0]
    assert trace["step"].count(75) == 2  # a step that was repeated stands where it was taken, both times
    assert trace["y"].count(None) == 1
    assert trace["x"] == sorted(trace["x"])
    waited = figure_of(render_report(run), "wait")["traces"][0]
    assert max(each for each in waited["y"] if each) == pytest.approx(99.2)  # 0.08 of 10 s are the step


def test_a_pace_has_an_interval_that_holds_it() -> None:
    drawn = random.Random(1)
    held = 0
    for _ in range(60):
        noise, times = 0.0, []
        for _ in range(400):  # steps that follow each other are alike
            noise = 0.6 * noise + drawn.gauss(0, 0.05)
            times.append(1.0 + noise)
        pace = find_pace(times)
        assert pace is not None
        held += pace.low_s <= 1.0 <= pace.high_s
    assert held >= 50
    assert find_pace([1.0] * 7) is None


def test_a_difference_is_claimed_where_it_is_seen() -> None:
    drawn = random.Random(2)
    base, quick = ([mean + drawn.gauss(0, 0.05) for _ in range(500)] for mean in (1.12, 1.0))
    found = find_ratio(base, quick)
    assert found is not None
    assert found.is_seen
    assert found.low < 1.12 < found.high
    same = find_ratio(base, [1.12 + drawn.gauss(0, 0.05) for _ in range(500)])
    assert same is not None
    assert not same.is_seen
    assert render_verdict("b", "a", PaceRatio(1.12, 1.10, 1.14)) == "b is 12 % (10 to 14 %) faster a step than a"
    slower = render_verdict("b", "a", PaceRatio(1 / 1.25, 1 / 1.3, 1 / 1.2))
    assert slower == "b is 25 % (20 to 30 %) slower a step than a"
    assert "no difference a step can be seen" in render_verdict("b", "a", PaceRatio(1.01, 0.99, 1.03))


def test_the_first_steps_of_each_attempt_do_not_count() -> None:
    events = [started(), *(step(n, n, seconds=9.0 if n <= 10 else 1.0) for n in range(1, 101))]
    events += [started(step=100, at=200.0)]
    events += [step(100 + n, 200 + n, seconds=9.0 if n <= 2 else 1.0) for n in range(1, 11)]
    assert list_step_times(EventLog(events)) == [1.0] * 98


def test_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(3)
    contents = []
    for name, mean, lr in (("a", 1.0, 0.1), ("b<i>", 0.8, 0.2)):
        run = RunDir(tmp_path / name)
        steps = [step(n, float(n), seconds=mean + drawn.gauss(0, 0.02)) for n in range(1, 201)]
        write_events(monkeypatch, run, [started(), *steps, event("finished", 200, 201.0, reason="")])
        run.write_request("", f"format = 1\n[optim]\nlr = {lr}  # --set\nbeta = 0.9  # default\n")
        contents.append(gather(run))
    found = compare(contents)
    assert found.keys == {"optim.lr": ["0.1", "0.2"]}
    facts = found.as_json()
    assert facts["runs"][1]["times_faster"]["ratio"] == pytest.approx(1.25, abs=0.02)
    text = render_comparison(found)
    assert "b<i> is 25 % (" in text
    assert "optim.lr" in text
    assert "optim.beta" not in text
    page = render_comparison_page(found)
    assert "b<i>" not in page
    assert "b\\u003ci>" in page
    assert [trace["name"] for trace in figure_of(page, "loss")["traces"]] == ["a", "b<i>"]


def test_keys_that_cannot_be_read_are_not_all_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    for name, text in (("a", "true"), ("b", ""), ("c", "false")):
        run = RunDir(tmp_path / name)
        write_events(monkeypatch, run, [started(), *(step(n, float(n), seconds=1.0) for n in range(1, 31))])
        if text:
            run.write_request("", f'format = 1\n[data]\npack = {text}\nskip = ["x", true]\n')
        contents.append(gather(run))
    assert compare(contents).keys == {"data.pack": ["true", "n/a", "false"]}
    two = compare(contents[:2])
    assert two.keys == {}
    told = render_comparison(two)
    assert told.splitlines()[-1] == "Keys are not known of b: the run has no record of them."
    assert "Keys are not known of b" in render_comparison_page(two)
    (tmp_path / "b/resolved.toml").write_text("[data\n")
    assert "b/resolved.toml is damaged" in compare([contents[0], gather(contents[1].run)]).keyless


def test_commands_are_compared_by_their_jobs(tmp_path: Path) -> None:
    text = render_comparison(compare([gather(write_foreign(tmp_path / name)) for name in "ab"]))
    assert "b and a: the steps of a command are not recorded, so no pace is compared." in text
    assert ["state", "crashed", "crashed"] in [line.split() for line in text.splitlines()]


@pytest.mark.slow
def test_a_day_of_sixteen_gpus_is_at_most_a_megabyte(tmp_path: Path) -> None:
    run = load_bench().write_run(tmp_path / "day", hours=24.0, step_s=6.0, every_s=15.0)
    # The size is that of samples every second: maps have at most 480 bins, curves a number of points.
    assert 300_000 < len(render_report(run).encode()) <= 1_000_000
