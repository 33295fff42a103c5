"""Modules outside the package: those of bench/ and tools/, whose files find one another by their folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@contextmanager
def modules_of(folder: str) -> Iterator[None]:
    """Imports find the modules of a folder of this repository first; afterwards the path is as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / folder))
        yield
