"""One training step of ours on a device: tokens/s, what part of the device's own peak that is, and where its time goes.

    python bench/device_step.py [--steps 20] [--profile] [--json FILE] [--case NAME ...] [KEY=VALUE ...]

Each case is a run of `train` on synthetic tokens in this process; the figures are medians over steps after the warm-up,
the device waited for after each. FLOPs are those of products and causal attention, forward and twice that backward,
without recompute; the peak is that of a product of 8192 x 8192 x 8192 on this device.
`--profile` lists the kernels of three further steps, by kind and one by one.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from loop_overhead import our_loop
from shardway.data.open import open_described
from shardway.models.build import build_model
from shardway.resolve import DataFacts
from shardway.resolve.request import ResolveRequest
from shardway.train.run import open_run

COMMON = (
    *("run.device=cuda", "data.kind=synthetic", "data.samples=4096", "train.validate_every=off"),
    *("checkpoint.every=off", "optim.warmup=5 steps"),
)
GPT2 = ("model.dim=768", "model.layers=12", "model.heads=12", "model.vocab=50304", "data.seq_len=1024")
LLAMA_1B = (
    *("model.dim=2048", "model.layers=16", "model.heads=16", "model.kv_heads=8", "model.ffn_dim=8192"),
    *("model.vocab=32000", "model.tied=false", "data.seq_len=4096"),
)
CASES: dict[str, tuple[str, ...]] = {
    "default": ("train.compile=off",),
    "124M": (*GPT2, "train.global_batch=32", "train.micro_batch=16", "train.compile=off"),
    "124M compiled": (*GPT2, "train.global_batch=32", "train.micro_batch=16", "train.compile=blocks"),
    "1.1B": (*LLAMA_1B, "train.global_batch=8", "train.micro_batch=4", "train.compile=off"),
    "1.1B compiled": (*LLAMA_1B, "train.global_batch=8", "train.micro_batch=4", "train.compile=blocks"),
}
WARM_UP = 6
KINDS = {
    "attention": ("flash", "fmha", "attention", "cudnn"),  # before products: its kernels name wgmma too
    "products": ("gemm", "cutlass", "cublas", "nvjet", "wgmma"),
    "compiled": ("triton",),
    "optimizer": ("multi_tensor", "adam", "foreach"),
    "norms": ("norm",),
    "loss": ("softmax", "nll"),
    "copies and casts": ("copy", "memcpy", "memset", "fill"),
    "pointwise": ("elementwise", "reduce", "cat", "roll", "index", "embedding"),
}


def measure_peak() -> float:
    """FLOP/s of a bf16 product of random numbers, the median of ten."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    times = []
    for _ in range(13):
        torch.cuda.synchronize()
        started = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 2 * 8192**3 / statistics.median(times[3:])


def count_flops(model: torch.nn.Module, values: Any, seq: int) -> float:
    """FLOPs of a token, forward and backward: products with weights but the embedding's, and causal attention."""
    tables = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    weights = sum(p.numel() for p in model.parameters()) - tables
    if values.model.tied:
        weights += tables
    width = int(values.model.head_dim or values.model.dim // values.model.heads) * values.model.heads
    return 6.0 * weights + 6.0 * values.model.layers * width * seq


def profile(step: Iterator[None], steps: int = 3) -> list[tuple[str, float, int]]:
    """Kernels of some further steps: (name, ms a step, calls a step), the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            next(step)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(
            ("Optimizer", "ProfilerS")
        ):
            found[event.name][0] += event.time_range.elapsed_us() / 1e3 / steps
            found[event.name][1] += 1 / steps
    rows = [(name, ms, round(calls)) for name, (ms, calls) in found.items()]
    return sorted(rows, key=lambda row: -row[1])


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def run_case(name: str, words: Sequence[str], steps: int, profiles: bool, peak: float) -> dict[str, Any]:
    """The figures of a case, printed on a line."""
    torch.cuda.reset_peak_memory_stats()
    total = steps + WARM_UP + 8
    with tempfile.TemporaryDirectory() as folder:
        request = ResolveRequest(None, (*COMMON, *words, f"train.steps={total}"), Path(folder) / "run")
        with open_run(request) as run:
            source = open_described(run.resolved.values).train
            run.session.settle(DataFacts(len(source), source.tokens_per_sample, source.facts.vocab))
            step = our_loop(run, source)
            times = []
            for _ in range(steps + WARM_UP):
                started = time.perf_counter()
                next(step)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
            started = time.perf_counter()
            for _ in range(4):
                next(step)
            torch.cuda.synchronize()
            together = (time.perf_counter() - started) / 4
            kernels = profile(step) if profiles else []
            values = run.resolved.values
            model = build_model(values.model, vocab=source.facts.vocab, sample_shape=source.facts.sample_shape)
            tokens = values.train.batch.largest * source.tokens_per_sample
            flops = count_flops(model, values, source.tokens_per_sample)
            keys = {"compute": values.precision.compute, "compile": values.train.compile, "tf32": values.precision.tf32}
    seconds = statistics.median(times[WARM_UP:])
    row = {
        "case": name,
        "words": list(words),
        "device": torch.cuda.get_device_name(),
        "step_s": seconds,
        "without_waiting_s": together,
        "tokens_s": tokens / seconds,
        "mfu": flops * tokens / seconds / peak,
        "allocated": torch.cuda.max_memory_allocated(),
        "first_steps_s": times[:2],
        "kernels": kernels[:60],
        "keys": keys,
    }
    ms, alone = 1e3 * seconds, 1e3 * together
    print(
        f"{name}: {ms:.2f} ms a step ({alone:.2f} without waiting), {row['tokens_s']:,.0f} tokens/s "
        f"({100 * row['mfu']:.1f} % of the peak), {row['allocated'] / 2**30:.1f} GiB, first step {times[0]:.1f} s",
        flush=True,
    )
    if kernels:
        by_kind: dict[str, float] = collections.Counter()
        for kernel, ms, _ in kernels:
            by_kind[kind_of(kernel)] += ms
        busy = sum(by_kind.values())
        print(f"  busy {busy:.2f} ms: " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in by_kind.most_common()))  # type: ignore[attr-defined]
        for kernel, ms, calls in kernels[:18]:
            print(f"  {ms:8.3f} ms {calls:5d} x  {kernel[:150]}")
    return row


def main() -> None:
    """Print a line a case, and keep the rows in full where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, help="file for the rows in full")
    parser.add_argument("--case", action="append", choices=CASES, help="these alone; default: all")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    peak = measure_peak()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 products at {peak / 1e12:.0f} TFLOP/s")
    rows = []
    for name in arguments.case or list(CASES):
        rows.append(run_case(name, (*CASES[name], *arguments.overrides), arguments.steps, arguments.profile, peak))
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({"peak_flops": peak, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
