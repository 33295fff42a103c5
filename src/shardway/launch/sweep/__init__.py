"""Many runs from one run file: their values, their record, and their submission as arrays of jobs.

Invariant: a sweep is a folder of ordinary runs and a record of what was asked for; nothing that a verb does with one of
its runs needs the record.
"""
