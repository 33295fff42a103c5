"""The commands of docs/data.md do what the page says, on data of the kinds that it names."""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
from pathlib import Path

import numpy as np
import pytest
from command_line import Shardway

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
MARK = "<!-- run by tests/cli/test_data_page.py -->"


def make_pairs(folder: Path) -> None:
    """Two shards of six images with a class and a caption."""
    image = pytest.importorskip("PIL.Image")
    folder.mkdir()
    drawn = np.random.default_rng(0)
    for shard in range(2):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in range(6):
                stream = io.BytesIO()
                image.fromarray(drawn.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(stream, "PNG")
                caption = f"caption {number}".encode()
                for name, content in (("png", stream.getvalue()), ("cls", b"1"), ("txt", caption)):
                    member = tarfile.TarInfo(f"{shard}{number}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def make_stories(path: Path) -> None:
    lines = [json.dumps({"text": "Once upon a time. " * (1 + number % 5)}) for number in range(40)]
    path.write_text("\n".join(lines), encoding="utf-8")


def read_blocks() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"{re.escape(MARK)}\n```console\n(.*?)```", text, re.S)


def test_every_marked_block_is_found() -> None:
    assert len(read_blocks()) == PAGE.read_text(encoding="utf-8").count(MARK) == 2
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 190


def test_the_commands_of_the_page(shardway: Shardway, tmp_path: Path) -> None:
    make_pairs(tmp_path / "pairs")
    make_stories(tmp_path / "stories.jsonl")
    said: dict[str, str] = {}
    for line in "".join(read_blocks()).splitlines():
        dollar, program, *words = shlex.split(line)
        assert (dollar, program) == ("$", "shardway")
        ended = shardway(*words)
        assert ended.code == 0, (line, ended.err)
        assert ended.out, line
        said[" ".join(words[1:3])] = ended.out
    assert said["info pairs"].startswith("pairs: webdataset\n12 samples, 2 files, ")
    assert said["head pairs/{000..001}.tar"].startswith("3  pairs/000.tar, byte ")
    assert said["verify pairs"] == "whole: 12 samples in 2 files; checksums: of every MiB\n"
    assert "limits: " in said["bench pairs"]
    assert "packed" in said["stats tokens"]
    assert (tmp_path / "tokens" / "shards.json").is_file()
    assert said["convert packed"].startswith("again: 12 samples, ")


def test_formats_of_the_page_are_those_that_there_are() -> None:
    from shardway.plugins import GROUPS

    section = PAGE.read_text(encoding="utf-8").partition("## Formats\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert sorted(rows) == sorted(GROUPS["data_sources"].own)


def test_formats_that_can_be_written_are_those_that_the_page_says() -> None:
    from shardway.data.convert import WRITERS

    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    (listed,) = re.findall(r"`convert` writes (.*?); `--to squashfs`", text)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(WRITERS)
