"""Job scripts, submission, chains and stopping on Slurm, PBS and this machine, with or without containers.

Invariant: nothing here needs torch. This package must not train, nor read the variables of a launcher.
"""
