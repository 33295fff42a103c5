"""How tensors lie in files: one file a rank with nothing but bytes, and one table that says what is where.

Invariant: no file holds code: bytes of numbers, and JSON. What is read is compared with its seal while it is read.
This room must not know what a run is, nor which checkpoint is meant.
"""
