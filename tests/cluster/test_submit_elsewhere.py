from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_cluster import Cluster, Image
from submitting import INSIDE, RUN_FILE, SHARDWAY, Person, Submitted, disturbed, settle_in


def bound(image: Image) -> str:
    """The key that mounts what an image lacks."""
    folders = ", ".join(f'"{outside}:{inside}"' for outside, inside in (*image.mounts.items(), (INSIDE, "/mnt")))
    return f"site.mounts=[{folders}]"


@pytest.fixture(scope="module")
def contained(busy_alice: Person, image: Image, podman_image: str) -> dict[str, Submitted]:
    """A training on two nodes inside each runtime; the nodes have no /dev/mqueue, which podman would share."""
    ways = {
        "apptainer": (image.squashfs, "torchrun"),
        "charliecloud": (image.squashfs, "srun"),
        "podman": (podman_image, "srun"),
    }
    runs = {}
    for runtime, (name, launcher) in ways.items():
        words = (f"site.container={runtime}", f"site.image={name}", f"site.launcher={launcher}", bound(image))
        marked = disturbed(Path("/mnt"), MARKS="yes")
        runs[runtime] = busy_alice.train(runtime, *words, marked)
    return runs


@pytest.mark.parametrize("runtime", ["apptainer", "charliecloud", "podman"])
def test_ranks_on_two_nodes_train_inside_a_container(contained: dict[str, Submitted], runtime: str) -> None:
    run = contained[runtime]
    assert run.ended().state == "finished", run.printed()
    assert [system for _, system in run.marks()] == ["image", "image"]
    assert len({host for host, _ in run.marks()}) == 2


def test_an_array_of_runs_is_found_from_another_folder(busy_alice: Person, contained: dict[str, Submitted]) -> None:
    name = f"{busy_alice.folder.name}-seed"
    runs = [
        busy_alice.train(f"{name}-{seed}", f"train.seed={seed}", "site.nodes=1", "train.steps=5 steps")
        for seed in (1, 2, 3)
    ]
    for run in runs:
        assert run.ended().state == "finished"
    assert len({tuple(run.losses().values()) for run in runs}) == 3
    found = {Path(facts["path"]): facts for facts in busy_alice.facts("status", folder=busy_alice.cluster.home())}
    assert {found[run.path]["state"] for run in runs} == {"finished"}
    assert f"job {runs[1].job()}" in busy_alice.told("status", f"{name}-2", folder=busy_alice.cluster.home())


def test_a_newer_slurm_is_submitted_to_and_asked(slurm24: Cluster) -> None:
    alice = settle_in(slurm24, "work")
    run = alice.train_slowly("newer", 0.5, "site.nodes=1")
    run.until_step(1)
    assert alice.facts("status", run.path)["jobs"][0]["state"] == "running"
    run.hurry()
    assert run.ended().state == "finished", run.printed()
    waits = alice.train("waits", "site.queue=closed")
    (job,) = alice.facts("status", waits.path)["jobs"]
    assert (job["state"], job["scheduler_state"]) == ("queued", "PENDING")
    assert "closed" in job["explanation"]
    alice.told("stop", waits.path)
    assert alice.facts("status", waits.path)["jobs"][0]["state"] == "stopped"


@dataclass(frozen=True)
class Laptop:
    """This machine with a home and an ssh of its own, where "login" is the login node of the cluster."""

    folder: Path
    environment: dict[str, str]

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Begin a verb."""
        pipe = subprocess.PIPE
        command = [SHARDWAY, *map(str, words)]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def told(self, *words: object) -> str:
        """What a verb prints that has to succeed."""
        process = self.start(*words)
        out, said = process.communicate(timeout=180)
        assert process.returncode == 0, out + said
        return out


@pytest.fixture
def laptop(login_ssh_config: Path, tmp_path: Path) -> Iterator[Laptop]:
    """The laptop; its connection is ended with the test."""
    with tempfile.TemporaryDirectory(prefix="sw") as sockets:  # their paths must be short
        config, program = tmp_path / "config", tmp_path / "bin" / "ssh"
        config.write_text(f"ControlPath {sockets}/%C\nInclude {login_ssh_config}\n")
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n')
        program.chmod(0o755)
        (tmp_path / "tiny.toml").write_text(RUN_FILE)
        path = f"{program.parent}:{os.environ['PATH']}"
        yield Laptop(tmp_path, {**os.environ, "HOME": str(tmp_path), "PATH": path, "XDG_STATE_HOME": str(tmp_path)})
        subprocess.run([program, "-O", "exit", "login"], capture_output=True, timeout=20)


def test_a_laptop_submits_through_the_login_node(cluster: Cluster, laptop: Laptop) -> None:
    """submit, status, logs -f, stop and resume, all by ssh; the run directory is in the home there."""
    there = settle_in(cluster, "by-ssh")
    words = (
        "--on",
        "login:generic-slurm",
        "site.nodes=1",
        "site.launcher=torchrun",
        f"run.root={there.folder.name}/runs",
    )
    slow = disturbed(PAUSE=f"1.0:{there.write('tiny.slow', '')}")
    venv = f'site.venv="{sys.prefix}"'
    sent = json.loads(laptop.told("submit", "--json", "tiny.toml", "train.steps=60 steps", *words, slow, venv))
    run = Submitted(cluster, Path(sent["run"]))
    assert run.path == there.folder / "runs" / "tiny"
    reference = f"login:{run.path}"
    run.until_step(2)
    follower = laptop.start("logs", "-f", reference)
    status = json.loads(laptop.told("status", "--json", reference))
    assert (status["host"], status["jobs"][0]["state"]) == ("login", "running")
    laptop.told("stop", reference)
    stopped = run.ended(1)
    assert stopped.state == "stopped"
    followed, said = follower.communicate(timeout=60)
    assert follower.returncode == 0, said
    assert f"saved step-{stopped.step:09d}" in followed, "it followed to the end, and ended"
    run.hurry()
    laptop.told("resume", reference)
    assert run.ended(2).state == "finished"
    assert f"{reference}  finished" in laptop.told("status")
    assert len(run.losses()) == 60
