"""Padding of documents that are grouped by length, beside random batches and the optimum; the time to find the groups.

    python bench/data/grouping.py [--documents 1000000] [--seq-len 2048] [--tokens 16384]

Lengths are log-normal with a mean of about 1000 tokens, as those of web pages. Random batches hold as many documents on
average as groups do, each padded to the longest of its batch. The optimum is the least padding of the same number of
groups, found by trying every end of every group, for the first 1000 documents alone.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from shardway.data.grouping import DocumentGroups, group_documents

FEW = 1000


def pad_at_random(groups: DocumentGroups, drawn: np.random.Generator) -> float:
    """The part of all places that is padding if as many batches are drawn at random."""
    batches = np.array_split(drawn.permutation(groups.pairs), len(groups))
    places = sum(len(batch) * int(batch.max()) for batch in batches if len(batch))
    return 1 - float(groups.pairs.sum()) / places


def find_least(groups: DocumentGroups, tokens: int) -> float:
    """The part of all places that is padding in the best division into as many groups."""
    lengths = np.sort(groups.pairs)[::-1]
    never = 2**60
    least = np.full(len(lengths) + 1, never)
    least[0] = 0
    for _ in range(len(groups)):
        after = np.full(len(lengths) + 1, never)
        for begin in np.flatnonzero(least[:-1] < never).tolist():
            ends = np.arange(begin + 1, min(len(lengths), begin + tokens // int(lengths[begin])) + 1)
            after[ends] = np.minimum(after[ends], least[begin] + (ends - begin) * lengths[begin])
        least = after
    return 1 - float(groups.pairs.sum()) / int(least[-1])


def main() -> None:
    """Print a line of JSON for few documents and one for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384)
    asked = parser.parse_args()
    drawn = np.random.default_rng(0)
    lengths = np.maximum(2, drawn.lognormal(6.2, 1.2, asked.documents).astype(np.int64))
    for count in (min(FEW, asked.documents), asked.documents):
        started = time.process_time()
        groups = group_documents(np.cumsum(lengths[:count]), asked.seq_len, asked.tokens)
        seconds = time.process_time() - started
        found = {
            "documents": count,
            "groups": len(groups),
            "padding_percent": round(100 * groups.padding, 3),
            "random_percent": round(100 * pad_at_random(groups, drawn), 1),
            "cpu_seconds": round(seconds, 3),
        }
        if count <= FEW:
            found["optimum_percent"] = round(100 * find_least(groups, asked.tokens), 3)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
