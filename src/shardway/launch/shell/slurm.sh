#: begin: what Slurm says of this job; the end of the wall-time as it stands now, or else from what was asked
begin() {
  local end
  job=$SLURM_JOB_ID
  [ -z "${SLURM_ARRAY_TASK_ID-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  export SLURM_EXPORT_ENV=ALL # steps have the variables of this job, whatever --export or SBATCH_EXPORT said to sbatch
  [ -z "${SLURM_MEM_PER_NODE-}" ] || unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU # of a shell of salloc; srun takes one alone
  # of a step in which sbatch was typed: all ranks would be on its cores
  [[ ${SLURM_CPU_BIND-} != *mask_* ]] || unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  started=$(date +%s)
  end=$(squeue --noheader --jobs "$job" --format %e 2>/dev/null)
  case $end in
    [0-9]*T*) deadline=$(date --date "$end" +%s) ;;
    *) deadline=$((started + walltime)) ;;
  esac
}

#: ask_ending JOB [steps]: how a job ended, in our words; a step that ran out of memory does not show in the job's state
ask_ending() {
  local shown state
  shown=$(scontrol --oneliner show job "$1" 2>/dev/null)
  [[ $shown != *" PreemptTime="[0-9]* ]] || { echo preempted; return; } # whatever it made of the time of grace
  state=$(sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p' <<< "$shown")
  [ -n "$state" ] || state=$(sacct --noheader --parsable2 --allocations --jobs "$1" --format State 2>/dev/null | tail -n 1)
  case ${2-}-$state in
    steps-COMPLETED | steps-FAILED)
      ! sacct --noheader --parsable2 --jobs "$1" --format State 2>/dev/null | grep -q '^OUT_OF_ME' || state=OUT_OF_MEMORY
      ;;
  esac
  case $state in
    COMPLETED) echo completed ;;
    CANCELLED*) echo stopped ;;
    PREEMPTED*) echo preempted ;;
    NODE_FAIL* | BOOT_FAIL*) echo node_failure ;;
    TIMEOUT*) echo deadline ;;
    OUT_OF_ME*) echo out_of_memory ;;
    *) echo unknown ;;
  esac
}

#: submit_after SCRIPT: to start when this job has ended, however it ends; prints the job id
submit_after() {
  local id
  id=$(drop_variables "${of_ranks[@]}" "${of_jobs[@]}" '*_VISIBLE_DEVICES' GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK && sbatch --parsable --dependency "afterany:$job" "$1" 2>&1) || { say "sbatch: $id" >&2; return 1; }
  id=${id##*$'\n'}
  echo "${id%%;*}"
}

#: cancel_job JOB
cancel_job() { scancel "$1"; }

#: on_node NODE COMMAND...: on a node of $job, beside what runs there and with all that the job has of it; in a terminal where
# `terminal` is set; `options` are further ones of srun
on_node() {
  local node=$1 shared=()
  shift
  ! srun --help 2> /dev/null | grep -q -e '--overlap' || shared=(--overlap) # before 20.11 steps share without being asked
  exec srun --jobid="$job" --nodelist="$node" --nodes=1 --ntasks=1 --mem=0 "${shared[@]}" ${terminal:+--pty} "${options[@]}" "$@"
}
