#: same PATH PATH: whether two files, or two links, say the same; a time that is the same to the nanosecond is enough
same() {
  if [ -L "$1" ] || [ -L "$2" ]; then
    [ -L "$1" ] && [ -L "$2" ] && [ "$(readlink "$1")" = "$(readlink "$2")" ]
  elif [ -f "$1" ] && [ -f "$2" ]; then
    { [ ! "$1" -nt "$2" ] && [ ! "$1" -ot "$2" ]; } || cmp -s "$1" "$2"
  else
    return 1
  fi
}

#: give_way PATH: something in the working folder, to the folder `replaced` of the attempt; nothing of it is lost
give_way() {
  local place=$here/replaced/$1
  mkdir -p "${place%/*}" && mv -T "$work/$1" "$place" && replaced+=("$1")
}

#: refresh_work CODE: the working folder of the run lasts over attempts, and so does what the program wrote there; of the
# code that was submitted comes what has changed since the last time. Nothing is written through a link.
refresh_work() {
  local code=$1 work=$run/work base="" path number replaced=() put=()
  [ -d "$code" ] || return 1
  number=$(cat "$run/attempts/in_work" 2>/dev/null)
  [ -z "$number" ] || base=$run/attempts/$number/code
  if [ ! -e "$work" ]; then
    rm -rf "$run/attempts/work.new"
    cp -a "$code" "$run/attempts/work.new" && mv -T "$run/attempts/work.new" "$work" || return 1
  elif [ "$base" != "$code" ]; then
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
      mkdir -p "$work/$path" || return 1
    done < <(find "$code" -mindepth 1 -type d -printf '%P\0')
    while IFS= read -r -d '' path; do
      if same "$base/$path" "$code/$path" || same "$code/$path" "$work/$path"; then
        continue # nothing new: whatever the program made of it, or that it is gone, holds
      elif [ -L "$code/$path" ] && [ "$(readlink "$code/$path")" = "$run" ]; then
        continue # this run, in the person's folder: it would hold itself
      elif [ -e "$work/$path" ] || [ -L "$work/$path" ]; then
        if ! same "$base/$path" "$work/$path"; then
          [ ! -L "$code/$path" ] || continue # a link to data is no code: what the program wrote in its place stays
          give_way "$path" || return 1
        fi
      fi
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
