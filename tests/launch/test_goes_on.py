"""What must not change in a run that goes on is told before the queue, where it is known."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.launch.hosts.local import LocalHost
from shardway.launch.submission.prepare import SubmitRequest, prepare
from shardway.resolve.request import parse_words, resolve_request
from shardway.rundir.directory import RunDir

WORDS = ("site.walltime=2h", "site.ranks_per_node=1", "run.device=cpu")


def submit_again(run: RunDir, *words: str) -> None:
    request = replace(parse_words([*WORDS, *words]), directory=run.path)
    prepare(SubmitRequest(request, site="generic-slurm", here=run.path.parent), LocalHost())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of a narrow model that has saved."""
    run = RunDir(tmp_path / "run")
    run.create()
    resolved = resolve_request(replace(parse_words([*WORDS, "model.dim=32"]), directory=run.path), 1, 1).resolved
    run.write_request("", resolved.render())
    run.write_status(state="stopped", reason="enough", step=5)
    (run.checkpoints / "step-000000005").mkdir(parents=True)
    return run


def test_a_change_that_its_ranks_would_refuse_is_refused_before_the_queue(run: RunDir) -> None:
    with pytest.raises(UserError) as told:
        submit_again(run, "model.dim=64", "train.seed=9")
    message = str(told.value)
    assert f"model.dim (command line): 64, but the run in {run.path} was started with 32" in message
    assert "train.seed (command line): 9" in message
    assert (
        "restore the value, or submit it as another run (`shardway submit` with another run.name or --dir)" in message
    )
    assert "--fresh" not in message, "which only `shardway train` has"
    assert not run.attempt(1).path.exists()


def test_what_may_change_may_change(run: RunDir) -> None:
    submit_again(run, "model.dim=32", "train.steps=900", "site.nodes=2")


def test_a_run_without_checkpoints_may_change_in_all(run: RunDir) -> None:
    (run.checkpoints / "step-000000005").rmdir()
    submit_again(run, "model.dim=64")


def test_a_record_that_is_damaged_is_left_to_the_ranks(run: RunDir) -> None:
    run.resolved_path.write_text("[model\n")
    submit_again(run, "model.dim=64")


def done(run: RunDir, **status: object) -> None:
    """All 800 steps, which are the default."""
    (run.checkpoints / "step-000000800").mkdir()
    run.write_status(state="finished", reason="all steps are done", step=800, **status)


@pytest.mark.parametrize("word", ["run.threads=1", "train.steps=800", "train.steps=700", "checkpoint.keep=9"])
def test_a_run_that_is_done_needs_no_job(word: str, run: RunDir) -> None:
    done(run)
    with pytest.raises(UserError) as told:
        submit_again(run, "model.dim=32", word)
    assert "has a checkpoint of step 800, and " in str(told.value)
    assert "To do: raise train.steps, or submit it as another run" in str(told.value)


def test_work_that_is_left_is_no_mistake(run: RunDir) -> None:
    done(run)
    submit_again(run, "model.dim=32", "train.steps=801")
    (run.checkpoints / "step-000000800").rename(run.checkpoints / "damaged-step-000000800")
    submit_again(run, "model.dim=32")


@pytest.mark.parametrize(
    ("words", "refused"), [((), True), (("train.steps=2 epochs",), False), (("train.global_batch=4",), False)]
)
def test_how_many_steps_the_data_makes_is_known_from_before(words: tuple[str, ...], refused: bool, run: RunDir) -> None:
    words_before = (*WORDS, "model.dim=32", "train.steps=1 epochs")
    resolved = resolve_request(replace(parse_words(words_before), directory=run.path), 1, 1).resolved
    run.write_request("", resolved.render())
    done(run, total_steps=800)
    with pytest.raises(UserError, match="and 800 steps are asked for") if refused else nullcontext():
        submit_again(run, "model.dim=32", "train.steps=1 epochs", *words)


@pytest.mark.parametrize("status", ["", "[]", "{", '{"state": "finished"}', '{"total_steps": "x"}'])
def test_a_status_that_says_nothing_refuses_nothing(status: str, run: RunDir) -> None:
    done(run)
    run.status_path.write_text(status)
    submit_again(run, "model.dim=32", "train.steps=1 epochs")
