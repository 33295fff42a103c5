"""The numbers of earlier versions: the default run, ten layouts, resumed runs and a loop of one's own.

Each run is described by the words of its commands in `numbers.json`, so that only public doors are used: the command
line, keys of a run file, `import shardway`. The losses, gradient norms and validations are kept to the bit, and so are
the parameters of the runs that end with a checkpoint.

Invariant: no module below `shardway` is imported here. Numbers that differ are never written again; a version that
computes something else on purpose adds a folder (make_kept.py), and says in the change log why the older one is gone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kept_folders import (
    BESIDE,
    VERSIONS,
    by_words_of_today,
    compare_numbers,
    compare_parameters,
    copy,
    has_same_bits,
    play,
    read_json,
)
from still_machine import StillMachine

SHOWN_BY_OTHERS = ("layout: replicate tp", "layout: three replicas")
"""Whose axes, methods and kinds of recompute are each in another layout or in a resumed run too."""

CASES = [
    pytest.param(kept, name, id=f"{kept.name}: {name}", marks=pytest.mark.exhaustive if name in SHOWN_BY_OTHERS else ())
    for kept in VERSIONS
    for name in read_json(kept / "numbers.json")
]


@pytest.mark.parametrize(("kept", "name"), CASES)
def test_a_run_has_the_numbers_that_it_had(machine: StillMachine, tmp_path: Path, kept: Path, name: str) -> None:
    case = read_json(kept / "numbers.json")[name]
    for each in BESIDE:
        copy(kept / each, tmp_path / each)
    found = play(machine, by_words_of_today(kept, case), tmp_path)
    compare_numbers(found["numbers"], case["numbers"], has_same_bits(kept))
    if "parameters" in case:
        compare_parameters(found["parameters"], case["parameters"], has_same_bits(kept))


def test_what_is_compared_is_there() -> None:
    """Ten layouts, three resumed runs, and losses that fall: numbers that stand still would say little."""
    for kept in VERSIONS:
        numbers = read_json(kept / "numbers.json")
        assert sum(name.startswith("layout") for name in numbers) == 10
        assert sum(name.startswith("resumed") for name in numbers) == 3
        for name, case in numbers.items():
            losses = [float.fromhex(each) for each in case["numbers"]["losses"]]
            assert len(losses) >= 4, name
            assert losses[-1] < losses[0], name
