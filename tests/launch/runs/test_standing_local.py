from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pytest

from shardway.cli import status
from shardway.errors import SiteError, UserError
from shardway.launch.hosts.base import Done
from shardway.launch.hosts.local import LocalHost
from shardway.launch.runs.job_status import JobStatus, Ledger, LedgerEntry, read_ledger, read_standing, render_attempts
from shardway.launch.runs.stop import Stopper
from shardway.launch.schedulers.base import find_scheduler
from shardway.launch.schedulers.local import ThisMachine
from shardway.rundir.attempts import Attempt, AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir

SLEEPS = """# local base.{number:04d}.x
after={after:04d}
while [ -n "${{1-}}" ] && kill -0 ${{1%.*}}; do sleep 0.1; done
sleep 300
"""


def begin(run: Path, number: int, before: str = "") -> Attempt:
    """Submit an attempt that sleeps; it says of itself only that it began."""
    attempt = RunDir(run).attempt(number)
    attempt.make()
    attempt.job_script.write_text(SLEEPS.format(number=number, after=number - 1))
    done = LocalHost().run(ThisMachine().submit(str(attempt.job_script), str(attempt.job_log), before))
    attempt.write_submission(Submission("local", "x", job=ThisMachine().read_job_id(done.out)))
    return attempt


def job_of(attempt: Attempt) -> str:
    submission = attempt.read_submission()
    assert submission is not None
    return submission.job


def read(run: Path) -> Ledger:
    return read_ledger(LocalHost(), run)


def stand(run: Path) -> list[JobStatus]:
    return read_standing(LocalHost(), read(run))


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Path]:
    """A run whose first attempt runs and whose second waits for it."""
    run = tmp_path / "run"
    first = begin(run, 1)
    first.write_started(AttemptStart(job_of(first), nodes="here", started=1.0))
    begin(run, 2, job_of(first))
    until = time.monotonic() + 60
    while stand(run)[1].word != "queued":  # it says who it is a moment before it is its script
        assert time.monotonic() < until
        time.sleep(0.01)
    yield run
    Stopper(LocalHost()).cancel(read(run))


def test_a_run_that_is_killed_was_stopped_by_a_person(chain: Path) -> None:
    assert [standing.word for standing in stand(chain)] == ["running", "queued"]
    assert "      It starts after attempt 0001." in render_attempts(stand(chain))
    stopping = Stopper(LocalHost()).cancel(read(chain))
    assert len(stopping.cancelled) == 2
    for standing in stand(chain):
        assert standing.result is not None
        assert (standing.word, standing.result.by) == ("stopped", "shardway stop")
        assert standing.result.reason == "killed by `shardway stop --now`"
        assert standing.why is None


@contextmanager
def full_disk(*, takes_links: bool) -> Iterator[None]:
    """No new file can be made by this host; a second name of an old one can where it `takes_links`."""
    run_many = LocalHost.run_many

    def refuse(_: LocalHost, files: Mapping[PurePosixPath, str]) -> None:
        raise UserError(f"{next(iter(files))} cannot be written: No space left on device.\n  To do: make room.")

    def refuse_links(host: LocalHost, commands: Sequence[Sequence[str]], **options: float) -> list[Done]:
        return run_many(host, [("false",) if words[0] == "ln" else words for words in commands], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalHost, "write_files", refuse)
        if not takes_links:
            patch.setattr(LocalHost, "run_many", refuse_links)
        yield


def test_a_stop_needs_no_room(chain: Path) -> None:
    with full_disk(takes_links=True):
        stopping = Stopper(LocalHost()).ask(read(chain))
    assert [[entry.number for entry in entries] for entries in (stopping.asked, stopping.cancelled)] == [[1], [2]]
    assert (RunDir(chain).stop_requested(), RunDir(chain).stop_reason()) == (True, "")
    with full_disk(takes_links=False):  # it was asked before
        assert [entry.number for entry in Stopper(LocalHost()).ask(read(chain)).asked] == [1]


def test_a_stop_that_is_refused_says_who_can_stop_it(chain: Path) -> None:
    message = r"cannot be written: No space left on device\.\n  The run was not asked to stop"
    with full_disk(takes_links=False), pytest.raises(UserError, match=message):
        Stopper(LocalHost()).ask(read(chain))
    assert [standing.word for standing in stand(chain)] == ["running", "queued"]


def test_where_no_stop_file_can_be_made_ranks_get_a_signal(chain: Path) -> None:
    """As with a quota of inodes on a file system whose links count as files."""
    RunDir(chain).write_status(state="running", step=3)
    with full_disk(takes_links=False):
        stopping = Stopper(LocalHost()).ask(read(chain))
    assert [[entry.number for entry in entries] for entries in (stopping.asked, stopping.cancelled)] == [[1], [2]]
    assert stopping.unwritten == f"{chain}/stop cannot be written: No space left on device."
    assert not RunDir(chain).stop_requested()
    until = time.monotonic() + 60
    while stand(chain)[0].is_active:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [("slurm", ("scancel", "--full", "--signal=USR1", "17")), ("pbs", ("qsig", "-s", "SIGUSR1", "17"))],
)
def test_a_scheduler_signals_every_rank(scheduler: str, words: tuple[str, ...]) -> None:
    assert find_scheduler(scheduler).warn(["17"]) == (words,)


def test_jobs_are_killed_where_no_file_can_be_made(chain: Path) -> None:
    with full_disk(takes_links=False):
        stopping = Stopper(LocalHost()).cancel(read(chain))
    assert [entry.number for entry in stopping.cancelled] == [1, 2]
    assert not any(standing.is_active for standing in stand(chain))


def test_what_only_waits_is_taken_out_of_the_queue(chain: Path) -> None:
    stopping = Stopper(LocalHost()).ask(read(chain))
    assert [entry.number for entry in stopping.asked] == [1]
    assert [entry.number for entry in stopping.cancelled] == [2]
    assert [standing.word for standing in stand(chain)] == ["running", "stopped"]


def test_what_a_job_wrote_itself_stays(chain: Path) -> None:
    RunDir(chain).attempt(1).write_result(Result(Ending.CRASHED, exit_code=3, by="job script"))
    Stopper(LocalHost()).cancel(read(chain))
    assert [standing.word for standing in stand(chain)] == ["crashed", "stopped"]


# --- how an attempt ended of which only its exit code is known


def ended(run: Path, result: Result | None) -> JobStatus:
    """An attempt of this machine that is over."""
    attempt = RunDir(run).attempt(1)
    attempt.make()
    attempt.write_submission(Submission("local", "x", job="4194304.1"))
    if result is not None:
        attempt.write_result(result)
    return stand(run)[0]


@pytest.mark.parametrize(
    ("code", "name", "remedy"),
    [
        (137, "killed", "site.memory"),
        (139, "segmentation_fault", "shardway doctor"),
        (143, "terminated", "shardway logs RUN --job"),
        (127, "command_not_found", "site.venv"),
        (1, "failed", "shardway logs RUN --job"),
    ],
)
def test_an_exit_code_is_explained(code: int, name: str, remedy: str, tmp_path: Path) -> None:
    standing = ended(tmp_path / "run", Result(Ending.CRASHED, exit_code=code, by="job script"))
    assert standing.why is not None
    assert standing.why.code == name
    assert remedy.replace("RUN", str(tmp_path / "run")) in standing.why.remedy


def test_an_attempt_that_is_lost_says_what_to_do(tmp_path: Path) -> None:
    standing = ended(tmp_path / "run", None)
    assert (standing.word, standing.why and standing.why.code) == ("unknown", "unknown")
    assert f"      to do: `shardway logs {tmp_path}/run --job` shows" in "\n".join(render_attempts([standing]))


def test_memory_that_ran_out_is_explained_by_what_the_job_asked_for(tmp_path: Path) -> None:
    """The agent that saw it knows the rank, and not what site.memory was."""
    standing = ended(tmp_path / "run", Result(Ending.OUT_OF_MEMORY, exit_code=4, by="shardway train"))
    assert standing.why is not None
    assert (standing.why.code, "site.memory" in standing.why.remedy) == ("out_of_memory", True)


@pytest.mark.parametrize(
    "result",
    [
        Result(Ending.CRASHED, reason="KeyError: 'x'", exit_code=1, by="rank 0"),
        Result(Ending.CRASHED, reason="rank 1 was ended by SIGKILL", exit_code=4, by="shardway train"),
        Result(Ending.OUT_OF_MEMORY, reason="no memory is left on the device", exit_code=4, by="rank 0"),
        Result(Ending.STOPPED, exit_code=143, by="job script"),
        Result(Ending.FINISHED, exit_code=0, by="job script"),
    ],
)
def test_what_says_enough_is_not_explained(result: Result, tmp_path: Path) -> None:
    assert ended(tmp_path / "run", result).why is None


@pytest.mark.parametrize(
    ("begun", "known", "line"),
    [(1, 1, ""), (1, 0, ""), (3, 3, "3"), (3, 0, "3"), (3, 5, "5, of which 3 began to train")],
)
def test_attempts_are_counted_as_they_are_shown(begun: int, known: int, line: str) -> None:
    assert status._describe_attempts(begun, known).removeprefix("  attempts    ") == line


# --- records that are damaged


def test_a_scheduler_that_is_none_is_silent(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.make()
    attempt.write_submission(Submission("slrum", "x", "17", asked={"nodes": "two", "walltime_s": []}))
    standing = stand(tmp_path)[0]
    assert (standing.word, standing.result) == ("unknown", None)
    assert standing.silence == '"slrum" is no scheduler that Shardway knows; allowed: local, slurm, pbs.'
    with pytest.raises(SiteError, match="no scheduler that Shardway knows"):
        Stopper(LocalHost()).cancel(read(tmp_path))


@pytest.mark.parametrize("job", ["--me", "-u alice", "all", "", "1 2", "17;rm"])
def test_what_is_no_job_is_never_ended(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scancel --me` would end every job of a person."""
    attempt, commands = RunDir(tmp_path).attempt(1), []
    attempt.make()
    attempt.write_submission(Submission("slurm", "x", job))
    monkeypatch.setattr(LocalHost, "run_many", lambda self, words, **_: commands.extend(words) or [])
    ledger = Ledger(RunDir(tmp_path), (LedgerEntry(attempt, attempt.read_submission()),))
    if job:
        with pytest.raises(SiteError, match="is no id of a job, so no job was ended"):
            Stopper(LocalHost()).cancel(ledger)
    else:
        assert Stopper(LocalHost()).cancel(ledger).cancelled == ()
    assert commands == []
