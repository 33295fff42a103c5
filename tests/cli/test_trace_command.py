"""`shardway trace` as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Shardway


def write_trace(path: Path, product_us: float = 400.0, gpu: str = "NVIDIA H100 80GB HBM3") -> Path:
    """Six steps, each a product and nothing for a millisecond after the host waited for it."""
    events: list[dict[str, Any]] = []
    for number in range(6):
        start = 1e6 + number * (product_us + 1040)
        host, args = {"pid": 9, "tid": 9}, {"correlation": number, "External id": number}
        shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 2}
        for category, name, at, length, where, more in (
            ("user_annotation", f"ProfilerStep#{number}", 0, product_us + 1030, host, {}),
            ("cpu_op", "aten::mm", 5, 20, host, {"External id": number, **shapes}),
            ("cuda_runtime", "cudaLaunchKernel", 10, 5, host, args),
            (
                "kernel",
                "nvjet_tst_128x256_64x4",
                20,
                product_us,
                {"pid": 0, "tid": 7},
                {**args, "device": 0, "stream": 7},
            ),
            ("cuda_runtime", "cudaStreamSynchronize", 30, product_us - 5, host, {}),
        ):
            times = {"ts": start + at, "dur": length}
            events.append({"ph": "X", "cat": category, "name": name, **times, **where, "args": more})
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": gpu}], "traceEvents": events}))
    return path


def test_json_has_the_names_that_others_rely_on(shardway: Shardway, tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json")
    found = json.loads(shardway("trace", "t.json", "--json").out)
    assert found["steps"] == 4
    assert found["step_ms"] == pytest.approx(1.44)
    assert found["breakdown"] == {"compute_ms": 0.4, "comm_exposed_ms": 0.0, "copy_ms": 0.0, "idle_ms": 1.04}
    assert {"rule", "evidence", "ceiling_ms", "do"} <= set(found["advice"][0])
    assert (found["advice"][0]["rule"], found["advice"][0]["ceiling_ms"]) == ("host-sync", 1.04)
    assert found["quality"] == []


def test_a_run_and_an_earlier_trace(shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "run" / "traces").mkdir(parents=True)
    write_trace(tmp_path / "run" / "traces" / "a.json")
    (tmp_path / "run" / "status.json").write_text("{}")  # every run has JSON that is no trace
    write_trace(tmp_path / "before.json", 1840.0)
    ended = shardway("trace", "run", "--against", "before.json", "--operators", "2")
    assert ended.code == 0
    assert "Against before.json: 2.000 times as fast" in ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.json"], "nowhere.json cannot be read: No such file"),
        (["empty"], "empty has no trace"),
        (["run"], "run has no trace"),
        (["t.json", "--gpu", "h300"], 'there is no GPU "h300"'),
        (["notes.json"], 'it is JSON without "traceEvents"'),
    ],
)
def test_a_wrong_name(words: list[str], said: str, shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "events").mkdir(parents=True)
    (tmp_path / "run" / "status.json").write_text("{}")
    (tmp_path / "notes.json").write_text('{"a": 1}')
    write_trace(tmp_path / "t.json")
    ended = shardway("trace", *words)
    assert ended.code == 2
    assert said in ended.err
    assert "To do" in ended.err
