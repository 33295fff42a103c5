#: begin: a job of this machine is a process; it waits for the one that it follows, and is ended at its wall-time
begin() {
  while [ -n "$predecessor" ] && [ "$(began "${predecessor%%.*}")" = "${predecessor##*.}" ]; do
    sleep 0.2
  done
  while [ -n "$predecessor" ] && [ -n "$(members "$predecessor")" ]; do # its script was killed, and its ranks were not
    # where it has said how it ended, what it left behind is of no use
    [ ! -e "$run/attempts/$after/result.json" ] || kill_job "$predecessor"
    sleep 1
  done
  job=$$.$(began $$)
  nodes=("$(hostname)")
  started=$(date +%s)
  deadline=$((started + walltime))
  in_time "$walltime" end_time
  in_time $((walltime + 30)) kill_job "$job"
}

#: end_time: the wall-time is over; there is no scheduler that could say so
end_time() {
  ask_to_stop deadline the wall-time is over
  tell_script TERM
}

#: ask_ending JOB: a process leaves no record of how it ended
ask_ending() { echo unknown; }

#: began PROCESS: when, in clock ticks since the machine booted; nothing for one that is gone or a zombie
began() {
  local line fields
  { IFS= read -r -d '' line < "/proc/$1/stat"; } 2>/dev/null
  read -ra fields <<< "${line##*) }"
  [[ ${fields[0]-} != [!ZX] ]] || echo "${fields[19]}"
}

#: members JOB: processes that bear its name, as all do that its ranks start, and those of its session
members() {
  local session=${1%%.*} named is_it="" here=() all=() stat line fields
  named=" $(grep -lzxF "SHARDWAY_JOB=$1" /proc/[0-9]*/environ 2>/dev/null | tr -c 0-9 ' ') "
  [ "$(began "$session")" != "${1##*.}" ] || is_it=yes
  for stat in /proc/[0-9]*/stat; do
    line=""
    { IFS= read -r -d '' line < "$stat"; } 2>/dev/null
    read -ra fields <<< "${line##*) }"
    [[ ${fields[0]-} == [!ZX] ]] || continue
    line=${line%% *}
    [[ " $line ${fields[2]} ${fields[3]} " != *" $session "* ]] || here+=("$line")
    [[ $named == *" $line "* ]] || continue
    all+=("$line") # torchrun gives its ranks sessions of their own
    [[ " ${fields[2]} ${fields[3]} " != *" $session "* ]] || is_it=yes
  done
  # without its script and names in it, a session of this number may be another one by now
  [ -z "$is_it" ] || all+=("${here[@]}")
  [ "${#all[@]}" = 0 ] || printf '%s\n' "${all[@]}" | sort -nu
}

#: start_job SCRIPT BEFORE LOG: to follow the job BEFORE; prints its id
start_job() { start_words "$3" "$1" ${2:+"$2"}; }

#: start_words LOG SCRIPT ARGUMENT...: in a session of its own; prints its id
start_words() {
  local line fields
  # it prints its identity first: a job that ends at once has run all the same
  line=$(setsid bash -c 'IFS= read -r -d "" line < /proc/$$/stat; printf %s "$line" >&3
    unset SHARDWAY_JOB; exec bash "$@" 3>&-' start "${@:2}" 3>&1 > "$1" 2>&1 < /dev/null &)
  read -ra fields <<< "${line##*) }"
  [ -n "$line" ] && echo "${line%% *}.${fields[19]}"
}

#: on_node NODE COMMAND...: there is one
on_node() { exec "${@:2}"; }

#: submit_after SCRIPT: starts when this job has ended; prints the job id
submit_after() (
  drop_variables "${of_ranks[@]}" "${of_jobs[@]}"
  start_job "$1" "$job" "$(dirname "$1")/log/job.out"
)

#: cancel_job JOB: with everything that it started
cancel_job() { signal_job TERM "$1"; }

#: kill_job JOB: where it may not go on for a moment longer
kill_job() { signal_job KILL "$1"; }

#: signal_job SIGNAL JOB: to each of its processes; one that has just ended by itself is no failure
signal_job() {
  local processes
  mapfile -t processes < <(members "$2")
  [ "${#processes[@]}" = 0 ] || kill -s "$1" "${processes[@]}" 2>/dev/null || true
}
