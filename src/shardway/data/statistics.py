"""What the samples of a data set are like: how long, how many twice, how full sequences would be.

Invariant: figures follow from the samples that are looked at alone; those are the same for the same number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from shardway.data.content import DataPath
from shardway.data.formats.base import RECORDS_AT_ONCE, Record, Records
from shardway.data.grouping import group_documents
from shardway.data.packing import pack_documents
from shardway.errors import UserError

TOKEN_FIELDS = ("tokens", "input_ids")


def gather_statistics(
    records: Records, field: str = "", samples: int = 0, seq_len: int = 0, group_tokens: int = 0
) -> dict[str, Any]:
    """Lengths and duplicates of `samples` evenly spread records (0: all), of one field or of all.

    A length is in tokens for a field of tokens, else in bytes; text counts as UTF-8. `seq_len`: how full sequences of
    so many tokens are if each document is padded, and if documents are packed; with `group_tokens`, also if they are
    grouped by length. Raises UserError for a field that is not there, `seq_len` without tokens, or `group_tokens` below
    `seq_len` or without it.
    """
    known = records.fields
    if field and field not in known:
        raise DataPath("--field", field).error("is no field of these records", allowed=", ".join(known))
    tokens = field or next((name for name in TOKEN_FIELDS if name in known), "")
    in_tokens = tokens in TOKEN_FIELDS
    if seq_len and not in_tokens:
        raise UserError(
            "--seq-len is for tokens, and these records have none\n  to do: `shardway data prepare` makes them"
        )
    if group_tokens and not 0 < seq_len <= group_tokens:
        raise UserError(
            f"--group-tokens: {group_tokens} needs --seq-len, the length of a group's longest document\n"
            "  allowed: --seq-len 1 and above, and at least as many --group-tokens"
        )
    count = len(records)
    numbers = np.arange(count) if not samples or samples >= count else np.linspace(0, count - 1, samples).astype(int)
    wanted = [tokens] if tokens else []
    lengths, digests = [], []
    for first in range(0, len(numbers), RECORDS_AT_ONCE):
        for record in records.read(numbers[first : first + RECORDS_AT_ONCE].tolist(), wanted):
            lengths.append(
                _count_tokens(record.get(tokens)) if in_tokens else sum(map(_measure, _values(record, tokens)))
            )
            digests.append(_digest(record))
    found: dict[str, Any] = {"samples": count, "looked_at": len(numbers)}
    if not lengths:
        return found
    counted = np.array(lengths)
    found["unit"] = "tokens" if in_tokens else "bytes"
    found["length"] = {
        "min": int(counted.min()),
        **{f"p{part}": float(np.percentile(counted, part)) for part in (5, 50, 95)},
        "max": int(counted.max()),
        "mean": float(counted.mean()),
        "total": int(counted.sum()),
    }
    found["duplicates"] = len(digests) - len(set(digests))
    if seq_len:
        found["fill"] = {"seq_len": seq_len, **_measure_fill(counted, seq_len, group_tokens)}
    return found


def _measure_fill(lengths: Any, seq_len: int, group_tokens: int) -> dict[str, float]:
    """The part of the places of all sequences that hold a pair of input and target."""
    pairs = np.maximum(lengths - 1, 0)
    total = int(pairs.sum())
    padded = int((-(-pairs // seq_len) * seq_len).sum())
    bins = len(pack_documents(np.cumsum(lengths), seq_len))
    found = {
        "padded": total / padded if padded else 0.0,
        "packed": total / (bins * seq_len) if bins else 0.0,
    }
    if group_tokens:
        groups = group_documents(np.cumsum(lengths), seq_len, group_tokens)
        found["grouped"] = 1 - groups.padding if len(groups) else 0.0
    return found


def _values(record: Record, field: str) -> Sequence[Any]:
    return [value for name, value in record.items() if name == field or not name.startswith("__")]


def _count_tokens(value: Any) -> int:
    return len(value) if isinstance(value, np.ndarray | list | tuple) else 0


def _measure(value: Any) -> int:
    """Bytes of a value; 8 of a number."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(map(_measure, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_measure, value))
    return 0 if value is None else 8


def _digest(record: Record) -> bytes:
    """What two records have in common only if their fields are the same; names that begin with "__" do not count."""
    digest = xxhash.xxh3_128()
    for name, value in sorted(record.items()):
        if not name.startswith("__"):
            digest.update(name.encode() + b"\0")
            digest.update(_bytes_of(value))
    return digest.digest()


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    return json.dumps(value, sort_keys=True, default=lambda each: _bytes_of(each).hex()).encode()
