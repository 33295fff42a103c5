"""Runs by the ids of their jobs, by names and by paths inside them; and what is said of a word that means none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import Shardway

from shardway.errors import UserError
from shardway.launch.hosts.base import HostUnreachable
from shardway.launch.runs import job_status
from shardway.launch.runs.find import Known, find_known, find_named, remember
from shardway.rundir.attempts import AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir

Submit = Callable[..., RunDir]


@pytest.fixture
def submitted(shardway: Shardway, tmp_path: Path) -> Submit:
    """Makes a run with one attempt a job that is given; it is known, as one that was submitted."""

    def submit(name: str, *jobs: str, scheduler: str = "slurm", folder: str = "elsewhere") -> RunDir:
        run = RunDir(tmp_path / folder / name)
        run.create(empty=True)
        for number, job in enumerate(jobs, 1):
            attempt = run.attempt(number)
            attempt.make()
            attempt.write_submission(Submission(scheduler, "token", job=job))
            attempt.write_started(AttemptStart(job, host="n1"))
            attempt.write_result(Result(Ending.FINISHED, by="job script", ended=9.0))
            attempt.job_log.write_text(f"output of job {job}\n", encoding="utf-8")
        remember(Known(str(run.path)))
        return run

    return submit


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("12345", ("12345", "12345_4", "12345.0", "12345.batch", "12345+1")),
        ("123_4", ("123_4", "123")),
        ("29084.pbs01.example.org", ("29084", "29084.pbs01", "29084.pbs01.example.org")),
        ("29084[].pbs01", ("29084", "29084[3]", "29084[3].pbs01", "29084[].pbs01")),
        ("4711.812345", ("4711.812345", "4711")),
    ],
)
def test_an_id_means_the_run_that_has_had_the_job(job: str, words: tuple[str, ...], submitted: Submit) -> None:
    run = submitted("mine", job)
    submitted("other", "99")
    for word in words:
        assert (find_known(word).run, find_named(word).attempt) == (str(run.path), 1), word


@pytest.mark.parametrize(
    ("job", "word"),
    [
        ("12345", "1234"),
        ("12345", "12345.pbs01"),
        ("123_4", "123_5"),
        ("29084.pbs01", "29084.pbs02"),
        ("29084.pbs01", "29084.pbs"),
        ("29084[2].pbs01", "29084[3].pbs01"),
        ("4711.812345", "4711.812346"),
    ],
)
def test_another_job_is_not_meant(job: str, word: str, submitted: Submit) -> None:
    submitted("mine", job)
    with pytest.raises(UserError, match="has had a job"):
        find_known(word)


def test_the_exact_id_wins_and_two_runs_are_refused(submitted: Submit) -> None:
    submitted("one", "7.alpha")
    submitted("two", "7.beta")
    assert find_named("7.beta").known.run.endswith("two")
    with pytest.raises(UserError, match=r'"7" is the id of a job of 2 runs') as error:
        find_known("7")
    assert "one (job 7.alpha, attempt 1)" in str(error.value)
    submitted("three", "7")
    assert find_named("7").known.run.endswith("three")


def test_a_name_of_digits_and_an_id_are_not_confused(submitted: Submit) -> None:
    submitted("17", "3")
    submitted("b", "17")
    with pytest.raises(UserError, match="of 2 runs"):
        find_known("17")


def test_verbs_take_the_id_of_a_job(shardway: Shardway, submitted: Submit) -> None:
    run = submitted("mine", "16", "17")
    assert shardway("status", "17").out.startswith(f"{run.path}  finished")
    assert shardway("logs", "16").out == "output of job 16\n"
    assert shardway("logs", "17").out == "output of job 17\n"
    stopped = shardway("stop", "17")
    assert (stopped.code, stopped.out) == (0, "17 has no job that waits or runs\n")


def test_an_unknown_id_is_answered_with_what_is_known(shardway: Shardway, submitted: Submit) -> None:
    submitted("mine", "17")
    ended = shardway("status", "18")
    assert (ended.code, ended.out) == (2, "")
    assert "none of the one known run has had a job 18." in ended.err
    assert "Their newest jobs: 17 (" in ended.err
    assert "not submitted by Shardway has no run directory" in ended.err


def test_a_job_on_another_host_is_found_and_a_silent_host_named(
    submitted: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(Known("/far/mine", "login"))
    entry = SimpleNamespace(number=2, job="55")
    monkeypatch.setattr(job_status, "read_ledgers", lambda host, runs: [SimpleNamespace(entries=[entry])])
    assert find_named("55").known == Known("/far/mine", "login")
    assert find_named("login:55").attempt == 2
    assert find_known("login:mine") == Known("/far/mine", "login")

    def silent(*_: object) -> None:
        raise HostUnreachable("login does not answer\nmore")

    monkeypatch.setattr(job_status, "read_ledgers", silent)
    with pytest.raises(UserError, match="login did not answer, so its runs were not looked through: login does not"):
        find_known("55")


@pytest.mark.parametrize("inside", ["status.json", "events", "events/rank-00000.jsonl", "checkpoints"])
def test_a_path_inside_a_run_means_the_run(inside: str, shardway: Shardway, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs/mine")
    run.create()
    run.write_status(state="finished", step=3)
    (run.path / "events/rank-00000.jsonl").touch()
    assert shardway("status", f"runs/mine/{inside}").out.splitlines()[0].startswith("runs/mine  finished")


def test_a_typing_error_is_answered_with_what_is_close(shardway: Shardway, tmp_path: Path) -> None:
    for name in ("gpt-small", "other"):
        RunDir(tmp_path / "runs" / name).create()
    assert "Did you mean runs/gpt-small?" in shardway("status", "gpt-smal").err
    assert "Did you mean runs/gpt-small?" in shardway("logs", "runs/gpt-smll").err
    assert shardway("status", "gpt-small").out.startswith("runs/gpt-small  new\n")


@pytest.mark.parametrize(
    ("path", "says"), [("notes.txt", "It is a file, but it lies in no run directory."), ("folder", "no run in folder")]
)
def test_what_is_no_run_is_named_for_what_it_is(path: str, says: str, shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder").mkdir()
    ended = shardway("status", path)
    assert says in ended.out + ended.err
