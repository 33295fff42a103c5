"""Processes that work on numbered parts of a task, each part in one of them.

Invariants:
- No process outlives the call, however it ends; a process whose starter is killed is killed with it.
- The first error of a part is raised as it is, and ends the others. Which process does a part has no influence on it.
- The processes do not import the main module of the program that starts them, so a script needs no
  `if __name__ == "__main__":` for it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from shardway.errors import ERRORS_BY_NAME, Bug, JobError, ShardwayError
from shardway.ranks.stop import end_with_parent

Advance = Callable[[float], None]
"""Takes how much of a part is done, 0 to 1."""
DoPart = Callable[[int, Advance], Any]
"""Does one part and returns a fact about it; pickled to the processes."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of a process beside others of its kind: numerical libraries start no threads in it."""


def do_parts(
    work: DoPart,
    parts: Sequence[int],
    processes: int,
    finish: Callable[[int, Any], None],
    advance: Callable[[int, float], None],
    environ: Mapping[str, str] = ONE_THREAD,
) -> None:
    """Do `parts` in up to so many processes, which get `environ` besides that of this one.

    `finish` gets each part and its fact, `advance` how much of a part is done, both in this process. Raises what `work`
    raises, and JobError if a process is killed. Where the system refuses more processes, fewer work, or this one.
    """
    todo = iter(parts)
    with contextlib.ExitStack() as stack:
        workers: dict[Connection, BaseProcess] = {}
        stack.callback(_end_workers, workers)
        for _ in range(min(processes, len(parts))):
            started = _start(work, environ)
            if started is None:
                break
            workers[started[0]] = started[1]
        if not workers:
            for part in todo:
                finish(part, work(part, lambda share, part=part: advance(part, share)))  # type: ignore[misc]
            return
        _serve(workers, todo, finish, advance)


def _start(work: DoPart, environ: Mapping[str, str]) -> tuple[Connection, BaseProcess] | None:
    """A process that waits for parts, and the connection to it; None where the system refuses it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, work), daemon=True)
    try:
        with set_variables(environ), _without_main():
            process.start()
    except (BlockingIOError, MemoryError, OSError):
        here.close()
        return None
    finally:
        there.close()
    return here, process


def _serve(
    workers: dict[Connection, BaseProcess],
    todo: Iterator[int],
    finish: Callable[[int, Any], None],
    advance: Callable[[int, float], None],
) -> None:
    """Hand out parts until none is left and all are done."""
    busy = {connection for connection in list(workers) if _give(connection, next(todo, None))}
    while busy:
        for connection in wait(list(busy)):
            if not isinstance(connection, Connection):
                continue
            try:
                what, part, value = connection.recv()
            except (EOFError, ConnectionError) as error:
                raise _explain_end(workers[connection]) from error
            if what == "share":
                advance(part, value)
            elif what == "error":
                raise value
            else:
                finish(part, value)
                if not _give(connection, next(todo, None)):
                    busy.remove(connection)


def _give(connection: Connection, part: int | None) -> bool:
    """Send a part, or that there is none any more; a process that is gone is found when its answer is awaited."""
    with contextlib.suppress(ConnectionError):
        connection.send(part)
    return part is not None


def _end_workers(workers: Mapping[Connection, BaseProcess]) -> None:
    for process in workers.values():
        process.kill()
    for connection, process in workers.items():
        process.join()
        process.close()
        connection.close()


def _explain_end(process: BaseProcess) -> JobError:
    process.join()
    code = process.exitcode
    if code == -signal.SIGKILL:
        how = "was killed (signal 9)"
        likely = "out of memory, of the node or of what the job may use (`dmesg`, or the accounting of the scheduler)"
    else:
        how = f"ended unexpectedly with exit code {code}"
        likely = "its own words above, or the system's (`dmesg`)"
    return JobError(
        f"a process that prepared data {how}\n"
        f"      likely: {likely}\n"
        "      to do: run the same command again, with fewer --processes if memory was short: what is finished is kept"
    )


@contextlib.contextmanager
def set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while entered, as for a process that starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module: `multiprocessing` would import it in each new process, and a script would run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# --- in a process


def _work(connection: Connection, work: DoPart) -> None:
    """Do the parts that arrive. Ctrl-C reaches every process of a terminal; the starter handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    with contextlib.suppress(EOFError, ConnectionError):
        while (part := connection.recv()) is not None:
            try:
                answer = ("done", part, work(part, functools.partial(_send_share, connection, part)))
            except ConnectionError:
                raise
            except MemoryError:
                answer = ("error", part, JobError("a process that prepared data has no more memory"))
            except Exception as error:
                answer = ("error", part, _as_sendable(error))
            connection.send(answer)


def _send_share(connection: Connection, part: int, share: float) -> None:
    connection.send(("share", part, share))


def _as_sendable(error: Exception) -> Exception:
    """An error of Shardway as it is, any other with its traceback as a Bug."""
    if type(error).__module__.startswith("shardway."):
        with contextlib.suppress(Exception):  # an error whose arguments are not those of its class is sent as text
            pickle.loads(pickle.dumps(error))
            return error
        if isinstance(error, ShardwayError):
            return ERRORS_BY_NAME.get(type(error).__name__, JobError)(str(error))
    return Bug("".join(traceback.format_exception(error)))
