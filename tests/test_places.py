"""The home folder and what stands below it, also of an account that has none."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from shardway.launch.hosts.local import LocalHost
from shardway.launch.runs.registry import Known, forget, read_known, registry_path, remember
from shardway.places import LENT, expand_home, find_home, find_own_folder, folder_is_gone


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a bare number."""

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("home", [None, "", "some/where"])
def test_an_account_without_a_home_has_no_folders(
    home: str | None, no_account: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert find_home() is None
    assert find_own_folder("CACHE") is None
    assert expand_home("~/x") == Path("~/x")
    assert registry_path() is None
    assert remember(Known("/run"))
    forget(Known("/run"))
    assert read_known() == []


@pytest.mark.usefixtures("no_account")
def test_a_home_that_is_not_known_is_the_root_as_for_bash() -> None:
    assert str(LocalHost().expand("~/x")) == "/x"


@pytest.mark.parametrize("home", [None, ""])
def test_a_home_that_is_not_set_is_looked_up(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert str(find_home()) == pwd.getpwuid(os.getuid()).pw_dir


def test_folders_are_those_of_the_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert find_own_folder("CACHE") == Path("/caches/shardway")
    assert find_own_folder("CONFIG") == tmp_path / ".config/shardway"
    assert find_own_folder("STATE") == tmp_path / ".local/state/shardway"


def test_a_home_is_filled_in_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (expand_home("~"), expand_home("~/a"), expand_home("a/~")) == (tmp_path, tmp_path / "a", Path("a/~"))
    assert expand_home("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")


def test_a_folder_that_was_removed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert not folder_is_gone()
    gone.rmdir()
    assert folder_is_gone()


# --- the cache of a job in a container

ELSEWHERE = Path("/proc")
"""A file system that no folder of a test is on."""


@pytest.fixture
def lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, and a job that lends a cache."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(LENT, "/run/cache")
    return Path("/run/cache/shardway")


def test_a_home_that_ends_with_its_container_is_not_used(lent: Path, tmp_path: Path) -> None:
    assert find_own_folder("CACHE", root=tmp_path) == lent
    assert find_own_folder("STATE", root=tmp_path) == tmp_path / ".local/state/shardway"


def test_a_home_that_was_brought_into_the_container_is_used(lent: Path, tmp_path: Path) -> None:
    assert find_own_folder("CACHE", root=ELSEWHERE) == tmp_path / ".cache/shardway"


def test_a_home_that_may_not_be_written_to_is_not_used(lent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert find_own_folder("CACHE", root=ELSEWHERE) == lent


def test_without_a_job_nothing_is_lent(lent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LENT)
    assert find_own_folder("CACHE", root=tmp_path) == tmp_path / ".cache/shardway"
