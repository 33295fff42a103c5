"""Watching a run: what it did and does, read from its run directory alone.

Invariant: this room reads through `shardway.rundir` and never asks the trainer anything, so that it works on a run
of yesterday, of another machine, or one that was killed. It must not import torch, print, or write.
"""
