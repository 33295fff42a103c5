#!/bin/bash
# Written by Shardway VERSION for test. To submit it by hand: make the folder of --output, sbatch THIS_FILE
# the run, its attempt, and what makes it unique
#SBATCH --job-name=base.0001.a1b2c3
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
#SBATCH --output=/scratch/alice/runs/base/attempts/0001/log/job.out

# --- this run and this attempt
# the run directory
run=/scratch/alice/runs/base
# this attempt, the one that it goes on from (0000: none), and the last
attempt=0001
after=0000
last_attempt=1
# what runs the job, what makes its name unique, its wall-time in seconds
scheduler=slurm
token=a1b2c3
walltime=7200
# whether the program obeys the stop file and says itself how it ended
counts_steps=no
# what starts the container of the ranks
runtime=none
# what it was asked by a signal, and how it ended
asked="" status=0
# names of this script that a person's shell may have had
unset prints clocks loaded CDPATH
here=$run/attempts/$attempt
# what the ranks read and write
export SHARDWAY_ATTEMPT_DIR=$here SHARDWAY_STOP_FILE=$run/stop

# --- what this job does, in order; the functions are below
main() {
  # --- begin
  # what another launch has left, and would place the ranks elsewhere
  drop_variables "${of_ranks[@]}"
  # which job this is, its nodes, when its wall-time ends
  begin
  export SHARDWAY_JOB=$job
  claim
  note_start
  check_stop
  # ranks on no node fail nowhere
  [ ${#nodes[@]} -gt 0 ] || fail 'the nodes of this job are not known: slurm named none'
  # signals become the stop file
  trap 'ask_to_stop deadline the wall-time is about to end' USR2
  trap 'ask_to_stop signal came: SIGTERM, as schedulers send it before they kill' TERM
  trap 'ask_to_stop signal came: SIGINT' INT
  trap 'ask_to_stop signal came: SIGUSR1' USR1
  trap 'ask_to_stop signal came: SIGHUP' HUP

  # --- what the ranks find
  # Python and its packages
  . /project/venv/bin/activate || fail '. /project/venv/bin/activate failed, as the lines before say; see site.venv'
  # threads of a rank
  export OMP_NUM_THREADS=8
  # what a rank prints is seen at once, and not lost with the rank
  export PYTHONUNBUFFERED=1
  # passwords and tokens stand in a file of your own alone
  secrets="$HOME/.config/shardway/secrets.env"
  read_secrets "$secrets"
  # where the ranks meet: rules of this site for the name of a node on the network for computing
  suffix='' resolve=no
  meet
  # the code that was submitted
  cd /scratch/alice/runs/base/attempts/0001/code || fail 'there is no folder to run in'

  # --- run
  # the ranks, and how they ended
  srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 --kill-on-bad-exit=1 bash -c \
    'node=$SLURM_NODEID; addresses=($SHARDWAY_NODES); host=false
    [ $node != 0 ] || host=true
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="\${rank}: "
    exec python3 -m nvidia_resiliency_ext.fault_tolerance.launcher --nnodes=2 --nproc-per-node=4 \
      --rdzv-backend=c10d --rdzv-id="$SHARDWAY_JOB" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
      --rdzv-conf="is_host=$host" --local-addr="${addresses[$node]}" \
      --max-restarts=2 --ft-workload-check-interval=1 \
      --ft-initial-rank-heartbeat-timeout=600 --ft-rank-heartbeat-timeout=45 \
      --log-dir="$SHARDWAY_ATTEMPT_DIR/log/node-$node" --tee=3 "$@"' \
    agent train.py --lr 3e-4 &
  ranks=$!
  wait_for "$ranks"

  # --- end
  # how this attempt ended, and what comes next
  finish
}

