"""What looking at a step before its update costs: the same run with and without its guard, on ranks of their own.

    python bench/guard.py [--rounds 100] [--ranks 1] [--json FILE] [KEY=VALUE ...]

Two runs of ours with the model and batch of `shardway init`, one as it is (`guard.non_finite = "skip"`), one with
`guard.non_finite = "off"`, and a second copy of the latter take turns, one step each (`turns.py`). The figure is the
speed of the guarded run, that of the other being 1: the median over rounds with its 95 % interval, by the clock and by
CPU time. How far the copy is from 1 is what the machine adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plain_loops import ours
from turns import Loop, Ratio, Task, compare_losses, compare_speed, compare_work, started, take_turns

GATE_STEPS = 3
WARM_UP = 5


@dataclass(frozen=True)
class Figures:
    """Median seconds a step with and without, and how fast the guarded run and a copy are against the other."""

    with_s: float
    without_s: float
    guarded: Ratio
    guarded_cpu: Ratio
    copy: Ratio
    copy_cpu: Ratio


def guarded(task: Task) -> Iterator[float]:
    """As every run is."""
    return ours(task, 'guard.non_finite="skip"')


def unguarded(task: Task) -> Iterator[float]:
    """Passes run once, and nobody looks before the update."""
    return ours(task, 'guard.non_finite="off"')


def measure(rounds: int, ranks: int, words: Sequence[str]) -> Figures:
    """Take turns. Exits with a sentence where the loops do not compute the same."""
    places = {"without": "guard:unguarded", "with": "guard:guarded", "a copy": "guard:unguarded"}
    with started(places, words, ranks) as loops:
        compare_losses(loops, GATE_STEPS)
        take_turns(loops, rounds, WARM_UP)
        _check_all_take_part(loops)
        without, with_guard, copy = loops
        medians = [statistics.median(loop.seconds) for loop in (with_guard, without)]
        ratios = [compare(loop, without) for loop in (with_guard, copy) for compare in (compare_speed, compare_work)]
        return Figures(*medians, *ratios)


def _check_all_take_part(loops: Sequence[Loop]) -> None:
    for loop in loops:
        if loop.reason:
            raise SystemExit(f"{loop.name}: {loop.reason}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures into this file as well")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    figures = measure(arguments.rounds, arguments.ranks, arguments.words)
    print(f"with {1e3 * figures.with_s:.1f} ms a step, without {1e3 * figures.without_s:.1f} ms")
    for name in ("guarded", "guarded_cpu", "copy", "copy_cpu"):
        ratio: Ratio = getattr(figures, name)
        print(f"{name:12} {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(figures), indent=1))


if __name__ == "__main__":
    main()
