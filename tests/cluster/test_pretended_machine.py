from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_cluster import Cluster, ClusterError, wait_for


def over_ssh(config: Path, command: str) -> str:
    words = ["ssh", "-F", str(config), "login", command]
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


# --- hosts


def test_each_node_is_a_host_of_its_own(cluster: Cluster) -> None:
    told = cluster.output("srun", "-N3", "bash", "-c", 'echo "$(hostname) $(hostname -i) $(ls /tmp | wc -l) $$"')
    hosts = sorted(line.split() for line in told.splitlines())
    assert [host for host, *_ in hosts] == ["n1", "n2", "n3"]
    assert len({address for _, address, *_ in hosts}) == 3
    assert all(int(process) < 1000 for *_, process in hosts), "process numbers of their own are small"


def test_homes_are_shared_and_scratch_space_is_not(cluster: Cluster) -> None:
    folder = cluster.folder("shared")
    cluster.output("touch", folder / "seen", "/tmp/unseen", host="n1")
    assert cluster.run("test", "-e", folder / "seen", host="n2").returncode == 0
    assert cluster.run("test", "-e", "/tmp/unseen", host="n2").returncode == 1
    assert (folder / "seen").exists()


def test_loopback_is_each_hosts_own(cluster: Cluster) -> None:
    listen = "import socket; s = socket.create_server(('127.0.0.1', 29500)); print('ok')"
    told = cluster.output("srun", "-N3", "python3", "-c", listen)
    assert told.split() == ["ok"] * 3


def test_a_user_can_import_this_checkout_with_its_python(cluster: Cluster) -> None:
    where = cluster.output("srun", sys.executable, "-c", "import shardway; print(shardway.__file__)")
    assert where.strip() == str(Path(__file__).parents[2] / "src" / "shardway" / "__init__.py")


def test_words_and_variables_arrive_unchanged(cluster: Cluster) -> None:
    word = "a b'c\"d$(e)\nf,g"
    show = "import os, sys; sys.stdout.write(sys.argv[1] + os.environ['X'])"
    done = cluster.run("python3", "-c", show, word, variables={"X": word})
    assert done.stdout == word * 2


# --- login


def test_ssh_enters_the_login_node_as_the_user(cluster: Cluster, login_ssh_config: Path) -> None:
    assert over_ssh(login_ssh_config, "hostname; id -un; pwd") == f"login\nalice\n{cluster.home()}"
    assert over_ssh(login_ssh_config, "sinfo -h -p debug -o %N; ssh n2 hostname") == "n1\nn2"


def test_modules_load_in_a_login_shell(login_ssh_config: Path) -> None:
    loaded = "module purge; module load Toolchain/2025 CUDA; echo $TEST_MODULE_Toolchain $TEST_MODULE_CUDA"
    assert over_ssh(login_ssh_config, f"bash -lc {loaded!r}") == "2025 12.4"


# --- Slurm


@pytest.mark.parametrize(("version", "lent"), [("22.05", "cluster"), ("24.11", "slurm24")])
def test_a_job_runs_and_is_accounted_for(version: str, lent: str, request: pytest.FixtureRequest) -> None:
    cluster: Cluster = request.getfixturevalue(lent)
    assert cluster.output("sbatch", "--version").split()[1].startswith(version)
    folder = cluster.folder("job")
    job = cluster.submit("#!/bin/bash\nsrun hostname >hosts\nexit 3\n", "-N2", folder=folder)
    assert cluster.wait_until(job) == "FAILED"
    assert sorted((folder / "hosts").read_text().split()) == ["n1", "n2"]
    row = cluster.accounted(job, "ExitCode", "Account", "NNodes")
    assert row["State"] == "FAILED"
    assert (row["ExitCode"], row["Account"], row["NNodes"]) == ("3:0", "physics", "2")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["-A", "nosuch"], "Invalid account"),
        (["-A", "staff"], "Invalid account"),
        (["-p", "nosuch"], "Invalid partition name"),
        (["--qos=short", "-t", "10"], "QOSMaxWallDurationPerJobLimit"),
        (["--mem=1T"], "Memory specification"),
    ],
)
def test_what_cannot_run_is_refused(cluster: Cluster, options: list[str], refusal: str) -> None:
    with pytest.raises(ClusterError, match=refusal):
        cluster.submit("#!/bin/bash\n", *options)


def test_who_has_no_account_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="Invalid account"):
        cluster.submit("#!/bin/bash\n", user="eve")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-t", "5:00:00"], "PartitionTimeLimit"),
        (["--qos=waits", "-t", "10"], "QOSMaxWallDurationPerJobLimit"),
        (["-p", "closed"], "PartitionDown"),
        (["--begin=now+1hour"], "BeginTime"),
    ],
)
def test_what_waits_says_why(cluster: Cluster, options: list[str], reason: str) -> None:
    job = cluster.submit("#!/bin/bash\n", *options)
    wait_for(f"{reason} of job {job}", lambda: cluster.describe(job)["Reason"] == reason, timeout_s=60)
    assert cluster.describe(job)["JobState"] == "PENDING"


def test_a_job_over_its_memory_is_killed(cluster: Cluster) -> None:
    if 'CGROUPS="1"' not in (cluster.root / "conf" / "settings").read_text():
        pytest.skip("this machine has no control groups of version 1")
    job = cluster.submit("#!/bin/bash\nexec python3 -c 'bytearray(400 * 10**6)'\n", "--mem=100")
    assert cluster.wait_until(job) == "OUT_OF_MEMORY"


def test_a_job_makes_room_for_a_more_urgent_one(cluster: Cluster) -> None:
    gives = cluster.submit("#!/bin/bash\nsleep 60\n", "-p", "preempt", "-N3", "--exclusive", "--no-requeue")
    cluster.wait_until(gives, "RUNNING")
    takes = cluster.submit("#!/bin/bash\ntrue\n", "-N3", "--exclusive")
    assert cluster.wait_until(gives) == "PREEMPTED"
    assert cluster.wait_until(takes) == "COMPLETED"


def test_a_scheduler_that_is_down_answers_again_later(cluster: Cluster) -> None:
    job = cluster.submit("#!/bin/bash\nsleep 120\n")
    cluster.wait_until(job, "RUNNING")
    cluster.stop_scheduler()
    done = cluster.run("squeue", "-j", job)
    assert done.returncode == 1
    assert "Unable to contact slurm controller" in done.stderr
    cluster.start_scheduler()
    assert cluster.describe(job)["JobState"] == "RUNNING"


def test_the_crash_of_a_node_is_seen(cluster: Cluster) -> None:
    job = cluster.submit("#!/bin/bash\nsleep 120\n", "-N2", "-w", "n2,n3", "--no-requeue")
    cluster.wait_until(job, "RUNNING")
    cluster.crash("n3")
    assert cluster.wait_until(job, timeout_s=90) == "NODE_FAIL"
    assert cluster.output("sinfo", "-h", "-N", "-n", "n3", "-p", "batch", "-o", "%T").startswith("down")
    cluster.clear()
    assert cluster.output("srun", "-w", "n3", "hostname").strip() == "n3"


def test_a_cable_is_cut_and_mended(cluster: Cluster) -> None:
    reach = ("bash", "-c", "</dev/tcp/n3/22")
    assert cluster.run("timeout", "20", *reach).returncode == 0
    cluster.cut("n3")
    assert cluster.run("timeout", "2", *reach).returncode != 0
    cluster.mend("n3")
    assert cluster.run("timeout", "20", *reach).returncode == 0


# --- Open MPI


def test_mpirun_starts_ranks_on_every_node(cluster: Cluster) -> None:
    folder = cluster.folder("mpi")
    script = "#!/bin/bash\nmpirun bash -c 'echo $(hostname) $OMPI_COMM_WORLD_RANK' >ranks\n"
    job = cluster.submit(script, "-N2", "--ntasks-per-node=2", folder=folder)
    assert cluster.wait_until(job) == "COMPLETED"
    told = sorted((folder / "ranks").read_text().splitlines())
    assert told == ["n1 0", "n1 1", "n2 2", "n2 3"]


def test_srun_offers_pmix(cluster: Cluster) -> None:
    told = cluster.output("srun", "--mpi=pmix", "-N2", "bash", "-c", "echo $PMIX_RANK")
    assert sorted(told.split()) == ["0", "1"]


def test_a_name_in_use_elsewhere_is_left_alone(cluster: Cluster) -> None:
    """All that stands outside the cluster's folder carries its name."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(rf"\blap-{cluster.name}@", links)) == 1
    assert not re.search(r"\b(br0|n1|n2|n3)[@:]", links)
