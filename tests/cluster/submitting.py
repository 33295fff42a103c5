"""A person at the cluster's login node who uses Shardway's verbs, and what a test reads of the runs.

Invariant: everything is asked for with the command that a person types; what is read is read from the run directory,
which this machine sees under the same path. This module must not break hosts: that is `real_cluster.Cluster`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_cluster import Cluster, ClusterError, wait_for

from shardway.rundir.attempts import Result
from shardway.rundir.directory import RunDir

INSIDE = Path(__file__).parent / "inside"
SHARDWAY = str(Path(sys.executable).with_name("shardway"))
START_S = 120.0
"""How long a job may take until its ranks train; most of it is the import of torch on a machine with few cores."""

RUN_FILE = """\
format = 1
[model]
dim = 16
layers = 1
heads = 2
vocab = 64
[data]
kind = "synthetic"
seq_len = 16
samples = 512
[train]
steps = "20 steps"
global_batch = 4
validate_every = "off"
[optim]
warmup = "4 steps"
[checkpoint]
every = "5 steps"
[run]
threads = 1
collective_timeout = "15s"
[site]
name = "generic-slurm"
nodes = 2
ranks_per_node = 1
walltime = "5m"
"""
"""Seconds of work for two nodes."""


@dataclass(frozen=True)
class Submitted:
    """A run that was submitted: the jobs of its attempts and what they wrote."""

    cluster: Cluster
    path: Path

    @property
    def directory(self) -> RunDir:
        """The run directory."""
        return RunDir(self.path)

    def job(self, attempt: int = 1) -> str:
        """The id of an attempt's job; "" while it has none."""
        submission = self.directory.attempt(attempt).read_submission()
        return submission.job if submission is not None else ""

    def result(self, attempt: int = 1) -> Result | None:
        """How an attempt ended, in the words that stand there."""
        return self.directory.attempt(attempt).read_result()

    def ended(self, attempt: int = 1, timeout_s: float = START_S) -> Result:
        """Wait until somebody has said how an attempt ended, and its job is gone from the scheduler."""
        wait_for(f"the end of attempt {attempt} of {self.path}", lambda: self.result(attempt) is not None, timeout_s)
        self.cluster.wait_until(self.job(attempt))
        result = self.result(attempt)
        assert result is not None
        return result

    def states(self) -> list[str]:
        """How the attempts ended, oldest first; "" for one of which nothing is written."""
        results = [attempt.read_result() for attempt in self.directory.attempts()]
        return [str(result.state) if result is not None else "" for result in results]

    def until_step(self, step: int, attempt: int = 1, timeout_s: float = START_S) -> None:
        """Wait until an attempt has done this step of the run."""

        def reached() -> bool:
            if self.result(attempt) is not None:
                raise ClusterError(f"attempt {attempt} ended before step {step}:\n{self.printed(attempt)}")
            status = self.directory.read_status()
            return self.directory.attempt(attempt).read_started() is not None and int(status.get("step", 0)) >= step

        wait_for(f"step {step} of {self.path}", reached, timeout_s)

    def losses(self) -> dict[int, float]:
        """Step -> loss as rank 0 recorded it; a step that was repeated counts as it was the last time."""
        events = self.directory.events(0)
        return {event["step"]: event["loss"] for event in events if event["event"] == "step"}

    def attempts_begun(self) -> int:
        """How many attempts came as far as to train."""
        return sum(event["event"] == "started" for event in self.directory.events(0))

    def printed(self, attempt: int = 1) -> str:
        """What the job of an attempt printed."""
        log = self.directory.attempt(attempt).job_log
        return log.read_text(errors="replace") if log.exists() else ""

    def queued(self) -> list[str]:
        """The ids of the jobs of this run that wait or run."""
        lines = self.cluster.output("squeue", "--me", "-h", "-o", "%A %j").splitlines()
        return [job for job, name in map(str.split, lines) if name.startswith(f"{self.path.name}.")]

    def marks(self) -> list[list[str]]:
        """What the ranks of the first attempt left: host, "host" or "image", a module."""
        return [path.read_text().split() for path in sorted(self.directory.attempt(1).path.glob("mark-*"))]

    def hurry(self) -> None:
        """Let a run that was submitted with pauses go on without them."""
        (self.path.parents[1] / f"{self.path.name}.slow").unlink()


@dataclass(frozen=True)
class Person:
    """Somebody who works in one folder of their home on the login node."""

    cluster: Cluster
    folder: Path

    def shardway(self, *words: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end."""
        return self.cluster.run(SHARDWAY, *words, folder=folder or self.folder, timeout_s=120)

    def told(self, *words: object, folder: Path | None = None) -> str:
        """What a verb prints that has to succeed."""
        done = self.shardway(*words, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refused(self, *words: object, code: int = 2) -> str:
        """What a verb says that has to fail, and to be told without a traceback."""
        done = self.shardway(*words)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def facts(self, verb: str, *words: object, folder: Path | None = None) -> Any:
        """What a verb says with --json."""
        return json.loads(self.told(verb, "--json", *words, folder=folder))

    def write(self, name: str, text: str) -> Path:
        """A file in the person's folder."""
        path = self.folder / name
        path.write_text(text)
        owner = self.folder.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
        return path

    def add_site(self, name: str, *lines: str) -> None:
        """A profile of the person's own, on top of the one for any Slurm."""
        folder = self.cluster.home() / ".config" / "shardway" / "sites"
        text = "\n".join((f'extends = "generic-slurm"\nname = "{name}"', *lines, ""))
        self.cluster.output("mkdir", "-p", folder)
        self.cluster.output("cp", self.write(f"{name}.toml", text), folder)

    def submit(self, *words: object) -> Submitted:
        """Submit with these words; `tiny.toml` is there to be named."""
        return Submitted(self.cluster, Path(self.facts("submit", *words)["run"]))

    def train(self, name: str, *words: object) -> Submitted:
        """Submit the tiny run file under a name."""
        return self.submit("tiny.toml", f"run.name={name}", *words)

    def train_slowly(self, name: str, pause_s: float, *words: object) -> Submitted:
        """The same with a pause in every step, until `hurry` is called."""
        brake = self.write(f"{name}.slow", "")
        return self.train(name, disturbed(PAUSE=f"{pause_s}:{brake}"), *words)


def settle_in(cluster: Cluster, name: str) -> Person:
    """A person in a new folder that holds the tiny run file."""
    person = Person(cluster, cluster.folder(name))
    person.write("tiny.toml", RUN_FILE)
    return person


def disturbed(inside: Path = INSIDE, **variables: object) -> str:
    """The key that lets ranks be disturbed as `inside/sitecustomize.py` says, for the command line of submit.

    `inside` is where the ranks see that file's folder.
    """
    table = {"PYTHONPATH": str(inside), **{f"TEST_{name}": str(value) for name, value in variables.items()}}
    return "site.environment={" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in table.items()) + "}"
