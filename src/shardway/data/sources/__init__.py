"""Sources: numbered samples of one kind each, read as whole batches.

Invariant: sample i of a source is the same at every call, in every process. Sources use numpy only and do not depend on
the order or the rank in which their samples are used.
"""
