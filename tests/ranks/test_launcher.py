"""Placement from the variables of each launcher.

The sets named by a scheduler's version were recorded on running clusters and cut to the variables that place a rank;
those of PALS, MVAPICH2, JSM and Flux are written from their documentation; `tests/recorded` has what others really say.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_launchers import NODES, RECORDED
from shardway.errors import SiteError
from shardway.inherited import strip
from shardway.ranks.launcher import Placement, find_placement, list_ports

ALONE = Placement(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "none")

SLURM_JOB = {
    "SLURM_JOB_ID": "3085",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SLURM_26_BATCH = SLURM_JOB | {
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEPID": "-5",
    "SLURM_STEP_ID": "-5",
}
SLURM_24_BATCH = {
    "SLURM_JOB_ID": "85",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SLURM_22_BATCH = SLURM_24_BATCH | {"SLURM_JOB_ID": "105"}
SLURM_STEP = {
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
SLURM_26_TASK_0 = (
    SLURM_JOB | SLURM_STEP | {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
)
SLURM_26_TASK_3 = (
    SLURM_JOB | SLURM_STEP | {"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_STEP_ID": "1"}
)
SLURM_24_TASK_3 = SLURM_26_TASK_3 | {"SLURM_JOB_ID": "85"}
SLURM_22_TASK_3 = SLURM_26_TASK_3 | {"SLURM_JOB_ID": "105"}

OPENPBS_23_SCRIPT = {
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "108.pbshead",
    "PBS_NODEFILE": "/var/spool/pbs/aux/108.pbshead",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
}
OPENPBS_23_PBSDSH = {
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "119.pbshead",
    "PBS_NODEFILE": "/var/spool/pbs/aux/119.pbshead",
    "PBS_NODENUM": "1",
    "PBS_TASKNUM": "20000003",
}

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1.sim.test",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "3085",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
}
FLUX = {
    "FLUX_JOB_ID": "\u0192abc",
    "FLUX_JOB_SIZE": "8",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "5",
    "FLUX_TASK_LOCAL_ID": "1",
}
DEEPSPEED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
PALS = {
    "PALS_RANKID": "5",
    "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}


def port_of(job: str) -> int:
    """The documented rule for a port without MASTER_PORT."""
    return 15000 + zlib.crc32(job.encode()) % 15000


@pytest.fixture
def nodefile(tmp_path: Path) -> Path:
    """A PBS_NODEFILE of two hosts, one task each."""
    path = tmp_path / "nodefile"
    path.write_text("p1\np2\n")
    return path


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HOME": "/home/alice", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        SLURM_22_BATCH,
        SLURM_24_BATCH,
        SLURM_26_BATCH,
        SLURM_26_BATCH | {"SLURM_STEP_ID": "4294967291"},  # the batch step as an unsigned number
        SLURM_24_BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's interactive step
        SLURM_JOB,  # salloc's shell on the login node
        OPENPBS_23_SCRIPT,
    ],
)
def test_a_shell_or_batch_script_is_rank_0_of_1(environ: dict[str, str]) -> None:
    assert find_placement(environ) == ALONE


@pytest.mark.parametrize(
    ("environ", "job"),
    [(SLURM_22_TASK_3, "105.1"), (SLURM_24_TASK_3, "85.1"), (SLURM_26_TASK_3, "3085.1")],
)
def test_srun_task(environ: dict[str, str], job: str) -> None:
    assert find_placement(environ) == Placement(3, 4, 1, 2, 1, 2, "n1", port_of(job), "srun")


def test_srun_uneven_nodes() -> None:
    environ = SLURM_26_TASK_3 | {
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "3",
        "SLURM_PROCID": "6",
        "SLURM_STEP_NODELIST": "r[01-02]n[7-8]",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    }
    assert find_placement(environ) == Placement(6, 7, 0, 1, 3, 4, "r01n7", port_of("3085.1"), "srun")


def test_srun_on_one_node_meets_on_loopback() -> None:
    one_node = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert find_placement(SLURM_26_TASK_0 | one_node).master_addr == "127.0.0.1"


def test_srun_pty_of_a_single_task_needs_no_port() -> None:
    single = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert find_placement(SLURM_26_TASK_0 | single) == Placement(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "srun")


def test_two_steps_of_a_job_meet_at_different_ports() -> None:
    ports = {find_placement(SLURM_26_TASK_3 | {"SLURM_STEP_ID": str(step)}).master_port for step in range(8)}
    assert len(ports) == 8


def test_torchrun_wins_over_the_srun_around_it() -> None:
    expected = Placement(3, 4, 1, 2, 1, 2, "n1.sim.test", 29500, "torchrun")
    assert find_placement(SLURM_26_TASK_0 | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN) == expected


FT_LAUNCHER = TORCHRUN | {"FT_RANK_MONITOR_IPC_SOCKET": "/tmp/_ft_launcher7_rmon1.socket"}


def test_ft_launcher_is_told_from_torchrun_by_its_monitor() -> None:
    placement = find_placement(SLURM_26_TASK_0 | {"SLURM_STEP_NUM_TASKS": "2"} | FT_LAUNCHER)
    assert placement == Placement(3, 4, 1, 2, 1, 2, "n1.sim.test", 29500, "ft_launcher")
    assert placement.has_agent
    assert find_placement(FT_LAUNCHER | {"SHARDWAY_AGENT": "7"}).launcher == "shardway"


@pytest.mark.parametrize(
    ("count", "most", "again"), [("0", "3", True), ("2", "3", True), ("3", "3", False), ("0", "0", False)]
)
@pytest.mark.parametrize("environ", [TORCHRUN, FT_LAUNCHER], ids=["torchrun", "ft_launcher"])
def test_a_launcher_says_whether_it_starts_again(environ: dict[str, str], count: str, most: str, again: bool) -> None:
    told = {"TORCHELASTIC_RESTART_COUNT": count, "TORCHELASTIC_MAX_RESTARTS": most}
    assert find_placement(environ | told).starts_again is again
    assert not find_placement(environ | told | {"SHARDWAY_AGENT": "7"}).starts_again


def test_open_mpi_node_rank_is_not_the_node(nodefile: Path) -> None:
    environ = OPEN_MPI | {"PBS_JOBID": "108.pbshead", "PBS_NODEFILE": str(nodefile), "PBS_TASKNUM": "20000001"}
    assert find_placement(environ) == Placement(5, 8, 1, 4, None, None, "p1", port_of("108.pbshead"), "mpirun")


def test_open_mpi_under_slurm_does_not_read_the_daemons_rank() -> None:
    placement = find_placement(SLURM_26_TASK_0 | OPEN_MPI | {"PMIX_NAMESPACE": "prterun-n1-7@1"})
    assert placement == Placement(5, 8, 1, 4, None, None, "n1", port_of("prterun-n1-7@1"), "mpirun")


def test_open_mpi_on_one_node() -> None:
    environ = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}
    placement = find_placement(environ | {"MASTER_PORT": "20001"})
    assert placement == Placement(5, 8, 5, 8, 0, 1, "127.0.0.1", 20001, "mpirun")


def test_ranks_of_mpirun_meet_where_the_job_begins_and_not_its_daemons() -> None:
    """mpirun starts daemons by srun on all nodes but its own: SLURM_STEP_NODELIST is of these (Slurm 22.05)."""
    on_first = OPEN_MPI | SLURM_26_BATCH | {"PMIX_NAMESPACE": "425525249"}
    on_second = on_first | SLURM_STEP | {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_placement(on_first).master_addr == find_placement(on_second).master_addr == "n1"


def test_a_launch_whose_port_was_not_named_may_take_another_one() -> None:
    placement = find_placement(SLURM_26_TASK_3)
    assert list_ports(placement.launch)[0] == placement.master_port
    assert find_placement(SLURM_26_TASK_3 | {"MASTER_PORT": "29500"}).launch == ""
    assert find_placement(TORCHRUN).launch == ""


def test_hydra_wins_over_the_srun_that_started_its_proxies() -> None:
    placement = find_placement(SLURM_26_TASK_0 | HYDRA)
    assert placement == Placement(5, 8, 1, 4, None, None, "n1", port_of("3085"), "mpiexec (hydra)")


def test_srun_with_pmi2_is_srun() -> None:
    assert find_placement(SLURM_26_TASK_3 | {"PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "srun"


def test_pals_under_pbs(nodefile: Path) -> None:
    placement = find_placement(PALS | {"PBS_JOBID": "7.head", "PBS_NODEFILE": str(nodefile)})
    assert placement == Placement(5, 8, 1, 4, 1, None, "p1", port_of("7.head"), "mpiexec (PALS)")


def test_two_launches_of_pals_in_a_job_meet_at_two_ports(nodefile: Path) -> None:
    job = PALS | {"PBS_JOBID": "7.head", "PBS_NODEFILE": str(nodefile)}
    first, second = (find_placement(job | {"PALS_APID": name}).master_port for name in ("a-1", "b-2"))
    assert (first, second) == (port_of("a-1"), port_of("b-2"))


def test_others_that_speak_like_hydra() -> None:
    """Cray's PMI has other names for the local numbers (deepspeedai/DeepSpeed#461), and some have none."""
    cray = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
    placement = find_placement(cray | {"MASTER_ADDR": "n1", "MASTER_PORT": "20001"})
    assert placement == Placement(5, 8, 1, 4, None, None, "n1", 20001, "mpiexec (hydra)")
    assert find_placement({"PMI_RANK": "0", "PMI_SIZE": "1"}).world == 1


def test_pals_rank_set_by_srun_is_srun() -> None:
    assert find_placement(SLURM_26_TASK_3 | {"PALS_RANKID": "3"}).launcher == "srun"


def test_pbsdsh_one_rank_a_host(nodefile: Path) -> None:
    placement = find_placement(OPENPBS_23_PBSDSH | {"PBS_NODEFILE": str(nodefile)})
    assert placement == Placement(1, 2, 0, 1, 1, 2, "p1", port_of("119.pbshead"), "pbsdsh")


def test_torque_numbers_every_slot(nodefile: Path) -> None:
    nodefile.write_text("p1\np1\np2\np2\np2\n")
    environ = {"PBS_JOBID": "9.head", "PBS_NODEFILE": str(nodefile), "PBS_NODENUM": "1", "PBS_TASKNUM": "5"}
    placement = find_placement(environ | {"PBS_VNODENUM": "4"})
    assert placement == Placement(4, 5, 2, 3, 1, 2, "p1", port_of("9.head"), "pbsdsh")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (MVAPICH, Placement(5, 8, 1, 4, None, None, "n1", 20001, "mpirun (MVAPICH2)")),
        (JSRUN | {"LSB_JOBID": "77"}, Placement(5, 8, 1, 4, None, None, "n1", 20001, "jsrun")),
        (FLUX, Placement(5, 8, 1, 4, None, 2, "n1", 20001, "flux run")),
        (DEEPSPEED, Placement(5, 8, 1, 4, 1, 2, "n1", 20001, "the environment")),
    ],
    ids=["mvapich", "jsrun", "flux", "deepspeed"],
)
def test_other_launchers(environ: dict[str, str], expected: Placement) -> None:
    assert find_placement(environ | {"MASTER_ADDR": "n1", "MASTER_PORT": "20001"}) == expected


def test_jsrun_of_spectrum_mpi_is_an_mpirun() -> None:
    assert find_placement(JSRUN | OPEN_MPI | {"MASTER_ADDR": "n1", "MASTER_PORT": "20001"}).rank == 5


def test_flux_on_one_node_and_on_uneven_ones() -> None:
    one = {"FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "5"}
    placement = find_placement(FLUX | one)
    assert placement == Placement(5, 8, 5, 8, 0, 1, "127.0.0.1", port_of("\u0192abc"), "flux run")
    with pytest.raises(SiteError, match="as many tasks on each node"):
        find_placement(FLUX | {"FLUX_JOB_NNODES": "3"})


OWN_ADDRESSES = (
    *("localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]", "0.0.0.0", "ip6-localhost"),
    *("LOCALHOST", "localhost.", "localhost4", "localhost6.localdomain6", "node.localhost", "127.1", "0", "::"),
    *("::ffff:127.0.0.1", "[::ffff:127.0.1.1]", "::1%lo"),
)


@pytest.mark.parametrize("address", OWN_ADDRESSES)
@pytest.mark.parametrize("environ", [SLURM_26_TASK_3, OPEN_MPI | {"MASTER_PORT": "7000"}], ids=["srun", "mpirun"])
def test_an_address_of_each_nodes_own_is_refused_for_several(environ: dict[str, str], address: str) -> None:
    with pytest.raises(SiteError, match="with this one each node would meet itself") as failure:
        find_placement(environ | {"MASTER_ADDR": address})
    assert "unset MASTER_ADDR" in str(failure.value)


NO_ADDRESSES = (
    *("n1:29500", "tcp://n1", "[fd00::1]:29500", "n[1-2]", "n1,n2", "n1\nn2", "192.0.2.1 fd00::1 ", "(null)"),
    *("$(hostname)", "-n1", "n1-"),
)


@pytest.mark.parametrize("address", NO_ADDRESSES)
@pytest.mark.parametrize("environ", [SLURM_26_TASK_3, TORCHRUN], ids=["srun", "torchrun"])
def test_what_is_no_address_is_refused_before_ranks_wait_for_it(environ: dict[str, str], address: str) -> None:
    """All lines of `scontrol show hostnames`, all of `hostname -I`, an address with a port, words no shell expanded."""
    with pytest.raises(SiteError, match="allowed: one host name or address, without a port") as failure:
        find_placement(environ | {"MASTER_ADDR": address})
    assert len(str(failure.value).splitlines()) == 3


@pytest.mark.parametrize(
    "address", ["n1", "n1.cluster.", "N1-ib0", "node_7", "192.0.2.7", "fd00::1", "fe80::1%eth0", " n1\n"]
)
def test_a_host_by_any_name_or_address_passes(address: str) -> None:
    assert find_placement(SLURM_26_TASK_3 | {"MASTER_ADDR": address}).master_addr == address.strip()


@pytest.mark.parametrize("address", ["[fd00::1]", "fd00::1"])
def test_an_address_of_ipv6_may_have_brackets(address: str) -> None:
    placement = find_placement(SLURM_26_TASK_3 | {"MASTER_ADDR": address, "MASTER_PORT": "7000"})
    assert placement.master_addr == "fd00::1"
    assert placement.master_port == 7000


def test_ranks_by_hand_on_one_node_need_no_local_world() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert find_placement(environ) == Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "the environment")


def test_rank_and_world_size_by_hand() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert find_placement(environ) == Placement(1, 2, 1, 2, 0, 1, "localhost", 29500, "the environment")


def test_all_four_variables_by_hand_count_as_the_environment() -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert find_placement(environ) == Placement(3, 4, 1, 2, 1, 2, "n1.sim.test", 29500, "the environment")


def test_master_variables_win() -> None:
    placement = find_placement(SLURM_26_TASK_3 | {"MASTER_ADDR": "10.86.0.11", "MASTER_PORT": "29501"})
    assert (placement.master_addr, placement.master_port) == ("10.86.0.11", 29501)


@given(st.integers(1, 10**8), st.integers(0, 10**4))
def test_a_derived_port_is_in_range_and_the_same_for_all_ranks(job: int, step: int) -> None:
    ids = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
    ports = {find_placement(task | ids).master_port for task in (SLURM_26_TASK_0, SLURM_26_TASK_3)}
    assert len(ports) == 1
    assert 15000 <= ports.pop() < 30000


FRESH = "from a fresh shell; for a single rank, unset its variables"
REFUSED = {
    "rank without world size": (
        {"RANK": "1", "LOCAL_RANK": "1"},
        "the variables of the environment do not place this process among the ranks: WORLD_SIZE not set\n"
        "      allowed: WORLD_SIZE is an integer from 0 on\n"
        f"      to do: start the ranks with torchrun {FRESH}",
    ),
    "world size without rank": (
        {"WORLD_SIZE": "4"},
        "the variables of the environment do not place this process among the ranks: RANK not set\n"
        "      allowed: RANK is an integer from 0 on\n"
        f"      to do: start the ranks with torchrun {FRESH}",
    ),
    "two nodes without local rank": (
        {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        "the variables of the environment do not place this process among the ranks: LOCAL_RANK not set\n"
        "      allowed: LOCAL_RANK is an integer from 0 on\n"
        f"      to do: start the ranks with torchrun {FRESH}",
    ),
    "rank beyond the world": (
        TORCHRUN | {"RANK": "4"},
        'the variables of torchrun do not place this process among the ranks: RANK="4", WORLD_SIZE="4"\n'
        "      allowed: RANK less than WORLD_SIZE\n"
        f"      to do: start the ranks with torchrun {FRESH}",
    ),
    "not a number": (
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "eight"},
        "the variables of mpirun do not place this process among the ranks: "
        'OMPI_COMM_WORLD_SIZE="eight"\n'
        "      allowed: OMPI_COMM_WORLD_SIZE is an integer from 0 on\n"
        f"      to do: start the ranks with mpirun {FRESH}",
    ),
    "a negative number": (
        SLURM_26_TASK_3 | {"SLURM_PROCID": "-1"},
        'the variables of srun do not place this process among the ranks: SLURM_PROCID="-1"\n'
        "      allowed: SLURM_PROCID is an integer from 0 on\n"
        f"      to do: start the ranks with srun {FRESH}",
    ),
    "local rank beyond the node": (
        SLURM_26_TASK_3 | {"SLURM_LOCALID": "2"},
        "the variables of srun do not place this process among the ranks: "
        'SLURM_LOCALID="2", SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_STEP_NUM_TASKS="4"\n'
        "      allowed: SLURM_LOCALID less than SLURM_STEP_TASKS_PER_NODE, and that at most SLURM_STEP_NUM_TASKS\n"
        f"      to do: start the ranks with srun {FRESH}",
    ),
    "tasks that do not add up": (
        SLURM_26_TASK_3 | {"SLURM_STEP_TASKS_PER_NODE": "2"},
        "the variables of srun do not place this process among the ranks: "
        'SLURM_STEP_NUM_TASKS="4", SLURM_NODEID="1", SLURM_STEP_TASKS_PER_NODE="2"\n'
        "      allowed: 2 tasks and a node less than 1, as SLURM_STEP_TASKS_PER_NODE says\n"
        f"      to do: start the ranks with srun {FRESH}",
    ),
    "damaged tasks": (
        SLURM_26_TASK_3 | {"SLURM_STEP_TASKS_PER_NODE": "2(x"},
        'the variables of srun do not place this process among the ranks: SLURM_STEP_TASKS_PER_NODE="2(x"\n'
        '      allowed: the tasks of each node, such as "2(x3),1"\n'
        f"      to do: start the ranks with srun {FRESH}",
    ),
    "damaged host list": (
        SLURM_26_TASK_3 | {"SLURM_STEP_NODELIST": "n[1-2"},
        'the variables of srun do not place this process among the ranks: SLURM_STEP_NODELIST="n[1-2"\n'
        '      allowed: a host list such as "n[01-03,7],login1"\n'
        "      to do: export MASTER_ADDR with rank 0's host and hand it to every rank",
    ),
    "rank expanded in the job script": (
        SLURM_26_TASK_3 | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        'the variables of srun do not place this process among the ranks: RANK="0"\n'
        "      allowed: RANK not set, or 3 as srun says\n"
        "      to do: unset RANK in the job script",
    ),
    "world size left over": (
        SLURM_26_TASK_3 | {"WORLD_SIZE": "8"},
        'the variables of srun do not place this process among the ranks: WORLD_SIZE="8"\n'
        "      allowed: WORLD_SIZE not set, or 4 as srun says\n"
        "      to do: unset WORLD_SIZE in the job script",
    ),
    "several nodes without an address": (
        OPEN_MPI,
        "the variables of mpirun do not place this process among the ranks: MASTER_ADDR not set\n"
        "      allowed: a host name or address, since the ranks are on several nodes\n"
        "      to do: export MASTER_ADDR with rank 0's host and hand it to every rank",
    ),
    "no job id and no port": (
        HYDRA | {"MASTER_ADDR": "n1"},
        "the variables of mpiexec (hydra) do not place this process among the ranks: MASTER_PORT not set\n"
        "      allowed: a free port of rank 0's host, since no job id is there to derive one from\n"
        "      to do: export MASTER_PORT with one value for all ranks",
    ),
    "port out of range": (
        TORCHRUN | {"MASTER_PORT": "65536"},
        'the variables of torchrun do not place this process among the ranks: MASTER_PORT="65536"\n'
        "      allowed: a port from 1 to 65535\n"
        f"      to do: start the ranks with torchrun {FRESH}",
    ),
    "hydra without a local rank": (
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        "the variables of mpiexec (hydra) do not place this process among the ranks: MPI_LOCALRANKID not set\n"
        "      allowed: MPI_LOCALRANKID is an integer from 0 on\n"
        f"      to do: start the ranks with mpiexec (hydra) {FRESH}",
    ),
    "a number without a world": (
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-23@1"},
        'the variables of prun do not place this process among the ranks: PMIX_RANK="1"\n'
        "      allowed: PMIX_RANK not set, or with it RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE\n"
        "      to do: start the ranks with mpirun, or torchrun on each node; for a single rank, unset PMIX_RANK",
    ),
    "a job of one node around ranks on several": (
        OPEN_MPI | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"},
        'the variables of mpirun do not place this process among the ranks: SLURM_JOB_NODELIST="n1"\n'
        "      allowed: several hosts, since the ranks are on several nodes (SLURM_JOB_NODELIST may be left over from "
        "another job)\n"
        "      to do: export MASTER_ADDR with rank 0's host and hand it to every rank",
    ),
    "node file of another host": (
        OPENPBS_23_PBSDSH | {"PBS_NODEFILE": "/nonexistent/119.pbshead"},
        "the variables of pbsdsh do not place this process among the ranks: "
        'PBS_NODEFILE="/nonexistent/119.pbshead"\n'
        "      allowed: a file that this host can read, with one host name a line\n"
        "      to do: copy it to a shared folder in the job script, then: pbsdsh -- env PBS_NODEFILE=COPY ...",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_place_a_rank_is_refused(case: str) -> None:
    environ, text = REFUSED[case]
    with pytest.raises(SiteError) as caught:
        find_placement(environ)
    assert str(caught.value) == text


def test_several_pbsdsh_tasks_on_a_host_are_refused(nodefile: Path) -> None:
    nodefile.write_text("p1\np1\np2\np2\n")  # as recorded on OpenPBS 23.06 with mpiprocs=2
    with pytest.raises(SiteError) as caught:
        find_placement(OPENPBS_23_PBSDSH | {"PBS_NODEFILE": str(nodefile)})
    assert str(caught.value) == (
        "the variables of pbsdsh do not place this process among the ranks: "
        f'PBS_NODENUM="1", PBS_NODEFILE="{nodefile}"\n'
        "      allowed: each host once in PBS_NODEFILE, since PBS does not number the tasks of one host\n"
        "      to do: ask for mpiprocs=1 and start torchrun on each host, or start the ranks with mpirun"
    )


def test_a_host_beyond_the_node_file_is_refused(nodefile: Path) -> None:
    with pytest.raises(SiteError, match="PBS_NODENUM less than 2, the lines of PBS_NODEFILE"):
        find_placement(OPENPBS_23_PBSDSH | {"PBS_NODEFILE": str(nodefile), "PBS_NODENUM": "2"})


def test_placement_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import shardway.ranks.launcher as m; m.find_placement({})"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("launcher", RECORDED)
def test_the_ranks_of_a_launcher_as_recorded(launcher: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shardway.ranks.launcher.find_launching_process", lambda: f"{launcher} 4711")
    nodes = NODES[launcher]
    (tmp_path / "nodefile").write_text("\n".join(nodes))
    nodefile = {"PBS_NODEFILE": str(tmp_path / "nodefile")}
    first, second = (
        find_placement({**environ, **(nodefile if "PBS_NODEFILE" in environ else {})}) for environ in RECORDED[launcher]
    )
    alone = len(nodes) == 1
    assert [(each.rank, each.world, each.local_rank, each.local_world) for each in (first, second)] == [
        (0, 2, 0, 2 if alone else 1),
        (1, 2, *((1, 2) if alone else (0, 1))),
    ]
    if first.nodes is not None:
        assert (first.node, second.node) == (0, 0 if alone else 1)
        assert first.nodes == second.nodes == len(nodes)
    assert first.master_addr in (*nodes, "127.0.0.1", "localhost", "192.0.2.2")
    assert first.master_port > 0
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)


@pytest.mark.parametrize("launcher", RECORDED)
def test_a_job_that_a_recorded_rank_submits_has_no_place(launcher: str) -> None:
    for environ in RECORDED[launcher]:
        assert find_placement(strip(environ)) == ALONE


def test_two_launches_of_hydra_on_a_machine_meet_at_two_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in their variables differs but the rank; what started them does."""
    places = []
    for pid in (4711, 4712):
        monkeypatch.setattr("shardway.ranks.launcher.find_launching_process", lambda pid=pid: f"hydra_pmi_proxy {pid}")
        places.append(find_placement(RECORDED["mpich"][0]))
    assert places[0].master_port != places[1].master_port
    monkeypatch.setattr("shardway.ranks.launcher.find_launching_process", lambda: "")
    with pytest.raises(SiteError, match="export MASTER_PORT with one value for all ranks"):
        find_placement(RECORDED["mpich"][0])


def test_what_starts_ranks_is_found_above_them(tmp_path: Path) -> None:
    """Also past a shell in between; here the launcher is a shell by that name."""
    (tmp_path / "mpiexec").write_text('#!/bin/sh\nsh -c "$@; true"\n')
    (tmp_path / "mpiexec").chmod(0o755)
    code = f"'{sys.executable}' -c 'from shardway.ranks.launcher import find_launching_process as find; print(find())'"
    done = subprocess.run([str(tmp_path / "mpiexec"), code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mpiexec ")
    alone = subprocess.run(["sh", "-c", code], capture_output=True, text=True, check=True)
    assert alone.stdout == "\n"
