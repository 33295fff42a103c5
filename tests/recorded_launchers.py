"""What launchers really told their ranks: the variables that each of two ranks had, as recorded.

A launcher started a program that wrote its environment, from a shell with PATH, HOME and LANG alone. Left out are these
and what any shell sets; places and the host's name are put into neutral words.
"""

from __future__ import annotations

import json
from pathlib import Path

_FILES = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "recorded").glob("*.json"))
}
RECORDED: dict[str, list[dict[str, str]]] = {name: file["ranks"] for name, file in _FILES.items()}
"""Launcher -> the variables of rank 0 and of rank 1."""

NODES: dict[str, list[str]] = {name: file.get("nodes", ["n1"]) for name, file in _FILES.items()}
"""Launcher -> the nodes on which these ranks were."""
