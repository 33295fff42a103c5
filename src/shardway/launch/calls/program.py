"""The program of a job that calls a function: it reads the call, calls, and leaves what came of it in a file.

It is copied into the attempt's folder and runs there with the job's own Python, which need not have Shardway. So it
imports the standard library alone (cloudpickle is needed, and found missing in a sentence), and runs on Python 3.8.

    python3 call.py call.json [FOLDER]

Each rank writes FOLDER/rank-NNNNN.json, by default in the folder `returned` of the attempt.

Invariants:
- A file appears whole or not at all, whatever the function does.
- A function that raises ends the program with exit code 1, after its traceback was printed and recorded: a job that
  failed looks failed to its scheduler.
- Nothing is called where this Python could not read the call as it was meant.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import io
import json
import os
import pickle
import signal
import sys
import traceback
from typing import Any

PARENT = "SHARDWAY_CALL_PARENT"
"""Set by a process that starts ranks itself: the ranks end with it."""


def main(words: list[str]) -> int:
    """Call, and write the record; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a rank prints is seen at once, and not lost with the rank
    with open(words[0], encoding="utf-8") as file:
        call = json.load(file)
    folder = words[1] if len(words) > 1 else os.path.join(os.environ["SHARDWAY_ATTEMPT_DIR"], "returned")
    if PARENT in os.environ:
        end_with(int(os.environ.pop(PARENT)))
    rank = int(os.environ.get("RANK") or 0)
    record: dict[str, Any] = {"format": 1, "rank": rank}
    refusal = find_refusal(call)
    if refusal:
        show(f"shardway: {refusal}\n")
        record["refused"] = refusal
    else:
        record.update(make_record(call))
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"rank-{rank:05d}.json")
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return 0 if "returned" in record else 1


def end_with(parent: int) -> None:
    """Ask the kernel to end this process with its parent (prctl(2), PR_SET_PDEATHSIG)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        sys.exit(1)


def find_refusal(call: dict[str, Any]) -> str:
    """Why this Python cannot read the call; "" where it can. Code objects are those of one minor version."""
    mine, its = list(sys.version_info[:2]), call["python"]
    name = call["function"]
    if mine != its:
        return (
            f"{name} was pickled by Python {its[0]}.{its[1]}, and the Python of the job, {sys.executable}, is "
            f"{mine[0]}.{mine[1]}, which cannot read it.\n"
            f"  To do: name an environment with Python {its[0]}.{its[1]} in site.venv, or submit with that Python."
        )
    if importlib.util.find_spec("cloudpickle") is None:
        return (
            f"{name} cannot be read: {sys.executable} has no cloudpickle.\n"
            f"  To do: {sys.executable} -m pip install cloudpickle"
        )
    return ""


def make_record(call: dict[str, Any]) -> dict[str, Any]:
    """Call the function; what it returned or raised."""
    sys.path[:1] = list(dict.fromkeys(["", *map(find_place(call), call["paths"])]))  # for this program's own folder
    step = "read"
    try:
        function, args, kwargs = pickle.loads(base64.b64decode(call["pickle"]))
        step = "call"
        value = function(*args, **kwargs)
        step = "return"
        return {"returned": pack(value)}
    except BaseException as error:
        if step == "return":
            value_type = type(value).__qualname__
            record = {
                "type": type(error).__qualname__,
                "message": str(error),
                "unpicklable": value_type,
                "traceback": "",
                "pickle": "",
            }
            show(f"shardway: what {call['function']} returned, a {value_type}, cannot be pickled: {error}\n")
            return {"raised": record}
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None  # not the line above
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        show(text)
        record = {"type": type(error).__qualname__, "message": str(error), "traceback": text, "step": step}
        try:
            packed = pack(error)
            pickle.loads(base64.b64decode(packed))  # some are pickled and cannot be made again
        except Exception:
            packed = ""
        return {"raised": {**record, "pickle": packed}}
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def find_place(call: dict[str, Any]) -> Any:
    """The function from a folder of the submitter's `sys.path` to the same folder here: within the project it is that
    of the copy in which the job works."""
    root, below = call["root"], call["below"]
    work = os.getcwd()
    for _ in below.split("/") if below else ():
        work = os.path.dirname(work)

    def place(path: str) -> str:
        if root and (path == root or path.startswith(root + "/")):
            return work + path[len(root) :]
        return path

    return place


def show(text: str) -> None:
    """On stderr, after what the function has printed."""
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()


def pack(value: Any) -> str:
    """A value as text."""
    import cloudpickle

    return base64.b64encode(cloudpickle.dumps(value)).decode("ascii")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
