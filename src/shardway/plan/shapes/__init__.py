"""Architectures as numbers, and their sources: named models, config.json, run files, traces.

Invariant: nothing here depends on a layout, a machine or a number format.
"""
