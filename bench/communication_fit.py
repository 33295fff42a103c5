"""How well time = latency + bytes / bandwidth predicts sizes that it was not fitted on, over gloo on this machine.

python bench/communication_fit.py [RANKS] [SECONDS]      default: 2 ranks, 60 s

Invariant: the times are those of `shardway bench comm`, and every second size is left out of the fit, from the second
one on, so that a size that is left out lies between two that are not.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from shardway.bench.bandwidth import fit_cost


def main() -> None:
    """Measure, fit, predict, and print the errors by collective and of all."""
    ranks, seconds = (*sys.argv[1:], *("2", "60")[len(sys.argv) - 1 :])
    command = [sys.executable, "-m", "shardway", "bench", "comm", "--nproc", ranks, "--seconds", seconds]
    command += ["--backend", "gloo", "--sizes", "1KiB:16MiB:2", "--json", "-"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    points: dict[str, list[tuple[float, float]]] = {}
    for each in found["times"]:
        points.setdefault(each["collective"], []).append((each["size"], each["p10_s"]))
    errors = []
    for name, measured in points.items():
        ordered = sorted(measured)
        cost = fit_cost(ordered[::2])
        if cost is None:
            continue
        own = [abs(cost.predict(size) / taken - 1) for size, taken in ordered[1:-1:2]]
        errors += own
        usual, most = statistics.median(own), max(own)
        print(f"{name:<15} {len(own)} sizes left out, error {usual:.1%} at the median, {most:.0%} at most")
    print(f"{'all':<15} {len(errors)} sizes left out, error {statistics.median(errors):.1%} at the median")


if __name__ == "__main__":
    main()
