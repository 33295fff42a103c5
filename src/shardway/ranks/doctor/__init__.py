"""The doctor: looks whether this machine, or the nodes of this job, are fit to train, and says what to do where not.

Invariant: a check never ends the job, never waits longer than its limit, and never raises. torch is imported by a
process of its own alone, so that a login node answers at once and a library that hangs takes no other check along. It
must not print; `shardway.cli.doctor` does.
"""
