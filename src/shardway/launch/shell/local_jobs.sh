#: look_at JOBS: "JOB runs" or "JOB waits ATTEMPT" of each that is there
look_at() {
  local job words
  for job; do
    [ -n "$(members "$job")" ] || continue
    words=()
    { mapfile -d '' -t words < "/proc/${job%%.*}/cmdline"; } 2>/dev/null
    if [[ ${words[1]-} == */array.sh ]]; then
      echo "$job waits in line"
    elif [ -n "${words[2]-}" ] && [ -n "$(members "${words[2]}")" ]; then
      echo "$job waits $(sed -n 's/^after=//p' "${words[1]}")"
    else
      echo "$job runs"
    fi
  done
}

#: find_jobs NAME: those whose script has this name
find_jobs() {
  local d words process script
  for d in /proc/[0-9]*; do
    words=()
    { mapfile -d '' -t words < "$d/cmdline"; } 2>/dev/null
    case ${words[1]-} in
      */job.sh) script=${words[1]} ;;
      */array.sh) script=${words[3]-} ;; # it waits for its turn
      *) continue ;;
    esac
    grep -qxF -- "# local $1" "$script" 2>/dev/null || continue
    process=${d##*/} # not one of its own subshells, which bear the same words
    [ "$(cut -d')' -f2- "$d/stat" 2>/dev/null | cut -d' ' -f5)" != "$process" ] || echo "$process.$(began "$process")"
  done
}

#: end_jobs SECONDS JOBS: and wait until they are gone; SIGKILL after so many seconds
end_jobs() {
  local grace=$1 job signal=TERM tick processes
  shift
  for ((tick = 0; tick < 5 * (grace + 5); tick++)); do
    mapfile -t processes < <(for job; do members "$job"; done)
    [ "${#processes[@]}" -gt 0 ] || return 0
    [ "$tick" -lt $((5 * grace)) ] || signal=KILL
    case $signal-$tick in TERM-0 | KILL-*) kill -s "$signal" "${processes[@]}" 2>/dev/null ;; esac
    sleep 0.2
  done
  echo "processes that do not end: ${processes[*]}" >&2
  return 1
}

#: warn_jobs JOBS: SIGUSR1 to each of their processes
warn_jobs() {
  local job
  for job; do signal_job USR1 "$job"; done
}

#: start_tasks SCRIPT LOGS BEFORE JOB...: each job of an array as a job of its own, to follow BEFORE; prints their ids
start_tasks() {
  local script=$1 logs=$2 before=$3 index=0 job
  shift 3
  for job; do
    start_words "$logs/task-$index.out" "$script" "$index" "$job" ${before:+"$before"} || return
    index=$((index + 1))
  done
}

#: take_slot FOLDER SLOTS: waits until fewer than SLOTS jobs of the array run. The kernel holds the slot for as long as
# this process or one that it has started is there, so that the next attempt of a chain has it too
take_slot() {
  local number
  exec 8>> "$1/turn"
  flock 8 # one task looks for a slot, the others wait in line
  while true; do
    for ((number = 0; number < $2; number++)); do
      exec 9>> "$1/slot-$number"
      if flock -n 9; then
        exec 8>&-
        return
      fi
    done
    sleep 0.5
  done
}
