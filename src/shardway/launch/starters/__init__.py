"""What starts the ranks of a job: torchrun (an agent a node), srun or mpirun (a process a rank)."""
