"""Architectures as numbers, and where they come from: named models, config.json, run files, traces.

Invariant: what is said of an architecture here depends on no layout, no machine and no number format.
"""
