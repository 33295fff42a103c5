"""Data: the samples (`sources`, `open`), their order (`order`), and the batches of one rank (`loader`).

Invariant: the samples of a step are a pure function of (seed, position, skips); world size, workers and prefetch do
not appear in it. `open` and `sources` do not import torch, so that wrong input is reported before any rank starts.
"""
