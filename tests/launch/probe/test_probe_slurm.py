from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts_of_probes import SLURMS, said

from shardway.launch.schedulers import surveys as slurm
from shardway.launch.schedulers.slurm import Slurm
from shardway.launch.site_survey import ProbedFacts, parse_time

GIB = 2**30

SINFO = "sinfo -h -o '%P|%a|%l|%D|%t|%N|%G|%c|%m|%f'"
# sinfo of a machine with threads: two sockets of 24 cores, and other nodes beside those with GPUs.
MIXED = """\
cpu*|up|1-00:00:00|40|idle|c[001-040]|(null)|96|190000|(null)|2:24:2
gpu|up|1-00:00:00|3|alloc|g[01-03]|gpu:a100:4(S:0-1),nvme:1|96|515000|a100|2:24:2
gpu|up|1-00:00:00|1|mix|g04|gpu:a100:4(S:0-1)|96|514000|a100|2:24:2
devel|up|2:00:00|1|idle|g01|gpu:a100:4(S:0-1)|96|515000|a100|2:24:2
old|up|1-00:00:00|2|idle|o[1-2]|gpu:v100:2|40+|100000+|(null)|2:10+:2
a line that is none
"""


def partitions(folder: str) -> list[dict[str, str]]:
    return slurm.parse_partitions(said(folder, "sinfo-partition", "scontrol show partition"))


def values(found: ProbedFacts) -> dict[str, object]:
    return {".".join(fact.path): fact.value for fact in found.facts}


@pytest.mark.parametrize("folder", SLURMS)
def test_kinds_of_nodes(folder: str) -> None:
    kinds = slurm.parse_sinfo(said(folder, "sinfo-partition", SINFO))
    assert [(kind.partition, kind.count, kind.nodes) for kind in kinds] == [
        ("batch", 3, "n[1-3]"),
        ("debug", 1, "n1"),
        ("preempt", 3, "n[1-3]"),
        ("closed", 1, "n3"),
        ("private", 3, "n[1-3]"),
        ("draining", 1, "n3"),
    ]
    assert {(kind.cores, kind.memory, kind.gpus, kind.gpu_type) for kind in kinds} == {(4, 3000 * 2**20, 4, "fake")}


@pytest.mark.parametrize("folder", SLURMS)
def test_partitions_by_name(folder: str) -> None:
    names = [partition["PartitionName"] for partition in partitions(folder)]
    assert names == ["batch", "debug", "preempt", "closed", "private", "draining"]
    kinds = slurm.parse_sinfo(said(folder, "sinfo-partition", SINFO))
    default_last = sorted(partitions(folder), key=lambda partition: partition["PartitionName"] == "batch")
    assert slurm.describe_partitions(default_last, kinds, []).facts[0].value == "batch"


@pytest.mark.parametrize("folder", SLURMS)
def test_queues_are_those_that_this_user_can_send_jobs_to(folder: str) -> None:
    kinds = slurm.parse_sinfo(said(folder, "sinfo-partition", SINFO))
    command = " ".join(slurm.accounts_command("alice"))
    accounts = slurm.parse_accounts(said(folder, "sinfo-partition", command))
    found = slurm.describe_partitions(partitions(folder), kinds, accounts)
    assert values(found) == {
        "queues.batch.name": "batch",
        "queues.batch.max_walltime": 3600.0,
        "queues.batch.default_walltime": 600.0,
        "queues.debug.name": "debug",
        "queues.debug.max_walltime": 300.0,
        "queues.debug.default_walltime": 60.0,
        "queues.preempt.name": "preempt",
        "queues.preempt.max_walltime": 3600.0,
        "queues.preempt.default_walltime": 600.0,
        "request.submit_from_nodes": True,
    }
    assert found.notes == (
        "Partition closed is left out: its state is DOWN.",
        "Partition private is left out: it is for other accounts (rich).",
        "Partition draining is left out: its state is DRAIN.",
    )


@pytest.mark.parametrize("folder", SLURMS)
def test_one_account_is_the_default_and_qualities_of_service_are_told(folder: str) -> None:
    command = " ".join(slurm.accounts_command("alice"))
    accounts = slurm.parse_accounts(said(folder, "sinfo-partition", command))
    assert accounts == {"test": {"gpulimit", "normal", "onejob", "short"}}
    found = slurm.describe_accounts(accounts, "alice")
    assert values(found) == {"defaults.account": "test"}
    assert found.notes == ("Qualities of service that you may ask for: gpulimit, normal, onejob, short.",)


def test_several_accounts_are_a_choice_of_the_user() -> None:
    accounts = slurm.parse_accounts("hpc|b|me|normal|\nhpc|a|me|normal|\nhpc|b|me|long|\n\nhpc||me|x|\n")
    found = slurm.describe_accounts(accounts, "me")
    assert found.facts == ()
    assert found.notes[1].startswith("Accounts that you may charge: b, a.")


@pytest.mark.parametrize("folder", SLURMS)
def test_the_name_of_the_site(folder: str) -> None:
    def ask(words: Sequence[str], *, quiet: bool = False) -> str:
        return said(folder, "sinfo-partition", " ".join(words))

    names = {"slurm": "hpc", "slurm-24": "hpc24", "slurm-26": "hpc26"}
    assert Slurm().read_site_name(ask) == names[folder]


@pytest.mark.parametrize("folder", SLURMS)
def test_the_architecture_of_a_node(folder: str) -> None:
    assert slurm.parse_architecture(said(folder, "sinfo-partition", "scontrol show node n1")) == "x86_64"
    assert slurm.parse_architecture(said(folder, "sinfo-partition", "scontrol show node nosuch")) is None


def test_nodes_with_accelerators_come_before_more_nodes_without() -> None:
    kinds = slurm.parse_sinfo(MIXED)
    found = slurm.describe_nodes(kinds)
    assert values(found) == {
        "node.cores": 48,
        "node.threads_per_core": 2,
        "node.memory": 514000 * 2**20,
        "node.accelerators_per_node": 4,
        "request.accelerators": "gres",
    }
    assert found.notes == (
        "The accelerators are called a100 here (gres).",
        "Other kinds of nodes, which are not described here: 48 cores, 0 GPUs, 20 cores, 2 GPUs (v100).",
    )
    shown = (
        "PartitionName={} MaxTime=UNLIMITED DefaultTime=NONE MaxNodes=16 MinNodes=2 State=UP OverSubscribe=EXCLUSIVE"
    )
    blocks = "\n\n".join(shown.format(name) for name in ("cpu", "gpu", "devel", "old"))
    queues = slurm.describe_partitions(slurm.parse_partitions(blocks), kinds, {})
    assert values(queues) == {
        "queues.gpu.name": "gpu",
        "queues.gpu.max_nodes": 16,
        "queues.gpu.min_nodes": 2,
        "queues.devel.name": "devel",
        "queues.devel.max_nodes": 16,
        "queues.devel.min_nodes": 2,
        "request.whole_nodes": True,
    }
    assert len(queues.notes) == 2


def test_nodes_without_accelerators_are_of_the_kind_that_is_most_frequent() -> None:
    found = slurm.describe_nodes(slurm.parse_sinfo(MIXED.split("\n", 1)[0]))
    assert values(found) == {
        "node.cores": 48,
        "node.threads_per_core": 2,
        "node.memory": 190000 * 2**20,
        "node.accelerator": "cpu",
        "node.accelerators_per_node": 0,
    }


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("(null)", (0, "")),
        ("", (0, "")),
        ("gpu:4", (4, "")),
        ("gpu:a100:4", (4, "a100")),
        ("gpu:a100_3g.20gb:2(S:0),gpu:a100:4(S:0-1)", (6, "")),
        ("nvme:1,gpu:h100:8(S:0-7)", (8, "h100")),
        ("craynetwork:4", (0, "")),
    ],
)
def test_gpus_in_a_gres(gres: str, found: tuple[int, str]) -> None:
    assert slurm.parse_gpus(gres) == found


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1"),
        ("n[007,009-010]", "n007"),
        ("a1,b[2-3]", "a1"),
        ("jpbo-[001-002]-03", "jpbo-001"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert slurm.parse_first_node(nodes).startswith(first)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-00:00:00", 86400.0),
        ("2-12:30:00", 2 * 86400 + 45000.0),
        ("3-0", 3 * 86400.0),
        ("3-2:30", 3 * 86400 + 9000.0),
        ("01:00:00", 3600.0),
        ("120:00:00", 432000.0),
        ("5:00", 300.0),
        ("30", 1800.0),
        ("UNLIMITED", None),
        ("NONE", None),
        ("INFINITE", None),
        ("00:00:00", None),
        ("", None),
        (True, None),
        (1800, 1800.0),
        (0, None),
    ],
)
def test_times_of_schedulers(text: object, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_a_time_with_days(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert (parse_time(f"{days}-{hours:02d}:{minutes:02d}:{seconds:02d}") or 0.0) == total


@settings(max_examples=20)
@given(st.text(max_size=60))
def test_no_text_makes_a_parser_fail(text: str) -> None:
    slurm.parse_sinfo(f"{text}\n{'|'.join([text] * 11)}")
    slurm.parse_partitions(f"PartitionName=a {text}\n\n{text}")
    slurm.parse_accounts(f"{text}|{text}|{text}|{text}")
    slurm.parse_first_node(text)
    parse_time(text)


def test_a_machine_of_many_partitions_is_described_quickly() -> None:
    line = "p{}|up|1-00:00:00|2|idle|n[{}]|gpu:a100:4|96|515000|f{}|2:24:2\n"
    kinds = slurm.parse_sinfo("".join(line.format(number % 20, number, number) for number in range(200)))
    began = time.process_time()
    assert slurm.describe_partitions(slurm.parse_partitions("PartitionName=p1"), kinds, []).facts[0].value == "p1"
    assert time.process_time() - began < 2
