"""The data room: what is learnt from (`sources`, `open`), which sample comes when (`order`), and the batches
of one rank (`loader`).

Invariant: the samples of a step are a pure function of (seed, position, skips); world size, workers and prefetch do
not appear in it. Only `loader` imports torch, so that bad input is told before any rank starts.
"""
