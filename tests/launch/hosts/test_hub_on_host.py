"""The cache of a hub behind ssh is looked at there: by the Shardway of the host, else by names and sizes of files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_ssh import make_fake

from hub_models import write_model
from hub_server import fill_cache
from shardway.launch.hosts.ssh import SshHost
from shardway.launch.submission import hub_on_host
from shardway.launch.submission.hub_files import HubFiles, find_hub_files
from shardway.runfile.load import load_run
from shardway.sites.load import load_site


@pytest.fixture(name="host")
def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshHost:
    """This machine behind a fake ssh, whose home is empty; without a virtual environment it has no Shardway."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return SshHost("there", make_fake(tmp_path / "fake").surroundings)


@pytest.fixture(name="snapshot")
def _snapshot(tmp_path: Path) -> Path:
    """The snapshot of a whole model in a cache."""
    return fill_cache(tmp_path / "hub", "org/tiny", write_model(tmp_path / "tiny"))


def look(host: SshHost, cache: Path | None, *words: str, site: str = "jupiter") -> HubFiles:
    """What a submission to the host finds; `cache` is named by the run file."""
    named = [f'site.environment={{HF_HUB_CACHE="{cache}"}}'] if cache else []
    loaded = load_run(None, ['model.hf="org/tiny"', *named, *words])
    return find_hub_files(loaded, load_site(site), host, in_image=False)


def list_problems(found: HubFiles) -> list[str]:
    return [problem.what for problem in found.problems]


def cut(path: Path) -> None:
    blob = path.resolve()
    blob.write_bytes(blob.read_bytes()[:-7])


def lose_blob(path: Path) -> None:
    path.resolve().unlink()


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("config.json", lambda path: path.unlink(), "is missing"),
    ("model-00001-of-00002.safetensors", lambda path: path.unlink(), "is missing"),
    ("model-00002-of-00002.safetensors", lose_blob, "is a link to"),
    ("tokenizer.json", cut, "bytes, and the hub lists"),
]


@pytest.mark.parametrize("shardway_there", [True, False], ids=["by Shardway", "by names"])
def test_what_is_missing_or_damaged_there_is_a_problem(
    host: SshHost, snapshot: Path, tmp_path: Path, shardway_there: bool
) -> None:
    words = []
    if shardway_there:
        venv = tmp_path / "venv"
        (venv / "bin").mkdir(parents=True)
        words = [f"site.venv={venv}"]
        (venv / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (venv / "bin" / "python3").chmod(0o755)
    cache = tmp_path / "hub"
    whole = look(host, cache, *words)
    assert (whole.problems, whole.warnings) == ([], [])
    assert whole.loaded.values.model.hf == "org/tiny", "the folder is another machine's"
    names = {path.name for path in snapshot.iterdir()}
    for file, damage, _ in DAMAGES:
        assert file in names
        damage(snapshot / file)
    found = look(host, cache, *words)
    assert found.warnings == []
    for file, _, what in DAMAGES:
        (problem,) = [each for each in found.problems if f": {file} " in each.what]
        assert what in problem.what
        assert f"in {cache} on there" in problem.what
        assert "on there: `shardway prefetch" in problem.remedy
        assert ("or copy its folder there" in problem.remedy) != shardway_there


def test_files_without_a_record_are_judged_by_the_index(host: SshHost, snapshot: Path, tmp_path: Path) -> None:
    (snapshot.parent.parent / "shardway" / f"{snapshot.name}.json").unlink()
    assert list_problems(look(host, tmp_path / "hub")) == []
    first, second = sorted(snapshot.glob("model-*"))
    first.unlink()
    second.resolve().write_bytes(b"")
    assert [each.partition(": ")[2].partition(" in ")[0] for each in list_problems(look(host, tmp_path / "hub"))] == [
        f"{second.name} is empty",
        f"{first.name} is missing, which model.safetensors.index.json names",
    ]
    assert list_problems(look(host, tmp_path / "hub", "model.hf_weights=false")) == []


def test_what_is_missing_counts_by_the_network_of_the_nodes(host: SshHost, tmp_path: Path) -> None:
    cache = tmp_path / "none"
    assert list_problems(look(host, cache)) == [f"org/tiny is not in the cache {cache} on there"]
    unknown = look(host, cache, site="generic-slurm")
    assert (unknown.problems, len(unknown.warnings)) == ([], 1)


def test_a_cache_that_only_the_shell_there_chooses_is_a_warning(host: SshHost, tmp_path: Path) -> None:
    found = look(host, None)
    assert found.problems == []
    (warning,) = found.warnings
    assert f"org/tiny is not in the cache {tmp_path}/home/.cache/huggingface/hub on there, for this shell" in warning
    fill_cache(tmp_path / "home/.cache/huggingface/hub", "org/tiny", write_model(tmp_path / "other"))
    assert look(host, None).warnings == []


def test_a_host_that_cannot_look_is_a_warning(host: SshHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_on_host, "_LOOK", "printf half; exit 1")
    found = look(host, tmp_path / "hub")
    assert found.problems == []
    assert "could not be looked at; there, `shardway prefetch --check --model org/tiny` shows it" in found.warnings[0]
