"""The commands of docs/evaluate.md do what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from command_line import TINY, Shardway, write_text

PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"
MARK = "<!-- run by tests/cli/test_evaluate_page.py -->"
RUN = """
[train]
sample_every = "2 steps"
sample_prompts = ["To be"]
sample_tokens = 3
"""


def test_the_commands_of_the_page(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "other.txt").write_text("Words, words, words. " * 10)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "To", "choices": ["be", "or"], "answer": 0}))
    (block,) = re.findall(rf"{re.escape(MARK)}\n```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    said = []
    for line in block.splitlines():
        dollar, program, *words = shlex.split(line)
        assert (dollar, program) == ("$", "shardway")
        own = (*(word for word in TINY if "validat" not in word and "seq_len" not in word), "data.seq_len=32")
        ended = shardway(*words, *(own if words[0] == "train" else ()))
        assert ended.code == 0, (line, ended.err)
        said.append(ended.out)
    assert said[1].startswith("perplexity on validation data of runs/run: loss ")
    assert said[2].startswith("perplexity on other.txt: loss ")
    assert said[3].startswith("choices on questions.jsonl: acc ")
    assert json.loads((tmp_path / "scores.json").read_text())["evaluations"][0]["kind"] == "choices"
    status = said[4]
    assert '  sample      "To be" -> "' in status
    assert status.count("  evaluated   ") == 3
