"""Where else the numbers of a run go: trackers by name, fed by rank 0 from the events that it records.

Invariant: a tracker never slows or ends a run. Importing this package imports neither torch nor a tracker's library.
"""
