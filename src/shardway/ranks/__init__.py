"""The ranks of a run: the place of each one, how they start together, how they are watched, how they stop.

Invariant: this package alone reads the variables of launchers (OMPI_*, PMI_*, PALS_*, RANK and related ones); those of
schedulers are read by their classes, which it asks. Other packages get a `Placement`. It does not know models, data or
sharding.
"""
