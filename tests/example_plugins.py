"""Installs a package of examples/plugins as a user would: with pip, into a folder.

Invariant: nothing is written below examples/, where pip would leave what it builds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples/plugins"


def install_example(package: str, folder: Path) -> Path:
    """Install a package into folder/site, which is returned; for PYTHONPATH."""
    source, site = folder / "source" / package, folder / "site"
    shutil.copytree(EXAMPLES / package, source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = (sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(source))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site
