"""Runs that were submitted: found again, read, judged, shown and ended.

Invariant: what is reported of a run comes from its directory and its scheduler. This room must not submit.
"""
