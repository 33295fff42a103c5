"""Jobs of every kind, and a folder of fake commands in which their scripts really run.

Invariant: a fake notes the words of every call and the variables of every rank, so that nothing a script does to them
goes unseen. This module must not compare anything.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardway.launch.job import (
    Again,
    Chain,
    ContainerMount,
    ContainerUse,
    Job,
    JobEnvironment,
    Program,
    QueueTerms,
    Shape,
)
from shardway.launch.job_script import render_job_script, render_library
from shardway.launch.launchers import list_launchers
from shardway.plugins import GROUPS, make_own
from shardway.rundir.attempts import Result

COMMANDS = (
    *(
        "python3",
        "rank-program",
        "srun",
        "mpirun",
        "pbs_tmrsh",
        "scontrol",
        "squeue",
        "sacct",
        "sbatch",
        "qsub",
        "qstat",
        "qselect",
    ),
    *("scancel", "qdel", "ompi_info", "apptainer", "singularity", "ch-run", "podman", "enroot"),
)
RUN = Path("/scratch/alice/runs/base")
CODE = RUN / "attempts/0001/code"
SCRIPT_OF_A_PERSON = Program(("train.py", "--lr", "3e-4"))
OWN = Program(("-m", "shardway", "train", f"{RUN}/attempts/0001/run.toml", "--dir", str(RUN)), meets_by_itself=True)
IMAGES = {"podman": "docker.io/library/torch:2", "charliecloud": "/images/torch.sqfs", "apptainer": "/images/torch.sif"}


def list_combinations() -> list[tuple[str, str, str]]:
    """Scheduler, launcher and container runtime, wherever the three go together."""
    return [
        (scheduler.name, launcher, runtime)
        for scheduler in make_own("schedulers")
        for launcher in list_launchers(scheduler)
        for runtime in GROUPS["containers"].own
        if runtime != "pyxis" or (scheduler.name == "slurm" and launcher != "mpirun")
    ]


def make_job(scheduler: str, launcher: str = "torchrun", runtime: str = "none", **changes: Any) -> Job:
    """A job of two nodes with four ranks each (of one node on this machine), changed where words say so."""
    nodes = 1 if scheduler == "local" else 2
    job = Job(
        name="base",
        token="a1b2c3",
        site="test",
        scheduler=scheduler,
        launcher=launcher,
        run=RUN,
        attempt=1,
        program=OWN if launcher == "agent" else SCRIPT_OF_A_PERSON,
        shape=Shape(nodes, 4, 32, 4, 480 * 2**30, whole_nodes=True),
        terms=QueueTerms(
            2 * 3600.0, "gpu", "gpu", account="proj1", accelerators={"pbs": "ngpus"}.get(scheduler, "gres")
        ),
        around=JobEnvironment(CODE, venv="/project/venv" if runtime == "none" else ""),
        container=_container(runtime),
        warn_s=600.0,
        again=Again(2, 600.0, 45.0),
    )
    return replace(job, **changes)


def _container(runtime: str) -> ContainerUse:
    if runtime == "none":
        return ContainerUse()
    mounts = (ContainerMount("/data", "/data", read_only=runtime != "charliecloud"),)
    return ContainerUse(runtime, IMAGES.get(runtime, "/images/torch.sqsh"), mounts, vendor="nvidia")


@dataclass(frozen=True)
class Rank:
    """What one rank was started with."""

    words: list[str]
    variables: dict[str, str]
    folder: Path


@dataclass(frozen=True)
class Cluster:
    """A folder of fake commands; `state` is what $FAKES says."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> Cluster:
        """A new one: with a home folder, and nothing noted."""
        for name in ("bin", "calls", "ranks", "home/.config/shardway"):
            (path / name).mkdir(parents=True)
        commands = path / "fake_commands.sh"
        commands.write_bytes((Path(__file__).parent / commands.name).read_bytes())
        commands.chmod(0o755)
        for name in COMMANDS:
            (path / "bin" / name).symlink_to(commands)
        (path / "nodes").write_text("localhost\nlocalhost2\n")
        return cls(path)

    @property
    def secrets(self) -> Path:
        """The person's file of secrets."""
        return self.path / "home/.config/shardway/secrets.env"

    def write(self, name: str, text: str) -> None:
        """Say how a fake behaves."""
        (self.path / name).write_text(text)

    def variables(self, job_id: str) -> dict[str, str]:
        """What a job finds around it."""
        return {
            "PATH": f"{self.path}/bin:/usr/bin:/bin",
            "HOME": f"{self.path}/home",
            "FAKES": str(self.path),
            "LANG": "C.UTF-8",
            "SLURM_JOB_ID": job_id,
            "SLURM_JOB_NODELIST": "localhost,localhost2",
            "PBS_JOBID": job_id,
            "PBS_NODEFILE": f"{self.path}/nodes",
            "PBS_CONF_FILE": "/nonexistent",
        }

    def prepare(self, job: Job) -> None:
        """Write an attempt's folder as a submission does."""
        job.folder.make()
        job.folder.job_script.write_bytes(os.fsencode(render_job_script(job)))
        job.folder.job_library.write_text(render_library(job.scheduler))
        job.around.workdir.mkdir(parents=True, exist_ok=True)

    def start(
        self, job: Job, job_id: str = "101", script: str = "", variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        """Run the script of a prepared attempt, or another one, in a session of its own as schedulers do."""
        return subprocess.Popen(
            ["bash", script or str(job.folder.job_script)],
            preexec_fn=_as_from_a_scheduler,
            cwd=self.path,
            env={**self.variables(job_id), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(self, job: Job, job_id: str = "101", variables: Mapping[str, str] = MappingProxyType({})) -> Ran:
        """Run the script of a prepared attempt to its end."""
        process = self.start(job, job_id, variables=variables)
        out, _ = process.communicate(timeout=180)
        log = job.folder.job_log.read_bytes().decode(errors="replace") if job.folder.job_log.exists() else ""
        return Ran(process.returncode, out + log, job.folder.read_result())

    def list_calls(self, command: str = "") -> list[list[str]]:
        """The words of each call of a command, or of all."""
        paths = sorted((self.path / "calls").iterdir(), key=os.path.getmtime)
        calls = [path.read_bytes().decode().split("\0")[:-1] for path in paths]
        return [words for words in calls if command in ("", words[0])]

    def list_ranks(self) -> list[Rank]:
        """What each rank was started with, in no order."""
        return [_read_rank(path) for path in (self.path / "ranks").iterdir()]


def _as_from_a_scheduler() -> None:
    """With every signal as usual: a shell ignores SIGINT for what is behind it, and nohup SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Ran:
    """How a job script ended."""

    code: int
    said: str
    result: Result | None

    @property
    def state(self) -> str:
        """How its attempt ended, in one word."""
        return str(self.result.state) if self.result else ""


def _read_rank(path: Path) -> Rank:
    variables = dict(entry.split("=", 1) for entry in _read_list(path / "variables") if "=" in entry)
    return Rank(_read_list(path / "words"), variables, Path((path / "folder").read_text().removesuffix("\n")))


def _read_list(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\0")[:-1]


def with_literals(job: Job, literal: Mapping[str, str]) -> Job:
    """A job with variables that have to arrive unchanged."""
    return replace(job, around=replace(job.around, literal=literal))


def chained(job: Job, most: int = 5, *, ahead: bool = False) -> Job:
    """A job that goes on until it is done."""
    return replace(job, chain=Chain(until_done=True, max_attempts=most, ahead=ahead))


def wait_until(condition: Callable[[], bool], limit_s: float = 90.0) -> None:
    """Until that is so."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
