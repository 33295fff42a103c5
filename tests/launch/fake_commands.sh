#!/bin/bash
# Commands of clusters, as far as a job script uses them: each notes its words, then does what its namesake does with
# them. Links to this file bear the names. $FAKES is a folder: calls/ takes the words of each call, ranks/ words and
# variables of each rank, and files in it say how a fake behaves:
#   program    shell that a rank runs (its last command's exit code is the rank's)
#   jobs       one line a job: ID STATE, as scontrol and qstat tell it
#   refuse     what sbatch and qsub say, and then fail
#   answers    one line for each call of sbatch: ok, lost (taken, but the answer says otherwise), hang (taken, and no
#              answer), down, account; ok when there are no more lines
#   queue      what was taken, as squeue tells it; end: the ids of a person's jobs, as squeue and qselect tell them
#   silent     squeue and sacct do not answer
#   steps      states of a job and of its steps, as sacct tells them
#   create     shell of `enroot create`; containers: what `enroot list` tells
#   mpirun-version  what mpirun says that it is
#   of-the-job what PBS hands from its tasks to the job's own output, past whoever started them
me=${0##*/}
words=("$me" "$@")
if [ "${words[*]}" = "mpirun --version" ]; then
  cat "$FAKES/mpirun-version" 2> /dev/null || echo "mpirun (Open MPI) 4.1.4"
  exit
fi
call=$(mktemp "$FAKES/calls/$me.XXXXXX")
printf '%s\0' "${words[@]}" > "$call"

state() { sed -n "s/^$1 //p" "$FAKES/jobs" 2>/dev/null | tail -n 1; }
next_job() {
  if [ -e "$FAKES/refuse" ]; then
    cat "$FAKES/refuse" >&2
    exit 1
  fi
  local answer id
  answer=$(head -n 1 "$FAKES/answers" 2>/dev/null)
  [ -z "$answer" ] || sed -i 1d "$FAKES/answers"
  case $answer in
    down) echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)' >&2; exit 1 ;;
    account) echo 'sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified' >&2; exit 1 ;;
  esac
  echo x >> "$FAKES/submitted"
  id=$((100 + $(wc -l < "$FAKES/submitted")))$1
  echo "$id|$id|PENDING|N/A|N/A||Priority|$(sed -n 's/^#SBATCH --job-name=//p' "${words[-1]}")" >> "$FAKES/queue"
  case $answer in
    lost) echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1 ;;
    hang) sleep 60 ;;
  esac
  echo "$id"
}
in_queue() {
  [ ! -e "$FAKES/silent" ] || exit 1
  local name=
  while [ $# -gt 0 ]; do
    [ "$1" != -n ] || name=$2
    shift
  done
  grep -F "|$name" "$FAKES/queue" 2>/dev/null
  exit 0
}
run_rank() {
  local note
  note=$(mktemp -d "$FAKES/ranks/XXXXXX")
  printf '%s\0' "$@" > "$note/words"
  env -0 > "$note/variables"
  pwd > "$note/folder"
  [ ! -e "$FAKES/program" ] || . "$FAKES/program"
}
# Runs "$@" with the variables that are named, or fit a pattern NAME*, and PATH and FAKES; as containers do.
with_variables() {
  local kept=("PATH=$PATH" "FAKES=$FAKES") name each
  while [ "$1" != -- ]; do
    case $1 in
      *'*') for each in $(compgen -e "${1%'*'}"); do kept+=("$each=${!each}"); done ;;
      *) [ -z "${!1+set}" ] || kept+=("$1=${!1}") ;;
    esac
    shift
  done
  shift
  exec env -i "${kept[@]}" "$@"
}
case $me in
  python3)
    if [[ "$1 $2" == "-m torch.distributed.run" || "$1 $2" == "-m nvidia_resiliency_ext.fault_tolerance.launcher" ]]; then
      shift 2
      while [[ ${1-} == --* ]]; do
        if [ "$1" = --no-python ]; then shift; exec rank-program "$@"; fi
        shift
      done
      set -- python3 "$@"
    else
      set -- python3 "$@"
    fi
    run_rank "$@"
    ;;
  rank-program) run_rank "$@" ;;
  srun)
    nodes=1 tasks=1 names=()
    while [[ $1 == --* ]]; do
      case $1 in
        --nodes=*) nodes=${1#*=} ;;
        --ntasks=*) tasks=${1#*=} ;;
        --container-env=*) IFS=, read -ra names <<< "${1#*=}" ;;
      esac
      shift
    done
    ended=0
    for ((task = 0; task < tasks; task++)); do
      export SLURM_PROCID=$task SLURM_NTASKS=$tasks SLURM_NODEID=$((task / (tasks / nodes)))
      export SLURM_LOCALID=$((task % (tasks / nodes)))
      "$@" || ended=$?
    done
    exit "$ended"
    ;;
  mpirun)
    tasks=1
    while [[ $1 == -* ]]; do
      case $1 in
        -n) tasks=$2; shift ;;
        --mca) shift 2 ;;
        --map-by | --hostfile | -x) shift ;;
      esac
      shift
    done
    ended=0
    for ((task = 0; task < tasks; task++)); do
      OMPI_COMM_WORLD_RANK=$task OMPI_COMM_WORLD_SIZE=$tasks OMPI_COMM_WORLD_LOCAL_RANK=$task "$@" || ended=$?
    done
    exit "$ended"
    ;;
  pbs_tmrsh) # with a hook at execjob_launch, as pbs_cgroups has one, PBS hands on of each word its first line, without blanks before it
    shift
    given=()
    for word in "$@"; do
      word=${word%%$'\n'*}
      given+=("${word#"${word%%[! ]*}"}")
    done
    exec env -i PATH="$PATH" FAKES="$FAKES" HOME="$HOME" "${given[@]}" >> "$FAKES/of-the-job" 2>&1
    ;;
  scontrol)
    case $* in
      "show hostnames "*) tr , '\n' <<< "$3" ;;
      "--oneliner show job "*) [ -z "$(state "$4")" ] || echo "JobId=$4 JobName=x JobState=$(state "$4") Reason=None" ;;
    esac
    ;;
  squeue) [ "$1" != -h ] || in_queue "$@"; [ ! -e "$FAKES/end" ] || cat "$FAKES/end" ;;
  sacct)
    [ ! -e "$FAKES/silent" ] || exit 1
    [ ! -e "$FAKES/steps" ] || cat "$FAKES/steps"
    ;;
  qselect) cat "$FAKES/end" 2>/dev/null ;;
  sbatch) next_job "" ;;
  qsub) next_job .server ;;
  qstat) echo "    Exit_status = $(state "${*: -1}")" ;;
  qdel) [ -z "$(state "$1")" ] || { echo "qdel: Job has finished $1" >&2; exit 35; } ;;
  scancel | ompi_info) ;;
  apptainer | singularity)
    [ "$1" = exec ] || exit 64
    shift
    while [[ $1 == --* ]]; do
      case $1 in
        --pwd) cd "$2" || exit 65; shift ;;
        --bind) shift ;;
      esac
      shift
    done
    shift
    exec "$@"
    ;;
  ch-run)
    while [ "$1" != -- ]; do
      [ "$1" != --cd ] || cd "$2" || exit 65
      shift
    done
    shift
    exec "$@"
    ;;
  podman)
    [ "$1 $2" = "run --rm" ] || exit 64
    shift 2
    names=()
    while [[ $1 == --* ]]; do
      case $1 in
        --env) names+=("$2"); shift ;;
        --workdir) cd "$2" || exit 65; shift ;;
        --volume | --device | --group-add) shift ;;
      esac
      shift
    done
    shift
    with_variables "${names[@]}" -- "$@"
    ;;
  enroot)
    case $1 in
      create) [ ! -e "$FAKES/create" ] || . "$FAKES/create"; exit ;;
      list) cat "$FAKES/containers" 2>/dev/null; exit 0 ;;
      remove) exit 0 ;;
      start) shift ;;
      *) exit 64 ;;
    esac
    names=()
    while [[ $1 == --* ]]; do
      case $1 in
        --env) names+=("$2"); shift ;;
        --mount) shift ;;
      esac
      shift
    done
    shift
    with_variables "${names[@]}" -- "$@"
    ;;
esac
