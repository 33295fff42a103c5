"""The tools that are compared: how each is started, what its records are, and by what it says that something is wrong.

Invariant: each trains the same sizes, steps and cadence (parts.py, shardway.toml), may restart as often (`RESTARTS`),
and gets the limits that the page names.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from judge import Record

from shardway.rundir.directory import RunDir

HERE = Path(__file__).parent
RESTARTS = 5
HEARTBEAT_S = 5
ELASTIC_SIGNS = r"failed \(exitcode|closing signal|Received .* death signal"


@dataclass(frozen=True)
class Program:
    """A command line and what its environment has besides; a service outlives the ranks and is started once."""

    words: tuple[str, ...]
    environ: Mapping[str, str]
    is_service: bool = False


@dataclass(frozen=True)
class Tool:
    """`programs(folder)` are started in this order; `signs` is what its launcher says when it has noticed a failure.

    `script` is in the command line of a rank, `number` the variable of its environment that says which it is.
    """

    name: str
    programs: Callable[[Path], list[Program]]
    signs: str
    read: Callable[[Path], list[Record]]
    lives: Callable[[Path], int]
    newest: Callable[[Path], Path | None]
    script: str
    number: str = "RANK"


# --- the peers


def find_peer(name: str) -> str:
    """A program of the environment that peers.sh has made."""
    return str(Path(os.environ["FAULT_PEERS"]) / "bin" / name)


def torchrun(folder: Path) -> list[Program]:
    """With a store of its own for each start: the shared one has the addresses of ranks that are gone, with which gloo
    tries to connect (https://github.com/pytorch/pytorch/issues/135712)."""
    words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", str(RESTARTS))
    return [
        Program(
            (find_peer("torchrun"), *words, str(HERE / "train.py"), str(folder)),
            {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
    ]


def ft_launcher(folder: Path) -> list[Program]:
    limits = {"workload-check-interval": 1, "initial-rank-heartbeat-timeout": 60, "rank-heartbeat-timeout": HEARTBEAT_S}
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(RESTARTS)]
    for name, seconds in limits.items():
        words += [f"--ft-{name}", str(seconds)]
    words += ["--ft-enable-nic-monitor", "false", str(HERE / "train.py"), str(folder)]
    return [Program((find_peer("ft_launcher"), *words), {})]


def torchft(folder: Path) -> list[Program]:
    """A lighthouse, and a torchrun for each of two groups of one rank."""
    address = f"127.0.0.1:{_port_of(folder)}"
    light = ("--min_replicas", "1", "--join_timeout_ms", "10000", "--bind", address)
    words = ("--standalone", "--nproc-per-node", "1", "--max-restarts", str(RESTARTS))
    run = (find_peer("torchrun"), *words, str(HERE / "train_torchft.py"), str(folder))
    shared = {"TORCHFT_LIGHTHOUSE": f"http://{address}"}
    groups = [Program(run, {**shared, "REPLICA_GROUP_ID": str(group)}) for group in range(2)]
    return [Program((find_peer("torchft_lighthouse"), *light), {}, is_service=True), *groups]


def _port_of(folder: Path) -> int:
    """A free port, the same one at each start of a case."""
    path = folder / "port"
    if not path.exists():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            path.write_text(str(probe.getsockname()[1]))
    return int(path.read_text())


def read_peer(folder: Path) -> list[Record]:
    return [
        Record(line["time"], line["rank"], line["step"], line["loss"], tuple(line["ids"]), line["life"])
        for line in _lines(folder)
        if line["event"] == "step"
    ]


def count_peer_lives(folder: Path) -> int:
    """How often rank 0 was started, or rank 1 where that was more often."""
    ranks = [line["rank"] for line in _lines(folder) if line["event"] == "began"]
    return max((ranks.count(rank) for rank in set(ranks)), default=0)


def _lines(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if text.endswith("\n"):
                found.append(json.loads(text))
    return found


def newest_peer(folder: Path) -> Path | None:
    """The newest checkpoint, where there is one before it."""
    found = sorted(folder.glob("step-*.pt")) or sorted((folder / "group-0").glob("step-*.pt"))
    return found[-1] if len(found) > 1 else None


# --- ours


def shardway(folder: Path) -> list[Program]:
    words = (sys.executable, "-m", "shardway", "train", str(HERE / "shardway.toml"), "--nproc", "2")
    path = os.pathsep.join([str(HERE / "inject"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return [Program((*words, "--dir", str(folder / "run")), {"PYTHONPATH": path})]


def read_own(folder: Path) -> list[Record]:
    """Its events have dates; the clocks of this host say what those are in monotonic seconds."""
    run, ahead = RunDir(folder / "run"), time.time() - time.monotonic()
    starts = [event["time"] for event in run.all_events() if event["event"] == "started"]
    records = []
    for rank in run.ranks_with_events():
        for event in run.all_events(rank):
            if event["event"] == "step":
                life = str(sum(start <= event["time"] for start in starts))
                loss = event.get("loss", 0.0)
                records.append(Record(event["time"] - ahead, rank, event["step"], loss, tuple(event["ids"]), life))
    return records


def count_own_lives(folder: Path) -> int:
    return sum(event["event"] == "started" for event in RunDir(folder / "run").all_events())


def newest_own(folder: Path) -> Path | None:
    run = RunDir(folder / "run")
    steps = run.checkpoint_steps()
    return max(run.checkpoint_path(steps[-1]).glob("rank-*.bin")) if len(steps) > 1 else None


TOOLS = (
    Tool(
        "Shardway",
        shardway,
        r"ended by|hangs|told to go on|start(s|ing)? again|set aside|fail|stopping",
        read_own,
        count_own_lives,
        newest_own,
        "shardway.cli.rank",
    ),
    Tool("torchrun", torchrun, ELASTIC_SIGNS, read_peer, count_peer_lives, newest_peer, "train.py"),
    Tool(
        "ft_launcher",
        ft_launcher,
        ELASTIC_SIGNS + "|Did not get .*heartbeat",
        read_peer,
        count_peer_lives,
        newest_peer,
        "train.py",
    ),
    Tool(
        "torchft",
        torchft,
        ELASTIC_SIGNS,
        read_peer,
        count_peer_lives,
        newest_peer,
        "train_torchft.py",
        "REPLICA_GROUP_ID",
    ),
)
