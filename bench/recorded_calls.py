"""What torch's flight recorder adds to one collective, by the number of calls that it remembers.

    python bench/recorded_calls.py [--rounds 150]

Processes of one rank each, one with the recorder off, a second such one (what the machine adds) and one for each size,
take turns: `all_reduce` of four numbers over gloo, from thirty Python functions deep, since the recorder also notes
where it was called from. Printed is the CPU time of a call: the least, the first quartile and the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from shardway.ranks.evidence import VARIABLES

SIZES = {"off": 0, "off, a copy": 0, "64": 64, "256": 256, "2000": 2000}
CALLS = 300

RANK = f"""
import sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
numbers = torch.ones(4)

def call(depth):
    if depth:
        return call(depth - 1)
    for _ in range({CALLS}):
        dist.all_reduce(numbers)

for _ in range(10):
    call(30)
print("ready", flush=True)
for _ in sys.stdin:
    began = time.process_time()
    call(30)
    print((time.process_time() - began) / {CALLS}, flush=True)
"""


def start(size: int) -> subprocess.Popen[str]:
    """A rank whose recorder remembers so many calls, ready for its first round."""
    environ = {**os.environ, VARIABLES[0]: str(size)}
    pipe = subprocess.PIPE
    rank = subprocess.Popen([sys.executable, "-c", RANK], env=environ, stdin=pipe, stdout=pipe, text=True)
    if answer(rank) != "ready":
        raise SystemExit("a rank did not start")
    return rank


def answer(rank: subprocess.Popen[str], said: str = "") -> str:
    """What a rank says, once it was told something."""
    if rank.stdin is None or rank.stdout is None:
        raise SystemExit("a rank has no pipe")
    rank.stdin.write(said)
    rank.stdin.flush()
    return rank.stdout.readline().strip()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    rounds = parser.parse_args().rounds
    ranks = {name: start(size) for name, size in SIZES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ranks}
    for _ in range(rounds):
        for name, rank in ranks.items():
            seconds[name].append(float(answer(rank, "go\n")))
    for name, rank in ranks.items():
        first, median, _ = (1e6 * each for each in statistics.quantiles(seconds[name], n=4))
        print(
            f"{name:12} least {1e6 * min(seconds[name]):.1f}, first quartile {first:.1f}, median {median:.1f} us a call"
        )
        rank.kill()


if __name__ == "__main__":
    main()
