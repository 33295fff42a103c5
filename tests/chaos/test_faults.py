"""Whatever happens, the run comes out as if nothing had happened.

python -m pytest tests/chaos                       each fault once
make chaos [TIMES=20] [FIRST=0]                    each fault so often, and the table of docs/faults.md
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from faults.numbers import HARM
from faults.stops import validates_for_ever
from faults.strike import DEVICE, RANKS, Aftermath, Fault, children, strike
from faults.tiers import WORDS as NODES
from notes import noted, seeds
from outcome import compare, finished, used_samples

from commands import Start, injected, training_commands
from faults import FAULTS
from runs import TINY

WORDS = (
    *("--nproc", str(RANKS), *TINY, "train.steps=160", "checkpoint.every=20 steps", "model.dropout=0.1"),
    *("data.record_ids=true", "train.validate_every=50 steps"),
    *(() if DEVICE == "cpu" else (f"run.device={DEVICE}", "train.deterministic=true")),
)
MOST_STARTS = 4

Undisturbed = Callable[[Fault], Path]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run that nothing happens to, for a fault whose `base` makes the numbers others than those of most."""
    known: dict[tuple[str, ...], Path] = {}

    def get(fault: Fault) -> Path:
        if fault.base not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            fault.prepare(folder)
            with training_commands(folder) as start:
                start("run", *_words(fault.base, folder)).finish()
            known[fault.base] = folder / "run"
        return known[fault.base]

    return get


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("name", *words)` in a folder of that name."""
    with training_commands(tmp_path) as go:
        yield go


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[pytest.mark.exhaustive] if fault.is_further else [])
        for fault in FAULTS
    ],
)
def test_the_run_comes_out_as_if_nothing_had_happened(
    fault: Fault, seed: int, start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    if fault.cannot_be:
        pytest.skip(fault.cannot_be)
    dice = random.Random(f"{fault.name} {seed}")
    environ = fault.environ(tmp_path, dice)
    fault.prepare(tmp_path)
    words = _words((*fault.base, *fault.words), tmp_path)
    with noted(fault.name, seed) as note, fault.room(tmp_path) as room:
        command = start("run", *words, environ=environ, room=room)
        struck = fault.strike(command, dice)
        command, said = struck.command or command, []
        while not finished(command, said):
            assert len(said) < MOST_STARTS, said[-1]
            command = command.again()
        starts = len(said) + (struck.command is not None)
        assert starts == 1 or not fault.restarts_itself
        compare(command.folder, undisturbed(fault), fault.tolerance)
        fault.expects(Aftermath(command.run, tmp_path, said))
        note.tell(struck, starts, command.run, is_timed=fault.is_timed)


def _words(further: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Those of every run and further ones, which may name a folder; made-up data have a size, and files their own."""
    has_files = any(word.startswith("data.path=") for word in further)
    common = [word for word in WORDS if not (has_files and word.startswith("data.samples="))]
    return (*common, *(word.replace("{folder}", str(folder)) for word in further))


@pytest.mark.exhaustive
def test_a_stop_that_takes_too_long_ends_the_run_with_the_reason(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """A rank is in a validation that takes an hour; nothing starts again by itself, and the same command goes on."""
    environ = validates_for_ever(tmp_path / "validates")
    command = start("run", *WORDS, "run.stop_timeout=3s", "run.collective_timeout=2s", environ=environ)
    command.wait_until((tmp_path / "validates-0").exists)  # before its first batch the stop would still be heard
    strike(children(command)[0], signal.SIGTERM, "rank 0")
    code, said = command.end()
    assert code == 4
    assert (
        "the stop took longer than run.stop_timeout = 3s (command line), so rank 0 was ended in a validation." in said
    )
    assert "slowly (" in said, "where it was"
    assert command.left_alive() == []
    assert command.run.read_status()["state"] == "failed"
    start("run", *WORDS).finish()
    compare(command.folder, undisturbed(FAULTS[0]), 0.0)


@pytest.mark.exhaustive
def test_the_same_failure_again_and_again_drops_what_the_nodes_saved_and_then_ends_the_run(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Two starts from the nodes' last step fail, the next one goes on from the run directory; mended, all is well."""
    mended = tmp_path / "mended"
    command = start("run", *_words(NODES, tmp_path), environ=injected(**{HARM: f"0:raise:{52 * 8}:{mended}"}))
    code, said = command.end()
    assert code != 0
    assert "it is not started again: the same failure came twice with step" in said
    begun = [event for event in command.run.all_events() if event["event"] == "started"]
    *_, first, second, last = [(event["step"], event["checkpoint_tier"]) for event in begun]
    assert first == second
    assert (first[1], last[1]) == ("local", "shared")
    assert last[0] < first[0] <= 50
    mended.touch()
    command.again().finish()
    compare(command.folder, undisturbed(FAULTS[0]), 0.0)


def test_the_undisturbed_run_uses_every_sample_once_an_epoch(undisturbed: Undisturbed) -> None:
    """What the others are compared with; the last epoch is not full."""
    used = [sample for ids in used_samples(undisturbed(FAULTS[0])).values() for each in ids for sample in each]
    assert len(used) == 160 * 8
    times = Counter(used).values()
    assert max(times) - min(times) <= 1
