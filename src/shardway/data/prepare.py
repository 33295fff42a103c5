"""Prepares data of any format as shards with checksums: texts and conversations as tokens, or records as they are.

Invariants:
- What is written depends on the source and the options alone, not on processes, cores or the time.
- Part i of the source, consecutive records of about equal bytes, is shard i. A shard that is whole stays after a kill,
  and the same command makes the missing ones; the manifest comes last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath, fingerprint
from shardway.data.documents import TooLarge
from shardway.data.formats.base import DamagedData, Record, Records
from shardway.data.formats.shard_file import SHARD_SUFFIX, read_shard_facts, write_record_shard, write_token_shard
from shardway.data.formats.shard_manifest import write_manifest
from shardway.data.formats.token_store import Tokens
from shardway.data.part_pool import ONE_THREAD, Advance, do_parts, set_variables
from shardway.data.prepare_plan import (
    PrepareOptions,
    PreparePlan,
    describe_preparation,
    find_dtype,
    plan_prepare,
    read_finished,
    sum_files,
    work_folder,
    write_plan,
)
from shardway.errors import JobError, ShardwayError
from shardway.refusals import FULL, find_remedy
from shardway.rundir.file_io import fsync_folder, remove_folder, write_json
from shardway.units import format_bytes

Progress = Callable[[int, int], None]
"""Takes how many bytes of the source are done, and how many there are."""

STALE_S = 3600.0
"""An unfinished shard that was not written to for so long was left by a kill."""

_BATCH_BYTES = 4 * 2**20
_BATCH_RECORDS = 1024
"""Records of about so many bytes, and so many at most, are read at once."""


@dataclass
class _PartFacts:
    """What is known of a finished part: `text_bytes` are those of tokens that count as targets, `counted`."""

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    counted: int = 0
    text_bytes: int = 0
    highest: int = -1

    def add(self, other: _PartFacts) -> None:
        """Take those of another part up."""
        for name in ("documents", "empty", "tokens", "counted", "text_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.highest = max(self.highest, other.highest)


@dataclass(frozen=True)
class _PartWriter:
    """Writes parts of a plan as shards; pickled to processes. `temporary`: the folder for unfinished ones."""

    plan: PreparePlan
    temporary: Path

    def __call__(self, number: int, advance: Advance) -> _PartFacts:
        """Write one shard; nothing is left of an unfinished one. Raises what reading and writing raise."""
        plan, facts = self.plan, _PartFacts()
        name = name_shard(number)
        try:
            if plan.maker is None:
                write_record_shard(self.temporary / name, self._records(number, facts, advance))
            else:
                write_token_shard(self.temporary / name, self._documents(number, facts, advance), plan.maker.dtype)
            # First what is known of it: a shard that has its name is never made again.
            write_json(work_folder(plan) / f"{name}.json", facts.__dict__)
            os.replace(self.temporary / name, plan.out / name)
            fsync_folder(plan.out)
        except OSError as error:
            raise _explain_refusal(plan, error) from error
        return facts

    def _batches(self, number: int, advance: Advance) -> Iterator[range]:
        """The records of a part in groups that are read at once."""
        first, stop = self.plan.parts[number]
        each = self.plan.weights[number] // (stop - first) + 1
        count = min(max(1, _BATCH_BYTES // each), _BATCH_RECORDS)
        for start in range(first, stop, count):
            yield range(start, min(start + count, stop))
            advance((min(start + count, stop) - first) / (stop - first))

    def _records(self, number: int, facts: _PartFacts, advance: Advance) -> Iterator[Record]:
        for batch in self._batches(number, advance):
            with _reading(self.plan.place):
                records = self.plan.records.read(batch)
            facts.documents += len(records)
            yield from records

    def _documents(
        self, number: int, facts: _PartFacts, advance: Advance
    ) -> Iterator[tuple[Tokens, npt.NDArray[np.bool_] | None]]:
        maker = self.plan.maker
        if maker is None:
            return
        for batch in self._batches(number, advance):
            documents = maker.make(batch)
            while True:
                with _reading(self.plan.place):
                    document = next(documents, None)
                if document is None:
                    break
                tokens, counted = document.tokens, document.counted
                facts.documents += 1
                facts.empty += not len(tokens)
                facts.tokens += len(tokens)
                facts.counted += len(tokens) if counted is None else int(counted.sum())
                facts.text_bytes += document.text_bytes
                if maker.vocab is None:
                    facts.highest = max(facts.highest, int(tokens.max(initial=0)))
                yield tokens, counted


def name_shard(number: int) -> str:
    """The file name of a shard."""
    return f"{number:05d}{SHARD_SUFFIX}"


@contextlib.contextmanager
def _reading(place: DataPath) -> Iterator[None]:
    """An OSError in here is one of the source."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{place.text} cannot be read: {error.strerror or error}") from error


def run_prepare(plan: PreparePlan, progress: Progress, processes: int | None = None) -> Path:
    """Write the shards of a plan that are missing, then the manifest; returns the folder.

    Up to `processes` work (None: one a core). One part alone is done in this process, with a thread a core. Raises
    UserError for a record that cannot be prepared or a folder that cannot be written, DamagedData for a source that is
    damaged, JobError if there is no room or a process is killed.
    """
    total = sum(plan.weights)
    if plan.finished:
        progress(total, total)
        return plan.out
    cores = len(os.sched_getaffinity(0))
    while True:
        try:
            facts = _write_parts(plan, progress, processes or cores, cores)
            _finish(plan, facts)
            return plan.out
        except TooLarge as error:
            plan = _widen(plan, error.token)
        except ShardwayError:
            # Another command that prepares the same may have been faster and have removed the folder for work.
            if read_finished(plan) is None:
                raise
            return plan.out


def _write_parts(plan: PreparePlan, progress: Progress, processes: int, cores: int) -> list[_PartFacts]:
    total, work = sum(plan.weights), work_folder(plan)
    temporary = work / uuid.uuid4().hex
    try:
        temporary.mkdir(parents=True)
        _remove_stale(work)
        if not (work / "plan.json").exists():
            write_plan(plan)
    except OSError as error:
        raise _explain_refusal(plan, error) from error
    facts = {number: found for number in range(len(plan.parts)) if (found := _read_part(plan, number)) is not None}
    missing = [number for number in range(len(plan.parts)) if number not in facts]
    _check_room(plan, sum(plan.weights[number] for number in missing) / max(1, total))
    shares = dict.fromkeys(facts, 1.0)

    def advance(number: int, share: float) -> None:
        shares[number] = share
        progress(round(sum(plan.weights[each] * done for each, done in shares.items())), total)

    def finish(number: int, found: _PartFacts) -> None:
        facts[number] = found
        advance(number, 1.0)

    writer = _PartWriter(plan, temporary)
    progress(sum(plan.weights[number] for number in facts), total)
    try:
        if processes == 1 or len(missing) <= 1:
            with set_variables({"TOKENIZERS_PARALLELISM": "true" if processes > 1 else "false"}):
                for number in missing:
                    finish(number, writer(number, lambda share, number=number: advance(number, share)))  # type: ignore[misc]
        else:
            threads = max(1, min(processes, cores) // len(missing))
            environ = {
                **ONE_THREAD,
                "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
                "RAYON_NUM_THREADS": str(threads),
            }
            do_parts(writer, missing, processes, finish, advance, environ)
    finally:
        remove_folder(temporary)
    return [facts[number] for number in range(len(plan.parts))]


def _read_part(plan: PreparePlan, number: int) -> _PartFacts | None:
    """What is known of a part if its shard is whole, by its own footer."""
    name = name_shard(number)
    try:
        facts = _PartFacts(**json.loads((work_folder(plan) / f"{name}.json").read_text(encoding="utf-8")))
        shard = read_shard_facts(plan.out / name)
    except (OSError, ValueError, TypeError, DamagedData):
        return None
    first, stop = plan.parts[number]
    return facts if shard.samples == stop - first and shard.kind == plan.kind else None


def _finish(plan: PreparePlan, facts: Sequence[_PartFacts]) -> None:
    """Write the manifest and remove the folder for work. Raises UserError if nothing in it could be learned."""
    total = _PartFacts()
    for each in facts:
        total.add(each)
    described = dict(plan.described)
    if plan.maker is not None:
        vocab = plan.maker.vocab if plan.maker.vocab is not None else total.highest + 1
        described |= {"vocab": vocab, "empty": total.empty, "counted": total.counted}
        described["text_bytes"] = None if plan.maker.field.sort == "tokens" else total.text_bytes
        if not total.counted:
            what = "no turn of an assistant" if plan.maker.field.sort == "conversation" else "no tokens"
            raise plan.place.error(f'has {what} in the field "{plan.maker.field.name}": nothing can be learned from it')
    try:
        shards = [read_shard_facts(plan.out / name_shard(number)) for number in range(len(facts))]
        write_manifest(plan.out, plan.kind, shards, described)
    except OSError as error:
        raise _explain_refusal(plan, error) from error
    remove_folder(work_folder(plan))


def _widen(plan: PreparePlan, token: int) -> PreparePlan:
    """The plan with a larger type of tokens; what was written with the smaller one is removed."""
    if plan.maker is None:
        return plan
    for number in range(len(plan.parts)):
        with contextlib.suppress(FileNotFoundError):
            (plan.out / name_shard(number)).unlink()
    remove_folder(work_folder(plan))
    return replace(plan, maker=replace(plan.maker, dtype=find_dtype(token + 1)))


def _remove_stale(work: Path) -> None:
    """Remove unfinished shards that a kill has left; those of another command that works now stay."""
    for folder in work.iterdir():
        if folder.is_dir():
            with contextlib.suppress(OSError):
                newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
                if time.time() - newest > STALE_S:
                    remove_folder(folder)


# --- room


def _check_room(plan: PreparePlan, missing: float) -> None:
    """Raise JobError if what is missing will not fit; `missing`: which part of all."""
    needed, files = round(plan.estimated_bytes * missing), len(plan.parts) + 3
    try:
        found = os.statvfs(plan.out)
    except OSError:
        return
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < needed:
        raise _no_room(plan, f"about {format_bytes(needed)} are needed and {format_bytes(free)} are free")
    if found.f_files and found.f_favail < files:
        raise _no_room(plan, f"{files} files are needed and {found.f_favail} more can be made (inodes)")


def _no_room(plan: PreparePlan, why: str) -> JobError:
    remedy = find_remedy(OSError(errno.ENOSPC, ""), f"choose another folder ({plan.out_key})")
    return JobError(f"no space for prepared data in {plan.out}: {why}\n  To do: {remedy}.")


def _explain_refusal(plan: PreparePlan, error: OSError) -> ShardwayError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in FULL:
        remedy = find_remedy(error, f"choose another folder ({plan.out_key})")
        return JobError(
            f"no space for prepared data in {plan.out} ({reason}); finished shards stay\n"
            f"  To do: {remedy}; then run the same command again."
        )
    return plan.error(f"cannot be written: {reason}", remedy=find_remedy(error, "choose another folder"))


# --- documents of a run

FEW_PROCESSES = 4
"""A run prepares with at most so many: its other ranks wait, and their memory and cores are their own."""


def prepare_documents(records: Records, place: DataPath, options: PrepareOptions, cache: Path) -> Path:
    """The folder of token shards of records below a cache folder, prepared now if it is not there.

    Safe for many processes at once: each writes shards of its own and the last rename stands, with equal content.
    Raises what `plan_prepare` and `run_prepare` raise.
    """
    if not len(records):
        raise place.error("holds no samples")
    key = describe_preparation(records, place, options)[2]["key"]
    out = cache / f"documents-{fingerprint(key, records.parts.root.resolve(), sum_files(records))}"
    plan = plan_prepare(records, place, out, options, "data.cache")
    if not plan.finished:
        logging.getLogger("shardway").warning(
            f"preparing {len(records)} documents of {place.text}, about {format_bytes(plan.estimated_bytes)}, in {out}"
        )
    return run_prepare(plan, lambda done, total: None, min(FEW_PROCESSES, len(os.sched_getaffinity(0))))
