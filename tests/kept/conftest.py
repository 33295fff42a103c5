"""The processes that kept runs are trained and read in, started when the first test needs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_folders import VERSIONS, ask_all
from still_machine import StillMachine


@pytest.fixture(scope="session")
def machine() -> Iterator[StillMachine]:
    """Trains, with the same bits on every x86-64."""
    with StillMachine() as machine:
        yield machine


@pytest.fixture(scope="session")
def reader() -> Iterator[StillMachine]:
    """Runs the commands that need no torch."""
    with StillMachine(trains=False) as machine:
        yield machine


@pytest.fixture(scope="session")
def said(reader: StillMachine, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[str, Any]]:
    """What is said of each kept run, by folder: asked once, since a command costs more than a comparison."""
    return {kept: ask_all(reader, kept, tmp_path_factory.mktemp(kept.name)) for kept in VERSIONS}
