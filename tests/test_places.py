"""The home folder and what stands below it, also of an account that has none."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

import pytest

from shardway.launch.hosts.local import LocalHost
from shardway.launch.runs.find import Known, find_known, forget, read_known, registry_path, remember
from shardway.places import LENT, expand_home, expand_place, find_home, find_own_folder, folder_is_gone, list_unset


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


def test_only_runs_of_the_name_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other runs may be on file servers that do not answer."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    looked: list[Path] = []

    def is_run(path: Path) -> bool:
        looked.append(path)
        return path == tmp_path / "a"

    monkeypatch.setattr("shardway.launch.runs.find.is_run", is_run)
    for name in ("a", "b"):
        remember(Known(str(tmp_path / name)))
    assert find_known("a") == Known(str(tmp_path / "a"))
    assert tmp_path / "b" not in looked


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


@pytest.mark.parametrize(
    ("path", "filled", "unset"),
    [
        ("$SCRATCH/runs", "/scratch/me/runs", []),
        ("${SCRATCH}_2/$SCRATCH", "/scratch/me_2//scratch/me", []),
        ("~/$SCRATCH", "/home/me//scratch/me", []),
        ("$HOME/x", "/home/me/x", []),
        ("$NOWHERE/x/$EMPTY", "$NOWHERE/x/$EMPTY", ["NOWHERE", "EMPTY"]),
        ("costs$5/a$", "costs$5/a$", []),
        ("$(rm x)/`y`", "$(rm x)/`y`", []),
    ],
)
def test_variables_of_a_path_are_filled_in(
    path: str, filled: str, unset: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": "/home/me", "SCRATCH": "/scratch/me", "EMPTY": ""}.items():
        monkeypatch.setenv(name, value)
    assert (expand_place(path), list_unset(path)) == (Path(filled), unset)


def test_a_folder_whose_name_holds_a_dollar_is_meant_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "me")
    (tmp_path / "of$USER").mkdir()
    path = tmp_path / "of$USER/runs/new"
    assert (expand_place(path), list_unset(path)) == (path, [])
    assert expand_place(tmp_path / "for$USER/runs") == tmp_path / "forme/runs"


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


def test_a_home_whose_server_is_gone_is_not_used(lent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if path == ELSEWHERE:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    assert find_own_folder("CACHE", root=ELSEWHERE) == lent
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert find_own_folder("CACHE", root=ELSEWHERE) == lent
