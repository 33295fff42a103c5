"""The process of a wire: two networks of their own, and what hands on packets from one to the other.

    python relay.py

says the process ids of the two, and obeys the lines of its stdin until that ends: "delay SECONDS" (of what is sent from
then on), "cut" (nothing arrives, nor what was on its way).

Invariant: whatever is made here ends with this process. This module imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import selectors
import socket
import struct
import subprocess
import sys
import time

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "wire0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""From linux/if_tun.h."""
_MOST_BYTES = 1 << 16


def _main() -> None:
    """Make both ends, say their process ids, and hand on packets until stdin ends."""
    ends = [_make_end(address) for address in ADDRESSES]
    print(*(holder.pid for holder, _ in ends), flush=True)
    _hand_on(ends[0][1], ends[1][1])


def _make_end(address: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process in a network of its own, which ends with this one, and the device in it."""
    ours, theirs = socket.socketpair()
    with theirs:
        holder = subprocess.Popen(
            ["unshare", "--net", sys.executable, __file__, address, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
        )
    _, (device,), _, _ = socket.recv_fds(ours, 1, 1)
    ours.detach()  # stays open as long as this process lives
    return holder, device


def _hold_end(address: str, theirs: int) -> None:
    """Make the device, give it away, and wait for the end of whoever asked."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for words in (f"address add {address}/24 dev {DEVICE}", f"link set {DEVICE} up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)
    with socket.socket(fileno=theirs) as asker:
        socket.send_fds(asker, [b"."], [device])
        asker.recv(1)


def _hand_on(first: int, second: int) -> None:
    waiting: list[tuple[float, int, int, bytes]] = []
    order, delay_s = itertools.count(), 0.0
    is_cut = False
    with selectors.DefaultSelector() as selector:
        for source in (sys.stdin.fileno(), first, second):
            selector.register(source, selectors.EVENT_READ)
        while True:
            rest = waiting[0][0] - time.monotonic() if waiting else None
            for key, _ in selector.select(rest):
                read = os.read(key.fd, _MOST_BYTES)
                if key.fd != sys.stdin.fileno():
                    other = second if key.fd == first else first
                    heapq.heappush(waiting, (time.monotonic() + delay_s, next(order), other, read))
                    continue
                if not read:
                    return
                word, *number = read.decode().splitlines()[-1].split()
                is_cut, delay_s = word == "cut", float(number[0]) if number else 0.0
            while waiting and (is_cut or waiting[0][0] <= time.monotonic()):
                _, _, target, packet = heapq.heappop(waiting)
                if not is_cut:
                    with contextlib.suppress(OSError):  # a device that nobody has brought up yet
                        os.write(target, packet)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _hold_end(sys.argv[1], int(sys.argv[2]))
    else:
        _main()
