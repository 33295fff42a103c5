"""What preparing data would write, found without writing: its parts, its size, and whether its folder is free for it.

Invariants:
- A plan follows from the source and the options alone; only a few records are read for it.
- Nothing that another command has made is written over: a folder with other data, or of other options, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardway.data.chat import ChatTemplate, open_template
from shardway.data.content import DataPath, data_error, fingerprint
from shardway.data.documents import AUTO, DocumentMaker, choose_field
from shardway.data.formats.base import Records
from shardway.data.formats.shard_file import SHARD_BYTES
from shardway.data.formats.shard_manifest import MANIFEST, read_manifest
from shardway.data.splitting import RecordBytes
from shardway.data.tokenizers import BYTES, Tokenizer, open_tokenizer
from shardway.errors import UserError
from shardway.rundir.file_io import list_names, write_json
from shardway.units import render_bytes

PREPARE_VERSION = 1

LEAST_SHARD_BYTES, MOST_SHARD_BYTES = 64 * 10**6, 256 * 2**20
"""Between these a shard is read well on any file system; where all data are smaller than one, any size goes."""

WORK_FOLDER = ".preparing"
"""Holds the plan, what is known of finished shards, and unfinished ones; removed at the end."""

_SAMPLED_RECORDS = 64
_SAMPLED_BYTES = 16 * 2**20
"""A plan reads so many records, evenly spread, and about so many bytes at most to estimate what will be written."""


@dataclass(frozen=True)
class PrepareOptions:
    """How data are prepared.

    `tokenizer`: "bytes", a file or a folder with one; "" keeps the records as they are. `field`: the one with the
    document. `seq_len`, `pack`: kept with the data. `shard_bytes`: about how large a shard gets. `end`: whether the
    tokenizer's end of document stands behind each text (conversations end as their template has it, and tokens are
    taken as they are).
    """

    tokenizer: str = ""
    field: str = AUTO
    seq_len: int | None = None
    pack: bool = False
    chat_template: str = "chatml"
    shard_bytes: int = SHARD_BYTES
    end: bool = True


@dataclass(frozen=True)
class PreparePlan:
    """What `run_prepare` does.

    `kind`: what the shards hold. `parts`: records [first, after the last) of each shard; `weights`: bytes of the source
    in each. `maker`: makes documents; None for records. `described`: what the manifest says beside its shards.
    `finished`: whether `out` holds all of it already; `out_key` names it in messages.
    """

    records: Records
    place: DataPath
    out: Path
    out_key: str
    kind: Literal["tokens", "records"]
    described: Mapping[str, Any]
    parts: tuple[tuple[int, int], ...] = ()
    weights: tuple[int, ...] = ()
    estimated_bytes: int = 0
    maker: DocumentMaker | None = None
    finished: bool = False

    @property
    def samples(self) -> int:
        """How many records or documents there are."""
        return len(self.records)

    @property
    def files(self) -> int:
        """How many files are written in the end: the shards and the manifest."""
        return len(self.parts) + 1

    def error(self, what: str, allowed: str = "", remedy: str = "") -> UserError:
        """The error for the folder that is written."""
        return data_error(self.out_key, f'"{self.out}" {what}', allowed, remedy)


# --- planning


def plan_prepare(
    records: Records, place: DataPath, out: Path, options: PrepareOptions, out_key: str = "OUT"
) -> PreparePlan:
    """Look at records and find what preparing them writes to the folder `out`; nothing is written.

    A few records are read to estimate the size. Raises UserError for records without documents, options that do not
    fit, or a folder that holds something else.
    """
    if not len(records):
        raise place.error("holds no samples")
    tokenizer, template, described = describe_preparation(records, place, options)
    plan = PreparePlan(records, place, out, out_key, "tokens" if tokenizer else "records", described)
    if (made := read_finished(plan)) is not None:
        return replace(plan, parts=((0, 0),) * len(made), estimated_bytes=sum(made), finished=True)
    if tokenizer is not None:
        plan = _choose_documents(plan, options, tokenizer, template)
    places = RecordBytes(records)
    sampled, highest = _sample(plan, places)
    if plan.maker is not None and plan.maker.vocab is None:
        narrow, wide = find_dtype(highest + 1), np.dtype(plan.maker.dtype).itemsize
        plan = replace(plan, maker=replace(plan.maker, dtype=narrow))
        sampled *= np.dtype(narrow).itemsize / wide
    estimated = max(1, round(sampled))
    size = options.shard_bytes
    if size < 1 or (estimated >= LEAST_SHARD_BYTES and not LEAST_SHARD_BYTES <= size <= MOST_SHARD_BYTES):
        raise UserError(
            f"--shard-size: {render_bytes(size)} is no good size of a shard\n"
            f"  allowed: {render_bytes(LEAST_SHARD_BYTES)} to {render_bytes(MOST_SHARD_BYTES)}"
        )
    parts = places.split(min(max(1, round(estimated / size)), len(records)))
    weights = tuple(round(places.start(stop) - places.start(start)) for start, stop in parts)
    return _check_started(replace(plan, parts=parts, weights=weights, estimated_bytes=estimated))


def describe_preparation(
    records: Records, place: DataPath, options: PrepareOptions
) -> tuple[Tokenizer | None, ChatTemplate | None, dict[str, Any]]:
    """The tokenizer and the template that options name, and what a manifest says of a preparation; "key" in it follows
    from the source and the options, without reading a record. Raises UserError as `plan_prepare` does."""
    tokenizer = open_tokenizer(options.tokenizer) if options.tokenizer else None
    if tokenizer is None and (options.pack or options.seq_len or options.field != AUTO):
        name = "--pack" if options.pack else "--seq-len" if options.seq_len else "--field"
        raise UserError(f"{name} is for tokens; records stay as they are\n  To do: name a tokenizer with --tokenizer.")
    if options.seq_len is not None and options.seq_len < 1:
        raise UserError(f"--seq-len: {options.seq_len} is no length\n  allowed: 1 and above")
    template = None if tokenizer is None else open_template(options.chat_template, tokenizer)
    made_with = {
        "tokenizer": None if tokenizer is None else tokenizer.describe(),
        "chat_template": None if template is None else {"name": template.name, "fingerprint": template.fingerprint},
        "end": tokenizer.end if tokenizer is not None and options.end else None,
        **{name: getattr(options, name) for name in ("field", "seq_len", "pack", "shard_bytes")},
    }
    source = {"format": records.format, "path": place.text, "samples": len(records), "fingerprint": records.fingerprint}
    key = fingerprint(PREPARE_VERSION, records.fingerprint, json.dumps(made_with, sort_keys=True))
    return tokenizer, template, {"key": key, "source": source, "options": made_with, **made_with}


def find_dtype(vocab: int) -> str:
    """The smallest unsigned type that holds every token below `vocab`."""
    return "uint8" if vocab <= 2**8 else "uint16" if vocab <= 2**16 else "uint32"


def _choose_documents(
    plan: PreparePlan, options: PrepareOptions, tokenizer: Tokenizer, template: ChatTemplate | None
) -> PreparePlan:
    """The plan with what makes its documents. Tokens of a source say nothing of their vocabulary: then it is None."""
    found = choose_field(plan.records, options.field, plan.place)
    vocab = None if found.sort == "tokens" and options.tokenizer == BYTES else tokenizer.vocab
    dtype = find_dtype(2**32 if vocab is None else vocab)
    maker = DocumentMaker(plan.records, plan.place, found, options.tokenizer, template, options.end, dtype, vocab)
    described = {**plan.described, "field": found.name, "sort": found.sort}
    if found.sort != "text":
        described["end"] = None
    if found.sort != "conversation":
        described["chat_template"] = None
    return replace(plan, maker=maker, described=described)


def _sample(plan: PreparePlan, places: RecordBytes) -> tuple[float, int]:
    """The bytes that will be written, judged by a few records evenly spread, and the largest token of these."""
    records, maker = plan.records, plan.maker
    written, size, highest = 0.0, 0.0, 0
    for number in np.unique(np.linspace(0, len(records) - 1, _SAMPLED_RECORDS).astype(np.int64)).tolist():
        if maker is None:
            written += sum(8 + _measure(value) for value in records.read([number])[0].values())
        else:
            tokens, most = maker.estimate(number)
            marks = maker.field.sort == "conversation"
            written, highest = written + 8 + tokens * (np.dtype(maker.dtype).itemsize + marks), max(highest, most)
        size += places.size(number)
        if max(written, size) > _SAMPLED_BYTES:
            break
    return written / max(size, 1.0) * places.total, highest


def _measure(value: Any) -> int:
    """About the bytes of a value in a shard."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(len(str(name)) + _measure(each) for name, each in value.items())
    return sum(map(_measure, value)) if isinstance(value, list | tuple) else 8


# --- what stands in the folder that is written


def read_finished(plan: PreparePlan) -> list[int] | None:
    """The sizes of the shards if `out` is finished, None if it is not there yet, empty or unfinished.

    Raises UserError if it holds anything else.
    """
    if not plan.out.exists():
        return None
    if not plan.out.is_dir():
        raise plan.error("is not a folder", remedy="choose another name")
    if (plan.out / MANIFEST).is_file():
        manifest = read_manifest(DataPath(plan.out_key, str(plan.out)))
        if manifest.described.get("key") == plan.described["key"]:
            return [shard.bytes for shard in manifest.shards]
        differs = _name_difference(manifest.described, plan.described)
        raise plan.error(f"holds other prepared data (not of the same {differs})", remedy="choose another folder")
    names = list_names(plan.out)
    if names and WORK_FOLDER not in names:
        raise plan.error(f"holds other files, such as {sorted(names)[0]}", remedy="choose another folder")
    return None


def _check_started(plan: PreparePlan) -> PreparePlan:
    """The plan as it was begun in `out`, if it was. Raises UserError if something else was begun there."""
    try:
        begun = json.loads((work_folder(plan) / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return plan
    same = begun["described"]["key"] == plan.described["key"]
    if not same or begun["files"] != sum_files(plan.records) or begun["version"] != PREPARE_VERSION:
        differs = "source" if same else _name_difference(begun["described"], plan.described)
        raise plan.error(
            f"was begun with another {differs} and is unfinished",
            remedy=f"choose another folder, or remove that one: rm -r {plan.out}",
        )
    maker = plan.maker and replace(plan.maker, dtype=begun["dtype"])
    parts = tuple((first, stop) for first, stop in begun["parts"])
    return replace(plan, maker=maker, parts=parts, weights=tuple(begun["weights"]))


def _name_difference(made: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What sets two preparations apart."""
    if made.get("source", {}).get("fingerprint") != wanted["source"]["fingerprint"]:
        return "source"
    words = {"chat_template": "chat template", "seq_len": "--seq-len", "shard_bytes": "--shard-size"}
    before = made.get("options", {})
    different = [name for name, value in wanted["options"].items() if before.get(name) != value]
    return words.get(different[0], different[0]) if different else "version of Shardway"


def work_folder(plan: PreparePlan) -> Path:
    """Where a plan keeps what is unfinished."""
    return plan.out / WORK_FOLDER


def sum_files(records: Records) -> str:
    """What shows that no file of the source has changed since."""
    return fingerprint(*(part for file in records.parts.files for part in (file.name, file.size, file.mtime_ns)))


def write_plan(plan: PreparePlan) -> None:
    """Keep a plan in its folder for work, for the command that goes on after a kill. Raises OSError."""
    content = {
        "version": PREPARE_VERSION,
        "files": sum_files(plan.records),
        "described": plan.described,
        "parts": plan.parts,
        "weights": plan.weights,
        "dtype": plan.maker.dtype if plan.maker else "",
    }
    write_json(work_folder(plan) / "plan.json", content)
