"""Several runs as a table, one in full with its hardware, and `--watch`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from command_line import Shardway

from screen_terminal import ScreenTerminal
from shardway.cli import status as status_verb
from shardway.launch.runs.find import Known, remember
from shardway.rundir import events as events_module
from shardway.rundir.attempts import AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.telemetry.store import DeviceInfo, NodeInfo, TelemetryWriter
from shardway.watch.top_runs import render_age
from shardway.watch.words import fold_line


def make_run(path: Path, *, state: str = "stopped", step: int = 40, ended: float = 0.0) -> RunDir:
    """A run that wrote events until `ended` (default: now)."""
    run, at = RunDir(path), ended or time.time()
    run.create()
    first = {"event": "started", "step": 0, "total_steps": 100, "world": 4, "device": "cuda", "tokens_per_step": 64}
    last = {"event": "step", "step": step, "loss": 2.5, "tokens_per_s": 51200.0, "seconds": 0.5}
    rows = [{**first, "samples_per_step": 2, "time": at - 60}, {**last, "time": at}]
    rows += [{"event": state, "step": step, "reason": "as asked", "time": at}] if state != "running" else []
    (run.path / "events/rank-00000.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run.write_status(state=state, step=step, total_steps=100, reason="as asked")
    return run


def write_telemetry(run: RunDir, uses: dict[str, list[float]], at: float) -> None:
    """A minute of samples that end at `at`; `uses`: host -> percent of each accelerator."""
    for node, (host, percents) in enumerate(uses.items()):
        devices = tuple(DeviceInfo(i, "H100", f"GPU-{i}", 2**36, 700.0, "nvidia") for i in range(len(percents)))
        info = NodeInfo(host, node, "17", 1, at - 60, 1.0, 8, tuple(range(8)), None, None, devices, {})
        names = ["cpu/use_percent", *(f"gpu/{i}/use_percent" for i in range(len(percents)))]
        writer = TelemetryWriter(run.telemetry_folder, info, names)
        for second in range(60):
            writer.append(at - 60 + second, [12.0, *percents])
        writer.close()


def columns(out: str, row: int) -> dict[str, str]:
    """The cells of a line below the names of their columns."""
    head, *lines = out.splitlines()
    starts = [head.index(name) for name in head.split()]
    cut = [lines[row][a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return dict(zip(head.split(), cut, strict=True))


def test_a_line_of_the_table_has_what_matters(shardway: Shardway, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/a")
    attempt = run.attempt(1)
    attempt.make()
    asked = {"nodes": 2, "accelerators": 4}
    attempt.write_submission(Submission("slurm", "t", job="17", submitted=time.time() - 7260, asked=asked))
    attempt.write_result(Result(Ending.STOPPED, "as asked", 40, by="rank 0", ended=time.time()))
    write_telemetry(run, {"n1": [90, 90, 80, 0], "n2": [90, 70, 60, 0]}, time.time())
    make_run(tmp_path / "runs/b", state="finished", step=100)
    ended = shardway("status")
    assert (ended.code, ended.err) == (0, "")
    cells = columns(ended.out, 0)
    assert cells == {
        "RUN": "runs/a",
        "STATE": "stopped",
        "STEP": "40/100",
        "LOSS": "2.5000",
        "SPEED": "51.2k tok/s",
        "GPUS": "6/8 60%",
        "JOB": "17",
        "AGE": "2h01m",
        "NOTE": "as asked",
    }
    assert columns(ended.out, 1)["GPUS"] == "?/4"


def test_a_run_of_a_foreign_command_stands_in_the_table(shardway: Shardway, tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a")
    run = RunDir(tmp_path / "runs/theirs")
    run.create(empty=True)
    attempt = run.attempt(1)
    attempt.make()
    attempt.write_submission(Submission("slurm", "t", job="18", asked={"nodes": 1, "accelerators": 2}))
    attempt.write_started(AttemptStart("18"))
    attempt.write_result(Result(Ending.CRASHED, "exit code 1", exit_code=1, by="job script", ended=time.time()))
    write_telemetry(run, {"n1": [90, 0]}, time.time())
    cells = columns(shardway("status").out, 1)
    assert (cells["STATE"], cells["GPUS"], cells["JOB"], cells["STEP"]) == ("crashed", "1/2 45%", "18", "")
    full = shardway("status", "18").out.splitlines()
    assert full[0] == "runs/theirs  crashed"
    assert "  hardware    1/2 GPUs 45 %, cores 12 %" in full


def test_json_of_one_run_has_its_hardware(shardway: Shardway, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/a")
    write_telemetry(run, {"n1": [90, 0]}, time.time())
    shown = json.loads(shardway("status", "a", "--json").out)
    assert (shown["state"], shown["step"]) == ("stopped", 40)
    assert shown["hardware"]["gpus_used"] == 1
    assert shown["hardware"]["use_percent"] == pytest.approx(45.0, abs=0.1)
    assert [gpu["index"] for gpu in shown["gpus"]] == [0, 1]
    assert isinstance(shown["advice"], list)


def test_one_run_is_read_once_and_its_verdicts_name_their_start(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now, reads = make_run(tmp_path / "runs/a"), time.time(), list[str]()
    write_telemetry(run, {"n1": [90, 90]}, now - 4000)
    write_telemetry(run, {"n1": [90, 0]}, now)
    opened = events_module._reading

    def count(path: Path) -> object:
        reads.append(path.name)
        return opened(path)

    monkeypatch.setattr(events_module, "_reading", count)
    out = shardway("status", str(run.path)).out
    assert reads == ["rank-00000.jsonl"]
    assert "  gpus        1 used (mean 90 %), 1 idle (n1:1); start 2 of 2, 0:59\n" in out
    assert "  advice      1 of 2 accelerators did nothing" in out


def test_what_is_odd_about_the_events_has_a_line(shardway: Shardway, tmp_path: Path) -> None:
    run, now = make_run(tmp_path / "runs/a"), time.time()
    with open(run.events_path(0), "a") as file:
        for number in (41, 42):
            print(json.dumps({"event": "step", "step": number, "time": now - 3600 + number}), file=file)
    run.write_status(state="stopped", step=90, total_steps=100, reason="", time=now)
    lines = shardway("status", "a").out.splitlines()
    assert lines[1:3] == [
        "  step        90/100 (90 %)",
        "  events      end at step 42, the status at 90: what came after is not recorded",
    ]
    assert "  clock       dates in the events go back by 59:19 (a clock was set): times leave that out" in lines


def test_a_damaged_telemetry_file_hides_nothing_else(shardway: Shardway, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/a")
    run.telemetry_folder.mkdir()
    (run.telemetry_folder / "n1").write_bytes(b"\xf5SWT" + bytes(200))
    (run.telemetry_folder / "n2").mkdir()
    ended = shardway("status", "a")
    assert (ended.code, ended.err) == (0, "")
    assert "  step        40/100 (40 %)" in ended.out


def test_one_damaged_run_of_several_does_not_hide_the_others(shardway: Shardway, tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a")
    make_run(tmp_path / "runs/b")
    (make_run(tmp_path / "runs/c").path / "status.json").write_text('{"format": 1, "state"')
    lines = shardway("status").out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["runs/a", "stopped"],
        ["runs/b", "stopped"],
        ["runs/c", "stopped"],
    ]


def test_old_runs_of_other_folders_are_counted_and_shown_on_request(shardway: Shardway, tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a")
    old = make_run(tmp_path / "far/old", ended=time.time() - 30 * 86400)
    remember(Known(str(old.path)))
    shown = shardway("status").out
    assert str(old.path) not in shown
    assert shown.splitlines()[-1] == "1 more ended over a week ago (--all)"
    assert str(old.path) in shardway("status", "--all").out
    assert len(json.loads(shardway("status", "--json").out)) == 2
    ended = shardway("status", "--all", "a")
    assert (ended.code, "leave one of them out" in ended.err) == (2, True)


def test_several_words_are_several_runs(shardway: Shardway, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        make_run(tmp_path / "runs" / name)
    assert [line.split()[0] for line in shardway("status", "a", "runs/c").out.splitlines()] == [
        "RUN",
        "runs/a",
        "runs/c",
    ]


# --- narrow terminals


def test_a_table_that_is_too_wide(shardway: Shardway, tmp_path: Path) -> None:
    """First the notes go below their runs; then a run is several lines. Nothing is cut."""
    write_telemetry(make_run(tmp_path / "runs/a"), {"n1": [90, 0]}, time.time())
    make_run(tmp_path / "runs/longer", state="failed")
    shown = status_verb._Look().look(status_verb._choose([])[0])

    def render(width: int | None) -> list[str]:
        return status_verb._render(shown, [], all_runs=False, width=width).splitlines()

    whole = render(None)
    assert [line.split()[-1] for line in whole] == ["NOTE", "asked", "asked"]
    assert render(max(map(len, whole))) == whole
    below = render(max(map(len, whole)) - 1)
    assert below[0].split() == whole[0].split()[:-1]
    assert [line for line in below[1:] if line.startswith(" ")] == ["    as asked"] * 2
    assert render(30) == [
        "runs/a  stopped",
        "  40/100  loss 2.5000",
        "  51.2k tok/s  GPUs 1/4 45%",
        "  1m",
        "    as asked",
        "runs/longer  failed",
        "  40/100  loss 2.5000",
        "  51.2k tok/s  GPUs ?/4  1m",
        "    as asked",
    ]


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        ("  step        43/60 (72 %)", ["  step        43/60 (72 %)"]),
        (
            "  events      end at step 42, the status at 90: lost",
            ["  events      end at step 42, the", "              status at 90: lost"],
        ),
        ("      to do: raise site.walltime and go on", ["      to do: raise site.walltime and", "        go on"]),
        ("/scratch/a/name/longer/than/a/line/is  failed", ["/scratch/a/name/longer/than/a/line/i", "  s  failed"]),
        ("", [""]),
    ],
)
def test_a_line_is_folded_below_its_text(line: str, folded: list[str]) -> None:
    assert fold_line(line, 36) == folded


@pytest.mark.parametrize("words", [(), ("runs/a",)])
def test_in_a_terminal_of_40_columns_nothing_is_cut(words: tuple[str, ...], tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/a", state="failed")
    write_telemetry(run, {"n1": [90, 90, 0, 0]}, time.time())
    make_run(tmp_path / "runs/b")
    command = [sys.executable, "-m", "shardway", "status", *words, "--watch"]
    terminal = ScreenTerminal(command, tmp_path, 40, 50, XDG_STATE_HOME=str(tmp_path / "state"))
    try:
        terminal.wait("2 idle" if words else "runs/b")
    finally:
        code = terminal.close()
    text = terminal.text()
    assert (code, "…" in text) == (0, False), text
    said = " ".join(text.split())
    wanted = ["runs/a failed", "40/100", "51.2k tok", "as asked"]
    wanted += (
        ["2 of 4 accelerators did nothing", "2 used (mean 90 %), 2 idle (n1:2, n1:3)"] if words else ["GPUs 2/4 45%"]
    )
    assert [each for each in wanted if each not in said] == []


def test_a_screen_that_is_too_low_counts_what_it_leaves_out() -> None:
    text = "\n".join(map(str, range(10)))
    assert status_verb._fit_height(text, 11) == text
    assert status_verb._fit_height(text, 6).splitlines() == ["0", "1", "2", "3", "and 6 more lines"]


# --- --watch


def test_watch_prints_blocks_until_the_run_has_ended(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "runs/a", state="running")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        if seconds < 1:  # of the lease
            return
        pauses.append(seconds)
        with open(run.path / "events/rank-00000.jsonl", "a") as file:
            print(json.dumps({"event": "step", "step": 40 + len(pauses), "loss": 1.0, "time": time.time()}), file=file)
        if len(pauses) == 2:
            run.write_status(state="stopped", step=42, total_steps=100, reason="as asked")

    monkeypatch.setattr(status_verb.time, "sleep", pause)
    monkeypatch.setattr(RunDir, "find_writer", lambda *_, **__: "process 1 on host n1")
    ended = shardway("status", "a", "--watch", "2")
    assert (ended.code, ended.err, pauses) == (0, "", [2.0, 2.0])
    steps = [line.split()[1] for line in ended.out.splitlines() if line.startswith("  step")]
    assert steps == ["40/100", "41/100", "42/100"]


def test_watch_ends_with_ctrl_c(shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "runs/a", state="running")

    def interrupt(seconds: float) -> None:
        if seconds >= 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_verb.time, "sleep", interrupt)
    monkeypatch.setattr(RunDir, "find_writer", lambda *_, **__: "process 1 on host n1")
    ended = shardway("status", "--watch")
    assert (ended.code, ended.err) == (0, "")


def test_the_number_after_watch_is_its_seconds(shardway: Shardway, tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a")
    for words in (("--watch", "3", "a"), ("a", "-w"), ("--watch=3s", "a"), ("--watch", "a")):
        ended = shardway("status", *words)
        assert (ended.code, ended.out.startswith("runs/a  stopped")) == (0, True), words
    ended = shardway("status", "--watch", "29084")
    assert (ended.code, "name it first: shardway status 29084 --watch" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0s"), (59.9, "59s"), (60, "1m"), (3600, "1h00m"), (90061, "1d1h"), (-5, "0s")]
)
def test_an_age_has_two_parts_at_most(seconds: float, shown: str) -> None:
    assert render_age(seconds) == shown
