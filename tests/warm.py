"""Python processes that start warm: forked from a process that has imported torch, in 0.05 s rather than 1 to 2.5.

    with warm.starts():
        subprocess.run([sys.executable, "-m", "shardway", "train", ...])

What a command pays for again and again is the import of torch and of its compiler, and of shardway: three quarters of
what is left of a short run then. A template imports them once and is forked for each start. Where something may be put
before shardway or into it (a folder of PYTHONPATH with a `sitecustomize`, a `shardway` beside the program, code of `-c`
that looks at what is imported) it is imported anew, so what a test injects into it works as ever.

Invariant: a process that starts warm is what exec would have made of it: the child of its launcher, with its own id,
session, descriptors, folder, variables, command line (also as /proc shows them), and a fresh `__main__`. Processes
that it starts itself are warm as well. Where that cannot be (another interpreter, variables that Python or torch read
when they start, a kernel that does not let a process name itself) the process starts cold, as without this module.

Such a process ends as Python does (threads, `atexit`, open files, exit code) but for the last thing: its modules are
not taken apart, which would touch, and so copy, most of the memory that it shares with its template: 0.26 s of 0.3.
What comes at that very end (destructors of what modules hold) is a case for a process that starts cold.

How a process gets a child that it has not forked: the template forks twice and the process in between ends at once;
the orphan falls to the nearest ancestor that is a "child subreaper" (prctl(2)), which the launcher is for this moment.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import multiprocessing.util
import os
import runpy
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLD = "SHARDWAY_TEST_COLD"
"""Set to anything, this variable makes every start cold."""

PRELOADED = (
    *("numpy", "numpy.typing", "pydantic.main", "pydantic.types", "pydantic.functional_validators", "annotated_types"),
    *("pydantic.functional_serializers", "pydantic.json_schema", "pydantic.dataclasses"),
    *("tomllib", "zoneinfo", "typer", "rich.console", "rich.progress", "psutil", "xxhash"),
    *("torch", "torch._dynamo", "torch.distributed.nn", "torch.distributed.tensor.parallel"),
    *("torch.distributed.elastic.multiprocessing", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
    *(
        "torch.distributed.algorithms.ddp_comm_hooks",
        "torch.distributed.pipelining",
        "torch.distributed.run",
        "torch.utils.data",
    ),
)
"""What a rank imports until its first step, but for shardway; a folder of tests must not be among it."""

OWN = ("shardway.train.run", "shardway.cli.train")
"""What of shardway a short run imports, with all that these import."""
NOT_OWN = ("shardway.train.run", "shardway.cli.train")
"""Modules of which shardway asks whether they are imported, or that are no more than a verb: imported when needed."""
_REPLACING = frozenset({"shardway", "sitecustomize", "usercustomize"})

_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OPENBLAS_", "MKL_", "KMP_", "TORCH_LOGS", "PYTORCH_")
"""Beginnings of variables that are read when a process starts or imports; where one differs, the start is cold."""
_SETTLED_LATER = frozenset({"PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK"})

_PR_SET_MM, _PR_SET_CHILD_SUBREAPER = 35, 36
_PR_SET_MM_MAP = 14
_LENGTH = struct.Struct("!Q")
_STANDARD = (0, 1, 2)
_CAN_START = b"+"
"""What a template says before it imports: processes that it starts can be what exec would have made of them."""
_TEMPLATE_CODE = "import sys; sys.path[0] = sys.argv[1]; import warm; warm.serve(int(sys.argv[2]))"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Start:
    """What a process is to be; `targets` are the numbers of the descriptors that are sent along, in their order."""

    argv: tuple[str, ...]
    environ: dict[str, str]
    folder: str
    new_session: bool
    targets: tuple[int, ...]


class _Template:
    """The wire to a process that has imported everything and is forked for each start."""

    def __init__(self, wire: socket.socket, environ: Mapping[str, str]) -> None:
        self.wire, self.environ = wire, dict(environ)
        self._lock = threading.Lock()

    def start(self, order: _Start, descriptors: Sequence[int]) -> int:
        """The id of the new process, a child of this one. Raises OSError where the template is gone."""
        packed = json.dumps(vars(order)).encode()
        with self._lock:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.wire, [_LENGTH.pack(len(packed))], descriptors)
                self.wire.sendall(packed)
                answer = self.wire.recv(_LENGTH.size, socket.MSG_WAITALL)
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if len(answer) != _LENGTH.size or not (pid := _LENGTH.unpack(answer)[0]):
            raise OSError("the template of warm processes is gone")
        return int(pid)


_template: _Template | None = None
_is_refused = False
"""Whether this kernel does not let a process name itself, which the first template has tried."""
_cold_fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]
_cold_spawn = multiprocessing.util.spawnv_passfds


@contextlib.contextmanager
def starts() -> Iterator[None]:
    """While entered, `subprocess` starts this Python warm."""
    if COLD in os.environ or not sys.platform.startswith("linux"):
        yield
        return
    _ensure_template()
    _start_warm()
    try:
        yield
    finally:
        subprocess._fork_exec = _cold_fork_exec  # type: ignore[attr-defined]
        multiprocessing.util.spawnv_passfds = _cold_spawn


def close() -> None:
    """End the template; the next start makes a new one."""
    global _template
    if _template is not None:
        _template.wire.close()
        _template = None


def _ensure_template() -> None:
    global _template, _is_refused
    if _template is not None or _is_refused:
        return
    ours, theirs = socket.socketpair()
    # Threads of libraries do not live through a fork; the processes count theirs anew.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _TEMPLATE_CODE, str(Path(__file__).parent), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    process.returncode = 0  # it ends by itself when this process does: nothing waits for it
    _is_refused = ours.recv(1) != _CAN_START
    if _is_refused:
        ours.close()
        return
    _template = _Template(ours, {name: os.environ[name] for name in _list_read_at_start(os.environ)})


def _fork_exec(*given: Any) -> int:
    """In the place of `_posixsubprocess.fork_exec`, with its arguments."""
    names = "args executables close_fds keep folder environ p2cread p2cwrite c2pread c2pwrite errread errwrite "
    names += "errpipe_read errpipe_write restore_signals new_session process_group gid gids uid umask preexec"
    call = types.SimpleNamespace(**dict(zip(names.split(), given, strict=False)))
    order, descriptors = _read_call(call)
    if order is None or _template is None:
        return int(_cold_fork_exec(*given))
    return _template.start(order, descriptors)


def _spawn(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """In the place of `multiprocessing.util.spawnv_passfds`, which starts loader processes."""
    argv = tuple(map(os.fsdecode, args))
    plain = _template is not None and _knows(os.environ) and os.fsdecode(path) == sys.executable
    if not plain or not _is_program(argv[1:]) or "resource_tracker" in argv[-1]:
        return _cold_spawn(path, args, passfds)
    kept = [number for number in passfds if number not in _STANDARD]
    order = _Start(argv, dict(os.environ), os.getcwd(), False, (*_STANDARD, *kept))
    return _template.start(order, [*_STANDARD, *kept])


def _start_warm() -> None:
    subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _spawn


def _knows(environ: Mapping[str, str]) -> bool:
    """Whether these variables let a process start warm."""
    read = {name: environ[name] for name in _list_read_at_start(environ)}
    alike = COLD not in environ and _template is not None and read == _template.environ
    return alike and not _replaces_preloaded(environ.get("PYTHONPATH", "").split(os.pathsep))


def _replaces_preloaded(path: Sequence[str]) -> bool:
    """Whether a folder of this path has a module or package of a name that is imported by now."""
    tops = {name.partition(".")[0] for name in PRELOADED}
    folders = [folder for folder in path if folder not in sys.path and os.path.isdir(folder)]
    names = {entry.partition(".")[0] for folder in folders for entry in os.listdir(folder)}
    return bool(names & tops)


def _read_call(call: types.SimpleNamespace) -> tuple[_Start | None, list[int]]:
    """What is asked for, with this process's descriptors; None where it has to start cold."""
    argv = tuple(map(os.fsdecode, call.args))
    plain = call.close_fds and call.restore_signals and call.preexec is None and call.process_group in (-1, None)
    plain = plain and (call.gid, call.gids, call.uid, call.umask) == (None, None, None, -1)
    if not plain or os.fsdecode(call.executables[0]) != sys.executable or not _is_program(argv[1:]):
        return None, []
    if call.environ is None:
        environ = dict(os.environ)
    else:
        environ = dict(os.fsdecode(entry).split("=", 1) for entry in call.environ)
    if not _knows(environ):
        return None, []
    folder = os.path.abspath(os.fsdecode(call.folder)) if call.folder is not None else os.getcwd()
    ends = [end if end >= 0 else number for number, end in enumerate((call.p2cread, call.c2pwrite, call.errwrite))]
    kept = [number for number in call.keep if number not in (call.errpipe_write, *_STANDARD)]
    return _Start(argv, environ, folder, bool(call.new_session), (*_STANDARD, *kept)), [*ends, *kept]


def _is_program(words: Sequence[str]) -> bool:
    """Whether these words behind `python` are a module, a script, or code, with no option of Python but those below."""
    words = _program_of(words)
    return bool(words) and (words[0] in ("-m", "-c") or not words[0].startswith("-"))


def _program_of(words: Sequence[str]) -> Sequence[str]:
    """The words without options that come first and that a template knows: no buffer, no .pyc files."""
    return _program_of(words[1:]) if words[:1] and words[0] in ("-u", "-B") else words


def _list_read_at_start(environ: Mapping[str, str]) -> list[str]:
    return [name for name in environ if name.startswith(_READ_AT_START) and name not in _SETTLED_LATER]


# --- in the template


def _serve(wire: socket.socket) -> _Start | None:
    """Fork for each order; returns in the new process what that is to be, and None in the template at the end. Raises
    ConnectionError where the process that it serves was killed with an answer on its way."""
    while True:
        head, received, *_ = socket.recv_fds(wire, _LENGTH.size, 256)
        if len(head) != _LENGTH.size:
            return None
        packed = wire.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)
        order = _Start(**json.loads(packed))
        told, tell = os.pipe()
        go, let_go = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            os.write(tell, _LENGTH.pack(os.getpid()))
            os.close(let_go)
            os.read(go, 1)  # returns once the process in between is gone, and this one has its parent
            wire.detach()  # its number is another's from now on
            _take_descriptors(received, order.targets)
            return order
        os.close(tell)
        os.close(go)
        pid = os.read(told, _LENGTH.size)
        os.waitpid(between, 0)
        for each in (told, let_go, *received):
            os.close(each)
        wire.sendall(pid)


def _take_descriptors(received: Sequence[int], targets: Sequence[int]) -> None:
    """Put what was received where it belongs, and close all else."""
    above = max(*targets, *received) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in received]
    others = map(int, os.listdir("/proc/self/fd"))
    for each in set(others) - set(moved):
        with contextlib.suppress(OSError):  # that of the list itself
            os.close(each)
    for source, target in zip(moved, targets, strict=True):
        os.dup2(source, target)
        os.close(source)


def _become(order: _Start, path: Sequence[str]) -> None:
    """Make this process what `exec` would have made of it, with Python's own `path`; its program is not run yet."""
    if order.new_session:
        os.setsid()
    os.chdir(order.folder)
    sys.path[:] = [*filter(None, order.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.path_importer_cache.clear()
    os.environ.clear()
    os.environ.update(order.environ)
    _show(order.argv, order.environ)
    sys.orig_argv = list(order.argv)
    words = order.argv[1:]
    unbuffered = "-u" in words[: len(words) - len(_program_of(words))]
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False))  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _open_text(1, unbuffered, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_text(2, unbuffered, "backslashreplace")  # type: ignore[misc]
    import numpy
    import torch

    numpy.random.seed()
    threads = order.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else len(os.sched_getaffinity(0)))


def _keeps_own(order: _Start) -> bool:
    """Whether shardway as the template has imported it is what this process would import."""
    program = _program_of(order.argv[1:])
    if program[0] == "-c":
        return program[1].startswith("from multiprocessing.")
    first = order.folder if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))
    folders = [first, *order.environ.get("PYTHONPATH", "").split(os.pathsep)]
    folders = [folder for folder in folders if folder and folder not in _template_path and os.path.isdir(folder)]
    return not any(entry.partition(".")[0] in _REPLACING for folder in folders for entry in os.listdir(folder))


def _forget(names: Sequence[str]) -> None:
    """Let these modules be imported anew. They stay in memory: to take them apart would copy it."""
    for name in names:
        module, (parent, _, last) = sys.modules.pop(name), name.rpartition(".")
        _kept.append(module)
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(last, None)


def _list_own() -> list[str]:
    return sorted((name for name in sys.modules if name.partition(".")[0] == "shardway"), reverse=True)


def _open_text(number: int, unbuffered: bool, errors: str) -> io.TextIOWrapper:
    """A standard stream as Python opens it."""
    binary = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    by_line = number == 2 or os.isatty(number)
    return io.TextIOWrapper(binary, encoding="utf-8", errors=errors, line_buffering=by_line, write_through=unbuffered)


def _show(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let /proc show this command line and these variables. Raises OSError where the kernel does not let it."""
    texts = ([os.fsencode(word) for word in argv], [os.fsencode(f"{name}={value}") for name, value in environ.items()])
    args, variables = (b"".join(text + b"\0" for text in each) for each in texts)
    block = ctypes.create_string_buffer(args + variables, len(args) + len(variables))
    _kept.append(block)
    start = ctypes.addressof(block)
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    code, data = map(int, fields[23:26]), map(int, fields[42:45])  # fields 26 to 28 and 45 to 47 of proc(5)
    start_code, end_code, start_stack = code
    start_data, end_data, start_brk = data
    _libc.sbrk.restype = ctypes.c_void_p
    addresses = (start_code, end_code, start_data, end_data, start_brk, _libc.sbrk(0), start_stack)
    words = (*addresses, start, start + len(args), start + len(args), start + len(args) + len(variables), 0)
    packed = struct.pack("=12QIi", *words, 0, -1)
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.c_char_p(packed), len(packed), 0):
        raise OSError(ctypes.get_errno(), "the kernel does not let a process name itself")


_kept: list[Any] = []
_template_path: list[str] = []


def _fork_template() -> socket.socket | None:
    """A template of this process's own, made before it has done anything, for the processes that it starts; returns
    twice, as fork does: None in this process, in the template the wire that it is to serve."""
    global _template
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        return theirs
    theirs.close()
    _template = _Template(ours, {name: os.environ[name] for name in _list_read_at_start(os.environ)})
    _start_warm()
    return None


def _import_customization() -> None:
    """What site.py imports at the start of Python; not that of the template, which Debian's own Python has."""
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        import sitecustomize  # noqa: F401


def _run_program(argv: Sequence[str]) -> None:
    words = _program_of(argv[1:])
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = __builtins__
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = list(words)
        script = os.path.abspath(words[0])
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        main.__dict__["__file__"] = script
        with open(script, "rb") as file:
            code = compile(file.read(), script, "exec")
        exec(code, main.__dict__)


_exit_code: int | None = None
"""With what this process is to end, once its program has; None where Python itself has more to say."""


@contextlib.contextmanager
def _noted_end() -> Iterator[None]:
    """Note the exit code that follows from how the program ends."""
    global _exit_code
    try:
        yield
        _exit_code = 0
    except SystemExit as end:
        _exit_code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        raise
    except Exception:
        _exit_code = 1
        raise


def _end_at_once() -> None:
    """End this process when nothing is left to do but to take its modules apart."""
    if _exit_code is None:
        return
    try:
        for each in (*filter(_is_written, gc.get_objects()), sys.stdout, sys.stderr):
            if each is not None and not each.closed:
                each.flush()
    except (OSError, ValueError):
        return  # Python tells it, with an exit code of its own
    os._exit(_exit_code & 0xFF)


def _is_written(each: object) -> bool:
    return issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom)


def serve(descriptor: int) -> None:
    """Be a template at the end of a wire; in each process that is forked, run its program and return."""
    sys.path.pop(0)  # the folder of this file
    path, wire = list(sys.path), socket.socket(fileno=descriptor)
    try:
        _show([sys.executable, "template of warm processes"], {})
    except OSError:
        return
    wire.sendall(_CAN_START)
    atexit.register(_end_at_once)  # first of all, and so the last that is called
    gc.disable()
    for name in (*PRELOADED, *OWN):
        importlib.import_module(name)
    _forget(NOT_OWN)
    _template_path[:] = path
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        _show([sys.executable, "template of warm processes"], {})
        order = None
        with contextlib.suppress(ConnectionError):
            order = _serve(wire)
        if order is None:
            os._exit(0)
        _become(order, path)
        wire = _fork_template()
        if wire is None:
            break
    if not _keeps_own(order):
        _forget(_list_own())
    _import_customization()
    with _noted_end():
        _run_program(order.argv)
