"""Rows of text in a SQLite file as data for Shardway: what a run file asks of it, without NumPy."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from shardway.data.kinds import DataKind


class SqliteTextKind(DataKind):
    """A text column of a table; a sample is the first data.seq_len + 1 bytes of a row."""

    gives = ("tokens",)
    settings = MappingProxyType({"table": "documents", "column": "text"})

    def open(self, place: Any, request: Any) -> Any:
        from shardway_sqlite_text.source import open_rows

        return open_rows(place, request, **self.read_settings(request.section.settings))
