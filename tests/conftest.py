"""Fixtures of every test: nothing may be left behind, and the ranks of `@ranks` live as long as the session."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import durations
import own_machine
import warm
from golden_files import add_option, golden
from leaks import list_leaks, restore, take_footprint
from pool import RankPool

__all__ = ["golden"]  # a fixture of every folder below

# A machine that is busy with other ranks makes an example slow, not wrong.
settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("brief", settings.get_profile("busy"), max_examples=20)
settings.load_profile("busy")


_OWN = pytest.StashKey[Path | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that write golden files and durations again, and that of a part."""
    add_option(parser)
    durations.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Before any module of tests is imported: the machine is as a test may see it, and the part is known.

    No garbage is looked for among what is imported, a seventh of the time of that, and seldom in what tests make."""
    gc.disable()
    config.stash[_OWN] = own_machine.settle_in()
    shared = config.getoption("--share")
    if config.getoption("--part") != "1/1" or shared:
        config.pluginmanager.register(durations.Parts(config))
    if shared:
        kinds = durations.kinds_of(config.getoption("markexpr"))
        config.pluginmanager.register(durations.SharedRun(Path(shared), kinds))
    if config.getoption("--write-durations"):
        config.pluginmanager.register(durations.Stopwatch())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing is left of it."""
    warm.close()
    if (own := config.stash.get(_OWN, None)) is not None:
        shutil.rmtree(own, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests are slow by what was measured."""
    durations.mark_slow(items)


def pytest_collection_finish() -> None:
    """Thousands of tests and all their modules live until the end: the collector need not walk over them each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def nothing_is_seeded() -> None:
    """A seed that an earlier test has given torch is not one of this test's script, which a run would leave alone."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(2**40)


@pytest.fixture(autouse=True)
def modules_live_on() -> Iterator[None]:
    """What a test imports lives until the end as well: torch's compiler is as large as torch."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(pytestconfig: pytest.Config) -> Iterator[None]:
    """A home of its own; fail a test that leaks variables, threads, signal handlers, a folder, a process group or
    torch's settings."""
    if (own := pytestconfig.stash[_OWN]) is not None:
        own_machine.new_home(own)
    before = take_footprint()
    yield
    leaks = list_leaks(before)
    if leaks:
        restore(before)
        pytest.fail("\n  ".join(["the test leaves behind:", *leaks]), pytrace=False)


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A folder of a test that is not in memory, where several nodes could share none."""
    with tempfile.TemporaryDirectory(prefix="shardway-disk-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs on one rank are kept that several tests compare with."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture(scope="module")
def functions_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """The functions of a module travel with their code, as those of a notebook do."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def warm_starts() -> Iterator[None]:
    """Processes of this Python start with torch imported; for tests of which these are no more than the means."""
    with warm.starts():
        yield


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The ranks that `@ranks` tests run on; started by the first of them."""
    pool = RankPool()
    yield pool
    pool.close()
