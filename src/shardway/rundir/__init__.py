"""The run directory: the record of a run. The only package that contains its file names.

Invariant: a writer appends or writes-then-renames, so that a reader at any moment, and a run killed at any moment,
finds every file whole (except a torn last line of an event file, which readers skip). This package does not depend on
torch, nor on the meaning of events.
"""
