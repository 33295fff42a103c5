"""Estimates of a run before it starts, from its layout and shapes alone.

Invariant: pure functions without torch; every formula cites its source and is tested against real runs. This package
reads no files and does not look at the machine.
"""
