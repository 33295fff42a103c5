"""Seconds of a step: products, operators bound by memory, collectives, pipelines, and what hides behind what.

Invariant: every second that is reported belongs to one item, and items add up to the step.
"""
