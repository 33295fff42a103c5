"""When an attempt began."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardway.ranks import heartbeat
from shardway.ranks.heartbeat import find_process_start, job_age_s, process_age_s
from shardway.rundir.attempts import Attempt, AttemptStart

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")


@needs_proc
def test_the_age_of_a_process_counts_from_its_start() -> None:
    """Not from when Python came to the import of this module."""
    code = "import time; time.sleep(0.3); from shardway.ranks import heartbeat as it; print(it.process_age_s())"
    launched = time.monotonic()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0.3 <= float(out) <= time.monotonic() - launched + 0.02  # the kernel counts in hundredths


def test_without_proc_it_begins_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heartbeat, "_STAT", tmp_path / "none")
    assert process_age_s() == 0.0
    before = time.monotonic()
    assert before <= find_process_start(None, {}) <= time.monotonic()


@pytest.mark.parametrize("text", ["", "1 (x) S 1", "1 (a) b) S " + "x " * 40])
def test_a_stat_of_another_form_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    monkeypatch.setattr(heartbeat, "_STAT", tmp_path / "stat")
    assert process_age_s() == 0.0


def test_a_job_is_as_old_as_this_host_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_uptime_s", lambda: 1000.0)
    now, host = time.time(), socket.gethostname()
    assert job_age_s(AttemptStart("1", host, started=now - 900)) == pytest.approx(900, abs=30)
    for odd in (
        AttemptStart("1", "another-host", started=now - 900),
        AttemptStart("1", host),
        AttemptStart("1", host, started=now + 60),
        AttemptStart("1", host, started=now - 1100),
    ):
        assert job_age_s(odd) == 0.0


def test_the_job_counts_where_it_is_older_than_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heartbeat, "_uptime_s", lambda: 1e9)
    attempt = Attempt(tmp_path / "attempts" / "0001")
    attempt.make()
    assert time.monotonic() - find_process_start(attempt, {}) == pytest.approx(process_age_s(), abs=1)
    attempt.write_started(AttemptStart("1", socket.gethostname(), started=time.time() - 1e6))
    assert time.monotonic() - find_process_start(attempt, {}) == pytest.approx(1e6, abs=30)
    attempt.write_started(AttemptStart("1", "another-host", started=time.time() - 1e6))
    assert time.monotonic() - find_process_start(attempt, {}) == pytest.approx(process_age_s(), abs=1)
