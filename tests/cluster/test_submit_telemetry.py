"""What the hardware of a foreign command does is recorded on a real Slurm, and judged from the job id alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from submitting import Person, Submitted

from shardway.telemetry.store import read_telemetry

FAKE = Path(__file__).parents[1] / "telemetry"
SCRIPT = """\
import socket, time

began = time.monotonic()
while time.monotonic() < began + 25:
    until = time.process_time() + 0.1
    while time.process_time() < until:
        sum(range(1000))
    time.sleep(0.1)
with open(f"FOLDER/share-{socket.gethostname()}", "w") as file:
    file.write(str(time.process_time() / (time.monotonic() - began)))
"""
"""Computes for at most half of the time, and writes the share of a core that it came to."""
BUSY = {"use_percent": 96, "power_w": 620, "memory_bytes": 6e10, "sm_percent": 70, "tensor_percent": 35}
IDLE = {"use_percent": 0, "power_w": 75, "memory_bytes": 4e8, "sm_percent": 0, "tensor_percent": 0}


@pytest.fixture(scope="module")
def sampled(busy_alice: Person) -> Submitted:
    """A script that uses one of two pretended GPUs on each of two nodes."""
    busy_alice.write("busy.py", SCRIPT.replace("FOLDER", str(busy_alice.folder)))
    devices = [{"uuid": f"GPU-{number}", "values": values} for number, values in enumerate((BUSY, IDLE))]
    busy_alice.write("nvml.json", json.dumps({"devices": devices}))
    fake = f'SHARDWAY_NVML = "fake_nvml", SHARDWAY_FAKE_NVML = "{busy_alice.folder}/nvml.json", PYTHONPATH = "{FAKE}"'
    words = ("--on", "generic-slurm", "--nodes", "2", "--walltime", "5m", f"site.environment={{{fake}}}")
    run = busy_alice.submit(*words, "run.name=busy", "site.launcher=srun", "--", "python", "busy.py")
    assert run.ended().state == "finished", run.printed()
    return run


def test_every_node_of_a_command_is_sampled(sampled: Submitted) -> None:
    hosts = read_telemetry(sampled.directory.telemetry_folder)
    log = sampled.directory.attempt(1).log_folder / "telemetry.out"
    assert len(hosts) == 2, sampled.printed() + log.read_text()
    assert [host.info.node for host in sorted(hosts, key=lambda host: host.info.node)] == [0, 1]
    for host in hosts:
        assert host.info.job == sampled.job()
        assert len(host.times) >= 10
        assert [device.uuid for device in host.info.devices] == ["GPU-0", "GPU-1"]
        busy, idle = host.series["gpu/0/use_percent"], host.series["gpu/1/use_percent"]
        assert np.isfinite(busy[:-1]).all()  # the last sample, at the end, has none
        assert np.isfinite(idle[:-1]).all()
        assert np.nanmean(busy) == pytest.approx(96, abs=1)
        assert np.nanmax(idle) == 0
        share = float((sampled.path.parents[1] / f"share-{host.host}").read_text())
        # Of this process and of the shell and srun around it, read with each fifth sample.
        cores = host.series["cpu/job_cores"][3:]
        cores = np.trim_zeros(cores[np.isfinite(cores)], "b")  # it may be sampled once more when it has ended
        assert 0.6 * share < cores.mean() < 1.4 * share + 0.2


def test_the_idle_gpus_are_named_from_the_job_id_alone(sampled: Submitted, busy_alice: Person) -> None:
    told = busy_alice.facts("report", sampled.job())
    verdicts = {(gpu["host"], gpu["index"]): gpu["verdict"] for gpu in told["gpus"]}
    assert sorted(verdicts.values()) == ["idle", "idle", "used", "used"]
    assert all(verdict == ("used" if index == 0 else "idle") for (_, index), verdict in verdicts.items())
