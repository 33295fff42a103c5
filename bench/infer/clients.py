"""How exact and how cheap the client of `shardway bench infer serve` is, on a fake server of known delays (loopback).

    python bench/infer/clients.py [--streams 256] [--requests 512] [--tokens 64] [--first-ms 500] [--step-ms 50]
                                  [--rounds 3] [--aiperf PATH]

Each round ours and, where `--aiperf` names the program of an environment of its own, aiperf measure the same server in
turn. Printed: median and p99 of TTFT and ITL beside what the server does, requests lost, and CPU seconds of the
client's processes for 10,000 tokens, all of them with their start. Requests arrive at a rate that lets so many streams
be under way, for what a server answers to a burst at one moment is its own queue.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def fake_server(first_ms: float, step_ms: float) -> Iterator[int]:
    """The port of a server in a process of its own."""
    command = [sys.executable, str(ROOT / "tests/fake_openai.py")]
    words = ["--first-ms", str(first_ms), "--step-ms", str(step_ms)]
    process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline())  # type: ignore[union-attr]
    finally:
        process.terminate()
        process.wait()


def run_measured(command: list[str], environ: dict[str, str]) -> tuple[float, str]:
    """CPU seconds of a command and of all that it started, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended.stdout


def main() -> None:
    """Measure in turn and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--first-ms", type=float, default=500.0)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--aiperf")
    given = parser.parse_args()
    length_s = (given.first_ms + (given.tokens - 1) * given.step_ms) / 1e3
    rate = given.streams / length_s
    total = given.requests * given.tokens
    costs: dict[str, list[float]] = {"ours": [], "aiperf": []}
    with fake_server(given.first_ms, given.step_ms) as port, tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{port}"
        if given.aiperf:
            make_tokenizer(Path(folder) / "tokenizer")
        for number in range(given.rounds):
            sizes = ["--num-prompts", str(given.requests), "--input-len", "32", "--output-len", str(given.tokens)]
            load = ["--max-concurrency", str(given.streams), "--request-rate", f"{1.3 * rate:g}"]
            command = [sys.executable, "-m", "shardway", "bench", "infer", "serve", "--base-url", url, *sizes, *load]
            cpu, out = run_measured([*command, "--seed", str(number), "--json", "-"], dict(os.environ))
            (row,) = json.loads(out)["results"]
            costs["ours"].append(1e4 * cpu / total)
            lost = given.requests - row["completed"]
            print(
                f"ours   lost {lost}, {row['max_concurrent_requests']} at a time, tokens "
                f"{row['total_output_tokens'] - total:+d}, CPU {costs['ours'][-1]:.2f} s/10k tokens "
                f"({1e4 * row['client_cpu_s'] / total:.2f} during the load); "
                + describe(row["median_ttft_ms"], row["p99_ttft_ms"], given.first_ms, "TTFT")
                + describe(row["median_itl_ms"], row["p99_itl_ms"], given.step_ms, "ITL"),
                flush=True,
            )
            if given.aiperf:
                measure_aiperf(given, url, Path(folder) / str(number), costs["aiperf"], total, 1.3 * rate)
    for name, found in costs.items():
        if found:
            print(f"{name}: median {statistics.median(found):.2f} CPU s/10k tokens of {len(found)} rounds")
    if costs["aiperf"]:
        print(f"ours / aiperf: {statistics.median(costs['ours']) / statistics.median(costs['aiperf']):.3f}")


def measure_aiperf(
    given: argparse.Namespace, url: str, folder: Path, costs: list[float], total: int, rate: float
) -> None:
    """One run of aiperf with the same load, without a tokenizer of a hub."""
    words = ["profile", "--model", "fake-model", "--url", url, "--endpoint-type", "completions", "--streaming"]
    words += [
        "--tokenizer",
        str(folder.parent / "tokenizer"),
        "--request-count",
        str(given.requests),
        "--request-rate",
        f"{rate:g}",
    ]
    words += ["--concurrency", str(given.streams), "--isl", "32", "--osl", str(given.tokens)]
    words += ["--use-server-token-count", "--ui", "none", "--output-artifact-dir", str(folder)]
    words += ["--extra-inputs", "ignore_eos:true"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    cpu, _ = run_measured([given.aiperf, *words], environ)  # offline it takes a folder for a name of the hub
    costs.append(1e4 * cpu / total)
    found = next(folder.rglob("profile_export_aiperf.json"), None)
    shown = ""
    if found is not None:
        table = json.loads(found.read_text())
        shown = describe(
            table["time_to_first_token"]["p50"], table["time_to_first_token"]["p99"], given.first_ms, "TTFT"
        )
        itl = table["inter_token_latency"]
        shown += describe(itl["p50"], itl["p99"], given.step_ms, "ITL")
    print(f"aiperf CPU {costs[-1]:.2f} s/10k tokens; {shown}", flush=True)


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, since aiperf wants one and its own comes from a server."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=names[0]).save_pretrained(folder)


def describe(median: float, p99: float, known: float, name: str) -> str:
    """A latency beside what the server does."""
    return f"{name} {median:.1f} (p99 {p99:.1f}) of {known:g} ms, {median / known - 1:+.1%}  "


if __name__ == "__main__":
    main()
