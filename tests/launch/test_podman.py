from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from job_cases import make_job

from shardway.launch.containers import Podman
from shardway.launch.schedulers.slurm import Slurm


@pytest.mark.parametrize(
    ("has_queues", "words"),
    [(True, ["--ipc=host"]), (False, ["--ipc=private", "--volume=/dev/shm:/dev/shm"])],
)
def test_a_node_without_message_queues_shares_its_memory_alone(
    tmp_path: Path, has_queues: bool, words: list[str]
) -> None:
    """podman refuses --ipc=host on a node without /dev/mqueue."""
    queues = tmp_path / "mqueue"
    if has_queues:
        queues.mkdir()
    job = make_job("slurm", "srun", "podman")
    lines = [line.text for line in Podman().setup(job, Slurm())]
    script = "\n".join([*lines, "printf '%s\\n' \"${ipc[@]}\""]).replace("/dev/mqueue", str(queues))
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == words
    assert '"${ipc[@]}"' in Podman().wrap(job, Slurm())
