#!/bin/bash
# Written by Shardway VERSION for aspire2a-plus. To submit it by hand: make the folder of -o, qsub THIS_FILE
# Its functions are in lib.sh in the attempt's folder; `shardway submit ... --dry-run --lib` prints it
# the run, its attempt, and what makes it unique
#PBS -N base.0001.a1b2c3
# the account that is charged, and where the job waits
#PBS -P proj1
#PBS -q normal
# nodes, and what is wanted of each
#PBS -l select=2:ncpus=112:mpiprocs=8:ngpus=8:mem=1925120mb:container_engine=enroot
#PBS -l place=scatter
# the container that PBS makes on each node
#PBS -l container_image=/images/torch.sqsh
#PBS -l container_name=base
# wall-time of this attempt
#PBS -l walltime=120:00:00
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
# the token makes its name unique; seconds
last_attempt=1 scheduler=pbs token=a1b2c3 walltime=432000
counts_steps=yes  # whether the program obeys the stop file and says itself how it ended
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
  export OMP_NUM_THREADS=14  # threads of a rank
  export PYTHONUNBUFFERED=1  # what a rank prints is seen at once, and not lost with the rank
  # variables of the site
  export http_proxy="http://10.104.4.124:10104"
  export https_proxy="http://10.104.4.124:10104"
  export no_proxy="localhost,127.0.0.1,10.104.0.0/21"
  read_secrets "$HOME/.config/shardway/secrets.env"  # passwords and tokens, of a file of yours
  meet '' no  # where the ranks meet; the site's suffix of names on the network for computing
  cd /home/alice/code || fail 'there is no folder to run in'  # the code that was submitted

  # --- run
  # variables of the job, for ranks that do not inherit them; no secrets
  declare -p SHARDWAY_ATTEMPT_DIR SHARDWAY_STOP_FILE SHARDWAY_JOB SHARDWAY_NODES MASTER_ADDR MASTER_PORT OMP_NUM_THREADS PYTHONUNBUFFERED SHARDWAY_LENT_CACHE http_proxy https_proxy no_proxy > "$here/environment.sh" 2> /dev/null
  # where this job's containers are, on the node's own disk
  export ENROOT_DATA_PATH="/raid/local/containers/enroot-data/$PBS_JOBID"
  # how long ranks may save after SIGTERM (seconds), and variables that other nodes get
  set_up_mpirun /usr/mpi/gcc/openmpi-4.1.7a1/bin/mpirun 30 PATH LD_LIBRARY_PATH VIRTUAL_ENV \
    CONDA_PREFIX ENROOT_DATA_PATH
  mpirun_on_pbs  # the nodes, and what starts its daemons there
  shield  # what starts the ranks outlives signals, which this scheduler sends to every process
  # the ranks, and how they ended
  /usr/mpi/gcc/openmpi-4.1.7a1/bin/mpirun -n 16 --map-by ppr:8:node:PE=14 --tag-output \
    "${mpirun_options[@]}" enroot start --root --rw \
    --mount /scratch/alice/runs/base:/scratch/alice/runs/base:x-create=auto,rbind \
    --mount /home/alice/code:/home/alice/code:x-create=auto,rbind \
    --mount /etc/hosts:/etc/hosts:x-create=auto,rbind,ro --env OMPI_COMM_WORLD_RANK \
    --env OMPI_COMM_WORLD_SIZE --env OMPI_COMM_WORLD_LOCAL_RANK --env OMPI_COMM_WORLD_LOCAL_SIZE base \
    bash -c 'cd "$0" && exec "$@"' /home/alice/code bash -c '. "$0" && exec "$@"' \
    "$here/environment.sh" python3 -m shardway train /scratch/alice/runs/base/attempts/0001/run.toml \
    --dir /scratch/alice/runs/base &
  ranks=$!
  heed_signals
  in_time 1200 end_without_ranks 1200 "$ranks"  # a job without ranks ends
  in_time 0 end_mpirun 30 "$ranks"  # and one whose ranks have left
  wait_for "$ranks"  # to their end, whatever signals come
  [ -z "$asked" ] || await_ranks 120  # they may still save

  # --- end
  finish  # how this attempt ended, and what comes next
}
main
