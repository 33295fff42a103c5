from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from watch_events import BEGIN, event, started, step, write_events

from shardway.rundir.directory import RunDir
from shardway.rundir.names import SkippedRange
from shardway.watch.progress import GONE, BestCheckpoint, find_best_checkpoint, find_runs, summarise
from shardway.watch.report import render_report
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
    run.write_status(state="running", step=3, total_steps=10, reason="")
    lock = run.writer_lock()
    lock.acquire()
    try:
        summary = summarise(run)
    finally:
        lock.release()
    assert summary.state == "running"
    assert summary.writer is not None
    assert summary.writer.startswith("process ")
    assert summary.seconds_left == pytest.approx(7 * (24.0 - 20.0) / 2)


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
        damaged
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
