#: begin: what PBS says of this job, which does not know its own wall-time; PBS's commands need not be on the PATH
begin() {
  local node
  local -A seen=()
  if [ -r "${PBS_CONF_FILE:-/etc/pbs.conf}" ]; then
    PBS_EXEC=$(sed -n 's/^PBS_EXEC=//p' "${PBS_CONF_FILE:-/etc/pbs.conf}")
    PATH=$PATH:$PBS_EXEC/bin
  fi
  job=$PBS_JOBID
  nodes=()
  while IFS= read -r node || [ -n "$node" ]; do
    [ -z "$node" ] || [ -n "${seen[$node]-}" ] || nodes+=("$node")
    [ -z "$node" ] || seen[$node]=yes
  done < "$PBS_NODEFILE"
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
    *) echo unknown ;;
  esac
}

#: submit_as_program SCRIPT OPTION...: PBS would type a script into a login shell, which signals end before the ranks have saved
submit_as_program() {
  local script=$1 words
  shift
  mapfile -t words < <(sed -n 's/^#PBS //p' "$script" | xargs printf '%s\n')
  qsub "$@" "${words[@]}" -- /bin/bash -l "$script"
}

#: submit_after SCRIPT: to start when this job has ended, however it ends; prints the job id
submit_after() {
  local id before=$job
  [[ $job != *\[* ]] || before=${job%%\[*}[]${job#*\]} # nothing may depend on one task of an array, but on all of them
  id=$(drop_variables "${of_ranks[@]}" "${of_jobs[@]}" && submit_as_program "$1" -W "depend=afterany:$before" 2>&1) ||
    { say "qsub: $id" >&2; return 1; }
  echo "${id##*$'\n'}"
}

#: cancel_job JOB
cancel_job() { qdel "$1"; }

#: on_node NODE COMMAND...: on a node of $job by ssh, as a part of the job where PBS has pbs_attach there; in a terminal where
# `terminal` is set
on_node() {
  local node=$1 word line=""
  shift
  # shellcheck disable=SC2016 # for the shell of the node
  set -- bash -c 'PBS_EXEC=$(sed -n "s/^PBS_EXEC=//p" "${PBS_CONF_FILE:-/etc/pbs.conf}" 2> /dev/null)
    PATH=$PATH:$PBS_EXEC/bin
    ! command -v pbs_attach > /dev/null || exec pbs_attach -j "$0" "$@"
    exec "$@"' "$job" "$@"
  [ "${node%%.*}" != "$(uname -n | cut -d. -f1)" ] || exec "$@"
  for word; do
    line+=" '${word//\'/\'\\\'\'}'" # as every login shell reads it
  done
  exec ssh ${terminal:+-t} -- "$node" "exec$line"
}

#: on_each_node COMMAND: at once on every node, in this folder, with the variables of `carried`; ends as one of them fails
# PBS hands what it prints to the job's own output, whatever this shell redirects; `prints` names another file. Where the
# site has a hook at execjob_launch (pbs_cgroups), a word arrives as its first line, so that the task is one line of shell
on_each_node() (
  trap '' TERM # the ranks get their own, and this waits until they have left in order
  carry=() starts=() index=0 ended=0
  for name in "${carried[@]}"; do
    [ -z "${!name+set}" ] || carry+=("$name=${!name}")
  done
  for node in "${nodes[@]}"; do
    # secrets are read there again: as words of this command everybody would see them
    printf -v task ' %q' /usr/bin/env "${carry[@]}" NODE="$index" /bin/bash -c "$(declare -f read_secrets)"'
      [ "$3" = - ] || exec >> "$3" 2>&1
      read_secrets "$0" 2> /dev/null; . "$1" && cd "$2" && shift 3 && exec "$@"' \
      "$secrets" "$here/environment.sh" "$PWD" "${prints:--}" "$@"
    pbs_tmrsh "$node" /bin/bash -c "exec$task" &
    starts+=($!) index=$((index + 1))
  done
  while [ "$index" -gt 0 ] && [ "$ended" = 0 ]; do
    wait -n || ended=$?
    index=$((index - 1))
  done
  if [ "$ended" = 127 ]; then # bash 5.2 may report the last ones as missing: each has its own exit code
    ended=0
    for start in "${starts[@]}"; do
      kill -0 "$start" 2>/dev/null || wait "$start" || ended=$?
    done
  fi
  exit "$ended"
)

#: mpirun_on_pbs: the nodes for mpirun, and what starts its daemons there
mpirun_on_pbs() {
  mpirun_options+=(--hostfile "$PBS_NODEFILE")
  ompi_info 2> /dev/null | grep -q 'MCA plm: tm' || remote_shell
}

#: remote_shell: Open MPI without support for PBS starts its daemons through this, all from here, where PBS_NODEFILE is;
# which signals of the job do not end; they are found as here, and it stands where no blank or colon is in its path, at which mpirun would cut it
remote_shell() {
  local agent=${TMPDIR:-$here}/remote_shell
  printf '%s\n' 'host=$1; shift' 'trap "" TERM INT HUP USR1 USR2' 'found=("PATH=$PATH" "LD_LIBRARY_PATH=${LD_LIBRARY_PATH-}")' \
    'exec pbs_tmrsh "$host" /usr/bin/env "${found[@]}" /bin/sh -c "$*"' > "$agent"
  # a daemon that leaves the session of its task is lost where PBS ends the session first: the job would wait for ever
  mpirun_options+=(--mca plm_rsh_agent "bash $agent" --mca plm_rsh_no_tree_spawn 1 --leave-session-attached)
}
