"""The port at which ranks meet: where programs of others hold what follows from the launch, and where one was named."""

from __future__ import annotations

import errno
import getpass
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from ports import free_port
from runs import place
from shardway.ranks import network as port_module
from shardway.ranks.launcher import Placement, list_ports
from shardway.ranks.network import NoMeeting, PortTaken, agree_on_port, describe_holder


@pytest.fixture
def launch() -> str:
    """What a launch may be called whose ports are all free here."""

    def is_free(name: str) -> bool:
        with ExitStack() as stack:
            try:
                for each in list_ports(name):
                    stack.enter_context(socket.create_server(("", each)))
            except OSError:
                return False
        return True

    return next(name for number in range(1000) if is_free(name := f"{os.getpid()}.{number}"))


@contextmanager
def held(port: int, answer: bytes | None) -> Iterator[list[bytes]]:
    """A program of somebody else at a port of this machine: what it hears; `answer` None is silence."""
    collectives: list[bytes] = []
    kept: list[socket.socket] = []
    with socket.create_server(("", port)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                collectives.append(connection.recv(1000))
                if answer is None:
                    kept.append(connection)
                    continue
                connection.sendall(answer)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield collectives
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def named(rank: int, world: int, launch: str) -> Placement:
    return replace(place(rank, world, "srun", list_ports(launch)[0]), launch=launch)


def meet(placements: list[Placement], wait_s: float = 30.0) -> list[int]:
    with ThreadPoolExecutor(len(placements)) as pool:
        return list(pool.map(lambda each: agree_on_port(each, wait_s), placements))


def test_a_launch_meets_at_its_first_port(launch: str) -> None:
    assert meet([named(rank, 3, launch) for rank in range(3)]) == [list_ports(launch)[0]] * 3


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["web", "closes", "silent"])
def test_a_port_that_a_program_of_others_holds_is_avoided(
    launch: str, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EleutherAI/gpt-neox#768, NVIDIA/enroot#243; torch would wait for the silent one without a limit."""
    monkeypatch.setattr(port_module, "_ANSWER_S", 0.3)
    first, second, *_ = list_ports(launch)
    with held(first, answer):
        assert meet([named(rank, 3, launch) for rank in range(3)]) == [second] * 3


def test_two_launches_of_one_port_do_not_mix(launch: str) -> None:
    """Ranks of two jobs on a shared node whose numbers give the same port."""
    other = replace(place(0, 2, "srun"), launch=launch)
    joined: list[Callable[[], int]] = [
        lambda: agree_on_port(other, 30.0),
        lambda: agree_on_port(replace(other, rank=1, local_rank=1), 30.0),
        lambda: agree_on_port(replace(named(0, 3, launch)), 30.0),
        lambda: agree_on_port(replace(named(1, 3, launch)), 30.0),
        lambda: agree_on_port(replace(named(2, 3, launch)), 30.0),
    ]
    with ThreadPoolExecutor(len(joined)) as pool:
        ports = [future.result() for future in [pool.submit(each) for each in joined]]
    assert len(set(ports[:2])) == len(set(ports[2:])) == 1


def test_ranks_that_do_not_come_are_named(launch: str) -> None:
    with pytest.raises(NoMeeting, match=r"^1 of 3 others came, and not rank 2, 3$"):
        meet([named(rank, 4, launch) for rank in (0, 1)], wait_s=0.5)


def test_each_port_that_did_not_lead_to_rank_0_is_told(launch: str) -> None:
    first, second, *_ = list_ports(launch)
    with held(first, b"SSH-2.0\r\n"), pytest.raises(NoMeeting) as failure:
        agree_on_port(named(1, 2, launch), 0.3)
    assert f"port {first}: something that is not rank 0 of this launch answered" in str(failure.value)
    assert f"port {second}: Connection refused" in str(failure.value)


def test_of_ports_that_are_all_taken_the_holders_are_told(launch: str) -> None:
    with ExitStack() as stack:
        for each in list_ports(launch):
            stack.enter_context(held(each, b""))
        with pytest.raises(PortTaken, match=f"is held by process {os.getpid()} ") as failure:
            agree_on_port(named(0, 2, launch), 5.0)
    assert str(failure.value).count("is held by") == len(list_ports(launch))


def test_a_port_that_was_named_is_the_only_one() -> None:
    port = free_port()
    assert meet([place(rank, 2, "srun", port) for rank in range(2)]) == [port, port]
    with held(port, b""), pytest.raises(PortTaken):
        agree_on_port(place(0, 2, "srun", port), 5.0)


def test_a_port_that_may_not_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One below 1024, as an ordinary user."""

    def refuse(address: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(PortTaken, match=r"^port 80: Permission denied$"):
        agree_on_port(place(0, 2, "srun", 80), 5.0)


def test_ranks_meet_where_ipv6_is_switched_off(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def without_ipv6(address: tuple[str, int], *, family: int = socket.AF_INET, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    assert meet([named(rank, 2, launch) for rank in range(2)]) == [list_ports(launch)[0]] * 2


def test_who_holds_a_port_is_told_as_far_as_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        told = describe_holder(port)
        assert told.startswith(f"port {port} is held by process {os.getpid()} (")
        assert told.endswith(f") of {getpass.getuser()}")
        monkeypatch.setattr("psutil.net_connections", lambda kind: [])  # as of processes of others
        assert describe_holder(port) == f"port {port} is held by a process of {getpass.getuser()}"
    assert describe_holder(port) == f"port {port} is taken"
