"""Our loops against hand-written PyTorch loops of the same model, weights, data and ranks: DDP, FSDP2, tensor parallel.

    python bench/engine_overhead.py [--rounds 100] [--ranks 2] [--case ddp] [--json FILE] [KEY=VALUE ...]

Each loop has ranks of its own (gloo, one thread each), and all loops of a case take turns, one step each (`turns.py`).
The first losses of both have to agree before anything is timed. The figure is the speed of ours, that of the
hand-written loop being 1: the median over rounds, with its 95 % interval, by the clock and by CPU time. "A copy" is a
second copy of the hand-written loop on the same terms: how far its figure is from 1 is what the machine adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from turns import Loop, Ratio, compare_losses, compare_speed, compare_work, started, take_turns

GATE_STEPS = 5
WARM_UP = 10
CASES = ("ddp", "fsdp2", "tp")


@dataclass(frozen=True)
class Setting:
    """How many timed rounds on how many ranks, and keys of the run file."""

    rounds: int
    ranks: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """Median seconds a step of both, and how fast ours and a copy of theirs are against theirs."""

    case: str
    ours_s: float
    theirs_s: float
    ours: Ratio
    ours_cpu: Ratio
    copy: Ratio
    copy_cpu: Ratio


def measure(case: str, setting: Setting) -> Row:
    """One case. Exits with a sentence where the loops do not compute the same."""
    places = {
        "hand-written": f"plain_loops:plain_{case}",
        "ours": f"plain_loops:our_{case}",
        "a copy": f"plain_loops:plain_{case}",
    }
    with started(places, setting.words, setting.ranks) as loops:
        compare_losses(loops, GATE_STEPS)
        _check_all_take_part(case, loops)
        take_turns(loops, setting.rounds, WARM_UP)
        _check_all_take_part(case, loops)
        theirs, ours, copy = loops
        medians = [statistics.median(loop.seconds) for loop in (ours, theirs)]
        ratios = [compare(loop, theirs) for loop in (ours, copy) for compare in (compare_speed, compare_work)]
        return Row(case, *medians, *ratios)


def _check_all_take_part(case: str, loops: Sequence[Loop]) -> None:
    for loop in loops:
        if loop.reason:
            raise SystemExit(f"{case}: {loop.name} {loop.reason}")


def render(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| loop | ours, ms a step | hand-written | speed of ours | by CPU time | speed of a copy | by CPU time |",
        "|---|---:|---:|---|---|---|---|",
    ]
    for row in rows:
        ratios = map(render_ratio, (row.ours, row.ours_cpu, row.copy, row.copy_cpu))
        lines.append(f"| {row.case} | {1e3 * row.ours_s:.1f} | {1e3 * row.theirs_s:.1f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def render_ratio(ratio: Ratio) -> str:
    """A median with its interval."""
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one (all: leave it out)")
    parser.add_argument("--json", type=Path, help="write the figures into this file as well")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    setting = Setting(arguments.rounds, arguments.ranks, tuple(arguments.words))
    rows = [measure(case, setting) for case in arguments.case or CASES]
    print(render(rows))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"setting": asdict(setting), "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
