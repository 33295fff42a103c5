"""A pool of gloo ranks that lives as long as pytest: `@ranks(2)` runs a test's body on every rank.

    @ranks(2)
    def test_sum(rank: int, tmp_path: Path) -> None:
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        assert ones.item() == 2

Invariant: a test starts on ranks that are as fresh as their first (no process group, same seeds, nothing leaked), or
on new ones: a pool in which a rank died or hung is killed as a whole. This module must not import torch: pytest's own
process needs none.

The body is found by file and name in processes that stay, so it has to be a function at the top of its module, and
what its other parameters hold (fixtures, parametrized values) has to pickle. What it changes in pytest's process
(monkeypatch as a fixture, for one) does not reach the ranks.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

import warm
from pool_worker import STACK_SIGNAL, Reply, Task, WarningFilter

START_S = 180.0
"""How long new ranks may take to import torch, and a rank to import a test's module, on a machine that is busy."""
TRIAL_S = 180.0
"""How long a test may take on its ranks, unless it says so: against a hang alone."""
GRACE_S = 30.0
"""How long the other ranks may still take after the first has failed."""
_FINISH_S = 120.0
_STACK_S = 5.0
_OWN = "pool_worker"
_START_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1])['sys_path']; import pool_worker; pool_worker.main()"
)


def ranks(size: int, timeout_s: float = TRIAL_S) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on `size` ranks; its first parameter is `rank: int`, the others are fixtures as usual.

    After `timeout_s` seconds the ranks that have not arrived are named with their stacks.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(body).parameters.values())
        if not parameters or parameters[0].name != "rank" or "<locals>" in body.__qualname__:
            raise TypeError(f"{body.__qualname__} is not a function at the top of its module whose first is `rank`")

        @functools.wraps(body)
        def on_every_rank(rank_pool: RankPool, **arguments: Any) -> None:
            rank_pool.run(body, size, arguments, timeout_s)

        pool = inspect.Parameter("rank_pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        on_every_rank.__signature__ = inspect.Signature([pool, *parameters[1:]])  # type: ignore[attr-defined]
        on_every_rank.rank_body = body  # type: ignore[attr-defined]
        return on_every_rank

    return decorate


@dataclass
class _Worker:
    """A rank's process, the wire to it, and the files in memory that take its output and its stacks."""

    process: subprocess.Popen[bytes]
    connection: Connection
    output: int
    stacks: int
    output_start: int = 0

    def receive(self) -> Any:
        """What the worker sent; a Reply that says how it ended where it is gone."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            return Reply("died", _describe_exit(self.process.wait()), time.monotonic())

    def send(self, message: object) -> None:
        """Send, unless the worker is gone: `receive` then tells."""
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionError):
            return

    def mark_output(self) -> None:
        """What the worker prints from now on belongs to the next test."""
        self.output_start = os.fstat(self.output).st_size

    def read_output(self) -> str:
        """What the worker has printed since `mark_output`, under a heading, or ""."""
        text = _read_from(self.output, self.output_start)
        return f"\noutput:\n{text}" if text else ""

    def read_stacks(self) -> str:
        """The stacks of the worker's threads as they are now."""
        start, before = os.fstat(self.stacks).st_size, ""
        self.process.send_signal(STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            text = "\n".join(line for line in _read_from(self.stacks, start).splitlines() if _OWN not in line)
            if text and text == before:
                return text
            before = text
        return before or "none: the process does not answer"

    def close(self) -> None:
        """Kill the worker and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        os.close(self.output)
        os.close(self.stacks)


def _read_from(file: int, start: int) -> str:
    """The file from `start` on, without moving the offset that the worker writes at."""
    return os.pread(file, os.fstat(file).st_size - start, start).decode(errors="replace").rstrip()


def _describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass
class _Trial:
    """One test on its ranks, and what each of them has replied in the step that it is in."""

    name: str
    workers: Sequence[_Worker]
    replies: dict[int, Reply] = field(default_factory=dict)

    def collect(self, timeout_s: float, *, release: bool = True) -> None:
        """Wait for the reply of every rank; once one has not passed, GRACE_S more for the others.

        With `release` that rank is told to finish at once, so that its peers' collectives fail with it.
        """
        deadline, self.replies = time.monotonic() + timeout_s, {}
        waiting: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(self.workers)}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                self.replies[rank] = reply = self.workers[rank].receive()
                if reply.kind != "passed":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                    if release:
                        self.workers[rank].send("finish")

    def tell_passed(self, message: str) -> None:
        """Send to the ranks that have passed; the others have been released."""
        for rank, reply in self.replies.items():
            if reply.kind == "passed":
                self.workers[rank].send(message)

    def all_passed(self) -> bool:
        """Whether every rank has arrived and passed."""
        return not self.missing() and all(reply.kind == "passed" for reply in self.replies.values())

    def missing(self) -> list[int]:
        """The ranks that have not replied."""
        return [rank for rank in range(len(self.workers)) if rank not in self.replies]

    def failed(self) -> list[int]:
        """The ranks that failed, the cause first: a death before an exception, then by time."""
        bad = [rank for rank, reply in self.replies.items() if reply.kind in ("failed", "broken", "died")]
        return sorted(bad, key=lambda rank: (self.replies[rank].kind != "died", self.replies[rank].when))

    def is_spoilt(self) -> bool:
        """Whether a process hung, died or could not be put right."""
        return bool(self.missing()) or any(reply.kind in ("broken", "died") for reply in self.replies.values())

    def render_failure(self, timeout_s: float) -> str:
        """Each failed rank with its traceback and output, then the missing with their stacks; "" for neither."""
        failed, missing = self.failed(), self.missing()
        parts = [f"rank {rank}: {self.replies[rank].text}{self.workers[rank].read_output()}" for rank in failed]
        limit = f"{GRACE_S:g} s after that" if failed else f"{timeout_s:g} s"
        for rank in missing:
            worker = self.workers[rank]
            stacks = f"did not arrive within {limit}; its stacks:\n{worker.read_stacks()}"
            parts.append(f"rank {rank}: {stacks}{worker.read_output()}")
        skipped = [f"rank {rank}: skipped: {r.text}" for rank, r in self.replies.items() if r.kind == "skipped"]
        head = f"{self.name} on {len(self.workers)} ranks; failed: {_join(failed)}; did not arrive: {_join(missing)}"
        passed = [rank for rank, reply in self.replies.items() if reply.kind == "passed"]
        head += f"; passed: {_join(sorted(passed))}"
        return "\n\n".join([head, *parts, *skipped]) if parts else ""


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


class RankPool:
    """Processes that run test bodies; started when first needed, as many as the largest test so far has ranks."""

    def __init__(self) -> None:
        self._environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self._environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._folder = os.getcwd()
        self._numbers = itertools.count()
        self._workers: list[_Worker] = []
        self._store_port = 0

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks that live now, by rank."""
        return [worker.process.pid for worker in self._workers]

    def run(
        self, body: Callable[..., None], size: int, arguments: Mapping[str, Any], timeout_s: float = TRIAL_S
    ) -> None:
        """Run `body(rank, **arguments)` on ranks 0 to size - 1; pytest.fail or pytest.skip with what they say."""
        packed = _pack(body, arguments)
        try:
            self._grow(size)
            trial = _Trial(body.__name__, self._workers[:size])
            task = self._describe(body, size, packed, timeout_s)
            for rank, worker in enumerate(trial.workers):
                worker.mark_output()
                worker.send(replace(task, rank=rank))
            failure, reasons = self._try(trial, timeout_s)
        except BaseException:  # Ctrl-C as well: the ranks are somewhere within the test
            self.close()
            raise
        if failure:
            pytest.fail(failure, pytrace=False)
        if reasons:
            pytest.skip(reasons[0])

    def close(self) -> None:
        """End all ranks; the next test starts new ones."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _describe(self, body: Callable[..., None], size: int, packed: bytes, timeout_s: float) -> Task:
        """The task of rank 0. The group's own timeout is longer than the pool's, which names ranks and stacks."""
        return Task(
            number=next(self._numbers),
            path=body.__code__.co_filename,
            module=body.__module__,
            name=body.__qualname__,
            rank=0,
            size=size,
            arguments=packed,
            filters=_current_filters(),
            group_timeout_s=timeout_s + START_S,
            store_port=self._store_port,
        )

    def _try(self, trial: _Trial, timeout_s: float) -> tuple[str, list[str]]:
        """Load, run, finish; the failure's text and the reasons to skip. Ends a pool whose ranks are not as new."""
        trial.collect(START_S)
        if trial.all_passed():
            trial.tell_passed("run")
            trial.collect(timeout_s)
        failure = trial.render_failure(timeout_s)
        reasons = [reply.text for reply in trial.replies.values() if reply.kind == "skipped"]
        if not trial.is_spoilt():
            trial.tell_passed("finish")
            trial.collect(_FINISH_S, release=False)
            failure = failure or trial.render_failure(_FINISH_S)
        if trial.is_spoilt():
            self.close()
        return failure, reasons

    def _grow(self, size: int) -> None:
        """Start the workers that are missing, side by side; the first serves the store for all."""
        new = [self._start(serves_store=not self._workers and index == 0) for index in range(len(self._workers), size)]
        self._workers += new
        for worker in new:
            port = worker.receive() if worker.connection.poll(START_S) else None
            if not isinstance(port, int):
                raise RuntimeError(f"a rank of the pool did not start: {port}{worker.read_output()}")
            self._store_port = port or self._store_port

    def _start(self, *, serves_store: bool) -> _Worker:
        ours, theirs = Pipe()
        output, stacks = os.memfd_create("output"), os.memfd_create("stacks")
        settings = {
            "parent": os.getpid(),
            "connection_fd": theirs.fileno(),
            "stacks_fd": stacks,
            "sys_path": [str(Path(__file__).parent), *sys.path],
            "serves_store": serves_store,
        }
        with theirs, warm.starts():
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", _START_CODE, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), stacks),
                env=self._environ,
                cwd=self._folder,
                start_new_session=True,  # Ctrl-C is for pytest; and a kill reaches what a test has started
            )
        return _Worker(process, ours, output, stacks)


def _pack(body: Callable[..., None], arguments: Mapping[str, Any]) -> bytes:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(f"argument {name!r} of {body.__name__} does not pickle") from error
    return pickle.dumps(dict(arguments))


def _current_filters() -> tuple[WarningFilter, ...]:
    """pytest's filters for this test, its marks included."""
    return tuple(
        WarningFilter(action, _pattern(message), category, _pattern(module), line)
        for action, message, category, module, line in warnings.filters
    )


def _pattern(entry: Any) -> str:
    return getattr(entry, "pattern", entry) or ""
