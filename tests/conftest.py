"""Fixtures of every test: nothing may be left behind, and the ranks of `@ranks` live as long as the session."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from golden_files import add_option, golden
from leaks import list_leaks, restore, take_footprint
from pool import RankPool

__all__ = ["golden"]  # a fixture of every folder below

# A machine that is busy with other ranks makes an example slow, not wrong.
settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("brief", settings.get_profile("busy"), max_examples=20)
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that writes golden files again."""
    add_option(parser)


def pytest_collection_finish() -> None:
    """Thousands of tests and all their modules live until the end: the collector need not walk over them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks variables, threads, signal handlers, a folder, a process group or torch's settings."""
    before = take_footprint()
    yield
    leaks = list_leaks(before)
    if leaks:
        restore(before)
        pytest.fail("\n  ".join(["the test leaves behind:", *leaks]), pytrace=False)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs on one rank are kept that several tests compare with."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The ranks that `@ranks` tests run on; started by the first of them."""
    pool = RankPool()
    yield pool
    pool.close()
