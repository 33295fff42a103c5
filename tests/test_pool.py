"""The pool of ranks itself: what a failure, a skip, a leak, a hang and a death on one rank look like to pytest."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import leaks as leaks_module
import warm
from leaks import list_leaks, restore, take_footprint
from pool import RankPool, ranks
from speed import picked


@ranks(2)
def test_ranks_share_a_group(rank: int) -> None:
    import torch

    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    assert total.item() == 3.0
    assert torch.distributed.get_rank() == rank


@ranks(4)
def test_four_ranks(rank: int) -> None:
    import torch

    gathered = [torch.zeros(1, dtype=torch.long) for _ in range(4)]
    torch.distributed.all_gather(gathered, torch.tensor([rank]))
    assert [int(value) for value in gathered] == [0, 1, 2, 3]


@pytest.mark.parametrize("word", ["first", "second"])
@ranks(2)
def test_fixtures_and_parameters_reach_the_ranks(rank: int, tmp_path: Path, word: str) -> None:
    import torch

    (tmp_path / f"{rank}").write_text(word)
    torch.distributed.barrier()
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == [word, word]


@pytest.mark.parametrize("turn", [0, 1])
@ranks(2)
def test_every_test_starts_with_the_same_seed(rank: int, turn: int) -> None:
    import torch

    assert torch.initial_seed() == 0
    assert torch.get_num_threads() == 1


@ranks(2)
def test_a_body_may_replace_the_group_if_it_destroys_its_own(rank: int, tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
    assert dist.get_world_size() == 2
    dist.barrier()  # one that is still joining when its peer leaves has no group
    dist.destroy_process_group()


@ranks(2)
@pytest.mark.filterwarnings("ignore:on purpose")
def test_the_marks_of_a_test_hold_on_its_ranks(rank: int) -> None:
    warnings.warn("on purpose", stacklevel=1)
    assert warnings.filters[0][:1] == ("ignore",)


def body_passes(rank: int) -> None:
    """Meets the other ranks and passes."""
    import torch

    torch.distributed.barrier()


def body_fails_on_1(rank: int) -> None:
    """Rank 1 fails while the others wait for it in a collective."""
    import torch

    print(f"hello from {rank}")
    torch.distributed.barrier()  # a rank that is still joining when its peer leaves has said nothing
    three = 3
    if rank == 1:
        assert three == 4, "not four"
    torch.distributed.barrier()


def body_skips(rank: int) -> None:
    """Every rank skips."""
    pytest.skip("no such device")


def body_skips_on_0_fails_on_1(rank: int) -> None:
    """A failure weighs more than a skip."""
    if rank == 0:
        pytest.skip("no such device")
    raise ValueError("one is wrong")


def body_warns(rank: int) -> None:
    """A warning without a filter that allows it."""
    warnings.warn("old name", DeprecationWarning, stacklevel=1)


def body_leaks_variable(rank: int) -> None:
    """Rank 0 leaves a variable behind."""
    if rank == 0:
        os.environ["LEFT_BEHIND"] = "1"


def body_leaks_group(rank: int, store: str) -> None:
    """Leaves a group behind that is not the pool's."""
    import torch.distributed as dist

    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def body_leaks_dtype(rank: int) -> None:
    """Leaves another default dtype behind."""
    import torch

    torch.set_default_dtype(torch.float64)


def body_leaves_copies_in_a_circle(rank: int, told: str) -> None:
    """DDP's Reducer is freed by the collection of rubbish alone, and says whether its group was still there."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def tell() -> None:
        Path(f"{told}/{rank}").write_text(str(torch.distributed.is_initialized()))

    copies = DistributedDataParallel(torch.nn.Linear(2, 2))
    copies.circle = [copies]  # type: ignore[assignment]
    weakref.finalize(copies, tell)


def body_sleeps_on_1(rank: int) -> None:
    """Rank 1 never arrives."""
    if rank == 1:
        time.sleep(3600)


def body_dies_on_1(rank: int) -> None:
    """Rank 1 is killed while the others wait for it in a collective."""
    import torch

    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def body_joins_nobody(rank: int) -> None:
    """A group of its own that cannot be made, on rank 1 alone."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=0.1))
        dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timedelta(seconds=0.1))


def body_crashes_on_1(rank: int) -> None:
    """As a library with a defect does."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def fail_text(pool: RankPool, body: Callable[..., None], timeout_s: float = 60.0, **arguments: Any) -> str:
    """What pytest shows when this body fails on two ranks."""
    with pytest.raises(pytest.fail.Exception) as caught:
        pool.run(body, 2, arguments, timeout_s)
    return str(caught.value)


def test_a_failing_ranks_traceback_is_the_tests(rank_pool: RankPool) -> None:
    text = fail_text(rank_pool, body_fails_on_1)
    head, first, second = text.split("\n\n", 2)
    assert head == "body_fails_on_1 on 2 ranks; failed: 1, 0; did not arrive: none; passed: none", text
    assert first.startswith("rank 1: Traceback (most recent call last):\n")
    assert "assert three == 4" in first
    assert "AssertionError: not four\nassert 3 == 4\noutput:\nhello from 1" in first
    assert "pool_worker.py" not in first
    assert second.startswith("rank 0: Traceback (most recent call last):\n")
    assert second.endswith("output:\nhello from 0")


def test_a_failure_leaves_the_ranks_alive_and_fresh(rank_pool: RankPool) -> None:
    rank_pool.run(body_passes, 2, {})
    before = rank_pool.pids
    fail_text(rank_pool, body_fails_on_1)
    rank_pool.run(body_passes, 2, {})
    assert rank_pool.pids == before


def test_a_skip_on_the_ranks_skips(rank_pool: RankPool) -> None:
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        rank_pool.run(body_skips, 2, {})


def test_a_failure_weighs_more_than_a_skip(rank_pool: RankPool) -> None:
    text = fail_text(rank_pool, body_skips_on_0_fails_on_1)
    assert "ValueError: one is wrong" in text
    assert text.endswith("rank 0: skipped: no such device")


def test_a_warning_on_a_rank_is_an_error(rank_pool: RankPool) -> None:
    assert "DeprecationWarning: old name" in fail_text(rank_pool, body_warns)


def test_a_leaked_variable_fails_its_test_only(rank_pool: RankPool) -> None:
    text = fail_text(rank_pool, body_leaks_variable)
    assert text.endswith("rank 0: the test leaves behind:\n  environment variable LEFT_BEHIND: None became '1'")
    rank_pool.run(body_passes, 2, {})


def test_a_leaked_group_is_named(rank_pool: RankPool, tmp_path: Path) -> None:
    text = fail_text(rank_pool, body_leaks_group, store=str(tmp_path / "store"))
    assert text.count("the test leaves behind:\n  a default process group of its own") == 2


def test_a_leaked_dtype_is_named(rank_pool: RankPool) -> None:
    text = fail_text(rank_pool, body_leaks_dtype)
    assert text.count("torch's default dtype: torch.float32 became torch.float64") == 2


def test_what_a_body_leaves_in_circles_goes_before_its_groups(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(body_leaves_copies_in_a_circle, 2, {"told": str(tmp_path)})
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["True", "True"]


def test_an_argument_that_does_not_pickle_is_named(rank_pool: RankPool) -> None:
    with pytest.raises(TypeError, match="argument 'made' of body_passes does not pickle"):
        rank_pool.run(body_passes, 2, {"made": lambda: None})


def test_a_body_without_rank_is_refused() -> None:
    def no_rank(tmp_path: Path) -> None: ...

    with pytest.raises(TypeError, match="no_rank is not a function at the top of its module"):
        ranks(2)(no_rank)


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    """A pool for tests that destroy it."""
    pool = RankPool()
    yield pool
    pool.close()


def test_a_hang_names_the_ranks_that_did_not_arrive(own_pool: RankPool) -> None:
    own_pool.run(body_passes, 2, {})  # what the first group of a process takes is no hang
    text = fail_text(own_pool, body_sleeps_on_1, timeout_s=4.0)
    head, missing = text.split("\n\n", 1)
    assert head == "body_sleeps_on_1 on 2 ranks; failed: none; did not arrive: 1; passed: 0"
    assert missing.startswith("rank 1: did not arrive within 4 s; its stacks:\n")
    assert re.search(r'File ".*test_pool.py", line \d+ in body_sleeps_on_1', missing)
    assert own_pool.pids == []


def test_a_killed_rank_is_named_with_its_signal_and_the_pool_starts_anew(own_pool: RankPool) -> None:
    text = fail_text(own_pool, body_dies_on_1)
    assert text.startswith("body_dies_on_1 on 2 ranks; failed: 1")
    assert "rank 1: killed by SIGKILL" in text
    own_pool.run(body_passes, 2, {})
    assert len(own_pool.pids) == 2


def test_a_group_that_was_not_made_to_the_end_spoils_the_pool(own_pool: RankPool) -> None:
    """Names of groups are counted: that of the next one would not be the same on all ranks."""
    own_pool.run(body_passes, 2, {})
    before = own_pool.pids
    assert "failed: 1" in fail_text(own_pool, body_joins_nobody)
    own_pool.run(body_passes, 2, {})
    assert not set(before) & set(own_pool.pids)


def test_the_first_test_of_new_ranks_may_fail(own_pool: RankPool) -> None:
    text = fail_text(own_pool, body_fails_on_1)
    assert text.startswith("body_fails_on_1 on 2 ranks; failed: 1, 0; did not arrive: none"), text


def test_a_rank_that_crashed_shows_where_it_was(own_pool: RankPool) -> None:
    text = fail_text(own_pool, body_crashes_on_1)
    assert "rank 1: killed by SIGSEGV\noutput:\nFatal Python error: Segmentation fault" in text
    assert re.search(r'File ".*test_pool.py", line \d+ in body_crashes_on_1', text)
    assert re.search(r"SIGSEGV\(11\), PID: \d+, Thread \d+: *\n *frame #0: ", text), "nor its native stack"


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts with "&"
sys.path.insert(0, sys.argv[1])
import test_pool
from pool import RankPool
pool = RankPool()
pool.run(test_pool.body_passes, 1, {})
print(*pool.pids, flush=True)
pool.run(test_pool.body_never_ends, 1, {})
"""


def body_never_ends(rank: int) -> None:
    """Sleeps until it is killed."""
    time.sleep(3600)


@pytest.mark.parametrize("number", picked([signal.SIGKILL, signal.SIGINT, signal.SIGTERM], signal.SIGKILL))
def test_no_rank_outlives_its_parent(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, str(Path(__file__).parent)]
    with warm.starts():
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.send_signal(number)
        parent.wait(timeout=60)
    deadline = time.monotonic() + 60
    while _is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(worker)


def _is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but has not been waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may go between the opening and the reading
        return False


def test_every_kind_of_leak_is_named_and_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks_module, "THREADS_END_S", 0.1)
    before = take_footprint()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="left")
    thread.start()
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(tmp_path)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    leaks = list_leaks(before)
    done.set()
    thread.join()
    restore(before)
    assert [leak.split(":")[0] for leak in leaks] == [
        "environment variable LEFT_BEHIND",
        "thread left still runs",
        "handler of SIGUSR2",
        "working folder",
    ]
    assert list_leaks(before) == []


def test_the_leak_check_is_cheap() -> None:
    """It runs around every test: below a millisecond, at best of fifty on a machine that may be busy."""
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        leaks = list_leaks(take_footprint())
        seconds.append(time.perf_counter() - start)
        assert leaks == []
    assert min(seconds) < 1e-3
