"""Ranks meet on two hosts that look like a site, by the rules of its profile and over the network for computing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pretended_hosts import Look, Net, two_hosts

from shardway.sites.load import list_shipped, load_site
from shardway.sites.problems import GENERIC_SITES

ETHERNET = Net("eth0", "10.1.0.", called="{}")
NAMELESS = Net("eth0", "10.1.0.")
NODE_MANAGEMENT = Net("nmn0", "10.100.0.")
INFINIBAND = Net("ib0", "10.2.0.", joins=True, called="{}")
SLINGSHOT = (
    Net("hsn0", "10.3.0.", joins=True, called="{}"),
    *(Net(f"hsn{number}", f"10.3.{number}.", joins=True) for number in (1, 2, 3)),
)
JUELICH = (ETHERNET, Net("ib0", "10.2.0.", joins=True, called="{}i"))

# Names and networks as far as the profile's sources tell them; where they tell nothing, as such machines often are.
LOOKS = {
    "juwels-booster": (Look(("jwb0001.juwels", "jwb0002.juwels"), JUELICH), "ib0"),
    "jureca-dc": (Look(("jrc0201.jureca", "jrc0202.jureca"), JUELICH), "ib0"),
    # The names have IPv6 addresses too, over which nothing arrives; resolvers put them first (RFC 6724).
    "jupiter": (
        Look(("jpbo-001-01", "jpbo-001-02"), (Net("eth0", "2001:db8:1::", called="{}"), NAMELESS, INFINIBAND)),
        "ib0",
    ),
    "leonardo-booster": (
        Look(("lrdn0001.leonardo.local", "lrdn0002.leonardo.local"), (NAMELESS, INFINIBAND), own_is_loopback=True),
        "ib0",
    ),
    "marenostrum5-acc": (Look(("as01r1b01", "as01r1b02"), (NAMELESS, INFINIBAND), own_is_loopback=True), "ib0"),
    "lumi-g": (Look(("nid005001", "nid005002"), (NODE_MANAGEMENT, *SLINGSHOT)), "hsn0"),
    "perlmutter": (Look(("nid001001", "nid001002"), (NODE_MANAGEMENT, *SLINGSHOT)), "hsn0"),
    "param-rudra": (Look(("rbgpu001", "rbgpu002"), (NAMELESS, INFINIBAND)), "ib0"),
    "aspire2a-plus": (
        Look(("a2ap-dgx001", "a2ap-dgx002"), (NAMELESS, INFINIBAND), own_is_loopback=True, bridge=True),
        "ib0",
    ),
    "dgx-slurm": (Look(("dgx01", "dgx02"), (NAMELESS, INFINIBAND), own_is_loopback=True, bridge=True), "ib0"),
    "generic-slurm": (Look(("n1", "n2"), (Net("eth0", "2001:db8:2::", called="{}", joins=True),), bridge=True), "eth0"),
}


# What the doctor has to say of a network over which the ranks do meet: on the first host, on the second.
OWN_LOOPBACK = "warn: {0} is 127.0.1.1 on {0} itself"
ONLY_IPV6 = "warn: n1 has no IPv4 address, only 2001:db8:2::1"
WARNINGS = {
    "aspire2a-plus": [[OWN_LOOPBACK.format("a2ap-dgx001")], []],
    "dgx-slurm": [[OWN_LOOPBACK.format("dgx01")], []],
    "generic-slurm": [[ONLY_IPV6], [ONLY_IPV6]],
}


def variables(starter: str, look: Look, rank: int) -> dict[str, str]:
    """What Open MPI's mpirun, srun, or whoever sets torch's variables, tells the one rank of a node."""
    if starter == "torchrun":
        return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if starter == "mpirun":
        return {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        }
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_NODELIST": ",".join(look.nodes),
    }


def everything(site: str, look: Look, meeting: Mapping[str, str], **own: str) -> list[dict[str, str]]:
    """The variables of both ranks: the site's, the meeting point, and what somebody has exported."""
    profile = load_site(site)
    starter = profile.launcher or ""
    return [
        {**variables(starter, look, rank), **profile.environment, **meeting, "SITE": site, **own} for rank in range(2)
    ]


@pytest.mark.parametrize("site", LOOKS)
def test_the_ranks_of_two_nodes_meet_over_the_network_for_computing(site: str, tmp_path: Path) -> None:
    look, fast = LOOKS[site]
    network = load_site(site).network
    with two_hosts(look, tmp_path) as hosts:
        meeting = hosts.meet(network.host_suffix or "", network.resolve == "ipv4")
        said = hosts.run_ranks(everything(site, look, meeting))
    assert [each.get("error", "") for each in said] == ["", ""]
    assert [each["doctor"] for each in said] == WARNINGS.get(site, [[], []])
    assert [each["host"] for each in said] == list(look.hosts)
    assert [(each["sum"], each["used"]) for each in said] == [(3.0, [fast])] * 2
    if network.resolve == "ipv4":
        assert meeting["MASTER_ADDR"] == next(net.address(0) for net in look.nets if net.joins)


def test_every_shipped_machine_is_among_them() -> None:
    assert set(list_shipped()) - set(GENERIC_SITES) - set(LOOKS) == set()


def test_an_interface_that_leads_nowhere_is_named_with_its_variable(tmp_path: Path) -> None:
    look, _ = LOOKS["juwels-booster"]
    with two_hosts(look, tmp_path) as hosts:
        meeting = hosts.meet("i", resolve=True)
        said = hosts.run_ranks(everything("juwels-booster", look, meeting, GLOO_SOCKET_IFNAME="eth0"), talk_s=0.5)
    for each, host in zip(said, look.hosts, strict=True):
        assert f"They reach {host} by the interface eth0 (GLOO_SOCKET_IFNAME)." in each["error"]
        assert "export GLOO_SOCKET_IFNAME with the interface that joins the nodes" in each["error"]


def test_a_name_that_leads_nowhere_is_named_with_its_variable(tmp_path: Path) -> None:
    """On a machine that needs a suffix, by a profile that has none."""
    look, _ = LOOKS["jureca-dc"]
    with two_hosts(look, tmp_path) as hosts:
        meeting = hosts.meet("", resolve=False)
        said = hosts.run_ranks(everything("generic-slurm", look, meeting), meet_s=1.0)
    assert f"could not meet the others at jrc0201:{meeting['MASTER_PORT']}" in said[1]["error"]
    assert "Here jrc0201 is 10.1.0.1." in said[1]["error"]
    assert "(MASTER_ADDR, MASTER_PORT)" in said[1]["error"]
