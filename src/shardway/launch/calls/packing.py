"""A call of a Python function as the text of a file, and what its ranks left as values and exceptions.

Invariants:
- A function that cannot be called like this, or cannot be pickled, is refused before anything is submitted.
- Reading a record raises nothing: a record that cannot be read here becomes an error with what it holds as text.
- This module starts and submits nothing.

Functions are pickled by cloudpickle: those of a notebook or a script travel with their code, those of a module by its
name, and that module has to be importable where the job runs.
"""

from __future__ import annotations

import base64
import difflib
import functools
import inspect
import json
import os
import pickle
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import cloudpickle

from shardway.errors import JobError, UserError
from shardway.rundir.file_io import read_fields

OWN_PARENT = "SHARDWAY_CALL_PARENT"
"""Variable of ranks that end with the process that started them: its number (`program.PARENT`)."""

# --- a call


@dataclass(frozen=True)
class FunctionCall:
    """A function with its arguments, pickled. `name`: as its author reads it; `paths`: the folders from which the
    submitting process imports, without those of Python and of installed packages; `gpus`: accelerators of a node that
    were asked for, 0 for none; `ranks`: how many processes of the job call it."""

    function: str
    pickle: str
    python: tuple[int, ...]
    paths: tuple[str, ...] = ()
    gpus: int = 0
    ranks: int = 1

    @property
    def short(self) -> str:
        """The last part of its name, in letters that a run may have: `<lambda>` is `lambda`."""
        return re.sub(r"[^A-Za-z0-9_-]+", "", self.function.rpartition(".")[2]) or "call"

    def render(self, root: str, below: str) -> str:
        """The text of `call.json`. `root`: the project that the job has a copy of, "" for none; `below`: the folder in
        it in which the job works."""
        return json.dumps({"format": 1, **asdict(self), "root": root, "below": below}) + "\n"


def parse_call(text: str) -> FunctionCall | None:
    """The call in the text of `call.json`; None where it is empty or damaged."""
    try:
        return read_fields(FunctionCall, json.loads(text))
    except (ValueError, RecursionError):
        return None


def read_program() -> str:
    """The text of the program that runs in the job."""
    return (files("shardway.launch.calls") / "program.py").read_text(encoding="utf-8")


def pack_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> FunctionCall:
    """Pickle a call. Raises UserError for what is no function, what it does not take, and what cannot be pickled."""
    name = describe_function(function)
    if not callable(function):
        raise UserError(
            f"{name} is no function, so a job cannot call it.\n"
            "  To do: name the function and its arguments apart: shardway.submit(train, 3e-4, epochs=2)"
        )
    check_arguments(function, args, kwargs)
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{name} is a coroutine function.\n  To do: submit lambda: asyncio.run({name}())")
    try:
        packed = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:
        culprit = _find_unpicklable(function, args, kwargs)
        raise UserError(
            f"{culprit} cannot be pickled, so it cannot go to a job: {' '.join(str(error).split())}\n"
            "  To do: make what cannot travel (an open file, a lock, a connection, a generator) inside the function, "
            "and give it paths or numbers."
        ) from error
    encoded = base64.b64encode(packed).decode("ascii")
    return FunctionCall(name, encoded, tuple(sys.version_info[:2]), _list_own_paths())


def describe_function(function: Any) -> str:
    """As its author reads it: `train`, `Trainer.fit`, `partial of train`."""
    if isinstance(function, functools.partial):
        return describe_function(function.func)
    name = getattr(function, "__qualname__", "")
    return str(name or (type(function).__qualname__ if callable(function) else repr(function)[:80]))


def check_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[str] = ()
) -> None:
    """Raise UserError for arguments that a function does not take. `others`: names that its caller might have meant."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        close = [
            f"{word} -> {found[0]}"
            for word in kwargs
            if word not in signature.parameters and (found := difflib.get_close_matches(word, others, n=1))
        ]
        hint = f"\n  Did you mean: {', '.join(close)}?" if close else ""
        raise UserError(
            f"{describe_function(function)}{signature} does not take these arguments: {error}.\n"
            f"      given: {_render_arguments(args, kwargs)}{hint}\n"
            "  To do: correct them; options of the job are those of shardway.Executor."
        ) from None


def _render_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    shown = [*(repr(value)[:40] for value in args), *(f"{name}={repr(value)[:40]}" for name, value in kwargs.items())]
    return ", ".join(shown) or "none"


def _find_unpicklable(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The first part of a call that cannot be pickled."""
    parts = {f"the function {describe_function(function)}": function}
    parts |= {f"argument {place} ({type(value).__qualname__})": value for place, value in enumerate(args, 1)}
    parts |= {f"{name}= ({type(value).__qualname__})": value for name, value in kwargs.items()}
    for name, part in parts.items():
        try:
            cloudpickle.dumps(part)
        except Exception:
            return name
    return "the call"


def _list_own_paths() -> tuple[str, ...]:
    """The folders of `sys.path` that are neither Python's own nor of installed packages."""
    known = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    known |= {os.path.realpath(path) for path in (*site.getsitepackages(), site.getusersitepackages())}
    known |= {os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "lib-dynload")}
    whole = [os.path.abspath(path or os.getcwd()) for path in sys.path]
    return tuple(path for path in dict.fromkeys(whole) if os.path.isdir(path) and os.path.realpath(path) not in known)


# --- what came of a call


class RemoteTraceback(Exception):
    """The cause of an exception that came back from a job: the traceback there, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass(frozen=True)
class RankOutcome:
    """What a call came to on one rank: a value, or with `error` an exception."""

    rank: int
    value: Any = None
    error: BaseException | None = None


def read_outcome(text: str, rank: int, call: str, ranks: int = 1) -> RankOutcome:
    """The outcome in a rank's record. `call`: the function's name."""
    which = f"{call}, rank {rank} of {ranks}" if ranks > 1 else call
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        return RankOutcome(rank, error=JobError(f"what {which} left is damaged.\n  To do: submit it again."))
    if isinstance(packed := record.get("returned"), str):
        try:
            return RankOutcome(rank, pickle.loads(base64.b64decode(packed)))
        except Exception as error:
            return RankOutcome(rank, error=_explain_unreadable(which, error))
    if refused := record.get("refused"):
        return RankOutcome(rank, error=JobError(str(refused)))
    return RankOutcome(rank, error=_read_raised(record.get("raised") or {}, which, ranks))


def _explain_unreadable(which: str, error: Exception) -> JobError:
    return JobError(
        f"what {which} returned cannot be read here: {type(error).__name__}: {error}.\n"
        "  To do: import what it needs here too (a package, a GPU), or return plain numbers, lists and arrays."
    )


def _read_raised(raised: Mapping[str, Any], which: str, ranks: int) -> BaseException:
    kind, message, text = (str(raised.get(key, "")) for key in ("type", "message", "traceback"))
    if value := raised.get("unpicklable"):
        return JobError(
            f"{which} returned a {value}, which cannot be pickled: {message}.\n"
            "  The function was called, and its value is lost. To do: return what can be pickled (numbers, lists, "
            "arrays), or write it to a file and return its path."
        )
    error: BaseException | None = None
    if packed := raised.get("pickle"):
        try:
            error = pickle.loads(base64.b64decode(packed))
        except Exception:
            error = None
    if not isinstance(error, Exception):  # an exit, an interrupt, or a class that is not here
        where = "could not be read in the job" if raised.get("step") == "read" else "raised"
        error = JobError(f"{which} {where}: {kind}: {message}")
    elif raised.get("step") == "read":
        remedy = "a module that it names has to be in the code that is submitted, or installed where the job runs"
        error.add_note(f"{which} could not be read in the job, and was not called: {remedy}.")
    if ranks > 1:
        error.add_note(f"raised by {which}")
    error.__cause__ = RemoteTraceback(text) if text else None
    return error
