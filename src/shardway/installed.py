"""What an installation without torch lacks: which part of Shardway needs a package, and which command installs it.

Shardway itself is what a login node needs; `shardway[torch]` adds PyTorch and numpy, with which it trains. Nothing is
imported here to find out: a package that is there but cannot be loaded is another fault, which keeps its own error.

Invariant: whatever needs a package that is not installed ends in the sentence of `describe_missing`, in a script of the
user's too, never in a traceback.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from shardway.errors import UserError

EXTRAS = {"torch": "torch", "numpy": "numpy"}
"""Packages that a login node does without -> the smallest extra that brings them; `torch` brings both."""

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def check_torch(what: str) -> None:
    """Raise UserError where PyTorch is not installed; `what` needs it: "`shardway train`"."""
    if not is_installed("torch"):
        raise UserError(describe_missing("torch", what))


def describe_missing(package: str, what: str) -> str:
    """That `what` needs a package of EXTRAS that is not installed, and the command that installs it."""
    name = {"torch": "PyTorch"}.get(package, package)
    manager, extra = ("pip install", f'"shardway[{EXTRAS[package]}]"')
    if "pipx" in sys.prefix.split("/"):
        manager = "pipx install --force"
    head = f"{what} needs {name}, which is not installed for {sys.executable}.\n  To do: {manager} {extra}"
    if package != "torch":
        return head
    option = f"--pip-args='--extra-index-url {CPU_WHEELS}'" if "pipx" in manager else f"--extra-index-url {CPU_WHEELS}"
    return (
        f"{head} (with CUDA; without a GPU: add {option}).\n"
        "  A login node needs none: `shardway submit` starts the run where PyTorch is (site.venv, site.image)."
    )


def find_missing(error: BaseException) -> str:
    """The package of EXTRAS whose absence an error is about; "" for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return package if package in EXTRAS and not is_installed(package) else ""
