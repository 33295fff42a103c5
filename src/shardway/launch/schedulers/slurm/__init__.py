"""Slurm, 22.05 and later."""
