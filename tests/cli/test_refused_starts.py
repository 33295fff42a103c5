"""A command that is refused leaves a run as it was: every file, byte by byte, whatever the state of the run."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import TINY, Ended, Shardway, write_text

import shardway as library
from runs import Died, lone_rank, signal_at, train_tiny
from shardway.errors import ShardwayError, UserError
from shardway.resolve.request import parse_words
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.train import run
from shardway.watch.progress import read_progress

LONGER = ("train.steps=4", "checkpoint.every=2 steps", "checkpoint.background=false", "optim.warmup=0 steps")
WORDS = (*TINY, *LONGER)

Refuse = Callable[["Stage"], None]


@dataclass(frozen=True)
class Stage:
    """Where a refusal is tried: a folder with a run in it, and the command line in that folder."""

    folder: Path
    shardway: Shardway
    monkeypatch: pytest.MonkeyPatch

    @property
    def run(self) -> RunDir:
        """The run."""
        return RunDir(self.folder / "run")

    def train(self, *words: str) -> Ended:
        """`shardway train` into the run."""
        return self.shardway("train", *WORDS, *words, "--dir", "run")


def look(folder: Path) -> dict[str, Any]:
    """Every file below a folder with its bytes and the time of its last change; folders by name."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def refused(*words: str, code: int = 2, says: str = "") -> Refuse:
    """`shardway train` with these words more."""

    def act(stage: Stage) -> None:
        ended = stage.train(*words)
        assert (ended.code, says in ended.err) == (code, True), ended

    return act


def with_files(change: Callable[[Path], object], *words: str, code: int = 2, says: str = "") -> Refuse:
    """The same after a change of the folder around the run."""

    def act(stage: Stage) -> None:
        change(stage.folder)
        refused(*words, code=code, says=says)(stage)

    return act


def break_with(error: BaseException, *, fresh: bool = False) -> Refuse:
    """`shardway train` beneath its command line, where the model cannot be built."""

    def act(stage: Stage) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        stage.monkeypatch.setattr(run, "build_model", fail)
        request = replace(parse_words([*WORDS, "train.steps=9"]), directory=stage.run.path, fresh=fresh)
        with pytest.raises(Exception, match=str(error)):
            run.train(request)

    return act


def held_by_another(stage: Stage) -> None:
    """Another process trains here; what it has written by then is no part of the comparison."""
    lock = stage.run.writer_lock()
    lock.acquire()
    before = look(stage.run.path)
    refused("train.steps=9", says="another run is training")(stage)
    after = look(stage.run.path)
    assert {name: each for name, each in after.items() if "beat-" not in name} == {
        name: each for name, each in before.items() if "beat-" not in name
    }
    lock.withdraw()


def own_script(*words: str, body: Callable[[Any], None], error: type[BaseException] = UserError) -> Refuse:
    """A script that owns its loop."""

    def act(stage: Stage) -> None:
        keys = ("run.device=cpu", "run.threads=1", "train.steps=4", "optim.schedule=constant")
        with pytest.raises(error), library.start(*keys, *words, directory=stage.run.path) as run:
            body(run)

    return act


def _steps(run: Any, model: torch.nn.Module, data: Any = None) -> None:
    model = run.shard(model)
    run.optimizer(torch.optim.SGD, model, lr=0.1)
    for _ in run.steps(run.loader(data if data is not None else [torch.ones(2)] * 8, batch_size=2)):
        raise AssertionError("it went on")


def _fail(run: Any) -> None:
    model = run.shard(torch.nn.Linear(2, 2))
    del model
    raise Died


REFUSALS: dict[str, Refuse] = {
    "an unknown key": refused("optim.lrr=1", says="optim.lrr"),
    "a wrong value": refused("train.global_batch=many"),
    "another seed": refused("train.seed=4", says="was started with"),
    "another model": refused("model.dim=32", says="was started with"),
    "another kind of model": refused("model.kind=mlp"),
    "another optimizer": refused("optim.name=sgd", says="was started with"),
    "fewer steps than are done": refused("train.steps=1", says="steps are done, and train.steps asks for 1"),
    "a layout that needs more ranks": refused("parallel.tp=2"),
    "a device that is not there": refused("run.device=cuda"),
    "data that is not there": refused("data.path=gone.txt"),
    "data that is too short": with_files(lambda folder: (folder / "text.txt").write_text("x"), "train.steps=9"),
    "other data": with_files(
        lambda folder: (folder / "text.txt").write_text("Out, out, brief candle!\n" * 99),
        "train.steps=9",
        says="the training data is not what",
    ),
    "a model folder that is not there": refused("model.hf=gone", "train.steps=9"),
    "a start over of data that is not there": refused("--fresh", "data.path=gone.txt"),
    "a newer format": with_files(
        lambda folder: _change_status(folder / "run", format=99), "train.steps=9", says="run directory format 99"
    ),
    "checkpoints that cannot be read": with_files(
        lambda folder: [path.unlink() for path in (folder / "run").glob("checkpoints/*/manifest.json")],
        "train.steps=9",
        code=4,
        says="is whole",
    ),
    "checkpoints that were removed": with_files(
        lambda folder: shutil.rmtree(folder / "run/checkpoints", ignore_errors=True),
        "train.steps=9",
        code=4,
        says="no checkpoint in run/checkpoints any more",
    ),
    "an old stop file": with_files(lambda folder: (folder / "run/stop").write_text("enough"), "train.seed=4"),
    "a save that was cut off": with_files(
        lambda folder: _cut_off(folder / "run"), "train.steps=1", says="steps are done, and train.steps asks for 1"
    ),
    "a second writer": held_by_another,
    "no memory": break_with(torch.OutOfMemoryError("out of memory")),
    "a defect of the model": break_with(RuntimeError("no such layer")),
    "a start over with a defect": break_with(RuntimeError("no such layer"), fresh=True),
    "a script with an unknown key": own_script("optim.lrr=1", body=_fail),
    "a script with another model": own_script(body=lambda run: _steps(run, torch.nn.Linear(2, 2)), error=ShardwayError),
    "a script without a model": own_script(body=lambda run: next(run.steps(run.loader([1] * 8, batch_size=2)))),
    "a script with a step before its loop": own_script(body=lambda run: run.step(None, None, None)),
    "a script with data that are none": own_script(body=lambda run: run.loader(object(), batch_size=2)),
    "a script that fails": own_script(body=_fail, error=Died),
}


UNSAVED = ("checkpoints that cannot be read", "checkpoints that were removed")
"""From what is left `status` reads another run."""


def _change_status(run: Path, **facts: Any) -> None:
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, **facts}))


def _cut_off(run: Path) -> None:
    partial = RunDir(run).checkpoints / ".step-000000009.epoch-000001.partial"
    partial.mkdir()
    (partial / "rank-00000.bin").write_bytes(b"half")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the text, and a run in each state."""
    folder, threads = tmp_path_factory.mktemp("trained"), torch.get_num_threads()
    write_text(folder)
    words = [word.replace("text.txt", str(folder / "text.txt")) for word in (*WORDS, "run.device=cpu")]

    def die(run: object, step: int) -> None:
        if step == 4:
            raise Died

    train_tiny(folder / "finished", lone_rank(), base=words)
    train_tiny(folder / "stopped", lone_rank(), base=words, before_step=signal_at(3))
    with pytest.raises(Died):
        train_tiny(folder / "failed", lone_rank(), base=words, before_step=die)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture
def stage(
    trained: Path, tmp_path: Path, shardway: Shardway, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Stage:
    """A copy of a run in the state that the test names."""
    shutil.copytree(trained / request.param, tmp_path / "run")
    shutil.copy2(trained / "text.txt", tmp_path)
    return Stage(tmp_path, shardway, monkeypatch)


@pytest.mark.parametrize("stage", ["finished", "stopped", "failed"], indirect=True)
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_start_changes_nothing(name: str, stage: Stage) -> None:
    changes = stage.folder / "run"
    told = _told(stage)
    noted: list[dict[str, Any]] = []
    original = stage.train

    def train(*words: str) -> Ended:  # what the case itself has changed is a part of how it was
        noted.append(look(changes))
        return original(*words)

    object.__setattr__(stage, "train", train)
    before = look(changes)
    REFUSALS[name](stage)
    assert look(changes) == (noted[0] if noted and name != "a second writer" else before)
    assert not list(stage.folder.glob("run.old-*"))
    if name not in ("a newer format", *UNSAVED, "a second writer", "an old stop file"):
        assert _told(stage) == told


def _told(stage: Stage) -> list[object]:
    """What is said of the run, but for how long ago something was."""
    said = re.sub(r", [\d:]+ ago", "", stage.shardway("status", "run").out)
    return [said, read_progress(stage.run).book.account(stage.run.read_status())]


@pytest.mark.parametrize(
    "name", [name for name in REFUSALS if not name.startswith(("fewer", "another", "other", "checkpoints", "an old"))]
)
def test_a_refused_first_start_leaves_no_directory(
    name: str, tmp_path: Path, shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("a newer format", "a save that was cut off", "a second writer", "a script with another model"):
        pytest.skip("a case of a run that is there")
    write_text(tmp_path)
    REFUSALS[name](Stage(tmp_path, shardway, monkeypatch))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage", ["finished"], indirect=True)
def test_a_finished_run_has_nothing_to_do(stage: Stage) -> None:
    before = look(stage.run.path)
    ended = stage.train("optim.lr=0.5")
    assert (ended.code, look(stage.run.path)) == (0, before)
    assert "all 4 steps are done" in ended.out
    ended = stage.shardway("train", *WORDS, "--dir", "run", "--json")
    assert json.loads(ended.out)["state"] == "finished"
    assert look(stage.run.path) == before


@pytest.mark.parametrize("stage", ["finished", "stopped", "failed"], indirect=True)
def test_a_run_with_more_steps_goes_on_as_ever(stage: Stage) -> None:
    assert stage.train("train.steps=6").code == 0
    assert stage.run.read_status()["state"] == "finished"
    assert [event["step"] for event in stage.run.events(0) if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert stage.run.read_resolved()["train"]["steps"] == "6 steps"
    assert not stage.run.partial_checkpoints()


@pytest.mark.parametrize("stage", ["finished"], indirect=True)
def test_a_run_without_its_checkpoints_starts_over_where_that_is_asked_for(stage: Stage) -> None:
    shutil.rmtree(stage.run.checkpoints)
    assert "To do: put the folder of checkpoints back, or start over with --fresh" in stage.train().err
    assert stage.train("--fresh").code == 0
    assert (stage.folder / "run.old-1/events/rank-00000.jsonl").exists()
    assert stage.run.checkpoint_steps() == [2, 4]


@pytest.mark.parametrize("every", ["off", "2 steps"])
def test_a_run_that_has_not_saved_begins_again(
    every: str, tmp_path: Path, shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path)
    stage, words = Stage(tmp_path, shardway, monkeypatch), (f"checkpoint.every={every}",)

    def die(run: object, step: int) -> None:
        raise Died

    with pytest.raises(Died):
        train_tiny(stage.run.path, lone_rank(), base=[*WORDS, "run.device=cpu", *words], before_step=die)
    assert not stage.run.checkpoint_steps()
    assert stage.train(*words).code == 0
    assert [event["step"] for event in stage.run.events(0) if event["event"] == "step"] == [1, 2, 3, 4]


@pytest.mark.parametrize("stage", ["finished"], indirect=True)
def test_a_job_is_told_of_a_failure_before_its_first_step(stage: Stage) -> None:
    attempt = Attempt(stage.run.path / "attempts/0001")
    attempt.make()
    stage.monkeypatch.setitem(os.environ, "SHARDWAY_ATTEMPT_DIR", str(attempt.path))
    before = look(stage.run.path)
    break_with(RuntimeError("no such layer"))(stage)
    result = attempt.read_result()
    assert result is not None
    assert "no such layer" in result.reason
    after = look(stage.run.path)
    of_the_attempt = {"attempts/0001/result.json", "attempts/0001/began"}
    assert {name: each for name, each in after.items() if name not in of_the_attempt} == before


VERBS = {
    "submit with an unknown key": ("submit", "--dir", "run", "train.stepz=3"),
    "submit to no site": ("submit", "--dir", "run", "--on", "nowhere"),
    "submit of no program": ("submit", "--dir", "run", "--", "python"),
    "submit of a run file that is not there": ("submit", "gone.toml", "--dir", "run"),
    "submit of another model": ("submit", *WORDS, "model.dim=32", "--dir", "run"),
    "resume with an unknown key": ("resume", "run", "train.stepz=3"),
    "resume with a wrong value": ("resume", "run", "site.walltime=soon"),
    "stop of a run at rest": ("stop", "run"),
    "stop at once of a run at rest": ("stop", "run", "--now", "--yes"),
    "verify a step that is not there": ("checkpoint", "verify", "run", "--step", "77"),
    "inspect a step that is not there": ("checkpoint", "inspect", "run", "--step", "77"),
    "export into a folder that holds something": ("checkpoint", "export", "run", "full"),
    "rehearse with an unknown key": ("rehearse", "train.stepz=3"),
    "logs of an attempt that is not there": ("logs", "run", "--attempt", "7"),
    "train with two run files": ("train", "a.toml", "b.toml", "--dir", "run"),
    "train by nodes that are not named": ("train", "--nodes", "", "--dir", "run"),
}


@pytest.mark.parametrize("stage", ["finished", "failed"], indirect=True)
@pytest.mark.parametrize("name", VERBS)
def test_no_verb_changes_a_run_that_it_refuses(name: str, stage: Stage) -> None:
    (stage.folder / "full").mkdir()
    (stage.folder / "full" / "mine.txt").touch()
    names = sorted(path.name for path in stage.folder.iterdir())
    before = look(stage.run.path)
    ended = stage.shardway(*VERBS[name])
    assert ended.code == (0 if "at rest" in name else 2), ended
    assert look(stage.run.path) == before
    assert sorted(path.name for path in stage.folder.iterdir() if path.name not in ("cache", "state")) == names
