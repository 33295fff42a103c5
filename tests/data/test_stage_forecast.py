"""What is said of staging before a run is queued."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from shardway.data import stage_forecast
from shardway.data.formats.shard_file import write_token_shard
from shardway.data.formats.shard_manifest import write_manifest
from shardway.data.stage import StageFolder
from shardway.data.stage_forecast import describe_staging
from shardway.hardware.mounts import MountedFileSystem
from shardway.runfile.schema import RunFile


def describe(data: dict[str, Any], **more: bool) -> str:
    values = RunFile.model_validate({"data": data})
    asked = {"takes_tokens": True, "chosen": True, "data_here": True, "disk_here": False, **more}
    return describe_staging(values, **asked)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    np.save(tmp_path / "t.npy", np.zeros(1937, np.uint16))
    return tmp_path / "t.npy"


def test_bytes_and_place_are_said_and_what_is_not_known(tokens: Path) -> None:
    told = describe({"kind": "tokens", "path": str(tokens), "stage": "/raid"})
    assert told == (
        "data.stage copies 4002B of data to /raid of each node before the first step (room there: n/a; time: n/a)"
    )
    elsewhere = describe({"kind": "tokens", "path": str(tokens), "stage": "/raid"}, data_here=False)
    assert "copies data of a size that is not known here to /raid" in elsewhere


def test_nothing_is_said_where_nothing_is_staged(tokens: Path) -> None:
    assert describe({"kind": "tokens", "path": str(tokens), "stage": "off"}) == ""
    assert describe({"kind": "synthetic", "stage": "/raid"}) == ""


def test_each_file_counts_once(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(bytes(500))
    paths: list[dict[str, Any]] = [{"path": str(tokens)}, {"path": str(tokens)}]
    parts = [{**each, "weight": 1} for each in (*paths, {"path": str(tmp_path / "m"), "kind": "megatron"})]
    data = {"kind": "tokens", "blend": parts, "validation": str(tokens), "stage": "/raid"}
    assert "copies 4502B of data" in describe(data)


def test_text_is_prepared_first_so_that_its_size_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    assert "of a size that is not known here" in describe({"path": str(tmp_path), "stage": "/raid"})


def test_prepared_shards_and_folders_of_images_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, images = tmp_path / "shards", tmp_path / "images"
    shards.mkdir()
    facts = write_token_shard(shards / "0.shard", [(np.zeros(100, np.uint16), None)], "uint16")
    write_manifest(shards, "tokens", [facts], {})
    listed = sum(path.stat().st_size for path in shards.iterdir())
    assert f"copies {listed}B of data" in describe({"kind": "tokens", "path": str(shards), "stage": "/raid"})
    for name in "abc":
        (images / name).mkdir(parents=True)
        (images / name / "1.png").write_bytes(bytes(70))
    data = {"kind": "images", "path": str(images), "stage": "/raid"}
    assert "copies 210B of data" in describe(data, takes_tokens=False)
    monkeypatch.setattr(stage_forecast, "MOST_FILES", 2)
    assert "of a size that is not known here" in describe(data, takes_tokens=False)


def test_the_disk_of_this_machine_is_looked_at(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"kind": "tokens", "path": str(tokens), "stage": str(tmp_path / "disk")}
    for room, words in ((5000, "5kB, enough"), (3000, "3kB, too little")):
        monkeypatch.setattr(StageFolder, "find_room", lambda self, room=room: room)
        assert f"(room there: {words}; time: n/a)" in describe(data, disk_here=True)
    assert "room there: n/a" in describe({**data, "stage": "$NOT_SET_HERE"}, disk_here=True)
    assert not (tmp_path / "disk").exists()


def test_the_disk_of_a_site_is_for_data_that_nodes_share(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"kind": "tokens", "path": str(tokens), "stage": "/raid"}
    for kind, words in (("ext4", ""), ("lustre", "data.stage copies 4002B of data to /raid of each node")):
        mount = MountedFileSystem(PurePosixPath("/"), kind, "x")
        monkeypatch.setattr(stage_forecast, "find_mount", lambda path, mounts, mount=mount: mount)
        told = describe(data, chosen=False)
        assert told.startswith(words)
        assert bool(told) == bool(words)
    assert "before the first step, if they fit there (" in told
    elsewhere = describe(data, chosen=False, data_here=False)
    assert ", if they lie on a file system that nodes share and fit there (" in elsewhere
