from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardway.launch.job import Job, JobEnvironment, Program, QueueTerms, Shape
from shardway.launch.schedulers.slurm import cpus_of_task
from shardway.sites.load import list_shipped, load_site
from shardway.sites.problems import GENERIC_SITES, describe_facts

REAL_SITES = sorted(set(list_shipped()) - set(GENERIC_SITES))

# Typed by hand: the suffix and the kind of address that MASTER_ADDR needs.
MASTER_ADDR = [
    ("aspire2a-plus", None, None),
    ("jupiter", None, "ipv4"),
    ("jureca-dc", "i", "ipv4"),
    ("juwels-booster", "i", "ipv4"),
    ("leonardo-booster", None, "ipv4"),
    ("lumi-g", None, None),
    ("marenostrum5-acc", None, "ipv4"),
    ("perlmutter", None, None),
]


@pytest.mark.parametrize(("name", "suffix", "resolve"), MASTER_ADDR)
def test_the_rule_for_the_address_of_the_first_rank(name: str, suffix: str | None, resolve: str | None) -> None:
    network = load_site(name).network
    assert (network.host_suffix, network.resolve) == (suffix, resolve)


REQUESTS = [
    ("aspire2a-plus", "ngpus", True, None),
    ("dgx-slurm", "gpus-per-node", None, None),
    ("jureca-dc", "gres", None, None),
    ("lumi-g", "gpus-per-node", True, None),
    ("marenostrum5-acc", "gres", False, None),
    ("param-rudra", "gres", None, None),
    ("perlmutter", "gpus-per-node", False, "gpu"),
]


@pytest.mark.parametrize(("name", "accelerators", "memory", "constraint"), REQUESTS)
def test_how_a_job_asks_for_nodes(name: str, accelerators: str, memory: bool | None, constraint: str | None) -> None:
    request = load_site(name).request
    assert (request.accelerators, request.memory, request.constraint) == (accelerators, memory, constraint)


@pytest.mark.parametrize(
    ("name", "nodes", "login"),
    [
        ("aspire2a-plus", "proxy", None),
        ("jupiter", "none", "direct"),
        ("jureca-dc", "none", None),
        ("juwels-booster", "none", None),
        ("leonardo-booster", "none", None),
        ("lumi-g", "direct", None),
        ("marenostrum5-acc", "none", "none"),
        ("perlmutter", "direct", None),
    ],
)
def test_what_can_be_reached_outside(name: str, nodes: str, login: str | None) -> None:
    internet = load_site(name).internet
    assert (internet.nodes, internet.login) == (nodes, login)
    assert (internet.proxy is not None) == (nodes == "proxy")


# CPUs of one of the ranks of a whole node, as the site's own scripts and users' have them, and of all of them.
CPUS = [
    ("dgx-slurm", 14, 112),
    ("jupiter", 72, 288),
    ("jureca-dc", 64, 256),
    ("juwels-booster", 24, 96),
    ("leonardo-booster", 8, 32),
    ("lumi-g", 7, 56),
    ("marenostrum5-acc", 20, 80),
    ("param-rudra", 24, 48),
    ("perlmutter", 32, 128),
]


@pytest.mark.parametrize(("name", "each", "together"), CPUS)
def test_the_ranks_of_a_node_have_all_its_cores(name: str, each: int, together: int) -> None:
    """48 on JUWELS Booster, 64 on Perlmutter: where Slurm counts threads, it is asked for both of each core."""
    node = load_site(name).node
    ranks, cores, threads = node.accelerators_per_node or 0, node.cores or 0, node.threads_per_core or 1
    shape = Shape(1, ranks, cores, ranks, threads_per_core=threads)
    where = JobEnvironment(Path("/work"))
    job = Job("base", "a1", name, "slurm", "srun", Path("/run"), 1, Program(("x.py",)), shape, QueueTerms(60.0), where)
    assert cpus_of_task(job, ranks) == each
    assert ranks * each == together == cores * threads


def test_a_queue_may_be_a_quality_of_service() -> None:
    leonardo = {queue.name: queue for queue in load_site("leonardo-booster").queues}
    assert leonardo["boost_usr_prod"].qos is None
    assert leonardo["boost_qos_lprod"].partition == "boost_usr_prod"
    assert leonardo["boost_qos_lprod"].max_walltime == 4 * 86400.0
    perlmutter = load_site("perlmutter").queues[0]
    assert (perlmutter.partition, perlmutter.qos) == ("", "regular")
    acc = load_site("marenostrum5-acc").queues[0]
    assert (acc.partition, acc.qos) == ("acc", "acc_ehpc")


def test_the_masks_of_lumi_are_seven_cores_a_die_without_the_first_of_each_eight() -> None:
    bind = load_site("lumi-g").start.bind or ""
    masks = [int(mask, 16) for mask in bind.removeprefix("mask_cpu:").split(",")]
    assert [mask.bit_count() for mask in masks] == [7] * 8
    assert sum(masks) == sum(0xFE << 8 * group for group in range(8))


def test_only_the_machine_of_grace_processors_is_arm() -> None:
    found = {name: load_site(name).node.architecture for name in REAL_SITES}
    assert {name for name, architecture in found.items() if architecture == "aarch64"} == {"jupiter"}
    assert None not in found.values()


def test_pbs_makes_the_container_on_aspire() -> None:
    containers = load_site("aspire2a-plus").containers
    assert containers.by_scheduler
    assert containers.data_path == "/raid/local/containers/enroot-data/$PBS_JOBID"


@pytest.mark.parametrize("name", REAL_SITES)
def test_an_address_in_a_source_is_whole(name: str) -> None:
    texts = [fact.source.source for fact in describe_facts(load_site(name)) if fact.source]
    addresses = [word for text in texts for word in re.findall(r"https?://\S+", text)]
    assert [url for url in addresses if not re.fullmatch(r"https?://[\w.-]+/[\w./%~+#-]*[;:,)]*", url)] == []
