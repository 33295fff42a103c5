from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_cases import Cluster, make_job

from shardway.errors import UserError
from shardway.launch.hosts.local import LocalHost
from shardway.launch.job import Job
from shardway.launch.runs.job_status import LedgerEntry, read_ledger
from shardway.launch.submission import submit
from shardway.launch.submission.submit import (
    UNDER_WAY_S,
    Submitter,
    parse_claim,
    render_claim,
)
from shardway.rundir.attempts import Submission
from shardway.rundir.lease import Identity, is_alive, own_identity

WORDS = st.text(st.characters(whitelist_categories=("L", "N")), min_size=1, max_size=8)


@settings(max_examples=10)
@given(host=WORDS, process=st.integers(1, 2**22), rest=st.lists(st.just("") | WORDS, min_size=3, max_size=3))
def test_a_claim_survives(host: str, process: int, rest: list[str]) -> None:
    claim = Identity(host, rest[0], rest[1], process, rest[2])
    assert parse_claim(render_claim(claim)) == claim


@pytest.mark.parametrize("text", ["", "laptop", "laptop x 1 2 3", "laptop 1 2 3 4 5"])
def test_what_is_no_claim(text: str) -> None:
    assert parse_claim(text) is None


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that lives until a test ends it."""
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def claim_of(process: int) -> Identity:
    """The claim that a process of this machine would make."""
    start = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[19]
    return replace(own_identity(), pid=process, started=start)


def test_a_process_of_this_machine_is_seen_to_live_and_to_die(process: subprocess.Popen[bytes]) -> None:
    claim = claim_of(process.pid)
    assert is_alive(claim) is True
    assert is_alive(replace(claim, started="1")) is False, "another process has its number"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(claim) is False, "a zombie"
    process.wait()
    assert is_alive(claim) is False


@pytest.mark.parametrize(
    "elsewhere", [{"host": "laptop"}, {"boot": "0-0"}, {"namespace": "pid:[1]"}, {"boot": ""}, {"started": ""}]
)
def test_nothing_is_known_of_a_process_elsewhere(elsewhere: dict[str, str]) -> None:
    assert is_alive(replace(own_identity(), **elsewhere)) is None


def test_a_process_that_the_system_hides_is_not_taken_for_dead(tmp_path: Path) -> None:
    """With hidepid the processes of others are not in /proc; the kernel still says that they are there."""
    proc = tmp_path / "proc"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("b\n")
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to("pid:[1]")
    claim = replace(own_identity(proc), pid=os.getppid(), started="5")
    assert is_alive(claim, proc) is None


# --- what the same command does later


class Scene:
    """An attempt that was prepared, and whoever comes to it later."""

    def __init__(self, cluster: Cluster) -> None:
        self.job: Job = make_job("slurm", run=cluster.path / "run")
        self.pauses: list[float] = []
        self.submitter = Submitter(LocalHost(), pause=self.pauses.append)

    def prepare(self, claim: Identity | None, ago_s: float) -> LedgerEntry:
        """As a submitter leaves it that was killed before it had an answer."""
        self.job.folder.make()
        submitted = time.time() - ago_s
        text = render_claim(claim) if claim else ""
        self.job.folder.write_submission(Submission("slurm", self.job.token, submitted=submitted, claim=text))
        last = read_ledger(LocalHost(), self.job.run).last
        assert last is not None
        return last


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    cluster = Cluster.make(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{cluster.path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("FAKES", str(cluster.path))
    return Scene(cluster)


IN_FLIGHT_S = 100.0
"""Longer than ever, so that a slow machine does not let it pass."""


@pytest.mark.parametrize(("ago_s", "pauses"), [(1.0, 1), (IN_FLIGHT_S + 1, 0)])
def test_one_that_died_here_is_cleared_away_at_once(
    scene: Scene, ago_s: float, pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had handed over at the last moment is given the time to appear in the queue."""
    monkeypatch.setattr(submit, "IN_FLIGHT_S", IN_FLIGHT_S)
    last = scene.prepare(replace(own_identity(), started="1"), ago_s)
    assert scene.submitter.recover(scene.job, last) is None
    assert not scene.job.folder.path.exists()
    assert len(scene.pauses) == pauses
    assert all(0 < pause <= IN_FLIGHT_S for pause in scene.pauses)


def test_one_that_lives_here_is_left_alone_however_long_it_takes(
    scene: Scene, process: subprocess.Popen[bytes]
) -> None:
    last = scene.prepare(claim_of(process.pid), 10 * UNDER_WAY_S)
    with pytest.raises(UserError, match=rf"by process {process.pid} on .*\n.*wait for it; or end that process"):
        scene.submitter.recover(scene.job, last)
    assert scene.job.folder.path.exists()


def test_one_that_has_ended_well_since_it_was_looked_at_is_let_be(scene: Scene) -> None:
    """Its submitter is gone, and so may the job be that it submitted."""
    last = scene.prepare(replace(own_identity(), started="1"), 1.0)
    assert last.submission is not None
    scene.job.folder.write_submission(replace(last.submission, job="17"))
    with pytest.raises(UserError, match=r"was submitted just now by another command, as job 17\."):
        scene.submitter.recover(scene.job, last)
    assert scene.job.folder.path.exists()


@pytest.mark.parametrize(
    ("claim", "words"),
    [(Identity("laptop", pid=4711), "process 4711 on laptop; whether"), (None, "another command")],
)
def test_of_one_elsewhere_the_age_decides(scene: Scene, claim: Identity | None, words: str) -> None:
    """How long that still lasts is told."""
    began = time.time()
    last = scene.prepare(claim, 50)
    with pytest.raises(UserError, match=rf"by {words}") as caught:
        scene.submitter.recover(scene.job, last)
    told = re.search(r"submit again in (\d+) seconds", str(caught.value))
    assert told is not None
    assert 70 - (time.time() - began) <= int(told[1]) <= 70
    assert last.submission is not None
    old = replace(last, submission=replace(last.submission, submitted=time.time() - UNDER_WAY_S - 1))
    assert scene.submitter.recover(scene.job, old) is None


DIES = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from job_cases import make_job
from shardway.launch.hosts.local import LocalHost
from shardway.launch.submission.submit import Submitter
die = lambda attempt: os.kill(os.getpid(), signal.SIGKILL)
Submitter(LocalHost()).submit(make_job("slurm", run=Path(sys.argv[2])), {}, fill=die)
"""


def test_a_submitter_that_is_killed_in_the_middle_is_followed_at_once(scene: Scene) -> None:
    words = [sys.executable, "-c", DIES, str(Path(__file__).parent), str(scene.job.run)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    last = read_ledger(LocalHost(), scene.job.run).last
    assert last is not None
    assert last.is_unsent
    assert scene.submitter.recover(scene.job, last) is None
    assert scene.submitter.submit(scene.job, {}).job == "101"
