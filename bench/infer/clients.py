"""How exact and how cheap the client of `shardway bench infer serve` is, on a fake server of known delays (loopback).

    python bench/infer/clients.py [--streams 256] [--requests 512] [--tokens 64] [--first-ms 500] [--step-ms 50]
                                  [--rounds 3] [--aiperf PATH]

How exact: the server notes when it hands each piece of output to the kernel, by a clock that on Linux is one for all
processes. So its own lateness, which is large where it shares its cores, is not taken for the client's. Printed are
TTFT and ITL as the client has them beside what they truly were, and how late the stamps of pieces are. The same load is
measured in turn with the stamps of the kernel and with those of the client's own reads (`own`), once at a rate that
lets so many streams be under way and once all at one moment.

How cheap: CPU seconds of the whole program for 10,000 tokens, with its start; where `--aiperf` names the program of an
environment of its own, aiperf measures the same load in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from shardway.bench.inference.client import (
    ENDPOINTS,
    StreamClient,
    StreamRequest,
    list_models,
    parse_address,
    send_load,
)
from shardway.bench.inference.load import draw_arrivals, draw_prompts
from shardway.bench.inference.results import ServedRequest, interpolate
from shardway.bench.inference.stamped_socket import StampedSocket

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


# --- how exact


async def send_known(
    url: str, given: argparse.Namespace, rate: float, name: str
) -> tuple[list[ServedRequest], list[list[float]]]:
    """The requests of a load as the client saw them, and when the server wrote each piece of theirs."""
    client = StreamClient(parse_address(url))
    (model,) = await list_models(client)
    names = [f"{name}-{number}" for number in range(given.requests)]
    prompts = draw_prompts([32] * given.requests, 10_000, 0)
    bodies = [
        StreamRequest(model, ENDPOINTS[0], extra={"user": user}).render_body(prompt, given.tokens)
        for user, prompt in zip(names, prompts, strict=True)
    ]
    await client.open_idle(given.streams)
    requests = [(client.render("POST", ENDPOINTS[0], body), 32) for body in bodies]
    found = await send_load(client, requests, draw_arrivals(given.requests, rate, 1.0, 0), given.streams)
    written = json.loads((await client.send(client.render("GET", "/written"))).body)
    client.close()
    return list(found.requests), [written[user] for user in names]


def measure_error(url: str, given: argparse.Namespace, rate: float, name: str) -> None:
    """Print what the client made of a load beside what it was."""
    served, written = asyncio.run(send_known(url, given, rate, name))
    lost = sum(bool(each.error) for each in served)
    pairs = [(each, truth) for each, truth in zip(served, written, strict=True) if len(each.arrivals_s) == len(truth)]
    late = [1e3 * (a - w) for each, truth in pairs for a, w in zip(each.arrivals_s, truth, strict=True)]
    first = [(1e3 * each.ttft_s, 1e3 * (truth[0] - each.sent_s)) for each, truth in pairs]
    gaps = [
        (1e3 * gap, 1e3 * (after - before))
        for each, truth in pairs
        for gap, (before, after) in zip(each.itl_s, itertools.pairwise(truth), strict=True)
    ]
    print(
        f"{name:<18} lost {lost}; stamps late by {interpolate(late, 50):.3f} (p99 {interpolate(late, 99):.2f}, "
        f"most {max(late):.2f}) ms; " + compare("TTFT", first) + "; " + compare("ITL", gaps),
        flush=True,
    )


def compare(name: str, pairs: list[tuple[float, float]]) -> str:
    """A latency as measured beside the truth (ms), the error of median and p99, and the p99 of the errors of each."""
    seen, true = [each[0] for each in pairs], [each[1] for each in pairs]
    shown = []
    for percent in (50, 99):
        known = interpolate(true, percent)
        shown.append(
            f"p{percent} {interpolate(seen, percent):.2f} of {known:.2f}, {interpolate(seen, percent) / known - 1:+.2%}"
        )
    single = interpolate([abs(a - b) / max(b, 1e-3) for a, b in pairs], 99)
    return f"{name} {', '.join(shown)}, single p99 {single:.2%}"


# --- how cheap


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
            for kind, way in (("rate", 1.3 * rate), ("burst", float("inf"))):
                measure_error(url, given, way, f"{kind} kernel {number}")
                with mock.patch.object(StampedSocket, "ask_for_stamps"):
                    measure_error(url, given, way, f"{kind} own {number}")
            print(f"load of the machine: {os.getloadavg()[0]:.1f}", flush=True)
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
