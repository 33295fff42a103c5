"""Packages that a test pretends are installed: a module, and entry points as an installer leaves them.

    @pytest.fixture
    def install(tmp_path, monkeypatch):
        yield from installing(tmp_path, monkeypatch)

Invariant: after the test no cache of `shardway.plugins`, or of what reads through it, knows them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from shardway import plugins
from shardway.hardware import catalogue
from shardway.plan import memory

Install = Callable[..., Path]
"""install("shardway-x", {"shardway.optimizers": {"x": "x_module:X"}}, x_module="its code"); "x_module/x.toml" for more
files. Returns the folder of packages."""

_CACHES = (
    plugins._list_entries,
    plugins._installed,
    plugins._load,
    catalogue.load_installed_accelerators,
    memory.optimizer_bytes,
)


def installing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """What installs a package below the folder, for the time of the test."""
    site, before = folder / "site-packages", set(sys.modules)

    def install(package: str, entries: Mapping[str, Mapping[str, str]], version: str = "1.2.3", **modules: str) -> Path:
        about = site / f"{package.replace('-', '_')}-{version}.dist-info"
        about.mkdir(parents=True)
        about.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        lines = [
            line
            for group, targets in entries.items()
            for line in (f"[{group}]", *(f"{name} = {target}" for name, target in targets.items()))
        ]
        about.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, code in modules.items():
            site.joinpath(f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(str(site))
        _forget()
        return site

    try:
        yield install
    finally:
        for name in set(sys.modules) - before:
            if str(site) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        monkeypatch.undo()
        _forget()


def _forget() -> None:
    for cached in _CACHES:
        cached.cache_clear()
