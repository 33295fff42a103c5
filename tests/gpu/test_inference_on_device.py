"""`bench infer`'s engine of transformers on one CUDA device: both caches, continuous batching, memory and shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardway.bench.inference.backends import EngineRequest
from shardway.bench.inference.engines import TransformersBackend
from shardway.bench.inference.offline import BatchSweep, RequestSet, measure_batches, measure_requests_offline
from shardway.bench.inference.results import BenchConditions
from shardway.bench.inference.utilisation import choose_peaks
from shardway.bench.step import measure_ceilings
from shardway.hfconfig import CONFIG

pytestmark = pytest.mark.gpu

CONDITIONS = BenchConditions("transformers", "transformers", "random")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 110 million parameters."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 768, "rms_norm_eps": 1e-5}
    config |= {"intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    config |= {"num_key_value_heads": 12, "vocab_size": 16384, "max_position_embeddings": 2048}
    made = tmp_path_factory.mktemp("llama")
    (made / CONFIG).write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_static_batches_are_below_their_roof(folder: Path, cache: str) -> None:
    engine = TransformersBackend().open(EngineRequest(str(folder), device="cuda", settings={"cache": cache}))
    facts = engine.facts
    peaks = choose_peaks(measure_ceilings(("bf16",), "cuda", None, 2.0), facts.device, facts.dtype, 1)
    try:
        rows = list(measure_batches(engine, BatchSweep((1, 8), (256,), (32,), 0), CONDITIONS, peaks))
    finally:
        engine.close()
    assert facts.dtype == "bf16"
    for row in rows:
        assert 0 < row["decode_mbu"] < 1.5  # a part of so small a model stays in the caches
        assert 0 < row["prefill_mfu"] < 1
        assert 150e6 < row["peak_memory_bytes"] < 4e9
    assert rows[1]["median_decode_throughput"] > 2 * rows[0]["median_decode_throughput"]


def test_requests_are_all_answered(folder: Path) -> None:
    engine = TransformersBackend().open(EngineRequest(str(folder), device="cuda"))
    try:
        row = measure_requests_offline(engine, RequestSet(64, 128, 32, 1.0, 0), CONDITIONS, None)
    finally:
        engine.close()
    assert (row["successful_requests"], row["total_output_tokens"]) == (64, 64 * 32)
