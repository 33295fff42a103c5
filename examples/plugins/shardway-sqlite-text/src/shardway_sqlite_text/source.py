"""The samples: row i + 1 of the table, as bytes, zero bytes where it is too short.

Invariant: a process opens the file for itself, at its first batch, and never writes.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import numpy as np

from shardway.data.content import DataPath, fingerprint
from shardway.data.sources.base import Arrays, DataRequest, Ids, SourceFacts

MOST = 500
"""Rows that one query asks for."""


class SqliteRows:
    """Samples of `seq_len` bytes: inputs [n, L], targets [n, L] one byte later."""

    def __init__(self, place: DataPath, facts: SourceFacts, rows: int, query: str) -> None:
        self.place, self.facts, self._rows, self._query = place, facts, rows, query
        self._connection: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    @property
    def tokens_per_sample(self) -> int:
        return self.facts.sample_shape[0]

    def batch(self, ids: Ids) -> Arrays:
        if self._connection is None:
            self._connection = connect(self.place)
        length = self.tokens_per_sample + 1
        keys, found = [int(id) + 1 for id in ids], {}
        for first in range(0, len(keys), MOST):
            some = keys[first : first + MOST]
            found |= dict(self._connection.execute(self._query.format(",".join("?" * len(some))), (length, *some)))
        if missing := sorted(set(keys) - found.keys()):
            raise self.place.error(f"has no row {missing[0]}", remedy="number the rows from 1 on, without a gap")
        rows = np.zeros((len(keys), length), np.int64)
        for row, key in zip(rows, keys, strict=True):
            text = np.frombuffer(found[key] or b"", np.uint8)
            row[: len(text)] = text
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def open_rows(place: DataPath, request: DataRequest, table: str, column: str) -> SqliteRows:
    """The samples of a table; UserError for a file or a table that is not there, or a hole among its rows."""
    if not place.path.is_file():
        raise place.error("does not exist", allowed="a SQLite file")
    names = '"{}"'.format(table.replace('"', '""')), '"{}"'.format(column.replace('"', '""'))
    try:
        with connect(place) as connection:
            rows, last = connection.execute(f"select count(*), max(rowid) from {names[0]}").fetchone()
            connection.execute(f"select {names[1]} from {names[0]} limit 1")
    except sqlite3.Error as error:
        raise place.error(f"cannot be read: {error}", remedy="check data.settings") from None
    if not rows or rows != last:
        raise place.error(f"has {rows} rows, the last with the number {last}", allowed="rows 1, 2, 3 ... without a gap")
    length = request.section.seq_len
    facts = SourceFacts(
        description=f"{rows} rows of {table}.{column} in {place.path}",
        fingerprint=fingerprint("sqlite", table, column, length, rows, place.path.stat().st_size),
        sample_shape=(length,),
        vocab=256,
        bytes_per_token=1.0,
    )
    query = f"select rowid, cast(substr(cast({names[1]} as blob), 1, ?) as blob) from {names[0]} where rowid in ({{}})"
    return SqliteRows(place, facts, rows, query)


def connect(place: DataPath) -> sqlite3.Connection:
    """The file, read-only; a process may read it from several threads."""
    return sqlite3.connect(f"{place.path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
