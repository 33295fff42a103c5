"""`shardway trace` with what people give it: folders, runs, damaged and foreign files, a narrow terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from made_traces import MadeTrace, make_training

from shardway.cli.trace import trace
from shardway.errors import UserError
from shardway.watch.trace.analysis import analyse_ranks, analyse_trace, merge_ranks
from shardway.watch.trace.text import render_analysis


def small(path: Path, rank: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = MadeTrace(rank=rank)
    made.product(512, 512, 512)
    return made.write(path)


def facts(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, object]:
    trace(list(paths), as_json=True)
    return dict(json.loads(capsys.readouterr().out))


def test_the_folder_of_a_run_stands_for_its_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status.json").write_text('{"step": 7}')
    file = small(tmp_path / "traces" / "steps-4-7-rank-0.json")
    assert facts(capsys, tmp_path)["file"] == str(file)


def test_of_several_captures_of_a_run_the_latest_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at, name in enumerate(("steps-4-7-rank-0", "steps-30-33-rank-0", "steps-30-33-rank-1")):
        file = small(tmp_path / "traces" / f"{name}.json", int(name[-1]))
        os.utime(file, (1000 + at, 1000 + at))
    trace([tmp_path], as_json=True)
    out, err = capsys.readouterr()
    assert [Path(rank["file"]).name for rank in json.loads(out)["ranks"]] == [
        "steps-30-33-rank-0.json",
        "steps-30-33-rank-1.json",
    ]
    assert "latest capture" in err


def test_other_json_of_a_folder_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model": 1}')
    (tmp_path / "rows.json").write_text("[1, 2]")
    file = small(tmp_path / "rank0.json")
    assert facts(capsys, tmp_path)["file"] == str(file)


def test_a_damaged_trace_of_a_folder_is_not_passed_over(tmp_path: Path) -> None:
    small(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").write_text("")
    with pytest.raises(UserError, match=r"rank1.json is no trace: it is empty"):
        trace([tmp_path])


def test_a_folder_of_tensorboard_is_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = small(tmp_path / "plugins" / "profile" / "now" / "host.pt.trace.json")
    assert facts(capsys, tmp_path)["file"] == str(file)


def test_the_folder_that_has_traces_is_named(tmp_path: Path) -> None:
    small(tmp_path / "below" / "rank0.json")
    with pytest.raises(UserError, match=r"name .*below, which has traces"):
        trace([tmp_path])


@pytest.mark.parametrize(("text", "fault"), [('{"traceEvents": [', "truncated"), ("[]", "no-events")])
def test_a_list_that_ends_at_once_is_named(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    assert fault in [each.rule for each in analyse_trace(tmp_path / "t.json").quality]


def test_json_that_is_cut_off_before_its_events_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"schemaVersion": 1, "dev')
    with pytest.raises(UserError, match="cut off or damaged"):
        analyse_trace(tmp_path / "t.json")


def test_begin_and_end_events_are_named_as_another_tools(tmp_path: Path) -> None:
    events = [{"ph": phase, "name": "a", "ts": at, "pid": 1, "tid": 1} for at, phase in enumerate("BE")]
    (tmp_path / "t.json").write_text(json.dumps(events))
    (fault,) = analyse_trace(tmp_path / "t.json").quality
    assert (fault.rule, fault.severity) == ("no-events", "fatal")
    assert "begin and end events" in fault.what


@pytest.mark.parametrize("name", ["H100-SXM5-80GB", "NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"])
def test_a_gpu_is_named_by_its_key_or_by_the_drivers_name(name: str, tmp_path: Path) -> None:
    file = make_training(gpu=None, steps=1).write(tmp_path / "t.json")
    assert analyse_trace(file, name).part == "h100-sxm5-80gb"


def test_a_gpu_that_is_not_known_is_refused_with_those_that_are_near(tmp_path: Path) -> None:
    file = small(tmp_path / "t.json")
    with pytest.raises(UserError, match=r"did you mean mi300x\?"):
        analyse_trace(file, "mi300")


def test_captures_of_one_rank_are_not_compared_as_ranks(tmp_path: Path) -> None:
    files = [
        make_training(rank=0, slow=slow, steps=3).write(tmp_path / f"{place}.json")
        for place, slow in enumerate((1.0, 1.4))
    ]
    found = merge_ranks(analyse_ranks(files))
    assert found["quality"][0]["rule"] == "repeated-rank"
    assert "straggler" not in [each["rule"] for each in found["advice"]]


def test_a_fault_of_all_ranks_is_stated_once(tmp_path: Path) -> None:
    files = [make_training(rank=rank, steps=1).write(tmp_path / f"{rank}.json") for rank in range(3)]
    (fault,) = merge_ranks(analyse_ranks(files))["quality"]
    assert fault["rule"] == "few-steps"
    assert fault["what"].startswith("rank 0: ")
    assert fault["what"].endswith("(also rank 1, rank 2)")


def test_a_trace_that_cannot_be_relied_on_does_not_hide_the_others(tmp_path: Path) -> None:
    files = [make_training(rank=rank, steps=4).write(tmp_path / f"rank{rank}.json") for rank in range(2)]
    whole = merge_ranks(analyse_ranks(files))
    (tmp_path / "rank2.json").write_text('{"traceEvents": []}')
    found = merge_ranks(analyse_ranks([*files, tmp_path / "rank2.json"]))
    assert found["step_ms"] == whole["step_ms"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    (fault,) = (fault for fault in found["quality"] if fault["rule"] == "no-events")
    assert (fault["severity"], fault["what"][:6]) == ("problem", "rank 2")


def test_lines_fit_the_terminal(tmp_path: Path) -> None:
    found = analyse_trace(make_training("fp32", steps=2).write(tmp_path / "t.json"))
    text = render_analysis([found], width=80)
    path, *lines = text.splitlines()
    assert path == found.path
    assert max(map(len, lines)) <= 80
    assert " ".join(text.split()).count(found.advice[0].evidence) == 1
