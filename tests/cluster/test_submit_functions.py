from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from submitting import Person

PROGRAM = '''\
import json
import os
import time

import shardway

KEYS = {"run.telemetry": "off", "site.memory": "300MiB"}


class OwnError(Exception):
    """An exception of the person's own program."""


def act(kind, value):
    if kind == "raise":
        raise OwnError(f"{kind} {value}")
    if kind == "late":
        time.sleep(600)
    if kind == "memory":
        held = [b"x" * (1 << 20) for _ in range(2000)]
        return len(held)
    if kind == "odd":
        return (each for each in range(3))
    return {"kind": kind, "value": value, "host": os.uname().nodename, "job": os.environ["SLURM_JOB_ID"]}


def place():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.uname().nodename


def square(x):
    now = time.time()
    time.sleep(1.5)
    return x * x, now, time.time()


def describe(job):
    try:
        return {"value": job.result(150), "state": job.state, "logs": job.logs()[-500:]}
    except Exception as error:
        own = isinstance(error, OwnError)
        cause = str(error.__cause__ or "")
        return {"error": type(error).__name__, "own": own, "text": str(error), "cause": cause, "state": job.state}


options = dict(site="generic-slurm", keys=KEYS)
with shardway.Executor(walltime="5m", **options) as executor:
    jobs = {kind: executor.submit(act, kind, 3) for kind in ("value", "raise", "odd", "memory")}
    by_srun = {**KEYS, "site.launcher": "srun"}
    jobs["limit"] = shardway.submit(act, "late", 1, walltime="1m", **options)  # the least that Slurm knows
    jobs["ranks"] = shardway.submit(place, nodes=2, walltime="5m", site="generic-slurm", keys=by_srun)
    cancelled = executor.submit(act, "late", 2)
    mapped = executor.map_array(square, range(5), max_parallel=2)
    while cancelled.state in ("queued", "unknown"):
        time.sleep(0.3)
    before = cancelled.state
    cancelled.cancel()
    found = {name: describe(job) for name, job in jobs.items()}
    found["ranks"]["all"] = jobs["ranks"].results()
    found["cancelled"] = {"before": before, **describe(cancelled)}
    found["map"] = [job.result(100) for job in mapped]
    found["ids"] = [job.job_id for job in mapped]
print("FOUND " + json.dumps(found))
'''
"""What a person writes at the login node; the file is the `__main__` of the submission."""


@dataclass(frozen=True)
class FoundJobs:
    """What the program printed of its jobs."""

    facts: dict[str, Any]


@pytest.fixture(scope="module")
def found(busy_alice: Person) -> FoundJobs:
    """All kinds of calls, submitted beside each other."""
    busy_alice.write("functions.py", PROGRAM)
    python = Path(sys.executable)
    done = busy_alice.cluster.run(python, "functions.py", folder=busy_alice.folder, timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return FoundJobs(json.loads(line.removeprefix("FOUND ")))


def test_a_value_comes_back_from_a_node(found: FoundJobs) -> None:
    value = found.facts["value"]["value"]
    assert (value["kind"], value["value"], found.facts["value"]["state"]) == ("value", 3, "finished")
    assert value["host"] != "login"
    assert value["job"].isdecimal()


def test_an_exception_of_a_script_comes_back(found: FoundJobs) -> None:
    raised = found.facts["raise"]
    assert (raised["error"], raised["own"], raised["text"], raised["state"]) == ("OwnError", True, "raise 3", "crashed")
    assert "in act\n" in raised["cause"]


def test_a_value_that_cannot_be_pickled_is_a_sentence(found: FoundJobs) -> None:
    assert found.facts["odd"]["error"] == "JobError", found.facts["odd"]
    assert "cannot be pickled" in found.facts["odd"]["text"]


def test_two_nodes_give_a_value_each(found: FoundJobs) -> None:
    ranks = found.facts["ranks"]["all"]
    assert [(rank, world) for rank, world, _ in ranks] == [(0, 2), (1, 2)]
    assert len({host for _, _, host in ranks}) == 2


def test_a_job_that_is_cancelled_is_stopped(found: FoundJobs) -> None:
    cancelled = found.facts["cancelled"]
    assert (cancelled["before"], cancelled["error"], cancelled["state"]) == ("running", "JobError", "stopped")
    assert cancelled["text"].startswith("act returned nothing: job ")


def test_a_function_that_takes_longer_than_its_wall_time_is_ended(found: FoundJobs) -> None:
    limit = found.facts["limit"]
    assert (limit["error"], limit["state"]) == ("JobError", "deadline")
    assert "wall-time" in limit["text"]


def test_memory_that_was_not_enough_is_explained(found: FoundJobs, busy_alice: Person) -> None:
    if 'CGROUPS="1"' not in (busy_alice.cluster.root / "conf" / "settings").read_text():
        pytest.skip("this machine has no control groups of version 1")
    memory = found.facts["memory"]
    assert (memory["error"], memory["state"]) == ("JobError", "out_of_memory")
    assert "300MiB" in memory["text"]
    assert "site.memory" in memory["text"]


def test_a_map_is_one_array_with_two_at_a_time(found: FoundJobs) -> None:
    assert [value for value, _, _ in found.facts["map"]] == [0, 1, 4, 9, 16]
    assert len({job.partition("_")[0] for job in found.facts["ids"]}) == 1
    moments = [(start, 1) for _, start, _ in found.facts["map"]] + [(end, -1) for _, _, end in found.facts["map"]]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    assert most <= 2
