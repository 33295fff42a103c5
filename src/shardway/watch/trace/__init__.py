"""What a trace of torch's profiler shows: where a step's time goes, what to change, and whether the capture can be
trusted at all.

Invariants: a trace is read as columns and never as one object an event; nothing here imports torch, prints or writes.
A peak that no source states is "n/a"; a ceiling is an upper bound, and ceilings are never added up.
"""
