# shellcheck shell=bash disable=SC2034,SC2154
# Functions of the two scripts behind which a person sits, `shardway shell` and `shardway exec`. They are read after lib.sh, and
# the first two replace its own, which report to the log and the records of an attempt.

#: say LINE: beside what the command prints
say() { printf 'shardway: %s\n' "$*" >&2; }

#: fail REASON: before the command has begun; nothing is recorded, since no attempt ends here
fail() {
  say "$1"
  exit 3
}

#: begin_here: this machine is no job
begin_here() {
  job=$$ SHARDWAY_JOB=$$ # not exported: by that name it would be a part of a job
  nodes=("$(hostname)")
}

#: open_shell WORDS...: bash behind these words; in a terminal with a person's ~/.bashrc, which does not undo what was set
# shellcheck disable=SC2120 # without a container there are none
open_shell() {
  if [ -n "$terminal" ]; then
    ("$@" bash --rcfile "$here/bashrc" -i)
  else
    ("$@" bash)
  fi
  status=$?
}

#: place_rank RANK RANKS_PER_NODE: sets `node` to the one that the rank runs on
place_rank() {
  local place
  read -ra nodes <<< "$(field "$here/started.json" nodes)"
  place=$(($1 / $2))
  [ "$place" -lt "${#nodes[@]}" ] || fail "there is no rank $1: the job has $((${#nodes[@]} * $2)) ranks, 0 to $((${#nodes[@]} * $2 - 1))"
  node=${nodes[$place]}
}

#: find_rank RANK: prints the process of a rank on this node: the oldest Python that has its number, or else the oldest process.
# An agent, and the script of a job, have the number of the node or 0 as Slurm's alone
find_rank() {
  local name process line fields found python
  for name in RANK OMPI_COMM_WORLD_RANK SLURM_PROCID; do
    found=() python=()
    for process in $(grep -lzxF "$name=$1" /proc/[0-9]*/environ 2> /dev/null | tr -c '0-9\n' ' '); do
      grep -qzxF "SHARDWAY_ATTEMPT_DIR=$here" "/proc/$process/environ" 2> /dev/null || continue
      ! grep -qzxF shardway.telemetry.sampler "/proc/$process/cmdline" 2> /dev/null || continue
      line=""
      { IFS= read -r -d '' line < "/proc/$process/stat"; } 2> /dev/null
      read -ra fields <<< "${line##*) }"
      [[ ${fields[0]-} == [!ZX] ]] || continue
      found+=("${fields[19]} $process")
      [[ $(readlink "/proc/$process/exe") != *python* ]] || python+=("${fields[19]} $process")
    done
    [ "${#python[@]}" = 0 ] || found=("${python[@]}")
    [ "${#found[@]}" = 0 ] || break
  done
  printf '%s\n' "${found[@]}" | sort -n | sed -n '1s/.* //p'
}
