"""The judgement of every recorded topology, derived by hand, and of faults that are put into them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import pytest

from chromium import BROWSER, NO_BROWSER, browser, check_page
from page_tables import check_block
from recorded_topologies import list_sources, load, with_path
from shardway.bench.topology import AdapterPlace, NodeTopology, PairPath, PcieLink, TopologyDevice
from shardway.bench.topology_page import render_page
from shardway.bench.topology_report import CopyRates, LinkFinding, TopologyReport, judge_topology, rate_pair
from shardway.bench.topology_text import render_facts, render_topology
from shardway.sites.load import load_site

Pair = tuple[int, int]


def across(first: Iterable[int], second: Iterable[int]) -> set[Pair]:
    return {(min(a, b), max(a, b)) for a in first for b in second}


LOW, HIGH = range(4), range(4, 8)


@dataclass(frozen=True)
class Expected:
    """What a person reads from a matrix: the slowest pairs with their path, the groups that are nearer, what the
    nearest path allows in GB/s (None: not known), and the pairs that are wrong, or uneven."""

    slowest: str = ""
    pairs: frozenset[Pair] = frozenset()
    groups: tuple[tuple[int, ...], ...] = ()
    rate: float | None = None
    wrong: frozenset[Pair] = frozenset()
    uneven: frozenset[Pair] = frozenset()


def expect(slowest: str = "", pairs: Iterable[Pair] = (), **others: object) -> Expected:
    return Expected(slowest, frozenset(pairs), **others)  # type: ignore[arg-type]


CUBE_APART = {(0, 4), (0, 5), (0, 6), (1, 4), (1, 5), (1, 7), (2, 4), (2, 6), (2, 7), (3, 5), (3, 6), (3, 7)}
TWO_OF_TWO = {"groups": ((0, 1), (2, 3))}
EXPECTED = {
    "a100-4-nvswitch": expect(rate=300),
    "a100-pcie-2": expect(rate=32),
    "a100-pcie-4-bridged": expect("SYS", across((0, 1), (2, 3)), **TWO_OF_TWO),
    "a6000-3": expect("NODE", {(0, 2), (1, 2)}, groups=((0, 1),), rate=56.248),
    "ac922-v100-4": expect("SYS", across((0, 1), (2, 3)), **TWO_OF_TWO),
    "amd-4-pcie": expect(),
    "b200-8": expect(rate=900),
    "b200-8-gpu2-without-nvlink": expect(
        "SYS",
        across((2,), HIGH),
        groups=((0, 1, 3, 4, 5, 6, 7),),
        rate=900,
        wrong=frozenset(across((2,), (0, 1, 3, 4, 5, 6, 7))),
    ),
    "della-a100-4": expect(),
    "dgx-a100-8": expect(rate=300),
    "dgx-h100-8": expect(rate=450),
    "gb200-4": expect(rate=900),
    "gpu-2-roce": expect(),
    "gpu-3-bridged": expect("NODE", {(0, 2), (1, 2)}, groups=((0, 1),)),
    "gpu-4-soc-2017": expect("SYS", across((0, 1), (2, 3)), **TWO_OF_TWO),
    "h100-4": expect(),
    "juwels-booster-4-pcie-only": expect(),
    "l40s-4": expect("SYS", across((0, 1), (2, 3)), rate=32, **TWO_OF_TWO),
    "mi210-4": expect(),
    "mi210-8-two-hives": expect("SYS", across(LOW, HIGH), groups=((0, 1, 2, 3), (4, 5, 6, 7))),
    "mi300a-4": expect(),
    "mi308x-8": expect(),
    "polaris-a100-4": expect(rate=100),
    "rtx-5-mixed": expect("SYS", across((0,), (1, 2, 3, 4)), groups=((1, 2, 3, 4),)),
    "rtx3090-2": expect(),
    "rtx3090-2-bridged": expect(rate=56.248),
    "rtx3090-2-sys": expect(),
    "rtx5090-2": expect(),
    "v100-4-ring": expect("SYS", {(0, 3), (1, 2)}, **TWO_OF_TWO, uneven=frozenset({(1, 3)})),
    "v100-8-cube-mesh": expect("SYS", CUBE_APART, groups=((0, 1, 2, 3), (4, 5, 6, 7)), rate=50),
    "v100-links-inactive": expect(),
}
NVLINK_WITH_PEERS = (
    "a100-4-nvswitch",
    "a100-pcie-4-bridged",
    "ac922-v100-4",
    "b200-8",
    "della-a100-4",
    "dgx-a100-8",
    "dgx-h100-8",
    "gb200-4",
    "h100-4",
    "polaris-a100-4",
    "v100-8-cube-mesh",
)


def of_level(report: TopologyReport, level: str) -> list[LinkFinding]:
    return [each for each in report.findings if each.level == level]


def pairs_of(report: TopologyReport, level: str) -> set[Pair]:
    return {pair for each in of_level(report, level) for pair in each.pairs}


def test_at_least_fifteen_machines_were_recorded() -> None:
    assert set(EXPECTED) == set(list_sources())
    assert len(EXPECTED) >= 15


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_slow_pairs_of_a_recorded_machine_are_named(name: str) -> None:
    node, expected = load(name), EXPECTED[name]
    report = judge_topology(node)
    found = report.slowest
    assert (found.label if found else "", set(found.pairs) if found else set()) == (expected.slowest, expected.pairs)
    assert (found.groups if found else ()) == expected.groups
    assert pairs_of(report, "wrong") == expected.wrong
    assert pairs_of(report, "uneven") == expected.uneven
    if node.pairs:
        pair, path = min(node.pairs.items(), key=lambda each: each[1].distance)
        limit = rate_pair(node, pair, path)
        assert limit is None if expected.rate is None else limit and limit.rate == pytest.approx(expected.rate * 1e9)
    shown = " ".join(render_topology(report).split())
    if found is None and node.pairs:
        assert "no pair is slower than another" in shown
    elif found is not None:
        assert f"slowest: GPU{min(expected.pairs)[0]}-GPU{min(expected.pairs)[1]}" in shown


def test_healthy_machines_get_no_complaint() -> None:
    ill = {"b200-8-gpu2-without-nvlink", "v100-4-ring", "v100-links-inactive"}
    for name in set(EXPECTED) - ill:
        report = judge_topology(load(name))
        assert of_level(report, "wrong") + of_level(report, "uneven") == [], name
        assert "no link is wrong" in render_topology(report)


def test_a_record_of_pcie_alone_is_no_missing_nvlink() -> None:
    report = judge_topology(load("juwels-booster-4-pcie-only"))
    assert "topo -mp, which leaves NVLink out" in only(report, "note").what
    assert [each.nearest for each in report.topology.adapters] == [("PIX", (index,)) for index in range(4)]


def test_a_device_without_nvlink_is_named_with_what_repairs_it() -> None:
    [found] = of_level(judge_topology(load("b200-8-gpu2-without-nvlink")), "wrong")
    assert found.what == "GPU2 has NODE and SYS to every other device, and 21 of 28 pairs have NV18"
    assert found.should == "NV18, 900 GB/s each way (NVLink 5 with NVSwitch)"
    assert found.devices == (2,)
    assert found.remedy.startswith("nvidia-smi nvlink -s -i 2 ")


def test_inactive_links_are_named() -> None:
    [found] = of_level(judge_topology(load("v100-links-inactive")), "wrong")
    assert found.what == "NVLinks 3, 5 of GPU3 inactive: 4 of 6 are active"
    assert "nvidia-smi nvlink -s -i 3" in found.remedy


# --- faults put into recorded machines


@pytest.mark.parametrize("name", NVLINK_WITH_PEERS)
def test_a_lost_nvlink_of_any_pair_is_named(name: str) -> None:
    node = load(name)
    for pair, path in node.pairs.items():
        if path.kind != "NV":
            continue
        left = replace(path, links=path.links - 1) if path.links > 1 else PairPath("SYS")
        report = judge_topology(with_path(node, *pair, left))
        assert report.bad_pairs == {pair}, pair
        [found] = [each for each in report.findings if each.pairs and each.level != "note"]
        assert found.remedy.startswith(f"nvidia-smi nvlink -s -i {pair[0]},{pair[1]} ")
        assert left.label in found.what


@pytest.mark.parametrize("name", [*NVLINK_WITH_PEERS, "mi210-4", "mi210-8-two-hives", "mi300a-4", "mi308x-8"])
def test_a_pair_that_lost_its_fast_link_is_named(name: str) -> None:
    node = load(name)
    for pair, path in node.pairs.items():
        if path.kind in ("NV", "XGMI"):
            report = judge_topology(with_path(node, *pair, PairPath("SYS")))
            assert report.bad_pairs == {pair}, pair
            assert report.slowest is not None
            assert pair in report.slowest.pairs


@pytest.mark.parametrize("name", ["l40s-4", "rtx-5-mixed", "gpu-4-soc-2017", "a6000-3", "gpu-3-bridged"])
def test_neighbours_that_meet_between_sockets_are_named(name: str) -> None:
    node = load(name)
    for pair in node.pairs:
        if node.device(pair[0]).place == node.device(pair[1]).place:
            report = judge_topology(with_path(node, *pair, PairPath("SYS")))
            assert report.bad_pairs == {pair}, pair
            assert report.slowest is not None
            assert pair in report.slowest.pairs


@pytest.mark.parametrize("name", ["dgx-a100-8", "dgx-h100-8", "h100-4", "b200-8"])
def test_an_adapter_in_the_wrong_slot_is_named_by_its_devices(name: str) -> None:
    node = load(name)
    for place, adapter in enumerate(node.adapters):
        kind, devices = adapter.nearest
        if kind not in ("PIX", "PXB"):
            continue
        moved = replace(adapter, paths=dict.fromkeys(adapter.paths, "SYS"))
        adapters = (*node.adapters[:place], moved, *node.adapters[place + 1 :])
        found = of_level(judge_topology(replace(node, adapters=adapters)), "uneven")
        assert {index for each in found for index in each.devices} == set(devices), adapter.name


def test_a_cube_of_single_links_is_no_fault_and_a_ring_may_be_one() -> None:
    cube = load("v100-8-cube-mesh")
    single = {pair: PairPath("NV", 1) if path.links else path for pair, path in cube.pairs.items()}
    names = tuple(replace(device, name="Tesla P100-SXM2-16GB") for device in cube.devices)
    report = judge_topology(replace(cube, devices=names, pairs=single))
    assert report.bad_pairs == frozenset()
    assert report.slowest is not None
    assert set(report.slowest.pairs) == CUBE_APART
    mesh = load("h100-4")
    ring = with_path(with_path(mesh, 0, 2, PairPath("SYS")), 1, 3, PairPath("SYS"))
    assert judge_topology(ring).bad_pairs == {(0, 2), (1, 3)}


@pytest.mark.parametrize("lost", [(1,), (1, 6), (1, 2, 6)])
def test_devices_that_lost_all_their_links_are_named(lost: tuple[int, ...]) -> None:
    node = load("dgx-h100-8")
    pairs = {p: PairPath("SYS") if set(p) & set(lost) else x for p, x in node.pairs.items()}
    found = of_level(judge_topology(replace(node, pairs=pairs)), "wrong")
    assert [each.devices for each in found] == [(index,) for index in lost]


def test_links_that_all_devices_lack_are_found_by_the_catalogue() -> None:
    node = load("dgx-a100-8")
    less = replace(node, pairs={pair: PairPath("NV", 10) for pair in node.pairs})
    [found] = of_level(judge_topology(less), "wrong")
    assert found.what == "every pair has NV10, and these devices have 12 NVLinks by the catalogue"
    assert found.should.startswith("NV12, 300 GB/s each way")
    none = replace(node, pairs={pair: PairPath("NODE") for pair in node.pairs})
    [found] = of_level(judge_topology(none), "wrong")
    assert "no pair has NVLink" in found.what
    assert found.remedy.startswith("systemctl status nvidia-fabricmanager")


# --- single rules


def node_of(*devices: TopologyDevice, path: str = "NODE", **others: object) -> NodeTopology:
    pairs = {pair: PairPath(path) for pair in combinations([device.index for device in devices], 2)}
    return NodeTopology("node", devices, pairs, **others)  # type: ignore[arg-type]


GEN4, GEN5 = PcieLink(4, 16), PcieLink(5, 16)
CARDS = [TopologyDevice(index, "NVIDIA L40S", f"0000:0{index}:00.0", 0, "0-7", GEN4, GEN4) for index in range(4)]


def only(report: TopologyReport, level: str) -> LinkFinding:
    [found] = of_level(report, level)
    return found


def test_a_narrow_pcie_link_is_wrong_and_an_idle_one_is_not() -> None:
    narrow = replace(CARDS[2], pcie=PcieLink(4, 8))
    found = only(judge_topology(node_of(*CARDS[:2], narrow, CARDS[3])), "wrong")
    assert found.what == "GPU2 runs at PCIe 4 x8, its slot and the device allow PCIe 4 x16"
    assert found.should == "PCIe 4 x16, 31.5 GB/s each way"
    assert "lspci -vv -s 0000:02:00.0" in found.remedy
    idle = [replace(card, pcie=PcieLink(1, 16)) for card in CARDS]
    report = judge_topology(node_of(*idle))
    assert of_level(report, "wrong") == []
    assert "look again under load" in only(report, "note").what
    loaded = replace(idle[1], busy=True)
    assert only(judge_topology(node_of(idle[0], loaded, *idle[2:])), "wrong").devices == (1,)


def test_a_slot_of_an_older_generation_is_named() -> None:
    cards = [replace(card, pcie=GEN5, pcie_most=GEN5) for card in CARDS]
    slow = replace(cards[3], pcie=PcieLink(3, 16), pcie_most=PcieLink(3, 16))
    report = judge_topology(node_of(*cards[:3], slow))
    assert only(report, "wrong").what == "GPU3 is in a slot of PCIe 3 x16, 3 of its kind in one of PCIe 5 x16"
    limit = rate_pair(report.topology, (0, 3), PairPath("NODE"))
    assert limit is not None
    assert limit.rate == pytest.approx(15.754e9, rel=1e-4)


def test_peer_access_that_is_off() -> None:
    node = node_of(*CARDS)
    off = with_path(node, 1, 2, PairPath("NODE", p2p="CNS"))
    found = only(judge_topology(off), "wrong")
    assert found.pairs == ((1, 2),)
    assert "chipset not supported" in found.what
    assert "ACSCtl" in found.remedy
    by_option = with_path(node, 1, 2, PairPath("NODE", p2p="DR"))
    assert "RmForceDisableP2P" in only(judge_topology(by_option), "wrong").remedy
    bridge = load("a6000-3")
    mixed = replace(bridge, pairs={p: replace(x, p2p="OK" if x.links else "TNS") for p, x in bridge.pairs.items()})
    assert of_level(judge_topology(mixed), "wrong") == []
    assert "topology not supported" in only(judge_topology(mixed), "note").what


def test_the_state_of_the_fabric_lost_devices_and_slices() -> None:
    waits = [replace(card, fabric="in progress") for card in CARDS[:1]]
    assert "nvidia-fabricmanager" in only(judge_topology(node_of(*waits)), "wrong").remedy
    lost = only(judge_topology(node_of(*CARDS, hidden=("0000:81:00.0",))), "uneven")
    assert lost.what == "1 device on the PCI bus that the driver does not list: 0000:81:00.0"
    cut = only(judge_topology(node_of(replace(CARDS[0], slices=2))), "note")
    assert cut.what == "GPU0 is cut into 2 slices (MIG), which do not reach other devices"


def test_ports_that_are_down_or_slow() -> None:
    ports = [AdapterPlace(f"mlx5_{index}", 0, "ACTIVE", "InfiniBand", 200.0) for index in range(4)]
    slow = replace(ports[2], rate_gbit_s=100.0)
    found = only(judge_topology(node_of(*CARDS, adapters=(*ports[:2], slow, ports[3]))), "wrong")
    assert found.what == "mlx5_2 runs at 100 Gb/s, the others at 200"
    assert found.should == "200 Gb/s (25 GB/s) each way"
    down = node_of(*CARDS, adapters=(*ports[:3], replace(ports[3], state="DOWN", rate_gbit_s=0.0)))
    note = only(judge_topology(down), "note")
    assert note.what == "mlx5_3: down, 3 others are active"
    assert note.remedy.endswith("export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2")
    card = AdapterPlace("eno1", 0, "DOWN", "Ethernet", has_rdma=False)
    assert judge_topology(node_of(*CARDS, adapters=(*ports, card))).findings == ()
    short = of_level(judge_topology(down, load_site("juwels-booster")), "wrong")
    assert any("and juwels-booster has 4 a node" in each.what for each in short)


def test_a_site_says_how_many_devices_and_which_link() -> None:
    site = load_site("juwels-booster")
    node = load("polaris-a100-4")
    assert of_level(judge_topology(node, site), "wrong") == []
    limit = rate_pair(node, (0, 1), node.pairs[0, 1], site)
    assert limit is not None
    assert (limit.rate, limit.name) == (100e9, "NVLink 3, four GPUs each to each")
    three = replace(node, devices=node.devices[:3], pairs={p: x for p, x in node.pairs.items() if 3 not in p})
    assert only(judge_topology(three, site), "uneven").what == "3 devices here, and juwels-booster has 4 a node"
    other = judge_topology(load("l40s-4"), site)
    assert any("is this one of its nodes?" in each.what for each in of_level(other, "note"))


def test_a_process_at_the_wrong_socket_is_named() -> None:
    devices = [replace(card, numa=card.index // 2) for card in CARDS]
    numa = {0: "0-7", 1: "8-15"}
    away = node_of(*devices, numa=numa, bound=frozenset(range(8)), own=3)
    found = only(judge_topology(away), "wrong")
    assert found.what == "this process may use CPUs of NUMA 0, and GPU3 is at NUMA 1"
    assert found.remedy.startswith("numactl --cpunodebind=1 --membind=1 ...; srun --cpu-bind=map_ldom:0,0,1,1 ")
    assert judge_topology(replace(away, own=1)).findings == ()
    assert judge_topology(replace(away, bound=None)).findings == ()
    outside = only(judge_topology(replace(away, own=None)), "note")
    assert outside.devices == (2, 3)


def test_measured_copies_are_compared_with_what_the_path_allows() -> None:
    node = load("dgx-a100-8")
    both = [(a, b) for a in range(8) for b in range(8) if a != b]
    copies = CopyRates(dict.fromkeys(both, 270e9), dict.fromkeys(both, 5e-6), dict.fromkeys(range(8), 25e9))
    assert of_level(judge_topology(node, copies=copies), "wrong") == []
    slow = replace(copies, pairs={**copies.pairs, (5, 2): 30e9}, from_host={**copies.from_host, 4: 6e9})
    found = of_level(judge_topology(node, copies=slow), "wrong")
    assert [each.what for each in found] == [
        "GPU5 to GPU2 copies 30 GB/s over NV12, the median of its kind is 270",
        "the host copies 6 GB/s to GPU4, the median is 25",
    ]
    assert found[0].should == "300 GB/s each way (NVLink 3 with NVSwitch)"
    assert found[0].pairs == ((2, 5),)
    rows = [line.split() for line in render_topology(judge_topology(node, copies=slow)).splitlines()]
    assert ["GPU5", "270", "270", "30", "270", "270", "X", "270", "270", "5.0"] in rows
    assert ["host", "25", "25", "25", "25", "6", "25", "25", "25"] in rows


# --- how it is shown


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_nothing_is_wider_than_a_terminal(name: str) -> None:
    report = judge_topology(load(name))
    for plain in (False, True):
        lines = render_topology(report, plain=plain).splitlines()
        assert max(map(len, lines)) <= 80
        assert not plain or all(line.isascii() for line in lines)


def test_sixteen_devices_fit_with_short_labels() -> None:
    devices = [TopologyDevice(index, "NVIDIA A100-SXM4-80GB", numa=index // 8) for index in range(16)]
    pairs = {pair: PairPath("NV", 12) for pair in combinations(range(16), 2)}
    pairs[3, 9] = PairPath("SYS")
    lines = render_topology(judge_topology(NodeTopology("node", tuple(devices), pairs))).splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line.split() for line in lines if re.match(r"GPU3 +12", line))
    assert (row[4], row[10], row[11]) == ("X", "S!", "12")


def test_the_example_of_the_page(request: pytest.FixtureRequest) -> None:
    node = replace(load("b200-8-gpu2-without-nvlink"), title="topo.txt")
    check_block(request, "bench-topology.md", "example", "text", render_topology(judge_topology(node)).splitlines())


def test_facts_hold_what_is_printed() -> None:
    facts = json.loads(json.dumps(render_facts(judge_topology(load("b200-8-gpu2-without-nvlink")))))
    assert (facts["format"], len(facts["devices"]), len(facts["pairs"])) == (1, 8, 28)
    assert [each["devices"] for each in facts["pairs"] if each["suspect"]] == sorted(
        [list(pair) for pair in EXPECTED["b200-8-gpu2-without-nvlink"].wrong]
    )
    assert facts["pairs"][0]["should_be_bytes_per_s"] == 900e9
    assert facts["findings"][0]["level"] == "wrong"
    assert facts["slowest"]["pairs"] == [[2, 4], [2, 5], [2, 6], [2, 7]]
    assert facts["verdict"][-1] == "keep tensor parallel within GPU0-GPU1, GPU3-GPU7"


def test_the_page_has_the_verdict_the_picture_and_the_matrix() -> None:
    page = render_page(judge_topology(load("b200-8-gpu2-without-nvlink")))
    assert 'class="verdict bad"' in page
    assert "GPU2 has NODE and SYS to every other device" in page
    drawn = re.findall(r'<line [^>]*class="(\w+)"/>', page)
    assert (drawn.count("curve"), drawn.count("physical")) == (21, 7)
    assert page.count("NODE !") == 6
    assert "http" not in page.replace("http-equiv", "")
    healthy = render_page(judge_topology(load("v100-8-cube-mesh")))
    assert 'class="verdict good"' in healthy
    assert re.findall(r'<line [^>]*class="(\w+)"/>', healthy).count("ideal") == 12


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason=NO_BROWSER)
def test_the_page_is_sound_at_every_width_in_both_themes(tmp_path: Path) -> None:
    path = tmp_path / "links.html"
    path.write_text(render_page(judge_topology(load("b200-8-gpu2-without-nvlink"))), encoding="utf-8")
    with browser() as opened:
        check_page(opened, path)
