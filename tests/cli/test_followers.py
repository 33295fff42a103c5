"""`shardway submit --then` and `--after`: a run that is submitted when another one is finished, once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import TINY, Shardway, write_text
from test_submit import PROFILE, SUBMIT
from test_submit_command import wait_until

from shardway.cli.then import read_then
from shardway.errors import UserError
from shardway.launch.hosts import LocalHost
from shardway.launch.runs.followers import list_follower, read_followers
from shardway.launch.runs.job_status import read_ledger
from shardway.launch.script import read_blocks
from shardway.launch.submission import submit as submission
from shardway.rundir.attempts import Ending, Result, Submission
from shardway.rundir.directory import RunDir

HERE = ("site.ranks_per_node=1", "--walltime", "10min")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shardway: Shardway) -> Iterator[Path]:
    """A folder of code; its jobs are processes of this machine, which are gone at the end."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    for path in folder.glob("runs/*/attempts/*/started.json"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(json.loads(path.read_text())["job"].split(".")[0]), signal.SIGKILL)


def submit(shardway: Shardway, name: str, command: str, *words: str) -> RunDir:
    """Submit a line of bash as a run of this name."""
    ended = shardway("submit", "--dir", f"runs/{name}", *HERE, *words, "--", "bash", "-c", command)
    assert ended.code == 0, ended.err
    return RunDir(Path(f"runs/{name}").absolute())


def ended(run: RunDir, number: int = 1) -> str:
    """How an attempt has ended, once it has."""
    wait_until(lambda: run.attempt(number).read_result() is not None)
    result = run.attempt(number).read_result()
    assert result is not None
    return str(result.state)


GATE = "until [ -e {0}/go ]; do sleep 0.05; done; exit $(cat {0}/go)"


def test_a_run_that_fails_hands_nothing_over_and_a_later_attempt_that_finishes_does(
    project: Path, shardway: Shardway
) -> None:
    first = submit(shardway, "first", GATE.format(project))
    second = submit(shardway, "second", "true", "--after", "first")
    third = submit(shardway, "third", "true", "--after", "second")
    told = json.loads(shardway("status", "runs/second", "--json").out)
    assert (told["waits_for"], told["jobs"][0]["state"], told["waits_remedy"]) == (str(first.path), "waits", "")
    assert [each["run"] for each in told["followers"]] == [str(third.path)]
    again = shardway("submit", "--dir", "runs/second", *HERE, "--after", "first", "--", "true")
    assert (again.code, "is prepared already: waits for" in again.err) == (2, True)
    (project / "go").write_text("1\n")
    assert ended(first) == "crashed"
    wait_until(lambda: "which has no job now" in shardway("status", "runs/second").out)
    ring = shardway("submit", "--dir", "runs/first", *HERE, "--after", "third", "--", "true")
    assert (ring.code, "would follow a run that waits for it" in ring.err) == (2, True)
    own = shardway("submit", "--dir", "runs/first", *HERE, "--after", "first", "--", "true")
    assert (own.code, "would follow itself" in own.err) == (2, True)
    assert "taken out of what follows" in shardway("stop", "runs/third").out
    assert not third.path.exists()
    (project / "go").write_text("0\n")
    wait_until(lambda: shardway("resume", "runs/first").code == 0)
    assert [ended(first, 2), ended(second)] == ["finished"] * 2
    assert first.attempt(2).job_log.read_text().count("queued what follows") == 1


def test_a_training_is_evaluated_when_it_is_finished(project: Path, shardway: Shardway) -> None:
    """And what was measured is in the report of the run."""
    write_text(project)
    question = {"question": "To be, or not", "choices": ["to be", "a question"], "answer": 0}
    (project / "q.jsonl").write_text(json.dumps(question) + "\n")
    words = (
        *(word for word in TINY if not word.startswith("data.")),
        f"data.path={project}/text.txt",
        "data.seq_len=64",
        "--dir",
        "runs/my",
        *HERE,
    )
    done = shardway("submit", *words, "--then", "evaluate --choices q.jsonl", "--json")
    assert done.code == 0, done.err
    (then,) = json.loads(done.out)["then"]
    run, follower = RunDir(project / "runs/my"), RunDir(project / "runs/my-evaluate")
    assert (then["run"], then["waits_for"], then["job"]) == (str(follower.path), str(run.path), "")
    assert (ended(run), ended(follower)) == ("finished", "finished")
    assert "runs/my-evaluate  finished as job" in shardway("status", "runs/my").out
    told = json.loads(shardway("report", "runs/my", "--json").out)
    assert '"acc"' in json.dumps(told)


def test_a_run_that_is_stopped_keeps_what_follows(waiting: tuple[RunDir, RunDir], shardway: Shardway) -> None:
    first, second = waiting
    assert f"when the run is finished: {second.path}" in shardway("stop", str(first.path)).out
    assert [each.waits for each in read_followers(LocalHost(), first.path)] == [True]
    assert "taken out of what follows" in shardway("stop", str(second.path)).out
    assert (second.attempt(1).path.exists(), first.followers_folder.exists()) == (False, False)
    assert hand_over(first) == ""


def test_a_run_that_was_never_there_is_refused(project: Path, shardway: Shardway) -> None:
    refused = shardway("submit", "--dir", "runs/x", *HERE, "--after", "nothing", "--", "true")
    assert (refused.code, "there is no run nothing" in refused.err, (project / "runs").exists()) == (2, True, False)


# --- the claim


@pytest.fixture
def waiting(tmp_path: Path) -> tuple[RunDir, RunDir]:
    """A run that has finished and not read its list, and one that it lists, as a submitter left it that was killed."""
    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    for run in (first, second):
        run.create()
        run.attempt(1).make()
    first.attempt(1).write_submission(Submission("slurm", "aa", job="7", submitted=1.0))
    first.attempt(1).write_result(Result(Ending.FINISHED))
    second.attempt(1).write_submission(Submission("slurm", "bb", submitted=1.0, follows=str(first.path)))
    second.attempt(1).job_script.write_text("# a script\n")
    list_follower(LocalHost(), first.path, second.attempt(1), "bb")
    return first, second


def hand_over(run: RunDir, times: int = 1) -> str:
    """What the functions of a finished job say; `submit_after` notes each call."""
    blocks = "\n".join(block.text for block in read_blocks("lib").values())
    fake = f'submit_after() {{ echo "$1" >> {run.path}/calls; sleep 0.1; echo 8; }}'
    calls = " & ".join(["submit_followers"] * times) + "\nwait"
    script = f"{blocks}\n{fake}\nrun={run.path} attempt=0001\n{calls}"
    return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout


def test_two_jobs_at_once_hand_it_over_once(waiting: tuple[RunDir, RunDir]) -> None:
    first, second = waiting
    assert hand_over(first, times=4).count("queued what follows") == 1
    assert (first.path / "calls").read_text() == f"{second.attempt(1).job_script}\n"
    submission = second.attempt(1).read_submission()
    assert submission is not None
    assert (submission.job, submission.token, submission.follows) == ("8", "bb", str(first.path))
    assert hand_over(first) == ""


def test_what_a_killed_claimant_left_is_named(waiting: tuple[RunDir, RunDir], shardway: Shardway) -> None:
    first, second = waiting
    remedy = f"to do: shardway resume {second.path}"
    said = shardway("status", str(second.path)).out
    assert ("before it handed this over" in said, remedy in said) == (True, True)
    second.attempt(1).handover.mkdir()
    assert "hands it over just now" in shardway("status", str(second.path)).out
    os.utime(second.attempt(1).handover, (1.0, 1.0))
    said = shardway("status", str(second.path)).out
    assert ("was ended before the job was noted" in said, remedy in said) == (True, True)
    assert hand_over(first) == ""


@pytest.mark.parametrize(("states", "starts"), [(("finished",), True), (("crashed", "finished", "not_needed"), True)])
def test_a_follower_that_was_queued_early_looks_at_the_run(
    states: tuple[str, ...], starts: bool, waiting: tuple[RunDir, RunDir]
) -> None:
    first, second = waiting
    first.attempt(1).result_path.unlink()
    blocks = "\n".join(block.text for block in read_blocks("lib").values())
    head = f"{blocks}\nrun={second.path} here={second.attempt(1).path} attempt=0001 after=0000 job=8\n"
    look = ["bash", "-c", f"{head}check_followed {first.path}; echo starts"]
    for number, state in enumerate(states, 1):
        first.attempt(number).make()
        first.attempt(number).write_result(Result(Ending(state)))
    said = subprocess.run(look, check=True, capture_output=True, text=True).stdout
    assert said.endswith("starts\n") is starts
    first.attempt(9).make()
    first.attempt(9).write_result(Result(Ending.CRASHED))
    said = subprocess.run(look, check=True, capture_output=True, text=True).stdout
    assert "is not finished: crashed" in said
    result = second.attempt(1).read_result()
    assert result is not None
    assert result.state is Ending.NOT_NEEDED


def test_a_submitter_that_was_killed_before_it_was_listed_is_repaired(
    project: Path, shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = RunDir(project / "runs/first"), RunDir(project / "runs/second")
    first.create()
    first.attempt(1).make()
    first.attempt(1).write_submission(Submission("local", "aa", job="7.7", submitted=1.0))
    first.attempt(1).write_result(Result(Ending.CRASHED, exit_code=1, by="rank 0"))
    words = ("submit", "--dir", "runs/second", *HERE, "--after", "first", "--", "true")
    if (child := os.fork()) == 0:
        monkeypatch.setattr(submission, "list_follower", lambda *ignored: os.kill(os.getpid(), signal.SIGKILL))
        shardway(*words)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    said = shardway("status", "runs/second").out
    assert ("does not list it" in said, "shardway resume runs/second" in said) == (True, True)
    assert read_followers(LocalHost(), first.path) == []
    monkeypatch.setattr(submission, "IN_FLIGHT_S", 0.0)
    mended = shardway("resume", "runs/second")
    assert (mended.code, f"waits for      {first.path}" in mended.out) == (0, True), mended.err
    assert [each.waits for each in read_followers(LocalHost(), first.path)] == [True]
    assert [attempt.number for attempt in second.attempts()] == [1]


# --- sites where jobs may not submit jobs


def test_where_jobs_may_not_submit_it_waits_in_the_queue_for_the_last_link(
    tmp_path: Path, shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    texts = {
        "sbatch": 'echo "$@" >> {0}/calls\nwc -l < {0}/calls\n',
        "squeue": 'for i in $(seq $(wc -l < {0}/calls)); do echo "$i|$i|PENDING|N/A|N/A||Dependency|x"; done\n',
        "sacct": "",
        "stat": "echo lustre\n",
    }
    for name, text in texts.items():
        (tools / name).write_text("#!/bin/bash\n" + text.format(tmp_path))
        (tools / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("shardway.launch.submission.host_checks._OF_ONE_NODE", ())
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "tiny.toml").write_text(PROFILE + "[request]\nsubmit_from_nodes = false\n")
    words = (*SUBMIT, "--until-done", "--max-attempts", "2", "--then", "evaluate --choices q.jsonl")
    done = shardway(*words)
    assert done.code == 0, done.err
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [("afterany:1" in call, "afterany:2" in call) for call in calls] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    script = RunDir(folder / "run-evaluate").attempt(1).job_script.read_text()
    assert f"check_followed {folder}/run" in script
    assert [each.attempt.run_path.name for each in read_followers(LocalHost(), folder / "run")] == ["run-evaluate"]
    assert read_ledger(LocalHost(), folder / "run-evaluate").entries[0].job == "3"


# --- the words of --then


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train my.toml", "does not begin with a verb"),
        ("stop", "does not begin with a verb"),
        ("", "does not begin with a verb"),
        ("evaluate --choice q.jsonl", "No such option"),
        ("evaluate --limit x", "--limit"),
        ("evaluate runs/my", "is no option"),
        ("evaluate 'x", "is not closed"),
        ("checkpoint export", "Missing argument"),
    ],
)
def test_words_that_would_fail_after_the_run_are_refused_before(text: str, part: str) -> None:
    with pytest.raises(UserError) as refused:
        read_then(text)
    assert part.lower() in str(refused.value).lower()


def test_keys_of_the_job_are_taken_out_of_the_words() -> None:
    then = read_then("shardway evaluate --data a.txt site.walltime=30m data.seq_len=32 run.name=judge")
    assert (then.verb, then.keys) == (("evaluate",), ("site.walltime=30m", "run.name=judge"))
    assert then.words == ("--data", "a.txt", "data.seq_len=32")
