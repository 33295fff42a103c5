"""Optimizers by name, on whole, sharded and differently placed parameters in one.

Invariant: a step gives what it would give on one rank, in any layout. Elementwise state is placed as its parameter is
(a plain tensor or a DTensor of the same global shape), so that a checkpoint fits another layout. This room must not
scale, clip or average gradients. Importing it does not import torch: a plan asks its kinds what they keep.
"""
