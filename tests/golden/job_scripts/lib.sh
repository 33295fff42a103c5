# shellcheck shell=bash disable=SC2034,SC2154
# The functions of a job script of Shardway, the same for every job. A script sets what is of its run (run, attempt, after,
# last_attempt, scheduler, token, walltime, counts_steps, runtime, here), reads this file, and calls in order: begin_attempt,
# check_chain, check_stop, check_followed, queue_next, check_nodes, heed_signals, read_secrets, meet, enter_work, wait_for, finish.
# The scheduler's own functions are at the end: begin, ask_ending, submit_after, cancel_job.

# what it was asked by a signal, and how it ended
asked="" status=0
# names of these functions that a person's shell may have had
unset prints clocks loaded samples CDPATH

# --- words, and files of one key a line

#: say LINE: with the time
say() { printf '%s shardway: %s\n' "$(date '+%F %T')" "$*"; }

#: field FILE KEY: a value of a JSON file that has one key a line; of a text what it says, also where that ends with a quote
field() {
  sed -n "/^ *\"$2\": /{s///; s/,\$//; s/^\"\(.*\)\"\$/\1/; s/\\\\\([\"\\\\]\)/\1/g; p; q}" "$1" 2>/dev/null || true
}

#: in_json TEXT: as it stands between the quotes of JSON
in_json() { printf '%s' "$1" | tr '\n\t\r' '   ' | tr -d '\000-\037' | sed 's/[\\"]/\\&/g'; }

#: word TEXT: as one word of a command that a person pastes into a shell
word() {
  case $1 in
    *[\ \'\"\$\`\\\&\;\|\<\>\(\)\{\}\*\?\[\]\#\~\!]*|'') printf "'%s'" "${1//\'/\'\\\'\'}" ;;
    *) printf '%s' "$1" ;;
  esac
}

#: whole FILE: standard input becomes the file, complete or not at all
whole() { cat > "$1.$$.tmp" && mv "$1.$$.tmp" "$1" || { rm -f "$1.$$.tmp"; return 1; }; }

#: step_now: of the run, by its newest checkpoint or its last event; the status is written once a second at most
step_now() {
  {
    tail -n 5 "$run/events/rank-00000.jsonl" 2>/dev/null |
      sed -n 's/^{"event": "[a-z_]*", "step": \([0-9]*\),.*/\1/p' | tail -n 1 | grep . || field "$run/status.json" step
    for folder in "$run"/checkpoints/step-*; do echo "${folder##*-}"; done
  } | sed -n 's/^0*\([0-9][0-9]*\)$/\1/p' | sort -n | tail -n 1 | grep . || echo 0
}

# --- variables: what is left of another job, secrets, modules

#: drop_variables PATTERN...: those that mean something for another job or rank; the first pattern that fits decides, "!..." keeps
drop_variables() {
  local name pattern
  for name in $(compgen -e); do
    for pattern in "$@"; do
      # shellcheck disable=SC2254 # it is a pattern
      case $name in
        ${pattern#!})
          [[ $pattern == !* ]] || unset "$name"
          break
          ;;
      esac
    done
  done
}

#: read_secrets FILE: exports its lines NAME=value as they stand: nothing in them is replaced or run, the last of a name
# counts, and quotes around a whole value are not a part of it; sets `secret_names`, and `secret_faults` to the numbers
# of lines that are none, or whose name is a variable that this shell keeps for itself
read_secrets() {
  local line name value there number=0 traced=""
  secrets=$1
  [[ $- != *x* ]] || { traced=yes; set +x; } # a trace would show them
  secret_names=() secret_faults=()
  [ -r "$1" ] || return 0
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1)) line=${line%$'\r'}
    case ${line//[[:blank:]]/} in '' | '#'*) continue ;; esac
    name=${line%%=*} value=${line#*=} there=none
    case $value in \"*\" | \'*\') value=${value:1:${#value}-2} ;; esac
    if [[ $line == *=* && $name =~ ^[[:blank:]]*(export[[:blank:]]+)?([A-Za-z_][A-Za-z0-9_]*)$ ]]; then
      name=${BASH_REMATCH[2]}
      there=$(declare -p "$name" 2> /dev/null) # what it gives to an array it would take for shell
    fi
    if [[ -z $there || $there == "declare -x "* ]]; then
      export "$name=$value"
      secret_names+=("$name")
    else
      secret_faults+=("$number")
      echo "line $number of $1 is not NAME=value with a name of its own, and was passed over" >&2
    fi
  done < "$1"
  [ -z "$traced" ] || set -x
}

#: load_modules [--purge] NAME...: software of the site; sets `loaded` to the variables that came with it, for nodes that
# inherit none. Old `module` commands fail with exit code 0
load_modules() {
  local _name _before # names that no module sets
  command -v module > /dev/null || . /etc/profile
  [ "${1-}" != --purge ] || { module purge; shift; }
  _before=$(compgen -e)
  for _name; do
    module load "$_name" || fail "module load $_name failed, as the lines before say; see site.modules"
  done
  mapfile -t loaded < <(compgen -e | grep -vxF "$_before" | grep -v '^_')
}

# --- an attempt begins

#: begin_attempt: which job this is, its nodes, when its wall-time ends; one job alone has an attempt
begin_attempt() {
  drop_variables "${of_ranks[@]}" # what another launch has left would place the ranks elsewhere
  begin
  export SHARDWAY_JOB=$job
  claim
  note_start
}

#: claim: one job alone runs an attempt, should it have been submitted twice, or by hand when it had been submitted
claim() {
  local owner
  owner=$(field "$here/submission.json" job)
  if [ -z "$owner" ] || [ "${owner%%[!0-9]*}" = "${job%%[!0-9]*}" ]; then
    mkdir -p "$here/log" && ln -s "$job" "$here/claim" 2>/dev/null
    owner=$(readlink "$here/claim")
  fi
  [ -n "$owner" ] || { say "attempt $attempt cannot be claimed: nothing can be written to $here"; exit 1; }
  [ "$owner" != "$job" ] || return 0
  say "this job does nothing: attempt $attempt belongs to job $owner ($(field "$here/result.json" state | grep . || echo "no end yet"))"
  say "to see where the run stands: shardway status $(word "$run"); to go on with it: shardway resume $(word "$run")"
  exit 0
}

#: check_nodes: ranks on no node fail nowhere
check_nodes() { [ ${#nodes[@]} -gt 0 ] || fail "the nodes of this job are not known: $scheduler named none"; }

#: note_submission ATTEMPT JOB AFTER: where it is not Python that submits
note_submission() {
  {
    printf '{\n "format": 1,\n "scheduler": "%s",\n "token": "%s",\n "job": "%s",\n' "$scheduler" "$token" "$2"
    printf ' "host": "%s",\n "after": "%s",\n "submitted": %s\n}\n' "$(hostname)" "$3" "$(date +%s)"
  } | whole "$run/attempts/$1/submission.json"
}

#: note_start: what the ranks and `shardway status` read; times in seconds since 1970
note_start() {
  [ -e "$here/job.sh" ] || cp "$0" "$here/job.sh" # it was submitted by hand
  [ -e "$here/submission.json" ] || note_submission "$attempt" "$job" ""
  {
    printf '{\n "format": 1,\n "job": "%s",\n "host": "%s",\n "nodes": "%s",\n' "$job" "$(hostname)" "${nodes[*]}"
    printf ' "started": %s,\n "deadline": %s\n}\n' "$started" "$deadline"
  } | whole "$here/started.json"
  say "attempt $attempt is job $job on ${nodes[*]}"
}

#: check_stop: a stop may have been requested while the job was queued
check_stop() {
  case $(read_stop) in
    stopped) ;;
    *) rm -f "$run/stop"; return 0 ;; # there is none, or it was meant for the attempt before
  esac
  write_result "$attempt" stopped "a stop was asked for before it began"
  say "nothing to do: a stop was asked for"
  cancel_later stopped
  exit 0
}

# --- stops, signals and clocks

#: read_stop: what the stop file asks for: stopped, if a person asked, or the word of the process that was warned; else nothing
read_stop() {
  [ -e "$run/stop" ] || return 0
  case $(head -n 1 "$run/stop") in
    deadline*) echo deadline ;;
    preempted*) echo preempted ;;
    "signal "*) echo signal ;;
    *) echo stopped ;;
  esac
}

#: ask_to_stop STATE REASON: writes the stop file, which rank 0 looks for between steps; an earlier request of more than a signal stays
ask_to_stop() {
  case $(read_stop)-$1 in # an agent that the same warning reached knows only that a signal came
    -* | signal-deadline) printf '%s\n' "$*" | whole "$run/stop" ;;
  esac
  asked=$(read_stop | grep . || printf '%s' "$1")
}

#: heed_signals: those that ask a job to stop become the stop file
heed_signals() {
  trap 'ask_to_stop deadline the wall-time is about to end' USR2
  trap 'ask_to_stop signal came: SIGTERM, as schedulers send it before they kill' TERM
  trap 'ask_to_stop signal came: SIGINT' INT
  trap 'ask_to_stop signal came: SIGUSR1' USR1
  trap 'ask_to_stop signal came: SIGHUP' HUP
}

#: shield: what is started from now on outlives the signals of a scheduler that reach every process of a job
shield() { trap '' TERM INT USR1 HUP; }

#: in_time SECONDS COMMAND: then, unless this script has ended by that time
in_time() {
  (
    unset SHARDWAY_JOB # a clock is no work: a job of which nothing else is left has ended
    trap '' TERM INT HUP USR1 USR2 # which some schedulers send to every process of a job
    trap 'kill -KILL "$sleeping"; exit' ALRM
    sleep "$1" & sleeping=$!
    wait "$sleeping" && "${@:2}"
  ) > /dev/null 2>&1 &
  clocks+=($!)
  trap 'kill -ALRM "${clocks[@]}" 2>/dev/null' EXIT
}

#: tell_script SIGNAL: to this script, from a clock of it; where the script was killed its number may be another's by now
tell_script() {
  local line="" fields
  { IFS= read -r -d '' line < "/proc/$BASHPID/stat"; } 2>/dev/null
  read -ra fields <<< "${line##*) }"
  [ "${fields[1]-}" != $$ ] || kill -"$1" $$
}

# --- a chain of attempts

#: check_chain: a link of a chain runs only where the attempt before it left work to do
check_chain() {
  local before state cause
  [ "$after" != 0000 ] || return 0
  settle "$after"
  state=$(state_of "$after")
  case $state in
    finished | stopped | not_needed) leave "attempt $after: $state" ;;
  esac
  before=$(printf '%04d' $((10#$after - 1)))
  if cause=$(same_end "$before" "$after"); then
    leave "attempts $before and $after ended alike ($cause at step $(field "$run/attempts/$after/result.json" step))"
  fi
}

#: settle ATTEMPT: writes down how an attempt ended that could not say so itself
settle() {
  local folder=$run/attempts/$1 before state
  [ ! -e "$folder/result.json" ] || return 0
  before=$(field "$folder/started.json" job)
  state=$(ask_ending "$before")
  [ "$state" != completed ] || state=unknown # exit code 0 alone does not say that the work is done
  write_result "$1" "$state" "it ended without a word" null "ended without a word" "$before"
}

#: state_of ATTEMPT: how it ended; one that obeyed a signal was stopped if its job was cancelled, or the cause is unknown;
# a job that left in time when the scheduler wanted its nodes counts as completed there
state_of() {
  local folder=$run/attempts/$1 state
  state=$(field "$folder/result.json" state)
  if [ "$state" = stopped ] && [ "$(field "$folder/result.json" failure)" = signal ]; then
    case $(ask_ending "$(field "$folder/started.json" job)") in
      preempted | completed) state=preempted ;;
      deadline) state=deadline ;;
      node_failure) state=node_failure ;;
    esac
  fi
  printf '%s' "$state"
}

#: cause_of ATTEMPT: its state; where the kernel killed a rank for want of memory, only the scheduler knows that
cause_of() {
  local state
  state=$(state_of "$1")
  case $state in
    crashed | unknown)
      [ "$(ask_ending "$(field "$run/attempts/$1/started.json" job)" steps)" != out_of_memory ] || state=out_of_memory
      ;;
  esac
  printf '%s' "$state"
}

#: say_alike ATTEMPT ATTEMPT KEY...: whether their results say the same there
say_alike() {
  local key
  for key in "${@:3}"; do
    [ "$(field "$run/attempts/$1/result.json" "$key")" = "$(field "$run/attempts/$2/result.json" "$key")" ] || return 1
  done
}

#: same_end ATTEMPT ATTEMPT: prints how both ended, where that was alike, so that a third would as well: at the same step,
# or for want of memory before there was a new checkpoint; which rank the kernel killed may differ
same_end() {
  [ -e "$run/attempts/$1/result.json" ] || return 1
  case $(field "$run/attempts/$2/result.json" state) in
    crashed | unknown | out_of_memory) ;;
    deadline) [ "$counts_steps" = yes ] || return 1 ;;
    *) return 1 ;;
  esac
  if say_alike "$1" "$2" step state failure; then
    cause_of "$2"
    return
  fi
  say_alike "$1" "$2" step || ! has_saved "$2" || return 1
  [ "$(cause_of "$1") $(cause_of "$2")" = "out_of_memory out_of_memory" ] && printf out_of_memory
}

#: has_saved ATTEMPT: whether there is a checkpoint from after its start
has_saved() {
  [ -n "$(find "$run/checkpoints" -maxdepth 1 -name 'step-*' -newer "$run/attempts/$1/started.json" 2>/dev/null)" ]
}

#: queue_next: submits the next attempt, to start when this job has ended; meanwhile it ages in the queue
queue_next() {
  local next folder id
  next=$(printf '%04d' $((10#$attempt + 1)))
  folder=$run/attempts/$next
  if [ $((10#$next)) -gt "$last_attempt" ]; then
    say "attempt $attempt is the last that was asked for"
    return
  fi
  mkdir "$folder" 2>/dev/null || return # it is there: this job was requeued, or submitted by hand
  mkdir "$folder/log"
  cp "$here/lib.sh" "$folder/lib.sh"
  sed -e "/^#/s/\.$attempt\.$token\$/.$next.$token/" -e "/^#/s|/attempts/$attempt/log/job.out\$|/attempts/$next/log/job.out|" \
    -e "s/^attempt=$attempt\$/attempt=$next/" -e "s/^after=$after\$/after=$attempt/" "$here/job.sh" > "$folder/job.sh"
  if id=$(submit_after "$folder/job.sh") && [ -n "$id" ]; then
    note_submission "$next" "$id" "$job"
    say "queued attempt $next as job $id, to follow this one"
  else
    rm -r "$folder"
    say "attempt $next could not be queued from here: \`shardway resume\` queues it when this attempt has ended"
  fi
}

#: leave REASON: ends this job, which has nothing to do
leave() {
  write_result "$attempt" not_needed "$1"
  say "nothing to do: $1"
  cancel_later "$1"
  [ "$(state_of_run "$run")" != finished ] || submit_followers # the job that finished it may have died before it had
  exit 0
}

#: cancel_later REASON: takes the links of the chain after this one out of the queue, up to what a person has resumed
cancel_later() {
  local folder number id
  for folder in "$run"/attempts/[0-9]*/; do
    number=$(basename "$folder")
    [ $((10#$number)) -gt $((10#$attempt)) ] || continue
    [ -n "$(field "$folder/submission.json" after)" ] || break
    id=$(field "$folder/submission.json" job)
    [ -n "$id" ] && cancel_job "$id" || continue
    write_result "$number" not_needed "attempt $attempt: $1" null "" "$id"
    say "took job $id (attempt $number) out of the queue"
  done
}

# --- what follows a run

#: submit_followers: the runs that follow this one, which is finished; the claim `handover` leaves each to one submitter
submit_followers() {
  local entry entries folder id
  mapfile -t entries < <(ls -1 "$run/followers" 2> /dev/null) # a pattern without a match fails where a person's shell has failglob
  for entry in "${entries[@]}"; do
    folder=$(field "$run/followers/$entry" attempt)
    [ -e "$folder/job.sh" ] && [ ! -e "$folder/result.json" ] && [ -z "$(field "$folder/submission.json" job)" ] || continue
    mkdir "$folder/handover" 2> /dev/null || continue
    if id=$(submit_after "$folder/job.sh") && [ -n "$id" ]; then
      sed "s|^ \"job\": \"\"| \"job\": \"$id\"|" "$folder/submission.json" | whole "$folder/submission.json" ||
        say "the id of job $id could not be noted in $folder"
      say "queued what follows, ${folder%/attempts/*}, as job $id"
    else
      rmdir "$folder/handover"
      say "${folder%/attempts/*} follows and could not be queued from here: \`shardway resume $(word "${folder%/attempts/*}")\` queues it"
    fi
  done
}

#: check_followed RUN: what follows a run begins only where that is finished; it may have been queued before it was
check_followed() {
  local state
  [ "$after" = 0000 ] || return 0 # a later link of a chain that has begun
  state=$(state_of_run "$1")
  [ "$state" = finished ] || leave "$1, which it follows, is not finished${state:+: $state}"
}

#: state_of_run RUN: of its newest attempt that had work to do, or of one without attempts; nothing where that has no end yet
state_of_run() {
  local number numbers state found=""
  mapfile -t numbers < <(ls -1 "$1/attempts" 2> /dev/null)
  for number in "${numbers[@]}"; do
    case $number in *[!0-9]*) continue ;; esac
    state=$(field "$1/attempts/$number/result.json" state)
    [ "$state" = not_needed ] || found=${state:-open}
  done
  [ "$found" != open ] || return 0
  printf '%s' "${found:-$(field "$1/status.json" state)}"
}

# --- the code, in the working folder of the run

#: enter_work CODE FOLDER SOURCE: into the working folder; where this script was submitted by hand, into the working tree
enter_work() {
  if [ -d "$1" ]; then
    refresh_work "$1" || fail "the working folder $run/work cannot be written"
    { mkdir -p "$2" && cd "$2"; } || fail 'there is no folder to run in'
    say "the program works in $2: what it writes there stays, and the next attempt finds it"
  elif [ -n "$3" ] && [ ! -e "$here/order.json" ] && cd "$3"; then
    say "no snapshot was made: it runs in $3"
  else
    fail 'there is no folder to run in'
  fi
}

#: refresh_work CODE: the working folder of the run lasts over attempts, and so does what the program wrote there; of the
# code that was submitted comes what has changed since the last time. Nothing is written through a link.
refresh_work() {
  local code=$1 work=$run/work base=$run/attempts/none path number replaced=() kept=() put=()
  local -A size=()
  [ -d "$code" ] || return 1
  number=$(cat "$run/attempts/in_work" 2>/dev/null)
  [ -z "$number" ] || base=$run/attempts/$number/code
  if [ ! -e "$work" ]; then
    rm -rf "$run/attempts/work.new"
    cp -a "$code" "$run/attempts/work.new" && mv -T "$run/attempts/work.new" "$work" || return 1
  elif [ "$base" != "$code" ]; then
    while IFS= read -r -d '' path && IFS= read -r -d '' number; do
      size[$path]=$number
    done < <(find "$code" -type f -printf '%p\0%s\0'; [ ! -d "$base" ] || find "$base" -type f -printf '%p\0%s\0')
    while IFS= read -r -d '' path; do # what was taken out of the code, unless the program has changed it
      [ -e "$code/$path" ] || [ -L "$code/$path" ] || under_link "$path" || ! same "$base/$path" "$work/$path" ||
        rm -f "$work/$path"
    done < <([ ! -d "$base" ] || find "$base" ! -type d -printf '%P\0')
    while IFS= read -r -d '' path; do
      [ -d "$code/$path" ] || under_link "$path" || rmdir "$work/$path" 2>/dev/null
    done < <([ ! -d "$base" ] || find "$base" -mindepth 1 -depth -type d -printf '%P\0')
    while IFS= read -r -d '' path; do # a folder of the code, where there is a file or a link
      if [ -L "$work/$path" ] && same "$base/$path" "$work/$path"; then
        rm -f "$work/$path"
      elif [ -L "$work/$path" ] || { [ -e "$work/$path" ] && [ ! -d "$work/$path" ]; }; then
        give_way "$path" || return 1
      fi
      [ -d "$work/$path" ] || mkdir -p "$work/$path" || return 1
    done < <(find "$code" -mindepth 1 -type d -printf '%P\0')
    while IFS= read -r -d '' path; do
      if untouched "$base/$path" "$work/$path"; then
        ! untouched "$base/$path" "$code/$path" || continue
      else
        # nothing new: whatever the program made of it, or that it is gone, holds
        ! same "$base/$path" "$code/$path" || continue
        if { [ -e "$work/$path" ] || [ -L "$work/$path" ]; } && ! same "$base/$path" "$work/$path"; then
          # an attempt that died had brought it
          [ -L "$work/$path" ] || [ ! -f "$work/$path" ] || ! cmp -s "$code/$path" "$work/$path" || continue
          if [ -L "$code/$path" ] || ! is_code "$path"; then # what the program wrote in its place stays
            kept+=("$path")
            continue
          fi
          give_way "$path" || return 1
        fi
      fi
      # this run itself, in the person's folder: it would hold itself
      [ ! -L "$code/$path" ] || [ "$(readlink "$code/$path")" != "$run" ] || continue
      put+=("$path")
    done < <(find "$code" ! -type d -printf '%P\0')
    if [ "${#put[@]}" -gt 0 ]; then
      printf '%s\0' "${put[@]}" |
        (cd "$code" && xargs -0 cp -a --parents --remove-destination -t "$work" --) || return 1
    fi
  fi
  path=${code%/code}
  printf '%s\n' "${path##*/}" | whole "$run/attempts/in_work"
  [ "${#replaced[@]}" = 0 ] ||
    say "of what the program had changed, ${#replaced[@]} gave way to newer code (${replaced[0]}): see $here/replaced"
  [ "${#kept[@]}" = 0 ] ||
    say "of what the program wrote, ${#kept[@]} stay though you have newer ones (${kept[0]}): yours are in $code"
}

#: untouched PATH PATH: whether two files have one size and one time, to the nanosecond, or two links say the same
untouched() {
  if [ -L "$1" ] || [ -L "$2" ]; then
    [ -L "$1" ] && [ -L "$2" ] && [ "$(readlink "$1")" = "$(readlink "$2")" ]
  else
    [ -f "$1" ] && [ -f "$2" ] && [ "${size[$1]-}" = "${size[$2]-${size[$1]-}}" ] &&
      [ ! "$1" -nt "$2" ] && [ ! "$1" -ot "$2" ]
  fi
}

#: same PATH PATH: whether two files, or two links, say the same
same() { untouched "$1" "$2" || { [ -f "$1" ] && [ ! -L "$1" ] && [ ! -L "$2" ] && cmp -s "$1" "$2"; }; }

#: give_way PATH: something in the working folder, to the folder `replaced` of the attempt; nothing of it is lost
give_way() {
  local place=$here/replaced/$1
  mkdir -p "${place%/*}" && mv -T "$work/$1" "$place" && replaced+=("$1")
}

#: is_code PATH: whether its name says that people write such files, and programs do not
is_code() {
  case ${1##*/} in
    *.py | *.pyi | *.pyx | *.c | *.cc | *.cpp | *.cxx | *.cu | *.cuh | *.h | *.hpp | *.hip | *.rs | *.go | *.js | *.ts) ;;
    *.sh | *.bash | *.toml | *.yaml | *.yml | *.cfg | *.ini | *.conf | *.gin | *.jinja | *.j2 | *.proto | *.sql) ;;
    Makefile | Dockerfile) ;;
    *) return 1 ;;
  esac
}

#: under_link PATH: whether the way to it in the working folder leads through a link, and so out of it
under_link() {
  local folder=$1
  while [[ $folder == */* ]]; do
    folder=${folder%/*}
    [ ! -L "$work/$folder" ] || return 0
  done
  return 1
}

# --- where the ranks meet

#: meet SUFFIX RESOLVE: MASTER_ADDR is the first node as all others name it, which is this one; MASTER_PORT is free there;
# SUFFIX of the short names of nodes on the network for computing, RESOLVE (yes): their numbers
meet() {
  local node found
  suffix=$1 resolve=$2
  SHARDWAY_NODES=
  for node in "${nodes[@]}"; do
    [ "${#nodes[@]}" -gt 1 ] || break
    found=$(address "$node")
    [ -n "$found" ] || say "the address of $node on the network for computing ($node$suffix) is not known"
    SHARDWAY_NODES+=${SHARDWAY_NODES:+ }${found:-$node}
  done
  [ "${#nodes[@]}" -gt 1 ] || SHARDWAY_NODES=127.0.0.1
  MASTER_ADDR=${SHARDWAY_NODES%% *}
  MASTER_PORT=$(free_port)
  export SHARDWAY_NODES MASTER_ADDR MASTER_PORT
}

#: address NODE: its name on the network for computing, or its number there
address() {
  local name=${1%%.*}$suffix found
  [ -n "$suffix" ] || name=$1
  if [ "$resolve" = yes ]; then
    found=$(getent ahostsv4 "$name" | awk 'NR == 1 { print $1 }')
    [[ $found != 127.* ]] || found=$(own_address "$1")
    echo "$found"
  else
    echo "$name"
  fi
}

#: own_address NODE: of this node, which takes its own name for 127.0.1.1: that from which it reaches another one
own_address() {
  local node other way
  for node in "${nodes[@]}"; do
    [ "$node" != "$1" ] || continue
    other=$(getent ahostsv4 "${node%%.*}$suffix" | awk 'NR == 1 { print $1 }')
    way=$(ip -4 route get "${other:-$node}" 2> /dev/null)
    [[ $way == *" src "* ]] || continue
    way=${way##* src }
    echo "${way%% *}"
    return
  done
}

#: free_port: one of this node that follows from the job's id; the next where a program holds it, as the kernel's table says
free_port() {
  local port
  port=$((15000 + $(printf %s "$job" | cksum | cut -d' ' -f1) % 15000))
  for _ in {1..50}; do
    grep -qi "^ *[0-9]*: [0-9A-F]*:$(printf %04X "$port") " /proc/net/tcp /proc/net/tcp6 2> /dev/null || break
    port=$((15000 + (port - 14999) % 15000))
  done
  echo "$port"
}

# --- containers of enroot, which keep their names and their folders apart

# $HOSTNAME may be another node's, whose environment srun handed on, and so may XDG_RUNTIME_DIR be, which PBS does not set
placed='[ -w "${XDG_RUNTIME_DIR:-/run}" ] || export XDG_RUNTIME_DIR=${TMPDIR:-/tmp}/$0
'
# shell of the node on which it runs: words of enroot up to --, the name of the container there, and what follows
named=$placed'words=(); until [ "$1" = -- ]; do words+=("$1"); shift; done
exec "${words[@]}" "$0-$(uname -n)" "${@:2}"'
# before these words: removes containers of earlier jobs that are over; `alive` has the numbers of the jobs that are not
cleared=$placed'job=${0#shardway-} own=${0#shardway-} own=${own%%[!0-9]*}
for name in $([[ " $alive " != *" $own "* ]] || "$1" list); do
  of=${name#shardway-} of=${of%%[!0-9]*}
  [ "$name" = "shardway-$of${job#"$own"}-$(uname -n)" ] && [ "${of:-$own}" -lt "$own" ] || continue
  [[ " $alive " = *" $of "* ]] || "$1" remove --force "$name"
done
'

# --- mpirun

#: set_up_mpirun PROGRAM SECONDS NAME...: its options: how long ranks may save after SIGTERM, and variables by name, so that
# no value appears in the list of processes
set_up_mpirun() {
  local name
  check_mpirun "$1" # which it is, of those that modules and conda bring
  mpirun_options=(--mca odls_base_sigkill_timeout "$2")
  for name in "${@:3}"; do
    [ -z "${!name+set}" ] || mpirun_options+=(-x "$name")
  done
}

#: check_mpirun PROGRAM: ends this job where it is not there, or of another MPI, which does not know the options of Open MPI
check_mpirun() {
  local said remedy="load Open MPI (site.modules), name its path (start.mpirun of the site's profile), or set site.launcher"
  command -v "$1" > /dev/null || fail "there is no $1 on $(uname -n); to do: $remedy"
  said=$("$1" --version 2>&1 < /dev/null | head -n 1)
  case $said in
    *HYDRA* | *Intel*) fail "$(command -v "$1") is not of Open MPI ($said); to do: $remedy" ;;
  esac
}

#: end_mpirun SECONDS PROCESS: that long after the ranks have said how they ended, unless the work is done; mpirun itself
# waits twice as long for ranks that have left, and for ever for a node that is gone
end_mpirun() {
  while [ ! -e "$here/result.json" ]; do
    sleep 2 & sleeping=$!
    wait "$sleeping"
  done
  [ "$(field "$here/result.json" state)" != finished ] || return 0
  sleep "$1" & sleeping=$!
  wait "$sleeping" && grep -qs "^PPid:[[:blank:]]*$$\$" "/proc/$2/status" && kill -KILL "$2" # its number may be another's by now
}

# --- the ranks

#: wait_for PROCESS: to its end, whatever signals this script gets meanwhile; sets `status` to its exit code
wait_for() {
  local again
  wait "$1"
  status=$?
  while kill -0 "$1" 2>/dev/null; do
    wait "$1"
    status=$?
  done
  wait "$1" 2>/dev/null # it may have ended while a signal was answered, which had ended the wait before
  again=$?
  [ "$again" = 127 ] || status=$again
}

#: await_ranks SECONDS: for their word on how they ended; a scheduler may give up what started them while they save
await_ranks() {
  local until=$((SECONDS + $1))
  while [ ! -e "$here/result.json" ] && [ "$SECONDS" -lt "$until" ]; do sleep 0.2; done
}

#: end_without_ranks SECONDS PROCESS: ends what was to start the ranks, where rank 0 has not even begun
end_without_ranks() {
  { [ ! -e "$here/began" ] && kill -0 "$2"; } 2>/dev/null || return 0
  write_result "$attempt" crashed "no rank has begun within $1 s: what starts them (mpirun, srun, ...) hangs, or programs load slowly (run.start_timeout)" null "no rank began"
  kill "$2"
  sleep 10
  kill -KILL "$2"
}

# --- what the hardware does

#: sample_nodes SECONDS PYTHON NODE COMMAND...: every so often, outside of containers; NODE is shell for the number of a
# node there, COMMAND starts words on each node. It begins some seconds later, and no failure of it is one of the job
sample_nodes() {
  if ! timeout 30 "$2" -c 'import shardway.telemetry.sampler' > /dev/null 2>&1; then
    say "what the hardware does is not recorded: $2 has no Shardway on $(uname -n)"
    return 0
  fi
  export SHARDWAY_TELEMETRY=$run/telemetry # a program that would record it itself need not
  in_time 5 sample_each "$@"
  samples=${clocks[-1]}
}

#: sample_each SECONDS PYTHON NODE COMMAND...: until the attempt has a result; where this script is its root, until it is gone
sample_each() {
  local top=0
  [ $# -gt 3 ] || top=$$
  # shellcheck disable=SC2016 # for the shell of a node
  prints=$here/log/telemetry.out "${@:4}" bash -c 'exec "$0" -m shardway.telemetry.sampler node="'"$3"'" "$@"' "$2" \
    into="$run/telemetry" every_s="$1" job="$job" attempt="$((10#$attempt))" top="$top" \
    marker="SHARDWAY_ATTEMPT_DIR=$here" until="$here/result.json" > "$here/log/telemetry.out" 2>&1
}

#: end_sampling: what samples sees the result, and gets a moment to write what it has
end_sampling() {
  local until=$((SECONDS + 5))
  [ -n "${samples-}" ] || return 0
  kill -ALRM "$samples" 2> /dev/null # it may not have begun
  while kill -0 "$samples" 2> /dev/null && [ "$SECONDS" -lt "$until" ]; do sleep 0.2; done
}

# --- an attempt ends

#: finish: says how the attempt ended, unless a rank has, and ends the job
finish() {
  local state why reason unwritten=""
  [ "$status" != 1 ] || status=$(read_root_cause)
  reason="the program ended with exit code $status"
  case ${asked:-$(read_stop)}-$status in
    deadline-* | preempted-*) write_result "$attempt" "${asked:-$(read_stop)}" "asked to stop, $reason" "$status" ;;
    signal-*) write_result "$attempt" stopped "after a signal $reason" "$status" signal ;;
    stopped-*) write_result "$attempt" stopped "asked to stop, $reason" "$status" ;;
    -0) write_result "$attempt" finished "$reason" 0 ;;
    *)
      why=$(why_not_started)
      reason+=${why:+: $why}
      write_result "$attempt" crashed "$reason" "$status" "exit code $status"
      ;;
  esac
  [ "$counts_steps" = yes ] || rm -f "$run/stop" # obeyed; the ranks of a run file take it away themselves
  end_sampling
  state=$(field "$here/result.json" state)
  [ -z "$state" ] || say "attempt $attempt: $state: $(field "$here/result.json" reason)"
  state=${state:-$unwritten}
  case $state in
    finished)
      cancel_later "$state"
      submit_followers
      ;;
    stopped)
      [ "$(field "$here/result.json" failure)" = signal ] || cancel_later "$state"
      say_next
      ;;
    deadline | preempted) say_next ;;
    *)
      say_next
      exit $((status ? status : 1))
      ;;
  esac
  exit 0
}

#: read_root_cause: the exit code of the rank that failed first, as torchrun prints it at its end (its own is 1), else 1;
# 128 + N for a rank that signal N ended, as a shell counts
read_root_cause() {
  local key value at="" first="" own=1
  while IFS=: read -r key value; do
    value=${value# }
    case $key in
      *time*) at=$value ;;
      *exitcode*)
        [[ -z $first || $at < $first ]] || continue
        first=$at own=${value%% *}
        ;;
    esac
  done < <(tail -c 1000000 "$here/log/job.out" 2> /dev/null | tr -d '\000\r' | sed -n '/^Root Cause (first observed failure):$/,/^  exitcode /p')
  [[ $own =~ ^-?[1-9][0-9]?[0-9]?$ ]] || own=1
  echo $((own < 0 ? 128 - own : own))
}

#: fail REASON [create]: ends this job before its ranks have started
fail() {
  local why
  why=$([ -z "${2-}" ] || why_not_started "$2")
  write_result "$attempt" crashed "$1${why:+: $why}" 1 "$1"
  status=1
  finish
}

#: write_result ATTEMPT STATE REASON [EXIT_CODE FAILURE JOB]: unless it is recorded how it ended
write_result() {
  local folder=$run/attempts/$1 step text
  [ ! -e "$folder/result.json" ] || return 0
  step=$(step_now)
  text=$(
    printf '{\n "format": 1,\n "state": "%s",\n "reason": "%s",\n' "$2" "$(in_json "$3")"
    printf ' "step": %s,\n "exit_code": %s,\n "failure": "%s",\n' "$step" "${4:-null}" "$(in_json "${5:-}")"
    printf ' "job": "%s",\n "host": "%s",\n "by": "job script",\n' "${6:-$job}" "$(hostname)"
    printf ' "ended": %s\n}' "$(date +%s)"
  )
  printf '%s\n' "$text" > "$folder/.result.$$" && # a part of it on a full file system would count as the result
    { ln "$folder/.result.$$" "$folder/result.json" || mv -n "$folder/.result.$$" "$folder/result.json"; } 2>/dev/null # refuse where a rank was quicker
  [ -e "$folder/result.json" ] || { unwritten=$2 && say "attempt $1 is $2: $3; this could not be written to $folder"; }
  rm -f "$folder/.result.$$"
}

#: why_not_started [create]: what the beginning of the job's log says of a Python or a container that did not come up, else nothing
why_not_started() {
  local said why=""
  [ ! -e "$here/began" ] || return 0 # what came later is the program's own
  said=$(head -n 2000 "$here/log/job.out" 2>/dev/null | tr -d '\000\r' | sed 's/^[0-9]*: //')
  case $runtime-${1-} in
    pyxis-) why=$(sed -n 's/^\(slurmstepd-[^ ]*:\|\[[^]]*\]\) error: pyxis: *//p' <<< "$said" | grep -v '^child \|^printing \|^\[INFO\]') ;;
    enroot-create) why=$(grep '^\[ERROR\] \|^FATAL ERROR: ' <<< "$said") ;;
    enroot-) why=$(grep '^enroot-[a-z]*: \|^\[ERROR\] No such file or directory: ' <<< "$said") ;;
    apptainer-) why=$(sed -n 's/^FATAL: *//p' <<< "$said") ;;
    charliecloud-) why=$(sed -n 's/^ch-run\[[0-9]*\]: error: //p' <<< "$said") ;;
  esac
  why=$({ grep '^\[ERROR\]\|^--\|^curl: \|^enroot-' <<< "$why" || printf '%s' "$why"; } | sed -n 's/^\[ERROR\] //; 1p')
  if [ -n "$why" ]; then
    echo "$([ "${1-}" = create ] || echo "the container did not start: ")$why"
  elif [ "${1-}" = create ]; then
    sed -n 's/^shardway-[^ ]*: line [0-9]*: \(exec: \(.*\): not found\|\(.*\): No such file or directory\)$/a node has no \2\3 (site.container)/p' <<< "$said" | head -n 1
  elif grep -q '/bin/activate: No such file or directory$' <<< "$said"; then
    echo "it does not see the environment (site.venv, site.mounts)"
  elif grep -q "No module named '\{0,1\}shardway" <<< "$said"; then
    echo "its Python has no shardway (site.image, site.venv)"
  elif grep -q "^[^ ]*python[0-9.]*: .*No module named '\{0,1\}torch" <<< "$said"; then
    echo "its Python has no torch (site.image, site.venv)"
  elif grep -q ': exec: python3: not found$' <<< "$said"; then
    echo "there is no python3 (site.image, site.venv)"
  fi
}

#: say_next: what goes on with the run
say_next() {
  local next folder
  next=$(printf '%04d' $((10#$attempt + 1)))
  folder=$run/attempts/$next
  if [ ! -e "$folder/result.json" ] && [ -n "$(field "$folder/submission.json" job)" ]; then
    say "attempt $next is queued to go on"
  else
    say "to go on: shardway resume $(word "$run")"
  fi
}

# --- variables that mean something for another job or rank (docs/environment.md), and "!...", which stay
of_ranks=( 'RANK' 'WORLD_SIZE' 'LOCAL_RANK' 'LOCAL_WORLD_SIZE' 'LOCAL_SIZE' 'NODE_RANK' 'GROUP_RANK' \
  'GROUP_WORLD_SIZE' 'ROLE_RANK' 'ROLE_NAME' 'ROLE_WORLD_SIZE' 'CROSS_RANK' 'CROSS_SIZE' \
  'MASTER_ADDR' 'MASTER_PORT' 'TORCHELASTIC_*' 'PET_*' 'FT_RANK_MONITOR_IPC_SOCKET' \
  'OMPI_COMM_WORLD_*' 'OMPI_UNIVERSE_SIZE' 'OMPI_APP_CTX_NUM_PROCS' 'OMPI_NUM_APP_CTX' 'OMPI_ARGV' \
  'OMPI_COMMAND' 'OMPI_FILE_LOCATION' 'OMPI_FIRST_RANKS' 'OMPI_MCA_ess*' 'OMPI_MCA_initial_wdir' \
  'OMPI_MCA_orte_ess_*' 'OMPI_MCA_orte_hnp_uri' 'OMPI_MCA_orte_local_daemon_uri' \
  'OMPI_MCA_orte_jobid' 'OMPI_MCA_orte_app_num' 'OMPI_MCA_orte_num_*' 'OMPI_MCA_orte_bound_*' \
  'OMPI_MCA_orte_precondition*' 'OMPI_MCA_orte_launch' 'OMPI_MCA_orte_tmpdir_base' \
  'OMPI_MCA_orte_*_session_dir' 'OMPI_MCA_orte_node_regex' 'OMPI_MCA_plm' 'OMPI_MCA_pmix' \
  'OMPI_MCA_mpi_oversubscribe' 'ORTE_DAEMON_UMASK_VALUE' 'OMPI_MCA_shmem_RUNTIME_QUERY_hint' \
  'OMPI_MCA_num_procs' 'OMPI_MCA_cpu_type' 'OMPI_MCA_PREFIXES' 'OMPI_WORLD_*' 'OMPI_TOOL_NAME' \
  'OMPI_LIBDIR_LOC' 'OMPI_VERSION' 'OPAL_USER_PARAMS_GIVEN' 'PRTE_LAUNCHED' 'PRTE_SHARED_FS' \
  'PMI_RANK' 'PMI_SIZE' 'PMI_FD' 'PMI_ID' 'PMI_PORT' 'PMI_KVS*' 'PMI_SPAWNED' 'PMI_JOBID' \
  'PMI_HOSTNAME' 'PMI_DEBUG' 'MPI_APPNUM' 'MPI_UNIVERSE_SIZE' 'PMI_APPNUM' 'PMI_CONTROL_PORT' \
  'PMI_LOCAL_*' 'PMI_UNIVERSE_SIZE' 'PMI_SHARED_SECRET' 'PMIX_RANK' 'PMIX_NAMESPACE' 'PMIX_SERVER_*' \
  'PMIX_ID' 'PMIX_VERSION' 'PMIX_HOSTNAME' 'PMIX_SYSTEM_TMPDIR' 'PMIX_PARAM_FILE_PASSED' \
  'PMIX_DSTORE_*' 'PMIX_GDS_*' 'PMIX_BFROP*' 'PMIX_PTL_*' 'PMIX_SECURITY_MODE' 'PALS_APID' \
  'PALS_RANKID' 'PALS_NODEID' 'PALS_LOCAL_*' 'PALS_SPOOL_DIR' 'PALS_APINFO' 'PALS_DIR' \
  'HYDRA_BSTRAP_*' 'HYDRA_LAUNCH_TYPE' 'I_MPI_INFO_*' 'I_MPI_HYDRA_UUID' 'I_MPI_PIN_MAPPING' \
  'HYDI_*' 'MPI_LOCALRANKID' 'MPI_LOCALNRANKS' 'MV2_COMM_WORLD_*' 'MPISPAWN_*' 'MPIRUN_RSH*' )
of_jobs=( '!SLURM_CONF' '!SLURM_CONF_SERVER' '!SLURM_CLUSTERS' '!SLURM_JWT' '!SLURM_ROOT' \
  '!SLURM_HOME' '!SLURM_MPI_TYPE' '!PBS_CONF_FILE' '!PBS_DEFAULT' '!PBS_SERVER' '!PBS_EXEC' \
  '!PBS_HOME' '!PBS_AUTH_METHOD' '!PBS_TMPDIR' '!PBS_PRIMARY' '!PBS_SECONDARY' '!PBS_LEAF_NAME' \
  '!PBS_*_SERVICE_PORT' '!PBS_ENCRYPT_METHOD' '!PBS_SUPPORTED_AUTH_METHODS' 'SHARDWAY_AGENT' \
  'SHARDWAY_ATTEMPT_DIR' 'SHARDWAY_STOP_FILE' 'SHARDWAY_JOB' 'SHARDWAY_NODES' 'SHARDWAY_PROGRESS' \
  'SHARDWAY_CPU_MASKS' 'SHARDWAY_GATE' 'SHARDWAY_RELEASED' 'SHARDWAY_LENT_CACHE' \
  'SHARDWAY_TELEMETRY' 'SLURM_*' 'SLURMD_*' 'SRUN_*' '_SLURM_SPANK_OPTION_*' 'SBATCH_*' 'SALLOC_*' \
  'SQUEUE_*' 'SACCT_*' 'SCANCEL_*' 'SINFO_*' 'SCONTROL_*' 'PYXIS_CONTAINER_IMAGE' \
  'PYXIS_CONTAINER_NAME' 'PBS_*' 'QSUB_*' 'NCPUS' 'LSB_*' 'LS_JOBPID' 'LS_SUBCWD' 'LSF_PM_*' 'JSM_*' \
  'FLUX_JOB_*' 'FLUX_TASK_*' 'FLUX_KVS_NAMESPACE' 'FLUX_ENCLOSING_ID' 'FLUX_PMI_*' )
