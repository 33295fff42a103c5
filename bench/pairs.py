"""What a thing costs that every run has: the same run with and without it take turns, on ranks of their own.

A second copy of the run without it takes turns too (`turns.py`): how far that copy is from the first is what the
machine adds. The figure is the speed of the run with it, that of the other being 1: the median over rounds with its
95 % interval, by the clock and by CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from turns import Loop, Ratio, compare_losses, compare_speed, compare_work, started, take_turns

GATE_STEPS = 3
WARM_UP = 5


@dataclass(frozen=True)
class Pair:
    """The two runs as "module:function", and on how many ranks they run where nobody says."""

    with_it: str
    without: str
    ranks: int = 1


@dataclass(frozen=True)
class Figures:
    """Median seconds a step with and without, and how fast the run with it and a copy are against the other."""

    with_s: float
    without_s: float
    with_it: Ratio
    with_it_cpu: Ratio
    copy: Ratio
    copy_cpu: Ratio


def measure(pair: Pair, rounds: int, ranks: int, words: Sequence[str]) -> Figures:
    """Take turns. Exits with a sentence where the loops do not compute the same."""
    places = {"without": pair.without, "with": pair.with_it, "a copy": pair.without}
    with started(places, words, ranks) as loops:
        compare_losses(loops, GATE_STEPS)
        take_turns(loops, rounds, WARM_UP)
        _check_all_take_part(loops)
        without, with_it, copy = loops
        medians = [statistics.median(loop.seconds) for loop in (with_it, without)]
        ratios = [compare(loop, without) for loop in (with_it, copy) for compare in (compare_speed, compare_work)]
        return Figures(*medians, *ratios)


def _check_all_take_part(loops: Sequence[Loop]) -> None:
    for loop in loops:
        if loop.reason:
            raise SystemExit(f"{loop.name}: {loop.reason}")


def run(pair: Pair, description: str | None) -> None:
    """The command line: measure and print."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=pair.ranks)
    parser.add_argument("--json", type=Path, help="write the figures into this file as well")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    figures = measure(pair, arguments.rounds, arguments.ranks, arguments.words)
    print(f"with {1e3 * figures.with_s:.1f} ms a step, without {1e3 * figures.without_s:.1f} ms")
    for name in ("with_it", "with_it_cpu", "copy", "copy_cpu"):
        ratio: Ratio = getattr(figures, name)
        print(f"{name:12} {ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(figures), indent=1))
