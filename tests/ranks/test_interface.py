"""By which interface other nodes reach the ranks of this one."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from runs import place
from shardway.errors import SiteError
from shardway.ranks import network
from shardway.ranks.launcher import Placement
from shardway.ranks.network import (
    VARIABLE,
    check_named,
    choose_interface,
    find_interface,
    name_interface,
    own_addresses,
)

SEVERAL = Placement(1, 4, 1, 2, 0, 2, "n1", 29500, "srun")


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are up, one that is down, and the loopback."""
    addresses = {"lo": "127.0.0.1", "eth0": "192.0.2.7", "ib0": "198.51.100.7", "eth1": "203.0.113.7"}
    made = {name: [SimpleNamespace(family=socket.AF_INET, address=text)] for name, text in addresses.items()}
    made["ib0"].append(SimpleNamespace(family=socket.AF_INET6, address="fe80::7%ib0"))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: made)
    stats = {name: SimpleNamespace(isup=name != "eth1", mtu=1500) for name in addresses}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)


@pytest.mark.parametrize(
    ("address", "name"),
    [("198.51.100.7", "ib0"), ("fe80::7", "ib0"), ("203.0.113.7", ""), ("127.0.0.1", ""), ("192.0.2.99", "")],
)
def test_an_interface_is_found_by_its_address(interfaces: None, address: str, name: str) -> None:
    assert find_interface(address) == name


@pytest.mark.parametrize("found", [["192.0.2.7"], []], ids=["the way", "no way"])
def test_a_name_that_leads_here_needs_no_interface(
    interfaces: None, monkeypatch: pytest.MonkeyPatch, found: list[str]
) -> None:
    monkeypatch.setattr(network, "own_addresses", lambda others: found)
    assert choose_interface(("192.0.2.7",), ("n2",)) == ""


@pytest.mark.parametrize("own", ["192.0.2.7", "203.0.113.99", "2001:db8::7", "fe80::7"])
def test_a_name_of_another_network_needs_the_interface_towards_the_others(
    interfaces: None, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """That of management, an address that no interface has, or an IPv6 address where the ranks meet by IPv4."""
    monkeypatch.setattr(network, "own_addresses", lambda others: ["198.51.100.7"])
    assert choose_interface((own, "198.51.100.7"), ("n2",)) == "ib0"


@pytest.mark.parametrize("own", [("127.0.1.1",), (), ("127.0.1.1", "192.0.2.7")], ids=["loopback", "unknown", "first"])
def test_of_several_it_is_the_one_towards_the_others(
    interfaces: None, monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...]
) -> None:
    """gloo takes the first address of the name, whatever comes after it."""
    monkeypatch.setattr(network, "own_addresses", lambda others: ["198.51.100.7"] if "n2" in others else [])
    assert choose_interface(own, ("n2",)) == "ib0"
    assert choose_interface(own, ("nobody knows",)) == "eth0"


def test_the_way_to_this_machine_itself_is_its_loopback_and_no_way() -> None:
    assert list(own_addresses(("127.0.0.1", "::1", "no such host.invalid"))) == []


def test_what_is_set_stays_and_one_node_needs_nothing(interfaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "look_up", lambda name: ("127.0.1.1",))
    monkeypatch.setattr(network, "own_addresses", lambda others: ["198.51.100.7"])
    environ = {VARIABLE: "eth0"}
    name_interface(SEVERAL, environ)
    assert environ == {VARIABLE: "eth0"}
    environ = {}
    name_interface(place(0, 2), environ)
    assert environ == {}
    name_interface(SEVERAL, environ)
    assert environ == {VARIABLE: "ib0"}


@pytest.mark.parametrize("text", ["eth0", "eth0,lo", " eth0 , ib0", ""])
def test_a_name_of_an_interface_that_is_up_passes(interfaces: None, text: str) -> None:
    check_named({VARIABLE: text, "NCCL_SOCKET_IFNAME": "gone"}, nccl=False)


@pytest.mark.parametrize("text", ["eth", "=eth0", "^docker,lo", "ib0,gone", ""])
def test_nccl_takes_beginnings_and_exceptions(interfaces: None, text: str) -> None:
    check_named({"NCCL_SOCKET_IFNAME": text}, nccl=True)


@pytest.mark.parametrize("text", ["gone", "=eth", "^eth,ib,lo", "eth1"])
def test_what_leaves_nccl_no_interface_is_refused(interfaces: None, text: str) -> None:
    """It ends with an address of no family, or waits (NVIDIA/nccl#1837)."""
    with pytest.raises(SiteError, match=r"names or their beginnings, after = or \^, of eth0, ib0"):
        check_named({"NCCL_SOCKET_IFNAME": text}, nccl=True)
