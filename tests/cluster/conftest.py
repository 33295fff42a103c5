"""A real cluster for the tests below this folder, started once and ended whatever happens.

They run where SHARDWAY_CLUSTER is set (`make cluster` does), and skip with the reason elsewhere:

    SHARDWAY_CLUSTER=1      bring the cluster up for this session, and down at its end
    SHARDWAY_CLUSTER=keep   leave it up, and use the one that is up: seconds less with each run
    SHARDWAY_CLUSTER_NAME   its name, if not "lab": two sessions at once need two
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import Cluster, Image, bring_up, take_down
from submitting import Person, settle_in

CLUSTERS = Path("/var/lib/shardway-cluster")
CACHE = Path("/var/cache/shardway-cluster")
FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]


def why_not() -> str:
    """Why there can be no cluster here; "" if there can."""
    if not os.environ.get("SHARDWAY_CLUSTER"):
        return "a real cluster is started by `make cluster` alone (SHARDWAY_CLUSTER is not set)"
    return subprocess.run([FOLDER / "able.sh"], capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """Three nodes and a login node under Debian's own Slurm, for the whole session."""
    yield from _lend(os.environ.get("SHARDWAY_CLUSTER_NAME", "lab"))


@pytest.fixture(scope="session")
def running_slurm24() -> Iterator[Cluster]:
    """Two nodes under Slurm 24.11, beside the other cluster."""
    name = os.environ.get("SHARDWAY_CLUSTER_NAME", "lab") + "24"
    yield from _lend(name, NODES="2", SLURM=str(_from_cache("slurm24")))


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with every host up and without jobs, also after the test."""
    yield running_cluster
    running_cluster.clear()


@pytest.fixture(scope="module")
def busy_alice(running_cluster: Cluster) -> Iterator[Person]:
    """Alice in a folder of her own, for jobs that several tests of a module look at while others run beside them."""
    yield settle_in(running_cluster, "module")
    running_cluster.clear()


@pytest.fixture
def alice(cluster: Cluster) -> Person:
    """Alice in a folder of her own; whatever she leaves in the queue is cancelled."""
    return settle_in(cluster, "work")


@pytest.fixture
def slurm24(running_slurm24: Cluster) -> Iterator[Cluster]:
    """The same with Slurm 24.11."""
    yield running_slurm24
    running_slurm24.clear()


@pytest.fixture
def login_ssh_config(cluster: Cluster) -> Path:
    """For `ssh -F`, on this machine as the laptop: the login node is called "login"."""
    return cluster.ssh_config


@pytest.fixture(scope="session")
def image() -> Image:
    """What `apptainer exec` and `ch-run` start."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip(f"the image has Python 3.11 and cannot use the packages of {sys.version.split()[0]}")
    folder = _from_cache("image")
    packages = Path(sysconfig.get_path("purelib"))
    mounts = {packages: "/opt/site-packages", REPOSITORY / "src": "/opt/src", CLUSTERS: str(CLUSTERS)}
    return Image(folder / "root", folder / "image.sqsh", mounts)


@pytest.fixture(scope="session")
def podman_image(running_cluster: Cluster, image: Image) -> str:
    """The name under which alice's podman knows the image."""
    name = "shardway-test"
    if running_cluster.run("podman", "image", "exists", name).returncode:
        pack = 'tar -C "$1" -c . | podman --root "$2" import --quiet - "$3"'
        store = running_cluster.home() / "images"  # on every host an additional store
        running_cluster.output("bash", "-c", pack, "import", image.folder, store, name)
    return name


def _lend(name: str, **settings: str) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    publish = f"{sys.prefix}:{sys.base_prefix}"
    if os.environ["SHARDWAY_CLUSTER"] == "keep":
        cluster = bring_up(name, CLUSTERS / name, PUBLISH=publish, **settings)
        cluster.clear()
        yield cluster
        return
    # The owner is for an end without a chance to clean up; an interrupt comes by here.
    cluster = bring_up(name, CLUSTERS / name, PUBLISH=publish, OWNER=str(os.getpid()), **settings)
    try:
        yield cluster
    finally:
        take_down(cluster)


def _from_cache(step: str) -> Path:
    if reason := why_not():
        pytest.skip(reason)
    if not (CACHE / step / ".filled").exists():
        subprocess.run([FOLDER / "install.sh", step], check=True, timeout=600)
    return CACHE / step
