from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_cluster import Cluster, Image

LOOK = "import socket, sys, shardway; print(socket.gethostname(), sys.version_info[1], shardway.__file__)"
INSIDE = [f"{host} 11 /opt/src/shardway/__init__.py" for host in ("n1", "n2")]


def binds(image: Image, option: str) -> Iterator[str]:
    for outside, inside in image.mounts.items():
        yield from (option, f"{outside}:{inside}")


def look_around(cluster: Cluster, *container: object) -> list[str]:
    # By name: one that is still completing the job before would otherwise be passed over for a third.
    done = cluster.run("srun", "-N2", "-w", "n1,n2", "-l", *container, "python3", "-c", LOOK, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return sorted(line.split(": ", 1)[1] for line in done.stdout.splitlines())


@pytest.mark.parametrize("kind", ["squashfs", "folder"])
def test_apptainer_enters_the_container_on_every_node(cluster: Cluster, image: Image, kind: str) -> None:
    words = ("apptainer", "-q", "exec", *binds(image, "--bind"), getattr(image, kind))
    assert look_around(cluster, *words) == INSIDE


def test_charliecloud_enters_the_container_on_every_node(cluster: Cluster, image: Image) -> None:
    # It makes a folder for a person's mounts at the first use, and two at once collide there (ch-run 0.31): the hosts
    # of this cluster share /var/tmp, where nodes have their own.
    cluster.run("ch-run", image.squashfs, "--", "true", host="n1")
    assert look_around(cluster, "ch-run", *binds(image, "-b"), image.squashfs, "--") == INSIDE


def test_podman_enters_the_container_on_every_node(cluster: Cluster, image: Image, podman_image: str) -> None:
    assert look_around(cluster, "podman", "run", "--rm", *binds(image, "-v"), podman_image) == INSIDE


def test_torch_is_found_in_the_container(cluster: Cluster, image: Image) -> None:
    words = ("apptainer", "-q", "exec", *binds(image, "--bind"), image.squashfs)
    done = cluster.run(*words, "python3", "-c", "import torch; print(torch.__file__)", host="n1", timeout_s=120)
    assert done.stdout.strip() == "/opt/site-packages/torch/__init__.py", done.stderr


def test_the_system_of_the_container_is_another_one(cluster: Cluster, image: Image) -> None:
    inside = cluster.run("apptainer", "-q", "exec", image.squashfs, "sh", "-c", "command -v sbatch", host="n1")
    assert inside.returncode != 0
    assert cluster.run("sh", "-c", "command -v sbatch", host="n1").returncode == 0
