"""What updates the weights: one engine per name of `train.engine`, behind one protocol.

Invariant: nothing outside this package tests which engine trains; it uses the engine, or the table here. Loading the
table imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType

from shardway.errors import UserError
from shardway.train.engines.base import Engine, EngineParts


@dataclass(frozen=True)
class EngineKind:
    """An engine before it is made: `needs_group` also for a single process; `wraps_copies`: the copies of a model are
    kept equal by `parallel.apply`, not by the engine. `package` is what it needs beside PyTorch."""

    make: Callable[[EngineParts], Engine]
    needs_group: bool = False
    wraps_copies: bool = True
    package: str | None = None

    def check_installed(self) -> None:
        """Raise UserError if its package is missing."""
        if self.package is not None and find_spec(self.package) is None:
            raise UserError(
                f'train.engine = "{self.package}" needs the package {self.package}, which is not installed.\n'
                f"  To do: DS_BUILD_OPS=0 pip install --no-build-isolation 'shardway[{self.package}]' "
                '(without isolation, since it is built for the PyTorch that is there); or set train.engine = "torch".'
            )


def _torch(parts: EngineParts) -> Engine:
    from shardway.train.engines.torch import TorchEngine

    return TorchEngine(parts)


def _deepspeed(parts: EngineParts) -> Engine:
    from shardway.train.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(parts)


ENGINES: Mapping[str, EngineKind] = MappingProxyType(
    {
        "torch": EngineKind(_torch),
        "deepspeed": EngineKind(_deepspeed, needs_group=True, wraps_copies=False, package="deepspeed"),
    }
)
"""Name in the run file -> engine."""
