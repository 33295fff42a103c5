"""Recorded text of every driver generation and form becomes the node that it describes."""

from __future__ import annotations

import pytest

from recorded_topologies import FOLDER, list_sources, load, read_text
from shardway.bench.topology import NodeTopology, PairPath, PcieLink, parse_cpus, read_recorded
from shardway.bench.topology_report import judge_topology
from shardway.bench.topology_text import render_topology


def read(text: str, device: str = "") -> NodeTopology:
    [node] = read_recorded({"file": text}, device)
    return node


def labels(node: NodeTopology) -> dict[tuple[int, int], str]:
    return {pair: path.label for pair, path in node.pairs.items()}


def test_every_recorded_file_has_a_source_and_is_read() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(list_sources())
    for name in list_sources():
        node = load(name)
        count = len(node.devices)
        assert count > 0, name
        assert len(node.pairs) == count * (count - 1) // 2, name
        assert bool(node.notes) == node.pcie_alone == (name == "juwels-booster-4-pcie-only"), name


def test_a_matrix_with_tabs_adapters_and_affinity() -> None:
    node = load("v100-8-cube-mesh")
    assert labels(node)[0, 7] == "NV2"
    assert labels(node)[3, 4] == "NV1"
    assert labels(node)[0, 4] == "SYS"
    assert [device.numa for device in node.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert node.device(5).cpus == "24-47,72-95"
    assert node.device(5).name == "Tesla V100-SXM2-32GB"
    assert [each.name for each in node.adapters] == ["mlx5_0", "mlx5_1"]
    assert node.adapters[0].nearest == ("PIX", (2, 3))
    assert node.adapters[0].paths[0] == "NODE"


def test_names_of_adapters_are_those_of_the_legend() -> None:
    assert [each.name for each in load("gpu-2-roce").adapters] == [
        "rocep4s0f0",
        "rocep4s0f1",
        "rocep137s0f0",
        "rocep137s0f1",
    ]


def test_a_header_with_spaces_for_tabs() -> None:
    node = load("polaris-a100-4")
    assert set(labels(node).values()) == {"NV4"}
    assert [device.numa for device in node.devices] == [3, 2, 1, 0]
    assert node.adapters[1].nearest == ("PHB", (1,))


def test_the_name_of_sys_before_2018_and_cpus_without_numa() -> None:
    node = load("gpu-4-soc-2017")
    assert labels(node) == {(0, 1): "PHB", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS", (2, 3): "PHB"}
    assert [device.numa for device in node.devices] == [None] * 4
    assert node.device(3).place == "CPUs 10-19,30-39"


def test_numa_columns_that_say_nothing_or_several_nodes() -> None:
    node = load("rtx3090-2-sys")
    assert [device.numa for device in node.devices] == [None, 1]
    grace = load("gb200-4")
    assert [device.numa for device in grace.devices] == [0, 0, 1, None]  # the row of GPU3 is cut
    spread = read("\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\tX\tNV4\t0,64\t0-3\nGPU1\tNV4\tX\t0,64\t0-3\n")
    assert [device.numa for device in spread.devices] == [None, None]
    no_cpus = read(
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\tX\tNV4\t0\t0\t\tN/A\nGPU1\tNV4\tX\t\t1\t\tN/A\n"
    )
    assert [(device.cpus, device.numa) for device in no_cpus.devices] == [("0", 0), ("", 1)]


def test_cells_that_lost_their_tab() -> None:
    node = read(
        "\tGPU0\tGPU1\tNIC0\tNIC1NIC2\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\tX\tNV18\tSYSSYS\tPIX\t0-3\t0\nGPU1\tNV18\tX\tPIXNODE\tNODE\t4-7\t1\n"
    )
    assert [dict(each.paths) for each in node.adapters] == [
        {0: "SYS", 1: "PIX"},
        {0: "SYS", 1: "NODE"},
        {0: "PIX", 1: "NODE"},
    ]
    assert [device.numa for device in node.devices] == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("GPU0", "\x1b[4mGPU0\x1b[0m"),
        lambda text: text.replace("\t", "\\t"),
        lambda text: "\n".join(f"# {line}" for line in text.splitlines()),
        lambda text: "\n".join(f"    {line}" for line in text.splitlines()),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "$ nvidia-smi topo -m\n" + text + "\nLegend:\n\n  X    = Self\n  SYS  = between NUMA nodes\n",
    ],
)
def test_colours_marks_and_text_around_a_matrix_change_nothing(change: object) -> None:
    text = read_text("ac922-v100-4")
    assert callable(change)
    changed, plain = read(change(text)), read(text)
    assert (changed.devices, changed.pairs, changed.adapters) == (plain.devices, plain.pairs, plain.adapters)


def test_adapters_may_stand_before_the_devices() -> None:
    node = read(
        "\tmlx5_0\tGPU0\tGPU1\tCPU Affinity\nmlx5_0\tX\tPIX\tSYS\nGPU0\tPIX\tX\tSYS\t0-3\nGPU1\tSYS\tSYS\tX\t4-7\n"
    )
    assert labels(node) == {(0, 1): "SYS"}
    assert node.adapters[0].paths == {0: "PIX", 1: "SYS"}


def test_a_row_that_is_cut_is_completed_by_the_others() -> None:
    node = load("b200-8-gpu2-without-nvlink")
    assert labels(node)[6, 7] == "NV18"
    assert labels(node)[2, 7] == "SYS"
    assert {each.name: each.paths.get(6) for each in node.adapters}["NIC11"] is None


def test_rows_that_contradict_each_other_are_noted_and_the_farther_path_holds() -> None:
    node = read("\tGPU0\tGPU1\nGPU0\tX\tNV12\nGPU1\tNV10\tX\n")
    assert labels(node) == {(0, 1): "NV10"}
    assert node.notes == ("GPU0 and GPU1: one row has NV12, the other NV10",)


def test_states_of_links_and_names() -> None:
    [device] = load("v100-links-inactive").devices
    assert (device.index, device.name) == (3, "Tesla V100-SXM2-32GB")
    assert (device.nvlinks, device.inactive, device.link_rate) == (4, (3, 5), 25.781e9)
    assert [device.nvlinks for device in load("a6000-3").devices] == [4, 4, 0]
    assert [device.name for device in load("gb200-4").devices] == ["NVIDIA GB200"] * 4


def test_the_matrix_of_peer_access() -> None:
    assert load("rtx5090-2").pairs == {(0, 1): PairPath("PHB", p2p="GNS")}
    assert load("rtx3090-2").pairs == {(0, 1): PairPath("NODE", p2p="NS")}


def test_slices_are_counted() -> None:
    node = read(
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\n  MIG 3g.20gb     Device  0: (UUID: MIG-1)\n"
        "  MIG 3g.20gb     Device  1: (UUID: MIG-2)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)\n"
    )
    assert [device.slices for device in node.devices] == [2, 0]


def test_one_device_is_a_node_without_pairs() -> None:
    node = read("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-19\t0\t\tN/A\n")
    assert [device.numa for device in node.devices] == [0]
    assert node.pairs == {}


def test_amd_by_link_hops_and_weight() -> None:
    node = load("mi210-8-two-hives")
    assert {labels(node)[0, 3], labels(node)[4, 7]} == {"XGMI"}
    assert {labels(node)[0, 4], labels(node)[3, 7]} == {"SYS"}  # three hops: over both sockets
    assert [device.numa for device in node.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    text = read_text("mi300a-4")
    assert (
        labels(
            read(
                text.replace(
                    "GPU0   0            15           15           15",
                    "GPU0   0            15           15           30",
                ).replace("GPU3   15  ", "GPU3   30  ")
            )
        )[0, 3]
        == "XGMI2"
    )
    assert labels(read(read_text("amd-4-pcie").replace("3  ", "2  ")))[0, 1] == "NODE"
    named = text + "\nGPU[0]\t\t: Card Series:\t\tAMD Instinct MI300A\n"
    assert read(named).device(0).name == "AMD Instinct MI300A"


def test_several_files_of_one_node_and_of_two() -> None:
    matrix, states = read_text("polaris-a100-4"), read_text("a100-4-nvswitch").partition("GPU 0:")
    [node] = read_recorded({"topo": matrix, "links": states[1] + states[2]})
    assert node.title == "topo + links"
    assert node.device(3).nvlinks == 12
    assert labels(node)[0, 1] == "NV4"
    two = read_recorded({"first": matrix, "second": read_text("h100-4")})
    assert [each.title for each in two] == ["first", "second"]
    [doubled] = read_recorded({"both": matrix + "\n" + read_text("h100-4")})
    assert set(labels(doubled).values()) == {"NV4"}
    assert doubled.notes == ("both has a second matrix of paths, which is left out",)


@pytest.mark.parametrize("text", ["", "no topology\n", "GPU0 is fast\n", "a: b\n" * 100, "\x00\x01GPU"])
def test_a_text_without_topology_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="file has no topology"):
        read(text)


@pytest.mark.parametrize("name", sorted(list_sources()))
def test_a_text_that_is_cut_anywhere_is_read_or_refused(name: str) -> None:
    text, refused = read_text(name), 0
    for end in range(0, len(text), max(1, len(text) // 60)):
        try:
            node = read(text[:end])
        except ValueError:
            refused += 1
            continue
        report = judge_topology(node)
        assert set(report.topology.pairs) <= set(load(name).pairs)
        assert render_topology(report)
    assert refused > 0


def test_pcie_rates_and_cpu_lists() -> None:
    assert PcieLink(3, 16).bytes_per_s == pytest.approx(15.754e9, rel=1e-4)
    assert PcieLink(2, 8).bytes_per_s == pytest.approx(4e9)
    assert PcieLink(9, 16).bytes_per_s is None
    assert str(PcieLink(4, 8)) == "PCIe 4 x8"
    assert parse_cpus("0-2,8") == {0, 1, 2, 8}
    assert parse_cpus("none") == frozenset()
