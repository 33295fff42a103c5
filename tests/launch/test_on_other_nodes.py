from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from job_cases import OWN, Cluster, Ran, make_job

from shardway.launch.job import ContainerUse, Job
from shardway.launch.script import read_block
from shardway.sites.schema import ContainerRules


def run(job: Job, cluster: Cluster, folder: str = "runs/base", **variables: str) -> Ran:
    """Run the script of a job among fakes, in a run directory there."""
    path = cluster.path / folder
    job = replace(job, run=path, around=replace(job.around, workdir=path / "attempts/0001/code", venv=""))
    cluster.prepare(job)
    return cluster.run(job, variables=variables)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.make(tmp_path / "cluster")


# --- PBS hands what its tasks print to the job's own output, past pbs_tmrsh (its transcript of `pbs_tmrsh ... | sort`)


def test_what_the_doctor_prints_is_in_its_file(cluster: Cluster) -> None:
    cluster.write("program", 'echo "disk warn from $NODE"')
    assert run(replace(make_job("pbs"), preflight=OWN), cluster).state == "finished"
    said = (cluster.path / "runs/base/attempts/0001/log/doctor.out").read_text()
    assert sorted(said.splitlines()) == ["disk warn from 0", "disk warn from 1"]


def test_what_ranks_print_is_kept_where_pbs_cannot_name_the_log(cluster: Cluster) -> None:
    cluster.write("program", 'echo "loss of $NODE"')
    said = run(make_job("pbs"), cluster, "it's 100%").said
    assert ("loss of 0" in said, "loss of 1" in said) == (True, True)


# --- ranks meet at a port of the first node, where the job script runs; NVIDIA/enroot#243, hpcaitech/ColossalAI#5049


def choose_port(job: str) -> int:
    script = f"job={job}\n{read_block('lib', 'free_port').text}\nfree_port"
    return int(subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("address", ["127.0.0.1", "::"])
def test_a_port_that_somebody_holds_is_left_to_them(address: str) -> None:
    first = choose_port("4711")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, first), family=family):
        second = choose_port("4711")
    assert second != first
    assert 15000 <= second < 30000


# --- bash's `wait -n` says 127, no children, once in about a thousand times that the last two end together

NODES = """
pbs_tmrsh() { shift; "$@"; }
wait() { [ "$1" != -n ] || { sleep 0.2; return 127; }; builtin wait "$@"; }
here=$PWD secrets=/nonexistent nodes=(a b) carried=(PATH)
: > environment.sh
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("exit 0", 0),
        pytest.param("exit $((NODE * 3))", 3),
        ('[ "$NODE" = 1 ] && sleep 60 || exit 127', 127),
    ],
)
def test_how_the_nodes_ended_is_their_own_word(program: str, code: int, tmp_path: Path) -> None:
    script = f"{NODES}\n{read_block('pbs', 'on_each_node').text}\non_each_node bash -c '{program}'"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    ) as started:
        try:
            assert started.wait(30) == code  # it waits for no node once one has failed
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


# --- PBS starts tasks with next to no environment (its transcripts of `pbs_tmrsh p2 env`)

MODULE = """module() { [ "$1" != load ] || export OF_MODULE="$2 set" PYTHONPATH=/sw/lib _ModuleTable001_=x; }
export -f module
"""


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_what_modules_set_is_carried_to_every_node(launcher: str, cluster: Cluster) -> None:
    job = make_job("pbs", launcher)
    job = replace(job, around=replace(job.around, modules=("torch/2.5",), secret_names=("HF_TOKEN",)))
    cluster.secrets.write_text("HF_TOKEN=hf_secret\n")
    cluster.write("functions", MODULE)
    assert run(job, cluster, BASH_ENV=f"{cluster.path}/functions").state == "finished"
    (words, *_) = cluster.list_calls("mpirun" if launcher == "mpirun" else "pbs_tmrsh")
    if launcher == "torchrun":
        (*_, line) = words
        assert all(f" {word} " in line for word in (r"OF_MODULE=torch/2.5\ set", "PYTHONPATH=/sw/lib"))
    else:
        carried = [words[at + 1] for at, word in enumerate(words) if word == "-x"]
        assert {"OF_MODULE", "PYTHONPATH", "HF_TOKEN"} <= set(carried)
    assert not [word for word in words if "_ModuleTable" in word or "hf_secret" in word]


def test_open_mpi_starts_its_daemons_from_here_and_as_they_are_found_here(cluster: Cluster, tmp_path: Path) -> None:
    found = {"PATH": f"{cluster.path}/bin:/usr/bin:/bin", "LD_LIBRARY_PATH": "/mpi/lib", "TMPDIR": str(tmp_path)}
    assert run(make_job("pbs", "mpirun"), cluster, "it's 100%", **found).state == "finished"
    (words,) = cluster.list_calls("mpirun")
    settings = {words[at + 1]: words[at + 2] for at, word in enumerate(words) if word == "--mca"}
    assert settings["plm_rsh_no_tree_spawn"] == "1"
    daemon = 'echo "$PATH $LD_LIBRARY_PATH" > "$HOME/orted"; echo'
    agent = [*settings["plm_rsh_agent"].split(), "localhost2", daemon, "-mca", '"a b"']
    subprocess.run(agent, env={**cluster.variables("101"), **found}, check=True)
    assert (cluster.path / "home/orted").read_text() == f"{found['PATH']} /mpi/lib\n"
    assert (cluster.path / "of-the-job").read_text() == "-mca a b\n"


HYDRA_VERSION = "HYDRA build details:\n    Version:                                 4.3.0\n"
INTEL_VERSION = "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\n"


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "local"])
@pytest.mark.parametrize("version", [HYDRA_VERSION, INTEL_VERSION, ""], ids=["mpich", "intel", "none"])
def test_an_mpirun_of_another_mpi_is_told_before_ranks_start(scheduler: str, version: str, cluster: Cluster) -> None:
    """That of conda's mpich, for one, which does not know --map-by (UPSY-group/UPSY-models#661)."""
    cluster.write("mpirun-version", version)
    job = make_job(scheduler, "mpirun")
    job = job if version else replace(job, start=job.start.model_copy(update={"mpirun": "/gone/mpirun"}))
    ran = run(job, cluster)
    assert (ran.state, cluster.list_ranks()) == ("crashed", []), ran.said
    assert ran.result is not None
    said = f"is not of Open MPI ({version.splitlines()[0]})" if version else "there is no /gone/mpirun on "
    assert said in ran.result.reason
    assert "load Open MPI (site.modules)" in ran.result.reason


def test_mpirun_tells_every_node_where_containers_are(cluster: Cluster) -> None:
    use = ContainerUse("enroot", "/i.sqsh", (), ContainerRules(by_scheduler=True, data_path="/raid/$PBS_JOBID"))
    assert run(make_job("pbs", "mpirun", "enroot", container=use), cluster).state == "finished"
    (words,) = cluster.list_calls("mpirun")
    assert ("-x", "ENROOT_DATA_PATH") in list(pairwise(words))


def test_enroot_has_a_folder_to_run_in_where_the_one_of_the_login_is_not(cluster: Cluster) -> None:
    cluster.write("program", 'echo "$XDG_RUNTIME_DIR"')
    (cluster.path / "bin/enroot").unlink()
    (cluster.path / "bin/enroot").write_text('#!/bin/bash\necho "$1 in ${XDG_RUNTIME_DIR-its own}"\n')
    (cluster.path / "bin/enroot").chmod(0o755)
    job = make_job("slurm", "srun", "enroot")
    there, gone = (
        {"XDG_RUNTIME_DIR": str(cluster.path)},
        {"XDG_RUNTIME_DIR": f"{cluster.path}/gone", "TMPDIR": "/local"},
    )
    assert f"start in {cluster.path}\n" in run(job, cluster, "a", **there).said
    assert "start in /local/shardway-101\n" in run(job, cluster, "b", **gone).said


# --- enroot refuses a name that is there, and keeps containers in the home folder unless told otherwise


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_each_node_has_a_container_of_its_own(scheduler: str, cluster: Cluster) -> None:
    (cluster.path / "bin/uname").write_text('#!/bin/bash\necho "node${NODE-$SLURM_NODEID}"\n')
    (cluster.path / "bin/uname").chmod(0o755)
    assert run(make_job(scheduler, "torchrun", "enroot"), cluster, HOSTNAME="head").state == "finished"
    calls = cluster.list_calls("enroot")
    names = ["shardway-101-node0", "shardway-101-node1"]
    created = sorted(words[2:] for words in calls if words[1] == "create")
    assert created == [["--name", name, "/images/torch.sqsh"] for name in names]
    assert sorted(words[-1] for words in calls if words[1] == "remove") == names
    started = [words[words.index("bash") - 1] for words in calls if words[1] == "start"]
    assert sorted(started) == names
