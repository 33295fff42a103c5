from __future__ import annotations

import resource
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_machines import check, make, make_placement, make_site

from shardway.hardware.command import CommandResult
from shardway.hardware.limits import TaskLimit
from shardway.hardware.mounts import MountedFileSystem
from shardway.hardware.probe import Interface, Port
from shardway.ranks.doctor import checks
from shardway.ranks.doctor.surroundings import CheckResult, MachineNeeds

GIB = 2**30
LOCAL = make_site(scheduler="local")
UNLIMITED = resource.RLIM_INFINITY
IB = Port("mlx5_0", "1", "ACTIVE", "InfiniBand", 200.0)


@pytest.mark.parametrize(
    ("usable", "cores", "environ", "verdict", "words"),
    [
        (1, 64, {}, "fail", ("1 of 64", "SRUN_CPUS_PER_TASK", "--bind-to none")),
        (1, 1, {}, "ok", ()),
        (1, 2, {}, "ok", ()),
        (16, 64, {}, "ok", ("16 of 64",)),
        (8, 64, {"SLURM_CPUS_PER_TASK": "16"}, "warn", ("where the scheduler gave 16",)),
        (16, 64, {"SLURM_CPUS_ON_NODE": "64"}, "ok", ()),
        (15, 64, {"NCPUS": "64"}, "warn", ("gave 16",)),
    ],
)
def test_cores_of_a_rank(
    usable: int, cores: int, environ: dict[str, str], verdict: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    around = make(environ=environ, machine_cores=cores, usable_cores=usable, root=tmp_path)
    check(checks.check_affinity(around), verdict, *words)


@pytest.mark.parametrize(
    ("text", "usable", "per_node", "verdict", "words"),
    [
        ("", 16, 4, "warn", ("export OMP_NUM_THREADS=16",)),
        ("", 64, 4, "warn", ("export OMP_NUM_THREADS=16",)),  # not bound: the ranks share all cores
        ("", 64, 1, "ok", ()),
        ("16", 16, 4, "ok", ()),
        ("17", 16, 4, "warn", ("16 cores",)),
        ("64", 64, 4, "warn", ("export OMP_NUM_THREADS=16",)),
        ("4,2", 16, 4, "ok", ()),
        ("many", 16, 4, "fail", ("no number",)),
        ("0", 16, 4, "fail", ("no number",)),
    ],
)
def test_threads(text: str, usable: int, per_node: int, verdict: str, words: tuple[str, ...]) -> None:
    placement = make_placement(per_node=per_node)
    around = make(environ={"OMP_NUM_THREADS": text}, usable_cores=usable, placement=placement)
    check(checks.check_threads(around), verdict, *words)


@pytest.mark.parametrize(
    ("size", "free", "changes", "verdict", "words"),
    [
        (64 * 2**20, 64 * 2**20, {}, "fail", ("--shm-size",)),
        (64 * GIB, 0, {}, "fail", ("remove what an earlier job left",)),
        (4 * GIB, 4 * GIB, {}, "warn", ("4.0 of 4.0",)),
        (4 * GIB, 4 * GIB, {"site": LOCAL}, "ok", ()),
        (64 * GIB, 63 * GIB, {}, "ok", ()),
    ],
)
def test_shared_memory(
    size: int, free: int, changes: dict[str, Any], verdict: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.statvfs", lambda folder: SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=1))
    check(checks.check_shm(make(**changes)), verdict, *words)


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    check(checks.check_shm(make(root=tmp_path)), "fail", "/dev/shm: No such file")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(soft: int, hard: int = UNLIMITED) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda number: (soft, hard))

    limit(64 * 1024)
    check(checks.check_memlock(make(ports=(IB,))), "fail", "64 KiB", "unlimited")
    check(checks.check_memlock(make()), "ok", "no InfiniBand")
    limit(UNLIMITED)
    check(checks.check_memlock(make(ports=(IB,))), "ok")
    check(checks.check_files(make()), "ok")
    limit(1024, 65536)
    check(checks.check_files(make()), "warn", "ulimit -n 65536")
    limit(1024, 2048)
    check(checks.check_files(make()), "warn", "ask the site for more than 2048")
    limit(4096, 4096)
    check(checks.check_files(make()), "ok")
    four = make(placement=make_placement(per_node=4))
    monkeypatch.setattr(checks, "read_task_limit", lambda root: None)
    check(checks.check_tasks(make()), "ok", "no limit")
    monkeypatch.setattr(checks, "read_task_limit", lambda root: TaskLimit(612, 100, "ulimit -u", "raise it"))
    check(checks.check_tasks(four), "ok", "ulimit -u allows 612")
    monkeypatch.setattr(checks, "read_task_limit", lambda root: TaskLimit(611, 100, "ulimit -u", "raise it"))
    check(checks.check_tasks(four), "warn", "raise it", "data.workers")


def test_the_folder_for_temporary_files(tmp_path: Path) -> None:
    check(checks.check_tmp(make(environ={"TMPDIR": str(tmp_path / "gone")})), "fail", "gone", "export TMPDIR")
    check(checks.check_tmp(make(environ={"TMPDIR": str(tmp_path)})), "ok", str(tmp_path))


ETH, DOWN, DOCKER = Interface("eth0", True, 1500), Interface("ib1", False, 2044), Interface("docker0", True, 1500)
FOUND = (DOCKER, ETH, Interface("ib0", True, 2044), DOWN, Interface("lo", True, 65536))


@pytest.mark.parametrize(
    ("environ", "verdict", "words"),
    [
        ({}, "ok", ("up: eth0, ib0",)),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "ok", ("NCCL_SOCKET_IFNAME=ib: ib0",)),
        ({"NCCL_SOCKET_IFNAME": "hsn0,hsn1"}, "fail", ("n1 has no such interface", "eth0, ib0")),
        ({"NCCL_SOCKET_IFNAME": "=ib"}, "fail", ("no such interface",)),
        ({"NCCL_SOCKET_IFNAME": "ib1"}, "fail", ("ib1 is down",)),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, "ok", ("eth0, ib0",)),
        ({"NCCL_SOCKET_IFNAME": "docker0"}, "fail", ("leads to no other node",)),
        ({"GLOO_SOCKET_IFNAME": "ib"}, "fail", ("GLOO_SOCKET_IFNAME=ib: n1 has no such interface",)),
        ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}, "ok", ("GLOO_SOCKET_IFNAME=ib0: ib0",)),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "fail", ("leads to no other node",)),
    ],
)
def test_interfaces(
    environ: dict[str, str], verdict: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "list_interfaces", lambda: FOUND)
    check(checks.check_interfaces(make(environ=environ)), verdict, *words)


def test_one_node_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "list_interfaces", lambda: (Interface("lo", True, 65536),))
    check(checks.check_interfaces(make(placement=make_placement(world=4))), "ok", "loopback")
    check(checks.check_interfaces(make()), "fail", "--network=host")


@pytest.mark.parametrize(
    ("name", "addresses", "suffix", "verdict", "words"),
    [
        ("n1", ("10.0.0.1",), None, "ok", ("n1 is 10.0.0.1",)),
        ("n1", (), None, "fail", ("n1 does not know n1", "getent")),
        ("n1.site", ("127.0.1.1",), None, "warn", ("n1.site is 127.0.1.1 on n1 itself", "/etc/hosts")),
        ("n2", ("127.0.1.1",), None, "fail", ("every node would meet itself",)),
        ("n2", ("::1",), None, "fail", ("every node would meet itself",)),
        ("n1", ("fe80::1%eth0",), None, "warn", ("no IPv4",)),
        ("n1.site", ("10.0.0.1",), "i", "warn", ("export MASTER_ADDR=n1i",)),
        ("n1i.site", ("10.0.0.1",), "i", "ok", ()),
        ("10.0.0.1", ("10.0.0.1",), "i", "ok", ()),
    ],
)
def test_the_master(
    name: str,
    addresses: tuple[str, ...],
    suffix: str | None,
    verdict: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "look_up", lambda asked: addresses if asked == name else ())
    site = make_site(network={"host_suffix": suffix} if suffix else {})
    check(checks.check_master(make(site, placement=make_placement(master_addr=name))), verdict, *words)


def test_no_other_node_may_take_the_master_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "look_up", lambda name: ("127.0.1.1",))
    around = make(placement=make_placement(rank=4, master_addr="n1"))
    check(checks.check_master(around), "fail", "every node would meet itself")


def test_one_node_may_meet_at_the_loopback() -> None:
    around = make(placement=make_placement(world=4, master_addr="localhost"))
    check(checks.check_master(around), "ok")
    check(checks.check_hostname(around), "n/a")


@pytest.mark.parametrize(
    ("addresses", "way", "environ", "verdict", "words"),
    [
        ((), "", {}, "fail", ("n1 does not know its own name", "GLOO_SOCKET_IFNAME")),
        (("127.0.1.1",), "", {}, "fail", ("127.0.1.1",)),
        (("127.0.1.1", "10.0.0.1"), "", {}, "fail", ("127.0.1.1",)),
        (("10.0.0.1", "127.0.1.1"), "", {}, "ok", ("10.0.0.1",)),
        ((), "", {"GLOO_SOCKET_IFNAME": "ib0"}, "ok", ("ib0",)),
        (("127.0.1.1",), "ib0", {}, "ok", ("n1 is 127.0.1.1", "GLOO_SOCKET_IFNAME=ib0")),
        ((), "ib0", {}, "ok", ("does not know its own name", "ib0")),
    ],
)
def test_the_name_of_the_node_itself(
    addresses: tuple[str, ...],
    way: str,
    environ: dict[str, str],
    verdict: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "look_up", lambda name: addresses)
    monkeypatch.setattr(checks, "choose_interface", lambda own, others: way)
    check(checks.check_hostname(make(environ=environ)), verdict, *words)


@pytest.mark.parametrize(
    ("states", "rate", "network_table", "verdict", "words"),
    [
        ("AAAA", 200.0, {"adapters_per_node": 4, "link": "hdr200"}, "ok", ("4 of 4",)),
        ("AAADD", 200.0, {"adapters_per_node": 4, "link": "hdr200"}, "fail", ("the profile has 4", "mlx5_3/1 DOWN")),
        ("AD", 200.0, {}, "ok", ("1 of 2",)),
        ("DD", 200.0, {}, "fail", ("no InfiniBand port is active",)),
        ("AA", 100.0, {"adapters_per_node": 2, "link": "hdr200"}, "warn", ("where the profile has 200",)),
        ("", 0.0, {"link": "hdr200"}, "warn", ("no InfiniBand adapter is visible",)),
        ("", 0.0, {}, "n/a", ()),
    ],
)
def test_infiniband(
    states: str, rate: float, network_table: dict[str, Any], verdict: str, words: tuple[str, ...]
) -> None:
    ports = tuple(
        Port(f"mlx5_{index}", "1", "ACTIVE" if state == "A" else "DOWN", "InfiniBand", rate)
        for index, state in enumerate(states)
    )
    check(checks.check_infiniband(make(make_site(network=network_table), ports=ports)), verdict, *words)


@pytest.mark.parametrize(
    ("free", "inodes", "size", "verdict"),
    [
        (100, None, None, "ok"),
        (0.5, None, None, "warn"),
        (100, 9_999, None, "fail"),
        (19.9, 10**6, 10, "fail"),
        (20, 10**6, 10, "warn"),
        (39.9, 10**6, 10, "warn"),
        (40, 10**6, 10, "ok"),
    ],
)
def test_room_for_checkpoints(
    free: float, inodes: int | None, size: float | None, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(f_bavail=int(free * GIB), f_frsize=1, f_files=inodes, f_favail=inodes)
    monkeypatch.setattr("os.statvfs", lambda folder: facts)
    wanted = MachineNeeds(folder=tmp_path, checkpoint_bytes=size and size * GIB, keep=3)
    check(checks.check_space(make(wanted=wanted)), verdict, str(tmp_path))


def test_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    around = make(wanted=MachineNeeds(folder=tmp_path / "runs/not/yet/there"))
    check(checks.check_write(around), "ok", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    gone = make(wanted=MachineNeeds(folder=Path("/proc/nowhere/run")))
    check(checks.check_write(gone), "fail", "/proc", "--dir")
    check(checks.check_write(make()), "n/a")


def test_file_systems_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"home": "$HOME", "scratch": "${S}/a", "project": "$UNSET/x"}
    around = make(make_site(storage=tables), {"HOME": str(tmp_path), "S": "/no/such"})
    assert checks.list_places(around) == [str(tmp_path), "/no/such/a"]
    check(checks.check_mounts(around), "warn", "not there: /no/such/a")
    monkeypatch.setattr(checks, "run_commands", lambda words, limit: [CommandResult(-9, hung=True) for _ in words])
    check(checks.check_mounts(around), "fail", "did not answer", "--exclude=n1")
    check(checks.check_mounts(make()), "n/a")


def test_caches_and_python() -> None:
    site = make_site(storage={"home": "$HOME", "scratch": "/scratch/a"})
    check(checks.check_caches(make(site, {"HOME": "/home/a"})), "warn", "HF_HOME", "/scratch/a/huggingface")
    there = {"HOME": "/home/a", "XDG_CACHE_HOME": "/scratch/a/.cache", "HF_HOME": "/scratch/a/hf"}
    check(checks.check_caches(make(site, there)), "ok")
    check(checks.check_caches(make(site, {**there, "TRITON_CACHE_DIR": "/home/a/t"})), "warn", "TRITON_CACHE_DIR")
    check(checks.check_caches(make(LOCAL, there)), "n/a")
    check(checks.check_python(make(mounts=(MountedFileSystem(PurePosixPath("/"), "lustre", "x"),))), "warn", "lustre")
    check(checks.check_python(make(mounts=(MountedFileSystem(PurePosixPath("/"), "ext4", "x"),))), "ok")


OFFLINE = make_site(internet={"nodes": "none"})
TOLD = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, "n/a", ()),
        ({"site": make_site(internet={"nodes": "direct"})}, "ok", ()),
        ({"site": OFFLINE, "environ": TOLD}, "ok", ()),
        ({"site": OFFLINE}, "warn", ("export HF_HUB_OFFLINE=1 WANDB_MODE=offline",)),
        ({"site": OFFLINE, "wanted": MachineNeeds(uses_hub=True)}, "fail", ("HF_HUB_OFFLINE",)),
        (
            {"site": OFFLINE, "wanted": MachineNeeds(uses_hub=True), "environ": {**TOLD, "HF_HUB_OFFLINE": "0"}},
            "fail",
            (),
        ),
        (
            {"site": OFFLINE, "wanted": MachineNeeds(uses_hub=True), "environ": {"HF_HUB_OFFLINE": "1"}},
            "warn",
            ("WANDB",),
        ),
    ],
)
def test_libraries_know_of_no_internet(changes: dict[str, Any], verdict: str, words: tuple[str, ...]) -> None:
    check(checks.check_offline(make(**changes)), verdict, *words)


def test_a_proxy_is_set_and_its_password_not_told() -> None:
    site = make_site(internet={"nodes": "proxy", "proxy": "http://p:10104", "no_proxy": "localhost"})
    check(checks.check_proxy(make(site)), "warn", "https_proxy=http://p:10104", "no_proxy=localhost")
    found = checks.check_proxy(make(site, {"https_proxy": "http://me:secret@p:1"}))
    check(found, "ok", "https_proxy")
    assert "secret" not in str(found)


def test_containers(tmp_path: Path) -> None:
    for environ, name in (
        ({"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ({"container": "podman"}, "podman"),
        ({"CH_RUNNING": "Weird Al Yankovic"}, "charliecloud"),
    ):
        check(checks.check_container(make(environ=environ, root=tmp_path)), "ok", f"inside {name}")
    check(checks.check_container(make(root=tmp_path)), "ok", "no container")
    wanted = MachineNeeds(container="pyxis")
    check(checks.check_container(make(root=tmp_path, wanted=wanted)), "fail", "pyxis")
    enroot = (
        MountedFileSystem(PurePosixPath("/"), "ext4", "x"),
        MountedFileSystem(PurePosixPath("/.lock"), "ext4", "x"),
    )
    check(checks.check_container(make(root=tmp_path, wanted=wanted, mounts=enroot)), "ok", "inside enroot")
    overlay = (MountedFileSystem(PurePosixPath("/"), "overlay", "overlay"),)
    check(checks.check_container(make(root=tmp_path, wanted=wanted, mounts=overlay)), "ok", "a container")


def test_the_scheduler_and_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*words: Any, **more: Any) -> None:
        monkeypatch.setattr(checks, "run_command", lambda command, limit_s: CommandResult(*words, **more))

    def judge_account(account: str) -> CheckResult:
        return checks.check_account(make(environ={"USER": "me"}, wanted=MachineNeeds(account=account)))

    answer(0, "gpu\n")
    check(checks.check_scheduler(make()), "ok")
    answer(1, "", "Unable to contact slurm controller")
    check(checks.check_scheduler(make()), "fail", "Unable")
    answer(-9, hung=True)
    check(checks.check_scheduler(make(make_site(scheduler="pbs"))), "fail", "qstat -Q", "did not answer")
    answer(0, "proj1\nproj2\nproj1\n")
    check(judge_account("Proj1"), "ok")
    answer(0, "proj1\nproj2\n")
    check(judge_account("proj3"), "fail", "proj1, proj2")
    answer(0, "")
    check(judge_account("proj3"), "n/a")
    answer(127, err="No such file")
    check(judge_account("proj3"), "n/a", "No such file")
    needed = make_site(request={"account": "required", "account_command": "jutil user projects"})
    check(checks.check_account(make(needed)), "warn", "jutil user projects")
    check(checks.check_account(make()), "n/a")


@settings(settings.get_profile("brief"))
@given(st.text(max_size=30))
def test_any_value_of_a_variable_gets_a_verdict(text: str) -> None:
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK", "NCPUS")
    around = make(environ=dict.fromkeys((*names, "OMP_NUM_THREADS"), text))
    with patch.object(checks, "list_interfaces", lambda: FOUND):
        checks.check_interfaces(around)
    checks.check_visible(around)
    checks.check_threads(around)
    checks.check_affinity(around)
