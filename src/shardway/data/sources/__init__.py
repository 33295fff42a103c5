"""Sources: numbered samples of one kind each, read as whole batches.

Invariant: sample i of a source is the same at every call, in every process. Sources are numpy only; they must
not know in which order or on which rank their samples are used.
"""
