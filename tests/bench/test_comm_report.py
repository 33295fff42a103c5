"""What is said of a measurement: the table, the fits beside what links should reach, the verdict, and the page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from comm_reports import H100, SHARES, make_report, slow_down
from page_tables import check_block
from shardway.bench.bandwidth import BUS_FACTORS
from shardway.bench.comm_report import (
    CommReport,
    KnownLinks,
    LinkLimit,
    RankLink,
    WrongData,
    find_known_links,
    list_verdict,
    render_facts,
    render_report,
)
from shardway.hardware.catalogue import load_accelerators, load_links
from shardway.sites.load import load_site


def test_the_page_shows_what_is_printed(request: pytest.FixtureRequest) -> None:
    report = slow_down(make_report(2, 4, ("all_reduce", "all_gather"), (2**10, 2**20, 2**30)), 5, 6, 9.0)
    lines = render_report(report, find_known_links(report)).splitlines()
    check_block(request, "bench-comm.md", "example", "text", [line.rstrip() for line in lines])


def test_a_fit_gives_back_latency_and_share_of_the_link() -> None:
    report = make_report(2, 4, tuple(BUS_FACTORS), tuple(4**power for power in range(5, 15)))
    known = find_known_links(report)
    facts = render_facts(report, known)
    assert len(facts["fits"]) == 3 * 7
    for fit in facts["fits"]:
        assert fit["latency_s"] == pytest.approx(20e-6, rel=1e-3)
        assert fit["bus_bytes_per_s"] == pytest.approx(SHARES[fit["scope"]] * fit["should_be_bytes_per_s"], rel=1e-3)
        assert fit["left_out_error"] < 1e-3
    assert json.loads(json.dumps(facts)) == facts


# --- what it should be


def test_links_inside_a_node() -> None:
    switched = KnownLinks(8, 1, "NVLink 4", 450e9, 450e9)
    assert switched.limit("all", "all_reduce", 8) == LinkLimit(450e9, "NVLink 4")
    assert switched.limit("all", "send_recv", 8) == LinkLimit(450e9, "NVLink 4")
    meshed = KnownLinks(4, 2, "NVLink 3", 300e9, 100e9, "HDR", 25e9, 25e9)
    assert meshed.limit("within", "all_gather", 4) == LinkLimit(300e9, "NVLink 3")
    assert meshed.limit("within", "all_gather", 2) == LinkLimit(100e9, "NVLink 3")
    assert meshed.pair_limit("within") == LinkLimit(100e9, "NVLink 3")
    assert KnownLinks(4, 1).limit("all", "all_reduce", 4) is None


def test_links_between_nodes() -> None:
    known = KnownLinks(4, 2, "NVLink 3", 300e9, 100e9, "HDR", 25e9, 20e9)
    assert known.limit("between", "all_reduce", 2) == LinkLimit(25e9, "HDR")
    assert known.limit("all", "all_reduce", 8) == LinkLimit(100e9, "HDR")  # by all four adapters of a node
    assert known.limit("all", "all_to_all", 8) == LinkLimit(25e9 * 7 / 4, "HDR")  # 4 of the 7 others are elsewhere
    assert known.limit("all", "send_recv", 8) == LinkLimit(20e9, "HDR")
    assert known.pair_limit("between") == LinkLimit(25e9, "HDR")
    fast = replace(known, network=200e9)
    assert fast.limit("all", "all_reduce", 8) == LinkLimit(300e9, "NVLink 3")
    assert KnownLinks(1, 2, "NVLink 3", 300e9, 100e9, "HDR", 25e9, 25e9).limit("all", "reduce", 2) == LinkLimit(
        25e9, "HDR"
    )
    assert replace(known, network=None).limit("all", "all_reduce", 8) is None


def test_known_links_are_those_of_the_part_and_of_the_ports() -> None:
    report = make_report(2, 4, ("reduce",), (1024,))
    known = find_known_links(report)
    link = load_links()[load_accelerators()["h100-sxm5-80gb"].link or ""]
    assert (known.inside, known.whole, known.peer) == (
        link.name,
        link.bandwidth_bytes_per_s,
        link.peer_bandwidth_bytes_per_s,
    )
    assert (known.network, known.adapter) == (50e9, 50e9)
    one_slower = (*report.links[1:], RankLink(H100, 25e9, 6.25e9))
    assert find_known_links(replace(report, links=one_slower)).network == 6.25e9
    other = (*report.links[1:], RankLink("NVIDIA A100-SXM4-40GB", 50e9, 50e9))
    assert find_known_links(replace(report, links=other)).whole is None
    assert find_known_links(replace(report, backend="gloo")) == KnownLinks(4, 2)


def test_a_site_says_which_links_it_has() -> None:
    report = make_report(2, 4, ("reduce",), (1024,))
    site = load_site("leonardo-booster")
    known = find_known_links(report, site)
    outside = load_links()[site.network.link or ""]
    adapters = site.network.adapters_per_node
    assert outside.bandwidth_bytes_per_s is not None
    assert adapters is not None
    assert known.network == outside.bandwidth_bytes_per_s * adapters / 4
    assert (known.outside, known.adapter) == (outside.name, outside.bandwidth_bytes_per_s)
    inside = load_links()[site.node.link or load_accelerators()[str(site.node.accelerator)].link or ""]
    if site.node.link:
        assert known.inside == inside.name


# --- the verdict


def verdict(report: CommReport) -> list[str]:
    return list_verdict(report, find_known_links(report))


def test_little_is_said_to_be_little() -> None:
    report = make_report(1, 4, ("all_reduce",), (2**30,))
    report.times[:] = [replace(each, median_s=each.median_s * 3) for each in report.times if each.scope == "all"]
    lines = verdict(report)
    assert "all ranks: 29% (all_reduce) of what the links should reach (NVLink 4 with NVSwitch)" in lines
    assert "this is little: all ranks, all_reduce reaches 132 GB/s of 450 (NVLink 4 with NVSwitch)" in lines


def test_what_is_not_known_is_said() -> None:
    report = replace(make_report(1, 4, ("all_reduce",), (2**20,)), links=(RankLink("a new part", 0.0, 0.0),) * 4)
    report.times[:] = [each for each in report.times if each.scope == "all"]
    [line] = [line for line in verdict(report) if "n/a" in line]
    assert line == (
        "all ranks: what should be reached is n/a (the catalogue does not have these links; --site names a profile "
        "that does)"
    )
    assert render_facts(report, find_known_links(report))["fits"][0]["should_be_bytes_per_s"] is None


@pytest.mark.parametrize(("first", "second"), [(0, 1), (2, 3), (5, 7), (0, 4), (3, 7), (1, 9), (6, 10)])
def test_the_slow_pair_is_named_with_its_hosts(first: int, second: int) -> None:
    report = slow_down(make_report(3, 4, ("reduce",), (1024,)), first, second, 5.0)
    [line] = [line for line in verdict(report) if line.startswith("slow")]
    hosts = [f"node{rank // 4 + 1}" for rank in (first, second)]
    if hosts[0] == hosts[1]:
        assert line.startswith(f"slow pair: ranks {first} and {second} ({hosts[0]}) at 70 GB/s each way, 5.0 times")
        assert line.endswith("16% of 450 (NVLink 4 with NVSwitch)")
    else:
        assert line.startswith(f"slow pair: ranks {first} ({hosts[0]}) and {second} ({hosts[1]}) at 8.8 GB/s each way")


def test_a_pair_that_is_slow_among_all_alone_is_not_named() -> None:
    report = slow_down(make_report(1, 4, ("reduce",), (1024,)), 0, 1, 5.0)
    calm = replace(report, alone=[report.alone[0], replace(report.alone[1], seconds=report.alone[0].seconds)])
    assert not any(line.startswith("slow") for line in verdict(calm))
    assert any("none is slow (over 1.5 times that, also when measured alone)" in line for line in verdict(calm))


def test_a_rank_is_named_where_all_its_pairs_are_slow() -> None:
    report = make_report(1, 8, ("reduce",), (1024,))
    report.pairs[:] = [replace(p, seconds=p.seconds * 4) if 3 in (p.first, p.second) else p for p in report.pairs]
    usual = next(pair for pair in report.pairs if 3 not in (pair.first, pair.second))
    report.alone[:] = [usual, *(pair for pair in report.pairs if 3 in (pair.first, pair.second))]
    lines = [line for line in verdict(report) if line.startswith("slow")]
    assert lines == ["slow: rank 3 (node1) with every rank that it was paired with"]


def test_wrong_data_stand_first_and_in_the_table() -> None:
    report = make_report(1, 2, ("reduce",), (1024, 4096))
    report.times[:] = [each for each in report.times if each.scope == "all"]
    report.wrong.append(WrongData("all", "reduce", 4096, 0, "3 wrong, the first is element 7: 1 and not 2"))
    lines = verdict(report)
    assert lines[0] == "reduce of 4KiB gave rank 0 (node1) wrong data: 3 wrong, the first is element 7: 1 and not 2"
    assert not any("were right" in line for line in lines)
    shown = render_report(report, find_known_links(report)).splitlines()
    assert [line.split()[-1] for line in shown if line.startswith("reduce ")][:2] == ["right", "WRONG"]
