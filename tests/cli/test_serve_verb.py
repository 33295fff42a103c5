"""`shardway submit --serve`: what it refuses, and a server on this machine from its submission to its stop.

In place of vLLM there is a small server of the same name (tests/stand_in_server.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Shardway

import stand_in_server
from shardway.rundir.directory import RunDir

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
MARK = "<!-- run by tests/cli/test_serve_verb.py -->"
JUPITER = ("--on", "jupiter", "site.account=proj1", "--walltime", "1h", "--dry-run")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model of Hugging Face with 4 heads and 2 of keys and values."""
    from safetensors.numpy import save_file

    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    (folder / "tokenizer_config.json").write_text("{}")
    save_file({}, folder / "model.safetensors")
    return folder


@pytest.fixture
def of_stand_in(shardway: Shardway, tmp_path: Path) -> Iterator[str]:
    """The word by which a job finds the stand-in as its vLLM; what a failed test has left of it is ended."""
    package = tmp_path / "stand-in/vllm/entrypoints/cli"
    package.mkdir(parents=True)
    shutil.copy(stand_in_server.__file__, package / "main.py")
    yield f'site.environment={{PYTHONPATH = "{tmp_path}/stand-in"}}'
    for run in (tmp_path / "runs/served", tmp_path / "r", tmp_path / "s"):
        if run.exists():
            shardway("stop", str(run), "--now", "--yes")


def read_spec(run: Path) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(RunDir(run).attempt(1).serve_request.read_text())
    return spec


def test_the_commands_of_the_page(shardway: Shardway, model: Path, of_stand_in: str, tmp_path: Path) -> None:
    """A server is submitted, ready, asked by the printed line, and stopped with nothing left."""
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(rf"{re.escape(MARK)}\n```console\n(.*?)```", text, re.S)
    submit, status, stop = (shlex.split(line)[2:] for line in block.splitlines())
    sent = shardway(*submit[:2], *submit[2:4], of_stand_in, *submit[4:])
    assert sent.code == 0, sent.err
    assert "the loopback address of its node alone, with a key that the job makes" in sent.out
    attempt = RunDir(tmp_path / "runs/served").attempt(1)
    facts = json.loads(shardway(*status, "--json").out)["serving"]
    assert (facts["state"], facts["model"], facts["tp"], facts["tunnel"]) == ("ready", "tiny", 1, "")
    assert facts["url"] in shardway(*status).out
    line = next(line for line in sent.out.splitlines() if line.startswith("ask"))[15:]
    answer = json.loads(
        subprocess.run(["bash", "-c", f"PATH={os.defpath}; {line}"], capture_output=True, check=True).stdout
    )
    assert answer["model"] == "tiny"
    assert answer["words"][-2:] == ["--max-model-len", "256"]
    key = attempt.api_key.read_text().strip()
    assert stat.S_IMODE(attempt.api_key.stat().st_mode) == 0o600
    holders = {path.name for path in attempt.path.rglob("*") if path.is_file() and key in path.read_text()}
    assert holders == {"api_key", "server.out"}, "of our files one; this server prints its key itself"
    words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert any(b"--served-model-name" in each for each in words)
    assert not any(key.encode() in each for each in words)
    stopped = shardway(*stop)
    assert "attempt 1: stopped" in stopped.out, stopped.err
    assert json.loads(shardway(*status, "--json").out)["serving"]["state"] == "ended"
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))


def test_a_server_that_dies_is_explained(shardway: Shardway, model: Path, of_stand_in: str) -> None:
    dying = of_stand_in.replace("{", '{STAND_IN = "dies:ValueError: no such quantization", ')
    sent = shardway("submit", "--serve", "vllm", "tiny", "--wait", dying, "--dir", "r")
    assert sent.code == 4
    assert "vllm ended with exit code 3 before it was ready: ValueError: no such quantization" in sent.err
    shown = shardway("status", "r")
    assert "ValueError: no such quantization" in shown.out


def test_all_mistakes_are_named_at_once(shardway: Shardway) -> None:
    words = ("submit", "--serve", "vlm", "gone", *JUPITER, "--nodes", "2", "--port", "80")
    refused = shardway(*words, "site.launcher=srun", "--until-done")
    assert refused.code == 2
    for part in (
        '"vlm" is no inference server',
        "allowed: vllm, sglang, transformers",
        "gone is not in the cache",
        "2 nodes, and a server runs on one",
        "80 is no port",
        "a server is one process",
        "a server never is",
    ):
        assert part in refused.err or part in refused.err.replace("\n", " "), refused.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("vllm", "tiny", *JUPITER, "--", "--port=1234"), "--port is set by Shardway for vllm"),
        (("vllm", "tiny", *JUPITER, "--", "-tp", "2"), "name it before `--`: --tp"),
        (("sglang", "tiny", *JUPITER, "--", "--api-key", "x"), "--api-key is set by Shardway for sglang"),
        (("transformers", "tiny", *JUPITER, "--expose"), "transformers checks no key"),
        (("transformers", "tiny", *JUPITER, "--model-name", "x"), "calls a model by its path"),
        (("transformers", "tiny", *JUPITER, "--tp", "2"), "knows no tensor parallelism"),
        (("vllm", "tiny", *JUPITER, "--tp", "3"), "4 heads and 2 of keys and values do not split over 3 ranks"),
        (("vllm", "tiny", *JUPITER, "--tp", "8"), "8 ranks on a node with 4 accelerators"),
        (("vllm", *JUPITER), "no model is named"),
        (("vllm", "tiny", "other", *JUPITER), "two models are named, tiny and other"),
    ],
)
def test_a_mistake(shardway: Shardway, model: Path, words: tuple[str, ...], part: str) -> None:
    refused = shardway("submit", "--serve", *words)
    assert (refused.code, part in refused.err) == (2, True), refused.err


def test_options_of_a_server_without_one(shardway: Shardway) -> None:
    refused = shardway("submit", "--tp", "2", "--expose")
    assert (refused.code, "--tp, --expose: for an inference server" in refused.err) == (2, True)


def test_a_script_for_slurm_starts_one_process(shardway: Shardway, model: Path) -> None:
    shown = shardway("submit", "--serve", "vllm", "tiny", *JUPITER)
    assert shown.code == 0, shown.err
    assert "attempts/0001/serve.py attempts/0001/serve.json" in shown.out
    assert re.search(r"srun.*--ntasks-per-node=1|--ntasks-per-node[= ]1", shown.out, re.S)
    assert "torchrun" not in shown.out
    assert "KEY" not in shown.out.replace("KEYS", "")


def write_run(folder: Path, hf: str) -> None:
    """What submission looks at of a run with a checkpoint."""
    (folder / "checkpoints/step-000000004").mkdir(parents=True)
    (folder / "resolved.toml").write_text(f'[model]\nhf = "{hf}"\nadapter = "lora"\n[data]\ntokenizer = "bytes"\n')


def test_a_run_is_exported_by_the_job(shardway: Shardway, of_stand_in: str, tmp_path: Path) -> None:
    write_run(tmp_path / "mine", "/models/base")
    words = ("submit", "--serve", "vllm", "mine", of_stand_in, "--dir", "r")
    assert shardway(*words).code == 0
    spec = read_spec(tmp_path / "r")
    folder = tmp_path / "mine/exports/step-000000004"
    exports = ["-m", "shardway", "checkpoint", "export", f"{tmp_path}/mine", "{folder}", "--step", "4", "--merge"]
    assert (spec["path"], spec["export"][1:]) == (str(folder), exports)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"num_attention_heads": 4}')
    assert shardway("submit", "--serve", "vllm", "mine/checkpoints/step-000000004", of_stand_in, "--dir", "s").code == 0
    assert read_spec(tmp_path / "s")["export"] == []


def test_a_run_of_its_own_data_is_exported_with_its_tokenizer(
    shardway: Shardway, of_stand_in: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "mine", "")
    assert shardway("submit", "--serve", "vllm", "mine", of_stand_in, "--dir", "r").code == 0
    assert read_spec(tmp_path / "r")["export"][-2:] == ["--merge", "--tokenizer"]


def test_a_checkpoint_that_is_not_there(shardway: Shardway, tmp_path: Path) -> None:
    write_run(tmp_path / "mine", "")
    gone = shardway("submit", "--serve", "vllm", "mine/checkpoints/step-000000007", *JUPITER)
    assert (gone.code, "has no complete checkpoint of step 7" in gone.err) == (2, True)


def test_a_damaged_model_is_named_before_the_queue(shardway: Shardway, model: Path) -> None:
    (model / "config.json").unlink()
    refused = shardway("submit", "--serve", "vllm", "tiny", *JUPITER)
    assert (refused.code, "config.json" in refused.err) == (2, True), refused.err
