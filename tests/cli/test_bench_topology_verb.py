"""`shardway bench topology`: what it prints and writes of recorded files and of this machine, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from command_line import Ended, Shardway

from recorded_topologies import FOLDER
from shardway.bench import topology_machine
from shardway.bench.topology import NodeTopology
from shardway.cli import bench_topology

pytestmark = pytest.mark.usefixtures("warm_starts")

BROKEN = str(FOLDER / "b200-8-gpu2-without-nvlink.txt")


def refused(ended: Ended, *parts: str) -> None:
    assert (ended.code, ended.out) == (2, ""), ended
    for part in parts:
        assert part in ended.err, ended.err


def test_a_recorded_file_becomes_a_report_a_page_and_facts(shardway: Shardway, tmp_path: Path) -> None:
    words = ("--device", "NVIDIA B200", "--html", "links.html", "--json", "links.json")
    ended = shardway("bench", "topology", "--from", BROKEN, *words)
    assert (ended.code, ended.err) == (0, ""), ended
    assert "wrong: GPU2 has NODE and SYS to every other device" in ended.out
    assert ended.out.endswith("wrote links.html\n")
    assert "GPU2 has NODE" in (tmp_path / "links.html").read_text()
    facts = json.loads((tmp_path / "links.json").read_text())
    assert (facts["format"], facts["devices"][0]["name"]) == (1, "NVIDIA B200")
    assert facts["pairs"][0]["should_be_bytes_per_s"] == 900e9


def test_facts_alone_and_several_nodes(shardway: Shardway) -> None:
    alone = shardway("bench", "topology", "--from", BROKEN, "--json", "-")
    assert json.loads(alone.out)["node"] == BROKEN
    both = ("--from", BROKEN, "--from", str(FOLDER / "h100-4.txt"))
    facts = json.loads(shardway("bench", "topology", *both, "--json", "-").out)
    assert [len(each["devices"]) for each in facts["nodes"]] == [8, 4]
    refused(shardway("bench", "topology", *both, "--html", "x.html"), "2 of the files have a matrix")


def test_a_pipe_is_read_and_plain_is_ascii(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((FOLDER / "l40s-4.txt").read_bytes())))
    ended = shardway("bench", "topology", "--from", "-", "--plain")
    assert ended.code == 0, ended
    assert ended.out.isascii()
    assert "`- NODE to GPU2-GPU3: mlx5_0 mlx5_1" in ended.out


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_a_file_from_windows_is_read(shardway: Shardway, tmp_path: Path, encoding: str) -> None:
    text = Path(BROKEN).read_text()
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "mail.txt").write_bytes((mark + text).replace("\n", "\r\n").encode(encoding))
    facts = [shardway("bench", "topology", "--from", each, "--json", "-").out for each in (BROKEN, "mail.txt")]
    expected, found = map(json.loads, facts)
    assert {**found, "node": BROKEN} == expected


def test_a_pipe_without_a_topology_is_refused(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_topology, "_MOST_BYTES", 1000)
    for piped, what in ((b"", "is empty"), (b"\xff\xfe\xfd" * 90, "has no topology"), (b"x" * 2000, "has more than")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        refused(shardway("bench", "topology", "--from", "-"), f"stdin (--from): {what}", "to do: nvidia-smi topo -m")


def test_a_device_that_is_not_known_is_named(shardway: Shardway) -> None:
    for words, why in (
        ((), "no file names the devices: --device takes what nvidia-smi -L prints"),
        (("--device", "H100"), "the catalogue has no device that its driver names H100"),
    ):
        ended = shardway("bench", "topology", "--from", BROKEN, *words)
        assert f"what links should reach is n/a: {why}" in " ".join(ended.out.split())
    assert "n/a:" not in shardway("bench", "topology", "--from", BROKEN, "--site", "dgx-slurm").out


def test_a_file_that_is_read_or_written_already_is_not_written(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(BROKEN).read_text()
    (tmp_path / "topo.txt").write_text(text)
    read = ("bench", "topology", "--from", "topo.txt")
    refused(shardway(*read, "--json", "./topo.txt"), "--json (command line): ./topo.txt is also the file of --from")
    refused(shardway(*read, "--json", "x", "--html", "x"), "--html (command line): x is also the file of --json")
    refused(shardway(*read, "--html", "-"), '--html (command line): "-" is no file')
    refused(shardway(*read, "--html", ""), '--html (command line): "" is no file')
    monkeypatch.setattr(os, "access", lambda *words: False)
    refused(shardway(*read, "--json", "x"), "--json (command line): the folder . cannot be written", "or -")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir() if path.is_file()] == [("topo.txt", text)]


def test_files_without_topology_are_refused_all_at_once(shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "notes.txt").write_text("GPU0 is fast\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    words = [word for name in ("gone.txt", "empty.txt", "notes.txt", "binary", ".") for word in ("--from", name)]
    refused(
        shardway("bench", "topology", *words),
        "5 problems in --from",
        "gone.txt (--from): No such file or directory",
        "empty.txt (--from): is empty",
        "notes.txt (--from): has no topology\n      to do: nvidia-smi topo -m > FILE",
        "binary (--from): has no topology",
        ". (--from): Is a directory",
    )


def test_an_unreadable_and_a_huge_file_are_refused(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "huge.txt").write_text("x" * 2000)
    monkeypatch.setattr(bench_topology, "_MOST_BYTES", 1000)
    refused(shardway("bench", "topology", "--from", "huge.txt"), "has more than 1,000 bytes")

    def denied(name: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bench_topology, "_read_text", denied)
    refused(shardway("bench", "topology", "--from", BROKEN), "(--from): Permission denied")


def test_options_that_do_not_go_together_are_refused(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        shardway("bench", "topology", "--from", BROKEN, "--measure", "--html", "gone/x.html", "--json", "."),
        "3 problems in the command line",
        "--html (command line): the folder gone does not exist",
        "--json (command line): . is a folder",
        "--measure (command line): measures this machine, and --from names another",
    )
    refused(shardway("bench", "topology", "--device", "NVIDIA L40S"), "--device (command line): is for recorded files")
    refused(shardway("bench", "topology", "--from", BROKEN, "--site", "nowhere"), "nowhere")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(shardway("bench", "topology", "--measure"), "sees no CUDA device here", "to do: leave out --measure")


def test_a_machine_without_devices_says_what_it_has(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("state", "4: ACTIVE"), ("rate", "200 Gb/sec (4X HDR)"), ("link_layer", "InfiniBand")):
        (port / name).write_text(text)
    found = topology_machine.read_machine({}, tmp_path)

    def read_machine(environ: object) -> NodeTopology:
        return found

    monkeypatch.setattr(topology_machine, "read_machine", read_machine)
    ended = shardway("bench", "topology", "--html", "links.html")
    assert (ended.code, ended.err) == (0, ""), ended
    assert "no accelerator, 1 network adapter, 2 NUMA nodes" in ended.out
    assert "no accelerator is found: neither NVIDIA's driver nor AMD's" in " ".join(ended.out.split())
    assert ["mlx5_0", "active", "200", "n/a", "n/a"] in [line.split() for line in ended.out.splitlines()]
    assert "NUMA 1 (CPUs 4-7)" in ended.out
    assert "no accelerator is found" in (tmp_path / "links.html").read_text()


def test_this_machine_is_read(shardway: Shardway) -> None:
    ended = shardway("bench", "topology", "--json", "-")
    assert ended.code == 0, ended
    assert json.loads(ended.out)["node"] == os.uname().nodename
