"""What starts the ranks of a job: torchrun or our own agent (one a node), srun or mpirun (a process a rank)."""
