"""What `shardway bench infer throughput` adds to transformers' own continuous batching, on a CPU.

    python bench/infer/harness.py [--rounds 11] [--prompts 64] [--input-len 64] [--output-len 32] [--dim 128]

Interleaved, in an order that is drawn anew each round: `generate_batch` as one calls it by hand, and the whole of our
measurement (`prepare`, `run_requests`, the figures and the row) with the same configuration of the cache. Printed: the
ratios of wall time and of CPU time of each round, their medians and spread. Also how far the scripted backend's figures
are from what was scripted, in real time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardway.bench.inference.backends import EngineRequest, ScriptedBackend
from shardway.bench.inference.engines import TransformersBackend, TransformersEngine
from shardway.bench.inference.load import draw_prompts
from shardway.bench.inference.offline import BatchSweep, RequestSet, measure_batches, measure_requests_offline
from shardway.bench.inference.results import THROUGHPUT, BenchConditions, make_row, measure_throughput
from shardway.bench.inference.utilisation import rate_throughput

CONDITIONS = BenchConditions("transformers", "transformers", "random")


def open_engine(dim: int, layers: int) -> TransformersEngine:
    """A random Llama."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": dim, "rms_norm_eps": 1e-5}
    config |= {"intermediate_size": 4 * dim, "num_hidden_layers": layers, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 4096}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = TransformersBackend().open(EngineRequest(folder, device="cpu"))
    if not isinstance(engine, TransformersEngine):
        raise TypeError(engine)
    return engine


def measure(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - cpu


def compare(given: argparse.Namespace) -> None:
    """Ours against `generate_batch`."""
    from transformers import GenerationConfig

    engine = open_engine(given.dim, given.layers)
    prompts = draw_prompts([given.input_len] * given.prompts, 4096, 0)
    writes = [given.output_len] * given.prompts
    longest = given.input_len + given.output_len

    def by_hand() -> object:
        config = GenerationConfig(max_new_tokens=given.output_len, do_sample=False, eos_token_id=-1)
        batching = engine._configure_batching(longest, given.prompts)
        return engine._model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, warmup=False
        )

    def ours() -> object:
        engine.prepare(prompts, writes)
        began = time.perf_counter()
        served = engine.run_requests(prompts, writes)
        latency = time.perf_counter() - began
        lengths = [(each.input_tokens, each.output_tokens) for each in served]
        figures = {**measure_throughput(served, latency), **rate_throughput(engine.facts.work, None, lengths, latency)}
        row = make_row(THROUGHPUT, CONDITIONS, figures)
        engine.close()
        return row

    ways: dict[str, Callable[[], Any]] = {"by hand": by_hand, "ours": ours}
    for call in ways.values():
        call()
    wall, cpu = [], []
    for _ in range(given.rounds):
        order = list(ways)
        random.shuffle(order)
        times = {name: measure(ways[name]) for name in order}
        wall.append(times["ours"][0] / times["by hand"][0])
        cpu.append(times["ours"][1] / times["by hand"][1])
        print(f"by hand {times['by hand'][0]:.3f} s, ours {times['ours'][0]:.3f} s: {wall[-1]:.3f}, CPU {cpu[-1]:.3f}")
    for name, ratios in (("wall", wall), ("CPU", cpu)):
        low, high = min(ratios), max(ratios)
        print(f"ours / generate_batch, {name}: median {statistics.median(ratios):.3f}, {low:.3f} to {high:.3f}")


def check_scripted() -> None:
    """The figures of scripted delays in real time: each within 1 ms or 1 %."""
    engine = ScriptedBackend().open(EngineRequest(None, settings={"prefill_ms": 50.0, "decode_ms": 8.0, "slots": 4}))
    (row,) = measure_batches(engine, BatchSweep((4,), (64,), (33,), 0), CONDITIONS, None)
    known = {"prefill_latency": 0.05, "median_decode_latency": 0.008, "total_latency": 0.05 + 32 * 0.008}
    known |= {"prefill_throughput": 4 * 64 / 0.05, "median_decode_throughput": 4 / 0.008}
    known |= {"overall_throughput": 4 * 97 / (0.05 + 32 * 0.008)}
    report(row, known)
    row = measure_requests_offline(engine, RequestSet(8, 64, 33, 1.0, 0), CONDITIONS, None)
    whole = 2 * (0.05 + 32 * 0.008)
    known = {"total_latency": whole, "request_throughput": 8 / whole, "input_throughput": 512 / whole}
    known |= {"output_throughput": 264 / whole, "total_throughput": 776 / whole, "median_itl_ms": 8.0}
    report(row, known | {"median_tpot_ms": 8.0})


def report(row: Any, known: dict[str, float]) -> None:
    """The error of each figure."""
    for name, value in known.items():
        print(f"scripted {name}: {row[name]:.6g} of {value:.6g}, {row[name] / value - 1:+.3%}")


def main() -> None:
    """Both measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    check_scripted()
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
