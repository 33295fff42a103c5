"""What a test may not leave behind in its process: variables, threads, handlers, folder, a process group.

Invariant: cheap enough for every test (well under a millisecond). torch is looked at only where it is imported
already; this module must not import it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SET_BY_OTHERS = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_PTXAS_PATH",
        "PYTORCH_NVML_BASED_CUDA_CHECK",  # DeepSpeed, which accelerate imports, which transformers looks for
    }
)
THREADS_END_S = 10.0
"""How long a thread that is about to end may take, on a machine that is busy."""


@dataclass(frozen=True)
class Footprint:
    """The state of this process that a test has to leave as it was; None for torch's part before its import."""

    environ: dict[str, str]
    folder: str
    threads: frozenset[threading.Thread]
    handlers: tuple[Any, ...]
    group: Any = None
    dtype: Any = None
    torch_threads: int | None = None
    linear: Any = None


def take_footprint() -> Footprint:
    """The state as it is now."""
    environ = {name: value for name, value in os.environ.items() if name not in _SET_BY_OTHERS}
    threads = frozenset(thread for thread in threading.enumerate() if not thread.daemon)
    handlers = tuple(signal.getsignal(number) for number in _SIGNALS)
    if (torch := sys.modules.get("torch")) is None:
        return Footprint(environ, os.getcwd(), threads, handlers)
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    settings = torch.get_default_dtype(), torch.get_num_threads(), torch.nn.functional.linear
    return Footprint(environ, os.getcwd(), threads, handlers, group, *settings)


def list_leaks(before: Footprint) -> list[str]:
    """One sentence for each thing that differs from `before`; threads get THREADS_END_S to end."""
    _wait_for_threads(before)
    after = take_footprint()
    leaks = [
        f"environment variable {name}: {before.environ.get(name)!r} became {after.environ.get(name)!r}"
        for name in sorted(before.environ.keys() | after.environ.keys())
        if before.environ.get(name) != after.environ.get(name)
    ]
    leaks += [f"thread {thread.name} still runs" for thread in after.threads - before.threads]
    leaks += [
        f"handler of {number.name}: {old!r} became {new!r}"
        for number, old, new in zip(_SIGNALS, before.handlers, after.handlers, strict=True)
        if old != new
    ]
    if before.folder != after.folder:
        leaks.append(f"working folder: {before.folder} became {after.folder}")
    return leaks + _list_torch_leaks(before, after)


def _list_torch_leaks(before: Footprint, after: Footprint) -> list[str]:
    leaks = []
    if after.group is not None and after.group is not before.group:
        leaks.append("default process group was not destroyed")
    if before.dtype is not None and before.dtype != after.dtype:
        leaks.append(f"torch's default dtype: {before.dtype} became {after.dtype}")
    if before.torch_threads is not None and before.torch_threads != after.torch_threads:
        leaks.append(f"torch's threads: {before.torch_threads} became {after.torch_threads}")
    if before.linear is not None and before.linear is not after.linear:
        leaks.append(f"torch.nn.functional.linear became {after.linear}")
    return leaks


def _wait_for_threads(before: Footprint) -> None:
    deadline = time.monotonic() + THREADS_END_S
    for thread in threading.enumerate():
        if not thread.daemon and thread not in before.threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def restore(before: Footprint) -> None:
    """Undo what can be undone, so that one leak is not the next test's as well."""
    os.chdir(before.folder)
    for name in set(os.environ) - before.environ.keys() - _SET_BY_OTHERS:
        del os.environ[name]
    os.environ.update(before.environ)
    for number, handler in zip(_SIGNALS, before.handlers, strict=True):
        if handler is not None:  # None: set by C code, out of reach
            signal.signal(number, handler)
    if (torch := sys.modules.get("torch")) is None:
        return
    if before.group is None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if before.dtype is not None:
        torch.set_default_dtype(before.dtype)
        torch.set_num_threads(before.torch_threads)
        torch.nn.functional.linear = before.linear
