"""How a process stops: signals, a watchdog thread, the agreement of all ranks, and how the process ends.

Signals: Python runs a signal's handler in the main thread, and only once that returns from a library. The watchdog
reads from a pipe what the interpreter writes there at once (`signal.set_wakeup_fd`).

Invariants:
- A signal only sets a flag, so that no step is cut in half. Only a second Ctrl-C ends the process at once (schedulers
  and launchers repeat their signals with the same meaning), and only a wait marked as breakable is broken off. Earlier
  handlers are restored. A rank is ended only by SIGTERM, a stop request, upon which it saves.
- The watchdog does nothing without a stop request. Slow work (a file system that hangs) is done in other threads, so
  that the watchdog always sees the clock.
- Agreement: each rank puts its own requests into a small vector, the vector is summed over the ranks, and all ranks
  read the same decision from the sum; no rank acts on its own request.
- After an error a rank leaves at once only if other ranks share the process group or after a second Ctrl-C, and only
  after the reason was shown. At interpreter exit a process group can wait forever for a peer that is gone, and a job
  whose ranks wait so keeps its nodes. A successful end waits for threads and runs the exit handlers of libraries.
- This module is quick to import: without torch.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import dis
import operator
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from shardway.errors import Bug, ShardwayError, legible
from shardway.rank_variables import AGENT_VARIABLE
from shardway.ranks.outputs import flush_output

# --- stop signals

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C; what schedulers send before they kill; what a job script may ask a scheduler to send early (two); what comes
when a terminal or a connection is gone."""

_OF_OTHERS = (signal.SIGUSR1, signal.SIGHUP)
"""Stop signals whose present handlers stay: a script may use one itself, `nohup` ignores one."""

BREAK = signal.SIGUSR2
"""The signal by which a thread of this process breaks off a wait of the main thread: it ends a system call."""


class BrokenOff(BaseException):
    """A wait that was broken off; not an Exception, since waiting code may catch those and try again."""


class SignalWatch:
    """While entered, remembers that a stop signal came; Ctrl-C after it raises KeyboardInterrupt. A watch entered
    within another takes over the signal that the outer one received. The main thread sets `breakable` around a wait
    that `break_off` may end. `killed`: the second Ctrl-C came, even if its KeyboardInterrupt was caught. `handled`: the
    signals that come here, with their earlier handlers; none in a thread other than the main one."""

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = signals
        self._received: signal.Signals | None = None
        self._breaks = False
        self.handled: dict[int, object] = {}
        self.breakable = False
        self.killed = False

    @property
    def received(self) -> str | None:
        """Name of the signal that asked for a stop, such as "SIGTERM"."""
        return self._received.name if self._received else None

    def break_off(self) -> None:
        """From any thread: raise BrokenOff in the main thread where its wait is `breakable`."""
        main = threading.main_thread().ident
        if self.handled and main is not None:
            self._breaks = True
            signal.pthread_kill(main, BREAK)

    def __enter__(self) -> SignalWatch:
        # Python delivers signals to the main thread alone; a run in another thread goes without.
        if threading.current_thread() is threading.main_thread():
            outer = _find_watch()
            self._received = outer._received if outer is not None else None
            self.handled = {number: signal.signal(number, self._note) for number in list_free_signals(self._signals)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handled.items():
            if getattr(signal.getsignal(number), "__self__", None) is self:  # and no other one was set since
                signal.signal(number, handler)  # type: ignore[arg-type]
        self.handled = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._breaks and number == BREAK:
            self._breaks = False
            if self.breakable:
                self.breakable = False
                raise BrokenOff
            return
        if self._received is not None and number == signal.SIGINT:
            self.killed = True
            raise KeyboardInterrupt("a second Ctrl-C")
        self._received = signal.Signals(number)


def list_free_signals(signals: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Those of these signals that may mean a stop in this process."""
    # A job script makes torchrun ignore a signal that its ranks take for a stop.
    shielded = {"TORCHELASTIC_RUN_ID", "SHARDWAY_ATTEMPT_DIR"} <= os.environ.keys()
    caught = 0  # signals with a handler outside Python: of the fault handler, or a library (proc(5), SigCgt)
    with contextlib.suppress(OSError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        caught = int(next(line for line in status if line.startswith("SigCgt:")).split()[1], 16)

    def is_free(number: int) -> bool:
        handler = signal.getsignal(number)
        ignored = handler is signal.SIG_IGN and number == signal.SIGUSR1 and shielded
        free = (handler is signal.SIG_DFL or ignored) and not caught >> (number - 1) & 1
        return free or isinstance(getattr(handler, "__self__", None), SignalWatch)

    return [number for number in signals if number not in _OF_OTHERS or is_free(number)]


def find_stop_signal() -> str | None:
    """The stop signal received by the watch that is entered in this process; None for none."""
    watch = _find_watch()
    return watch.received if watch is not None else None


def _find_watch() -> SignalWatch | None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, SignalWatch) else None


# --- the watchdog thread

TICK_S = 0.25
NOTICE_S = 5.0
"""How long the main thread may wait for data after a stop request; and how long it may take to notice a signal before
other processes are notified of it."""
LEAVE_S = 3.0  # how long the main thread may take to end after a second Ctrl-C


@dataclass
class StopTimes:
    """When stop requests and waits began, in monotonic seconds; None: not yet. No clock is read here."""

    asked: float | None = None
    signalled: float | None = None
    killed: float | None = None
    waits: float | None = None
    done: set[str] = field(default_factory=set)

    def record(self, number: int, now: float) -> None:
        """Record a stop signal; a Ctrl-C after another one means an immediate end."""
        if self.signalled is not None and number == signal.SIGINT and self.killed is None:
            self.killed = now
        self.asked = now if self.asked is None else self.asked
        self.signalled = now if self.signalled is None else self.signalled

    def find_due(self, now: float, timeout_s: float, *, noticed: bool) -> list[str]:
        """Actions that are due, each once: "killed", "late", "unnoticed". `noticed`: by the main thread."""
        unnoticed = None if noticed else self.signalled
        times = {"killed": (self.killed, LEAVE_S), "late": (self.asked, timeout_s), "unnoticed": (unnoticed, NOTICE_S)}
        due = [name for name, (since, limit_s) in times.items() if since is not None and now - since >= limit_s]
        new = [name for name in due if name not in self.done]
        self.done.update(new)
        return new


class StopWatchdog:
    """Works while entered in the main thread, where its `signals` are watched; elsewhere it does nothing. Calls
    `on_late` if the stop took longer than `timeout_s`, `on_killed` if a second Ctrl-C did not end the process,
    `on_unnoticed` if a signal came while the main thread is in a library. Each is called once, in a thread of its own;
    the first two may end the process."""

    def __init__(
        self,
        signals: SignalWatch,
        timeout_s: float = float("inf"),
        *,
        on_late: Callable[[], None] = lambda: None,
        on_killed: Callable[[], None] = lambda: None,
        on_unnoticed: Callable[[], None] = lambda: None,
    ) -> None:
        self._signals, self._timeout_s = signals, timeout_s
        self._actions = {"killed": on_killed, "late": on_late, "unnoticed": on_unnoticed}
        self._times = StopTimes()
        self._is_asked: Callable[[], bool] = lambda: False
        self._looks, self._own_breaks = False, 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._pipe: tuple[int, int] = (-1, -1)
        self._before = -1

    def ask(self) -> None:
        """A stop was requested or agreed on: from the first call on it may take `timeout_s`."""
        if self._times.asked is None:
            self._times.asked = time.monotonic()

    def begin_wait(self, is_asked: Callable[[], bool]) -> None:
        """The main thread waits for data; `is_asked` (called in another thread): whether a stop is requested."""
        self._is_asked = is_asked
        self._times.waits = time.monotonic()

    def end_wait(self) -> None:
        self._times.waits = None

    def __enter__(self) -> StopWatchdog:
        if self._signals.handled:
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._run, name="stop watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is None:
            return
        self._done.set()
        signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        self._thread = None
        for descriptor in self._pipe:
            os.close(descriptor)

    def _run(self) -> None:
        while not self._done.is_set():
            ready, _, _ = select.select([self._pipe[0]], [], [], TICK_S)
            for number in os.read(self._pipe[0], 256) if ready else b"":
                if number == BREAK and self._own_breaks:  # it broke off a wait, and is no request from outside
                    self._own_breaks -= 1
                elif number in self._signals.handled:
                    self._times.record(number, time.monotonic())
            now, noticed = time.monotonic(), self._signals.received is not None
            for name in self._times.find_due(now, self._timeout_s, noticed=noticed):
                threading.Thread(target=self._actions[name], name=name, daemon=True).start()
            waits = self._times.waits
            if waits is not None and now - waits >= NOTICE_S and not self._looks:
                self._looks = True
                threading.Thread(target=self._look_while, args=(waits,), name="look", daemon=True).start()

    def _look_while(self, waits: float) -> None:
        try:
            while self._times.waits == waits and not self._done.is_set():
                if self._is_asked():
                    self.ask()
                    if self._times.waits == waits:
                        self._own_breaks += 1
                        self._signals.break_off()
                    return
                self._done.wait(1.0)
        finally:
            self._looks = False


# --- the agreement of all ranks between two steps


@dataclass(frozen=True)
class StepRequests:
    """The requests of one rank after the current step. `deadline`: a stop, since the wall-time is about to end. `void`:
    discard the step, since a stop ended this rank's wait for its batch. `finish`: the script has declared the run done.
    `log`: the script has logged values. `profile`: the file that asks for a trace was found."""

    stop_signal: bool = False
    stop_file: bool = False
    save: bool = False
    deadline: bool = False
    void: bool = False
    finish: bool = False
    log: bool = False
    profile: bool = False

    def as_numbers(self) -> list[float]:
        return [float(wish) for wish in _WISHES(self)]


_NAMES = [each.name for each in fields(StepRequests)]
_WISHES = operator.attrgetter(*_NAMES)  # each step asks: `astuple` copies, and takes three times as long
VOID = _NAMES.index("void")
"""The place of `void` among the numbers."""


@dataclass(frozen=True)
class Decision:
    """What all ranks do after the current step; `stop_reason` is empty if they go on. `deadline`: only the end of the
    wall-time asked for the stop. `void`: the step is discarded. `finish`: the run ends with this step. `log`: the ranks
    join the values that scripts have logged. `profile`: the ranks read the request for a trace."""

    stop_reason: str = ""
    save: bool = False
    deadline: bool = False
    void: bool = False
    finish: bool = False
    log: bool = False
    profile: bool = False

    def also(self, other: Decision) -> Decision:
        stop = self if self.stop_reason or not other.stop_reason else other
        save, finish = self.save or other.save, self.finish or other.finish
        log, profile = self.log or other.log, self.profile or other.profile
        return replace(stop, save=save, finish=finish, log=log, profile=profile)


def read_decision(summed: Sequence[float]) -> Decision:
    """The decision in the sum of all ranks' requests."""
    if not any(summed):
        return Decision()
    by_signal, by_file, save, deadline, void, finish, log, profile = map(bool, summed)
    stops = {
        "a signal asked for a stop": by_signal,
        "the stop file asked for a stop": by_file,
        "the wall-time is about to end": deadline,
        "a rank gave up waiting for its data": void and not (by_signal or by_file or deadline or finish),
    }
    reason = " and ".join(reason for reason, applies in stops.items() if applies)
    return Decision(reason, save, deadline and not (by_signal or by_file), void, finish, log, profile)


# --- the end of the process with the agent that started it. An agent that is killed cannot end its ranks: they would
# train on, and the next launch would write into the same run. The daemons of srun and mpirun end what they started.


def stop_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send a signal to this process when the thread that started it ends (prctl(2), Linux alone)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, number)  # PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """Ask the kernel to kill this process, even a stopped one, when the thread that started it ends."""
    stop_with_parent(signal.SIGKILL)


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


# --- the end of the process, without the interpreter's cleanup, in which libraries hang or crash

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@contextlib.contextmanager
def left_at_once(world: int) -> Iterator[None]:
    """If an uncaught error leaves this context, end the process without cleanup; with one rank only after a second
    Ctrl-C, since a save may be under way in a thread. For scripts that own their loop."""
    try:
        yield
        if world > 1 and threading.current_thread() is threading.main_thread():
            _end_before_destructors(sys._getframe())
    except KeyboardInterrupt:
        # Without a traceback: the user asked for the end.
        sys.excepthook = _leave_after(lambda *_: _write_message("ended at once by a second signal"))
        raise
    except Exception:
        if world > 1:
            sys.excepthook = _leave_after(sys.excepthook)
        raise


def _leave_after(show: Hook) -> Hook:
    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(SystemExit):  # from a hook that sets the exit code
            show(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1  # as a shell has for Ctrl-C, and Python for an error
        os._exit(error.exit_code if isinstance(error, ShardwayError) else code)

    return leave


@dataclass
class ScriptHook:
    """Replaces `sys.excepthook`: an uncaught Shardway error ends a script with its message and exit code, as on the
    command line; any other error goes to the previous hook. `closes` are called first with the error: they end what is
    still open."""

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
            _write_message(legible(str(error)))
            raise SystemExit(error.exit_code)


def script_hook() -> ScriptHook:
    """The installed hook; the first call installs it."""
    if not isinstance(sys.excepthook, ScriptHook):
        sys.excepthook = ScriptHook(sys.excepthook)
    return sys.excepthook


def report_errors() -> None:
    """From now on an uncaught Shardway error is shown as its message only."""
    script_hook()


def restore_hook() -> None:
    """Restore the previous hook, once nothing is open."""
    if isinstance(sys.excepthook, ScriptHook) and not sys.excepthook.closes:
        sys.excepthook = sys.excepthook.previous


def _end_before_destructors(frame: FrameType) -> None:
    """From now on a script that runs to its end leaves after all exit handlers of libraries and the script, and before
    C++ destructors (see `Shutdown` in outputs); called in the main thread. Only if the outermost frame has returned is
    the exit code known to be 0 before the interpreter ends. A script that ends by `sys.exit` or by an error ends as
    usual in Python, but without those destructors (where the C library has `on_exit`, which receives the code)."""
    while frame.f_back is not None:
        frame = frame.f_back
    library = ctypes.CDLL(None)

    def leave() -> None:
        if not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_"):
            return
        atexit.unregister(leave)
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            flush_output()
            library.fflush(None)
            os._exit(0)

    register = getattr(threading, "_register_atexit", None)  # its callbacks run before those of `atexit`
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter is already ending
            register(lambda: atexit.register(leave))
    with contextlib.suppress(AttributeError):  # newest first: flush the output, then end the process with its code
        library.on_exit(library._exit, None)
        library.__cxa_atexit(library.fflush, None, None)


def leave_now(words: str, code: int) -> None:
    """End this process from any thread, whatever the other threads do."""
    _write_message(words)
    os._exit(code)


def _write_message(words: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"shardway: {words}\n".encode())


# --- interrupts in a notebook: there an error or an interrupt ends a cell and not the process


def find_shell() -> Any:
    """IPython's shell that runs this cell; None in a script."""
    return getattr(builtins, "get_ipython", lambda: None)()


class Interrupts:
    """In a notebook: an interrupt that comes within a piece of work is raised at its end, so that no update, save or
    count is cut in half; a second one at once."""

    def __init__(self) -> None:
        self._applies = find_shell() is not None
        self._within, self._came = False, False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While entered, in the main thread, the first interrupt waits."""
        if not self._applies or self._within or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._note)
        self._within, self._came = True, False
        try:
            yield
        finally:
            self._within = False
            signal.signal(signal.SIGINT, before)
        if self._came and callable(before):
            before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
