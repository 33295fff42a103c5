from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts_of_probes import read

from shardway.launch.schedulers import surveys as pbs
from shardway.launch.site_survey import ProbedFacts

QUEUES = read("pbs", "qstat-queues-server.Q.json")
SERVER = read("pbs", "qstat-queues-server.B.json")
NODES = read("pbs", "pbsnodes-states.a.json")


def values(found: ProbedFacts) -> dict[str, object]:
    return {".".join(fact.path): fact.value for fact in found.facts}


def nodes_json(**vnodes: dict[str, Any]) -> str:
    return json.dumps({"nodes": {name: {"resources_available": table} for name, table in vnodes.items()}})


def test_queues_that_everybody_can_send_jobs_to() -> None:
    found = pbs.describe_queues(QUEUES, pbs.parse_default_queue(SERVER))
    assert values(found) == {
        "queues.workq.name": "workq",
        "queues.short.name": "short",
        "queues.short.max_walltime": 1800.0,
        "queues.short.default_walltime": 300.0,
        "queues.oneatatime.name": "oneatatime",
        "queues.routed.name": "routed",
    }
    assert found.notes == (
        "Queue notstarted is left out: it starts no jobs (started).",
        "Queue disabled is left out: it takes no jobs (enabled).",
        "Queue private is left out: it is for some users only: bob.",
        "Queue fromroute is left out: jobs come there from other queues only.",
    )


def test_the_default_queue_is_the_first() -> None:
    assert pbs.parse_default_queue(SERVER) == "workq"
    found = pbs.describe_queues(QUEUES, "short")
    assert found.facts[0].path == ("queues", "short", "name")


def test_limits_in_nodes_as_numbers_or_texts() -> None:
    limits = {"resources_max": {"nodect": "16", "walltime": 3600}, "resources_min": {"nodect": 2}}
    text = json.dumps({"Queue": {"q.1": {"enabled": "True", "started": "True", **limits}}})
    found = pbs.describe_queues(text, "")
    assert [found.get("queues", "q.1", key) for key in ("max_nodes", "min_nodes", "max_walltime")] == [16, 2, 3600.0]
    assert {fact.path[1] for fact in found.facts} == {"q.1"}


def test_nodes_of_a_real_server() -> None:
    found = pbs.describe_hosts(NODES)
    assert values(found) == {
        "node.cores": 4,
        "node.memory": 24684084 * 1024,
        "node.accelerators_per_node": 4,
        "request.accelerators": "ngpus",
    }
    assert found.notes == ()


def test_vnodes_of_a_host_are_one_node_and_kinds_are_told() -> None:
    text = nodes_json(
        **{
            "g1[0]": {"host": "g1", "ncpus": 56, "ngpus": 4, "mem": "1tb", "container_engine": "enroot"},
            "g1[1]": {"host": "g1", "ncpus": "56", "ngpus": "4", "mem": "1tb"},
        },
        c1={"host": "c1", "ncpus": 128, "mem": "256gb"},
        c2={"host": "c2", "ncpus": 128, "mem": "256gb"},
    )
    found = pbs.describe_hosts(text)
    assert values(found) == {
        "node.cores": 112,
        "node.memory": 2 * 2**40,
        "node.accelerators_per_node": 8,
        "request.accelerators": "ngpus",
        "containers.by_scheduler": True,
    }
    assert found.notes == ("Other kinds of nodes, which are not described here: 128 cores, 0 GPUs.",)


def test_nodes_without_accelerators() -> None:
    found = pbs.describe_hosts(nodes_json(c1={"ncpus": 8, "mem": "16gb"}))
    assert values(found) == {
        "node.cores": 8,
        "node.memory": 16 * 2**30,
        "node.accelerator": "cpu",
        "node.accelerators_per_node": 0,
    }


@pytest.mark.parametrize(
    ("text", "size"),
    [("24684084kb", 24684084 * 1024), ("2TB", 2 * 2**40), ("512", 512), ("8mw", None), ("", None), ("gb", None)],
)
def test_sizes(text: str, size: int | None) -> None:
    assert pbs.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "no json", "[1]", '{"Queue": 3, "nodes": [], "Server": {"s": 1}}', "[" * 100000])
def test_what_is_no_answer_says_nothing(text: str) -> None:
    assert pbs.describe_queues(text, "") == ProbedFacts()
    assert pbs.describe_hosts(text) == ProbedFacts()
    assert pbs.parse_default_queue(text) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=20)
@given(st.dictionaries(st.sampled_from(["resources_max", "resources_available", "enabled", "started", "mem"]), JSON))
def test_no_value_makes_a_parser_fail(table: dict[str, Any]) -> None:
    text = json.dumps({"Queue": {"q": table}, "nodes": {"n": table, "m": {"resources_available": table}}})
    found = pbs.describe_queues(text, "")
    assert found.get("queues", "q", "name") == "q" or found.notes[0].startswith("Queue q is left out: ")
    pbs.describe_hosts(text)


def test_a_machine_of_many_hosts_is_described_quickly() -> None:
    """The largest have ten thousand."""
    text = nodes_json(**{f"n{number}": {"ncpus": 64, "ngpus": 4, "mem": "500gb"} for number in range(400)})
    began = time.process_time()
    assert values(pbs.describe_hosts(text))["node.accelerators_per_node"] == 4
    assert time.process_time() - began < 2
