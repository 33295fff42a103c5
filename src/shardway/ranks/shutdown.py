"""How a rank ends: with its agent, and without the interpreter's cleanup, in which libraries hang or crash.

Invariants:
- Quick to import (no torch), and without effect where the kernel does not know it. No rank is ended here but by
  SIGTERM, a wish to stop, upon which the ranks save (`ranks.signals`).
- An error leaves at once only where other ranks share the process group or somebody asked for it twice, and only after
  the reason was shown: what a process group does when the interpreter ends can wait for ever for a peer that is gone,
  and a job whose ranks wait so keeps its nodes. A good end waits for threads and runs what libraries have registered
  for it.

Whoever starts ranks as children and is killed cannot end them: without this they train on, and the next launch writes
into the same run beside them. srun and mpirun need no help, their daemons end what they started.
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

# --- A rank does not outlive the agent that started it, nor a process of a rank that rank

_PR_SET_PDEATHSIG = 1


def stop_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies (prctl(2), Linux alone)."""
    _signal_with_parent(signal.SIGTERM)


def end_with_parent() -> None:
    """Ask the kernel to end this process, even one that is stopped, with the thread that has started it."""
    _signal_with_parent(signal.SIGKILL)


def _signal_with_parent(number: signal.Signals) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def stop_with_agent(environ: Mapping[str, str]) -> None:
    """The same for a rank that our agent has started as a child; at once where the agent is gone already."""
    stop_with_parent()
    if is_orphan(find_agent(environ)):
        signal.raise_signal(signal.SIGTERM)


def find_agent(environ: Mapping[str, str]) -> int:
    """The process that has started this rank: our agent, which says so, or who is its parent now."""
    return int(environ.get(AGENT_VARIABLE, "") or os.getppid())


def is_orphan(agent: int) -> bool:
    """Whether the process that has started this rank is gone; 0 for a rank that has none to outlive."""
    return agent not in (0, os.getppid())


# --- How a rank leaves: without the tidying up of an interpreter, in which libraries wait for ever, or crash

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

UNKNOWN, INTERRUPTED, TOLD = 1, 130, 2
"""Exit codes of Python for an error, and of a shell for Ctrl-C; the descriptor on which people are told."""


@contextlib.contextmanager
def left_at_once(world: int) -> Iterator[None]:
    """Where an error leaves this context and nobody catches it, end the process without tidying up.

    With one rank only after a second Ctrl-C, since a save may be under way in a thread. The command line has a way of
    its own to end; this is for scripts that own their loop.
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
    """Stands as `sys.excepthook` before the one that was there: an error of Shardway that nobody catches ends a script
    with its message and its exit code, as on the command line; any other goes to the hook before.

    `closes` are called first with the error: they end what is still open.
    """

    previous: Hook
    closes: list[Hook] = field(default_factory=list)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        closes = [*reversed(self.closes)]
        for close in closes:
            with contextlib.suppress(BaseException):  # the error itself is told below
                try:
                    close(kind, error, trace)
                except ShardwayError as explained:  # what it means
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
    """The hook that stands, put there by the first call."""
    if not isinstance(sys.excepthook, ScriptHook):
        sys.excepthook = ScriptHook(sys.excepthook)
    return sys.excepthook


def restore_hook() -> None:
    """Put the hook back that was there before, once nothing is open."""
    if isinstance(sys.excepthook, ScriptHook) and not sys.excepthook.closes:
        sys.excepthook = sys.excepthook.previous


def report_errors() -> None:
    """From now on an error of Shardway that nobody catches is its message; IPython shows it so by itself
    (`errors`)."""
    script_hook()


class ScriptExit:
    """Ends the process of a script that came to its own end, after all that libraries and the script have registered
    for it, and before the destructors of C++ (see `LastExit`).

    Only where the outermost frame has returned is the exit code known to be 0 before the interpreter ends. A script
    that ends by `sys.exit` or by an error ends as any Python does, but for those destructors (where the library of C
    has `on_exit`, which is told the code).
    """

    def __init__(self, frame: FrameType) -> None:
        while frame.f_back is not None:
            frame = frame.f_back
        self._outermost = frame

    def arm(self) -> None:
        """From now on; called in the main thread."""
        register = getattr(threading, "_register_atexit", None)  # what is registered so comes before `atexit`
        if register is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter ends already
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
    """Made before anything else registers what it does at the end, so that this comes last of all.

    After it come destructors of C++. Those of torch have ended a rank with SIGABRT after all its work was done, when
    another rank of its group had left a moment before (torch 2.13, gloo, "terminate called without an active
    exception").
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def leave_with(self, code: int) -> None:
        """With which code this process leaves, once it has come to its end; without this word as any Python does."""
        self._code = code

    def _leave(self) -> None:
        if self._code is None or "torch" not in sys.modules:
            return
        with contextlib.suppress(OSError):
            flush_output()
        _flush_libraries()
        os._exit(self._code)


def _exit_before_destructors() -> None:
    """Of what C runs at an exit, the newest comes first: what was printed leaves, then the process, with its code."""
    import ctypes

    library = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        library.on_exit(library._exit, None)
        library.__cxa_atexit(library.fflush, None, None)


def _flush_libraries() -> None:
    """What libraries of C have printed leaves this process."""
    import ctypes

    ctypes.CDLL(None).fflush(None)


def flush_output() -> None:
    """What was printed leaves this process; a stream may be closed. Raises OSError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def leave_now(words: str, code: int) -> None:
    """End this process from any thread, whatever the others do."""
    with contextlib.suppress(OSError):
        os.write(TOLD, f"shardway: {words}\n".encode())
    os._exit(code)


def _show_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Where it came is of no interest: somebody wanted it to end."""
    with contextlib.suppress(OSError):
        os.write(TOLD, b"shardway: ended at once by a second signal\n")


def _leave_after(show: Hook) -> Hook:
    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(SystemExit):  # of a hook that says with which code to leave
            show(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code(error))

    return leave


def _exit_code(error: BaseException) -> int:
    if isinstance(error, ShardwayError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else UNKNOWN
