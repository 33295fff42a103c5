"""The scripts of examples/ in pairs: what changes from the one on a single device to the one with Shardway, and how a
test runs them on ranks that are there already.

Invariant: a script is run as it stands, with its own command line; only the start of the ranks is replaced.
"""

from __future__ import annotations

import contextlib
import difflib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from page_shell import reader_environ
from runs import Died
from shardway.ranks.start import Ranks
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.train import run as door
from shardway.train.session import Session, hold_session

EXAMPLES = Path(__file__).parents[1] / "examples"
PAIRS = ("mnist", "wikitext2", "fsdp2")
QUIET = ("run.device=cpu", "run.threads=1", "train.validate_every=off", "checkpoint.every=off")


@dataclass(frozen=True)
class Change:
    """The lines of a script that only the single-device form has, and those that only the other has."""

    lines: int
    gone: tuple[str, ...]
    new: tuple[str, ...]


def compare_pair(name: str) -> Change:
    """Of code alone: docstrings of modules, empty lines and how far a line is indented do not count."""
    before, after = (read_code(EXAMPLES / name / script) for script in ("single.py", "with_shardway.py"))
    stripped = ([line.strip() for line in lines] for lines in (before, after))
    matcher = difflib.SequenceMatcher(None, *stripped, autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    gone = tuple(line for _, start, end, _, _ in changes for line in before[start:end])
    new = tuple(line for _, _, _, start, end in changes for line in after[start:end])
    return Change(len(before), gone, new)


def read_code(path: Path) -> list[str]:
    """The lines of a script that count."""
    _, _, code = path.read_text(encoding="utf-8").split('"""', 2)
    return [line for line in code.splitlines() if line.strip()]


def run_script(name: str, directory: Path, on: Ranks, *words: str, last: int | None = None) -> None:
    """Run a script on these ranks with `words` on its command line; `last` is the step after which all ranks die."""
    script = EXAMPLES / name / "with_shardway.py"

    @contextlib.contextmanager
    def opened(request: ResolveRequest, environ: object) -> Iterator[Session]:
        with hold_session(resolve_request(request, on.world, on.world), on) as session:
            yield session

    place = (f"run.root={directory.parent}", f"run.name={directory.name}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [str(script), *QUIET, *place, *words]))
        stack.enter_context(mock.patch.object(sys, "path", [str(script.parent), *sys.path]))
        stack.enter_context(mock.patch.dict(sys.modules))  # one script's `model` is not another's
        stack.enter_context(mock.patch.object(door, "open_session", opened))
        if last is not None:
            stack.enter_context(mock.patch.object(door.LiveRun, "step", dying_after(last)))
            stack.enter_context(contextlib.suppress(Died))
        runpy.run_path(str(script), run_name="__main__")


def dying_after(last: int) -> Callable[..., float]:
    """`LiveRun.step` that does not survive the step after `last`."""
    step = door.LiveRun.step

    def take(run: door.LiveRun, *arguments: object) -> float:
        if run._loop.counters.step >= last:  # type: ignore[union-attr]
            raise Died
        return step(run, *arguments)  # type: ignore[arg-type]

    return take


def command_environment() -> dict[str, str]:
    """The environment of a shell in which the commands of this Python come first."""
    return {**reader_environ(), "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, script: Path, *words: str) -> Sequence[str]:
    """The words behind `python` that start a script on local ranks."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script), *words)
