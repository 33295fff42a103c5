"""Hardware and sites are imported on login nodes: without torch, and without what only a probe needs."""

from __future__ import annotations

import subprocess
import sys

MODULES = [
    "hardware.catalogue",
    "hardware.probe",
    "sites.load",
    "sites.problems",
    "sites.schema",
]
HEAVY = {"torch", "numpy", "psutil", "pynvml"}


def test_imports_are_light() -> None:
    lines = [f"import shardway.{module}" for module in MODULES]
    lines += ["import sys", f"print(sorted({HEAVY!r} & set(sys.modules)))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_profile_loads_and_a_machine_is_probed_without_torch() -> None:
    code = "\n".join(
        [
            "import sys",
            "sys.modules['torch'] = None",
            "from shardway.sites.load import load_site",
            "print(load_site('laptop').name)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "laptop\n"
