"""The rehearsal: a run is stopped by a deadline on this machine and goes on, before a scheduler does it.

Invariant: everything is written below one scratch folder. This room must not know schedulers.
"""
