"""One rank of the tests' pool: a process that imports torch once and runs test bodies as long as pytest lives.

Invariant: between two tasks there is no process group, and the process is as it was after its start (tests/leaks.py);
what cannot be put right is told, so that the pool replaces this process. It must not outlive its parent.

The talk for one test, parent -> worker: Task, "run" once all ranks have loaded it, "finish" once all have run it
(at once to a rank that failed, so that its peers' collectives break rather than wait); worker -> parent: one Reply
to each of these.
"""

from __future__ import annotations

import ast
import ctypes
import faulthandler
import functools
import gc
import importlib.util
import json
import os
import pickle
import signal
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

from leaks import Footprint, list_leaks, restore, take_footprint

STACK_SIGNAL = signal.SIGRTMIN
_PR_SET_PDEATHSIG = 1
_STORE_HOST = "127.0.0.1"


@dataclass(frozen=True)
class WarningFilter:
    """One entry of `warnings.filters` with its patterns as text."""

    action: Any
    message: str
    category: Any
    module: str
    line: int


@dataclass(frozen=True)
class Task:
    """A test's body by file and name, and this rank's part in it. `number` is unique within the pool."""

    number: int
    path: str
    module: str
    name: str
    rank: int
    size: int
    arguments: bytes
    filters: tuple[WarningFilter, ...]
    group_timeout_s: float
    store_port: int


@dataclass(frozen=True)
class Reply:
    """How a step went. `text` is a traceback, a skip's reason, or leaks; `when` is the machine's monotonic clock."""

    kind: Literal["passed", "failed", "skipped", "broken", "died"]
    text: str = ""
    when: float = 0.0


def main() -> None:
    """Serve the parent named by the last command-line argument (see `RankPool._start`) until it hangs up."""
    settings = json.loads(sys.argv[1])
    _die_with(settings["parent"])
    faulthandler.register(STACK_SIGNAL, file=settings["stacks_fd"], all_threads=True)
    sys.path[:] = settings["sys_path"]
    connection = Connection(settings["connection_fd"])
    import torch
    import torch.distributed.nn  # its functions keep, as defaults, the default group that is there at its import
    import torch.distributed.tensor  # for `_forget_meshes`; it takes a second

    # A library that crashes leaves in the worker's output where Python was, and then the native stacks of all threads.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    faulthandler.enable()  # the newer handler comes first
    torch.set_num_threads(1)
    stores: dict[int, Any] = {}
    if settings["serves_store"]:
        store = torch.distributed.TCPStore(_STORE_HOST, 0, is_master=True, wait_for_workers=False)
        stores[store.port] = store
    connection.send(next(iter(stores), 0))
    try:
        while True:
            _serve_task(connection, connection.recv(), stores)
    except EOFError:
        return


def _die_with(parent: int) -> None:
    """Let the kernel kill this process with its parent, and end now if the parent is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve_task(connection: Connection, task: Task, stores: dict[int, Any]) -> None:
    call: list[Callable[[], None]] = []
    connection.send(_attempt(task, lambda: call.append(_load_call(task))))
    gc.freeze()  # modules stay; what the last test left was collected
    before = take_footprint()
    if connection.recv() == "run":
        connection.send(_attempt(task, lambda: _run_in_group(task, stores, call[0])))
        connection.recv()
    call.clear()
    connection.send(_attempt(task, lambda: _clean_up(before), failure="broken"))


def _attempt(task: Task, step: Callable[[], None], failure: Literal["failed", "broken"] = "failed") -> Reply:
    """The step under the test's warning filters; an exception of any kind becomes a Reply."""
    import pytest

    try:
        with warnings.catch_warnings():
            _set_filters(task.filters)
            step()
    except pytest.skip.Exception as skip:
        return Reply("skipped", str(skip), time.monotonic())
    except _LeaksFound as leaks:
        return Reply("failed", str(leaks), time.monotonic())
    except BaseException as error:
        when = time.monotonic()
        return Reply(failure, _render_traceback(error), when)
    return Reply("passed", "", time.monotonic())


class _LeaksFound(Exception):
    """The body left something behind that could be put right."""


def _set_filters(filters: tuple[WarningFilter, ...]) -> None:
    warnings.resetwarnings()
    for entry in reversed(filters):
        warnings.filterwarnings(entry.action, entry.message, entry.category, entry.module, entry.line)


def _render_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the test on."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename == __file__:
        step = step.tb_next
    error.__traceback__ = step or error.__traceback__
    return "".join(traceback.format_exception(error)).rstrip()


def _load_call(task: Task) -> Callable[[], None]:
    module = sys.modules.get(task.module)
    if module is None or getattr(module, "__file__", None) != task.path:
        module = _import_file(task.path, task.module)
    found = getattr(module, task.name)
    body = getattr(found, "rank_body", found)
    arguments = pickle.loads(task.arguments)
    return lambda: body(task.rank, **arguments)


def _import_file(path: str, name: str) -> types.ModuleType:
    """The module under its name, with pytest's rewritten asserts, so that a failure shows the values."""
    from _pytest.assertion.rewrite import rewrite_asserts

    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    with open(path, "rb") as file:
        source = file.read()
    tree = ast.parse(source, path)
    rewrite_asserts(tree, source, path)
    sys.modules[name] = module
    try:
        exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _run_in_group(task: Task, stores: dict[int, Any], call: Callable[[], None]) -> None:
    import torch.distributed as dist

    from shardway.checkpoint.state import seed_all

    if task.store_port not in stores:
        stores[task.store_port] = dist.TCPStore(_STORE_HOST, task.store_port, is_master=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"test-{task.number}", stores[task.store_port]),
        rank=task.rank,
        world_size=task.size,
        timeout=timedelta(seconds=task.group_timeout_s),
    )
    seed_all(0, 0)  # not as a script would, whose seeds a run leaves alone
    group = dist.group.WORLD
    call()
    if dist.is_initialized() and dist.group.WORLD is not group:
        raise _LeaksFound("the test leaves behind:\n  a default process group of its own")


@functools.lru_cache(maxsize=1)
def _list_caches(modules: tuple[str, ...]) -> list[Any]:
    """The functions of these modules and their classes that `functools.lru_cache` keeps results of."""
    loaded = [sys.modules[name] for name in modules]
    owners = [*loaded, *(each for module in loaded for each in vars(module).values() if type(each) is type)]
    values = [value for owner in owners for value in vars(owner).values()]
    functions = [value.__func__ if type(value) in (staticmethod, classmethod) else value for value in values]
    return [each for each in functions if type(each) is functools._lru_cache_wrapper]


def _forget_meshes() -> None:
    """Let go of the groups of this test's meshes: torch caches meshes in many functions, and each group that is kept
    alive so has a thread that spins once its peers have closed their ends."""
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for function in _list_caches(tuple(name for name in sys.modules if name.startswith("torch.distributed"))):
        function.cache_clear()
    gc.collect()


def _clean_up(before: Footprint) -> None:
    """Rubbish goes before the groups: a Reducer that is the last to hold its group ends it without letting go of the
    interpreter, while a thread of that group may wait for the interpreter with the group's lock in its hands."""
    import torch.distributed as dist

    _forget_meshes()
    if dist.is_initialized():
        dist.destroy_process_group()
    if dist.distributed_c10d._world.group_count:  # the next group would have another name here than on the other ranks
        raise RuntimeError("a process group was not made to the end")
    leaks = list_leaks(before)
    if leaks:
        restore(before)
        raise _LeaksFound("\n  ".join(["the test leaves behind:", *leaks]))
