"""What starts the ranks of a job: torchrun, ft_launcher, our own agent (one a node), srun, mpirun (one a rank)."""
