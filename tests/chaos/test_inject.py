"""What faults change in Shardway is there to be changed: a fault that misses its place would strike nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.saves import PHASES

CHANGE_ALL = """
import importlib, sys
from pathlib import Path
import sitecustomize as inject

mark = Path(sys.argv[1])
changes = [("shardway.data.loader", inject._stall(0, mark)), ("shardway.train.passes", inject._slow(1.0))]
changes += [("shardway.data.loader", inject._pace(1.0)), ("shardway.checkpoint.manager", inject._retry(1.0))]
changes += [("shardway.train.step", inject._harm("nan", 0, mark))]
for phase in sys.argv[2:]:
    changes += inject._kill_in_save(inject._Save(0, mark), phase).items()
for name, change in changes:
    change(importlib.import_module(name))
print(len(changes))
"""


@pytest.mark.usefixtures("warm_starts")
def test_what_faults_change_is_there(tmp_path: Path) -> None:
    words = [sys.executable, "-c", CHANGE_ALL, str(tmp_path / "mark"), *PHASES.values(), "copying"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "inject")}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120)
    assert (done.stderr, int(done.stdout or 0)) == ("", 5 + 5 + 1 + 1)
