"""Sockets that know when their bytes came, however late they are read."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from shardway.bench.inference.stamped_socket import StampedSocket

Pair = tuple[socket.socket, StampedSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection over loopback: the sender and the stamped receiver."""
    with socket.create_server(("127.0.0.1", 0)) as listener, StampedSocket() as receiver:
        receiver.connect(listener.getsockname())
        sender, _ = listener.accept()
        with sender:
            yield sender, receiver


def _read_by_recv(receiver: StampedSocket) -> bytes:
    return receiver.recv(100)


def _read_into(receiver: StampedSocket) -> bytes:
    buffer = bytearray(100)
    return bytes(buffer[: receiver.recv_into(buffer)])


READS = pytest.mark.parametrize("read", [_read_by_recv, _read_into])
_WAIT_S = 0.05


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux stamps what TCP receives")
@READS
def test_the_time_is_of_the_arrival_and_not_of_the_read(pair: Pair, read: Callable[[StampedSocket], bytes]) -> None:
    sender, receiver = pair
    receiver.ask_for_stamps()
    deadline = time.perf_counter() + 10.0
    while receiver.take_arrival() is None:  # the kernel begins to stamp a moment after the first socket asked
        assert time.perf_counter() < deadline
        sender.sendall(b"-")
        read(receiver)
    began = time.perf_counter()
    sender.sendall(b"abc")
    sent = time.perf_counter()
    while time.perf_counter() < sent + _WAIT_S:
        pass
    called = time.perf_counter()
    assert read(receiver) == b"abc"
    took = time.perf_counter() - called  # two clocks are read in it, one after the other
    arrived = receiver.take_arrival()
    assert arrived is not None
    assert began - took <= arrived <= sent + took
    assert receiver.take_arrival() is None  # that of the next read is not known yet


@READS
def test_without_stamps_it_is_any_socket(pair: Pair, read: Callable[[StampedSocket], bytes]) -> None:
    sender, receiver = pair
    sender.sendall(b"abc")
    assert (read(receiver), receiver.take_arrival()) == (b"abc", None)
