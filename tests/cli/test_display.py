"""What is shown while a run trains: a live view on a terminal, plain lines elsewhere, never the error itself."""

from __future__ import annotations

import io
import threading
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from shardway.cli import train
from shardway.cli.train import run_displayed
from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event, EventFollower


def record(run: RunDir, *, fault: bool = False) -> None:
    """The events of a run of three steps."""
    with run.event_writer(0) as events:
        events.write("started", step=0, world=1, device="cpu", total_steps=3)
        for step in (1, 2, 3):
            events.write("step", step=step, loss=3.0 / step, grad_norm=1.0, lr=1e-3, tokens_per_s=5e4)
        if fault:
            events.write("fault", kind="JobError", message="its disk is gone", exit_code=4)
        else:
            events.write("finished", step=3, reason="all steps are done")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(train, "REFRESH_S", 0.01)
    run = RunDir(tmp_path / "a")
    run.create()
    return run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 100 columns receives."""
    screen = io.StringIO()
    console = partial(Console, file=screen, force_terminal=True, width=100, height=40, color_system=None)
    monkeypatch.setattr("rich.console.Console", lambda **options: console(**options))
    return screen


def show(run: RunDir, *, plain: bool = False, to_stderr: bool = False, fault: bool = False) -> None:
    with run_displayed(run, to_stderr=to_stderr, plain=plain):
        record(run, fault=fault)


def test_lines_go_to_stdout_and_with_json_to_stderr(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    show(run)
    out = capsys.readouterr()
    assert out.err == ""
    assert "all steps are done" in out.out
    show(run, to_stderr=True)
    err = capsys.readouterr()
    assert err.out == ""
    assert "all steps are done" in err.err


def test_an_error_is_left_to_whoever_tells_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    show(run, fault=True)
    assert "its disk is gone" not in capsys.readouterr().out


def test_events_of_an_earlier_attempt_are_not_shown_again(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    record(run)
    with run_displayed(run, to_stderr=False, plain=True):
        pass
    assert capsys.readouterr().out == ""


def validate(run: RunDir, step: int, loss: float, base: int = 0) -> None:
    with run.event_writer(0) as events:
        events.write("started", step=base, total_steps=9)
        events.write("validation", step=step, loss=loss)


@pytest.mark.parametrize(("before", "best"), [(1.0, False), (3.0, True)])
def test_the_best_so_far_is_that_of_all_attempts(
    before: float, best: bool, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    validate(run, 4, before)
    validate(run, 6, 0.5, base=4)  # undone by the next start
    with run_displayed(run, to_stderr=False, plain=True):
        validate(run, 6, 2.0, base=4)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "validation" in line]
    assert line.endswith("best so far") == best


def test_the_best_so_far_outlives_a_start_that_wrote_nothing(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    validate(run, 4, 1.0)
    with run_displayed(run, to_stderr=False, plain=True):
        with run.event_writer(0) as events:
            events.write("restarted", step=4, reason="killed", failures=1)
        validate(run, 6, 2.0, base=4)
    assert "best so far" not in capsys.readouterr().out


def test_a_terminal_shows_a_live_view(run: RunDir, terminal: io.StringIO) -> None:
    show(run)
    screen = terminal.getvalue()
    assert "\x1b[" in screen
    assert "3/3" in screen.replace(" ", "")


def test_a_live_view_leaves_out_the_error(run: RunDir, terminal: io.StringIO) -> None:
    show(run, fault=True)
    assert "its disk is gone" not in terminal.getvalue()


def test_a_launcher_gets_lines_even_on_a_terminal(run: RunDir, terminal: io.StringIO) -> None:
    show(run, plain=True)
    assert "all steps are done" in terminal.getvalue()
    assert "\x1b[" not in terminal.getvalue()


def test_the_view_ends_where_the_work_fails(run: RunDir) -> None:
    with pytest.raises(ZeroDivisionError), run_displayed(run, to_stderr=False, plain=True):
        assert "display" in [thread.name for thread in threading.enumerate()]
        raise ZeroDivisionError
    assert "display" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("plain", [True, False])
def test_events_that_could_not_be_read_for_a_while_are_shown_then(
    run: RunDir, plain: bool, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = EventFollower.new_events, threading.Event()

    def refuse_once(follower: EventFollower) -> list[Event]:
        if refused.is_set():
            return real(follower)
        refused.set()
        raise JobError("the server is away")

    monkeypatch.setattr(EventFollower, "new_events", refuse_once)
    with run_displayed(run, to_stderr=False, plain=plain):
        assert refused.wait(60)
        with run.event_writer(0) as events:
            events.write("finished", step=3, reason="all steps are done")
    assert "all steps are done" in terminal.getvalue()


@pytest.mark.parametrize("plain", [True, False])
def test_events_that_cannot_be_read_end_the_view_alone(run: RunDir, plain: bool, terminal: io.StringIO) -> None:
    (run.path / "events/rank-00000.jsonl").mkdir()
    with run_displayed(run, to_stderr=False, plain=plain):
        pass
    assert "cannot be read" not in terminal.getvalue()
