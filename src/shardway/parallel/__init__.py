"""Parallelism as one ordered function over a model.

Invariant: the loss does not depend on the layout: the same weights to start with, gradients that are the mean over
all samples, whatever the degrees. This room must not know where samples come from or when a step happens.
"""
