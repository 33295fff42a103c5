#!/bin/bash
# Written by Shardway VERSION for test. To submit it by hand: make the folder of -o, qsub THIS_FILE
# Its functions are in lib.sh in the attempt's folder; `shardway submit ... --dry-run --lib` prints it
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
# the run directory, this attempt, and the one that it goes on from (0000: none)
run=/scratch/alice/runs/base
attempt=0001
after=0000
last_attempt=1 scheduler=pbs token=a1b2c3 walltime=7200  # the token makes its name unique; seconds
counts_steps=yes  # whether the program obeys the stop file and says itself how it ended
runtime=none  # what starts the container of the ranks
here=$run/attempts/$attempt  # the folder of this attempt
# what the ranks read and write
export SHARDWAY_ATTEMPT_DIR=$here SHARDWAY_STOP_FILE=$run/stop
[ -r "$here/lib.sh" ] || { echo "shardway: $here/lib.sh is missing, see line 3 of this script" >&2; exit 1; }
. "$here/lib.sh"  # the functions that every job has

# --- what this job does, in order
main() {
  # --- begin
  begin_attempt  # which job this is; one job alone has an attempt
  check_stop  # a person may have asked for a stop while it waited
  check_followed /scratch/runs/my  # the run before it, which has to be finished
  check_nodes  # ranks on no node fail nowhere
  heed_signals  # signals become the stop file
  # warns this script before the wall-time ends
  in_time $((deadline - started - 600)) tell_script USR2

  # --- what the ranks find
  # Python and its packages
  . /project/venv/bin/activate || fail '. /project/venv/bin/activate failed, as the lines before say; see site.venv'
  export OMP_NUM_THREADS=8  # threads of a rank
  export PYTHONUNBUFFERED=1  # what a rank prints is seen at once, and not lost with the rank
  read_secrets "$HOME/.config/shardway/secrets.env"  # passwords and tokens, of a file of yours
  meet '' no  # where the ranks meet; the site's suffix of names on the network for computing
  # the code that was submitted
  cd /scratch/alice/runs/base/attempts/0001/code || fail 'there is no folder to run in'

  # --- run
  # variables of the job, for ranks that do not inherit them; no secrets
  declare -p SHARDWAY_ATTEMPT_DIR SHARDWAY_STOP_FILE SHARDWAY_JOB SHARDWAY_NODES MASTER_ADDR MASTER_PORT OMP_NUM_THREADS PYTHONUNBUFFERED > "$here/environment.sh" 2> /dev/null
  # what other nodes need to find programs
  carried=(PATH LD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX ENROOT_DATA_PATH)
  shield  # what starts the ranks outlives signals, which this scheduler sends to every process
  # the ranks, and how they ended
  on_each_node bash -c 'node=$NODE; addresses=($SHARDWAY_NODES); host=false
    [ $node != 0 ] || host=true
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="\${rank}: "
    trap '\'''\'' USR1 USR2
    exec python3 -m torch.distributed.run --nnodes=2 --nproc-per-node=4 \
      --rdzv-backend=c10d --rdzv-id="$SHARDWAY_JOB" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
      --rdzv-conf="is_host=$host" --local-addr="${addresses[$node]}" \
      --log-dir="$SHARDWAY_ATTEMPT_DIR/log/node-$node" --tee=3 "$@"' \
    agent -m shardway train /scratch/alice/runs/base/attempts/0001/run.toml --dir \
    /scratch/alice/runs/base &
  ranks=$!
  heed_signals
  in_time 1200 end_without_ranks 1200 "$ranks"  # a job without ranks ends
  wait_for "$ranks"  # to their end, whatever signals come
  [ -z "$asked" ] || await_ranks 120  # they may still save

  # --- end
  finish  # how this attempt ended, and what comes next
}
main
