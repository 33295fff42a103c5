"""The Python door: functions as jobs, and run directories as data frames; see docs/python-jobs.md.

Invariant: it does what the verbs do, by the same rooms; torch is imported by the function that is called, never here.
"""
