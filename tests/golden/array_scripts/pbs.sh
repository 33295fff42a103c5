#!/bin/bash
# Written by Shardway 0.2.0 for test: 3 jobs as one array
# the run, its attempt, and what makes it unique
#PBS -N my.0001.abc123
# the account that is charged, and where the job waits
#PBS -P proj1
#PBS -q gpu
# nodes, and what is wanted of each
#PBS -l select=2:ncpus=32:mpiprocs=1:ngpus=4:mem=491520mb
#PBS -l place=scatter:excl
# wall-time of this attempt
#PBS -l walltime=02:00:00
# the shell of this script, whatever the login shell is
#PBS -S /bin/bash
# what it prints, at once and not when it has ended
#PBS -j oe
#PBS -k oed
#PBS -o /dev/null
# the numbers of the runs in `jobs`, and how many at once
#PBS -J 0-2%2

# --- which run this task is
# the job script of each run
jobs=(
  /scratch/alice/runs/my/000/attempts/0001/job.sh
  /scratch/alice/runs/my/001/attempts/0001/job.sh
  /scratch/alice/runs/my/002/attempts/0001/job.sh
)
# that of this task
job=${jobs[$PBS_ARRAY_INDEX]}
here=${job%/*}
# a task that is started again has nothing to do where it had ended
[ ! -e "$here/result.json" ] || exit 0

# --- the job
exec bash "$job" "${@:3}" >> "$here/log/job.out" 2>&1  # from here on it is the job of its run
