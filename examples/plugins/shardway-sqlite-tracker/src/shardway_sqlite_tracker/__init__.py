"""A tracker for Shardway that writes the numbers of all runs into one SQLite file."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardway.watch.trackers.base import Tracker

TABLES = """
create table if not exists runs (id text primary key, name text, directory text, state text, configuration text);
create table if not exists numbers (run text, step integer, name text, value real, time real,
                                    primary key (run, step, name)) without rowid;
"""


class SqliteTracker(Tracker):
    """Tables `runs` and `numbers`; several runs may write into one file."""

    settings = MappingProxyType({"file": "runs.db"})

    def start(self, name: str, directory: Path, configuration: Mapping[str, Any], id: str | None) -> str:
        self._run = id or uuid.uuid4().hex
        self._file = sqlite3.connect(self.given["file"], timeout=60, isolation_level=None)
        self._file.executescript(TABLES)
        row = (self._run, name, str(directory.resolve()), "running", json.dumps(configuration))
        self._file.execute("insert or replace into runs values (?, ?, ?, ?, ?)", row)
        return self._run

    def rewind(self, step: int) -> None:
        self._file.execute("delete from numbers where run = ? and step > ?", (self._run, step))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        rows = [(self._run, step, name, value, time) for name, value in values.items()]
        self._file.executemany("insert or replace into numbers values (?, ?, ?, ?, ?)", rows)

    def finish(self, state: str) -> None:
        self._file.execute("update runs set state = ? where id = ?", (state, self._run))
        self._file.close()
