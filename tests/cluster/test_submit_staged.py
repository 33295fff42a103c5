"""Data on the disks of real nodes: read once by all together, found again by the next job, refused without room."""

from __future__ import annotations

import os

import numpy as np
import pytest
from submitting import Person

from shardway.units import format_bytes

NODES = ("n1", "n2", "n3")
TOKENS = 150_000_000
"""Several parts of a file, so that each node reads some of it."""
WORDS = ("train.global_batch=6", "site.nodes=3", "site.ranks_per_node=1")


def find_staged(alice: Person, node: str, disk: str) -> list[str]:
    """Size and links of each staged file, on a node's own disk."""
    found = alice.cluster.output(
        "find", disk, "-path", "*/objects/*", "-not", "-name", "*.sums", "-printf", "%s\\n", host=node
    )
    return found.split()


def test_the_nodes_read_the_data_once_together_and_the_next_job_none_of_it(alice: Person) -> None:
    path, disk = alice.folder / "t.npy", f"/tmp/disk-{os.getpid()}"
    np.save(path, np.random.default_rng(0).integers(0, 64, TOKENS).astype(np.uint16))
    os.chmod(path, 0o644)
    alice.write("staged.toml", (alice.folder / "tiny.toml").read_text().replace("samples = 512\n", ""))
    words = ("staged.toml", "data.kind=tokens", f"data.path={path}", *WORDS, f"data.stage={disk}")
    size = path.stat().st_size
    dry = alice.shardway("submit", "--dry-run", *words)
    assert f"data.stage copies {format_bytes(size)} of data to {disk} of each node" in dry.stderr
    plain = alice.submit(*words, "run.name=plain", "data.stage=off", "site.nodes=1")
    assert plain.ended().state == "finished"
    first = alice.submit(*words, "run.name=first")
    assert first.ended().state == "finished"
    assert first.losses() == pytest.approx(plain.losses(), rel=1e-5)
    (told,) = [event for event in first.directory.events(0) if event["event"] == "staged"]
    assert told["reason"].startswith(f"{format_bytes(len(NODES) * size)} of data copied")
    # bytes read from the shared side / bytes of the data: 1.00
    shares = f": {format_bytes(size)} from where they lie, {format_bytes((len(NODES) - 1) * size)} from other nodes"
    assert told["reason"].endswith(shares)
    assert [find_staged(alice, node, disk) for node in NODES] == [[str(size)]] * len(NODES)
    second = alice.submit(*words, "run.name=second")
    assert second.ended().state == "finished"
    assert second.losses() == pytest.approx(first.losses(), rel=1e-5)
    assert not [event for event in second.directory.events(0) if event["event"] == "staged"]


def test_a_folder_that_no_node_may_write_to_is_refused_and_leaves_no_run(alice: Person) -> None:
    path = alice.folder / "t.npy"
    np.save(path, np.arange(5000, dtype=np.uint16) % 64)
    os.chmod(path, 0o644)
    alice.write("staged.toml", (alice.folder / "tiny.toml").read_text().replace("samples = 512\n", ""))
    words = ("staged.toml", "data.kind=tokens", f"data.path={path}", *WORDS, "data.stage=/proc/disk")
    run = alice.submit(*words, "run.name=refused", "site.nodes=2")
    result = run.ended()
    assert result.exit_code == 3
    assert "data.stage: /proc/disk/shardway-stage-" in run.printed()
    assert run.directory.checkpoint_steps() == []
