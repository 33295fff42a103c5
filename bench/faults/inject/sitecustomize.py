"""Imported by every Python that has this folder on its path: brings `harm.py` into Shardway's ranks."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES_OF_A_STEP = 8


class _Changed(importlib.abc.MetaPathFinder):
    """Changes modules once they were imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = self._changes.pop(name, None)
        spec = importlib.util.find_spec(name) if change is not None else None
        if spec is None or spec.loader is None or change is None:
            return None
        load = spec.loader.exec_module

        def load_changed(module: Any) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_changed  # type: ignore[method-assign]
        return spec


def _prepare(rank: int) -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    from harm import read_harm

    harm = read_harm(rank)
    saving = [0, 0]

    def change_step(module: Any) -> None:
        take = module.take_step

        def take_step(parts: Any, model: Any, batch: Any, loss_fn: Any, moment: Any) -> Any:
            harm.before_step(moment.position // SAMPLES_OF_A_STEP + 1)
            return take(parts, model, batch, loss_fn, moment)

        module.take_step = take_step

    def change_save(module: Any) -> None:
        collect = module.collect_content

        def collect_content(ranks: Any, state: Any, step: int, numbers: Any) -> Any:
            saving[:] = [step, 0]
            return collect(ranks, state, step, numbers)

        module.collect_content = collect_content
        write = module.ChecksumWriter.update

        def write_some(self: Any, *arguments: Any) -> Any:
            done = write(self, *arguments)
            saving[1] += 1
            if saving[1] > 4:
                harm.in_save(saving[0])
            return done

        module.ChecksumWriter.update = write_some

    changes = {"step": change_step} if harm.pace_s or harm.kind in ("hang", "raise") else {}
    found = {f"shardway.train.{name}": change for name, change in changes.items()}
    if harm.kind == "die":
        found |= {"shardway.checkpoint.writer": change_save}
    sys.meta_path.insert(0, _Changed(found))


if os.environ.get("RANK", "").isdigit() and "FAULT_PACE" in os.environ:
    _prepare(int(os.environ["RANK"]))
