"""Formats: what lies on disk, one file a format. Each gives numbered records (`base.Records`) or documents of tokens
(`token_store.TokenStore`).

Invariant: a format is read in place and never written to, beside an index of Shardway's own. These modules use numpy
only; the library of a format (pyarrow, h5py, lmdb) is imported when its first file is opened. They must not depend on
what a run does with the records.
"""
