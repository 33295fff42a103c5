from __future__ import annotations

import json
import time

import pytest
from real_cluster import wait_for
from submitting import Person, Submitted, disturbed

PAUSED = ("train.steps=60 steps", disturbed(PAUSE_S=0.25))
"""Time to do something to a run while it trains."""

SHORT = ("train.steps=120 steps", "--until-done", "--walltime", "1m", disturbed(PAUSE_S=0.6))
"""Over a minute of steps: several attempts on any machine."""


@pytest.fixture(scope="module")
def short(busy_alice: Person) -> Submitted:
    """A chain whose wall-time is too short; it goes on while other tests run."""
    return busy_alice.train("short", *SHORT, "site.queue=debug", "site.nodes=1", "site.ranks_per_node=2")


@pytest.fixture(scope="module")
def long(busy_alice: Person, short: Submitted) -> Submitted:
    """The same training in one job, without pauses."""
    return busy_alice.train("long", "train.steps=120 steps", "site.nodes=1", "site.ranks_per_node=2")


@pytest.fixture(scope="module")
def broken(busy_alice: Person, short: Submitted) -> dict[str, Submitted]:
    """Chains of a program that fails at a step: by an error, and by memory."""
    one = ("site.nodes=1", "--until-done")
    return {
        "error": busy_alice.train("error", *one, disturbed(FAULT="error:0:7")),
        "memory": busy_alice.train("memory", *one, "site.memory=700MiB", disturbed(FAULT="memory:0:7")),
    }


def test_what_fails_twice_at_one_step_stops_the_chain(busy_alice: Person, broken: dict[str, Submitted]) -> None:
    run = broken["error"]
    for attempt in (1, 2):
        result = run.ended(attempt)
        assert (result.state, result.step, result.by) == ("crashed", 6, "rank 0")
    assert run.ended(3).state == "not_needed"
    assert run.job(4) == ""
    told = busy_alice.told("status", run.path)
    assert "RuntimeError: injected by the test" in told
    assert "attempts 0001 and 0002 ended alike (crashed at step 6)" in told


def test_memory_that_was_not_enough_is_told(busy_alice: Person, broken: dict[str, Submitted]) -> None:
    run = broken["memory"]
    if 'CGROUPS="1"' not in (busy_alice.cluster.root / "conf" / "settings").read_text():
        pytest.skip("this machine has no control groups of version 1")
    run.ended(1)
    busy_alice.cluster.accounted(run.job(1))
    first, *_ = busy_alice.facts("status", run.path)["jobs"]
    assert first["state"] == "out_of_memory"
    assert "700 MiB" in first["explanation"]
    assert "site.memory" in first["remedy"]


def test_stop_and_resume_change_no_loss(busy_alice: Person) -> None:
    """Gracefully, then at once with --now, and resumed after both; the losses are those of a run that was let alone."""
    run = busy_alice.train("stop", "--until-done", *PAUSED)
    run.until_step(6)
    busy_alice.told("stop", run.path, "--wait", "60")
    result = run.ended(1)
    assert (result.state, result.by) == ("stopped", "rank 0")
    assert run.directory.checkpoint_steps()[-1] == result.step >= 6
    assert run.queued() == [], "the successor was taken out of the queue"
    assert run.result(2) is None or run.result(2).state == "not_needed"  # type: ignore[union-attr]

    busy_alice.told("resume", run.path)
    run.until_step(result.step + 3, attempt=3)
    assert "loses what was trained since" in busy_alice.refused("stop", run.path, "--now")
    assert len(run.queued()) == 2, "nobody agreed"
    busy_alice.told("stop", run.path, "--now", "--yes", "--wait", "60")
    assert run.queued() == []
    assert busy_alice.facts("status", run.path)["jobs"][2]["state"] == "stopped"

    busy_alice.told("resume", run.path, "--once", disturbed(PAUSE_S=0))
    assert run.ended(5).state == "finished"
    plain = busy_alice.train("plain", "train.steps=60 steps", "site.starter=torchrun")
    assert plain.ended().state == "finished"
    assert run.attempts_begun() == 3
    assert run.losses() == plain.losses()


def test_scancel_of_a_chain_stops_it(busy_alice: Person) -> None:
    """By hand, of the successor and of the running attempt."""
    run, other = (busy_alice.train(name, "site.nodes=1", "--until-done", *PAUSED) for name in ("running", "queued"))
    for each in (run, other):
        each.until_step(2)
        wait_for("a successor", lambda each=each: each.job(2) != "", 20)
    busy_alice.cluster.output("scancel", other.job(2))
    busy_alice.cluster.output("scancel", run.job(1))
    result = run.ended(1)
    assert (result.state, result.failure) == ("stopped", "signal")
    assert run.directory.checkpoint_steps()[-1] == result.step, "what SIGTERM interrupts is saved"
    assert run.ended(2).state == "not_needed"
    assert busy_alice.facts("status", run.path)["jobs"][0]["state"] == "stopped"
    facts = busy_alice.facts("status", other.path)
    assert [job["state"] for job in facts["jobs"]] == ["running", "stopped"]
    assert other.ended(1).state == "finished"
    assert run.queued() == other.queued() == []


def test_a_preempted_job_goes_on(busy_alice: Person) -> None:
    """It saves within the time of grace, and its successor goes on once the more urgent job is done."""
    place = 'site.options={nodelist = "n3", exclusive = true}'
    run = busy_alice.train("preempt", "site.queue=preempt", "site.nodes=1", place, "--until-done", *PAUSED)
    run.until_step(3)
    urgent = busy_alice.cluster.submit("#!/bin/bash\nsleep 1\n", "-w", "n3", "--exclusive")
    saved = run.ended(1).step
    assert busy_alice.cluster.wait_until(urgent) == "COMPLETED"
    assert run.ended(2).state == "finished", run.printed(2)
    assert busy_alice.facts("status", run.path)["jobs"][0]["state"] == "preempted"
    restart = [event for event in run.directory.events(0) if event["event"] == "started"][1]
    assert restart["step"] == saved
    assert run.queued() == []


def test_a_chain_goes_on_without_a_node_that_crashed(busy_alice: Person) -> None:
    run = busy_alice.train("node", "--until-done", *PAUSED, "run.collective_timeout=10s")
    run.until_step(7)
    started = run.directory.attempt(1).read_started()
    assert started is not None
    lost = started.nodes.split()[1]
    crashed = time.monotonic()
    busy_alice.cluster.crash(lost)
    assert run.ended(1).state in ("crashed", "node_failure"), run.printed(1)
    assert time.monotonic() - crashed < 90, "the ranks that are left do not wait for ever"
    assert run.ended(2, timeout_s=240).state == "finished", run.printed(2)
    again = run.directory.attempt(2).read_started()
    assert again is not None
    assert lost not in again.nodes.split()
    assert max(run.losses()) == 60
    assert run.queued() == []
    busy_alice.cluster.boot(lost)


def test_a_wall_time_that_is_too_short_changes_no_loss(busy_alice: Person, long: Submitted, short: Submitted) -> None:
    assert long.ended().state == "finished"
    wait_for("the end of the chain", lambda: "finished" in short.states(), timeout_s=600)
    states = short.states()
    last = states.index("finished") + 1
    assert last >= 2
    assert set(states[: last - 1]) == {"deadline"}, states
    assert short.losses() == long.losses()
    assert len(short.losses()) == 120
    wait_for("an empty queue", lambda: short.queued() == [], 20)
    facts = busy_alice.facts("status", short.path)
    assert (facts["state"], facts["step"]) == ("finished", 120)
    assert [job["state"] for job in facts["jobs"]] == [*states[:last], "not_needed"][: len(facts["jobs"])]
    assert all(job["step"] for job in facts["jobs"][:last]), json.dumps(facts["jobs"])
