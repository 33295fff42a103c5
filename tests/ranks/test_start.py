"""Ranks that act together: the same error on all, sums, and what is said when some do not come."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pool import ranks
from ports import free_port
from runs import lone_rank, place, pool_ranks
from shardway.errors import Bug, JobError, LostContact, ShardwayError, SiteError, UserError
from shardway.ranks import start
from shardway.ranks.start import StartOptions, is_lost_contact, start_ranks
from shardway.ranks.stop import Decision, StepRequests, read_decision


@ranks(4)
def test_values_are_gathered_in_order_and_summed(rank: int) -> None:
    on = pool_ranks()
    assert on.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}, {"rank": 3}]
    assert on.sum(torch.tensor([1.0, float(rank)], dtype=torch.float64)).tolist() == [4.0, 6.0]
    assert (on.rank, on.world, on.is_first) == (rank, 4, rank == 0)


def test_a_process_alone_gathers_itself() -> None:
    on = lone_rank()
    assert on.gather(7) == [7]
    assert on.sum(torch.tensor([2.5])).tolist() == [2.5]
    assert on.together(lambda: "done") == "done"
    assert on.first_then_all(lambda: "done") == "done"
    on.barrier()
    on.end()


def fail_on(rank: int, culprit: int, error: BaseException) -> Callable[[], int]:
    def work() -> int:
        if rank == culprit:
            raise error
        return rank * 10

    return work


@pytest.mark.parametrize("kind", [UserError, SiteError, JobError, Bug])
@ranks(4)
def test_an_error_of_one_rank_is_raised_on_all(rank: int, kind: type[ShardwayError]) -> None:
    on = pool_ranks()
    for culprit in (0, 3):
        with pytest.raises(kind) as failure:
            on.together(fail_on(rank, culprit, kind(f"rank {culprit} says no\n  To do: nothing.")))
        assert type(failure.value) is kind
        assert str(failure.value) == f"rank {culprit} says no\n  To do: nothing."
    assert on.together(fail_on(rank, 9, kind("never"))) == rank * 10


@ranks(2)
def test_an_unexpected_error_is_a_bug_on_all(rank: int) -> None:
    with pytest.raises(Bug) as failure:
        pool_ranks().together(fail_on(rank, 1, ZeroDivisionError("division by zero")))
    assert str(failure.value) == "ZeroDivisionError: division by zero"
    assert isinstance(failure.value.__cause__, ZeroDivisionError) == (rank == 1)


@ranks(2)
def test_what_the_first_finds_is_known_to_all(rank: int) -> None:
    on, order = pool_ranks(), []

    def work() -> int:
        order.append(rank)
        return rank + 100

    assert on.ask_first(work) == 100
    assert order == [0] * (rank == 0)
    with pytest.raises(UserError, match="rank 0 says no"):
        on.ask_first(fail_on(rank, 0, UserError("rank 0 says no")))


@ranks(2)
def test_the_first_goes_first(rank: int) -> None:
    """What rank 0 prepares is there when the others look, and each keeps what it found itself."""
    on, order = pool_ranks(), []

    def work() -> int:
        order.append(torch.distributed.get_rank())
        return rank + 100

    assert on.first_then_all(work) == rank + 100
    assert order == [rank]


@ranks(2)
def test_what_fails_on_the_first_is_not_tried_by_the_others(rank: int) -> None:
    tried = []

    def work() -> None:
        tried.append(rank)
        raise UserError("no data")

    with pytest.raises(UserError, match=r"^no data$"):
        pool_ranks().first_then_all(work)
    assert tried == ([0] if rank == 0 else [])


def test_lost_contact_says_when(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = replace(lone_rank(), placement=place(0, 2, "none"))
    with pytest.raises(LostContact) as failure, pair.contact("during a step"):
        raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:1\nmore")
    first, second = str(failure.value).splitlines()
    assert first.startswith("rank 0 lost contact with another rank during a step: ")
    assert "onnection closed by peer" in first
    assert second == (
        "  A rank of this job has died or hangs. To do: look for the rank whose own message is an error (its log or "
        "its events), then run the same command again: it goes on from the last checkpoint."
    )


def test_a_rank_that_gave_up_waiting_in_gloo_has_lost_contact() -> None:
    assert is_lost_contact(RuntimeError("Application timeout caused pair closure"))


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("gloo")])
def test_other_errors_pass_through_contact(error: Exception) -> None:
    with pytest.raises(type(error)) as failure, lone_rank().contact("during a step"):
        raise error
    assert failure.value is error
    assert not is_lost_contact(error)


OPTIONS = StartOptions("cpu", torch.get_num_threads(), start_timeout_s=0.5, collective_timeout_s=0.4)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_told(rank: int) -> None:
    """Rank 0 waits for the others, and the others for rank 0."""
    port = free_port()
    with pytest.raises(SiteError) as failure:
        start_ranks(place(rank, 2, port=port), OPTIONS)
    first, here, second = str(failure.value).splitlines()
    where = re.escape(f"127.0.0.1:{port}")
    assert re.fullmatch(rf"rank {rank} of 2 could not meet the others at {where} in [0-9.]+m?s: \S.*", first)
    assert here == "  Here 127.0.0.1 is 127.0.0.1."
    assert second == (
        "  To do: check that every rank was started, that the address is reachable from every node and the port is "
        "free (MASTER_ADDR, MASTER_PORT); if ranks start slowly, raise run.start_timeout."
    )
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("launcher", ["srun", "ft_launcher"])
def test_who_holds_a_port_that_was_named_is_told(launcher: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(SiteError) as failure:
            start_ranks(place(0, 2, launcher, port=port), OPTIONS)
    first, second = str(failure.value).splitlines()
    start = (
        f"rank 0 of 2 cannot listen at 127.0.0.1:{port} (MASTER_PORT): port {port} is held by process {os.getpid()} ("
    )
    assert first.startswith(start)
    assert second == (
        "  To do: unset MASTER_PORT, and ranks of srun, mpirun or mpiexec find a free port; or export another one for "
        "all ranks; or end that process, if it was left over."
    )


def test_ranks_that_a_foreign_program_answers_give_up_in_time() -> None:
    """torch would wait without a limit for the answer of one that is no store."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(SiteError, match=r"could not meet the others at .*: port \d+: no answer"):
            start_ranks(place(1, 2, "srun", port=holder.getsockname()[1]), OPTIONS)


def test_a_rank_of_its_own_has_a_group_and_leaves_none() -> None:
    on = start_ranks(place(0, 1, port=0), StartOptions("cpu", torch.get_num_threads(), 30.0, 20.0))
    assert on.grouped
    assert on.gather(3) == [3]
    on.end()
    assert not torch.distributed.is_initialized()


def test_a_device_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SiteError) as failure:
        start_ranks(place(0, 1, "none"), StartOptions("cuda", torch.get_num_threads()))
    assert str(failure.value) == (
        f"rank 0 is number 1 on its node, where torch {torch.__version__} sees 0 CUDA devices.\n"
        '  To do: start at most as many ranks a node as it has devices, or set run.device = "cpu"; if the node has '
        "devices, check the driver and that this torch is a CUDA build."
    )


def show_devices(monkeypatch: pytest.MonkeyPatch, seen: Sequence[str]) -> None:
    """Let torch see these devices."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=seen[device.index]))


@pytest.mark.parametrize(
    ("seen", "chosen"),
    [
        (["ab12"] * 4, "ab12"),  # all see the same devices
        (["a", "b", "1", "2"], "ab12"),  # --gpus-per-task=1, MIG slices
        (["12", "12", "ab", "ab"], "12ab"),  # --gpu-bind=closest (Lightning-AI/pytorch-lightning#13605)
        (["ab", "ab", "12", "12"], "ab12"),
        (["ab12c"] * 4, "ab12"),
    ],
)
def test_each_rank_of_a_node_has_a_device_of_its_own(
    seen: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, devices = torch.distributed.HashStore(), []
    for rank, names in enumerate(seen):
        show_devices(monkeypatch, names)
        device = start._choose_device(place(rank, 4, "srun"), "cuda")
        devices.append(names[device.index])
        store.set(f"{start._DEVICE}{rank}", devices[-1])
    assert "".join(devices) == chosen
    for rank, names in enumerate(seen):
        show_devices(monkeypatch, names)
        device = torch.device("cuda", names.index(devices[rank]))
        start._check_own_device(place(rank, 4, "srun"), device, store)


def test_ranks_that_share_a_device_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    for rank in range(4):
        store.set(f"{start._DEVICE}{rank}", "ab"[rank % 2])
    show_devices(monkeypatch, "ab")
    with pytest.raises(SiteError, match=r"ranks 1, 3 have one device between them \(GPU-b\)"):
        start._check_own_device(place(3, 4, "srun"), torch.device("cuda", 1), store)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("^lo", "names without =, ^"),
        ("=eth0", "names without =, ^"),
        ("192.0.2.7", "names"),
        ("no-such0", "names"),
        ("l", "names"),
    ],
)
def test_an_interface_that_is_not_there_is_told_before_ranks_meet(
    text: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's notation (aws-samples/aws-do-eks#51), an address (AMD-AGI/Primus#1063), another machine's name."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", text)
    with pytest.raises(SiteError) as failure:
        start_ranks(place(1, 2, "srun", port=free_port()), OPTIONS)
    first, second, third = str(failure.value).splitlines()
    assert first == f"GLOO_SOCKET_IFNAME={text}: {socket.gethostname()} has no such interface that is up."
    assert allowed in second
    assert "unset GLOO_SOCKET_IFNAME" in third


def test_wishes_fill_their_slots() -> None:
    assert len(StepRequests().as_numbers()) == 8
    assert StepRequests(stop_signal=True).as_numbers() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert StepRequests(stop_file=True, save=True).as_numbers() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert StepRequests(deadline=True).as_numbers() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert StepRequests(void=True).as_numbers() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert StepRequests(log=True).as_numbers() == [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert StepRequests(profile=True).as_numbers() == [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert StepRequests(finish=True).as_numbers() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("summed", "decision"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0], Decision()),
        ([0, 0, 0, 0, 0, 0, 2, 0], Decision(log=True)),
        ([0, 0, 0, 0, 0, 0, 0, 1], Decision(profile=True)),
        ([3, 0, 0, 0, 0, 0, 0, 0], Decision("a signal asked for a stop")),
        ([0, 1, 0, 0, 0, 0, 0, 0], Decision("the stop file asked for a stop")),
        ([1, 1, 2, 0, 0, 0, 0, 0], Decision("a signal asked for a stop and the stop file asked for a stop", save=True)),
        ([0, 0, 1, 0, 0, 0, 0, 0], Decision(save=True)),
        ([0, 0, 0, 1, 0, 0, 0, 0], Decision("the wall-time is about to end", deadline=True)),
        ([2, 0, 0, 1, 0, 0, 0, 0], Decision("a signal asked for a stop and the wall-time is about to end")),
        ([0, 1, 0, 0, 1, 0, 0, 0], Decision("the stop file asked for a stop", void=True)),
        ([0, 0, 0, 0, 2, 0, 0, 0], Decision("a rank gave up waiting for its data", void=True)),
        ([0, 0, 0, 0, 1, 1, 0, 0], Decision(void=True, finish=True)),
        ([1, 0, 0, 0, 0, 2, 0, 0], Decision("a signal asked for a stop", finish=True)),
    ],
)
def test_a_wish_of_any_rank_decides(summed: list[float], decision: Decision) -> None:
    assert read_decision(summed) == decision
