"""What it costs that gradients of replicas are summed in one order from the first step on: a step with DDP's own
buckets (filled again after the first pass, in the order in which gradients came) against one with buckets that are
filled once.

    torchrun --nproc-per-node 4 bench/replica_order.py [--pairs 60] [--bucket 25] [KEY=VALUE ...]

Both take turns on the same weights and batches, in the same processes. The figure is the time of ours / DDP's own, the
median of pairs; 1.0 is no cost.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardway.models.build import build_model
from shardway.parallel.axes.replicate import ReplicatedModule, fix_buckets
from shardway.resolve import resolve
from shardway.resolve.draft import Circumstances
from shardway.runfile.load import load_run
from shardway.train.loss import token_cross_entropy

WARM_UP = 5


def main() -> None:
    """Print the ratio on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--bucket", type=int, default=25, help="MiB of a message")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group()
    rank = dist.get_rank()
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    taken = measure(device, rank, arguments)
    if rank == 0:
        theirs, ours = taken
        ratio = statistics.median(b / a for a, b in zip(theirs, ours, strict=True))
        print(
            f"{dist.get_world_size()} ranks on {device.type}: DDP's own {1e3 * statistics.median(theirs):.2f} ms, "
            f"ours {1e3 * statistics.median(ours):.2f} ms; ours / DDP's own, median of pairs: {ratio:.3f}"
        )
    # A wrapper that outlives the group ends the group's threads while it holds Python's lock, for which they may wait.
    gc.collect()
    dist.destroy_process_group()


def measure(device: torch.device, rank: int, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of each pass of DDP's own buckets and of ours, those of the warm-up aside."""
    values = resolve(load_run(None, arguments.overrides), Circumstances(1, 1)).values
    kinds: dict[str, DistributedDataParallel] = {}
    for name, kind in (("DDP's own", DistributedDataParallel), ("ours", ReplicatedModule)):
        model = build_model(values.model, vocab=256, sample_shape=(values.data.seq_len,))
        model.to_empty(device=device)
        model.init_weights(0)  # type: ignore[operator]
        kinds[name] = kind(model, bucket_cap_mb=arguments.bucket, gradient_as_bucket_view=True)
    fix_buckets(kinds["ours"])  # type: ignore[arg-type]
    rows = torch.randint(0, 256, (4, values.data.seq_len + 1), generator=torch.Generator().manual_seed(rank))
    rows = rows.to(device)
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for pair in range(arguments.pairs + WARM_UP):
        for name in list(kinds)[:: 1 if pair % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            kinds[name].zero_grad()
            token_cross_entropy(kinds[name](rows[:, :-1]), rows[:, 1:]).total.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - began)
    theirs, ours = (taken[name][WARM_UP:] for name in kinds)
    return theirs, ours


if __name__ == "__main__":
    main()
