"""Watching a run: its past and present, read from its run directory alone.

Invariant: this package reads through `shardway.rundir` and never contacts the trainer, so that it works on a run of
yesterday, of another machine, or one that was killed. It does not import torch, print or write.
"""
