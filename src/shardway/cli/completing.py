"""What a shell is offered for a word that is begun: keys of a run file, run files, runs, examples.

Invariant: quick, and without torch; what cannot be read is not offered. This module must not print.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def complete_words(incomplete: str) -> list[str]:
    """Of `[RUN_FILE] [KEY=VALUE]...`: keys up to their "=", and run files and folders on the way to one."""
    return [*(f"{key}=" for key in _keys() if key.startswith(incomplete)), *_list_paths(incomplete, ".toml")]


def complete_key(incomplete: str) -> list[str]:
    """A key, or a section."""
    names = dict.fromkeys(name for key in _keys() for name in (key.partition(".")[0], key))
    return [name for name in names if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """A run of ./runs or one that was submitted, by its directory or its name; else a folder."""
    from shardway.launch.runs.find import find_all, render_known

    names: list[str] = []
    with contextlib.suppress(Exception):  # a registry or a folder that cannot be read offers nothing
        for known in find_all(Path("runs")):
            names += [render_known(known), Path(known.run).name] if known.host == "" else [render_known(known)]
    return [*dict.fromkeys(name for name in names if name.startswith(incomplete)), *_list_paths(incomplete, "/")]


def complete_example(incomplete: str) -> list[str]:
    """An example of `init --from`."""
    from shardway.cli.init import list_examples

    return [name for name in list_examples() if name.startswith(incomplete)]


def complete_site(incomplete: str) -> list[str]:
    """A site profile."""
    from shardway.sites.load import list_sites

    return [name for name in list_sites() if name.startswith(incomplete)]


def complete_gpu(incomplete: str) -> list[str]:
    """An accelerator of the catalogue."""
    from shardway.hardware.catalogue import load_accelerators

    return [name for name in load_accelerators() if name.startswith(incomplete)]


def _keys() -> list[str]:
    from shardway.runfile.schema import all_keys

    return all_keys()


def _list_paths(incomplete: str, suffix: str) -> Iterator[str]:
    """Paths that begin so: folders, and files with a suffix."""
    begun = Path(incomplete or ".")
    folder = begun if incomplete.endswith("/") or not incomplete else begun.parent
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            shown = f"./{path}" if incomplete.startswith("./") else str(path)
            if shown.startswith(incomplete) and not path.name.startswith("."):
                if path.is_dir():
                    yield f"{shown}/"
                elif shown.endswith(suffix):
                    yield shown
