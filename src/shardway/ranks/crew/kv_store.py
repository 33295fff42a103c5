"""Where the notes and the news of a crew are: a store that the agent which leads keeps, on its own address.

The ranks of the crew meet in the same store, under other keys (`ranks.processes.Seats`), as those of torchrun do.

Invariant: every call comes back within `WAIT_S` or raises Unreachable. What is read is text of others and may be
anything (`notes`). This module must not judge who is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from shardway.errors import SiteError
from shardway.ranks.crew.notes import News, Note, read_news, read_note, render
from shardway.ranks.port import describe_holder

WAIT_S = 10.0
_NEWS = "shardway/news"


class Unreachable(Exception):
    """The store does not answer: whoever keeps it is gone, or the network is."""


class KeyValueStore:
    """Notes and news in one store."""

    def __init__(self, store: TCPStore, nodes: int) -> None:
        self._store = store
        self._keys = [f"shardway/note-{node}" for node in range(nodes)]
        store.set_timeout(timedelta(seconds=WAIT_S))

    @property
    def port(self) -> int:
        """Where the store listens."""
        return int(self._store.port)

    def write_note(self, node: int, note: Note) -> None:
        """Say how this node is. Raises Unreachable."""
        with _reaching():
            self._store.set(self._keys[node], render(note))

    def read_notes(self) -> list[Note | None]:
        """What each node has said, by node; None for nothing. Raises Unreachable."""
        with _reaching():
            return [read_note(_decode(text)) for text in self._store.multi_get(self._keys)]

    def write_news(self, news: News) -> None:
        """Say how the crew is. Raises Unreachable."""
        with _reaching():
            self._store.set(_NEWS, render(news))

    def read_news(self) -> News | None:
        """What the agent that leads has said. Raises Unreachable."""
        with _reaching():
            return read_news(_decode(self._store.get(_NEWS)))


def host_board(port: int, nodes: int) -> KeyValueStore:
    """A board of this process; `port` 0 chooses one. Raises SiteError where something else listens there."""
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        why = describe_holder(port) if "EADDRINUSE" in str(error) else _first_line(error)
        raise SiteError(
            f"port {port} of this node could not be had, by which the agents of the nodes meet: {why}\n"
            "  To do: choose another port for all of them (--port), or look for a job that was left over."
        ) from error
    board = KeyValueStore(store, nodes)
    for key in board._keys:  # so that reading one that was never written does not wait
        store.set(key, "")
    board.write_news(News())
    return board


def join_board(address: str, port: int, nodes: int, wait_s: float) -> KeyValueStore:
    """The board that the agent at `address` keeps, once it does. Raises Unreachable after `wait_s`."""
    with _reaching():
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=wait_s))
        board = KeyValueStore(store, nodes)
        board.read_news()
        return board


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except (DistError, RuntimeError) as error:
        raise Unreachable(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")
