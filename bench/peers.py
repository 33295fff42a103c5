"""Our loops against Accelerate, Lightning, transformers' Trainer and DeepSpeed on the same model, weights and data.

    bench/peers.sh /tmp/peers                                  # a virtual environment with these libraries
    /tmp/peers/bin/python bench/peers.py [--rounds 100] [--ranks 2] [--only NAME ...] [--json FILE] [KEY=VALUE ...]

Each loop has ranks of its own (gloo, one thread each), and all of a group take turns, one step each (`turns.py`). A
library that is not installed is passed over with a sentence, and so is a loop whose first losses are not within 1e-4
of the hand-written one's. The figure is the speed of ours, that of the other loop being 1: the median over rounds, with
its 95 % interval, by the clock and by CPU time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from engine_overhead import GATE_STEPS, WARM_UP, Setting, render_ratio
from turns import Ratio, compare_losses, compare_speed, compare_work, started, take_turns

GROUPS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "whole weights on every rank": {
            "hand-written DDP": "plain_loops:plain_ddp",
            "ours, dp_replicate": "plain_loops:our_ddp",
            "Accelerate DDP": "peer_loops:accelerate_ddp",
            "Fabric DDP": "peer_loops:fabric_ddp",
            "Trainer DDP": "peer_loops:trainer_ddp",
            "Lightning DDP": "peer_loops:lightning_ddp",
            "DeepSpeed ZeRO 1": "peer_loops:deepspeed_1",
            "DeepSpeed ZeRO 2": "peer_loops:deepspeed_2",
        },
        "weights in parts": {
            "hand-written FSDP2": "plain_loops:plain_fsdp2",
            "ours, dp_shard": "plain_loops:our_fsdp2",
            "Accelerate FSDP2": "peer_loops:accelerate_fsdp2",
            "Fabric FSDP2": "peer_loops:fabric_fsdp2",
            "Lightning FSDP2": "peer_loops:lightning_fsdp2",
            "DeepSpeed ZeRO 3": "peer_loops:deepspeed_3",
        },
    }
)
"""The first of each group is what losses are compared with, the second is ours."""
LIBRARIES = ("torch", "accelerate", "lightning-fabric", "pytorch-lightning", "transformers", "deepspeed")


@dataclass(frozen=True)
class Row:
    """A loop of a group: its median seconds a step and how fast ours is against it; or why it took no part."""

    group: str
    loop: str
    seconds: float | None = None
    ours: Ratio | None = None
    ours_cpu: Ratio | None = None
    reason: str = ""


def measure(group: str, places: Mapping[str, str], setting: Setting) -> list[Row]:
    """One group."""
    with started(places, setting.words, setting.ranks) as loops:
        compare_losses(loops, GATE_STEPS)
        reference, ours = loops[:2]
        for loop in (reference, ours):
            if loop.reason:
                raise SystemExit(f"{loop.name} {loop.reason}")
        taking_part = [loop for loop in loops if not loop.reason]
        take_turns(taking_part, setting.rounds, WARM_UP)
        rows = []
        for loop in loops:
            if loop.reason:
                rows.append(Row(group, loop.name, reason=loop.reason))
            else:
                median, ratios = statistics.median(loop.seconds), (compare_speed(ours, loop), compare_work(ours, loop))
                rows.append(Row(group, loop.name, median, *ratios))
        return rows


def render(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, then a sentence for each loop that took no part."""
    lines = ["| | loop | ms a step | speed of ours | by CPU time |", "|---|---|---:|---|---|"]
    for row in rows:
        if row.seconds is not None and row.ours is not None and row.ours_cpu is not None:
            ratios = f"{render_ratio(row.ours)} | {render_ratio(row.ours_cpu)}"
            lines.append(f"| {row.group} | {row.loop} | {1e3 * row.seconds:.1f} | {ratios} |")
    return "\n".join([*lines, *(f"{row.loop}: {row.reason}" for row in rows if row.reason)])


def list_versions() -> dict[str, str]:
    """The versions of the libraries that are installed."""
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions() if each.name}
    return {name: installed.get(name, "not installed") for name in LIBRARIES}


def choose(places: Mapping[str, str], only: Sequence[str]) -> dict[str, str]:
    """The first two, and of the others those whose name holds one of these words."""
    kept = list(places)[:2]
    return {name: place for name, place in places.items() if name in kept or not only or any(w in name for w in only)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="part of the name of a peer, such as DeepSpeed")
    parser.add_argument("--json", type=Path, help="write the figures into this file as well")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    setting = Setting(arguments.rounds, arguments.ranks, tuple(arguments.words))
    versions = list_versions()
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    rows = [row for group, places in GROUPS.items() for row in measure(group, choose(places, arguments.only), setting)]
    print(render(rows))
    if arguments.json:
        facts = {"setting": asdict(setting), "versions": versions, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
