"""`shardway bench device`: what it prints and writes, what it refuses, and the profile that a plan takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from command_line import Ended, Shardway

from device_reports import H100, make_device_report
from shardway.bench import device, disk, kernels
from shardway.bench.device_report import RankDevice
from shardway.bench.site_ceilings import find_device_ceilings
from shardway.cli import bench_device
from shardway.cli.bench_device import DeviceOptions
from shardway.cli.bench_options import BenchOutputs
from shardway.errors import UserError
from shardway.sites.load import keep_profile, load_site


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time, and a machine without a GPU."""
    for module, name, value in (
        (kernels, "LAYER_SIZES", (16, 32, 16, 32)),
        (kernels, "ATTENTION_SIZES", (1, 1, 16, 16)),
        (device, "_SIDES", (32, 64)),
        (device, "COPY_SIZES", (4096, 65536)),
    ):
        monkeypatch.setattr(module, name, MappingProxyType({"cpu": value}))
    monkeypatch.setattr(device, "DISK_BYTES", 2**23)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("small")
def test_a_cpu_is_measured(shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "describe_lack", lambda folder: "")
    (tmp_path / "data").mkdir()
    ended = shardway("bench", "device", "--seconds", "0.4", "--disk", "data", "--json", "device.json")
    assert (ended.code, ended.err) == (0, ""), ended
    lines = ended.out.splitlines()
    assert lines[0].startswith(f"CPU, 1 thread, torch {torch.__version__}; ")
    heads = [line.split()[0] for line in lines if line.endswith(("reached", "rated", "percentile us"))]
    assert heads == ["product", "copy", "attention", "start"]
    facts = json.loads((tmp_path / "device.json").read_text())
    assert (facts["format"], facts["device"], facts["part"]) == (1, "CPU", None)
    assert [each["format"] for each in facts["products"]] == ["fp32", "bf16"]
    assert [each["size"] for each in facts["copies"]] == [4096, 65536]
    assert facts["disk"]["size"] == 2**23
    assert facts["verdict"] == lines[lines.index("Verdict") + 1 :]
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.usefixtures("small")
def test_facts_are_printed_alone(shardway: Shardway) -> None:
    ended = shardway("bench", "device", "--seconds", "0.1", "--formats", "fp32", "--sizes", "4KiB", "--json", "-")
    assert ended.code == 0, ended
    facts = json.loads(ended.out)
    assert [each["format"] for each in facts["products"]] == ["fp32"]
    assert [each["size"] for each in facts["copies"]] == [4096]


def refused(ended: Ended, *parts: str) -> None:
    assert (ended.code, ended.out) == (2, ""), ended
    for part in parts:
        assert part in ended.err, ended.err


def test_every_mistake_is_reported_at_once(shardway: Shardway) -> None:
    words = ("--device", "tpu", "--formats", "bf16,int4", "--sizes", "2", "--seconds", "-1", "--disk", "gone")
    refused(
        shardway("bench", "device", *words, "--json", "gone/facts.json", "--save", "mine"),
        "7 problems in the command line",
        '--device (command line): "tpu" is no device',
        "--formats (command line): int4 is no format\n      allowed: fp32, tf32, fp16, bf16, fp8",
        '--sizes (command line): "2" has a size of 2\n      allowed: 4 bytes and more',
        '--disk (command line): "gone" is no folder',
        "--seconds (command line): -1 is no time to measure in",
        "--json (command line): the folder gone does not exist",
        "--save (command line): needs --site: which site was measured",
    )


def test_a_disk_that_is_full_is_refused_before_anything_is_measured(
    shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = disk.shutil.disk_usage(".")._replace(free=2**30)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: free)
    refused(shardway("bench", "device", "--disk", "."), "--disk (command line): . has 1.0 GiB free, less than twice")


@pytest.mark.usefixtures("small")
def test_a_device_that_is_not_there_is_refused(shardway: Shardway) -> None:
    refused(
        shardway("bench", "device", "--device", "cuda"),
        f"--device (command line): torch {torch.__version__} sees no CUDA device here\n      allowed: cpu",
    )
    refused(shardway("bench", "device", "--formats", "fp8"), "--formats (command line): CPU has no products in fp8")


@pytest.mark.usefixtures("small")
def test_what_cannot_be_saved_is_refused_at_the_start(shardway: Shardway) -> None:
    saved = ("bench", "device", "--site", "dgx-slurm", "--save")
    refused(shardway(*saved, "jupiter"), '"jupiter" is the name of a shipped profile')
    refused(shardway(*saved, "mine", "--device", "cpu"), "--save (command line): no catalogue rates CPUs")
    refused(shardway(*saved, "mine"), "--save (command line): no catalogue rates CPUs")


def test_another_part_than_that_of_the_site_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H100)
    options = make_options("dgx-slurm", "mine")
    assert bench_device._choose_device(options) == "cuda"
    with pytest.raises(UserError, match=r"--save .*h100-sxm5-80gb in the catalogue.* leonardo-booster has a100"):
        bench_device._choose_device(make_options("leonardo-booster", "mine"))


def make_options(site: str | None, save: str | None) -> DeviceOptions:
    return DeviceOptions(None, None, None, None, 1.0, BenchOutputs(site, save=save))


LINKS = """
format = 1
name = "links"
title = "A site of ours, links measured"
extends = "dgx-slurm"

[measured]
link = 0.777
memory = 0.5

[sources]
measured = { source = "`shardway bench comm` over 8 ranks on 1 node (node1)", date = 2026-11-01 }
"""


def test_measured_ceilings_join_those_of_links_in_a_site_that_a_plan_takes(shardway: Shardway) -> None:
    keep_profile("links", LINKS)
    report = make_device_report()
    bench_device._report(report, [RankDevice(0, "node1", report)], make_options("links", "all"))
    kept, found = load_site("all"), find_device_ceilings(report, load_site("links"))
    assert kept.measured == {"link": 0.777, **found}
    assert {"matmul", "matmul_low", "memory", "flash3", "flash_backward"} <= set(found)
    assert kept.title == "A site of ours, links measured, device measured"
    assert "bench comm" in kept.sources["measured.link"].source
    assert kept.sources["measured"].source == f"`shardway bench device` on one {H100}, torch 2.13.0, CUDA 13.0"
    planned = shardway("plan", "llama3-8b", "--on", "all", "--nodes", "4")
    assert planned.code == 0, planned.err
    assert f"with what was measured on this site: {', '.join(sorted(kept.measured))}" in planned.out
    refused(shardway("bench", "device", "--site", "links", "--save", "all"), "is there and is not written over")


def test_a_plan_follows_what_was_measured(shardway: Shardway) -> None:
    step_s: list[float] = []
    for name, rate in (("slow", 300e12), ("fast", 700e12)):
        report = make_device_report(in_a_layer={"bf16": rate})
        bench_device._report(report, [], make_options("dgx-slurm", name))
        planned = shardway("plan", "llama3-8b", "--on", name, "--json")
        step_s.append(float(json.loads(planned.out)["plan"]["step_seconds"]))
    assert step_s[0] > 1.3 * step_s[1]


def test_one_rank_of_a_launch_reports_a_mistake(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        ended = shardway("bench", "device", "--seconds", "0")
        assert ended.code == 2
        assert ("0 is no time to measure in" in ended.err) is (rank == 0)
        assert (ended.err == "") is (rank == 1)
