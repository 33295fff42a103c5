from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_cluster import Cluster, wait_for
from submitting import RUN_FILE, START_S, Person, Submitted

COMMAND = ("--on", "generic-slurm", "--walltime", "5m")
ODD_NAME = "my 'first' run, at 50%"
PLAIN_NAME = "my-first-run-at-50"
"""The same as schedulers take it."""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["site.account=nosuch"], ['"nosuch"', "account"]),
        (["site.account=staff"], ['"staff"', "account"]),
        (["site.queue=nosuch"], ['"nosuch"', "sinfo"]),
        (["site.memory=1TiB"], ["memory", "site.memory"]),
        (["site.options={qos = 'short'}", "--walltime", "10m"], ["wall-time", "QOS"]),
    ],
    ids=["no account", "another's account", "no partition", "memory", "limit of the QOS"],
)
def test_a_refusal_is_explained_and_leaves_nothing(alice: Person, words: list[str], told: list[str]) -> None:
    said = alice.refused("submit", "tiny.toml", *words)
    assert all(word in said for word in told), said
    assert "Nothing was submitted. To do:" in said
    assert not (alice.folder / "runs" / "tiny").exists()


@pytest.mark.parametrize(
    ("words", "reason", "told"),
    [
        (["--walltime", "5h"], "PartitionTimeLimit", ["never starts", "5 hours|5h"]),
        (["site.queue=closed"], "PartitionDown", ["closed"]),
        (["site.options={qos = 'waits'}", "--walltime", "10m"], "QOSMaxWallDurationPerJobLimit", ["never starts"]),
        (["--nodes", "3", "site.options={exclusive = true}"], "Resources", ["nodes"]),
    ],
    ids=["wall-time over the limit", "closed partition", "limit of the QOS", "busy nodes"],
)
def test_status_says_why_a_job_waits(alice: Person, words: list[str], reason: str, told: list[str]) -> None:
    if reason == "Resources":
        alice.cluster.wait_until(alice.cluster.submit("#!/bin/bash\nsleep 100\n", "-w", "n1"), "RUNNING")
    run = alice.train("waits", *words)
    wait_for(f"the reason {reason}", lambda: alice.cluster.describe(run.job())["Reason"] == reason, 60)
    (job,) = alice.facts("status", run.path)["jobs"]
    assert (job["state"], job["scheduler_reason"]) == ("queued", reason)
    assert all(re.search(word, job["explanation"]) for word in told), job["explanation"]
    assert "((" not in job["explanation"] + job["remedy"]
    shown = alice.told("status", run.path)
    assert job["explanation"] in shown
    assert f"to do: {job['remedy']}" in shown
    alice.told("stop", run.path)
    assert run.queued() == []


def test_a_scheduler_that_is_down_loses_and_doubles_nothing(cluster: Cluster, alice: Person) -> None:
    """A submission waits for it and goes through; meanwhile a status says that it does not know."""
    begun = alice.folder / "other.begun"
    other = alice.submit(
        *COMMAND, "run.name=other", "site.launcher=srun", "--", "sh", "-c", f"touch {begun}; exec sleep 300"
    )
    # A job of which Slurm has not yet started the step would fail without its scheduler.
    wait_for("the command of the other job", begun.exists, START_S)
    cluster.stop_scheduler()
    (job,) = alice.facts("status", other.path)["jobs"]
    assert (job["state"], job["scheduler_state"]) == ("unknown", "")
    assert job["silence"]
    assert "the scheduler did not answer" in alice.told("status", other.path)
    path = alice.folder / "runs" / ODD_NAME
    with ThreadPoolExecutor() as pool:
        patient = pool.submit(alice.train, ODD_NAME, "site.nodes=1", "train.steps=5 steps")
        wait_for(
            "the first try", lambda: Submitted(cluster, path).directory.attempt(1).read_submission() is not None, 60
        )
        time.sleep(4)  # sbatch gives up after three seconds
        cluster.start_scheduler()
        run = patient.result()
    submission = run.directory.attempt(1).read_submission()
    assert submission is not None
    named = ("squeue", "--me", "-h", "-t", "all", "-n", f"{PLAIN_NAME}.0001.{submission.token}", "-o", "%A")
    assert cluster.output(*named).split() == [run.job()]
    assert alice.facts("status", other.path)["jobs"][0]["state"] == "running"
    said = alice.refused("submit", "tiny.toml", f"run.name={ODD_NAME}", "site.nodes=1")
    assert f"as job {run.job()}" in said
    assert run.ended().state == "finished"
    assert "step 5/5" in run.printed()


def test_what_a_careless_person_does_is_told(alice: Person) -> None:
    """Before the queue, all at once, and without a trace in the folder of runs."""
    alice.write("bad.py", "def f(:\n")
    site = RUN_FILE.partition("[site]")[2]
    alice.write("text.toml", f'format = 1\n[data]\nkind = "text"\npath = "/nowhere/at/all"\n[site]{site}')
    for words, told in (
        (("missing.toml",), "missing.toml"),
        (("text.toml",), "data.path"),
        (("tiny.toml", 'site.venv="/nowhere/venv"'), "site.venv"),
        (("tiny.toml", "run.root=/tmp/runs"), "run.root"),
        (("tiny.toml", "site.options={partition='debug'}"), "site.queue"),
        (("tiny.toml", "site.environment={API_TOKEN='x'}"), "secrets.env"),
        (("tiny.toml", "site.container=apptainer", "site.image=/nowhere.sif"), "site.image"),
        ((*COMMAND, "--", "python", "bad.py"), "bad.py, line 1"),
        ((*COMMAND, "--", "torchrun", "bad.py"), "torchrun"),
    ):
        assert told in alice.refused("submit", *words)
    assert not (alice.folder / "runs").exists()
