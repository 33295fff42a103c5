#!/bin/bash
# Written by Shardway VERSION for test. To submit it by hand: make the folder of -o, qsub THIS_FILE
# the run, its attempt, and what makes it unique
#PBS -N base.0001.a1b2c3
# the account that is charged, and where the job waits
#PBS -P proj1
#PBS -q gpu
# nodes, and what is wanted of each
#PBS -l select=2:ncpus=32:mpiprocs=1:ngpus=4:mem=491520mb
#PBS -l place=scatter:excl
# wall-time of this attempt
#PBS -l walltime=02:00:00
# an attempt that loses its nodes ends; the next attempt goes on from the last checkpoint
#PBS -r n
# the shell of this script, whatever the login shell is
#PBS -S /bin/bash
# what it prints, at once and not when it has ended
#PBS -j oe
#PBS -k oed
#PBS -o /scratch/alice/runs/base/attempts/0001/log/job.out

# --- this run and this attempt
# the run directory
run=/scratch/alice/runs/base
# this attempt, the one that it goes on from (0000: none), and the last
attempt=0001
after=0000
last_attempt=1
# what runs the job, what makes its name unique, its wall-time in seconds
scheduler=pbs
token=a1b2c3
walltime=7200
# whether the program obeys the stop file and says itself how it ended
counts_steps=no
# what starts the container of the ranks
runtime=charliecloud
# what it was asked by a signal, and how it ended
asked="" status=0
# names of this script that a person's shell may have had
unset prints clocks loaded CDPATH
here=$run/attempts/$attempt
# what the ranks read and write
export SHARDWAY_ATTEMPT_DIR=$here SHARDWAY_STOP_FILE=$run/stop
# prepared data, where the home in the container ends with it
export SHARDWAY_LENT_CACHE=$run/cache

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
  [ ${#nodes[@]} -gt 0 ] || fail 'the nodes of this job are not known: pbs named none'
  # signals become the stop file
  trap 'ask_to_stop deadline the wall-time is about to end' USR2
  trap 'ask_to_stop signal came: SIGTERM, as schedulers send it before they kill' TERM
  trap 'ask_to_stop signal came: SIGINT' INT
  trap 'ask_to_stop signal came: SIGUSR1' USR1
  trap 'ask_to_stop signal came: SIGHUP' HUP
  # warns this script before the wall-time ends, which the scheduler does not
  in_time $((deadline - started - 600)) tell_script USR2

  # --- what the ranks find
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
  # variables of the job, for ranks that do not inherit them; no secrets
  declare -p SHARDWAY_ATTEMPT_DIR SHARDWAY_STOP_FILE SHARDWAY_JOB SHARDWAY_NODES MASTER_ADDR MASTER_PORT OMP_NUM_THREADS PYTHONUNBUFFERED SHARDWAY_LENT_CACHE > "$here/environment.sh" 2> /dev/null
  # what other nodes need to find programs
  carried=(PATH LD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX ENROOT_DATA_PATH)
  # signals of the scheduler reach every process of this job: what starts the ranks has to outlive them
  trap '' TERM INT USR1 HUP
  # the ranks, and how they ended
  on_each_node ch-run --bind /scratch/alice/runs/base:/scratch/alice/runs/base --bind /data:/data \
    --cd /scratch/alice/runs/base/attempts/0001/code /images/torch.sqfs -- bash -c \
    '. "$0" && exec "$@"' "$here/environment.sh" bash -c \
    'node=$NODE; addresses=($SHARDWAY_NODES); host=false
    [ $node != 0 ] || host=true
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="\${rank}: "
    exec python3 -m torch.distributed.run --nnodes=2 --nproc-per-node=4 \
      --rdzv-backend=c10d --rdzv-id="$SHARDWAY_JOB" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
      --rdzv-conf="is_host=$host" --local-addr="${addresses[$node]}" \
      --log-dir="$SHARDWAY_ATTEMPT_DIR/log/node-$node" --tee=3 "$@"' \
    agent train.py --lr 3e-4 &
  ranks=$!
  trap 'ask_to_stop signal came: SIGTERM, as schedulers send it before they kill' TERM
  trap 'ask_to_stop signal came: SIGINT' INT
  trap 'ask_to_stop signal came: SIGUSR1' USR1
  trap 'ask_to_stop signal came: SIGHUP' HUP
  wait_for "$ranks"

  # --- end
  # how this attempt ended, and what comes next
  finish
}

