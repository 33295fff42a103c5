"""Parallelism as one ordered function over a model.

Invariant: the loss does not depend on the layout: the initial weights are equal, and gradients are the mean over all
samples, whatever the degrees. Data and the training loop are elsewhere.
"""
