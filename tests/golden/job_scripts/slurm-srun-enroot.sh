#!/bin/bash
# Written by Shardway VERSION for test. To submit it by hand: make the folder of --output, sbatch THIS_FILE
# Its functions are in lib.sh in the attempt's folder; `shardway submit ... --dry-run --lib` prints it
# the run, its attempt, and what makes it unique
#SBATCH --job-name=base.0001.a1b2c3
# the account that is charged, and where the job waits
#SBATCH --account=proj1
#SBATCH --partition=gpu
# nodes, and what is wanted of each
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
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
#SBATCH --output=/scratch/alice/runs/base/attempts/0001/log/job.out

# --- this run and this attempt
# the run directory, this attempt, and the one that it goes on from (0000: none)
run=/scratch/alice/runs/base
attempt=0001
after=0000
# the token makes its name unique; seconds
last_attempt=1 scheduler=slurm token=a1b2c3 walltime=7200
counts_steps=no  # whether the program obeys the stop file and says itself how it ended
runtime=enroot  # what starts the container of the ranks
here=$run/attempts/$attempt  # the folder of this attempt
export SHARDWAY_ATTEMPT_DIR=$here SHARDWAY_STOP_FILE=$run/stop  # what the ranks read and write
# prepared data, where the home in the container ends with it
export SHARDWAY_LENT_CACHE=$run/cache
[ -r "$here/lib.sh" ] || { echo "shardway: $here/lib.sh is missing, see line 3 of this script" >&2; exit 1; }
. "$here/lib.sh"  # the functions that every job has

# --- what this job does, in order
main() {
  # --- begin
  begin_attempt  # which job this is; one job alone has an attempt
  check_stop  # a person may have asked for a stop while it waited
  check_nodes  # ranks on no node fail nowhere
  heed_signals  # signals become the stop file

  # --- what the ranks find
  export OMP_NUM_THREADS=8  # threads of a rank
  export PYTHONUNBUFFERED=1  # what a rank prints is seen at once, and not lost with the rank
  read_secrets "$HOME/.config/shardway/secrets.env"  # passwords and tokens, of a file of yours
  meet '' no  # where the ranks meet; the site's suffix of names on the network for computing
  # the code that was submitted
  cd /scratch/alice/runs/base/attempts/0001/code || fail 'there is no folder to run in'

  # --- run
  # variables of the job, for ranks that do not inherit them; no secrets
  declare -p SHARDWAY_ATTEMPT_DIR SHARDWAY_STOP_FILE SHARDWAY_JOB SHARDWAY_NODES MASTER_ADDR MASTER_PORT OMP_NUM_THREADS PYTHONUNBUFFERED SHARDWAY_LENT_CACHE > "$here/environment.sh" 2> /dev/null
  # jobs that are not over: containers of others are removed
  alive=$(squeue --all --noheader --user="$(id -un)" --format=%F 2> /dev/null | tr -cs 0-9 ' ')
  # the container of this job, on every node
  srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 --kill-on-bad-exit=1 \
    bash -c "alive='$alive';$cleared$named" "shardway-$SHARDWAY_JOB" enroot create --name -- \
    /images/torch.sqsh || fail 'the container could not be created' create
  # the ranks, and how they ended
  srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=8 --kill-on-bad-exit=1 --label \
    bash -c "$named" "shardway-$SHARDWAY_JOB" enroot start --root --rw \
    --mount /scratch/alice/runs/base:/scratch/alice/runs/base:x-create=auto,rbind \
    --mount /data:/data:x-create=auto,rbind,ro --mount /etc/hosts:/etc/hosts:x-create=auto,rbind,ro \
    --env SLURM_JOB_ID --env SLURM_STEP_ID --env SLURM_PROCID --env SLURM_LOCALID --env SLURM_NODEID \
    --env SLURM_NTASKS --env SLURM_STEP_NUM_TASKS --env SLURM_STEP_TASKS_PER_NODE -- bash -c \
    'cd "$0" && exec "$@"' /scratch/alice/runs/base/attempts/0001/code bash -c '. "$0" && exec "$@"' \
    "$here/environment.sh" bash -c \
    'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank \
    python3 train.py --lr 3e-4 &
  ranks=$!
  wait_for "$ranks"  # to their end, whatever signals come

  # --- end
  # the container is not needed any more
  srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 --kill-on-bad-exit=1 \
    bash -c "$named" "shardway-$SHARDWAY_JOB" enroot remove --force --
  finish  # how this attempt ended, and what comes next
}
main
