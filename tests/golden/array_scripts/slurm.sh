#!/bin/bash
# Written by Shardway 0.2.0 for test: 3 jobs as one array
# the run, its attempt, and what makes it unique
#SBATCH --job-name=my.0001.abc123
# the account that is charged, and where the job waits
#SBATCH --account=proj1
#SBATCH --partition=gpu
# nodes, and what is wanted of each
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:4
#SBATCH --mem=491520M
#SBATCH --exclusive
# wall-time of this attempt
#SBATCH --time=0-02:00:00
# warns this script before the wall-time ends
#SBATCH --signal=B:USR2@600
# an attempt that loses its nodes ends; the next attempt goes on from the last checkpoint
#SBATCH --no-requeue
# what it prints
#SBATCH --open-mode=append
#SBATCH --output=/scratch/alice/runs/my/arrays/0001/log/task-%a.out
# the runs, by their numbers in `jobs`, and how many at once
#SBATCH --array=0-2%2

# --- which run this task is
# the job script of each run
jobs=(
  /scratch/alice/runs/my/000/attempts/0001/job.sh
  /scratch/alice/runs/my/001/attempts/0001/job.sh
  /scratch/alice/runs/my/002/attempts/0001/job.sh
)
# that of this task
job=${jobs[$SLURM_ARRAY_TASK_ID]}
here=${job%/*}
# a task that is started again has nothing to do where it had ended
[ ! -e "$here/result.json" ] || exit 0

# --- the job
exec bash "$job" "${@:3}" >> "$here/log/job.out" 2>&1  # from here on it is the job of its run
