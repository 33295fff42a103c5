"""What each rank that the local agent starts runs: `python -m shardway.cli.rank REQUEST`.

Invariant: it ends with the exit code of its error, which it has written into its events, and it dies with its
agent. This module must not show progress: the process that started the ranks does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shardway.cli.main import leave, run_guarded, uncollected
from shardway.hardware.limits import ensure_temporary
from shardway.ranks.heartbeat import bind_to_cores, join_agent, wait_at_gate
from shardway.ranks.outputs import Shutdown
from shardway.ranks.stop import SignalWatch, stop_with_agent
from shardway.resolve.request import ResolveRequest


def read_packed(word: str) -> ResolveRequest:
    """The request that `pack_request` put into one word."""
    packed = json.loads(word)
    return ResolveRequest(
        run_file=Path(packed["run_file"]) if packed["run_file"] else None,
        overrides=tuple(packed["overrides"]),
        directory=Path(packed["directory"]) if packed["directory"] else None,
        fresh=packed["fresh"],
    )


def import_all() -> None:
    """What a rank imports until its first step, beforehand; torch's compiler too, which optimizers and DDP ask for."""
    ensure_temporary()
    with uncollected():
        import shardway.train.run  # noqa: F401


def main() -> None:
    """Train as one rank."""

    def work() -> None:
        import_all()
        from shardway.train.run import train

        train(read_packed(sys.argv[1]))

    last = Shutdown()
    with SignalWatch():  # from the first moment: the import of torch takes seconds
        stop_with_agent(os.environ)
        if wait_at_gate(os.environ, import_all):
            if why := bind_to_cores(os.environ):
                print(why, file=sys.stderr)
            join_agent(os.environ)
            code = run_guarded(work)
        else:
            code = 0  # a spare that was never needed
    leave(code, last)


if __name__ == "__main__":
    main()
