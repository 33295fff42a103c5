"""What trains imports torch without looking for garbage, and looks for it afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from shardway.cli.main import uncollected


def test_no_garbage_is_looked_for_meanwhile() -> None:
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), uncollected():
            assert not gc.isenabled()
            kept = [[number] for number in range(1000)]
            raise ImportError("no torch here")
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_a_rank_imports_so_what_it_needs_until_its_first_step() -> None:
    program = (
        "import gc, sys\n"
        "from shardway.cli import rank\n"
        "assert 'torch' not in sys.modules\n"
        "runs = []\n"
        "gc.callbacks.append(lambda phase, info: runs.append(phase))\n"
        "rank.import_all()\n"
        "print('torch._dynamo' in sys.modules, 'shardway.train.run' in sys.modules, runs, gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "True", "[]", "True"]
