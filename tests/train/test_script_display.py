"""What a script that owns its loop shows of its run: the lines of the command line, on stderr of rank 0, once."""

from __future__ import annotations

import builtins
import io
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shardway
from runs import lone_rank, place
from shardway.errors import UserError
from shardway.ranks.start import Ranks
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.rundir.attempts import VARIABLE as ATTEMPT
from shardway.rundir.directory import RunDir
from shardway.train.run import ScriptDisplay, open_display
from shardway.train.session import hold_session
from shardway.watch.words import PlainLines

KEYS = ("run.device=cpu", "run.threads=1", "train.steps=3", "checkpoint.background=false")
Train = Callable[..., None]


@pytest.fixture
def train(tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch) -> Train:
    """A script of its own, run here."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def run_script(*words: str, most: int = 9, fails_at: int = 0) -> None:
        with shardway.start(*KEYS, *words, directory=tmp_path / "mine") as run:
            model = run.shard(torch.nn.Linear(2, 2))
            run.optimizer(torch.optim.SGD, model, lr=0.1)
            for number, batch in enumerate(run.steps(run.loader([torch.ones(2)] * 8, batch_size=2)), 1):
                print("mine", number, file=sys.stderr)
                run.step(model, batch, lambda model, batch: model(batch).mean())
                if number == fails_at:
                    raise ZeroDivisionError
                if number == most:
                    break

    return run_script


def bare(text: str) -> list[str]:
    """Lines without what is measured."""
    return [re.sub(r"  (loss|grad|\d+(\.\d)? Ki?B) .*", "", line) for line in text.splitlines()]


def test_a_script_shows_how_it_starts_its_steps_and_its_end(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    said = capsys.readouterr()
    assert said.out == ""
    assert bare(said.err.replace(str(tmp_path), "HERE")) == [
        "started, 3 steps  6 parameters, 1 rank on cpu, 2 samples a step",
        "computes in fp32, without TF32, not compiled (a CPU)",
        "mine 1",
        "step 1/3",
        "mine 2",
        "mine 3",
        "step 3/3",
        "step 3/3  saved step-000000003",
        "finished at step 3: all 3 steps are done",
        "run directory  HERE/mine",
        "report         shardway report HERE/mine",
    ]
    train()
    assert capsys.readouterr().err.replace(str(tmp_path), "HERE").splitlines() == [
        "nothing to do: all 3 steps are done (to go on, ask for more with train.steps)",
        "run directory  HERE/mine",
        "report         shardway report HERE/mine",
    ]


def test_a_stop_and_a_resume_are_said(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train(most=1)
    assert capsys.readouterr().err.splitlines()[-1] == "to go on, run the same command again"
    train()
    assert capsys.readouterr().err.startswith("resumed from step 1 (step-000000001)  6 parameters")


def test_in_a_job_its_script_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for job in ("", "attempts/0001"):
        if job:
            monkeypatch.setenv(ATTEMPT, job)
        with hold_session(resolve_request(ResolveRequest(None, KEYS, tmp_path), 1, 1), lone_rank()) as session:
            display = open_display(session)
            assert display is not None
            session.begin()
            session.recorder.status(now=True, state="stopped", reason="asked")
            display.end()
    assert sys.stderr.getvalue().count("to go on, run the same command again") == 1  # type: ignore[attr-defined]


def test_an_error_is_told_by_its_script_alone(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        train(fails_at=2)
    said = capsys.readouterr().err
    assert "fault" not in said
    assert "run directory" not in said
    with pytest.raises(UserError):
        train("run.display=of")
    assert capsys.readouterr().err == ""


def test_run_display_turns_it_off(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train("run.display=off", most=2)
    assert capsys.readouterr().err == "mine 1\nmine 2\n"


@pytest.mark.parametrize(
    ("rank", "launcher", "shows"), [(0, "torchrun", True), (1, "srun", False), (0, "shardway", False)]
)
def test_one_rank_shows_it_and_none_where_an_agent_does(rank: int, launcher: str, shows: bool, tmp_path: Path) -> None:
    resolution = resolve_request(ResolveRequest(None, KEYS, tmp_path), 1, 1)
    with hold_session(resolution, lone_rank()) as session:
        session.ranks = Ranks(place(rank, 2, launcher), torch.device("cpu"), grouped=False)
        assert (open_display(session) is not None) == shows
        assert (session.recorder.show is not None) == shows


def test_in_a_notebook_it_is_a_cells_output(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = SimpleNamespace()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    train()
    assert capsys.readouterr().out.startswith("started, 3 steps")


class Broken(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [Broken(), None])
def test_a_stream_that_is_gone_costs_nothing(
    stream: io.StringIO | None, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = ScriptDisplay(RunDir(tmp_path), ())
    monkeypatch.setattr(sys, "stderr", stream)
    display.show({"event": "started", "time": 0.0, "step": 0, "total_steps": 3})
    display.end()


def test_a_bar_of_tqdm_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    display = ScriptDisplay(RunDir(tmp_path), ())
    with tqdm.tqdm(total=2, file=screen, ascii=True) as bar:
        bar.update(1)
        display.show({"event": "finished", "time": 0.0, "step": 3, "reason": "done"})
    line = next(line for line in screen.getvalue().split("\n") if "finished" in line)
    assert line.rpartition("\r")[2] == "finished at step 3: done"


@pytest.mark.parametrize(("longest_s", "last_gap"), [(5.0, 5), (60.0, 60), (600.0, 200)])
def test_step_lines_come_at_a_growing_interval(longest_s: float, last_gap: int) -> None:
    now = [0.0]
    lines = PlainLines(clock=lambda: now[0], longest_s=longest_s)
    lines.lines({"event": "started", "time": 0.0, "step": 0, "total_steps": 100_000})
    told = []
    for second in range(12_000):
        now[0] = float(second)
        if lines.lines({"event": "step", "time": now[0], "step": second + 1, "loss": 1.0}):
            told.append(second)
    gaps = [after - before for before, after in itertools.pairwise(told)]
    assert (gaps[0], gaps) == (5, sorted(gaps))
    assert gaps[-1] == pytest.approx(last_gap, rel=0.2)
