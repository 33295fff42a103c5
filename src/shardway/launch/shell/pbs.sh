#: begin: what PBS says of this job, which does not know its own wall-time; PBS's commands need not be on the PATH
begin() {
  if [ -r "${PBS_CONF_FILE:-/etc/pbs.conf}" ]; then
    PBS_EXEC=$(sed -n 's/^PBS_EXEC=//p' "${PBS_CONF_FILE:-/etc/pbs.conf}")
    PATH=$PATH:$PBS_EXEC/bin
  fi
  job=$PBS_JOBID
  mapfile -t nodes < <(awk '!seen[$0]++' "$PBS_NODEFILE")
  started=$(date +%s)
  deadline=$((started + walltime))
}

#: ask_ending JOB: how a job ended, in our words, by PBS's exit status
ask_ending() {
  case $(qstat -x -f "$1" 2>/dev/null | sed -n 's/^ *Exit_status = //p') in
    0) echo completed ;;
    271) echo stopped ;;
    -20) echo node_failure ;;
    -29) echo deadline ;;
    -27) echo out_of_memory ;;
    *) echo lost ;;
  esac
}

#: submit_after SCRIPT: to start when this job has ended, however it ends; prints the job id
submit_after() {
  local id
  id=$(qsub -W "depend=afterany:$job" "$1" 2>&1) || { say "qsub: $id" >&2; return 1; }
  echo "${id##*$'\n'}"
}

#: cancel_job JOB
cancel_job() { qdel "$1"; }

#: on_each_node COMMAND: at once on every node, in this folder, with the variables of `carried`; ends as one of them fails
on_each_node() (
  trap '' TERM # the ranks get their own, and this waits until they have left in order
  carry=() index=0 ended=0
  for name in "${carried[@]}"; do
    [ -z "${!name+set}" ] || carry+=("$name=${!name}")
  done
  for node in "${nodes[@]}"; do
    # secrets are read there again: as words of this command everybody would see them
    pbs_tmrsh "$node" /usr/bin/env "${carry[@]}" NODE="$index" /bin/bash -c \
      '[ ! -r "$0" ] || { set -a; . "$0"; set +a; }; . "$1" && cd "$2" && shift 2 && exec "$@"' \
      "$secrets" "$here/environment.sh" "$PWD" "$@" &
    index=$((index + 1))
  done
  while [ "$index" -gt 0 ]; do
    wait -n || { ended=$?; break; }
    index=$((index - 1))
  done
  exit "$ended"
)

#: remote_shell: Open MPI without support for PBS starts its daemons through this
remote_shell() {
  printf '%s\n' '#!/bin/bash' 'host=$1; shift' 'exec pbs_tmrsh "$host" /bin/sh -c "$*"' > "$here/remote_shell"
  chmod +x "$here/remote_shell"
}
