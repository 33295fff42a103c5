"""`shardway bench infer`: what it prints and writes, what it refuses, and the commands of its page."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
import subprocess
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended, Shardway

from fake_openai import Delays, serving
from installed_packages import installing
from shardway.bench.inference import backends
from shardway.bench.inference.backends import EngineFacts
from shardway.bench.inference.results import FIELDS
from shardway.bench.inference.utilisation import Peaks
from shardway.bench.roofline import RoofCeilings
from shardway.cli import bench_options
from shardway.cli.bench_infer import PeakWords, stdout_as_stderr
from shardway.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "bench-infer.md"
RECORDED = Path(__file__).parents[1] / "recorded" / "inference"
QUICK = ("--backend", "scripted", "--setting", "prefill_ms=2", "--setting", "decode_ms=1")


def refused(ended: Ended, *parts: str) -> None:
    assert (ended.code, ended.out) == (2, ""), ended
    for part in parts:
        assert part in ended.err, ended.err


def facts_of(ended: Ended) -> list[dict[str, Any]]:
    assert ended.code == 0, ended
    found: list[dict[str, Any]] = json.loads(ended.out)["results"]
    return found


def test_a_sweep_is_printed_appended_and_drawn(shardway: Shardway, tmp_path: Path) -> None:
    sizes = ("--batch-size", "1,2", "--input-len", "8", "--output-len", "1,4")
    words = ("bench", "infer", "one-batch", *QUICK, *sizes, "--result-filename", "rows", "--html", "page.html")
    ended = shardway(*words)
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.out.count("Prefill. latency:") == 4
    assert "MBU and MFU are n/a" in ended.out
    assert ended.out.endswith("wrote page.html\nappended 4 results to rows\n")
    assert "Static batches" in (tmp_path / "page.html").read_text()
    assert shardway(*words, "--run-name", "again").code == 0
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["run_name"] for row in rows] == ["default"] * 4 + ["again"] * 4
    assert set(FIELDS["one-batch"]) <= set(rows[0])
    assert (rows[0]["settings"]["prefill_ms"], rows[0]["warmup"]) == (2.0, "the first combination, at most 32 outputs")


@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize("verb", ["one-batch", "compare"])
def test_a_pipe_is_written_to_and_a_link_is_followed(
    option: str, verb: str, shardway: Shardway, tmp_path: Path
) -> None:
    once = (*QUICK, "--batch-size", "1", "--input-len", "8", "--output-len", "1")
    words = ("bench", "infer", verb, *((str(RECORDED / "vllm-throughput.json"),) if verb == "compare" else once))
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "kept" / "result"
    os.mkfifo(pipe)
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to("kept/result")
    held = os.open(pipe, os.O_RDWR)  # until it is closed a reader neither waits to open the pipe nor finds its end
    with pipe.open() as stream, ThreadPoolExecutor(1) as pool:
        read = pool.submit(stream.read)
        try:
            ended = shardway(*words, option, "pipe")
        finally:
            os.close(held)
    assert (ended.code, stat.S_ISFIFO(os.stat(pipe).st_mode)) == (0, True), ended
    assert read.result()
    assert shardway(*words, option, "link").code == 0
    assert link.is_symlink()
    assert target.read_text() not in ("", "old")
    assert [path.name for path in target.parent.iterdir()] == ["result"]


def test_a_result_that_finds_no_room_is_told(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bench_options, "write_named", fail)
    ended = shardway("bench", "infer", "compare", str(RECORDED / "vllm-throughput.json"), "--html", "page.html")
    assert (ended.code, "page.html cannot be written: No space left on device." in ended.err) == (3, True), ended


def test_throughput_states_input_and_output_apart(shardway: Shardway) -> None:
    words = ("bench", "infer", "throughput", *QUICK, "--num-prompts", "6", "--input-len", "20", "--output-len", "5")
    ended = shardway(*words)
    for line in ("Input token throughput (tok/s):", "Output token throughput (tok/s):", "Total token throughput"):
        assert line in ended.out
    (row,) = facts_of(shardway(*words, "--json", "-", "--range-ratio", "0.5"))
    Path("facts.json").write_text(json.dumps({"format": 1, "results": [row, row]}))
    assert len(facts_of(shardway("bench", "infer", "compare", "facts.json", "--json", "-"))) == 2
    assert (row["kind"], row["successful_requests"], row["num_prompts"]) == ("throughput", 6, 6)
    assert 60 <= row["total_input_tokens"] <= 120


def test_a_server_is_measured_at_each_rate(shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    sizes = ("--num-prompts", "4", "--input-len", "8", "--output-len", "3", "--result-filename", "rows")
    with serving(Delays(key="s3cret", step_s=0.001)) as server:
        words = ("bench", "infer", "serve", "--base-url", server.url, *sizes)
        refused(shardway(*words), "HTTP 401: Incorrect API key provided", "OPENAI_API_KEY")
        limits = ("--goodput", "ttft:5000,tpot:5000", "--request-rate", "200,inf", "--html", "page.html")
        ended = shardway(*words, "--api-key-env", "MY_KEY", *limits)
        refused(shardway(*words, "--api-key-env", "MY_KEY", "--model", "x"), 'has no model "x"', "allowed: fake-model")
    assert ended.code == 0, ended
    assert "Arrivals: 200 requests/s, burstiness 1" in ended.out
    assert "Arrivals: all at once; concurrency: any" in ended.out
    assert "SLO ttft 5000 ms, tpot 5000 ms: kept by 100.0% of all requests" in ended.out
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["request_rate"] for row in rows] == [200.0, "inf"]
    assert "s3cret" not in (tmp_path / "rows").read_text() + ended.out
    assert (tmp_path / "page.html").read_text().count("<svg") >= 4


def test_results_of_other_programs_stand_in_one_table(shardway: Shardway) -> None:
    files = [str(path) for path in sorted(RECORDED.iterdir())]
    ended = shardway("bench", "infer", "compare", *files)
    assert (ended.code, ended.err) == (0, "")
    assert {"Static batches", "Offline throughput", "Serving"} <= set(ended.out.splitlines())
    facts = facts_of(shardway("bench", "infer", "compare", *files, "--json", "-"))
    assert len(facts) == 8
    refused(shardway("bench", "infer", "compare", "gone"), "gone: No such file or directory")


def test_an_interrupt_keeps_what_was_measured(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_batch = backends.ScriptedEngine.run_batch
    calls = []

    def interrupted(self: Any, prompts: Any, output_len: int) -> Any:
        calls.append(len(prompts))
        if len(prompts) == 3:
            raise KeyboardInterrupt
        return run_batch(self, prompts, output_len)

    monkeypatch.setattr(backends.ScriptedEngine, "run_batch", interrupted)
    sizes = ("--batch-size", "1,2,3", "--input-len", "8", "--output-len", "2")
    ended = shardway("bench", "infer", "one-batch", *QUICK, *sizes, "--result-filename", "rows")
    assert ended.code == 130, ended
    assert "interrupted: 2 of 3 combinations were measured" in ended.err
    assert len((tmp_path / "rows").read_text().splitlines()) == 2


def test_mistakes_are_refused_all_at_once(shardway: Shardway, tmp_path: Path) -> None:
    refused(
        shardway(
            *("bench", "infer", "one-batch", "--batch-size", "1,x", "--input-len", "0", "--dtype", "fp8"),
            *("--backend", "vllm2", "--seconds", "-1", "--html", "gone/x.html", "--result-filename", "."),
        ),
        "7 problems in the command line",
        '--batch-size (command line): "1,x" is no list of numbers',
        '--input-len (command line): "0" is no list of numbers',
        '--dtype (command line): "fp8" is not known',
        '"vllm2" is not known\n      allowed: transformers, vllm, sglang, scripted',
        "--seconds (command line): -1 is no time to measure in",
        "--html (command line): the folder gone does not exist",
        "--result-filename (command line): . is a folder",
    )
    refused(
        shardway(
            *("bench", "infer", "serve", "--base-url", "ftp://h", "--endpoint", "/v2", "--goodput", "itl:3"),
            *("--request-rate", "0", "--burstiness", "0", "--extra-request-body", "[1]", "--metric-percentiles", "101"),
        ),
        "7 problems in the command line",
        '--base-url (command line): "ftp://h" is no URL of a server',
        "--endpoint (command line)",
        "--goodput (command line): itl:3: no limit",
        '--request-rate (command line): "0" is none',
        "--burstiness (command line): 0 is too little",
        "--extra-request-body (command line): is no object",
        '--metric-percentiles (command line): "101" is none\n      allowed: numbers above 0, up to 100',
    )
    refused(
        shardway(
            *("bench", "infer", "serve", "--endpoint", "/v1/chat/completions", "--prompts", "ids"),
            *("--goodput", "ttft:200", "--goodput", "ttft:100", "--api-key-env", "NOT_THERE"),
            *("--extra-request-body", '{"stream": false, "n": 2, "seed": 1, "max_tokens": null}'),
        ),
        "4 problems in the command line",
        "--prompts (command line): a chat has no ids",
        "--goodput (command line): ttft has two limits, 200 and 100 ms",
        '--extra-request-body (command line): has "stream" (always true: TTFT and ITL are of a stream), "n" (1: ',
        "--api-key-env (command line): $NOT_THERE is not set",
    )
    ended = shardway("bench", "infer", "serve", "--api-key-env", "sk-12345")
    refused(ended, "--api-key-env (command line): is no name of an environment variable")
    assert "sk-12345" not in ended.err  # it was the key itself
    idle = ("--model", "m", "--dtype", "bf16", "--device", "cpu", "--quantize", "int8", "--load-format", "auto")
    refused(
        shardway("bench", "infer", "throughput", *QUICK, *idle, "--enable-prefix-caching", "--trust-remote-code"),
        "7 problems in the command line",
        "--model (command line): has no effect: the backend scripted opens no model",
        "--quantize (command line): has no effect",
    )
    wrong = ("--setting", "slots=x", "--setting", "speed=3")
    refused(shardway("bench", "infer", "one-batch", *QUICK, *wrong), "slots = 'x' is no int", 'no setting "speed"')
    assert not list(tmp_path.glob("*.html"))


def test_what_an_engine_writes_to_stdout_is_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_as_stderr():
        print("of this process", flush=True)
        engine = subprocess.Popen(["sh", "-c", "read line; echo of its process"], stdin=subprocess.PIPE)
    print("a result", flush=True)
    engine.communicate(b"go\n")
    found = capfd.readouterr()
    assert found.out == "a result\n"
    assert found.err.splitlines() == ["of this process", "of its process"]


def test_what_is_left_out_is_no_json(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    init = backends.ScriptedEngine.__init__

    def shorten(self: Any, delays: Any) -> None:
        init(self, delays)
        self.facts = replace(self.facts, positions=16)

    monkeypatch.setattr(backends.ScriptedEngine, "__init__", shorten)
    sizes = ("--input-len", "8,80", "--output-len", "2", "--json", "-")
    ended = shardway("bench", "infer", "one-batch", *QUICK, *sizes)
    assert [row["input_len"] for row in facts_of(ended)] == [8]
    assert "left out: batch 1, 80 + 2 tokens: the model has 16 positions" in ended.err


def test_an_engine_that_is_not_there_and_a_model_that_is_not_named(
    shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "sglang"):
        refused(
            shardway("bench", "infer", "one-batch", "--backend", name, "--model", "."),
            f"--backend {name}: the package {name} is not installed in this environment.\n  To do: pip install {name}",
        )
    refused(shardway("bench", "infer", "throughput"), "no model is named.\n  To do: --model FOLDER")
    monkeypatch.setenv("RANK", "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for name, value in (("LOCAL_RANK", "1"), ("GROUP_RANK", "0"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    refused(shardway("bench", "infer", "one-batch", *QUICK), "bench infer is one process, and this is rank 1 of 2")


def test_peaks_are_of_the_device_that_computes() -> None:
    site = RoofCeilings({"bf16": 7e14}, 3e12, "[measured] of the site mine", "h100-sxm5-80gb")
    engine = types.SimpleNamespace(facts=EngineFacts("e", "m", "NVIDIA H100 80GB HBM3", "cuda", "bf16", devices=2))
    found = PeakWords(0.0, "mine").find(engine, site)  # type: ignore[arg-type]
    assert found == Peaks(14e14, 6e12, "measured", "[measured] of the site mine")
    rated = PeakWords(0.0, None).find(engine, None)  # type: ignore[arg-type]
    assert rated is not None
    assert rated.basis == "rated"
    engine.facts = EngineFacts("e", "m", "CPU, 2 threads", "cpu", "fp32")
    with pytest.raises(UserError, match="its ceilings are those of h100-sxm5-80gb, and the model is on CPU, 2 threads"):
        PeakWords(0.0, "mine").find(engine, site)  # type: ignore[arg-type]
    assert PeakWords(0.0, None).find(engine, None) is None  # type: ignore[arg-type]
    engine.facts = EngineFacts("e", "m")
    assert PeakWords(9.0, None).find(engine, None) is None  # type: ignore[arg-type]


ENGINE = """
from shardway.bench.inference.backends import EngineFacts, InferenceBackend, OpenedEngine
from shardway.bench.inference.results import BatchTimes

class Mine(InferenceBackend):
    settings = {"step_ms": 2.0}

    @classmethod
    def describe_lack(cls):
        return ""

    def open(self, request):
        return Opened(self.read_settings(request.settings)["step_ms"])

class Opened(OpenedEngine):
    def __init__(self, step_ms):
        self.facts, self.step_ms = EngineFacts("mine 3.1", "m"), step_ms

    def run_batch(self, prompts, output_len):
        return BatchTimes(0.5, (self.step_ms / 1e3,) * (output_len - 1))

    def run_requests(self, prompts, output_lens):
        raise AssertionError
"""


def test_an_engine_of_another_package_is_measured(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for install in installing(tmp_path, monkeypatch):
        install("their-engine", {"shardway.inference_backends": {"mine": "their_engine:Mine"}}, their_engine=ENGINE)
        words = ("bench", "infer", "one-batch", "--backend", "mine", "--setting", "step_ms=4", "--output-len", "3")
        (row,) = facts_of(shardway(*words, "--json", "-"))
        refused(shardway(*words, "--setting", "pace=1"), 'no setting "pace"', "allowed: step_ms = 2.0")
    assert (row["engine"], row["median_decode_latency"], row["prefill_latency"]) == ("mine 3.1", 0.004, 0.5)


# --- the page


def test_the_commands_of_the_page(shardway: Shardway, tmp_path: Path) -> None:
    """Its model is random and tiny, its server of known delays."""
    text = PAGE.read_text(encoding="utf-8")
    mark = "<!-- run by tests/cli/test_bench_infer_verb.py -->"
    blocks = re.findall(rf"{re.escape(mark)}\n```(console|json)\n(.*?)```", text, re.S)
    assert len(blocks) == text.count(mark) == 4
    said = ""
    with serving(Delays(step_s=0.001)) as server:
        for kind, block in blocks:
            if kind == "json":
                (tmp_path / "tiny").mkdir()
                (tmp_path / "tiny" / "config.json").write_text(block)
                continue
            for line in block.replace("\\\n", " ").splitlines():
                if not line.startswith("$ "):
                    continue
                dollar, program, *words = shlex.split(line.replace("http://127.0.0.1:8000", server.url))
                assert (dollar, program) == ("$", "shardway")
                ended = shardway(*words)
                assert ended.code == 0, (line, ended)
                said += ended.out
    assert "transformers (transformers 5." in said
    assert re.search(r"CPU, \d+ threads?, fp32", said)
    assert "of measured peaks" in said
    assert "Successful requests:" in said
    assert said.count("Prefill. latency:") >= 4
