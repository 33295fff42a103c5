#: begin: what Flux says of this job, whose script runs in an instance of its own
begin() {
  local left
  job=$(flux job id "$(flux getattr jobid)") # a number: Shardway's records have it so
  read -ra nodes <<< "$(flux hostlist --local --expand)"
  started=$(date +%s)
  left=$(flux --parent job timeleft "$job" 2>/dev/null)
  deadline=$((started + ${left:-$walltime}))
}

#: ask_ending JOB: how a job ended, in our words
ask_ending() {
  case $(flux --parent jobs --no-header --format '{result}' "$1" 2>/dev/null) in
    COMPLETED) echo completed ;;
    CANCELED) echo stopped ;;
    TIMEOUT) echo deadline ;;
    *) echo unknown ;;
  esac
}

#: submit_after SCRIPT: to start when this job has ended, however it ends; prints the job id
submit_after() {
  local id
  id=$(drop_variables "${of_ranks[@]}" "${of_jobs[@]}" && flux --parent batch --dependency="afterany:$job" "$1" 2>&1) ||
    { say "flux batch: $id" >&2; return 1; }
  flux job id "${id##*$'\n'}"
}

#: cancel_job JOB
cancel_job() { flux --parent cancel "$1"; }
