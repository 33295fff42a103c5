"""The process that samples, as it is started and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from shardway.telemetry import start
from shardway.telemetry.sampler import parse_options
from shardway.telemetry.start import VARIABLE, SampledRun, is_sampled, sampled
from shardway.telemetry.store import HostTelemetry, read_telemetry

pytestmark = pytest.mark.usefixtures("warm_starts")

FOLDER = Path(__file__).parent


def wait_for(what: Callable[[], object], within_s: float = 15.0) -> None:
    until = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


@contextmanager
def sampler(folder: Path, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A sampler, which is killed in the end."""
    words = [f"{name}={value}" for name, value in {"into": folder, "every_s": 0.1, **options}.items()]
    command = [sys.executable, "-m", "shardway.telemetry.sampler", *words]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def read_host(folder: Path) -> HostTelemetry:
    (host,) = read_telemetry(folder)
    return host


def count_samples(folder: Path) -> int:
    return sum(len(host.times) for host in read_telemetry(folder))


@pytest.mark.slow
def test_it_samples_until_a_file_is_there_and_no_signal_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvml.json"
    script.write_text(
        json.dumps({"devices": [{"uuid": "GPU-a", "denied": {"power_w": 4}, "values": {"use_percent": 42}}]})
    )
    monkeypatch.setenv("SHARDWAY_NVML", "fake_nvml")
    monkeypatch.setenv("SHARDWAY_FAKE_NVML", str(script))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    options = {"top": os.getpid(), "until": tmp_path / "end", "host": "näme/1", "job": "7", "node": 2}
    with sampler(tmp_path / "telemetry", **options) as process:
        wait_for(lambda: count_samples(tmp_path / "telemetry") >= 3)
        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
            process.send_signal(getattr(signal, name))
        wait_for(lambda: count_samples(tmp_path / "telemetry") >= 8)
        assert process.poll() is None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10
        (tmp_path / "end").touch()
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    host = read_host(tmp_path / "telemetry")
    assert (host.host, host.info.job, host.info.node) == ("näme/1", "7", 2)
    assert len(host.times) >= 8
    assert np.all(host.series["gpu/0/use_percent"][:-1] == 42)
    assert np.isnan(host.series["gpu/0/use_percent"][-1]), "the last sample is of the host, since a driver may hang"
    assert host.info.missing["gpu/0/power_w"] == "the driver lets administrators alone read it"


@pytest.mark.slow
def test_it_ends_with_the_process_that_it_samples(tmp_path: Path) -> None:
    program = subprocess.Popen(["sleep", "60"])
    with sampler(tmp_path, top=program.pid) as process:
        wait_for(lambda: read_telemetry(tmp_path))
        program.kill()
        program.wait()
        assert process.wait(5) == 0
        assert len(read_host(tmp_path).times) > 1


@pytest.mark.slow
def test_a_sampler_that_is_killed_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    with sampler(tmp_path, top=os.getpid()) as process:
        wait_for(lambda: read_telemetry(tmp_path))
        process.kill()
        process.wait()
        assert len(read_host(tmp_path).times) > 1


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    with sampler(tmp_path / "gone/telemetry", top=os.getpid(), until=tmp_path / "end") as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert b"cannot be written" in said
        assert b"gone/telemetry" in said
        (tmp_path / "end").touch()
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert process.stderr.read() == b""


@pytest.mark.slow
def test_nothing_is_written_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "START_AFTER_S", 0.0)
    run, environ = tmp_path / "run", dict(os.environ)
    run.mkdir()
    told = SampledRun(run / "telemetry", 0.1, os.getpid(), events=run / "events")
    with sampled(told, environ):
        assert environ[VARIABLE] == str(run / "telemetry")
        time.sleep(1.0)
    assert list(run.iterdir()) == []
    assert VARIABLE not in environ
    with sampled(told, environ):
        (run / "events").write_text("started\n")
        wait_for(lambda: read_telemetry(run / "telemetry"))
    assert read_host(run / "telemetry").info.every_s == 0.1


AGENT = """
import os, sys, time
from pathlib import Path
from shardway.telemetry import start

start.START_AFTER_S = 0.0
with start.sampled(start.SampledRun(Path(sys.argv[1]), 0.1, os.getpid())):
    time.sleep(60)
"""


@pytest.mark.slow
def test_an_agent_that_is_killed_takes_its_sampler_along(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)])
    wait_for(lambda: read_telemetry(tmp_path))
    children = psutil.Process(agent.pid).children()
    (sampling,) = [child for child in children if "shardway.telemetry.sampler" in child.cmdline()]
    agent.kill()
    agent.wait()
    wait_for(lambda: has_ended(sampling))
    assert read_telemetry(tmp_path)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_short_run_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **options: pytest.fail("a process was started"))
    with sampled(SampledRun(tmp_path, 1.0, os.getpid()), {}):
        time.sleep(0.01)


def test_a_run_that_is_sampled_already_is_not_sampled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "START_AFTER_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **options: pytest.fail("a process was started"))
    (tmp_path / "link").symlink_to(tmp_path)
    environ = {VARIABLE: str(tmp_path / "telemetry")}
    with sampled(SampledRun(tmp_path / "link/telemetry", 1.0, os.getpid()), environ):
        time.sleep(0.05)
    assert environ == {VARIABLE: str(tmp_path / "telemetry")}
    assert not is_sampled(tmp_path / "other", environ)


def test_words_of_the_command_come_back() -> None:
    told = SampledRun(Path("/runs/a b=c/telemetry"), 0.25, 77, node=3, job="12", attempt=2, marker="A=b=c",
                      heartbeats=Path("/dev/shm/a:b"), first=4, ranks=2)  # fmt: skip
    options = parse_options(told.words()[3:])
    assert (options.into, options.every_s, options.top) == ("/runs/a b=c/telemetry", 0.25, 77)
    assert (options.node, options.job, options.attempt, options.marker, options.pipe) == (3, "12", 2, "A=b=c", True)
    assert options.ranks == ("/dev/shm/a:b", 4, 2)
    assert parse_options(SampledRun(Path("/t"), 1.0, 7).words()[3:]).ranks == ("", 0, 0)


@pytest.mark.slow
def test_an_agent_has_its_node_sampled_while_its_ranks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardway.ranks.local import LocalLaunch, WarmStandby
    from shardway.ranks.supervisor import run_on_node
    from shardway.rundir.directory import RunDir

    monkeypatch.setattr(start, "START_AFTER_S", 0.0)
    monkeypatch.setenv("SHARDWAY_JOB", "12")
    run = RunDir(tmp_path / "run")
    run.create()
    program = f"open({str(run.events_path(0))!r}, 'a').write('began'); import time; time.sleep(2.0)"
    launch = LocalLaunch(
        2, "timeit", ["-n1", "-r1", program], run.log_folder, 1, run.stop_path, stop_timeout_s=60, telemetry_s=0.05
    )
    with WarmStandby(None) as standby:
        assert run_on_node(run, launch, None, standby, lambda line: None).is_well
    host = read_host(run.telemetry_folder)
    assert (host.info.job, host.info.every_s) == ("12", 0.05)
    assert len(host.times) >= 10
    assert np.nanmax(host.series["cpu/threads"]) >= 3, "the agent and two ranks"
    assert VARIABLE not in os.environ
