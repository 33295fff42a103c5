from __future__ import annotations

import resource
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_machines import check, make, make_placement, make_site

from shardway.hardware.command import CommandResult
from shardway.hardware.limits import TaskLimit
from shardway.hardware.mounts import MountedFileSystem
from shardway.hardware.probe import Interface, Port
from shardway.launch.schedulers.pbs import Pbs
from shardway.launch.schedulers.slurm import Slurm
from shardway.ranks.doctor import cluster, node
from shardway.ranks.doctor.surroundings import MachineNeeds
from shardway.ranks.network import look_up

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
    usable: int, cores: int, environ: dict[str, str], verdict: str, words: tuple[str, ...]
) -> None:
    check(node.judge_affinity(make(environ=environ, machine_cores=cores), usable), verdict, *words)


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
    around = make(usable_cores=usable, placement=make_placement(per_node=per_node))
    check(node.judge_threads(around, text), verdict, *words)


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
def test_shared_memory(size: int, free: int, changes: dict[str, Any], verdict: str, words: tuple[str, ...]) -> None:
    check(node.judge_shm(make(**changes), size, free), verdict, *words)


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    check(node.check_shm(make(root=tmp_path)), "fail", "/dev/shm: No such file")


def test_limits() -> None:
    check(node.judge_memlock(make(ports=(IB,)), 64 * 1024), "fail", "64 KiB", "unlimited")
    check(node.judge_memlock(make(ports=(IB,)), UNLIMITED), "ok")
    check(node.judge_memlock(make(), 64 * 1024), "ok", "no InfiniBand")
    check(node.judge_files(1024, 65536), "warn", "ulimit -n 65536")
    check(node.judge_files(1024, 2048), "warn", "ask the site for more than 2048")
    check(node.judge_files(4096, 4096), "ok")
    check(node.judge_files(UNLIMITED, UNLIMITED), "ok")
    check(node.judge_tasks(make(), None), "ok", "no limit")
    four = make(placement=make_placement(per_node=4))
    check(node.judge_tasks(four, TaskLimit(612, 100, "ulimit -u", "raise it")), "ok", "ulimit -u allows 612")
    check(node.judge_tasks(four, TaskLimit(611, 100, "ulimit -u", "raise it")), "warn", "raise it", "data.workers")


def test_the_folder_for_temporary_files(tmp_path: Path) -> None:
    check(node.check_tmp(make(environ={"TMPDIR": str(tmp_path / "gone")})), "fail", "gone", "export TMPDIR")
    check(node.check_tmp(make(environ={"TMPDIR": str(tmp_path)})), "ok", str(tmp_path))


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
def test_interfaces(environ: dict[str, str], verdict: str, words: tuple[str, ...]) -> None:
    check(cluster.judge_interfaces(make(environ=environ), FOUND), verdict, *words)


def test_one_node_needs_no_network() -> None:
    only = (Interface("lo", True, 65536),)
    check(cluster.judge_interfaces(make(placement=make_placement(world=4)), only), "ok", "loopback")
    check(cluster.judge_interfaces(make(), only), "fail", "--network=host")


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
    name: str, addresses: tuple[str, ...], suffix: str | None, verdict: str, words: tuple[str, ...]
) -> None:
    site = make_site(network={"host_suffix": suffix} if suffix else {})
    around = make(site, placement=make_placement(master_addr=name))
    check(cluster.judge_master(around, addresses), verdict, *words)


def test_no_other_node_may_take_the_master_for_itself() -> None:
    around = make(placement=make_placement(rank=4, master_addr="n1"))
    check(cluster.judge_master(around, ("127.0.1.1",)), "fail", "every node would meet itself")


def test_one_node_may_meet_at_the_loopback() -> None:
    around = make(placement=make_placement(world=4, master_addr="localhost"))
    check(cluster.judge_master(around, look_up("localhost")), "ok")
    check(cluster.check_hostname(around), "n/a")


def test_the_name_of_the_node_itself() -> None:
    check(cluster.judge_hostname(make(), ()), "fail", "n1 does not know its own name", "GLOO_SOCKET_IFNAME")
    check(cluster.judge_hostname(make(), ("127.0.1.1",)), "fail", "127.0.1.1")
    check(cluster.judge_hostname(make(), ("127.0.1.1", "10.0.0.1")), "fail", "127.0.1.1")
    check(cluster.judge_hostname(make(), ("10.0.0.1", "127.0.1.1")), "ok", "10.0.0.1")
    check(cluster.judge_hostname(make(environ={"GLOO_SOCKET_IFNAME": "ib0"}), ()), "ok", "ib0")
    check(cluster.judge_hostname(make(), ("127.0.1.1",), "ib0"), "ok", "n1 is 127.0.1.1", "GLOO_SOCKET_IFNAME=ib0")
    check(cluster.judge_hostname(make(), (), "ib0"), "ok", "does not know its own name", "ib0")


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
    check(cluster.judge_infiniband(make(make_site(network=network_table)), ports), verdict, *words)


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
def test_room_for_checkpoints(free: float, inodes: int | None, size: float | None, verdict: str) -> None:
    wanted = MachineNeeds(checkpoint_bytes=size and size * GIB, keep=3)
    check(cluster.judge_space(make(wanted=wanted), "/scratch", int(free * GIB), inodes), verdict, "/scratch")


def test_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    around = make(wanted=MachineNeeds(folder=tmp_path / "runs/not/yet/there"))
    check(cluster.check_write(around), "ok", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    gone = make(wanted=MachineNeeds(folder=Path("/proc/nowhere/run")))
    check(cluster.check_write(gone), "fail", "/proc", "--dir")
    check(cluster.check_write(make()), "n/a")


def test_file_systems_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"home": "$HOME", "scratch": "${S}/a", "project": "$UNSET/x"}
    around = make(make_site(storage=tables), {"HOME": str(tmp_path), "S": "/no/such"})
    assert cluster.list_places(around) == [str(tmp_path), "/no/such/a"]
    check(cluster.check_mounts(around), "warn", "not there: /no/such/a")
    monkeypatch.setattr(cluster, "run_commands", lambda words, limit: [CommandResult(-9, hung=True) for _ in words])
    check(cluster.check_mounts(around), "fail", "did not answer", "--exclude=n1")
    check(cluster.check_mounts(make()), "n/a")


def test_caches_and_python() -> None:
    site = make_site(storage={"home": "$HOME", "scratch": "/scratch/a"})
    check(cluster.check_caches(make(site, {"HOME": "/home/a"})), "warn", "HF_HOME", "/scratch/a/huggingface")
    there = {"HOME": "/home/a", "XDG_CACHE_HOME": "/scratch/a/.cache", "HF_HOME": "/scratch/a/hf"}
    check(cluster.check_caches(make(site, there)), "ok")
    check(cluster.check_caches(make(site, {**there, "TRITON_CACHE_DIR": "/home/a/t"})), "warn", "TRITON_CACHE_DIR")
    check(cluster.check_caches(make(LOCAL, there)), "n/a")
    check(cluster.check_python(make(mounts=(MountedFileSystem(PurePosixPath("/"), "lustre", "x"),))), "warn", "lustre")
    check(cluster.check_python(make(mounts=(MountedFileSystem(PurePosixPath("/"), "ext4", "x"),))), "ok")


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
    check(cluster.check_offline(make(**changes)), verdict, *words)


def test_a_proxy_is_set_and_its_password_not_told() -> None:
    site = make_site(internet={"nodes": "proxy", "proxy": "http://p:10104", "no_proxy": "localhost"})
    check(cluster.check_proxy(make(site)), "warn", "https_proxy=http://p:10104", "no_proxy=localhost")
    found = cluster.check_proxy(make(site, {"https_proxy": "http://me:secret@p:1"}))
    check(found, "ok", "https_proxy")
    assert "secret" not in str(found)


def test_containers(tmp_path: Path) -> None:
    for environ, name in (
        ({"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ({"container": "podman"}, "podman"),
        ({"CH_RUNNING": "Weird Al Yankovic"}, "charliecloud"),
    ):
        check(cluster.check_container(make(environ=environ, root=tmp_path)), "ok", f"inside {name}")
    check(cluster.check_container(make(root=tmp_path)), "ok", "no container")
    wanted = MachineNeeds(container="pyxis")
    check(cluster.check_container(make(root=tmp_path, wanted=wanted)), "fail", "pyxis")
    enroot = (
        MountedFileSystem(PurePosixPath("/"), "ext4", "x"),
        MountedFileSystem(PurePosixPath("/.lock"), "ext4", "x"),
    )
    check(cluster.check_container(make(root=tmp_path, wanted=wanted, mounts=enroot)), "ok", "inside enroot")
    overlay = (MountedFileSystem(PurePosixPath("/"), "overlay", "overlay"),)
    check(cluster.check_container(make(root=tmp_path, wanted=wanted, mounts=overlay)), "ok", "a container")


def test_the_scheduler_and_the_account() -> None:
    check(cluster.judge_scheduler(Slurm(), CommandResult(0, "gpu\n")), "ok")
    check(
        cluster.judge_scheduler(Slurm(), CommandResult(1, "", "Unable to contact slurm controller")), "fail", "Unable"
    )
    check(cluster.judge_scheduler(Pbs(), CommandResult(-9, hung=True)), "fail", "qstat -Q", "did not answer")
    check(cluster.judge_account("Proj1", Slurm(), CommandResult(0, "proj1\nproj2\nproj1\n")), "ok")
    check(cluster.judge_account("proj3", Slurm(), CommandResult(0, "proj1\nproj2\n")), "fail", "proj1, proj2")
    check(cluster.judge_account("proj3", Slurm(), CommandResult(0, "")), "n/a")
    check(cluster.judge_account("proj3", Slurm(), CommandResult(127, err="No such file")), "n/a", "No such file")
    needed = make_site(request={"account": "required", "account_command": "jutil user projects"})
    check(cluster.check_account(make(needed)), "warn", "jutil user projects")
    check(cluster.check_account(make()), "n/a")


@settings(settings.get_profile("brief"))
@given(st.text(max_size=30))
def test_any_value_of_a_variable_gets_a_verdict(text: str) -> None:
    from shardway.ranks.doctor import node

    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK", "NCPUS")
    around = make(environ=dict.fromkeys(names, text))
    cluster.judge_interfaces(around, FOUND)
    node.check_visible(around)
    node.judge_threads(around, text)
    node.judge_affinity(around, 16)
