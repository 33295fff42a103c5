"""Ranks from a notebook: `shardway.notebook_launch(train, 3e-4, nproc=2)` calls a function in processes of its own.

    def train(lr):
        with shardway.start() as run: ...

    loss = shardway.notebook_launch(train, 3e-4, nproc=2)

Invariants:
- The ranks are new processes, never forks: a fork of a process that has threads or has used CUDA may hang or fail.
- They end with the call, however that ends: an error of one of them, Ctrl-C, or the end of the notebook's process.
- The error that is raised is that of the rank that failed first, with its own traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from shardway.errors import JobError, UserError
from shardway.inherited import strip
from shardway.launch.calls.packing import OWN_PARENT, RankOutcome, pack_call, read_outcome, read_program

LEAVE_S = 5.0
"""How long ranks may take to end after another has failed, or after Ctrl-C; then they are killed."""
LOOK_S = 0.05


def notebook_launch(fn: Callable[..., Any], /, *args: Any, nproc: int = 2, threads: int = 0, **kwargs: Any) -> Any:
    """Call `fn(*args, **kwargs)` in `nproc` processes of this machine, which find each other (`shardway.start()`, or
    `torch.distributed.init_process_group`), and return what rank 0 returns. What ranks print is shown here, each line
    with its rank. `threads`: CPU threads of a rank, by default the cores of this process by ranks.

    Raises what a rank raised; JobError where one was killed; KeyboardInterrupt after Ctrl-C, when all have ended;
    UserError for what cannot be called like this."""
    if nproc < 1:
        raise UserError(f"nproc={nproc}: it counts processes.\n      allowed: 1 or more")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UserError(
            "this process is a rank itself (RANK and WORLD_SIZE are set), and would start ranks of its own.\n"
            "  To do: call notebook_launch in a notebook or a script that no launcher has started."
        )
    call = replace(pack_call(fn, args, kwargs), ranks=nproc)
    with tempfile.TemporaryDirectory(prefix="shardway-ranks-") as scratch:
        folder = Path(scratch)
        (folder / "call.py").write_text(read_program(), encoding="utf-8")
        (folder / "call.json").write_text(call.render("", ""), encoding="utf-8")
        ranks = _Ranks(folder, nproc, threads or max(1, len(os.sched_getaffinity(0)) // nproc), call.function)
        with ranks:
            return ranks.run().value


class _Ranks:
    """The processes of one call."""

    def __init__(self, folder: Path, count: int, threads: int, function: str) -> None:
        self._folder, self._count, self._threads, self._function = folder, count, threads, function
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> _Ranks:
        environ = strip(os.environ)
        address, port = "127.0.0.1", _find_port()
        environ.setdefault("OMP_NUM_THREADS", str(self._threads))
        places = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(self._count)}
        places |= {"LOCAL_WORLD_SIZE": str(self._count), OWN_PARENT: str(os.getpid())}
        for rank in range(self._count):
            process = subprocess.Popen(
                [sys.executable, str(self._folder / "call.py"), str(self._folder / "call.json"), str(self._folder)],
                env={**environ, **places, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C comes here alone
            )
            self._processes.append(process)
            prefix = f"{rank}: " if self._count > 1 else ""
            reader = threading.Thread(target=_show, args=(process.stdout, prefix), daemon=True)
            reader.start()
            self._readers.append(reader)
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        for reader in self._readers:
            reader.join(LEAVE_S)
        for process in self._processes:
            if process.stdout is not None:
                with contextlib.suppress(OSError, ValueError):
                    process.stdout.close()

    def run(self) -> RankOutcome:
        """The outcome of rank 0 once all have returned. Raises what the first failed rank raised."""
        while True:
            codes = [process.poll() for process in self._processes]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                raise self._find_cause(failed)
            if None not in codes:
                outcome = self._read(0)
                if outcome.error is not None:
                    raise outcome.error
                return outcome
            time.sleep(LOOK_S)

    def _find_cause(self, failed: list[int]) -> BaseException:
        """The error of the rank that failed first; one that left a record comes before one that was killed."""
        records = [rank for rank in range(self._count) if self._record(rank).exists()]
        raised = sorted((r for r in records if self._read(r).error), key=lambda r: self._record(r).stat().st_mtime_ns)
        if raised:
            return self._read(raised[0]).error or JobError("")
        rank = failed[0]
        code = self._processes[rank].returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        memory = ", most often since memory ran out" if code == -signal.SIGKILL else ""
        return JobError(
            f"rank {rank} of {self._function} {how}{memory}; it returned nothing.\n"
            "  To do: see what it printed above; a smaller batch, or fewer processes (nproc), need less memory."
        )

    def _record(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"

    def _read(self, rank: int) -> RankOutcome:
        try:
            text = self._record(rank).read_text(encoding="utf-8")
        except OSError:
            text = ""
        return read_outcome(text, rank, self._function, self._count)

    def _end(self) -> None:
        """End every process that is left, with all that it started: SIGTERM, then SIGKILL."""
        alive = [process for process in self._processes if process.poll() is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + LEAVE_S
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _find_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def _show(stream: IO[str] | None, prefix: str) -> None:
    """Print what a rank prints, in whole lines; through `sys.stdout`, which in a notebook is the output of its cell."""
    for line in stream or ():
        shown = sys.stdout
        shown.write(f"{prefix}{line if line.endswith(chr(10)) else line + chr(10)}")
        shown.flush()
