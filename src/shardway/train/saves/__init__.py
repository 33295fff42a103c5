"""When a run is saved, in the background or not, what a save that failed means, and where a run goes on from.

Invariant: files are written and read by `shardway.checkpoint` alone. This room must not decide when a run ends.
"""
