"""The commands of docs/scale.md do what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_line import Shardway, write_text

import warm
from golden_files import Golden

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
MARK = "<!-- run by tests/cli/test_scale_page.py -->"
RUN = """
model = {dim = 16, layers = 1, heads = 2}
data = {seq_len = 8, path = "text.txt"}
train = {global_batch = 2}
"""


def test_the_commands_of_the_page(
    shardway: Shardway, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make each run once: given again, they read what is there, and refuse other settings."""
    write_text(tmp_path)
    (tmp_path / "my.toml").write_text(RUN)
    (block,) = re.findall(rf"{re.escape(MARK)}\n```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    printed = []
    for line in block.splitlines():
        dollar, program, *words = shlex.split(line)
        assert (dollar, program) == ("$", "shardway")
        with warm.starts():
            ended = shardway(*words)
        assert ended.code == 0, (line, ended.err)
        printed.append(ended.out)
    planned, made, read = printed
    assert planned.count("missing") == 2
    assert made.startswith("2 ranks keep ")
    assert made.endswith("sheet  my.html, my.csv\n")
    assert read.splitlines()[3:] == made.splitlines()[3 : len(read.splitlines())]
    monkeypatch.setattr("subprocess.Popen", None)  # nothing is started again
    words = ("scale", "my.toml", "--ranks", "1,2", "--strong")
    again = shardway(*words)
    assert (again.code, again.out.splitlines()) == (0, made.splitlines()[:-2])
    (tmp_path / "my.toml").write_text(RUN.replace("dim = 16", "dim = 32"))
    other = shardway(*words)
    assert (other.code, other.out) == (2, "")
    golden(other.err, "scale/other-settings.txt")


def test_every_column_of_the_sheet_is_on_the_page(shardway: Shardway, tmp_path: Path) -> None:
    from test_scale_verb import record

    runs = [str(record(tmp_path / f"r{world}", world).path) for world in (1, 2, 4)]
    assert shardway("scale", "--runs", *runs, "--strong", "--sheet", "s.csv").code == 0
    columns = (tmp_path / "s.csv").read_text().splitlines()[0].split(",")
    section = PAGE.read_text(encoding="utf-8").partition("## The sheet")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(\w+)`", section))
    missing = [name for name in columns if re.sub("_(low|high)$", "", name) not in listed]
    assert missing == []
