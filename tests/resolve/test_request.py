"""From what a person asked for to the resolved run of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.hardware.probe import probe_machine
from shardway.resolve.request import Request, resolve_request


def test_the_machine_is_this_one() -> None:
    machine = probe_machine()
    circumstances = resolve_request(Request(), ranks=4, ranks_per_node=2).resolved.circumstances
    assert (circumstances.ranks, circumstances.ranks_per_node, circumstances.site) == (4, 2, "laptop")
    assert circumstances.usable_cores == machine.usable_cores
    assert circumstances.accelerators == len(machine.accelerators)


@pytest.mark.parametrize(
    ("request_", "directory"),
    [
        (Request(), "runs/default"),
        (Request(overrides=("run.name=a", "run.root=/b")), "/b/a"),
        (Request(overrides=("run.name=a",), directory=Path("c/d")), "c/d"),
    ],
)
def test_the_run_directory(request_: Request, directory: str) -> None:
    assert resolve_request(request_).directory.path == Path(directory)


def test_the_resolved_run_leads_back_to_its_directory() -> None:
    resolved = resolve_request(Request(directory=Path("c/d"))).resolved
    assert (resolved.values.run.root, resolved.values.run.name) == ("c", "d")
    assert (resolved.origins["run.root"], resolved.origins["run.name"]) == ("--dir", "--dir")


def test_a_directory_without_a_name_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    assert resolve_request(Request(directory=Path("."))).directory.path == tmp_path / "a/b"
    assert resolve_request(Request(directory=Path(".."))).directory.path == tmp_path / "a"
    with pytest.raises(UserError) as told:
        resolve_request(Request(directory=Path("/")))
    assert str(told.value) == "the run directory / is the root of the file system; name a folder in it."


def test_the_directory_is_called_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mnist-small.toml"
    path.write_text("format = 1\n")
    assert resolve_request(Request(path)).directory.path == Path("runs/mnist-small")


def test_a_value_in_place_of_a_default_is_resolved_anew() -> None:
    resolution = resolve_request(Request(), ranks=2, ranks_per_node=2)
    changed = resolution.with_default("train.global_batch", 10, "the script")
    assert changed.resolved.values.train.micro_batch == 5
    assert changed.resolved.origins["train.global_batch"] == "the script"
    assert resolution.resolved.values.train.micro_batch == 8


def test_an_unknown_site_is_refused() -> None:
    with pytest.raises(UserError, match='there is no site "moon"'):
        resolve_request(Request(overrides=("site.name=moon",)))
