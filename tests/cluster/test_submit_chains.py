from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest
from real_cluster import wait_for
from submitting import Person, Submitted, disturbed

CHAIN = ("--until-done", "train.steps=200 steps")
"""A minute and more with pauses, seconds without."""

ONE = ("site.nodes=1", "--until-done")


@dataclass(frozen=True)
class Begun:
    """Runs that are submitted before the first test, so that they start beside each other."""

    short: Submitted
    whole: Submitted
    stop: Submitted
    scancel: Submitted
    scancel_next: Submitted
    error: Submitted
    memory: Submitted


@pytest.fixture(scope="module")
def begun(busy_alice: Person) -> Begun:
    """The slow ones go on until a test lets them hurry."""
    alice = busy_alice
    return Begun(
        short=alice.train_slowly("short", 0.4, *CHAIN, "--walltime", "1m"),
        error=alice.train("error", *ONE, disturbed(FAULT="error:0:7")),
        memory=alice.train("memory", *ONE, "site.memory=700MiB", disturbed(FAULT="memory:0:7")),
        stop=alice.train_slowly("stop", 1.0, *CHAIN),
        scancel=alice.train_slowly("scancel", 1.0, "site.nodes=1", *CHAIN),
        scancel_next=alice.train_slowly("scancel-next", 1.0, "site.nodes=1", *CHAIN),
        whole=alice.train("whole", "train.steps=200 steps"),
    )


def states(alice: Person, run: Submitted) -> list[str]:
    return [job["state"] for job in alice.facts("status", run.path)["jobs"]]


def is_out_of_the_queue(run: Submitted) -> None:
    """A job that has said how it ended takes a moment to leave."""
    wait_for(f"the end of all jobs of {run.path.name}", lambda: run.queued() == [], timeout_s=60)


def test_scancel_of_a_chain_stops_it(busy_alice: Person, begun: Begun) -> None:
    """By hand, of the running attempt; what SIGTERM interrupts is saved."""
    run = begun.scancel
    run.until_step(2)
    busy_alice.cluster.output("scancel", run.job(1))
    result = run.ended(1)
    assert (result.state, result.failure) == ("stopped", "signal")
    assert run.directory.checkpoint_steps()[-1] == result.step
    assert run.ended(2).state == "not_needed"
    assert states(busy_alice, run) == ["stopped", "not_needed"]
    is_out_of_the_queue(run)


def test_scancel_of_what_waits_lets_the_running_attempt_be(busy_alice: Person, begun: Begun) -> None:
    run = begun.scancel_next
    run.until_step(2)
    busy_alice.cluster.output("scancel", run.job(2))
    assert states(busy_alice, run) == ["running", "stopped"]
    run.hurry()
    assert run.ended(1).state == "finished"
    is_out_of_the_queue(run)


def test_stop_and_resume_change_no_loss(busy_alice: Person, begun: Begun) -> None:
    """Gracefully, then at once with --now, and resumed after both."""
    run, alice = begun.stop, busy_alice
    run.until_step(6)
    alice.told("stop", run.path, "--wait", "60")
    result = run.ended(1)
    assert (result.state, result.by) == ("stopped", "rank 0")
    assert run.directory.checkpoint_steps()[-1] == result.step >= 6
    is_out_of_the_queue(run)

    alice.told("resume", run.path)
    run.until_step(result.step + 3, attempt=3)
    assert "may lose what was trained since" in alice.refused("stop", run.path, "--now")
    assert len(run.queued()) == 2, "nobody agreed"
    alice.told("stop", run.path, "--now", "--yes", "--wait", "60")
    is_out_of_the_queue(run)
    assert states(alice, run)[2:] == ["stopped", "stopped"]

    run.hurry()
    alice.told("resume", run.path, "--once")
    assert run.ended(5).state == "finished"
    assert begun.whole.ended().state == "finished"
    assert run.attempts_begun() == 3
    assert run.losses() == begun.whole.losses()


def test_what_fails_twice_at_one_step_stops_the_chain(busy_alice: Person, begun: Begun) -> None:
    run = begun.error
    for attempt in (1, 2):
        result = run.ended(attempt)
        assert (result.state, result.step, result.by) == ("crashed", 6, "rank 0")
    assert run.ended(3).state == "not_needed"
    assert run.job(4) == ""
    told = busy_alice.told("status", run.path)
    assert "RuntimeError: injected by the test" in told
    assert "attempts 0001 and 0002 ended alike (crashed at step 6)" in told


def test_memory_that_was_not_enough_is_told_and_stops_the_chain(busy_alice: Person, begun: Begun) -> None:
    if 'CGROUPS="1"' not in (busy_alice.cluster.root / "conf" / "settings").read_text():
        pytest.skip("this machine has no control groups of version 1")
    run = begun.memory
    assert run.ended(3).state == "not_needed"
    is_out_of_the_queue(run)
    busy_alice.cluster.accounted(run.job(2))
    first, second, third = busy_alice.facts("status", run.path)["jobs"]
    assert [first["state"], second["state"], third["state"]] == ["out_of_memory", "out_of_memory", "not_needed"]
    assert "700MiB" in first["explanation"]
    assert "site.memory" in first["remedy"]


def test_a_wall_time_that_is_too_short_changes_no_loss(busy_alice: Person, begun: Begun) -> None:
    """Several attempts, each stopped in time; the losses are those of one long job to the bit."""
    short, whole = begun.short, begun.whole
    assert whole.ended().state == "finished"
    wait_for("a second attempt", lambda: short.directory.attempt(2).read_started() is not None, timeout_s=120)
    short.hurry()
    wait_for("the end of the chain", lambda: "finished" in short.states(), timeout_s=300)
    last = short.states().index("finished") + 1
    assert last >= 2
    assert set(short.states()[: last - 1]) == {"deadline"}
    assert len(short.losses()) == 200
    assert short.losses() == whole.losses()
    is_out_of_the_queue(short)
    facts = busy_alice.facts("status", short.path)
    assert (facts["state"], facts["step"], facts["attempts"]) == ("finished", 200, last)
    assert set(states(busy_alice, short)[last:]) <= {"not_needed"}
    assert all(job["step"] for job in facts["jobs"][:last]), json.dumps(facts["jobs"])


def test_a_chain_goes_on_after_a_crash_of_a_node_and_after_preemption(busy_alice: Person, begun: Begun) -> None:
    """The node is lost while the other run is preempted: it saves in the time of grace, and waits for its turn."""
    alice, cluster = busy_alice, busy_alice.cluster
    run = alice.train_slowly("node", 0.5, *CHAIN, "run.collective_timeout=10s")
    spared = 'site.options={nodelist = "n3"}'
    gives = alice.train_slowly("gives", 0.5, "site.nodes=1", *CHAIN, "site.queue=preempt", spared)
    run.until_step(6)
    started = run.directory.attempt(1).read_started()
    assert started is not None
    assert started.nodes == "n1 n2"
    crashed = time.monotonic()
    cluster.crash("n2")
    gives.until_step(2)
    urgent = cluster.submit("#!/bin/bash\nsleep 1\n", "-w", "n3", "--exclusive")
    saved = gives.ended(1).step
    assert cluster.wait_until(urgent) == "COMPLETED"
    gives.hurry()

    lost = run.ended(1, timeout_s=90)
    assert lost.state in ("crashed", "node_failure"), run.printed()
    assert time.monotonic() - crashed < 90, "the ranks that are left do not wait for ever"
    run.hurry()
    assert run.ended(2).state == "finished", run.printed(2)
    again = run.directory.attempt(2).read_started()
    assert again is not None
    assert again.nodes == "n1 n3"
    assert max(run.losses()) == 200

    assert gives.ended(2).state == "finished", gives.printed(2)
    assert states(alice, gives)[:2] == ["preempted", "finished"]
    restart = [event for event in gives.directory.events(0) if event["event"] == "started"][1]
    assert restart["step"] == saved
    is_out_of_the_queue(run)
    is_out_of_the_queue(gives)
    cluster.boot("n2")


def test_what_follows_is_submitted_by_the_job_that_finishes(busy_alice: Person) -> None:
    """By sbatch in a job of a chain; the second one follows the first."""
    alice = busy_alice
    run = alice.train("followed", *ONE, "train.steps=5 steps", "--then", "report", "--then", "checkpoint verify")
    assert run.ended(1, 300).state == "finished"
    for name in ("followed-report", "followed-checkpoint-verify"):
        path = run.path.with_name(name)
        wait_for(f"the end of {name}", lambda path=path: "finished" in alice.told("status", path), timeout_s=300)
    assert [each["state"] for each in alice.facts("status", run.path)["followers"]] == ["finished"]
