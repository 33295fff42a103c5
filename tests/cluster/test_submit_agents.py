"""Jobs whose nodes have an agent of ours each: the same bits as ever, and fewer nodes where one is lost."""

from __future__ import annotations

import time

from submitting import Person


def test_agents_train_as_others_do(busy_alice: Person) -> None:
    agents, tasks = (busy_alice.train(name, f"site.launcher={name}") for name in ("agent", "srun"))
    result = agents.ended()
    assert (result.state, result.step, result.by) == ("finished", 20, "rank 0"), agents.printed()
    started = next(event for event in agents.directory.events(0) if event["event"] == "started")
    assert (started["world"], started["launcher"]) == (2, "shardway")
    assert tasks.ended().state == "finished"
    assert agents.losses() == tasks.losses()
    assert "step 20/20" in busy_alice.told("logs", agents.path, "--job")


def test_a_run_goes_on_in_its_job_where_a_node_is_lost(busy_alice: Person) -> None:
    """Without the node, in the same attempt: nothing waits in the queue again."""
    cluster = busy_alice.cluster
    run = busy_alice.train_slowly("fewer", 0.5, "run.elastic=[1, 2]", "site.launcher=auto", "train.steps=60 steps")
    run.until_step(6)
    started = run.directory.attempt(1).read_started()
    assert started is not None
    crashed = time.monotonic()
    cluster.crash(started.nodes.split()[1])
    try:
        run.until_step(12, timeout_s=90)
        run.hurry()
        result = run.ended(1, timeout_s=90)
    finally:
        cluster.boot(started.nodes.split()[1])
    assert (result.state, result.step) == ("finished", 60), run.printed()
    assert time.monotonic() - crashed < 120
    events = list(run.directory.all_events(0))
    assert [event["world"] for event in events if event["event"] == "started"] == [2, 1]
    (restart,) = [event for event in events if event["event"] == "restarted"]
    assert restart["reason"].startswith("node 1 (")
    assert len(run.losses()) == 60
