"""`shardway scale`: what is run, what is read again, what is refused, and what its sheets hold."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import Shardway

import warm
from golden_files import Golden, golden_names
from shardway.cli.scale_runs import _left_in_order
from shardway.errors import UserError
from shardway.launch.submission.prepare import SubmitRequest, render_order
from shardway.resolve.request import KEYS_VARIABLE, ResolveRequest, read_keys_variable
from shardway.rundir.attempts import AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.watch.report.event_log import EventLog
from shardway.watch.scaling.runs import list_steps

BENCH = Path(__file__).parents[2] / "bench" / "scale" / "injected.py"


def record(folder: Path, world: int, samples: int = 16, *, share: float = 0.2, steps: int = 30, **more: Any) -> RunDir:
    """A finished run whose step is (share + (1 - share) / world) s, by one part in a hundred in turns."""
    run = RunDir(folder)
    run.create()
    run.write_status(state="finished", step=steps)
    machine = {"host": "n1", "cpu": "Xeon", "accelerators": "none", "os": "Linux"}
    facts = {"samples_per_step": samples, "tokens_per_step": 8 * samples, "parameters": 1000, "machine": machine}
    with run.event_writer(0) as events:
        events.write("started", step=0, world=world, device="cpu", torch="2.13.0", python="3.11", **facts | more)
        for step in range(1, steps + 1):
            took = (share + (1 - share) / world) * (1.01 if step % 2 else 0.99)
            events.write("step", step=step, loss=1.0, seconds=took, tokens_per_s=1.0, samples_per_s=1.0)
        events.write("finished", step=steps, reason="")
    return run


@pytest.fixture
def strong(shardway: Shardway, tmp_path: Path) -> list[str]:
    """Three runs of one global batch."""
    for world in (1, 2, 4):
        record(tmp_path / f"runs/r{world}", world)
    return [f"runs/r{world}" for world in (1, 2, 4)]


def refused(shardway: Shardway, golden: Golden, name: str, *words: str, code: int = 2) -> None:
    """A refusal whose message is a golden file."""
    ended = shardway("scale", *words)
    assert (ended.code, ended.out) == (code, "")
    golden(f"$ shardway scale {' '.join(words)}\n{ended.err}\nexit code {ended.code}\n", f"scale/{name}.txt")


# --- runs that exist


def test_runs_that_exist_are_analysed(shardway: Shardway, strong: list[str]) -> None:
    ended = shardway("scale", "--runs", *strong, "--strong")
    assert ended.code == 0, ended.err
    first, *_ = ended.out.splitlines()
    assert re.fullmatch(r"4 ranks keep 62\.5 % \(.*\): 20\.0 % \(.*\) of a step on 1 rank does not shrink\.", first)
    facts = json.loads(shardway("scale", "--runs", *strong, "--strong", "--json").out)
    assert facts["amdahl"]["share"]["value"] == pytest.approx(0.2, abs=0.001)
    assert facts["amdahl"]["most_speed_up"] == pytest.approx(5, rel=0.01)
    assert [point["efficiency"]["value"] for point in facts["points"]] == pytest.approx([1, 1 / 1.2, 1 / 1.6], rel=1e-3)
    assert [point["energy_kwh"] for point in facts["points"]] == [None] * 3
    assert facts["unit"] == "ranks"


def test_weak_runs_are_analysed(shardway: Shardway, tmp_path: Path) -> None:
    for world in (1, 2, 4):
        record(tmp_path / f"runs/w{world}", world, 16 * world, share=1.0)
    ended = shardway("scale", "--runs", "runs/w1", "runs/w2", "runs/w4", "--weak")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("4 ranks keep 100.0 % (")
    assert "a step takes 1 times as long with the same work a rank" in ended.out


def test_the_sheets_hold_the_figures_and_where_they_are_from(
    shardway: Shardway, strong: list[str], tmp_path: Path
) -> None:
    ended = shardway("scale", "--runs", *strong, "--strong", "--sheet", "s.html", "--sheet", "s.csv")
    assert ended.code == 0, ended.err
    rows = list(csv.DictReader(io.StringIO((tmp_path / "s.csv").read_text())))
    assert [(row["size"], row["ranks"], row["kind"]) for row in rows] == [(n, n, "strong") for n in "124"]
    assert float(rows[2]["efficiency"]) == pytest.approx(0.625, abs=0.001)
    assert float(rows[2]["efficiency_low"]) <= float(rows[2]["efficiency"]) <= float(rows[2]["efficiency_high"])
    assert rows[0]["command"] == "shardway scale --runs runs/r1 runs/r2 runs/r4 --strong"
    assert (rows[0]["machine"], rows[0]["torch"], rows[0]["energy_kwh"]) == ("n1", "2.13.0", "")
    page = (tmp_path / "s.html").read_text()
    assert not re.search(r"<script|(src|href)=", page)
    assert page.count("<svg") == 2
    assert "Xeon" in page
    assert 'class="ideal"' in page


def test_the_word_is_refused_where_it_is_wrong(
    shardway: Shardway, golden: Golden, strong: list[str], tmp_path: Path
) -> None:
    refused(shardway, golden, "strong-called-weak", "--runs", *strong, "--weak")
    record(tmp_path / "runs/other", 4, 32, parameters=2000)
    refused(shardway, golden, "neither", "--runs", *strong[:2], "runs/other", "--strong")


def test_wrong_options(shardway: Shardway, golden: Golden, strong: list[str]) -> None:
    refused(shardway, golden, "no-sizes")
    refused(shardway, golden, "many-mistakes", "--ranks", "1,x", "--nodes", "2", "--on", "a", "--sheet", "a.pdf")
    refused(shardway, golden, "runs-and-sizes", "--runs", "runs/r1", "runs/r2", "--ranks", "1,2", "--weak")
    refused(shardway, golden, "own-key", "--ranks", "1,2", "--strong", "train.steps=7")
    refused(shardway, golden, "few-steps", "--runs", *strong, "--strong", "--warmup", "25")
    refused(shardway, golden, "few-steps-asked", "--ranks", "1,2", "--strong", "--steps", "12", "--warmup", "5")
    refused(shardway, golden, "no-program", "--ranks", "1,2", "--strong", "--", "./a.out")
    refused(shardway, golden, "batch-does-not-grow", "--ranks", "2,3", "--weak", "train.global_batch=15")
    refused(shardway, golden, "ramp", "--ranks", "1,2", "--weak", "train.global_batch=[[0, 8], [64, 16]]")


# --- runs that are made


def test_a_dry_run_lists_the_runs(shardway: Shardway, tmp_path: Path) -> None:
    words = ("train.global_batch=2", "--ranks", "1,2", "--weak", "--repeats", "2", "--dry-run")
    planned = json.loads(shardway("scale", *words, "--json").out)
    assert [(run["size"], run["global_batch"], run["state"], run["run"]) for run in planned["runs"]] == [
        (size, batch, "missing", f"runs/default-scale/weak-{size[0]}ranks-{repeat}")
        for size, batch in (("1 rank", "2"), ("2 ranks", "4"))
        for repeat in (1, 2)
    ]
    assert shardway("scale", *words).out.splitlines()[0].split() == [
        "size",
        "repeat",
        "global",
        "batch",
        "state",
        "run",
        "directory",
    ]
    assert not (tmp_path / "runs").exists()


def test_jobs_that_are_finished_are_read_without_a_scheduler(shardway: Shardway, tmp_path: Path) -> None:
    site, root = "generic-slurm", tmp_path / "runs"
    words = ("site.walltime=1h", "run.name=my", f"run.root={root}")
    for nodes in (1, 2, 4):
        path = root / f"my-scale/strong-{nodes}nodes-1"
        run = record(path, 2 * nodes)
        attempt = run.attempt(1)
        attempt.make()
        attempt.write_submission(Submission("slurm", "token", f"10{nodes}", submitted=1.7e9))
        attempt.write_started(AttemptStart(f"10{nodes}", "n1", "n1", 1.7e9))
        attempt.write_result(Result(Ending.FINISHED, "done", 30, 0, by="rank 0", ended=1.7e9 + 60))
        request = SubmitRequest(ResolveRequest(None, words, path), site)
        attempt.order_path.write_text(render_order(request), encoding="utf-8")
    ended = shardway("scale", *words, "--nodes", "1,2,4", "--strong", "--on", site, "--json")
    assert ended.code == 0, ended.err
    facts = json.loads(ended.out)
    assert [(point["size"], point["ranks"]) for point in facts["points"]] == [(1, 2), (2, 4), (4, 8)]
    assert [point["runs"][0]["jobs"] for point in facts["points"]] == [["101"], ["102"], ["104"]]
    shown = shardway("scale", *words, "--nodes", "1,2,4", "--strong", "--on", site, "--dry-run").out
    assert shown.count("there (job 10") == 3


def test_an_injected_serial_share_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of real ranks whose step sleeps (docs/scale.md has shares from 10 to 50 %)."""
    monkeypatch.setattr(sys, "argv", [str(BENCH)])
    bench = runpy.run_path(str(BENCH))
    with warm.starts():
        found = bench["find_share"](0.3, "1,2,4", 10, 0.4, tmp_path / "study")
    assert found.share == pytest.approx(0.3, abs=0.02)
    assert found.efficiency == pytest.approx(1 / (4 * 0.3 + 0.7), abs=0.03)


# --- what is read of a run


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    log = EventLog()
    log.add({"event": "started", "step": 0, "time": 0.0})
    rows = [(1, 1.0, 10.0), (2, 1.0, 11.5), (3, 1.0, 13.0), (4, 1.0, 20.0), (5, 2.0, 22.0), (6, 2.0, 24.0)]
    for step, seconds, at in rows:
        if step == 4:
            log.add({"event": "saved", "step": 3, "time": 19.0})
        if step == 6:
            log.add({"event": "logged", "step": 5, "time": 22.5})
        log.add({"event": "step", "step": step, "seconds": seconds, "time": at})
    log.add({"event": "profiled", "first": 6, "last": 6, "step": 6, "time": 25.0})
    found = list_steps(log)
    assert found.whole == [1.0, 1.5, 1.5, 1.0]  # the first, and after a save, alone; steps 5 and 6 were captured
    assert found.inside == [1.0, 1.0, 1.0, 1.0]


def test_keys_of_the_variable_are_a_list() -> None:
    assert read_keys_variable({}) == ()
    assert read_keys_variable({KEYS_VARIABLE: '["a.b=1", "c.d=2"]'}) == ("a.b=1", "c.d=2")
    for text in ("a.b=1", "[1]", '["a"]', '{"a": 1}'):
        with pytest.raises(UserError, match=KEYS_VARIABLE):
            read_keys_variable({KEYS_VARIABLE: text})


def test_no_message_is_left_over() -> None:
    assert golden_names("scale") == {
        f"{name}.txt"
        for name in (
            *("strong-called-weak", "neither", "no-sizes", "many-mistakes", "runs-and-sizes", "own-key", "few-steps"),
            *("few-steps-asked", "no-program", "batch-does-not-grow", "ramp", "other-settings"),
        )
    }


def test_a_sigterm_reaches_the_run_that_it_waits_for() -> None:
    before = signal.getsignal(signal.SIGTERM)
    process = subprocess.Popen(["sleep", "60"])
    later = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
    later.start()
    with _left_in_order(process):
        assert process.wait(30) == -signal.SIGTERM
    later.join()
    assert signal.getsignal(signal.SIGTERM) is before
