from __future__ import annotations

from typing import Any

import pytest
from made_machines import GPU_NODE, check, make, make_nvidia, make_placement, make_site

from shardway.hardware.probe import NvidiaState
from shardway.ranks.doctor import checks
from shardway.ranks.doctor.surroundings import MachineNeeds

WITH_GPUS = make_site(node=GPU_NODE, request={"accelerators": "gres", "whole_nodes": True})


@pytest.mark.parametrize(
    ("nvidia", "device_files", "verdict", "words"),
    [
        (NvidiaState("hung", "nvidia-smi -L did not answer within 20 s"), True, "fail", ("20 s", "--exclude=n1")),
        (NvidiaState("failed", "Driver/library version mismatch"), True, "fail", ("mismatch", "--exclude=n1")),
        (NvidiaState("absent"), True, "warn", ("no nvidia-smi", "--nv")),
        (NvidiaState("absent"), False, "n/a", ()),
        (make_nvidia(driver=("535.1",) * 4), True, "ok", ("535.1",)),
    ],
)
def test_the_driver_answers(nvidia: NvidiaState, device_files: bool, verdict: str, words: tuple[str, ...]) -> None:
    check(checks.check_query(make(nvidia=nvidia, device_files=device_files)), verdict, *words)


@pytest.mark.parametrize(
    ("found", "changes", "verdict", "words"),
    [
        (4, {}, "ok", ("4 x NVIDIA A100", "in the profile of made-up")),
        (3, {}, "fail", ("3 x", "4 are in the profile", "--gres=gpu:4", "--exclude=n1")),
        (0, {}, "fail", ("no GPU",)),
        (0, {"wanted": MachineNeeds(device="cpu")}, "ok", ("none",)),
        (2, {"environ": {"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "2"}}, "ok", ("what the scheduler gave",)),
        (1, {"environ": {"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "2"}}, "fail", ("2 are what the scheduler gave",)),
        (2, {"site": make_site(node=GPU_NODE, request={"whole_nodes": False})}, "ok", ("2 x",)),
        (
            2,
            {"site": make_site(), "wanted": MachineNeeds(device="cuda")},
            "fail",
            ("4 are what the ranks of this node need",),
        ),
        (0, {"site": make_site()}, "ok", ("none is expected",)),
    ],
)
def test_all_gpus_are_there(found: int, changes: dict[str, Any], verdict: str, words: tuple[str, ...]) -> None:
    finding = checks.check_count(make(**{"site": WITH_GPUS, "nvidia": make_nvidia(found), **changes}))
    check(finding, verdict, *words)
    assert finding.facts == {"gpus": found}


@pytest.mark.parametrize(
    ("rule", "words"), [("ngpus", "ngpus=4 in select"), ("gpus-per-node", "--gpus-per-node=4"), (None, "all GPUs")]
)
def test_the_remedy_is_in_the_words_of_the_site(rule: str | None, words: str) -> None:
    site = make_site(node=GPU_NODE, request={"accelerators": rule} if rule else {})
    check(checks.check_count(make(site, nvidia=make_nvidia(1))), "fail", words)


def test_a_driver_that_hangs_is_told_once() -> None:
    check(checks.check_count(make(WITH_GPUS, nvidia=NvidiaState("hung", "x"))), "n/a")


@pytest.mark.parametrize(
    ("environ", "verdict", "words"),
    [
        ({}, "ok", ("no variable",)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "ok", ("0,1,2,3",)),
        ({"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, "ok", ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1,1,2"}, "fail", ("names 1 twice",)),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "fail", ("shows 1 GPUs to each of the 4 ranks", "--gpus-per-task")),
        ({"CUDA_VISIBLE_DEVICES": ""}, "fail", ("shows 0 GPUs",)),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2,3,1"}, "fail", ("shows 1 GPUs",)),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "fail", ("shows 0 GPUs",)),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, "fail", ("ROCR_VISIBLE_DEVICES=0,1 shows 2",)),
        (
            {"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0,1,2,3"},
            "warn",
            ("unset HIP_VISIBLE_DEVICES",),
        ),
    ],
)
def test_each_rank_sees_the_gpus_of_its_node(environ: dict[str, str], verdict: str, words: tuple[str, ...]) -> None:
    check(checks.check_visible(make(WITH_GPUS, environ, nvidia=make_nvidia())), verdict, *words)


def test_a_run_on_cpus_may_hide_gpus() -> None:
    around = make(WITH_GPUS, {"CUDA_VISIBLE_DEVICES": ""}, wanted=MachineNeeds(device="cpu"))
    check(checks.check_visible(around), "ok")


@pytest.mark.parametrize(
    ("columns", "verdict", "words"),
    [
        ({}, "n/a", ()),
        ({"ecc_volatile": ("[N/A]",)}, "n/a", ()),
        ({"ecc_volatile": ("0", "0"), "ecc_aggregate": ("0", "7")}, "ok", ("7 in all",)),
        ({"ecc_volatile": ("0", "0"), "ecc_aggregate": ("0", "8")}, "warn", ("8 in all",)),
        ({"ecc_volatile": ("0", "0"), "ecc_aggregate": ("64", "0")}, "fail", ("64 in all", "--exclude=n1")),
        ({"ecc_volatile": ("0", "1"), "ecc_aggregate": ("0", "1")}, "fail", ("1 since start",)),
        ({"ecc_volatile": ("0",), "rows_pending": ("Yes",)}, "fail", ("wait to be replaced",)),
        ({"ecc_volatile": ("0",), "rows_failed": ("No", "Yes")}, "fail", ("could not be replaced",)),
    ],
)
def test_memory_errors(columns: dict[str, tuple[str, ...]], verdict: str, words: tuple[str, ...]) -> None:
    check(checks.check_ecc(make(nvidia=make_nvidia(2, **columns))), verdict, *words)


@pytest.mark.parametrize(
    ("masks", "verdict", "words"),
    [
        ((), "n/a", ()),
        (("0x0000000000000001", "0x0000000000000004"), "ok", ()),
        (("0x0", "0x0000000000000048"), "fail", ("GPU 1", "hardware slowdown", "too hot (hardware)")),
        (("0x80",), "fail", ("power brake",)),
        (("0x20",), "warn", ("GPU 0", "too hot (driver)")),
    ],
)
def test_slow_gpus(masks: tuple[str, ...], verdict: str, words: tuple[str, ...]) -> None:
    for column in ("throttle", "throttle_now"):
        check(checks.check_throttle(make(nvidia=make_nvidia(2, **{column: masks}))), verdict, *words)


def test_busy_gpus_and_modes() -> None:
    check(checks.check_busy(make(nvidia=make_nvidia(2, memory_used_mib=("3", "1024")))), "ok")
    check(checks.check_busy(make(nvidia=make_nvidia(2, memory_used_mib=("3", "2048")))), "warn", "GPU 1: 2.0 GiB")
    check(checks.check_mode(make(nvidia=make_nvidia(2, compute_mode=("Default", "Prohibited")))), "fail", "Prohibited")
    check(checks.check_mode(make(nvidia=make_nvidia(1, compute_mode=("Default",), mig=("Enabled",)))), "fail", "MIG")
    alone = make_placement(world=1, per_node=1)
    sliced = make_nvidia(1, compute_mode=("Default",), mig=("Enabled",))
    check(checks.check_mode(make(nvidia=sliced, placement=alone)), "warn", "MIG")
    check(checks.check_mode(make(nvidia=make_nvidia(1, compute_mode=("Default",), mig=("[N/A]",)))), "ok")
