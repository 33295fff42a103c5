"""The run file: what is wanted, as data.

Invariant: a user's file is read, never written; every value of the result has its origin. No key is derived from
another here (that is `shardway.resolve`), and torch is not imported.
"""
