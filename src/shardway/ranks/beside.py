"""This process as rank 0, with further ranks beside it on this machine: for verbs that talk with a terminal.

Training starts its ranks under an agent (`ranks.local`), which takes their output. A verb that reads lines of a person,
and shows the answer as it comes, is rank 0 itself.

Invariants: the others have no terminal, and a Ctrl-C there does not reach them. None outlives the block or this
process. If one ends badly, this process does not wait for it: it ends with what that one printed. This module must not
decide what ranks do.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardway.errors import JobError, LostContact
from shardway.inherited import list_unfit_for_ranks
from shardway.ranks.failure import RankFailure
from shardway.ranks.launcher import LOOPBACK, Placement, find_placement
from shardway.ranks.local import LocalLaunch, RankAssignment, host_store, rank_variables
from shardway.ranks.stop import leave_now

_LEAVE_S = 10.0
"""How long ranks may take to end after rank 0 has left the process group; and how long rank 0 may take to find out by
itself that another one has failed, as where all of them refuse the same."""

_LOOK_EVERY_S = 0.2


@contextlib.contextmanager
def ranks_beside(count: int, words: Sequence[str]) -> Iterator[Placement]:
    """Start `count` - 1 further ranks, each `shardway` with these words; the placement of this one. At the end they are
    awaited for a while, after an error ended. If one of them fails and this one waits for it, this process ends."""
    store = host_store(LOOPBACK)
    with tempfile.TemporaryDirectory(prefix="shardway-ranks-") as folder:
        launch = LocalLaunch(count, "shardway", words, Path(folder), 1, Path(folder) / "no stop", 0.0)
        assignment = RankAssignment(first=0, world=count, node=0, nodes=1, address=LOOPBACK, port=store.port)
        unfit = list_unfit_for_ranks(os.environ)
        inherited = {name: value for name, value in os.environ.items() if name not in unfit}
        outputs = [Path(folder) / f"rank-{rank}.log" for rank in range(1, count)]
        ranks = [
            _start(words, {**inherited, **rank_variables(launch, assignment, rank)}, output)
            for rank, output in enumerate(outputs, 1)
        ]
        own = rank_variables(launch, assignment, 0)
        before = dict(os.environ)
        os.environ.update(own)  # libraries read there where the ranks meet
        done = threading.Event()
        thread = threading.Thread(target=_watch, args=(ranks, outputs, done), name="ranks beside", daemon=True)
        thread.start()
        try:
            yield find_placement({**inherited, **own})
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(_LEAVE_S)
        except LostContact as error:
            if (failure := _find_failure(ranks, outputs)) is not None:
                raise failure from error
            raise
        finally:
            done.set()
            thread.join()
            for rank in ranks:
                rank.kill()
                rank.wait()
            for name in own:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    os.environ.pop(name, None)


def _start(words: Sequence[str], environ: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    with open(output, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "shardway", *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _watch(ranks: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path], done: threading.Event) -> None:
    """End this process if another rank has failed and this one does not find out, as in a wait for all of them."""
    while not done.wait(_LOOK_EVERY_S):
        if (failure := _find_failure(ranks, outputs)) is not None:
            if not done.wait(_LEAVE_S):
                for rank in ranks:
                    rank.kill()
                leave_now(str(failure), failure.exit_code)
            return


def _find_failure(ranks: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]) -> JobError | None:
    """The first rank that ended badly, with what it printed; None if none has."""
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True), 1):
        failure = RankFailure(number, rank.pid, rank.poll() or 0, (output,))
        if failure.signal_name is not None:
            return JobError(
                f"rank {number} (process {rank.pid}) was ended by {failure.signal_name}, so the model is not whole.\n"
                "  To do: if that was not on purpose, look at `dmesg` (did memory run out?); then run it again."
            )
        if failure.exit_code:
            printed = failure.last_error() or failure.read_printed().strip()[-2000:]
            return JobError(
                f"rank {number} ended with exit code {failure.exit_code}: {printed or 'it printed nothing'}"
            )
    return None
