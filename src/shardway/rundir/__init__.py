"""The run directory: what did happen. The only room that knows file names inside it.

Invariant: a writer appends or writes-then-renames, so that a reader at any moment, and a run killed at any moment,
finds every file whole (but for a torn last line of an event file, which readers skip). This room must not know
torch, nor what the events mean.
"""
