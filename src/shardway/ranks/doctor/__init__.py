"""The doctor: checks whether this machine, or the nodes of this job, are fit to train, and names a remedy if not.

Invariant: a check never ends the job, never waits longer than its limit, and never raises. torch is imported only
by a process of its own, so that a login node answers at once and a library that hangs stops no other check. It does
not print; `shardway.cli.doctor` does.
"""
