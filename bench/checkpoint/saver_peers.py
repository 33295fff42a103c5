"""Saving and loading with Lightning's Fabric and with Accelerate, where they are installed.

Both leave their files to the kernel; the figures "with fsync" wait until each of them is on the disk, as the other ways
do. Neither compares what it reads with anything.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from saver_bench import Bench, evict


def fabrics(bench: Bench) -> None:
    """`Fabric.save`, `Fabric.load`; the Trainer of Lightning writes by the same function."""
    from lightning_fabric import Fabric

    fabric, path = Fabric(accelerator=bench.device.type, devices=1), bench.fresh("fabric") / "state.ckpt"
    tensors = bench.tensors
    _save(bench, "Fabric.save", path.parent, lambda: fabric.save(path, tensors))
    with bench.timed("Fabric.load"):
        fabric.load(path)
    bench.fresh("fabric")


def accelerates(bench: Bench) -> None:
    """`Accelerator.save_state`, `Accelerator.load_state`."""
    from accelerate import Accelerator

    accelerator, folder = Accelerator(cpu=bench.device.type == "cpu"), bench.fresh("accelerate")
    accelerator.prepare(bench.trained.model, bench.trained.optimizer)
    _save(bench, "Accelerate.save_state", folder, lambda: accelerator.save_state(str(folder)))
    with bench.timed("Accelerate.load_state"):
        accelerator.load_state(str(folder))
    bench.fresh("accelerate")


def _save(bench: Bench, way: str, folder: Path, save: Callable[[], object]) -> None:
    """Time it as it is, and with an fsync of each file."""
    with bench.timed(f"{way} with fsync"):
        with bench.timed(way):
            save()
        for path in folder.rglob("*"):
            if path.is_file():
                _sync(path)
    evict(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def find_ways() -> tuple[Callable[[Bench], None], ...]:
    """Those of the libraries that are there."""
    ways = {"lightning_fabric": fabrics, "accelerate": accelerates}
    return tuple(way for name, way in ways.items() if importlib.util.find_spec(name))
