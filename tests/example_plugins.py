"""Installs packages of examples/plugins as a user would: with pip, into a folder.

Invariant: nothing is written below examples/, where pip would leave what it builds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples/plugins"


def install_examples(packages: Sequence[str], folder: Path) -> Path:
    """Install packages into folder/site, which is returned; for PYTHONPATH."""
    sources, site = [folder / "source" / package for package in packages], folder / "site"
    for source in sources:
        shutil.copytree(EXAMPLES / source.name, source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = (sys.executable, "-m", "pip", "install", *options, "--target", str(site), *map(str, sources))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site
