"""The processes of the ranks of this node: those of torch's elastic launcher, with torchrun's variables.

Invariant: a process has the variables of its rank before its program begins (a spare: before it is released). This
module must not judge how processes end.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    Std,
    SubprocessContext,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from shardway.inherited import list_unfit_for_ranks
from shardway.ranks.agent.heartbeat import VARIABLE
from shardway.ranks.agent.recorder import choose_recording
from shardway.ranks.gate import VARIABLE as GATE
from shardway.ranks.launcher import AGENT_VARIABLE

_TORCHS_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@dataclass(frozen=True)
class Seats:
    """Which ranks of a start are this node's, and where all of them meet: a store that an agent keeps for this start
    alone. `start` counts."""

    first: int
    world: int
    node: int
    nodes: int
    address: str
    port: int
    start: int = 0


@dataclass(frozen=True)
class LocalLaunch:
    """How many ranks run which Python module with which arguments, where their output goes, and CPU threads each.

    `pages` is the folder where they show what they do (`ranks.agent`); None: nobody looks. A stop, whoever asked for
    it by this file, may take `stop_timeout_s`. `seats` are theirs among all ranks; None: these are all. `shown`: what
    they print is printed here as well, each line with its rank.
    """

    ranks: int
    module: str
    arguments: Sequence[str]
    log_folder: Path
    threads: int
    stop_path: Path
    stop_timeout_s: float
    pages: Path | None = None
    seats: Seats | None = None
    shown: bool = False


def start_program(launch: LocalLaunch, seats: Seats, gates: Sequence[Path] = ()) -> PContext:
    """Start the program of each local rank; as spares that wait at these gates, where there are any."""
    ranks = range(launch.ranks)
    waits = {local: {GATE: str(gate)} for local, gate in enumerate(gates)}
    with _surroundings_of_ranks():
        processes = start_processes(
            name="ranks",
            entrypoint=sys.executable,
            args=dict.fromkeys(ranks, ("-m", launch.module, *launch.arguments)),
            envs={local: {**rank_variables(launch, seats, local), **waits.get(local, {})} for local in ranks},
            logs_specs=DefaultLogsSpecs(
                str(launch.log_folder), redirects=Std.ALL, tee=Std.ALL if launch.shown else Std.NONE
            ),
            log_line_prefixes={local: f"{seats.first + local}: " for local in ranks},
        )
    _let_go_of_output(processes)
    return processes


def _let_go_of_output(processes: PContext) -> None:
    """Close what only the ranks write to: where the server of these files was away, closing them later would raise, and
    torch does that between ending one rank and the next."""
    for handler in handlers_of(processes).values():
        for name in ("_stdout", "_stderr"):
            if (file := getattr(handler, name, None)) is not None:
                file.close()


def handlers_of(processes: PContext) -> dict[int, SubprocessHandler]:
    """The processes by local rank."""
    return processes.subprocess_handlers if isinstance(processes, SubprocessContext) else {}


def output_folder(processes: PContext) -> Path:
    """The folder that these processes have for what they print, and no others: FOLDER/attempt_0/RANK/stdout.log."""
    return Path(processes.stdouts[0]).parents[2]


def rank_variables(launch: LocalLaunch, seats: Seats, local: int) -> dict[str, str]:
    """What a rank finds besides what is inherited; the threads that the user set stay.

    Source: "Environment Variables" of torchrun's manual; TORCHELASTIC_USE_AGENT_STORE lets ranks meet in the store
    that the agent keeps, which outlives rank 0.
    """
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(launch.threads)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "RANK": str(seats.first + local),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(seats.node),
        "WORLD_SIZE": str(seats.world),
        "LOCAL_WORLD_SIZE": str(launch.ranks),
        "GROUP_WORLD_SIZE": str(seats.nodes),
        "MASTER_ADDR": seats.address,
        "MASTER_PORT": str(seats.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"shardway-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": str(seats.start),
        AGENT_VARIABLE: str(os.getpid()),
        VARIABLE: str(launch.pages or ""),
        **choose_recording(os.environ),
    }


@contextlib.contextmanager
def _surroundings_of_ranks() -> Iterator[None]:
    """Stop signals are ours; torch, which would raise an error of its own at them, keeps one that nobody sends.

    Ranks do not inherit what another launch has left (`inherited`): an agent is no task of MPI, and neither are they.
    """
    before = dict(os.environ)
    for name in list_unfit_for_ranks(before):
        del os.environ[name]
    os.environ[_TORCHS_SIGNALS] = "SIGQUIT"
    try:
        yield
    finally:
        os.environ.pop(_TORCHS_SIGNALS)
        os.environ.update(before)
