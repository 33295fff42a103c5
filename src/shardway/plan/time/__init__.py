"""Seconds of a step: products, operators bound by memory, collectives, pipelines, and overlap.

Invariant: every reported second belongs to one item, and items add up to the step.
"""
