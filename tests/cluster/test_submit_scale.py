"""A scaling study as jobs of a real Slurm: submitted once, left, gone on with, and read."""

from __future__ import annotations

import json

import pytest
from real_cluster import Cluster
from submitting import Person, settle_in

from shardway.rundir.directory import RunDir

SCALE = ("scale", "tiny.toml", "--nodes", "1,2", "--weak", "--steps", "12")


@pytest.fixture
def alice(cluster: Cluster) -> Person:
    """Alice in a folder of her own."""
    return settle_in(cluster, "work")


def test_a_study_is_submitted_once_and_read(alice: Person) -> None:
    alice.told(*SCALE, "--dry-run")
    assert not (alice.folder / "runs").exists()
    first = alice.shardway(*SCALE, "--no-wait")  # left before a job has ended
    assert first.returncode in (0, 4), first.stderr
    facts = json.loads(alice.told(*SCALE, "--json"))
    assert [(point["size"], point["ranks"]) for point in facts["points"]] == [(1, 1), (2, 2)]
    assert [point["runs"][0]["work"]["samples"] for point in facts["points"]] == [4, 8]
    for size, point in zip((1, 2), facts["points"], strict=True):
        run = RunDir(alice.folder / f"runs/tiny-scale/weak-{size}nodes-1")
        assert len(run.attempts()) == 1
        assert len(point["runs"][0]["jobs"]) == 1
    assert facts["points"][1]["efficiency"]["value"] > 0
