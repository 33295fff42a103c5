"""The same faults for Shardway, torchrun, ft_launcher and torchft: what is noticed, lost, and left for a person to do.

    bench/faults/peers.sh /tmp/fault-peers             # a virtual environment with the peers
    python bench/faults/peers.py --peers /tmp/fault-peers [--only FAULT] [--tool TOOL] [--times N] [--out ROWS.jsonl]
    python bench/faults/peers.py --show ROWS.jsonl     # the table of rows from before

Each tool trains 160 steps of a small model on two ranks (gloo, CPU) with a checkpoint every 20; a seed chooses the
moment; the fault is real; the losses and samples of the same tool, undisturbed, are what it is compared with. A case
takes four minutes at most. Only processes that were started here are ended.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from case import Case
from judge import Record, judge
from peer_rows import Row, render
from strikes import FAULTS, Fault, Struck, finds_failed_start
from tools import TOOLS, Tool

MOST_STARTS = 4
PACE = {"FAULT_PACE": "0.02"}
PACKAGES = ("torch", "nvidia-resiliency-ext", "torchft-nightly")


def train_undisturbed(tool: Tool, root: Path) -> list[Record]:
    """The records of a run that nothing happens to. Raises SystemExit where the tool does not run here."""
    folder = Path(tempfile.mkdtemp(prefix="u", dir=root))
    case = Case(tool, folder, PACE)
    try:
        case.start()
        case.wait_for_end()
        if not case.is_done():
            raise SystemExit("\n".join([f"{tool.name} does not run here:", *(line.text for line in case.lines[-30:])]))
        return case.records()
    finally:
        case.close()


def try_fault(tool: Tool, fault: Fault, seed: int, undisturbed: Sequence[Record], root: Path) -> Row:
    """One fault, once."""
    dice, folder = random.Random(f"{fault.name} {seed}"), Path(tempfile.mkdtemp(prefix="c", dir=root))
    case = Case(tool, folder, {**PACE, **fault.environ(folder, dice)})
    print(f"{time.strftime('%H:%M:%S')} {tool.name}: {fault.name}", file=sys.stderr, flush=True)
    try:
        case.start()
        struck = fault.strike(case, dice)
        by_hand = carry_on(case, fault, struck)
        return describe(case, fault, seed, struck, by_hand, undisturbed)
    finally:
        case.close()
        (root / f"{tool.name}-{seed}-{re.sub('[^a-z0-9]+', '-', fault.name.lower())}.log").write_text(
            "\n".join(f"{line.time:.2f} {line.text}" for line in case.lines), encoding="utf-8"
        )
        shutil.rmtree(folder, ignore_errors=True)


def carry_on(case: Case, fault: Fault, struck: Struck) -> list[str]:
    """Do what a person would, until the run is at its end; what that was."""
    by_hand: list[str] = []
    since = struck.time
    while True:
        has_ended = case.wait_for_end()
        if not has_ended:
            case.end_ranks_and_launchers()
        if case.is_done() and (not has_ended or any(launcher.returncode == 0 for launcher in case.launchers)):
            return by_hand if has_ended else [*by_hand, "end it"]
        if len(by_hand) == MOST_STARTS or time.monotonic() > case.deadline:
            return [*by_hand, "given up"]
        words = [fault.mend(case)] if has_ended else ["end it"]
        if fault.signs and finds_failed_start(case.records(), since):
            words.append(drop_newest(case))
        by_hand.append(", ".join([*filter(None, words), "start again"]))
        since = time.monotonic()
        case.start()


def drop_newest(case: Case) -> str:
    """A start from it has brought nothing: take the newest checkpoint away."""
    newest = case.tool.newest(case.folder)
    if newest is not None:
        newest.unlink()
    return "delete the newest checkpoint"


def describe(
    case: Case, fault: Fault, seed: int, struck: Struck, by_hand: Sequence[str], undisturbed: Sequence[Record]
) -> Row:
    """What is told of a case that is over."""
    records = case.records()
    verdict = judge(records, undisturbed, struck.time)
    signs = re.compile(fault.signs or case.tool.signs)
    line = case.find_line(struck.time, signs)
    return Row(
        tool=case.tool.name,
        fault=fault.name,
        seed=seed,
        whom=struck.whom,
        noticed_s=line.time - struck.time if line is not None else None,
        trains_s=verdict.trains_s,
        whole_s=verdict.whole_s,
        again=verdict.again,
        differ=verdict.differ,
        lost=verdict.lost,
        twice=verdict.twice,
        starts=case.tool.lives(case.folder),
        by_hand=list(by_hand),
        is_done=case.is_done(),
        seen=struck.seen,
        sign=line.text[-200:] if line is not None else "",
    )


def list_versions(peers: Path | None) -> Mapping[str, str]:
    """What the rows were measured with."""
    versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    if peers is not None:
        code = f"import importlib.metadata as m; print(*(m.version(name) for name in {PACKAGES}))"
        said = subprocess.run([peers / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
        versions |= {f"peers: {name}": each for name, each in zip(PACKAGES, said.stdout.split(), strict=True)}
    return versions


def measure(arguments: argparse.Namespace, root: Path) -> list[Row]:
    """All the cases that were asked for; each row is kept as soon as it is there."""
    known: dict[str, list[Record]] = {}
    rows = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.times):
        for fault in FAULTS:
            for tool in TOOLS:
                if not (is_wanted(fault.name, arguments.only) and is_wanted(tool.name, arguments.tool)):
                    continue
                if fault.tools and tool.name not in fault.tools:
                    continue
                if tool.name not in known:
                    known[tool.name] = train_undisturbed(tool, root)
                try:
                    rows.append(try_fault(tool, fault, seed, known[tool.name], root))
                except TimeoutError as error:
                    print(f"{tool.name}, {fault.name}, {seed}: no moment to strike: {error}")
                    continue
                print(rows[-1], flush=True)
                if arguments.out:
                    with arguments.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(rows[-1])) + "\n")
    return rows


def is_wanted(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the virtual environment that peers.sh has made")
    parser.add_argument("--only", action="append", default=[], help="part of the name of a fault")
    parser.add_argument("--tool", action="append", default=[], help="name of a tool")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--show", type=Path, help="measure nothing, print the table of this file")
    parser.add_argument("--logs", type=Path, help="keep what the tools said in this folder")
    arguments = parser.parse_args()
    if arguments.show:
        lines = arguments.show.read_text(encoding="utf-8").splitlines()
        print(render([Row(**json.loads(line)) for line in lines]))
        return
    if arguments.peers:
        os.environ["FAULT_PEERS"] = str(arguments.peers.resolve())
    print(", ".join(f"{name} {version}" for name, version in list_versions(arguments.peers).items()))
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("ended"))  # so that what was started is ended
    try:
        print(render(measure(arguments, root)))
    finally:
        if arguments.logs:
            shutil.copytree(root, arguments.logs, dirs_exist_ok=True)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
