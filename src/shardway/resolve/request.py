"""From what a person asked for to the resolved run: reads the run file, the site profile and this machine.

Invariant: the same request on the same machine gives the same `Resolved` on every rank, so that each can do it for
itself. The only module of this room that reads files; it must not write any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardway.errors import UserError
from shardway.hardware.probe import probe_machine
from shardway.hfconfig import ModelFacts, locate_model, read_facts
from shardway.resolve.build import resolve
from shardway.resolve.resolved import Circumstances, Resolved
from shardway.rundir.directory import RunDir
from shardway.runfile.load import Loaded, load_run
from shardway.sites.load import load_site


@dataclass(frozen=True)
class Request:
    """A run file (None: the default run), `key.path=value` overrides, the run directory (None: root/name)."""

    run_file: Path | None = None
    overrides: tuple[str, ...] = ()
    directory: Path | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Resolution:
    """A request, what was read for it, and what follows."""

    request: Request
    loaded: Loaded
    resolved: Resolved

    @property
    def directory(self) -> RunDir:
        """Where the run writes."""
        values = self.resolved.values.run
        return RunDir(Path(values.root) / values.name)

    def with_default(self, dotted: str, value: Any, origin: str) -> Resolution:
        """The same resolution where `value` stands in for a key that nobody set."""
        loaded = self.loaded.with_default(dotted, value, origin)
        return replace(self, loaded=loaded, resolved=resolve(loaded, self.resolved.circumstances))


def resolve_request(request: Request, ranks: int = 1, ranks_per_node: int = 1) -> Resolution:
    """Read and resolve. Raises UserError with every problem."""
    loaded = _placed(load_run(request.run_file, request.overrides), request.directory)
    machine = probe_machine()
    site = load_site(loaded.values.site.name, lambda: machine)
    circumstances = Circumstances(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        usable_cores=machine.usable_cores,
        accelerators=len(machine.accelerators),
        site=site.name,
        hf=_facts_of(loaded.values.model.hf),
    )
    return Resolution(request, loaded, resolve(loaded, circumstances))


def _facts_of(hf: str) -> ModelFacts | None:
    """What the config of `model.hf` says, where that is set."""
    return read_facts(locate_model(hf, weights=False)) if hf else None


def _placed(loaded: Loaded, directory: Path | None) -> Loaded:
    """The run with the directory of `--dir` as its root and name, so that `resolved.toml` leads back to it."""
    if directory is None:
        return loaded
    path = directory.expanduser()
    path = path if path.name not in ("", "..") else path.resolve()
    if not path.name:
        raise UserError(f"the run directory {directory} is the root of the file system; name a folder in it.")
    return loaded.with_value("run.root", str(path.parent), "--dir").with_value("run.name", path.name, "--dir")
