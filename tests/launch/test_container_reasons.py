"""Containers as Pyxis 0.24 and Enroot 4.1.2 made them under Slurm 22.05 and 26.05, and Enroot under OpenPBS 23.06, in
November 2026, with fakes in their place: what a job says where one does not start, what it leaves, where it writes."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
from job_cases import Cluster, Ran, make_job

from shardway.launch.job import ContainerUse, Job
from shardway.launch.job_script import render_job_script
from shardway.plugins import GROUPS
from shardway.sites.schema import ContainerRules

NO_SQUASHFS = """\
slurmstepd-n2: error: pyxis: child 3901 failed with error code: 1
slurmstepd-n2: error: pyxis: failed to create container filesystem for image: /home/alice/bad.sqsh
slurmstepd-n2: error: pyxis: printing enroot log file:
slurmstepd-n2: error: pyxis:     [ERROR] Invalid image format: /home/alice/bad.sqsh
slurmstepd-n2: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-n2: error: Failed to invoke spank plugin stack
slurmstepd-n2: error: pyxis: child 3916 failed with error code: 1
srun: error: n2: task 1: Exited with exit code 1
"""
NEWER_SLURM = """\
[2026-11-26T04:21:14.007] error: pyxis: child 1143 failed with error code: 1
[2026-11-26T04:21:14.007] error: pyxis: failed to create container filesystem for image: /home/alice/half.sqsh
[2026-11-26T04:21:14.007] error: pyxis: printing enroot log file:
[2026-11-26T04:21:14.007] error: pyxis:     [ERROR] Invalid image format: /home/alice/half.sqsh
[2026-11-26T04:21:14.007] error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
"""
NO_MOUNT = """\
slurmstepd-n1: error: pyxis: --container-mounts: source path does not exist: /nosuchfolder
slurmstepd-n1: error: pyxis: couldn't create enroot start configuration script
slurmstepd-n1: error: pyxis: printing enroot log file:
slurmstepd-n1: error: pyxis:     [INFO] Extracting squashfs filesystem...
slurmstepd-n1: error: pyxis:     Parallel unsquashfs: Using 1 processor
slurmstepd-n1: error: pyxis: container was not started successfully by another task
"""
NO_REGISTRY = """\
slurmstepd-n1: error: pyxis: child 7164 failed with error code: 6
slurmstepd-n1: error: pyxis: failed to import docker image: nvcr.io#nvidia/pytorch:25.04-py3
slurmstepd-n1: error: pyxis: printing enroot log file:
slurmstepd-n1: error: pyxis:     [INFO] Querying registry for permission grant
slurmstepd-n1: error: pyxis:     curl: (6) Could not resolve host: nvcr.io
slurmstepd-n1: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
"""
NO_FOLDER = """\
slurmstepd-n1: error: pyxis: couldn't chdir to /home/alice/w: No such file or directory
slurmstepd-n1: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
"""
OF_ENROOT = """\
[INFO] Extracting squashfs filesystem...
enroot-mount: failed to mount: /gone at /tmp/enroot/shardway-28-n2/gone: No such file or directory
srun: error: n2: task 1: Exited with exit code 1
"""
NOT_MADE = """\
[ERROR] No such file or directory: /raid/containers/65.pbs/base
[ERROR] No such file or directory: /raid/containers/65.pbs/base
"""
NO_TORCH = """\
/usr/bin/python3: Error while finding module specification for 'torch.distributed.run' (ModuleNotFoundError: No module named 'torch')
srun: error: n2: task 1: Exited with exit code 1
"""  # noqa: E501
STARTED = "the container did not start: "
SAID = {
    "no squashfs": ("pyxis", NO_SQUASHFS, f"{STARTED}Invalid image format: /home/alice/bad.sqsh"),
    "no squashfs, Slurm 26.05": ("pyxis", NEWER_SLURM, f"{STARTED}Invalid image format: /home/alice/half.sqsh"),
    "no mount": ("pyxis", NO_MOUNT, f"{STARTED}--container-mounts: source path does not exist: /nosuchfolder"),
    "no registry": ("pyxis", NO_REGISTRY, f"{STARTED}curl: (6) Could not resolve host: nvcr.io"),
    "no folder": ("pyxis", NO_FOLDER, f"{STARTED}couldn't chdir to /home/alice/w: No such file or directory"),
    "labelled": ("pyxis", f"0: {NO_FOLDER}", f"{STARTED}couldn't chdir to /home/alice/w: No such file or directory"),
    "of enroot": ("enroot", OF_ENROOT, STARTED + OF_ENROOT.splitlines()[1]),
    "not made by PBS": ("enroot", NOT_MADE, STARTED + NOT_MADE.splitlines()[0].removeprefix("[ERROR] ")),
    "of a program in enroot": ("enroot", "[ERROR] the loss is NaN\n", ""),
    "no torch": ("pyxis", NO_TORCH, "its Python has no torch (site.image, site.venv)"),
    "no environment": (
        "pyxis",
        "/p/venv/bin/activate: line 1: /p/venv/bin/activate: No such file or directory\n",
        "it does not see the environment (site.venv, site.mounts)",
    ),
    "no python": ("enroot", "agent: line 1: exec: python3: not found\n", "there is no python3 (site.image, site.venv)"),
    "of a program": ("none", "FATAL: no database\n[ERROR] No module named torch\n", ""),
    "nothing": ("pyxis", "", ""),
}


def prepare(path: Path, runtime: str, scheduler: str = "slurm", **changes: object) -> tuple[Cluster, Job]:
    """A job of this runtime among fakes, as job 101."""
    cluster = Cluster.make(path / "cluster")
    launcher = "srun" if scheduler == "slurm" else "torchrun"
    job = make_job(scheduler, launcher, runtime, run=cluster.path / "run", **changes)
    job = replace(job, around=replace(job.around, workdir=job.run, venv=""))
    cluster.prepare(job)
    return cluster, job


def reason_of(ran: Ran) -> str:
    assert ran.result is not None
    return str(ran.result.reason)


@pytest.mark.parametrize("name", SAID)
def test_why_a_container_did_not_start(name: str, tmp_path: Path) -> None:
    runtime, log, why = SAID[name]
    cluster, job = prepare(tmp_path, runtime)
    cluster.write("log", log)
    cluster.write("program", 'cp "$FAKES/log" "$SHARDWAY_ATTEMPT_DIR/log/job.out"; exit 1')
    ran = cluster.run(job, "101")
    assert ran.state == "crashed"
    assert reason_of(ran) == "the program ended with exit code 1" + (f": {why}" if why else "")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[ERROR] Invalid image format: /home/alice/bad.sqsh", "Invalid image format: /home/alice/bad.sqsh"),
        ("FATAL ERROR: File system corruption detected", "FATAL ERROR: File system corruption detected"),  # half of one
        ("shardway-138.pbs: line 10: exec: enroot: not found", "a node has no enroot (site.container)"),
        ("shardway-3: line 9: /opt/enroot: No such file or directory", "a node has no /opt/enroot (site.container)"),
    ],
)
def test_why_a_container_could_not_be_created(line: str, why: str, tmp_path: Path) -> None:
    cluster, job = prepare(tmp_path, "enroot")
    cluster.write("log", f"[INFO] Extracting squashfs filesystem...\n{line}\n")
    cluster.write("create", 'cp "$FAKES/log" "$SHARDWAY_ATTEMPT_DIR/log/job.out"; false')
    ran = cluster.run(job, "101")
    assert reason_of(ran) == f"the container could not be created: {why}"
    assert cluster.list_ranks() == []


@pytest.mark.parametrize("answer", ["98\n101\n", "", "Welcome to cluster 7\n"])
@pytest.mark.parametrize(("scheduler", "server"), [("slurm", ""), ("pbs", ".pbs-2.example")])
def test_containers_of_jobs_that_were_killed_are_removed(
    scheduler: str, server: str, answer: str, tmp_path: Path
) -> None:
    """Those of earlier jobs on this node alone, and none where the scheduler does not say which jobs there are."""
    cluster, job = prepare(tmp_path, "enroot", scheduler)
    here = platform.node()
    left = f"shardway-97{server}-{here}"
    others = (
        *(f"shardway-98{server}-{here}", f"shardway-300{server}-{here}", f"shardway-97{server}-other"),
        *(f"shardway-97.elsewhere-{here}", f"shardway-{here}", "mine", "shardway-x-1", "pyxis_7.0"),
    )
    cluster.write("containers", "\n".join((left, *others)) + "\n")
    cluster.write("end", answer.replace("\n", f"{server}\n"))
    ran = cluster.run(job, f"101{server}")
    assert ran.state == "finished"
    removed = [words[-1] for words in cluster.list_calls("enroot") if words[1] == "remove"]
    assert set(removed) == {f"shardway-101{server}-{here}", *([left] if answer.startswith("98") else [])}


@pytest.mark.parametrize("runtime", GROUPS["containers"].own)
def test_a_job_lends_its_container_a_cache_that_lasts(runtime: str, tmp_path: Path) -> None:
    cluster, job = prepare(tmp_path, runtime)
    assert cluster.run(job, "101").state == "finished"
    lent = {rank.variables.get("SHARDWAY_LENT_CACHE") for rank in cluster.list_ranks()}
    assert lent == ({None} if runtime == "none" else {f"{job.run}/cache"})


@pytest.mark.parametrize("said", ["--container-readonly", "--container-writable", ""])
def test_a_container_of_pyxis_may_be_written_to_unless_the_site_says_otherwise(said: str) -> None:
    """Enroot's default is a root that is read-only, where a training found no place for its cache; Pyxis takes no two
    of these options."""
    use = ContainerUse("pyxis", "/i.sqsh", (), ContainerRules(options=(said,) if said else ()))
    script = render_job_script(make_job("slurm", "srun", "pyxis", container=use))
    words = [word for word in script.split() if word in ("--container-readonly", "--container-writable")]
    assert words == [said or "--container-writable"]
