"""The ranks of a run: where each one stands, how they start together, how they agree to stop.

Invariant: this is the only package that reads the variables of schedulers and launchers (SLURM_*, PBS_*,
OMPI_*, PMI_*, PALS_*, RANK and its kin); everybody else is handed a `Placement`. It must not know models, data
or sharding.
"""
