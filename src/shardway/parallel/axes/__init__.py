"""The axes: how a model is copied, sharded, split, staged, and how each piece talks to the others.

Invariant: an axis changes where numbers are kept and computed, never the sum that they stand for. A module here must
not decide in which order axes are applied (that is `parallel.apply`) or make process groups (that is `parallel.mesh`).
"""
