"""How a rank ends: with its agent, and without the interpreter's cleanup, in which libraries hang or crash.

A process that starts ranks as children and is killed cannot end them. Without this module they would train on, and the
next launch would write into the same run. srun and mpirun need no help: their daemons end what they started.

Invariants:
- With the agent: quick to import (no torch), and without effect where the kernel lacks it. A rank is ended only by
  SIGTERM, a stop request, upon which it saves (`ranks.signals`).
- After an error a rank leaves at once only if other ranks share the process group or after a second Ctrl-C, and only
  after the reason was shown. At interpreter exit a process group can wait forever for a peer that is gone, and a job
  whose ranks wait so keeps its nodes. A successful end waits for threads and runs the exit handlers of libraries.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dis
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType

from shardway.errors import Bug, ShardwayError, legible
from shardway.ranks.variables import AGENT_VARIABLE

# --- ending with the parent process

_PR_SET_PDEATHSIG = 1


def stop_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies (prctl(2), Linux alone)."""
    _signal_with_parent(signal.SIGTERM)


def end_with_parent() -> None:
    """Ask the kernel to kill this process, even a stopped one, when the thread that started it ends."""
    _signal_with_parent(signal.SIGKILL)


def _signal_with_parent(number: signal.Signals) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def stop_with_agent(environ: Mapping[str, str]) -> None:
    """`stop_with_parent` for a rank that an agent has started as a child; at once if the agent is already gone."""
    stop_with_parent()
    if is_orphan(find_agent(environ)):
        signal.raise_signal(signal.SIGTERM)


def find_agent(environ: Mapping[str, str]) -> int:
    """The pid of the process that started this rank: the agent's from its variable, else the current parent's."""
    return int(environ.get(AGENT_VARIABLE, "") or os.getppid())


def is_orphan(agent: int) -> bool:
    """Whether the process that started this rank is gone; 0 for a rank without one."""
    return agent not in (0, os.getppid())


# --- leaving without the interpreter's cleanup

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

UNKNOWN, INTERRUPTED, TOLD = 1, 130, 2
"""Exit codes of Python for an error, and of a shell for Ctrl-C; the descriptor for messages to the user."""


@contextlib.contextmanager
def left_at_once(world: int) -> Iterator[None]:
    """If an uncaught error leaves this context, end the process without cleanup.

    With one rank only after a second Ctrl-C, since a save may be under way in a thread. The command line ends in its
    own way; this is for scripts that own their loop.
    """
    try:
        yield
        if world > 1 and threading.current_thread() is threading.main_thread():
            ScriptExit(sys._getframe()).arm()
    except KeyboardInterrupt:
        sys.excepthook = _leave_after(_show_interrupt)
        raise
    except Exception:
        if world > 1:
            sys.excepthook = _leave_after(sys.excepthook)
        raise


@dataclass
class ScriptHook:
    """Replaces `sys.excepthook`: an uncaught Shardway error ends a script with its message and exit code, as on the
    command line; any other error goes to the previous hook.

    `closes` are called first with the error: they end what is still open.
    """

    previous: Hook
    closes: list[Hook] = field(default_factory=list)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        closes = [*reversed(self.closes)]
        for close in closes:
            with contextlib.suppress(BaseException):  # the error itself is reported below
                try:
                    close(kind, error, trace)
                except ShardwayError as explained:  # the explained cause
                    kind, error, trace = type(explained), explained, explained.__traceback__
        if closes and sys.excepthook is not self:  # among several ranks, the process is to end at once
            sys.excepthook(kind, error, trace)
            return
        if not isinstance(error, ShardwayError) or isinstance(error, Bug):
            self.previous(kind, error, trace)
        if isinstance(error, ShardwayError):
            with contextlib.suppress(OSError):
                os.write(TOLD, f"shardway: {legible(str(error))}\n".encode())
            raise SystemExit(error.exit_code)


def script_hook() -> ScriptHook:
    """The installed hook; the first call installs it."""
    if not isinstance(sys.excepthook, ScriptHook):
        sys.excepthook = ScriptHook(sys.excepthook)
    return sys.excepthook


def restore_hook() -> None:
    """Restore the previous hook, once nothing is open."""
    if isinstance(sys.excepthook, ScriptHook) and not sys.excepthook.closes:
        sys.excepthook = sys.excepthook.previous


def report_errors() -> None:
    """From now on an uncaught Shardway error is shown as its message only; IPython does that by itself
    (`errors`)."""
    script_hook()


class ScriptExit:
    """Ends the process of a script that ran to its end, after all exit handlers of libraries and the script, and before
    C++ destructors (see `Shutdown`).

    Only if the outermost frame has returned is the exit code known to be 0 before the interpreter ends. A script that
    ends by `sys.exit` or by an error ends as usual in Python, but without those destructors (where the C library has
    `on_exit`, which receives the code).
    """

    def __init__(self, frame: FrameType) -> None:
        while frame.f_back is not None:
            frame = frame.f_back
        self._outermost = frame

    def arm(self) -> None:
        """Take effect from now on; called in the main thread."""
        register = getattr(threading, "_register_atexit", None)  # its callbacks run before those of `atexit`
        if register is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter is already ending
                register(self._come_first)
        _exit_before_destructors()

    def _come_first(self) -> None:
        atexit.register(self._leave)

    def _leave(self) -> None:
        code = self._outermost.f_code.co_code
        if not dis.opname[code[self._outermost.f_lasti]].startswith("RETURN_"):
            return
        atexit.unregister(self._leave)
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            flush_output()
            _flush_libraries()
            os._exit(0)


class Shutdown:
    """Created before any other exit handler is registered, so that it runs last.

    It skips C++ destructors. Those of torch have ended a rank with SIGABRT after all its work was done, when another
    rank of its group had left a moment before (torch 2.13, gloo, "terminate called without an active exception").
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def leave_with(self, code: int) -> None:
        """Set the exit code for the end of this process; without it Python ends as usual."""
        self._code = code

    def _leave(self) -> None:
        if self._code is None or "torch" not in sys.modules:
            return
        with contextlib.suppress(OSError):
            flush_output()
        _flush_libraries()
        os._exit(self._code)


def _exit_before_destructors() -> None:
    """C runs exit handlers newest first: flush the output, then end the process with its code."""
    import ctypes

    library = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        library.on_exit(library._exit, None)
        library.__cxa_atexit(library.fflush, None, None)


def _flush_libraries() -> None:
    """Flush the output buffers of C libraries."""
    import ctypes

    ctypes.CDLL(None).fflush(None)


def flush_output() -> None:
    """Flush Python's output; a stream may be closed. Raises OSError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def leave_now(words: str, code: int) -> None:
    """End this process from any thread, whatever the other threads do."""
    with contextlib.suppress(OSError):
        os.write(TOLD, f"shardway: {words}\n".encode())
    os._exit(code)


def _show_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Without a traceback: the user asked for the end."""
    with contextlib.suppress(OSError):
        os.write(TOLD, b"shardway: ended at once by a second signal\n")


def _leave_after(show: Hook) -> Hook:
    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(SystemExit):  # from a hook that sets the exit code
            show(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code(error))

    return leave


def _exit_code(error: BaseException) -> int:
    if isinstance(error, ShardwayError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else UNKNOWN
