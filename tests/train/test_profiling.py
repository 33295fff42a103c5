"""Captures of a run: which steps, by whom, and that neither a capture nor a profiler that fails changes the run."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pool import ranks
from runs import COMMON, Died, die_at, layout, lone_rank, open_tiny, pool_ranks, read_column, read_named, train_tiny
from shardway.rundir.directory import RunDir
from shardway.runfile.capture import CaptureRange, parse_capture_range, parse_capture_request
from shardway.train import profiling
from shardway.train.profiling import RankCapture, find_slowest, list_traces
from shardway.train.run import LiveRun

SHORT = ("train.steps=8",)


def read_trace(path: Path) -> tuple[list[str], list[dict[str, Any]], dict[str, Any]]:
    """The names of its steps in order, its events, and all of the file."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = trace["traceEvents"]
    steps = [event for event in events if str(event.get("name")).startswith("ProfilerStep#") and event.get("ph") == "X"]
    return [event["name"] for event in sorted(steps, key=lambda event: float(event["ts"]))], events, trace


def asking(at: int, text: str, directory: Path) -> Callable[[LiveRun, int], None]:
    """For `before_step`: write the file before step `at`, and let rank 0 look for it at each step."""

    def before(run: LiveRun, step: int) -> None:
        run._loop._stopping._looked_at = -1e9  # type: ignore[union-attr]
        if step == at and run.is_first:
            RunDir(directory).profile_path.write_text(text)

    return before


# --- which steps


def test_a_capture_has_the_steps_that_were_asked_for_and_changes_no_number(tmp_path: Path) -> None:
    train_tiny(tmp_path / "plain", lone_rank(), *SHORT)
    train_tiny(tmp_path / "run", lone_rank(), *SHORT, "train.profile=steps 5-6")
    assert read_column(tmp_path / "run") == read_column(tmp_path / "plain")
    [path] = list_traces(RunDir(tmp_path / "run"))
    assert path.name == "steps-5-6-rank-0.json.gz"
    steps, events, trace = read_trace(path)
    assert steps == ["ProfilerStep#5", "ProfilerStep#6"]
    assert any("Input Dims" in event.get("args", {}) for event in events)  # shapes
    assert not any(event.get("cat") == "python_function" for event in events)  # no stacks
    assert (trace["shardway_rank"], trace["shardway_world"]) == ("0", "1")
    [event] = read_named(tmp_path / "run", "profiled")
    assert event["files"] == [f"traces/{path.name}"]
    assert (event["step"], event["first"], event["last"], event["bytes"]) == (6, 5, 6, path.stat().st_size)
    assert event["step_seconds"] > 0
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name]  # nothing half written is left


@ranks(2)
def test_the_file_is_obeyed_by_all_ranks_and_the_slowest_writes_too(rank: int, tmp_path: Path) -> None:
    words = (*SHORT, *layout(2, 1))
    train_tiny(tmp_path / "plain", pool_ranks(), *words)
    ask = asking(3, "", tmp_path / "run")

    def before(run: LiveRun, step: int) -> None:
        ask(run, step)
        time.sleep(0.03 * rank)  # rank 1 is late, so rank 0 waits

    train_tiny(tmp_path / "run", pool_ranks(), *words, before_step=before)
    if rank:
        return
    run = RunDir(tmp_path / "run")
    assert read_column(run.path) == read_column(tmp_path / "plain")
    assert not run.profile_requested()
    [event] = read_named(run.path, "profiled")
    assert event["slowest"] == 1
    assert (event["first"], event["last"]) == (5, 7)  # seen after step 3; step 4 is the warm-up
    assert sorted(path.name for path in list_traces(run)) == [f"steps-5-7-rank-{each}.json.gz" for each in (0, 1)]
    assert "rank 1 waits least for the others" in event["reason"]


@ranks(2)
def test_stages_of_a_pipeline_are_captured(rank: int, tmp_path: Path) -> None:
    words = (*SHORT, "parallel.pp=2", "parallel.dp_replicate=1", "train.micro_batch=4", "model.tied=false")
    train_tiny(tmp_path, pool_ranks(), *words, "train.profile=steps 3-4, rank 1")
    if rank:
        return
    [path] = list_traces(RunDir(tmp_path))
    assert path.name == "steps-3-4-rank-1.json.gz"
    assert read_trace(path)[0] == ["ProfilerStep#3", "ProfilerStep#4"]


def test_a_resume_within_the_range_captures_what_is_left(tmp_path: Path) -> None:
    words = (*SHORT, "checkpoint.every=4 steps", "train.profile=steps 4-7")
    with pytest.raises(Died):
        train_tiny(tmp_path, lone_rank(), *words, before_step=die_at(4))
    assert list_traces(RunDir(tmp_path)) == []
    train_tiny(tmp_path, lone_rank(), *words)
    [path] = list_traces(RunDir(tmp_path))
    assert read_trace(path)[0] == ["ProfilerStep#6", "ProfilerStep#7"]  # step 5 is the first, and the warm-up


def test_a_range_that_an_attempt_begins_behind_is_an_event(tmp_path: Path) -> None:
    words = (*SHORT, "checkpoint.every=6 steps", "train.profile=steps 6-7")
    with pytest.raises(Died):
        train_tiny(tmp_path, lone_rank(), *words[:2], before_step=die_at(6))
    train_tiny(tmp_path, lone_rank(), *words)
    [event] = read_named(tmp_path, "profile_failed")
    assert event["reason"] == "no trace of steps 6-7: the attempt began at step 6, and one step is a warm-up"


def test_a_run_that_ends_within_the_range_writes_what_it_has(tmp_path: Path) -> None:
    train_tiny(tmp_path, lone_rank(), *SHORT, "train.profile=steps 7-20")
    [path] = list_traces(RunDir(tmp_path))
    assert path.name == "steps-7-8-rank-0.json.gz"
    assert read_trace(path)[0] == ["ProfilerStep#7", "ProfilerStep#8"]


def test_a_run_may_be_finished_with_its_capture(tmp_path: Path) -> None:
    outcome = train_tiny(tmp_path, lone_rank(), *SHORT, "train.profile=steps 3-4, then finish")
    assert (outcome.state, outcome.step, outcome.reason) == ("finished", 4, profiling.FINISHED)
    assert RunDir(tmp_path).checkpoint_steps() == []


def test_a_script_that_owns_its_loop_is_captured(tmp_path: Path) -> None:
    with open_tiny(tmp_path, lone_rank(), *SHORT, base=COMMON) as run:
        model = run.shard(nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.01)
        data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.zeros(16, 1))
        ask = asking(2, "steps 2", tmp_path)
        for inputs, targets in run.steps(run.loader(data, batch_size=4)):
            ask(run, run.step_number + 1)
            run.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    [path] = list_traces(RunDir(tmp_path))
    assert read_trace(path)[0] == ["ProfilerStep#4", "ProfilerStep#5"]


# --- what fails is an event


@ranks(2)
def test_a_profiler_that_fails_on_one_rank_ends_nothing(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank == 1:
        monkeypatch.setattr(torch.profiler.profile, "step", lambda self: 1 / 0)
    words = (*SHORT, *layout(2, 1), "train.profile=steps 3-4")
    outcome = train_tiny(tmp_path, pool_ranks(), *words, before_step=lambda run, step: time.sleep(0.02 * rank))
    if rank == 0:
        assert (outcome.state, outcome.step) == ("finished", 8)
        assert [path.name for path in list_traces(RunDir(tmp_path))] == ["steps-3-4-rank-0.json.gz"]


def test_a_trace_that_cannot_be_written_is_an_event(tmp_path: Path) -> None:
    def before(run: LiveRun, step: int) -> None:
        if step == 1:
            run.directory.traces.write_text("in the way")

    outcome = train_tiny(tmp_path, lone_rank(), *SHORT, "train.profile=steps 3-4", before_step=before)
    assert outcome.state == "finished"
    [event] = read_named(tmp_path, "profile_failed")
    assert event["reason"].startswith("no trace of rank 0: FileExistsError")


@pytest.mark.parametrize("text", ["rank 1", "every step", "steps 0", "steps 1000000"])
def test_a_request_that_is_wrong_is_an_event_and_taken_away(tmp_path: Path, text: str) -> None:
    train_tiny(tmp_path, lone_rank(), "train.steps=4", before_step=asking(2, text, tmp_path))
    [event] = read_named(tmp_path, "profile_failed")
    assert "; allowed: " in event["reason"]
    assert not RunDir(tmp_path).profile_requested()
    assert list_traces(RunDir(tmp_path)) == []


# --- texts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("steps 50-53", CaptureRange(50, 53)),
        ("step 7", CaptureRange(7, 7)),
        ("steps 2 - 4, rank 3, then finish", CaptureRange(2, 4, 3, finishes=True)),
    ],
)
def test_a_range_is_written_as_it_reads(text: str, found: CaptureRange) -> None:
    assert parse_capture_range(text) == found == parse_capture_range(str(found))


@pytest.mark.parametrize("text", ["50-53", "steps 1-3", "steps 9-8", "steps 2-2000", "steps", "steps 5-6 rank"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="; allowed: "):
        parse_capture_range(text)


def test_a_request_names_steps_and_rank_or_neither() -> None:
    found = [parse_capture_request(text) for text in ("", "\n", "steps 5", "rank 2", "steps 5 rank 2\n")]
    assert found == [(3, None), (3, None), (5, None), (3, 2), (5, 2)]


def test_the_slowest_is_the_rank_that_waits_least() -> None:
    assert find_slowest([RankCapture(0.3), RankCapture(0.1), RankCapture(0.2)]) == 1
    assert find_slowest([RankCapture(None), RankCapture(None)]) == 0
