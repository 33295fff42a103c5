"""Run files and site profiles of earlier versions mean what they meant.

`run_files/` sets every key of its version, with `extends` and a model of the Hugging Face library; `resolved.json` has
the values that they had for eight ranks. `profiles/` states every fact of a site, one extends another, one is what
`sites probe` wrote, and two are as they were shipped; `shown_profiles.json` has their facts. `plans/` has a model as
`plan --trace` counted it.

Invariant: only the command line is used. No module below `shardway` is imported here.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from kept_folders import VERSIONS, check_says, copy, plan_counted, read_json, resolve_all, show_profiles
from still_machine import StillMachine


@pytest.fixture(scope="session")
def resolved(reader: StillMachine) -> dict[Path, dict[str, Any]]:
    return {kept: resolve_all(reader, kept) for kept in VERSIONS}


@pytest.fixture(scope="session")
def shown(reader: StillMachine) -> dict[Path, dict[str, Any]]:
    return {kept: show_profiles(reader, kept) for kept in VERSIONS}


def list_kept(file: str) -> list[Any]:
    cases = [(kept, name) for kept in VERSIONS for name in read_json(kept / file)]
    return [pytest.param(kept, name, id=f"{kept.name}-{name}") for kept, name in cases]


@pytest.mark.parametrize(("kept", "name"), list_kept("resolved.json"))
def test_a_run_file_resolves_to_the_same(resolved: dict[Path, dict[str, Any]], kept: Path, name: str) -> None:
    check_says(resolved[kept][name], read_json(kept / "resolved.json")[name])


@pytest.mark.parametrize(("kept", "name"), list_kept("shown_profiles.json"))
def test_a_profile_says_the_same(shown: dict[Path, dict[str, Any]], kept: Path, name: str) -> None:
    check_says(shown[kept][name], read_json(kept / "shown_profiles.json")[name])


@pytest.mark.parametrize("kept", [pytest.param(kept, id=kept.name) for kept in VERSIONS])
def test_run_files_set_every_key_of_their_version(kept: Path) -> None:
    """But for one that needs an accelerator."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in (kept / "run_files").glob("*.toml")]
    written = {
        f"{room}.{key}" for table in tables for room, keys in table.items() if isinstance(keys, dict) for key in keys
    }
    keys = {key for values in read_json(kept / "resolved.json").values() for key in values}
    assert keys - written == {"train.cudnn_benchmark"}


@pytest.mark.parametrize("kept", [pytest.param(kept, id=kept.name) for kept in VERSIONS])
def test_a_model_that_was_counted_is_planned(reader: StillMachine, tmp_path: Path, kept: Path) -> None:
    copy(kept / "plans", tmp_path / "plans")
    check_says(plan_counted(reader, tmp_path / "plans"), read_json(kept / "plans/answer.json"))
