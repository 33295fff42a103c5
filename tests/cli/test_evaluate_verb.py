"""`shardway evaluate`: what it prints and keeps of a run, what `status` and the report show of it, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import TINY, Shardway, write_text

from shardway.rundir.directory import RunDir

RUN = ("train.validate_every=2 steps", "checkpoint.every=2 steps", "data.validation_fraction=0.2", "run.display=off")
QUESTIONS = [
    {"question": "To", "choices": ["be", "xyz"], "answer": 0},
    {"prompt": "is", "choices": ["q", "the"], "answer": 1},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a small text, with a checkpoint of step 2."""
    from runs import lone_rank, train_tiny

    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    text, cache = f"data.path={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"
    train_tiny(folder / "runs" / "demo", lone_rank(), *RUN, base=(*TINY, text, cache, "checkpoint.background=false"))
    return folder / "runs" / "demo"


def last_validation(run: Path) -> dict[str, Any]:
    return [event for event in RunDir(run).events() if event["event"] == "validation"][-1]


def test_a_run_is_evaluated_on_what_it_holds_out_and_keeps_it(trained: Path, shardway: Shardway) -> None:
    ended = shardway("evaluate", str(trained), "--device", "cpu", "--json")
    assert ended.code == 0, ended.err
    (facts,) = json.loads(ended.out)["evaluations"]
    validated = last_validation(trained)
    for name in ("loss", "bits_per_byte"):
        assert facts["results"][name] == pytest.approx(validated[name], abs=1e-6)
    kept = RunDir(trained).read_evaluations()
    assert [(each["step"], each["kind"], each["results"]) for each in kept] == [(2, "perplexity", facts["results"])]
    shown = shardway("status", str(trained)).out
    assert f"  evaluated   perplexity on validation data of {trained}: loss {facts['results']['loss']:.4f}, " in shown
    assert json.loads(shardway("status", str(trained), "--json").out)["evaluations"][0]["results"] == facts["results"]
    assert shardway("report", str(trained)).code == 0
    page = RunDir(trained).report_path.read_text(encoding="utf-8")
    assert "<h2>Evaluations</h2>" in page
    extent = f", {facts['samples']} samples of {facts['seq_len']} tokens"  # two results on the same data differ by it
    assert f"(step 2{extent})" in shown
    assert f"validation data of {trained}{extent}</td>" in page
    assert f"<td>{facts['results']['perplexity']:.6g}</td>" in page


def test_other_data_choices_and_a_file_of_everything(trained: Path, shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("a text that it has not seen, of 60 bytes or thereabouts.....")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    before = {path: path.stat().st_mtime_ns for path in (trained / "checkpoints").rglob("*")}
    words = (str(trained), "data.seq_len=6", "--data", "other.txt", "--choices", str(questions), "--out", "all.json")
    ended = shardway("evaluate", *words, "--device", "cpu", "--batch", "3")
    assert ended.code == 0, ended.err
    first, size, second, *_ = ended.out.splitlines()
    assert first.startswith("perplexity on other.txt: loss ")
    assert size.startswith("  59 tokens, 9 samples of 6 tokens, 3 in a pass, on 1 rank, ")
    assert second.startswith(f"choices on {questions}: acc ")
    assert "kept in " in ended.err
    facts = json.loads((tmp_path / "all.json").read_text())
    assert [each["kind"] for each in facts["evaluations"]] == ["perplexity", "choices"]
    assert [len(each["likelihoods"]) for each in facts["evaluations"][1]["answers"]] == [2, 2]
    assert {path: path.stat().st_mtime_ns for path in (trained / "checkpoints").rglob("*")} == before


def test_mistakes_are_sentences(trained: Path, shardway: Shardway, tmp_path: Path) -> None:
    np.save(tmp_path / "large.npy", np.full(300, 999, np.uint16))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "wrong.jsonl").write_text(json.dumps({**QUESTIONS[0], "answer": 2}))
    (tmp_path / "short.txt").write_text("abc")
    text = str(trained.parent.parent / "text.txt")
    expected = {
        ("model.dim=3",): "model.dim=3 (command line): is no key of [data]",
        ("--data", "no.txt"): "does not exist",
        ("--data", "empty.txt"): "is empty",
        ("--data", "short.txt"): "holds 3 tokens, too few for one sample",
        ("--data", "large.npy", "data.kind=tokens"): "999",
        ("--data", text, "data.seq_len=9"): "data.seq_len = 9 is more than the 8 positions",
        ("--choices", "wrong.jsonl"): 'line 1: has "answer" 2, and 2 choices: 0 to 1',
        ("--choices", "no.jsonl"): "no.jsonl cannot be read: No such file or directory",
        ("--task-path", "."): "--task-path (command line): has no effect without --task",
        ("--out", "short.txt"): "short.txt exists",
        ("--step", "7"): "7",
    }
    for words, message in expected.items():
        ended = shardway("evaluate", str(trained), "--device", "cpu", *words)
        assert ended.code == 2, (words, ended.err)
        assert message in ended.err
    ended = shardway("evaluate", str(tmp_path), "--data", "short.txt")
    assert (ended.code, "is neither a model nor a run" in ended.err) == (2, True)


def test_a_run_without_a_checkpoint_is_a_sentence(trained: Path, shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    for name in ("resolved.toml", "status.json"):
        (tmp_path / "bare" / name).write_bytes((trained / name).read_bytes())
    ended = shardway("evaluate", "bare", "--device", "cpu")
    assert (ended.code, "bare is a run without a checkpoint." in ended.err) == (2, True)


def test_data_of_a_run_that_are_gone_are_named(trained: Path, shardway: Shardway, tmp_path: Path) -> None:
    moved = trained.parent.parent / "text.txt"
    moved.rename(moved.with_name("moved.txt"))
    try:
        ended = shardway("evaluate", str(trained), "--device", "cpu")
    finally:
        moved.with_name("moved.txt").rename(moved)
    assert ended.code == 2
    assert f'demo was trained on "{moved}", which is not there.\n  To do: name data with --data PATH.' in ended.err
