#!/bin/bash
# Written by Shardway VERSION for test. To submit it by hand: bash THIS_FILE
# local base.0001.a1b2c3
# output /scratch/alice/runs/base/attempts/0001/log/job.out
# the job that this one follows, if there is one
predecessor=${1:-}

# --- this run and this attempt
# the run directory
run=/scratch/alice/runs/base
# this attempt, the one that it goes on from (0000: none), and the last
attempt=0001
after=0000
last_attempt=1
# what runs the job, what makes its name unique, its wall-time in seconds
scheduler=local
token=a1b2c3
walltime=7200
# whether the program obeys the stop file and says itself how it ended
counts_steps=no
# what starts the container of the ranks
runtime=apptainer
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
  [ ${#nodes[@]} -gt 0 ] || fail 'the nodes of this job are not known: local named none'
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
  # the ranks, and how they ended
  apptainer exec --nv --bind /scratch/alice/runs/base:/scratch/alice/runs/base --bind /data:/data:ro \
    --pwd /scratch/alice/runs/base/attempts/0001/code /images/torch.sif bash -c '. "$0" && exec "$@"' \
    "$here/environment.sh" bash -c 'node=0; addresses=($SHARDWAY_NODES); host=false
    [ $node != 0 ] || host=true
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="\${rank}: "
    exec python3 -m torch.distributed.run --nnodes=1 --nproc-per-node=4 \
      --rdzv-backend=c10d --rdzv-id="$SHARDWAY_JOB" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
      --rdzv-conf="is_host=$host" --local-addr="${addresses[$node]}" \
      --log-dir="$SHARDWAY_ATTEMPT_DIR/log/node-$node" --tee=3 "$@"' \
    agent train.py --lr 3e-4 &
  ranks=$!
  wait_for "$ranks"

  # --- end
  # how this attempt ended, and what comes next
  finish
}

