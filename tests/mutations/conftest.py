"""A folder of its own for every test, on a machine without accelerators, scheduler and network; and one small run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_run import train_small

from shardway import hfconfig
from shardway.hardware import probe

_SET_BY_LAUNCHERS = ("SLURM_", "PBS_", "OMPI_", "PMI_", "RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty."""
    for name in [name for name in os.environ if name.startswith(_SET_BY_LAUNCHERS)]:
        monkeypatch.delenv(name)
    for name in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr(probe, "_list_nvidia_devices", tuple)
    monkeypatch.setattr(hfconfig, "import_extra", lambda name: SimpleNamespace(snapshot_download=_no_network))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _no_network(name: str, **options: object) -> str:
    raise OSError(f"{name} is not in the local cache, and the hub cannot be reached")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory: two attempts of a small run, with checkpoints, in a job of this machine."""
    return train_small(tmp_path_factory.mktemp("mutations") / "small")


@pytest.fixture
def run(here: Path, trained: Path) -> Iterator[Path]:
    """A copy of that run directory, `runs/small` in the current folder."""
    shutil.copytree(trained, here / "runs/small", symlinks=True)
    return Path("runs/small")
