"""Rank 0's hold of a run directory: from the look at what is there, over the moment when the run goes on, to its end.

Invariant: until `begin`, nothing of an earlier run has changed: what the hold itself has written (a lease, a new
folder) is taken back where the run is refused. From `begin` on the directory is this run's. This module must not know
models or data.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardway.checkpoint.load import peek_latest
from shardway.checkpoint.retention import remove_leftovers
from shardway.rundir.directory import OWN_NAMES, RunDir
from shardway.rundir.lock import WriterLock
from shardway.rundir.look import list_missing, list_names
from shardway.rundir.refusal import refusals
from shardway.rundir.run_id import ensure_run_id, find_run_id


@dataclass
class DirectoryHold:
    """One process's right to write a run directory.

    `starts_over`: an earlier run is here that `begin` sets aside. `run_id` is the id of the run, also before it is
    written; `before` what it computed with so far (`resolve.request.read_before`). `made` are folders that were made
    made here, innermost first.
    """

    directory: RunDir
    lock: WriterLock
    starts_over: bool
    run_id: str = ""
    before: Mapping[str, Any] = field(default_factory=dict)
    made: tuple[Path, ...] = ()
    fenced: list[tuple[Path, Path]] = field(default_factory=list)
    begun: bool = False

    def begin(self, write: Callable[[RunDir], None]) -> RunDir:
        """The run goes on: set an earlier one aside where it starts over, and `write` what was asked for.

        Returns the directory, by the right that is held from now on. Raises JobError, UserError, Fenced.
        """
        self.directory.confirm_writer()
        if self.starts_over:
            self.lock.withdraw()
            self.directory.set_aside()
            self.directory.create()
            self.lock.acquire()
            self.directory = replace(self.directory, tenure=self.lock.lease)
        self.begun = True
        self.directory.create()
        self.lock.prune()
        remove_leftovers(self.directory)
        ensure_run_id(self.directory.path, self.run_id)
        with refusals(self.directory.path):
            write(self.directory)
        return self.directory

    def end(self) -> None:
        """Give the right back; what was written before `begin` goes, unless a script has put files of its own here."""
        if not self.begun and self._holds_strangers():
            with contextlib.suppress(Exception):  # it is a run directory from now on, so that the next start takes it
                self.directory.create()
            self.begun = True
        if self.begun:
            self.lock.release()
            return
        self.directory.unfence_saves(self.fenced)
        self.lock.withdraw()
        for folder in self.made:
            with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
                folder.rmdir()

    def _holds_strangers(self) -> bool:
        """Whether a directory that was no run before holds what this run did not make."""
        with contextlib.suppress(Exception):
            return not self.directory.exists() and bool(set(list_names(self.directory.path)) - OWN_NAMES)
        return False


def take_directory(directory: RunDir, job: str, *, fresh: bool) -> DirectoryHold:
    """Take the right to write a directory, made where it is missing, and see that what is there can be continued.

    Raises UserError where another run holds it, and where it is not a run's or of a newer format; JobError where no
    checkpoint can be read.
    """
    directory.check_no_strangers()
    existed = directory.exists()
    if existed:
        directory.check_format()
    made = list_missing(directory.path)
    lock = directory.writer_lock(job)
    hold = DirectoryHold(directory, lock, fresh and existed, made=made)
    try:
        directory.create(empty=not existed)
        lock.acquire(logging.getLogger("shardway").warning)
        hold.directory = replace(directory, tenure=lock.lease)
        hold.fenced = hold.directory.fence_saves()
        hold.run_id = _know_id(hold)
    except BaseException:
        hold.end()
        raise
    return hold


def _know_id(hold: DirectoryHold) -> str:
    """The id of the run: that of the directory, else of its checkpoints, else a new one."""
    if hold.starts_over:
        return uuid.uuid4().hex
    newest = peek_latest(hold.directory)
    known = newest.run if newest is not None else ""
    return find_run_id(hold.directory.path) or known or uuid.uuid4().hex
