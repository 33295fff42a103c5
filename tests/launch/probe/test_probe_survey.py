from __future__ import annotations

import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts_of_probes import SLURMS, TalkingHost, read, said

from shardway.hardware.probe import Device, LocalMachine
from shardway.launch import site_survey
from shardway.launch.hosts.base import Done
from shardway.launch.schedulers import surveys as slurm
from shardway.launch.schedulers.slurm import Slurm
from shardway.launch.site_survey import ProbedFact, ProbedFacts, name_site, render_profile, survey
from shardway.sites.load import parse_profile
from shardway.sites.problems import describe_facts
from unsourced import list_unsourced

DAY = datetime.date(2026, 11, 22)
LOGIN = LocalMachine("login1", "CPU", 8, 16, 64 * 2**30, (), "3.12.0", "Linux 6.1 x86_64")
H100 = Device("NVIDIA H100 80GB HBM3", 80 * 2**30)
DF = """\
Filesystem     Type  1024-blocks      Used Available Capacity Mounted on
/dev/md0       xfs   29000000000 100000000  28900000000       1% /raid
tmpfs          tmpfs      100000         0      100000       0% /local
server:/x      nfs4   1000000000         0  1000000000       0% /scratch/local
/dev/sda1      ext4   1000000000         0  1000000000       0% /
"""
ANYWHERE = {
    site_survey.FOLDERS: "HOME\nSCRATCH\nWORK\n",
    site_survey.MODULES: "yes\n",
    site_survey.DISKS: Done((), 1, DF, "df: /nvme: No such file or directory\n"),
    site_survey.INTERNET: "\n\n28\n",
}


def slurm_host(folder: str, **more: str) -> TalkingHost:
    def case(command: str) -> str:
        return said(folder, "sinfo-partition", command)

    return TalkingHost(
        {
            site_survey.PROGRAMS: "/usr/bin/sinfo\n/usr/bin/qstat\n/usr/bin/singularity\n/usr/bin/podman\n",
            Slurm.survey_command: case("sinfo -h -o '%P|%a|%l|%D|%t|%N|%G|%c|%m|%f'"),
            ("id", "-un"): "alice\n",
            ("sacctmgr",): case(" ".join(slurm.accounts_command("alice"))),
            slurm.PARTITIONS: case("scontrol show partition"),
            ("scontrol", "show", "config"): case("scontrol show config"),
            ("scontrol", "show", "node", "n1"): case("scontrol show node n1"),
            ("srun", "--help"): more.get("srun_help", "Usage: srun\n"),
            **ANYWHERE,
        }
    )


def pbs_host() -> TalkingHost:
    return TalkingHost(
        {
            site_survey.PROGRAMS: "/opt/pbs/bin/qstat\n/usr/bin/enroot\n",
            ("qstat", "-Qf"): read("pbs", "qstat-queues-server.Q.json"),
            ("qstat", "-Bf"): read("pbs", "qstat-queues-server.B.json"),
            ("pbsnodes", "-a"): read("pbs", "pbsnodes-states.a.json"),
            ("hostname", "-s"): "pbshead\n",
            **ANYWHERE,
        }
    )


def values(found: ProbedFacts) -> dict[str, object]:
    return {".".join(fact.path): fact.value for fact in found.facts if fact.path[0] != "queues"}


@pytest.mark.parametrize("folder", SLURMS)
def test_a_slurm_machine_becomes_a_profile_that_loads(folder: str) -> None:
    host = slurm_host(folder)
    found = survey(host, LOGIN)
    assert name_site(host) in ("hpc", "hpc24", "hpc26")
    profile = parse_profile("probed", render_profile("hpc", "HPC", found, "login1", DAY))
    assert (profile.scheduler, profile.launcher, profile.container) == ("slurm", "torchrun", "apptainer")
    assert profile.containers.command == "singularity"
    assert (profile.node.cores, profile.node.memory, profile.node.accelerators_per_node) == (4, 3000 * 2**20, 4)
    assert (profile.node.accelerator, profile.node.local_disk, profile.node.architecture) == (None, None, "x86_64")
    assert [queue.name for queue in profile.queues] == ["batch", "debug", "preempt"]
    assert (profile.internet.login, profile.internet.nodes) == ("none", None)
    assert (profile.storage.scratch, profile.storage.project) == ("$SCRATCH", "$WORK")
    assert profile.defaults == {"account": "test"}
    assert list_unsourced(profile) == ("launcher",)  # what is inherited from the generic profile
    assert not any(fact.is_unsure for fact in describe_facts(profile) if fact.path != "launcher")


def test_every_source_is_a_command_and_a_date() -> None:
    text = render_profile("hpc", "HPC", survey(slurm_host("slurm"), LOGIN), "login1", DAY)
    facts = {fact.path: fact.source for fact in describe_facts(parse_profile("probed", text))}
    assert str(facts["queues.batch.max_walltime"]) == str(facts["queues.debug.name"])
    assert facts["node.cores"].source == "`sinfo` on login1"  # type: ignore[union-attr]
    assert facts["node.architecture"].source == "`scontrol show node n1` on login1"  # type: ignore[union-attr]
    assert {source.date for source in facts.values() if source} == {DAY}


def test_pyxis_is_known_by_the_options_of_srun() -> None:
    found = survey(slurm_host("slurm", srun_help="      --container-image=[USER@]...\n"))
    assert values(found)["container"] == "pyxis"
    assert "containers.command" not in values(found)


def test_a_pbs_machine_becomes_a_profile_that_loads() -> None:
    host = pbs_host()
    found = survey(host, LOGIN)
    assert name_site(host) == "pbshead"
    profile = parse_profile("probed", render_profile("pbs", "PBS", found, "login1", DAY))
    assert (profile.scheduler, profile.launcher, profile.container) == ("pbs", "mpirun", "enroot")
    assert [queue.name for queue in profile.queues] == ["workq", "short", "oneatatime", "routed"]
    assert (profile.node.accelerators_per_node, profile.request.accelerators) == (4, "ngpus")
    assert ("sinfo", "-h") not in {words[:2] for words in host.asked}


def test_of_two_schedulers_it_is_the_one_that_answers() -> None:
    """Slurm's commands are installed on many a machine that PBS runs."""
    answers = {**pbs_host().answers, site_survey.PROGRAMS: "/opt/pbs/bin/qstat\n/usr/bin/sinfo\n"}
    found = survey(TalkingHost(answers), LOGIN)
    assert values(found)["scheduler"] == "pbs"
    assert "sinfo is installed here and does not answer; PBS does." in found.notes
    named = {site_survey.PROGRAMS: answers[site_survey.PROGRAMS]}
    kept = survey(TalkingHost({**slurm_host("slurm").answers, **named}), LOGIN)
    assert values(kept)["scheduler"] == "slurm"


def test_a_machine_without_a_scheduler_is_its_own_node() -> None:
    host = TalkingHost({site_survey.PROGRAMS: "/usr/bin/podman\n", **ANYWHERE})
    found = survey(host, LocalMachine(**{**vars(LOGIN), "accelerators": (H100, H100)}))
    profile = parse_profile("probed", render_profile("box", "Box", found, "box", DAY))
    assert (profile.scheduler, profile.node.cores, profile.node.accelerator) == ("local", 16, "h100-sxm5-80gb")
    assert (profile.node.accelerators_per_node, profile.node.local_disk) == (2, "/raid")
    assert (profile.internet.nodes, profile.internet.login) == ("none", None)
    assert profile.queues == ()


@pytest.mark.parametrize(("count", "part"), [(4, "h100-sxm5-80gb"), (1, None)])
def test_gpus_of_a_login_node_are_those_of_nodes_only_where_they_are_as_many(count: int, part: str | None) -> None:
    found = survey(slurm_host("slurm"), LocalMachine(**{**vars(LOGIN), "accelerators": (H100,) * count}))
    assert values(found).get("node.accelerator") == part
    assert any("1 x h100-sxm5-80gb" in note for note in found.notes) == (part is None)


def test_gpus_that_the_catalogue_lacks_are_told() -> None:
    strange = LocalMachine(**{**vars(LOGIN), "accelerators": (Device("NVIDIA Unheard 1", None),)})
    found = survey(slurm_host("slurm"), strange)
    assert "node.accelerator" not in values(found)
    assert "GPUs of this machine, which the catalogue lacks: NVIDIA Unheard 1." in found.notes


def test_commands_that_fail_cost_what_they_would_have_said() -> None:
    host = TalkingHost(
        {
            site_survey.PROGRAMS: "/usr/bin/sinfo\n",
            Slurm.survey_command: Done(("sinfo",), -1, "", "", timed_out=True),
        }
    )
    found = survey(host, LOGIN)
    assert values(found) == {"scheduler": "slurm"}
    assert found.notes == (
        "sinfo names no nodes: nothing is known of nodes and partitions.",
        "`sinfo -h -o` failed: no answer in time.",
    )
    assert parse_profile("probed", render_profile("x", "X", found, "login1", DAY)).scheduler == "slurm"


def test_a_host_on_which_nothing_answers_is_a_machine_without_scheduler() -> None:
    found = survey(TalkingHost({}))
    assert values(found) == {"scheduler": "local"}
    assert found.notes == ('`sh -c for c; do command -v "$c"; done; true` failed: sh: no such program.',)


# --- what is beside the scheduler


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("\n\n0\n", {"internet.login": "direct"}),
        ("\n\n6\n", {"internet.login": "none"}),
        ("\n\n35\n", {}),  # a certificate that is not trusted says nothing of the way
        ("\n\n127\n", {}),
        ("", {}),
        (
            "http://proxy:3128\nlocalhost\n0\n",
            {"internet.login": "proxy", "internet.proxy": "http://proxy:3128", "internet.no_proxy": "localhost"},
        ),
        ("http://me:secret@proxy:3128\n\n0\n", {}),
    ],
)
def test_the_way_out(text: str, facts: dict[str, str]) -> None:
    found = site_survey.parse_internet(text, is_node=False)
    assert values(found) == facts
    assert "secret" not in repr(found)


def test_disks_are_those_of_the_machine_itself() -> None:
    assert values(site_survey.describe_disks(DF, is_node=True)) == {"node.local_disk": "/raid"}
    assert values(site_survey.describe_disks(DF, is_node=False)) == {}
    assert "/raid" in site_survey.describe_disks(DF, is_node=False).notes[0]


# --- the text

NAMES = st.text(min_size=1, max_size=12).filter(lambda name: not any(0xD800 <= ord(c) < 0xE000 for c in name))


@settings(max_examples=15)
@given(NAMES, NAMES, NAMES)
def test_whatever_a_machine_calls_things_the_profile_loads(queue: str, account: str, note: str) -> None:
    found = ProbedFacts(
        (
            ProbedFact(("scheduler",), "slurm", f"echo {account}"),
            ProbedFact(("queues", queue, "name"), queue, "scontrol"),
            ProbedFact(("queues", queue, "max_walltime"), 5400.0, "scontrol"),
            ProbedFact(("defaults", "account"), account, "sacctmgr"),
        ),
        (note,),
    )
    profile = parse_profile("probed", render_profile("x", queue, found, account, DAY))
    assert [(entry.name, entry.max_walltime) for entry in profile.queues] == [(queue, 5400.0)]
    assert profile.defaults["account"] == account
    assert list_unsourced(profile) == ("launcher",)
