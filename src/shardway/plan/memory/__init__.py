"""Bytes on a rank: what is kept from step to step, what a pass keeps for the way back, and what is used in passing.

Invariant: everything that is reported adds up to its total, each item with its reason.
"""
