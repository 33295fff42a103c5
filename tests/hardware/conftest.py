"""A stand-in for the root of a file system, for what is read from /proc and /sys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

LayOut = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def lay_out(tmp_path: Path) -> LayOut:
    """Writes files below a fresh root, each ending with a newline as the kernel's do, and returns the root."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
        return tmp_path

    return write
