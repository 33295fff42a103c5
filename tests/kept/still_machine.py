"""A process that runs commands and scripts of Shardway, on one rank or several, always with the same bits.

    with StillMachine() as machine:
        told = machine.run(["status", "--json", "run"], folder=tmp_path)
        machine.train(2, ["train", "--dir", "run", "train.steps=8"], folder=tmp_path)

Sums of floating-point numbers depend on the instructions of a CPU: torch, MKL and oneDNN choose other loops for AVX-512
than for AVX2, and each adds in another order. Here all three use what every x86-64 since 2013 has (STILL), with one
thread, so that each of Intel's with the same torch gives the same bits. What was tried with OTHER to find this: other
instructions for MKL and for the C library's functions change no bit; other ones for torch change all numbers; other
ones for oneDNN change those of gelu and of bf16 products (muon). An EPYC 7003 has the same bits in all cases but one,
where a gradient differs by 4e-8 of itself, whatever MKL and oneDNN are set to; the reason is not known.

It is started once, imports torch, and is forked for each rank: a rank costs what it trains, not what it imports.

Invariant: Shardway is reached by its public doors alone: the console script of its distribution, the names of
`import shardway`, and scripts that use them. No module below `shardway` is named here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STILL = {
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's own loops, with functions (exp, ...) that are not the C library's
    "MKL_CBWR": "COMPATIBLE",  # matrix products
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # gelu, bf16 products, convolutions
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Variables that are read when a process starts."""

OTHER = "SHARDWAY_TEST_OTHER_MACHINE"
"""Pretends another machine: `NAME=VALUE NAME=VALUE`, set after STILL. For trying which bits hold where."""

LIMIT_S = 240.0
"""How long the ranks of one command may take: against a hang alone."""

_TORCH = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.utils.data")
_TORCH_TOO = ("torch.distributed.pipelining", "torch.distributed.checkpoint.state_dict", "torch.distributed.nn")


@dataclass(frozen=True)
class Told:
    """How a command ended on a rank: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What it printed, as JSON. Fails where it ended badly."""
        assert self.code == 0, self.err
        return json.loads(self.out)


class StillMachine:
    """The process, and the talk with it: a line of JSON for what is asked, and one for the answer."""

    def __init__(self, *, trains: bool = True) -> None:
        """`trains`: torch is imported at the start; what only reads does not need it."""
        environ = {**os.environ, **STILL}
        environ |= dict(word.split("=", 1) for word in os.environ.get(OTHER, "").split())
        self._process = subprocess.Popen(
            [sys.executable, __file__, "torch" if trains else "light"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> StillMachine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]

    def run(self, *commands: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None) -> list[Told]:
        """Run command lines of `shardway` in this order, as one process would that nothing launched."""
        return self._ask(commands=[list(map(str, each)) for each in commands], folder=folder, environ=environ)[0]

    def train(self, ranks: int, words: Sequence[str], folder: Path) -> list[Told]:
        """Run one command line on ranks that a launcher started; how it ended on each."""
        return [told for (told,) in self._ask(commands=[list(map(str, words))], folder=folder, ranks=ranks)]

    def script(self, ranks: int, words: Sequence[str], folder: Path) -> list[Told]:
        """Run a script with its arguments on ranks that a launcher started."""
        return [told for (told,) in self._ask(script=list(map(str, words)), folder=folder, ranks=ranks)]

    def _ask(self, *, folder: Path, environ: Mapping[str, str] | None = None, **asked: Any) -> list[list[Told]]:
        question = {"folder": str(folder), "environ": dict(environ or {}), **asked}
        self._process.stdin.write(json.dumps(question) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        answer = self._process.stdout.readline()  # type: ignore[union-attr]
        assert answer, "the still machine has ended"
        return [[Told(*each) for each in rank] for rank in json.loads(answer)]


# --- in the process


class _Left(BaseException):
    """In the place of `os._exit`, by which a command ends that went wrong."""


def _serve(trains: bool) -> None:
    from importlib.metadata import entry_points

    for name in (*_TORCH, *_TORCH_TOO) if trains else ():
        importlib.import_module(name)
    (door,) = (each for each in entry_points(group="console_scripts") if each.name == "shardway")
    main = door.load()
    if trains:
        importlib.import_module("shardway").start  # noqa: B018  # what a script imports by this name
    out = os.fdopen(os.dup(1), "w")
    gc.disable()
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryDirectory(prefix="still-") as own:
            answer = _run_ranks(main, asked, Path(own))
            _import_as_well(Path(own) / "modules")
        out.write(json.dumps(answer) + "\n")
        out.flush()


def _run_ranks(main: Any, asked: dict[str, Any], own: Path) -> list[Any]:
    size, port = asked.get("ranks", 0), _free_port()
    children = {}
    for rank in range(size or 1):
        if not (pid := os.fork()):
            place = _place(rank, size, port) if size else {}
            _be_rank(
                main, asked, {"HOME": str(own), "PWD": asked["folder"], **place, **asked["environ"]}, own / str(rank)
            )
        children[pid] = rank
    deadline = time.monotonic() + LIMIT_S
    while children:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        children.pop(pid, None)
        if not pid:
            time.sleep(0.005)
        if time.monotonic() > deadline:
            for each in children:
                os.kill(each, signal.SIGKILL)
    return [
        json.loads(path.read_text()) if path.exists() else _DIED for path in (own / str(r) for r in range(size or 1))
    ]


def _import_as_well(note: Path) -> None:
    """What the first rank had to import, for all ranks to come."""
    for name in json.loads(note.read_text()) if note.exists() else ():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()


_DIED = [[-1, "", "the process was killed"]]


def _place(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun gives, set by hand."""
    said = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in said.items()}}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _be_rank(main: Any, asked: dict[str, Any], environ: dict[str, str], note: Path) -> None:
    """Run what is asked in this process, note how it ended, and end it."""
    leave, told = os._exit, []
    try:
        known = set(sys.modules)
        gc.enable()
        os.chdir(asked["folder"])
        os.environ.update(environ)
        os._exit = _raise_left  # type: ignore[assignment]
        for words in asked.get("commands", [[]]):
            with _output_kept(note) as kept:
                code = _run_script(asked["script"]) if "script" in asked else _run_command(main, words)
            told.append([code, *(path.read_text(errors="replace") for path in kept)])
        note.write_text(json.dumps(told))
        if os.environ.get("RANK", "0") == "0":
            note.with_name("modules").write_text(json.dumps([name for name in sys.modules if name not in known]))
    finally:
        leave(0)


def _raise_left(code: int) -> None:
    raise _Left(code)


def _run_command(main: Any, words: list[str]) -> int:
    sys.argv = ["shardway", *words]
    return _code_of(main)


def _run_script(words: list[str]) -> int:
    import runpy

    sys.argv = list(words)
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    return _code_of(lambda: runpy.run_path(words[0], run_name="__main__"))


def _code_of(work: Any) -> int:
    """The exit code that a process would end with."""
    try:
        work()
    except _Left as left:
        return int(left.args[0])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            return int(end.code or 0)
        except _Left as left:
            return int(left.args[0])
        return 1
    return 0


@contextlib.contextmanager
def _output_kept(note: Path) -> Iterator[tuple[Path, Path]]:
    """What is printed goes to files, whoever prints it."""
    kept = note.with_suffix(".out"), note.with_suffix(".err")
    for number, path in zip((1, 2), kept, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    yield kept
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    _serve(sys.argv[1] == "torch")
