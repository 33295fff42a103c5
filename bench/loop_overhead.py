"""Our loop against a hand-written PyTorch loop: tokens/s on the same model, data, optimizer and device.

    python bench/loop_overhead.py [--pairs 200] [--json] [KEY=VALUE ...]

Both take turns, one step each, in one process, so that whatever else the machine does meets both alike. Ours is the
whole thing: `run.steps` with events, status, agreement and loader, `run.step` with exact normalisation and clipping.
Theirs is what one writes by hand: gather, forward, cross-entropy, backward, clip_grad_norm_, AdamW, cosine schedule,
and reading the loss. The figure is tokens/s of ours / tokens/s of theirs. The ratio of medians is the one to quote: a
pause of the machine falls on one side of a pair and moves the other two. On a CPU both keep what they free, since our
start of ranks lets the process do so (`hardware.heap`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from shardway.data.open import open_described
from shardway.data.sources.base import DataSource
from shardway.models.build import build_model
from shardway.resolve import DataFacts
from shardway.resolve.request import ResolveRequest
from shardway.train.loss import token_cross_entropy
from shardway.train.optim.base import decay_groups
from shardway.train.optim.kinds import build_optimizer
from shardway.train.run import LiveRun, open_run

WARM_UP = 10


@dataclass(frozen=True)
class Figures:
    """Median seconds a step of each, and three ratios of tokens/s (ours / theirs): of medians, of pairs, in total."""

    ours_s: float
    theirs_s: float
    ratio_of_medians: float
    ratio_of_pairs: float
    ratio_in_total: float
    pairs: int


def build(run: LiveRun, source: DataSource) -> torch.nn.Module:
    """A model of the run file with the same initial weights every time."""
    values = run.resolved.values
    model = build_model(values.model, vocab=source.facts.vocab, sample_shape=source.facts.sample_shape)
    model.to_empty(device=run.device)
    model.init_weights(values.train.seed)  # type: ignore[operator]
    return model


def our_loop(run: LiveRun, source: DataSource) -> Iterator[None]:
    """One step of ours at each `next`."""
    values = run.resolved.values
    model = run.shard(build(run, source))
    run.optimizer(lambda parameters: build_optimizer(values.optim, model, values.optim.lr), model)
    for batch in run.steps(run.loader(source)):
        run.step(model, batch, token_cross_entropy)
        yield


def hand_written_loop(run: LiveRun, source: DataSource) -> Iterator[None]:
    """One step of a loop such as people write, at each `next`."""
    values = run.resolved.values
    model = build(run, source)
    groups = decay_groups(model, values.optim.weight_decay)
    betas = (values.optim.betas[0], values.optim.betas[1])
    optimizer = torch.optim.AdamW(groups, lr=values.optim.lr, betas=betas, fused=True)
    random = np.random.default_rng(values.train.seed)
    total = run.resolved.derived.total_steps
    for step in range(total):
        rows = source.batch(random.integers(0, len(source), values.train.batch.largest))
        inputs = torch.from_numpy(rows["inputs"]).to(run.device)
        targets = torch.from_numpy(rows["targets"]).to(run.device)
        lr = values.optim.lr * 0.5 * (1 + math.cos(math.pi * step / total))
        for group in optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast(run.device.type, torch.bfloat16, enabled=values.precision.compute == "bf16"):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(values.optim.clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        yield


def time_call(step: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # what one loop leaves for the device to do is not the other's
    return time.perf_counter() - started


def measure(pairs: int, overrides: list[str]) -> Figures:
    """Take turns for `pairs` steps each."""
    plain = ("precision.compute=fp32", "precision.tf32=false", "train.compile=off")  # as the loop beside it
    quiet = (f"train.steps={pairs + WARM_UP + 1}", "train.validate_every=off", "checkpoint.every=off")
    settings = (*quiet, *plain, *overrides)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder, open_run(ResolveRequest(None, settings, Path(folder) / "run")) as run:
        source = open_described(run.resolved.values).train
        run.session.settle(DataFacts(len(source), source.tokens_per_sample, source.facts.vocab))
        our, their = our_loop(run, source), hand_written_loop(run, source)
        for pair in range(pairs + WARM_UP):
            order = [(our, ours), (their, theirs)] if pair % 2 else [(their, theirs), (our, ours)]
            for loop, times in order:
                times.append(time_call(lambda loop=loop: next(loop)))  # type: ignore[misc]
    ours, theirs = ours[WARM_UP:], theirs[WARM_UP:]
    return Figures(
        ours_s=statistics.median(ours),
        theirs_s=statistics.median(theirs),
        ratio_of_medians=statistics.median(theirs) / statistics.median(ours),
        ratio_of_pairs=statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        ratio_in_total=sum(theirs) / sum(ours),
        pairs=pairs,
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="steps of each loop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    figures = measure(arguments.pairs, arguments.overrides)
    if arguments.json:
        print(json.dumps(figures.__dict__))
        return
    print(f"ours         {1e3 * figures.ours_s:8.2f} ms a step (median of {figures.pairs})")
    print(f"hand-written {1e3 * figures.theirs_s:8.2f} ms a step")
    print(
        f"tokens/s, ours / hand-written: {figures.ratio_of_medians:.3f} of medians, "
        f"{figures.ratio_of_pairs:.3f} median of pairs, {figures.ratio_in_total:.3f} in total"
    )


if __name__ == "__main__":
    main()
