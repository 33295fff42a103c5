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
