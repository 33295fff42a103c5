"""One attempt is submitted once, whatever a scheduler, a person or a disk does meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import pytest
from job_cases import Cluster, chained, make_job

from shardway.errors import SiteError, UserError
from shardway.launch.hosts.base import Done, HostUnreachable
from shardway.launch.hosts.local import LocalHost
from shardway.launch.job import Job
from shardway.launch.runs.job_status import read_ledger
from shardway.launch.schedulers.base import SchedulerSilent
from shardway.launch.submission import submit
from shardway.launch.submission.submit import Submitter


@dataclass
class Bench:
    """A submitter before fake commands of Slurm; pauses are noted and not made, and what is told is kept."""

    cluster: Cluster
    pauses: list[float] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @property
    def submitter(self) -> Submitter:
        """One of those that may be at work."""
        return Submitter(LocalHost(), pause=self.pauses.append, tell=self.told.append)

    @property
    def job(self) -> Job:
        """The first attempt of a run."""
        return make_job("slurm", run=self.cluster.path / "run")

    @property
    def queue(self) -> list[str]:
        """Ids of the jobs that the scheduler has taken."""
        path = self.cluster.path / "queue"
        return [line.split("|")[0] for line in path.read_text().splitlines()] if path.exists() else []

    def answers(self, *words: str) -> None:
        """What sbatch does, call by call."""
        self.cluster.write("answers", "".join(f"{word}\n" for word in words))

    def noted(self, number: int = 1) -> str:
        """The job id that is written in an attempt's folder."""
        submission = replace(self.job, attempt=number).folder.read_submission()
        return submission.job if submission else "nothing"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Fakes first on the PATH."""
    cluster = Cluster.make(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{cluster.path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("FAKES", str(cluster.path))
    return Bench(cluster)


def test_a_job_is_taken_at_once(bench: Bench) -> None:
    file = bench.job.folder.run_file
    done = bench.submitter.submit(bench.job, {file: "format = 1\n"})
    assert (done.job, done.found, bench.queue, bench.pauses) == ("101", False, ["101"], [])
    assert bench.told == []
    assert (bench.noted(), file.read_text(), bench.job.folder.job_script.exists()) == ("101", "format = 1\n", True)


class Impatient(LocalHost):
    """Whose wait for sbatch is over as soon as that has taken the job, and not before."""

    def __init__(self, taken: Path) -> None:
        self.taken = taken

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        if words[0] != "sbatch":
            return super().run(words, timeout_s=timeout_s, stdin=stdin)
        assert timeout_s == submit.SUBMIT_TIMEOUT_S
        with subprocess.Popen(list(words), stdout=subprocess.PIPE, start_new_session=True) as process:
            while not (self.taken.exists() and self.taken.read_text()):
                assert process.poll() is None
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
        return Done(tuple(words), 128 + signal.SIGTERM, "", "", timed_out=True)


@pytest.mark.parametrize("lost", ["lost", "hang"])
def test_a_lost_answer_is_found_by_name(bench: Bench, lost: str) -> None:
    bench.answers(lost)
    host = Impatient(bench.cluster.path / "queue") if lost == "hang" else LocalHost()
    done = Submitter(host, pause=bench.pauses.append).submit(bench.job, {})
    assert (done.job, done.found, bench.queue, bench.pauses) == ("101", True, ["101"], [2.0])
    assert bench.noted() == "101"


def test_a_scheduler_that_is_down_is_asked_again(bench: Bench) -> None:
    bench.answers("down", "down", "ok")
    done = bench.submitter.submit(bench.job, {})
    assert (done.job, done.found, bench.queue, bench.pauses) == ("101", False, ["101"], [2.0, 4.0])
    told = "slurm on {} did not take the job: Slurm's controller does not answer. Trying again for about a minute."
    assert bench.told == [told.format(bench.job.site)], "once"


def test_a_host_that_is_no_login_node_is_named(bench: Bench) -> None:
    class Box(LocalHost):
        name = "alice@box"

    bench.cluster.write("refuse", "sbatch: fatal: Could not establish a configuration source\n")
    with pytest.raises(UserError, match=r"Slurm is not configured on alice@box\.\n.*name a login node"):
        Submitter(Box()).submit(bench.job, {})


def test_down_with_its_accounting_is_asked_again_too(bench: Bench) -> None:
    """A controller that could not be reached has certainly taken nothing."""
    bench.answers("down")
    bench.cluster.write("silent", "")
    assert bench.submitter.submit(bench.job, {}).job == "101"
    assert bench.queue == ["101"]


def test_nothing_is_handed_over_again_while_nobody_knows(bench: Bench) -> None:
    """The answer is lost, and then squeue and sacct are silent: a second sbatch could double the job."""
    bench.answers("lost")
    bench.cluster.write("silent", "")
    with pytest.raises(SiteError, match=r"did not take the job in 6 tries.*\n.*never submitted twice"):
        bench.submitter.submit(bench.job, {})
    assert (bench.queue, bench.noted(), len(bench.pauses)) == (["101"], "", 5)


def test_the_same_command_later_finds_the_lost_job(bench: Bench) -> None:
    test_nothing_is_handed_over_again_while_nobody_knows(bench)
    last = read_ledger(LocalHost(), bench.job.run).last
    assert last is not None
    assert last.is_unsent
    with pytest.raises(SchedulerSilent):
        bench.submitter.recover(bench.job, last)
    (bench.cluster.path / "silent").unlink()
    later = replace(bench.job, attempt=2, token="ffffff")
    found = bench.submitter.recover(later, last)
    assert found is not None
    assert (found.job, found.found, bench.noted()) == ("101", True, "101")


def test_the_same_command_later_starts_again_where_nothing_got_through(bench: Bench) -> None:
    bench.answers(*["down"] * 6)
    with pytest.raises(SiteError, match="Slurm's controller does not answer"):
        bench.submitter.submit(bench.job, {})
    last = read_ledger(LocalHost(), bench.job.run).last
    assert last is not None
    assert last.is_unsent
    assert bench.submitter.recover(bench.job, last) is None
    assert (bench.job.folder.path.exists(), bench.queue) == (False, [])


def test_a_refusal_leaves_nothing(bench: Bench) -> None:
    bench.answers("account")
    with pytest.raises(UserError, match='may not charge the account "proj1"'):
        bench.submitter.submit(bench.job, {})
    assert (bench.job.folder.path.exists(), bench.queue, bench.pauses) == (False, [], [])


def test_a_missing_sbatch_is_told(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("mkdir", "rm"):
        (tools / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(UserError, match="sbatch"):
        bench.submitter.submit(bench.job, {})
    assert not bench.job.folder.path.exists()


def test_an_interrupt_while_the_folder_is_filled_leaves_nothing(bench: Bench) -> None:
    def interrupt(attempt: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.submitter.submit(bench.job, {}, fill=interrupt)
    assert (bench.job.folder.path.exists(), bench.queue) == (False, [])


# --- two at once


def test_of_many_at_once_one_submits(bench: Bench) -> None:
    ended: list[object] = []

    def work() -> None:
        try:
            ended.append(bench.submitter.submit(bench.job, {}).job)
        except UserError as error:
            ended.append(error)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [end for end in ended if isinstance(end, UserError)]
    assert (bench.queue, len(errors)) == (["101"], 4)
    assert all("was made by another command just now" in str(error) for error in errors)


@pytest.mark.parametrize("written", [True, False])
def test_one_that_is_being_submitted_is_left_alone(bench: Bench, written: bool) -> None:
    """Another command looks while the first is between its folder and its job."""
    seen: list[str] = []

    def look(attempt: object) -> None:
        last = read_ledger(LocalHost(), bench.job.run).last
        assert last is not None
        assert last.is_unsent
        with pytest.raises(UserError, match="is being submitted just now"):
            bench.submitter.recover(replace(bench.job, token="ffffff"), last)
        seen.append("looked")

    if written:
        bench.answers("down")
        submitter = Submitter(LocalHost(), pause=lambda seconds: look(None))
        assert submitter.submit(bench.job, {}).job == "101"
    else:
        assert bench.submitter.submit(bench.job, {}, fill=look).job == "101"
    assert (seen, bench.queue) == (["looked"], ["101"])


def test_one_that_died_long_ago_is_cleared_away(bench: Bench) -> None:
    bench.job.folder.make()
    os.utime(bench.job.folder.path, (1e9, 1e9))
    last = read_ledger(LocalHost(), bench.job.run).last
    assert last is not None
    assert bench.submitter.recover(bench.job, last) is None
    assert not bench.job.folder.path.exists()


# --- disks and permissions


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without space."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_nothing(bench: Bench, full_disk: Path) -> None:
    job = replace(bench.job, run=full_disk / "run")
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        bench.submitter.submit(job, {})
    assert (job.folder.path.exists(), bench.queue) == (False, [])


class FullAfterwards(LocalHost):
    """A disk that is full as soon as a job is in the queue."""

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        if any('"job": "101"' in text for text in files.values()):
            raise UserError("submission.json cannot be written: No space left on device.")
        super().write_files(files, executable=executable)


def test_a_job_whose_id_cannot_be_noted_is_not_lost(bench: Bench) -> None:
    with pytest.raises(UserError, match=r"job 101 was submitted, but its id could not be noted: .*No space"):
        Submitter(FullAfterwards(), pause=bench.pauses.append).submit(bench.job, {})
    submission = bench.job.folder.read_submission()
    assert submission is not None
    bench.job.folder.write_submission(replace(submission, submitted=0.0))  # as it is two minutes later
    last = read_ledger(LocalHost(), bench.job.run).last
    assert last is not None
    found = bench.submitter.recover(bench.job, last)
    assert found is not None
    assert (found.job, bench.queue) == ("101", ["101"])


class Cut(LocalHost):
    """sbatch takes the job and says that its controller is down; then the connection breaks where the job is noted."""

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        done = super().run(words, timeout_s=timeout_s, stdin=stdin)
        said = "sbatch: error: Unable to contact slurm controller (connect failure)"
        return Done(tuple(words), 1, "", said) if words[0] == "sbatch" else done

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        if any('"job": "101"' in text for text in files.values()):
            raise HostUnreachable("box: the connection broke")
        super().write_files(files, executable=executable)


def test_a_job_that_was_found_and_cannot_be_noted_is_not_submitted_again(bench: Bench) -> None:
    with pytest.raises(HostUnreachable, match="the connection broke"):
        Submitter(Cut(), pause=bench.pauses.append).submit(bench.job, {})
    assert bench.queue == ["101"]


def test_a_run_directory_that_cannot_be_made_is_told(bench: Bench) -> None:
    (bench.cluster.path / "run").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be made: .*\n.*Nothing was submitted"):
        bench.submitter.submit(bench.job, {})


def test_a_chain_ahead_is_submitted_link_by_link(bench: Bench) -> None:
    job = chained(bench.job, most=3, ahead=True)
    first = bench.submitter.submit(job, {})
    second = bench.submitter.submit(job.successor(), {}, after=first.job)
    assert second.job == "102"
    assert bench.cluster.list_calls("sbatch")[-1][1:-1] == ["--parsable", "--dependency=afterany:101"]
