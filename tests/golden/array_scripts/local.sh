#!/bin/bash
# Written by Shardway 0.2.0 for test: 3 jobs as one array
# local my.0001.abc123

# --- which run this task is
# the job script of each run
jobs=(
  /scratch/alice/runs/my/000/attempts/0001/job.sh
  /scratch/alice/runs/my/001/attempts/0001/job.sh
  /scratch/alice/runs/my/002/attempts/0001/job.sh
)
# that of this task
job=${jobs[$1]}
here=${job%/*}
# a task that is started again has nothing to do where it had ended
[ ! -e "$here/result.json" ] || exit 0

# --- the job
# take_slot FOLDER SLOTS: waits until fewer than SLOTS jobs of the array run. The kernel holds the slot for as long as
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
take_slot /scratch/alice/runs/my/arrays/0001 2  # no more of them than this run at once
exec bash "$job" "${@:3}" >> "$here/log/job.out" 2>&1  # from here on it is the job of its run
