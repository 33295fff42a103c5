from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from watch_events import BEGIN, event, started, step, write_events

from shardway.rundir.directory import RunDir
from shardway.rundir.names import SkippedRange
from shardway.watch.progress import GONE, STARTS, BestCheckpoint, find_best_checkpoint, find_runs, summarise
from shardway.watch.report import render_report
from shardway.watch.report.content import describe, gather
from shardway.watch.words import render_skipped


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "demo")


def test_finished_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step(number, number * 0.5, tokens_per_s=1000.0 * number) for number in range(1, 31)]
    others = [
        event("validation", 20, 10.1, loss=2.0, bits_per_byte=2.9, seconds=0.2),
        event("validation", 30, 15.1, loss=2.5, bits_per_byte=3.6, seconds=0.2),
        event("saved", 30, 15.2, name="step-000000030", bytes=1024, seconds=0.1),
        event("finished", 30, 15.5, reason="all 30 steps done"),
    ]
    write_events(monkeypatch, run, [started(total_steps=30), *steps, *others])
    run.checkpoint_path(30).mkdir()
    run.write_status(state="finished", step=30, total_steps=30, reason="all 30 steps done")
    summary = summarise(run)
    assert (summary.name, summary.state, summary.reason) == ("demo", "finished", "all 30 steps done")
    assert (summary.step, summary.total_steps, summary.attempts) == (30, 30, 1)
    assert summary.loss == 10 / 31
    assert summary.smooth_loss == pytest.approx(sum(10 / (number + 1) for number in range(11, 31)) / 20)
    assert (summary.grad_norm, summary.lr) == (0.9, 1e-3)
    assert (summary.unit, summary.tokens_per_s) == ("tokens", 20_500.0)  # median of 11,000 ... 30,000
    assert summary.seconds_left is None
    assert summary.validation is not None
    assert (summary.validation.step, summary.validation.bits_per_byte) == (30, 3.6)
    assert summary.best_validation is not None
    assert summary.best_validation.step == 20
    assert summary.last_save is not None
    assert (summary.last_save.step, summary.last_save.time) == (30, BEGIN + 15.2)
    assert summary.checkpoints == (30,)
    assert (summary.world, summary.device, summary.parameters) == (2, "cpu", 1_264_512)
    assert (summary.started, summary.updated, summary.wall_s) == (BEGIN, BEGIN + 15.5, 15.5)


def test_running_run_names_its_writer_and_the_time_left(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step (20 s, it compiles) does not count; the pause for a save between the others does."""
    write_events(monkeypatch, run, [started(total_steps=10), step(1, 20.0), step(2, 21.0), step(3, 24.0)])
    lock = run.writer_lock()
    lock.acquire()
    run.write_status(state="running", step=3, total_steps=10, reason="")
    try:
        summary = summarise(run)
    finally:
        lock.release()
    assert summary.state == "running"
    assert summary.writer is not None
    assert summary.writer.startswith("process ")
    assert summary.seconds_left == pytest.approx(7 * (24.0 - 20.0) / 2)


@pytest.mark.parametrize("before", ["finished", "running"])
def test_a_start_that_has_not_begun_to_train(run: RunDir, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then status.json and the events are those of the start before."""
    end = [event("finished", 2, 2.5, reason="all 2 steps done")] if before == "finished" else []
    write_events(monkeypatch, run, [started(total_steps=2), step(1, 1.0), step(2, 2.0), *end])
    run.write_status(state=before, step=2, total_steps=2, reason="")
    os.utime(run.status_path, (BEGIN, BEGIN))
    holder = run.writer_lock()
    holder.acquire()
    try:
        summary = summarise(run)
        assert (summary.state, summary.reason, summary.seconds_left) == ("running", STARTS, None)
        assert "process" in (summary.writer or "")
        run.write_status(state="running", step=2, total_steps=9, reason="")
        assert summarise(run).reason != STARTS
    finally:
        holder.release()


def test_killed_run_is_failed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, [started(), step(1, 1.0)])
    run.write_status(state="running", step=1, total_steps=1000, reason="")
    summary = summarise(run)
    assert (summary.state, summary.reason, summary.writer) == ("failed", "the process is gone (killed?)", None)
    assert summary.seconds_left is None


def test_killed_before_its_first_status(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, [started(), step(1, 1.0)])
    assert (summarise(run).state, summarise(run).reason) == ("failed", GONE)


def test_without_status_the_ending_event_counts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, [started(), step(1, 1.0), event("stopped", 1, 1.5, reason="SIGTERM")])
    assert (summarise(run).state, summarise(run).reason) == ("stopped", "SIGTERM")


def test_run_without_events(run: RunDir) -> None:
    run.create()
    summary = summarise(run)
    assert (summary.state, summary.step, summary.total_steps, summary.loss) == ("new", 0, None, None)
    assert (summary.started, summary.attempts, summary.validation, summary.last_save) == (None, 0, None, None)


def test_a_run_whose_records_are_lost_is_not_new(run: RunDir) -> None:
    """Checkpoints show that it trained: nothing that is read calls it not begun."""
    run.create()
    run.events_path(0).write_bytes(b"\x00\xff no event")
    run.status_path.write_bytes(b"\xff")
    assert summarise(run).reason == ""
    run.checkpoint_path(200).mkdir(parents=True)
    summary = summarise(run)
    assert (summary.state, summary.step) == ("new", 0)
    assert summary.reason == "no event of it can be read, but it has a checkpoint of step 200"
    assert "has not begun" not in render_report(run)


def test_a_run_that_has_not_begun_names_where_its_weights_come_from(run: RunDir) -> None:
    run.create()
    run.write_import("/models/llama", 0)
    run.checkpoint_path(0).mkdir(parents=True)
    assert (summarise(run).state, summarise(run).reason) == ("new", "begins with weights from /models/llama")
    assert "begins with weights from /models/llama" in render_report(run)


def test_torn_last_line_is_skipped(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, [started(), step(1, 1.0), step(2, 2.0)])
    [path] = run.path.glob("**/rank-00000.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    assert summarise(run).step == 1


def test_resume_undoes_later_steps(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first = [
        started(),
        step(100, 10.0),
        event("validation", 100, 10.1, loss=3.0),
        event("saved", 100, 10.2, name="step-000000100", bytes=1),
        step(200, 20.0),
        event("validation", 200, 20.1, loss=1.0),
        event("saved", 200, 20.2, name="step-000000200", bytes=1),
    ]
    write_events(monkeypatch, run, [*first, started(step=100, at=60.0)])
    summary = summarise(run)
    assert (summary.step, summary.attempts, summary.loss) == (100, 2, None)
    assert summary.best_validation is not None
    assert summary.best_validation.step == 100
    assert summary.last_save is not None
    assert summary.last_save.step == 100
    assert (summary.started, summary.wall_s) == (BEGIN, pytest.approx(20.2))


def test_the_best_is_that_of_the_metric_of_the_last_start(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A null is a value that was no number. Of the saved ones another may be the best."""
    found = {10: 0.5, 20: 0.75, 30: None, 40: 0.75, 50: 0.25}
    validations = [event("validation", each, each / 10, loss=each, f1=value) for each, value in found.items()]
    write_events(monkeypatch, run, [started(monitor="max f1"), *validations])
    for each in (10, 30, 50):
        run.checkpoint_path(each).mkdir()
    summary = summarise(run)
    assert summary.monitor == "f1"
    assert summary.best_validation is not None
    assert summary.best_checkpoint is not None
    assert (summary.best_validation.step, summary.best_checkpoint.step) == (20, 10)
    assert summary.as_json()["best_validation"]["metrics"] == {"loss": 20.0, "f1": 0.75}
    assert find_best_checkpoint(run) == BestCheckpoint(10, "f1", 0.5)
    html = render_report(run)
    assert "last at step 50, best at step 10" in html
    assert "validation f1" in html
    for monitor, best in (("min f1", 50), ("loss", 10), ("accuracy", None), (7, 10), ("f1", 10)):
        write_events(monkeypatch, run, [started(step=50, monitor=monitor)])
        summary = summarise(run)
        assert (summary.best_validation and summary.best_validation.step) == best, monitor


@pytest.mark.parametrize("loss", [None, math.nan])
def test_broken_loss_is_nan_here_and_null_in_json(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, loss: float | None
) -> None:
    broken = event("validation", 1, 1.1, loss=loss)
    write_events(monkeypatch, run, [started(), step(1, 1.0, loss=loss, grad_norm=math.inf), broken])
    summary = summarise(run)
    assert summary.loss is not None
    assert math.isnan(summary.loss)
    assert summary.best_validation is None
    plain = json.loads(json.dumps(summary.as_json(), allow_nan=False))
    assert (plain["loss"], plain["grad_norm"], plain["validation"]["loss"]) == (None, None, None)


def test_what_nodes_had_and_was_left_out_is_known(run: RunDir) -> None:
    run.create()
    run.write_status(state="running", step=3)
    assert summarise(run).local_checkpoints_ignored is None
    run.write_status(state="running", step=3, local_checkpoints_ignored=50)
    assert summarise(run).local_checkpoints_ignored == 50


def test_a_way_back_undoes_later_steps_and_what_is_left_out_is_known(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [started(), step(1, 1.0), event("saved", 1, 1.5, name="step-000000001"), step(2, 2.0)]
    events += [event("saved", 2, 2.5, name="step-000000002"), event("validation", 2, 2.6, loss=0.5)]
    write_events(monkeypatch, run, [*events, event("rolled_back", 1, 3.0)])
    left_out = SkippedRange(8, 16, 8, 1, 2, 2, "a spike in step 2", 3.0)
    run.left_out.write([left_out])
    summary = summarise(run)
    assert (summary.step, summary.attempts, summary.validation) == (1, 1, None)
    assert summary.last_save is not None
    assert summary.last_save.step == 1
    assert summary.left_out == (left_out,)
    assert json.loads(json.dumps(summary.as_json()))["left_out"] == [left_out.as_json()]
    assert render_skipped(left_out) == "8 samples (positions 8 to 16), back to step 1: a spike in step 2"
    page = render_report(run)
    assert "Left out after spikes" in page
    assert "8 to 16" in page
    run.left_out.path.write_text("{")
    assert summarise(run).left_out == ()


def test_a_start_in_place_is_no_attempt(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    again = [
        event("restarted", 0, 1.0),
        started(time=BEGIN + 2.0),
        event("restarted", 0, 3.0),
        event("restarted", 0, 4.0),
    ]
    write_events(monkeypatch, run, [started(), *again, started(time=BEGIN + 5.0), started(time=BEGIN + 9.0)])
    assert (summarise(run).attempts, summarise(run).restarts) == (2, 2)
    page = render_report(run)
    assert [f"<td>{name}</td>" in page for name in ("1", "1, again", "2", "2, again")] == [True, True, True, False]
    assert "<span>2 attempts</span>" in page


def test_a_start_of_another_agent_is_an_attempt(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before ended when its ranks were to start again."""
    failed = event("restarted", 0, 1.0, agent=7)
    write_events(
        monkeypatch, run, [started(agent=7), failed, started(at=2.0, agent=7), failed, started(at=9.0, agent=8)]
    )
    assert (summarise(run).attempts, summarise(run).restarts) == (2, 1)


def test_json_names_are_stable(run: RunDir) -> None:
    run.create()
    names = """
        name path state reason step total_steps loss smooth_loss grad_norm lr unit tokens_per_s samples_per_s
        seconds_left validation best_validation last_save checkpoints world device host parameters started updated
        wall_s attempts writer account left_out local_checkpoints_ignored restarts monitor best_checkpoint logged
        damaged clock_back_s events_end sampled evaluations
    """
    assert list(summarise(run).as_json()) == names.split()
    assert summarise(run).as_json()["path"] == str(run.path)


def test_run_of_images_is_measured_in_samples(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    images = started(tokens_per_step=32, samples_per_step=32, bytes_per_token=None)
    write_events(monkeypatch, run, [images, step(1, 1.0)])
    assert (summarise(run).unit, summarise(run).samples_per_s) == ("samples", 400.25)


def test_a_damaged_status_does_not_hide_what_the_events_say(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(monkeypatch, run, [started(total_steps=10), step(1, 20.0), step(2, 21.0)])
    (run.path / "status.json").write_text("{")
    summary = summarise(run)
    assert (summary.step, summary.total_steps) == (2, 10)


def test_find_runs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        RunDir(tmp_path / name).create()
    (tmp_path / "no-run").mkdir()
    (tmp_path / "file").touch()
    assert [run.path.name for run in find_runs(tmp_path)] == ["a", "b"]
    assert find_runs(tmp_path / "a") == [RunDir(tmp_path / "a")]
    assert find_runs(tmp_path / "missing") == []


def test_a_long_run_is_summarised_quickly(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 steps in 0.4 s of processor time, Python's start included, where to read the lines alone takes 0.11: other
    work that shares a core makes both slower."""
    write_events(monkeypatch, run, [started(total_steps=20_000), *(step(n, n * 0.1) for n in range(1, 20_001))])
    code = (
        "import sys; from pathlib import Path; from shardway.rundir.directory import RunDir; "
        "from shardway.watch.progress import summarise; sys.exit(summarise(RunDir(Path(sys.argv[1]))).step != 20_000)"
    )
    lines = "import json, sys; [json.loads(line) for line in open(sys.argv[1] + '/events/rank-00000.jsonl')]"
    costs, reads = list[float](), list[float]()
    while len(costs) < 5 and (not costs or min(costs) >= 3.6 * min(reads)):
        costs.append(processor_s(code, run.path))
        reads.append(processor_s(lines, run.path))
    assert min(costs) < 3.6 * min(reads)


def processor_s(code: str, folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1e308, 10**400, 1e300])
def test_times_and_counts_that_are_none(run: RunDir, odd: float) -> None:
    run.create()
    lines = [
        {"event": "started", "step": 0, "total_steps": odd, "time": BEGIN, "spent": {"start": odd, "load": odd}},
        {"event": "step", "step": odd, "loss": 1.0, "seconds": odd, "time": odd},
        {"event": "saved", "step": 1, "time": odd, "seconds": odd, "bytes": odd, "spent": {"step": 1.0}},
    ]
    (run.path / "events/rank-00000.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run.write_status(state="running", step=1)
    lock = run.writer_lock()
    lock.acquire()
    try:
        summary = summarise(run)
    finally:
        lock.release()
    assert (summary.step, summary.total_steps, summary.seconds_left) == (0, None, None)
    assert summary.last_save is not None
    assert (summary.last_save.time, summary.last_save.size_bytes) == (0.0, None)
    assert json.loads(json.dumps(summary.as_json(), allow_nan=False))["loss"] == 1.0


# --- clocks that are set, and events that are cut


def _one_hour_back(at: float) -> float:
    """The date of what happened `at` seconds after the begin, on a machine whose clock goes back after half an hour."""
    return at if at < 1800 else at - 3600


def _write_set_back(monkeypatch: pytest.MonkeyPatch, run: RunDir, **more: Any) -> None:
    steps = [
        step(number, _one_hour_back(24.0 * number), spent={"start": 4.0, "step": 24.0 * number - 4.0})
        for number in range(1, 101)
    ]
    ends = [event("finished", 100, _one_hour_back(2401.0), spent={"start": 4.0, "step": 2396.0, "end": 1.0}, **more)]
    write_events(monkeypatch, run, [started(total_steps=100, spent={"start": 0.0}), *steps, *ends])
    run.write_status(state="finished", step=100, total_steps=100, reason="", time=BEGIN - 1199.0)


def test_a_clock_that_is_set_back_takes_no_time_away(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes between the two events around the step is all that is not known."""
    _write_set_back(monkeypatch, run)
    summary = summarise(run)
    assert summary.clock_back_s == pytest.approx(3576.0)  # an hour less the step in which it happened
    assert summary.wall_s == pytest.approx(2401.0 - 24.0)
    assert summary.account is not None
    assert (summary.account.wall_s, summary.account.productive_s) == (pytest.approx(2401.0), pytest.approx(2396.0))
    assert (summary.started, summary.updated) == (BEGIN, BEGIN - 1199.0)  # as they are written
    content = gather(run)
    assert content.wall_s == summary.wall_s
    assert content.axis is not None
    assert (content.axis.start, content.axis.end) == (BEGIN + 1800 - 3600, BEGIN + 1776)
    words = "Dates in the events go back by 59:36 (a clock was set): times leave that out, and figures show that time "
    words += "twice."
    assert words in [sentence for _, sentence in describe(content)]
    assert words in render_report(run)
    loss = next(figure for figure in content.figures if figure.name == "loss")
    gaps = [point.step for point in loss.curves[0].points if math.isnan(point.value)]
    assert gaps == [75]  # no line leads back


def test_the_pace_outlives_a_clock_that_is_set_back(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step(number, _one_hour_back(24.0 * number)) for number in range(1, 101)]
    write_events(monkeypatch, run, [started(total_steps=200), *steps])
    lock = run.writer_lock()
    lock.acquire()
    try:
        summary = summarise(run)
    finally:
        lock.release()
    assert summary.seconds_left == pytest.approx(100 * 24.0 * 98 / 99)


def test_later_attempts_are_dated_after_a_clock_that_was_set_back(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one starts ten minutes after the first has ended, by the clock that was set back."""
    _write_set_back(monkeypatch, run)
    again = [started(100, at=-599.0, spent={"start": 4.0}), event("finished", 100, -589.0, spent={"start": 14.0})]
    write_events(monkeypatch, run, again)
    account = summarise(run).account
    assert account is not None
    assert account.idle_s == pytest.approx(596.0)
    assert account.wall_s == pytest.approx(2401.0 + 610.0)


@pytest.mark.parametrize("odd", [-1e9, 5.0, 28.0, 1e9])
def test_one_date_that_stands_out_moves_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch, odd: float) -> None:
    dates = [10.0, 20.0, 30.0, odd, 50.0, 60.0]
    steps = [step(number, at) for number, at in enumerate(dates, 1)]
    write_events(monkeypatch, run, [started(), *steps])
    assert (summarise(run).wall_s, summarise(run).clock_back_s) == (60.0, 0.0)


def test_events_that_end_before_the_status(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step(number, float(number)) for number in range(1, 101)]
    write_events(monkeypatch, run, [started(total_steps=100), *steps, event("finished", 100, 101.0, reason="all")])
    run.write_status(state="finished", step=100, total_steps=100, reason="all", time=BEGIN + 101.0)
    assert summarise(run).events_end is None
    lines = run.events_path(0).read_bytes().splitlines(keepends=True)
    run.events_path(0).write_bytes(b"".join(lines[:58])[:-9])  # torn in the line of step 57
    summary = summarise(run)
    assert (summary.state, summary.step, summary.events_end) == ("finished", 100, 56)
    words = "The events end at step 56, the status at 100: what came after is not recorded."
    assert words in [sentence for _, sentence in describe(gather(run))]
    assert words in render_report(run)
    run.events_path(0).write_bytes(b"")
    assert (summarise(run).step, summarise(run).events_end) == (100, 0)


def test_a_status_that_is_older_than_the_events(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume goes back before the step of the last status, which is of the attempt before."""
    run.create()
    run.write_status(state="failed", step=80, total_steps=100, reason="", time=BEGIN + 80.0)
    write_events(monkeypatch, run, [started(50, at=200.0), step(51, 201.0)])
    assert (summarise(run).step, summarise(run).events_end) == (51, None)


def test_events_that_are_read_before_the_status(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on writes a few more steps between the two; where minutes lie between, they cannot be written."""
    write_events(monkeypatch, run, [started(), step(1, 1.0)])
    lock = run.writer_lock()
    lock.acquire()
    try:
        run.write_status(state="running", step=3, time=BEGIN + 3.0)
        assert (summarise(run).step, summarise(run).events_end) == (1, None)
        run.write_status(state="running", step=300, time=BEGIN + 300.0)
        assert (summarise(run).step, summarise(run).events_end) == (300, 1)
    finally:
        lock.release()
