from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_cases import wait_until

from shardway.launch.hosts.local import LocalHost
from shardway.launch.schedulers.base import JobPhase, JobRecord, RequestedResources
from shardway.launch.schedulers.local import ThisMachine
from shardway.launch.script import read_blocks

QUICK = "exit 3\n"


def submit(script: Path, after: str = "") -> str:
    """Start a script as a job of this machine; its id."""
    done = LocalHost().run(ThisMachine().submit(str(script), str(script.with_suffix(".out")), after))
    assert done.ok, done.err
    return ThisMachine().read_job_id(done.out)


def look(*jobs: str) -> list[JobRecord]:
    """What this machine says of jobs."""
    records = ThisMachine().parse_records(jobs, LocalHost().run_many(ThisMachine().query(jobs)))
    return [records[job] for job in jobs]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """What is started by scripts of this folder is ended with it."""
    yield tmp_path
    for path in filter(has_number, tmp_path.glob("*.pid")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def has_number(path: Path) -> bool:
    """Whether a process has noted its number here; the file is there a moment before that."""
    return path.exists() and path.read_text().endswith("\n")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_job_that_ends_at_once_was_taken(folder: Path) -> None:
    script = write(folder / "job.sh", "echo ran $# > here.txt\n".replace("here.txt", str(folder / "here.txt")))
    job = submit(script)
    assert job.count(".") == 1
    wait_until((folder / "here.txt").exists)
    wait_until(lambda: look(job)[0].phase is JobPhase.ENDED)


def test_a_job_whose_output_cannot_be_written_is_refused(folder: Path) -> None:
    script = write(folder / "job.sh", QUICK)
    done = LocalHost().run(ThisMachine().submit(str(script), str(folder / "gone/job.out"), ""))
    assert not done.ok
    assert ThisMachine().read_job_id(done.out) == ""
    assert "gone/job.out" in ThisMachine().explain_refusal(done, RequestedResources()).sentence


KEEPS_ON = """export SHARDWAY_JOB=$$.$(sed 's/.*) //' /proc/$$/stat | cut -d' ' -f20)
setsid bash -c "trap '' TERM; echo \\$\\$ > {0}/rank.pid; while :; do sleep 0.1; done" &
(unset SHARDWAY_JOB; exec sleep 3000) &
echo $! > {0}/clock.pid
wait
"""
"""A script with a rank that does not obey SIGTERM, in a session of its own as torchrun's are, and a clock."""


def test_a_job_lives_as_long_as_what_it_started(folder: Path) -> None:
    job = submit(write(folder / "job.sh", KEEPS_ON.format(folder)))
    wait_until(lambda: has_number(folder / "rank.pid") and has_number(folder / "clock.pid"))
    assert look(job)[0].phase is JobPhase.RUNNING
    os.kill(int(job.split(".")[0]), signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{job.split('.')[0]}/fd/1").exists())
    other = f"{job.split('.')[0]}.1"
    assert [record.phase for record in look(job, other)] == [JobPhase.RUNNING, JobPhase.ENDED]
    os.kill(int((folder / "rank.pid").read_text()), signal.SIGKILL)
    wait_until(lambda: look(job)[0].phase is JobPhase.ENDED)  # though its clock goes on


def test_a_job_is_ended_with_all_that_it_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardway.launch.schedulers.local.GRACE_S", 1)
    job = submit(write(folder / "job.sh", KEEPS_ON.format(folder)))
    wait_until(lambda: has_number(folder / "rank.pid") and has_number(folder / "clock.pid"))
    os.kill(int(job.split(".")[0]), signal.SIGKILL)
    (ended,) = LocalHost().run_many(ThisMachine().cancel([job]))
    assert (ended.ok, ended.err) == (True, "")
    assert look(job)[0].phase is JobPhase.ENDED
    assert not Path(f"/proc/{(folder / 'rank.pid').read_text().strip()}/fd/1").exists()
    assert all(done.ok for done in LocalHost().run_many(ThisMachine().cancel([job])))


def test_a_number_that_is_another_process_by_now_is_left_alone(folder: Path) -> None:
    other = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        assert LocalHost().run_many(ThisMachine().cancel([f"{other.pid}.1"]))[0].ok
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


WAITS = "# local base.0002.x\nafter=0001\n" + "while kill -0 ${1%.*} 2>/dev/null; do sleep 0.1; done\n"


def test_a_job_that_follows_another_waits(folder: Path) -> None:
    first = submit(write(folder / "first.sh", f"echo $$ > {folder}/first.pid; sleep 300\n"))
    second = submit(write(folder / "job.sh", WAITS), first)
    wait_until(lambda: look(second)[0].phase is JobPhase.QUEUED)  # it says who it is a moment before it is its script
    record = look(second)[0]
    assert (record.phase, record.reason) == (JobPhase.QUEUED, "attempt 0001")
    why = ThisMachine().explain_pending(record, RequestedResources())
    assert why is not None
    assert why.sentence == "It starts after attempt 0001."
    assert ThisMachine().parse_found(LocalHost().run_many(ThisMachine().find("base.0002.x"))) == (second,)
    assert ThisMachine().explain_pending(look(first)[0], RequestedResources()) is None
    assert all(done.ok for done in LocalHost().run_many(ThisMachine().cancel([second, first])))
    assert [record.phase for record in look(first, second)] == [JobPhase.ENDED, JobPhase.ENDED]


def test_a_job_that_a_job_submits_is_not_a_part_of_it(folder: Path) -> None:
    """Else a successor in a chain would wait for itself."""
    inner = write(folder / "inner.sh", "sleep 300\n")
    functions = "\n".join(block.text for block in read_blocks("local").values())
    outer = (
        f"{functions}\nexport SHARDWAY_JOB=$$.$(began $$)\nstart_job {inner} '' {folder}/inner.out > {folder}/inner\n"
    )
    first = submit(write(folder / "outer.sh", outer))
    wait_until(lambda: (folder / "inner").exists() and "." in (folder / "inner").read_text())
    second = (folder / "inner").read_text().strip()
    wait_until(lambda: look(first)[0].phase is JobPhase.ENDED)
    assert look(second)[0].phase is JobPhase.RUNNING
    assert LocalHost().run_many(ThisMachine().cancel([second]))[0].ok
