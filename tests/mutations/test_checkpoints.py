"""No change of any file of a checkpoint goes unnoticed, and a run goes on from one that is whole, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import TIMES, Case, cases, check_all, few_and_many
from mutate import Mutant, form_of, restore
from small_run import STEPS, WORDS
from verbs import call, guarded, picture

from runs import lone_rank, read_steps, train_tiny
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import all_keys

VERIFY: tuple[tuple[str, ...], ...] = (("verify",), ("verify", "--json"))
INSPECT: tuple[tuple[str, ...], ...] = (("inspect", "--head"), ("inspect",), ("inspect", "--json"))


def newest(run: Path) -> Path:
    """The newest checkpoint."""
    return RunDir(run).checkpoint_path(STEPS)


def newest_files(run: Path) -> list[str]:
    """The files of the newest checkpoint, whatever its format consists of."""
    files = [path for path in sorted(newest(run).rglob("*")) if path.is_file()]
    return [path.relative_to(run).as_posix() for path in files]


def damage(case: Case, run: Path, trained: Path) -> Mutant:
    """Damage that file of the run."""
    whole = (trained / case.name).read_bytes()
    mutant = case.mutant(whole, form_of(Path(case.name)))
    mutant.put(run / case.name)
    return mutant


def says_the_same(path: Path, whole: Path) -> bool:
    """Whether a damaged file holds the same facts: written otherwise, as with other spaces between them."""
    try:
        return path.suffix == ".json" and json.loads(path.read_bytes()) == json.loads(whole.read_bytes())
    except (ValueError, RecursionError, OSError):
        return False


@few_and_many(few=3, many=150)
def test_every_damage_is_found(numbers: Sequence[int], run: Path, trained: Path) -> None:
    assert call("checkpoint", "verify", str(run)).code == 0
    assert check_all(cases(newest_files(run), numbers), partial(verify_damaged, run, trained)) > 0


def verify_damaged(run: Path, trained: Path, case: Case) -> list[str]:
    """What is wrong with how a damaged file is found."""
    mutant = damage(case, run, trained)
    before = picture(run)
    answer = call("checkpoint", *case.dice().choice(VERIFY), str(run))
    if answer.code:
        found = answer.complaints((4, 2), Path(case.name).name, newest(run).name)
    else:
        found = [] if says_the_same(run / case.name, trained / case.name) else ["nothing was noticed"]
    if picture(run) != before:
        found.append("the run directory is not as it was")
    restore(trained / case.name, run / case.name)
    return [mutant.what, *found, str(answer)] if found else []


@few_and_many(few=2, many=30)
def test_what_is_looked_into_is_shown_or_refused(numbers: Sequence[int], run: Path, trained: Path) -> None:
    def complain(case: Case) -> list[str]:
        mutant = damage(case, run, trained)
        before = picture(run)
        answer = call("checkpoint", *case.dice().choice(INSPECT), str(run))
        found = answer.complaints((0, 2, 4), Path(case.name).name, newest(run).name)
        if picture(run) != before:
            found.append("the run directory is not as it was")
        restore(trained / case.name, run / case.name)
        return [mutant.what, *found, str(answer)] if found else []

    check_all(cases(newest_files(run), numbers), complain)


# --- runs that go on

GOES_ON = (*WORDS, f"train.steps={STEPS + 2}")


@pytest.fixture(scope="session")
def undisturbed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing happened to, after it went on."""
    folder = tmp_path_factory.mktemp("mutations") / "undisturbed"
    shutil.copytree(trained, folder)
    RunDir(folder).clear_stop()
    train_tiny(folder, lone_rank(), *GOES_ON)
    return [event["loss"] for event in read_steps(folder)]


def test_a_run_goes_on_with_the_same_result_or_says_why_not(
    here: Path, trained: Path, undisturbed: list[float]
) -> None:
    def complain(case: Case) -> list[str]:
        folder = here / "runs/small"
        restore(trained, folder)
        RunDir(folder).clear_stop()
        mutant = damage(case, folder, trained)
        before = picture(folder / "checkpoints")
        answer = guarded(lambda: train_tiny(folder, lone_rank(), *GOES_ON))
        found = answer.complaints((0, 2, 4), "runs/small", *all_keys())
        if answer.code and picture(folder / "checkpoints") != before:
            found.append("the checkpoints are not as they were")
        if not answer.code and [event["loss"] for event in read_steps(folder)][-2:] != undisturbed[-2:]:
            found.append("the losses are others")
        return [mutant.what, *found, str(answer)] if found else []

    threads = torch.get_num_threads()
    names = [
        *newest_files(trained),
        "status.json",
        "resolved.toml",
        "run-id",
        "writer.lock",
        "run.toml",
        "events/rank-00000.jsonl",
    ]
    check_all(cases(names, range(4 * TIMES)), complain)
    torch.set_num_threads(threads)
