"""A script's run without `with`, and how an error that nobody catches ends its script."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
import torch

import shardway
import warm
from shardway.errors import Bug, JobError, SiteError, UserError
from shardway.ranks.stop import ScriptHook, report_errors, script_hook
from shardway.rundir.directory import RunDir
from shardway.train.run import OpenedRun

KEYS = ("run.device=cpu", "run.threads=1", "train.steps=3", "checkpoint.background=false")


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the hook was told that stood before."""
    told: list[BaseException] = []

    def own(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told.append(error)

    monkeypatch.setattr(sys, "excepthook", own)
    return told


def uncaught(error: BaseException) -> int | None:
    """What Python does with an error that nobody catches; the exit code that a hook asked for."""
    try:
        sys.excepthook(type(error), error, None)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return None


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("a key is wrong"), 2), (SiteError("no device"), 3), (JobError("full"), 4)]
)
def test_an_error_of_shardway_is_its_message_and_its_exit_code(
    error: Exception, code: int, hooks: list[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    report_errors()
    assert uncaught(error) == code
    assert capfd.readouterr().err == f"shardway: {error}\n"
    assert hooks == []


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_any_other_error_goes_to_the_hook_that_was_there(error: BaseException, hooks: list[BaseException]) -> None:
    report_errors()
    report_errors()
    assert uncaught(error) is None
    assert hooks == [error]


def test_a_defect_is_shown_whole(hooks: list[BaseException]) -> None:
    report_errors()
    bug = Bug("never")
    assert (uncaught(bug), hooks) == (70, [bug])


def test_a_run_that_is_open_is_closed_with_the_error(hooks: list[BaseException]) -> None:
    seen: list[object] = []

    @contextlib.contextmanager
    def opening() -> Iterator[str]:
        try:
            yield "run"
        except ValueError as error:
            seen.append(error)
            raise
        seen.append("well")

    opened, other = OpenedRun(opening()), OpenedRun(opening())
    assert opened.run == "run"
    other.close()
    assert (seen, isinstance(sys.excepthook, ScriptHook)) == (["well"], True)
    error = ValueError("mine")
    uncaught(error)
    assert (seen, hooks) == (["well", error], [error])
    assert not opened.close()
    assert script_hook().closes == []


def train(run: shardway.LiveRun, most: int = 9) -> None:
    model = run.shard(torch.nn.Linear(2, 2))
    run.optimizer(torch.optim.SGD, model, lr=0.1)
    for step, batch in enumerate(run.steps(run.loader([torch.ones(2)] * 8, batch_size=2))):
        run.step(model, batch, lambda model, batch: model(batch).sum())
        if step + 1 == most:
            break


@pytest.mark.parametrize(("most", "state"), [(9, "finished"), (2, "stopped")])
def test_a_run_without_with_ends_by_close(most: int, state: str, tmp_path: Path, quiet_threads: None) -> None:
    before = sys.excepthook
    run = shardway.start(*KEYS, directory=tmp_path / "run")
    train(run, most)
    assert RunDir(tmp_path / "run").find_writer() is not None
    run.close()
    run.close()
    assert RunDir(tmp_path / "run").read_status()["state"] == state
    assert RunDir(tmp_path / "run").find_writer() is None
    assert sys.excepthook is before


def test_a_run_that_is_closed_lets_go_of_its_model(tmp_path: Path, quiet_threads: None) -> None:
    run = shardway.start(*KEYS, directory=tmp_path / "run")
    model = run.shard(torch.nn.Linear(2, 2))
    run.optimizer(torch.optim.SGD, model, lr=0.1)
    for batch in run.steps(run.loader([torch.ones(2)] * 8, batch_size=2)):
        run.step(model, batch, lambda model, batch: model(batch).mean())
    gone = weakref.ref(model)
    run.close()
    del run, model, batch
    gc.collect()
    assert gone() is None


def test_a_run_by_with_is_the_same(tmp_path: Path, quiet_threads: None) -> None:
    with (
        pytest.raises(UserError, match=r"run\.step was called before"),
        shardway.start(*KEYS, directory=tmp_path) as run,
    ):
        run.step(None, None, None)  # type: ignore[arg-type]
    with shardway.start(*KEYS, directory=tmp_path) as run:
        train(run)
    assert RunDir(tmp_path).read_status()["state"] == "finished"


SCRIPT = """
import sys, torch, shardway
run = shardway.start("run.device=cpu", "run.threads=1", "train.steps=3", *sys.argv[1:], directory="run")
model = run.shard(torch.nn.Linear(2, 2))
run.optimizer(torch.optim.SGD, model, lr=0.1)
for step, batch in enumerate(run.steps(run.loader([torch.ones(2)] * 8, batch_size=2))):
    run.step(model, batch, lambda model, batch: model(batch).sum())
    break
"""


def test_a_script_of_its_own_process(tmp_path: Path) -> None:
    """It is closed when it ends, and a wrong key is a sentence with exit code 2: by Python's own hook, which a process
    that starts warm has not."""
    (tmp_path / "s.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "s.py", "optim.lrr=1"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        "shardway: 1 problem in the command line\n  optim.lrr (command line): there is no key"
    )
    assert "Traceback" not in ended.stderr
    with warm.starts():
        ended = subprocess.run(
            [sys.executable, "s.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
    assert ended.returncode == 0, ended.stderr
    status = RunDir(tmp_path / "run").read_status()
    assert (status["state"], status["reason"], status["step"]) == ("stopped", "the script left its loop", 1)


def test_what_an_error_means_is_told_in_its_place(
    hooks: list[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    """Closing a run may say what an error of torch means: that is told, with its exit code, and no traceback."""

    def close(kind: object, error: BaseException, trace: object) -> None:
        raise UserError("a weight was used that is not gathered") from error

    report_errors()
    script_hook().closes.append(close)
    try:
        assert uncaught(RuntimeError("mixed")) == 2
    finally:
        script_hook().closes.remove(close)
    assert capfd.readouterr().err == "shardway: a weight was used that is not gathered\n"
    assert hooks == []
