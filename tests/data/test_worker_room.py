"""A rank has as many loader processes as fit, and says why there are no more."""

from __future__ import annotations

import pytest

from shardway.data import workers
from shardway.data.workers import OWN_TASKS, SPARE_TASKS, fit_workers
from shardway.hardware.limits import TaskLimit

ONE = {"OMP_NUM_THREADS": "1"}


def limit_of(left: int) -> TaskLimit:
    return TaskLimit(left + 7, 7, "ulimit -u", "raise `ulimit -u`")


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Any number of files, until a test says otherwise."""
    monkeypatch.setattr(workers, "read_file_limit", lambda: None)
    monkeypatch.setattr(workers, "count_open_files", lambda: 10)
    return monkeypatch


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("wanted", [1, 8])
def test_without_limits_there_are_as_many_as_were_asked_for(wanted: int) -> None:
    assert fit_workers(wanted, 2, None, environ=ONE) == (wanted, "")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("fit", [0, 1, 3])
def test_each_rank_has_its_part_of_the_processes_that_are_left(ranks: int, fit: int) -> None:
    enough = ranks * (SPARE_TASKS + 2 * OWN_TASKS * fit)
    assert fit_workers(3, ranks, limit_of(enough), environ=ONE)[0] == fit
    assert fit_workers(3, ranks, limit_of(enough - 1), environ=ONE)[0] == max(0, fit - 1)


@pytest.mark.usefixtures("files")
def test_threads_that_are_to_come_count() -> None:
    limit = limit_of(SPARE_TASKS + 2 * OWN_TASKS + 7)
    assert fit_workers(4, 1, limit, 7, ONE)[0] == 1
    assert fit_workers(4, 1, limit, 8, ONE)[0] == 0


@pytest.mark.usefixtures("files")
def test_threads_of_libraries_count() -> None:
    limit = limit_of(SPARE_TASKS + 2 * OWN_TASKS * 4)
    assert fit_workers(4, 1, limit, environ=ONE)[0] == 4
    assert fit_workers(4, 1, limit, environ={"OMP_NUM_THREADS": "6,2"})[0] == 2
    assert fit_workers(4, 1, limit, environ={"OMP_NUM_THREADS": "6", "OPENBLAS_NUM_THREADS": "1"})[0] == 4


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("left", "words"),
    [
        (1, "so the rank reads its batches itself. To do: raise `ulimit -u`, or set data.workers = 0."),
        (30, "so the rank has 1 loader process. To do: raise `ulimit -u`, or set data.workers = 1."),
        (40, "so the rank has 2 loader processes."),
    ],
)
def test_it_is_said_why(left: int, words: str) -> None:
    _, told = fit_workers(8, 1, limit_of(left), environ=ONE)
    assert told.startswith(f"ulimit -u allows {left + 7} processes and threads, of which 7 are there: too few for")
    assert words in told


@pytest.mark.parametrize(("most", "fit"), [(10, 0), (41, 0), (42, 1), (50, 2), (65536, 4)])
def test_open_files_count_for_each_rank_alone(files: pytest.MonkeyPatch, most: int, fit: int) -> None:
    files.setattr(workers, "read_file_limit", lambda: most)
    found, told = fit_workers(4, 8, None, environ=ONE)
    assert found == fit
    assert (f"ulimit -n allows {most} open files" in told) is (fit < 4)


def test_the_tighter_limit_is_named(files: pytest.MonkeyPatch) -> None:
    files.setattr(workers, "read_file_limit", lambda: 50)
    assert "ulimit -u" in fit_workers(4, 1, limit_of(1), environ=ONE)[1]
    assert "ulimit -n" in fit_workers(4, 1, limit_of(1000), environ=ONE)[1]
