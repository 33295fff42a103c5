"""Runs a verb in this process and prints, as JSON, the modules of the package that it executes.

    python tests/journey_tracer.py plan train.steps=2

Invariant: a module counts only if one of its functions is called, and not while a module is imported: what a person
reads to follow the verb, not what Python loads.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import shardway

ROOT = Path(shardway.__file__).resolve().parent
_MARK = "journey: "


class JourneyTracer:
    """Notes files whose functions are called in any thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._importing = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """What `sys.settrace` calls when a function is entered; a module's body is watched until it ends."""
        code = frame.f_code
        if code.co_name == "<module>":
            self._importing.depth = self._depth + 1
            frame.f_trace_lines = False
            return self._leave_module
        if self._depth == 0 and code.co_flags & inspect.CO_OPTIMIZED:  # the body of a class is not
            self.files.add(code.co_filename)
        return None

    def _leave_module(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._importing.depth = self._depth - 1
        return self._leave_module

    @property
    def _depth(self) -> int:
        """How many modules this thread is importing, one for the other."""
        return getattr(self._importing, "depth", 0)

    def list_modules(self) -> list[str]:
        """Their paths below src/shardway."""
        paths = (Path(name) for name in self.files if name.startswith(str(ROOT)))
        return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def main() -> None:
    """Trace the verb that the words of the command line name."""
    from shardway.cli.main import app, run_guarded

    tracer = JourneyTracer()
    threading.settrace(tracer)
    sys.settrace(tracer)
    code = run_guarded(lambda: app(standalone_mode=False))
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    print(f"\n{_MARK}{json.dumps([code, tracer.list_modules()])}", flush=True)


def read_trace(printed: str) -> tuple[int, list[str]]:
    """Exit code and modules in what a traced verb printed."""
    code, modules = json.loads(printed.rpartition(_MARK)[2])
    return code, modules


if __name__ == "__main__":
    main()
