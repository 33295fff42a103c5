from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from made_machines import check, make, make_placement, make_site

from shardway.ranks.doctor.examine import (
    CHECKS,
    WORLD_CHECKS,
    CheckScope,
    Diagnosis,
    DoctorCheck,
    judge_rows,
    list_names,
    list_rows,
    render_json,
    render_rows,
    run_checks,
)
from shardway.ranks.doctor.surroundings import (
    CheckResult,
    CheckVerdict,
    MachineView,
    Report,
    bad,
    good,
    look_around,
    parse_finding,
    poor,
    unknown,
)
from shardway.ranks.doctor.world import (
    ClockOffset,
    judge_clocks,
    judge_copy,
    judge_import,
    judge_master,
    judge_matmul,
    judge_nodes,
    judge_peers,
    judge_start,
    judge_sum,
    judge_versions,
    judge_visible,
    list_absent_hosts,
)

HOSTS = {0: "n0", 1: "n1", 2: "n2"}


def reports(**facts: list[Any]) -> list[Report]:
    """A report a node, with its value of each fact (None: not told)."""
    count = len(next(iter(facts.values())))
    return [
        Report(
            rank,
            f"n{rank}",
            (good("x", **{name: all_[rank] for name, all_ in facts.items() if all_[rank] is not None}),),
        )
        for rank in range(count)
    ]


def test_names_of_nodes_are_compared_as_names_of_hosts_are() -> None:
    around = make(environ={"SLURM_JOB_NODELIST": "N0,N1.cluster,n2"})
    assert list_absent_hosts(around, reports(x=[1, 1])) == ["n2"]


def test_nodes_are_compared_with_their_peers() -> None:
    check(judge_nodes(reports(gpus=[4, 4, 3])), "fail", "GPUs of a node: 4, but n2 has 3")
    check(judge_nodes(reports(gpus=[4, 4])), "ok", "2 nodes with 4 GPUs")
    check(judge_nodes(reports(gpus=[4, None])), "n/a")
    check(judge_versions(reports(python=["3.11", "3.11"], torch=["2.9", "2.8"])), "fail", "2.8 on n1", "2.9 on n0")
    check(judge_versions(reports(python=["3.11", "3.11"], torch=["2.9", None])), "fail", "none on n1")
    check(judge_versions(reports(python=["3.11", "3.11"], driver=["535", "550"])), "warn", "driver")
    check(judge_versions(reports(python=["3.11", "3.11"])), "ok")
    check(judge_versions(reports(python=["3.11"])), "n/a")
    check(judge_master(reports(master_address=["10.0.0.1", "10.0.0.1"])), "ok", "10.0.0.1")
    check(judge_master(reports(master_address=["10.0.0.1", "192.168.0.1"])), "warn", "192.168.0.1 on n1")
    check(judge_master(reports(other=["x"])), "n/a")


@pytest.mark.parametrize(
    ("ahead", "error", "verdict", "words"),
    [
        (0.9, 0.001, "ok", "on 2 nodes"),
        (1.1, 0.001, "warn", "n1 1.10 s ahead"),
        (-3.2, 0.001, "warn", "n1 3.20 s behind"),
        (1.5, 0.6, "ok", "on 2 nodes"),  # the network is too slow to be sure
    ],
)
def test_clocks(ahead: float, error: float, verdict: str, words: str) -> None:
    check(judge_clocks({"n1": ClockOffset(ahead, error)}), verdict, words)
    check(judge_clocks({}), "n/a")


def test_files_of_the_first_node() -> None:
    check(judge_visible("/s", {"n1": 0.1, "n2": 1.25}, 5.0), "ok", "2 other nodes", "1.25 s")
    check(judge_visible("/s", {"n1": 0.1, "n2": None}, 5.0), "fail", "/s is not there within 5 s on n2")
    check(judge_visible("/s", {}, 5.0), "n/a")


END = {"stage": "end", "torch": "2.9", "import_s": 3.0, "sum_s": 0.002, "sum_bytes": 4 * 2**20}


def test_the_cause_is_the_earliest_stage() -> None:
    check(judge_start({0: END, 1: END}, HOSTS), "ok", "torch 2.9")
    waits = {"stage": "process group", "error": "timed out"}
    cause = {"stage": "import torch", "error": "libcudnn.so.9: cannot open shared object file"}
    check(
        judge_start({0: waits, 1: cause, 2: waits}, HOSTS), "fail", "rank 1 on n1, import torch: libcudnn", "(2 other"
    )
    check(judge_start({0: {"error": "x"}}, HOSTS), "fail", "rank 0 on n0, python: x")
    hung = {"stage": "sum over all ranks", "error": "no end within 45 s"}
    check(judge_start({0: hung, 1: hung}, HOSTS), "fail", "NCCL_DEBUG=INFO")


def test_times_of_torch() -> None:
    slow = {**END, "import_s": 21.0}
    check(judge_import({0: END, 1: END, 2: slow}, HOSTS), "warn", "21.0 s on rank 2 (n2), 3.0 s the median")
    check(judge_import({0: END, 1: {**END, "import_s": 19.0}}, HOSTS), "ok")
    check(judge_import({0: {"error": "x"}}, HOSTS), "n/a")
    # 4 MiB in 2 ms is 2.1 GB/s; each rank sends and receives (n - 1) / n of it twice
    check(judge_sum({0: END, 1: END}, "cuda"), "ok", "by NCCL in 2.00 ms: 2.10 GB/s")
    check(judge_sum({0: END, 1: END, 2: END, 3: END}, "cpu"), "ok", "4 ranks by gloo", "3.15 GB/s")
    check(judge_sum({0: END, 1: {"error": "x"}}, "cpu"), "n/a", "1 of 2")


@pytest.mark.parametrize(
    ("rates", "verdict", "words"),
    [((600, 601, 590), "ok", ""), ((600, 600, 479), "warn", "rank 2 (n2) 479"), ((600, 600, 359), "fail", "359")],
)
def test_slow_gpus_are_those_below_their_peers(rates: tuple[float, ...], verdict: str, words: str) -> None:
    check(judge_matmul({rank: {"tflops": rate} for rank, rate in enumerate(rates)}, HOSTS), verdict, words)
    check(judge_matmul({0: END}, HOSTS), "n/a")


def test_slow_gpus_are_those_below_what_the_site_measured() -> None:
    probes: dict[int, dict[str, Any]] = {
        0: {"tflops": 640.0, "format": "fp16", "copy_gbs": 2900.0},
        1: {"tflops": 600.0, "copy_gbs": 2600.0},
    }
    found = judge_matmul(probes, HOSTS, 700.0)
    check(found, "warn", "620 TFLOP/s in fp16, the median of 2; 700 were measured on this site; rank 1 (n1) 600")
    assert "rank 0" not in found.found
    check(judge_matmul(probes, HOSTS, 660.0), "ok", "660 were measured on this site")
    check(judge_copy(probes, HOSTS, 3000.0), "warn", "3000 were measured on this site; rank 1 (n1) 2600")
    check(judge_copy(probes, HOSTS), "ok", "2750 GB/s read and written, the median of 2")
    check(judge_copy({0: END}, HOSTS), "n/a")


def test_gpus_that_do_not_reach_each_other() -> None:
    check(judge_peers({0: {"others": 3, "apart": []}}, HOSTS), "ok")
    check(judge_peers({0: {"others": 3, "apart": []}, 1: {"others": 3, "apart": [2]}}, HOSTS), "warn", "rank 1 (n1)")
    check(judge_peers({0: {"others": 0, "apart": []}}, HOSTS), "n/a")


# --- how checks run


def run_one(
    examine: Any, around: MachineView | None = None, where: CheckScope = CheckScope.NODE, limit_s: float = 60.0
) -> list[CheckResult]:
    return run_checks({"x": DoctorCheck("is it so", where, examine, quick=True, limit_s=limit_s)}, around or make())


def test_a_check_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    start = time.monotonic()
    (found,) = run_one(lambda around: (release.wait(60.0), good("late"))[1], limit_s=0.05)
    assert time.monotonic() - start < 30.0
    release.set()
    check(found, "fail", "no answer within 0.05 s (is it so?)", "look at n1 by hand")


def test_a_check_that_is_wrong_ends_nothing() -> None:
    def wrong(around: MachineView) -> CheckResult:
        raise ZeroDivisionError("division by zero")

    (found,) = run_one(wrong)
    check(found, "warn", "ZeroDivisionError: division by zero", "defect")
    assert found.check == "x"


@pytest.mark.parametrize(
    ("where", "changes", "verdict"),
    [
        (CheckScope.NODE, {}, ["ok"]),
        (CheckScope.NODE, {"placement": make_placement(rank=1)}, []),
        (CheckScope.RANK, {"placement": make_placement(rank=1)}, ["ok"]),
        (CheckScope.MACHINE, {"placement": make_placement(rank=4)}, ["ok"]),
        (CheckScope.LOGIN, {}, ["n/a"]),
        (CheckScope.NODE, {"placement": make_placement(world=1, per_node=1, launcher="none"), "environ": {}}, ["n/a"]),
        (CheckScope.LOGIN, {"placement": make_placement(world=1, per_node=1, launcher="none"), "environ": {}}, ["ok"]),
    ],
)
def test_where_a_check_is_asked(where: CheckScope, changes: dict[str, Any], verdict: list[str]) -> None:
    around = MachineView(**{**vars(make()), **changes})
    assert [found.verdict for found in run_one(lambda around: good("x"), around, where=where)] == verdict


def test_a_preflight_is_quick_and_deep_checks_are_asked_for() -> None:
    found = {finding.check for finding in run_checks(CHECKS, make(make_site(scheduler="local")), quick=True)}
    assert found == {name for name, each in CHECKS.items() if each.quick}
    assert not any(each.quick and each.deep for each in CHECKS.values())
    assert "fs.speed" not in {each.check for each in run_checks(CHECKS, make())}
    assert "fs.speed" in {each.check for each in run_checks(CHECKS, make(deep=True))}


def test_variables_that_contradict_each_other_are_a_finding() -> None:
    around = look_around(
        {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, make_site(), make().wanted, gpu_limit_s=0.1
    )
    (found,) = [each for each in run_checks(CHECKS, around, quick=True) if each.check == "rank.placement"]
    check(found, "fail", 'RANK="5"')


# --- how it is told


def test_a_row_is_the_worst_of_all_nodes() -> None:
    def told(rank: int, finding: CheckResult) -> Report:
        return Report(rank, f"n{rank}", (parse_finding({**asdict(finding), "check": "gpu.count"}),))

    diagnosis = Diagnosis(
        (told(0, good("4")), told(1, bad("3", "do")), told(2, poor("5", "see")), told(3, bad("2", "do"))),
        (parse_finding({**asdict(unknown("none")), "check": "world.clock"}),),
    )
    rows = list_rows(diagnosis)
    assert [(row.check, row.verdict, row.found, row.hosts) for row in rows] == [
        ("gpu.count", CheckVerdict.FAIL, "3", ("n1", "n3")),
        ("world.clock", CheckVerdict.NA, "none", ()),
    ]
    assert judge_rows(rows) is CheckVerdict.FAIL
    assert render_rows(rows) == (
        "fail  gpu.count        3  [n1, n3]\n                       To do: do\nn/a   world.clock\n1 fail, 0 warn, 0 ok"
    )
    assert "n/a   world.clock      none" in render_rows(rows, every=True)
    table = json.loads(json.dumps(render_json(diagnosis, "s", 4)))
    assert list(table) == ["format", "verdict", "site", "world", "hosts", "missing", "checks", "reports"]
    assert (table["verdict"], table["hosts"]) == ("fail", ["n0", "n1", "n2", "n3"])
    assert list(table["checks"][0]) == ["check", "verdict", "found", "remedy", "hosts"]


def test_the_page_of_the_verb_lists_every_check() -> None:
    page = (Path(__file__).parents[3] / "docs/doctor.md").read_text(encoding="utf-8")
    told = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert tuple(told) == list_names()
    assert not CHECKS.keys() & set(WORLD_CHECKS)
