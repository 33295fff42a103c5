"""`shardway bench comm`: what it prints and writes, with ranks of its own and as one, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import Ended, Shardway

from comm_reports import make_report
from shardway.bench.bandwidth import BUS_FACTORS
from shardway.bench.comm_report import find_known_links
from shardway.bench.site_ceilings import find_ceilings
from shardway.cli import bench_comm
from shardway.cli.bench_comm import _find_cause
from shardway.cli.bench_options import BenchOutputs, parse_sizes
from shardway.errors import JobError, LostContact, SiteError, UserError
from shardway.ranks.failure import RankFailure
from shardway.sites.load import load_site

pytestmark = pytest.mark.usefixtures("warm_starts")


@pytest.mark.slow
def test_ranks_of_its_own_measure_and_rank_0_reports(shardway: Shardway, tmp_path: Path) -> None:
    words = ("bench", "comm", "--nproc", "2", "--sizes", "4KiB,64KiB", "--seconds", "10")
    ended = shardway(*words, "--collectives", "all-reduce,send_recv", "--json", "links.json")
    assert (ended.code, ended.err) == (0, ""), ended
    lines = ended.out.splitlines()
    assert lines[0].startswith("2 ranks on 1 node, gloo, CPU; ")
    titles = ("collective", "bytes", "calls", "median us", "p99 us", "algbw GB/s", "busbw GB/s", "data")
    assert lines[2].split() == " ".join(titles).split()
    rows = [line.split() for line in lines[3 : lines.index("", 3)]]
    assert {(row[0], row[-1]) for row in rows} == {("all_reduce", "right"), ("send_recv", "right")}
    assert "the data of 2 collectives were right on every rank at every size" in lines
    facts = json.loads((tmp_path / "links.json").read_text())
    assert (facts["format"], facts["backend"], facts["nodes"], facts["wrong"]) == (1, "gloo", [0, 0], [])
    assert {(each["collective"], each["size"]) for each in facts["times"]} <= {
        (name, size) for name in ("all_reduce", "send_recv") for size in (4096, 65536)
    }
    assert facts["verdict"] == lines[lines.index("Verdict") + 1 :]
    assert [path.name for path in tmp_path.iterdir() if not path.is_dir()] == ["links.json"]


def refused(ended: Ended, *parts: str) -> None:
    assert (ended.code, ended.out) == (2, ""), ended
    assert ended.err.startswith("shardway: ")
    for part in parts:
        assert part in ended.err, ended.err


def test_every_mistake_is_reported_at_once(shardway: Shardway) -> None:
    words = ("--sizes", "2MiB:1MiB", "--collectives", "all_reduce,gather", "--seconds", "0", "--backend", "mpi")
    ended = shardway("bench", "comm", *words, "--json", "gone/links.json")
    refused(
        ended,
        "5 problems in the command line",
        '--sizes (command line): "2MiB:1MiB" is empty: 2MiB is more than 1MiB',
        "--collectives (command line): gather is no collective",
        f"allowed: {', '.join(BUS_FACTORS)}",
        "--seconds (command line): 0 is no time to measure in",
        '--backend (command line): "mpi" is no backend\n      allowed: gloo or nccl',
        "--json (command line): the folder gone does not exist",
    )


def test_a_backend_that_is_not_there_is_refused(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(
        shardway("bench", "comm", "--backend", "nccl"),
        f"--backend (command line): nccl is not there: torch {torch.__version__} sees no CUDA device here",
        "allowed: gloo",
    )


def test_ranks_without_a_gpu_each_are_refused_over_nccl(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for visible, words, allowed in ((1, (), "2 or more over gloo: --backend gloo"), (4, ("--nproc", "5"), "2 to 4")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=visible: count)
        ended = shardway("bench", "comm", "--backend", "nccl", *words)
        refused(ended, f"ranks need a GPU each, and torch sees {visible}", f"allowed: {allowed}")


def test_what_cannot_be_saved_is_refused_at_the_start(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(shardway("bench", "comm", "--save", "mine"), "--save (command line): needs --site")
    saved = ("bench", "comm", "--site", "leonardo-booster", "--save")
    refused(shardway(*saved, "jupiter"), '"jupiter" is the name of a shipped profile')
    refused(
        shardway(*saved, "mine"),
        "what gloo sends over has no rated bandwidth",
        "allowed: over nccl, with a GPU for each rank",
    )


def test_measured_ceilings_are_a_site_that_a_plan_takes(shardway: Shardway, tmp_path: Path) -> None:
    site = load_site("jupiter")
    report = make_report(2, 4, ("all_reduce", "all_gather"), (2**10, 2**20, 2**28))
    options = bench_comm.CommOptions("nccl", None, (), 1.0, BenchOutputs("jupiter", save="mine"))
    bench_comm._report(report, options)
    kept = load_site("mine")
    assert kept.measured == find_ceilings(report, find_known_links(report, site), site)
    assert set(kept.measured) == {"link", "link_latency_s", "network", "network_latency_s"}
    assert "over 8 ranks on 2 nodes (node1, node2)" in kept.sources["measured"].source
    planned = shardway("plan", "llama3-8b", "--on", "mine", "--nodes", "4")
    assert planned.code == 0, planned.err
    assert "with what was measured on this site: link, link_latency_s, network, network_latency_s" in planned.out
    refused(shardway("bench", "comm", "--site", "jupiter", "--save", "mine"), "is there and is not written over")


def test_a_site_that_is_not_known_is_refused(shardway: Shardway) -> None:
    refused(shardway("bench", "comm", "--site", "nowhere"), "nowhere")


def test_too_few_ranks_are_refused(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        shardway("bench", "comm", "--nproc", "1"), "1 rank cannot be measured", "allowed: 2 ranks or more", "--nproc 2"
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    refused(shardway("bench", "comm"), "1 rank cannot be measured", "to do: --nproc 2 on this machine")


def test_ranks_of_a_launch_start_no_others_and_one_of_them_speaks(
    shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        ended = shardway("bench", "comm", "--nproc", "2")
        assert ended.code == 2
        assert ("--nproc 2 starts ranks, but this process is already rank 0 of 2" in ended.err) is (rank == 0)
        assert (ended.err == "") is (rank == 1)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1KiB:16KiB", (1024, 4096, 16384)),
        ("1KiB:5KiB:2", (1024, 2048, 4096)),
        ("4KiB,1MiB", (4096, 2**20)),
        ("512", (512,)),
    ],
)
def test_sizes_are_read(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("1KiB:big", '"big" is not a size'),
        ("1KiB:1MiB:1", "has no factor from one size to the next; allowed: FIRST:LAST:FACTOR, from 1.1 on"),
        ("1KiB:1MiB:x", "has no factor"),
        ("1KiB:1MiB:2:3", "has no factor"),
        ("0:1KiB", "has a size of 0"),
        ("", "is not a size"),
        ("0", "has a size of 0"),
    ],
)
def test_what_is_no_size_is_refused(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what.replace("(", r"\(")):
        parse_sizes(text)


def failure(rank: int, code: int, text: str, folder: Path, *, by_agent: bool = False) -> RankFailure:
    path = folder / str(rank)
    path.write_text(text)
    return RankFailure(rank, 100 + rank, code, (path,) if text else (), by_agent)


def test_the_cause_among_ranks_that_failed_is_told(tmp_path: Path) -> None:
    lost = failure(0, 4, "shardway: rank 0 lost contact with another rank while reduce was measured: x\n", tmp_path)
    killed = failure(1, -9, "", tmp_path)
    memory = failure(2, 2, "shardway: 1 problem in the command line\n  --sizes: too large\n", tmp_path)
    site = failure(3, 3, "shardway: rank 3 could not meet the others\n", tmp_path)
    silent = failure(4, 1, "ImportError: no library\n", tmp_path)
    ended = failure(5, -15, "", tmp_path, by_agent=True)
    assert str(_find_cause([lost, killed])).startswith(
        "rank 1 (process 101) was ended by SIGKILL, and the others with it"
    )
    for failures, kind, start in (
        ([lost, memory], UserError, "1 problem in the command line\n  --sizes: too large"),
        ([ended, site], SiteError, "rank 3 could not meet the others"),
        ([lost, ended], LostContact, "rank 0 lost contact"),
        ([silent], JobError, "rank 4 ended with exit code 1: ImportError: no library"),
    ):
        cause = _find_cause(failures)
        assert type(cause) is kind
        assert str(cause).startswith(start)


def test_the_words_of_each_rank_say_all_that_was_asked(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given to the ranks is read by them as it was read here."""
    seen: list[bench_comm.CommOptions] = []

    def read(nproc: int | None, options: bench_comm.CommOptions) -> str:
        seen.append(options)
        return ""

    monkeypatch.setattr(bench_comm, "_run_ranks", read)
    words = ("--sizes", "1KiB:64KiB", "--collectives", "reduce,all-to-all", "--seconds", "7.5", "--json", "-")
    assert (
        shardway("bench", "comm", *words, "--site", "leonardo-booster", "--backend", "gloo", "--save", "mine").code == 0
    )
    assert shardway(*bench_comm._list_words(seen[0], "cpu")).code == 0
    assert seen[0] == seen[1]
    assert seen[0].collectives == ("reduce", "all_to_all")
