"""The engine of transformers on a CPU, with a tiny random model: what it writes, and what it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardway.bench.inference.backends import EngineRequest
from shardway.bench.inference.engines import TransformersBackend, TransformersEngine
from shardway.bench.inference.load import draw_prompts
from shardway.bench.inference.offline import BatchSweep, RequestSet, measure_batches, measure_requests_offline
from shardway.bench.inference.results import BenchConditions
from shardway.bench.inference.utilisation import Peaks
from shardway.hfconfig import CONFIG

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "eos_token_id": list(range(64)),
    "rms_norm_eps": 1e-5,
}
"""Every token ends a text, so that only an engine that ignores ends writes more than one."""
CONDITIONS = BenchConditions("transformers", "transformers", "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    (made / CONFIG).write_text(json.dumps(TINY))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": TINY["eos_token_id"]}))
    return made


def open_tiny(folder: Path, **changed: bool) -> TransformersEngine:
    engine = TransformersBackend().open(EngineRequest(str(folder), device="cpu", **changed))  # type: ignore[arg-type]
    assert isinstance(engine, TransformersEngine)
    return engine


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    made = open_tiny(folder)
    yield made
    made.close()


def test_a_static_batch_writes_its_full_length(engine: TransformersEngine) -> None:
    rows = list(
        measure_batches(engine, BatchSweep((1, 3), (4,), (1, 6), 0), CONDITIONS, Peaks(1e12, 1e10, "measured", "x"))
    )
    assert [(row["batch_size"], row["output_len"]) for row in rows] == [(1, 1), (1, 6), (3, 1), (3, 6)]
    assert 0 < rows[1]["decode_mbu"] < 1
    assert 0 < rows[3]["prefill_mfu"] < 1
    assert rows[0]["peak_memory_bytes"] > 2**20
    assert engine.facts.positions == 128
    assert engine.facts.vocabulary == 64


def test_requests_of_unlike_lengths_each_write_their_own(engine: TransformersEngine) -> None:
    try:
        served = engine.run_requests(draw_prompts([3, 9, 5], 64, 0), [4, 1, 7])
    finally:
        engine.close()  # the thread of its cache; the model stays
    assert [(each.input_tokens, each.output_tokens, each.error) for each in served] == [
        (3, 4, ""),
        (9, 1, ""),
        (5, 7, ""),
    ]
    for each in served:
        assert len(each.arrivals_s) == each.output_tokens
        assert each.sent_s <= each.arrivals_s[0]
        assert list(each.arrivals_s) == sorted(each.arrivals_s)


def test_offline_throughput_states_the_cache_that_was_used(folder: Path) -> None:
    engine = open_tiny(folder)
    try:
        row = measure_requests_offline(engine, RequestSet(5, 12, 6, 1.0, 0), CONDITIONS, None)
    finally:
        engine.close()
    assert (row["successful_requests"], row["total_input_tokens"], row["total_output_tokens"]) == (5, 60, 30)
    assert (row["settings"]["page_size"], row["settings"]["num_blocks"]) == (32, 64)
    assert (row["mfu"], row["peaks"]) == (None, "n/a")


def test_where_ends_count_the_first_token_ends_a_request(folder: Path) -> None:
    engine = open_tiny(folder, ignore_eos=False)
    try:
        served = engine.run_requests(draw_prompts([4, 4], 64, 0), [6, 6])
    finally:
        engine.close()
    assert [each.output_tokens for each in served] == [1, 1]


def test_what_speaks_to_servers_never_imports_torch() -> None:
    program = (
        "import sys\n"
        "import shardway.cli.bench\n"
        "from shardway.bench.inference import backends, page, readers, report, service\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'sglang'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
