#: begin: a job of this machine is a process; it waits for the one that it follows, and is ended at its wall-time
begin() {
  while [ -n "$predecessor" ] && kill -0 "$predecessor" 2>/dev/null; do
    sleep 0.2
  done
  job=$$.$(sed 's/.*) //' "/proc/$$/stat" | cut -d' ' -f20)
  nodes=("$(hostname)")
  started=$(date +%s)
  deadline=$((started + walltime))
  in_time "$walltime" kill -TERM $$
  in_time $((walltime + 30)) kill -KILL -- -$$
}

#: ask_ending JOB: a process leaves no record of how it ended
ask_ending() { echo lost; }

#: submit_after SCRIPT: starts when this job has ended; prints the job id
submit_after() {
  local process
  setsid bash "$1" "$$" > "$(dirname "$1")/log/job.out" 2>&1 < /dev/null &
  process=$!
  sleep 0.2 # until it has a session of its own
  echo "$process.$(sed 's/.*) //' "/proc/$process/stat" | cut -d' ' -f20)"
}

#: cancel_job JOB: with everything that it started
cancel_job() { kill -TERM -- "-${1%%.*}"; }
