"""The ranks of a run: the place of each one, how they start together, how they are watched, how they stop.

Invariant: this is the only package that reads the variables of schedulers and launchers (SLURM_*, PBS_*, OMPI_*, PMI_*,
PALS_*, RANK and related ones); other packages get a `Placement`. It does not know models, data or sharding.
"""
