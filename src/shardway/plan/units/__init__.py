"""Models that are known by their units alone (convolutions, perceptrons, whatever was traced): data parallel, priced.

Invariant: the same items, factors and overheads as for transformers; nothing is assumed about what is inside a unit.
"""
