"""Whether `shardway scale` finds a serial share that is known, because a script sleeps for it (`sleeping.py`).

    python bench/scale/injected.py [--shares 0.1,0.2,0.3,0.4,0.5] [--ranks 1,2,4] [--steps 20] [--seconds 0.4]

Each share is a study of its own: real ranks that torchrun starts, one size after another. Prints a table in Markdown:
the share that was injected, the one that was found with its interval, and the difference in points.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("sleeping.py")


@dataclass(frozen=True)
class FoundShare:
    """The serial share that a study found, with its 95 % interval, and the efficiency on the most ranks."""

    share: float
    low: float
    high: float
    efficiency: float


def find_share(share: float, ranks: str, steps: int, seconds: float, folder: Path) -> FoundShare:
    """Run one study. Raises RuntimeError with what it printed where it fails."""
    command = [sys.executable, "-m", "shardway", "scale", "--ranks", ranks, "--strong", "--steps", str(steps), "--json"]
    command += ["--dir", str(folder), "--", "python", str(SCRIPT), f"--share={share}", f"--seconds={seconds}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    facts = json.loads(ended.stdout)
    found = facts["amdahl"]["share"]
    return FoundShare(found["value"], found["low"], found["high"], facts["points"][-1]["efficiency"]["value"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", default="0.1,0.2,0.3,0.4,0.5")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--steps", type=int, default=20, help="of a run, 8 or more")
    parser.add_argument("--seconds", type=float, default=0.4)
    args = parser.parse_args()
    most = args.ranks.rpartition(",")[2]
    print(f"| injected, % | found, % | 95 % interval | off by, points | efficiency on {most} ranks, % |")
    print("| ---: | ---: | --- | ---: | ---: |", flush=True)
    for share in map(float, args.shares.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            found = find_share(share, args.ranks, args.steps, args.seconds, Path(scratch) / "study")
        value, low, high = (100 * each for each in (found.share, found.low, found.high))
        row = (f"{100 * share:.0f}", f"{value:.1f}", f"{low:.1f} to {high:.1f}", f"{value - 100 * share:+.1f}")
        print(f"| {' | '.join(row)} | {100 * found.efficiency:.1f} |", flush=True)


if __name__ == "__main__":
    main()
